"""What the compiler makes of the W8A16 GEMM on tokens as they lie. Needs no GPU."""

import re
from dataclasses import replace

import cutlass.cute as cute
import pytest
import torch
from sm100_host import aligned, launch_of
from sm100_units import Global, TensorMap
from test_sm90_machine_code import STREAM_K, assert_hands_over, check, compiled, count, stream_k

from vllm_rose_plugin.kernels.contracts import TokenFormat
from vllm_rose_plugin.kernels.gemm.choose import choose_config
from vllm_rose_plugin.kernels.gemm.config import GemmConfig, with_stages
from vllm_rose_plugin.kernels.gemm.sm90 import build
from vllm_rose_plugin.kernels.jit.compile import compile_to_artifacts

ROWS = TokenFormat.BF16_ROWS
LAYERS = {"qkv": (9216, 4096), "o_proj of TP4": (4096, 2048), "partial": (1856, 2688)}


def chosen(m: int, layer: str, **how) -> GemmConfig:
    n, k = LAYERS[layer]
    return choose_config(num_groups=1, n=n, k=k, num_rows=m, token_format=ROWS, early_counts=True, **how)


@pytest.mark.parametrize("m", [1, 64, 256, 2048])
@pytest.mark.parametrize("layer", LAYERS)
def test_chosen_configs(layer, m):
    config = chosen(m, layer, bias=layer == "partial", out_dtype="float16" if layer == "partial" else "bfloat16")
    check(config)


@pytest.mark.parametrize(("row_groups", "token_tile"), STREAM_K)
def test_stream_k(row_groups, token_tile):
    config = replace(stream_k(row_groups, token_tile, early_counts=True), token_format=ROWS, out_format=ROWS)
    check(config)
    assert_hands_over(config)


@pytest.mark.parametrize(
    "how",
    [
        dict(row_groups=4, token_tile=64),  # the fewest registers beside the sums
        dict(row_groups=3, token_tile=128, pass_k=256),
        dict(row_groups=2, token_tile=64, cluster=2),
        dict(row_groups=3, token_tile=96, pass_k=256, cluster=4, split_k=True),
        dict(row_groups=1, token_tile=48, blocks_per_sm=3),
    ],
)
def test_configs_of_tuning(how):
    usual = dict(blocks_per_sm=1, cluster=1, split_k=False, stream_k=False)
    check(with_stages(replace(chosen(64, "qkv"), **usual | how)))


def test_the_codes_of_a_word_are_picked_by_one_instruction():
    """Eight words of 64 k of a row, two for each instruction that picks; nothing wider is read of the weights."""
    config = chosen(64, "qkv")
    code, _ = compiled(config)
    permuted, _ = compiled(replace(config, token_format=TokenFormat.BF16_PERMUTED, out_format=ROWS))
    words = 8 * 2 * config.k_tile // 64 * config.stages_per_pass
    narrow = [sum(line.startswith("LDS R") for line in lines) for lines in (code, permuted)]
    wide = [count(lines, "LDS.128") for lines in (code, permuted)]
    assert narrow[0] - narrow[1] == words and wide[1] - wide[0] == words // 8
    assert count(code, "PRMT") - count(permuted, "PRMT") == words // 2


def test_the_tensor_map_of_the_tokens():
    """What the host function makes of them: K columns, nothing beyond, and rows as far apart as they lie."""
    config = chosen(64, "partial")
    n, k = config.n, config.k
    ptx = compile_to_artifacts(family="gemm", config=config, build=build, target="sm_90a").ptx
    sizes = [int(size) for size in re.findall(r"_param_\d+\[(\d+)\]", ptx[: ptx.index("\n{")])]
    function, arguments = build(config)
    compiled_function = cute.compile(function, *arguments, options="--enable-tvm-ffi --gpu-arch sm_90a")
    for rows, pitch in ((1, k), (77, k), (77, k + 8), (2, 2**23)):
        tokens = aligned((rows, pitch), torch.bfloat16)[:, :k]
        given = [
            aligned((1, n, k), torch.uint8),
            aligned((-(-n // 64), -(-k // 128) * 256), torch.uint8),
            tokens,
            aligned((1, 4), torch.float32),
            *(aligned((count,), torch.int32) for count in (2, 1)),
            aligned((4,), torch.float32),
            aligned((rows, n), torch.bfloat16),
            aligned((1, 4), torch.float32),
        ]
        launch = launch_of(compiled_function, [*given, config.grid(132)], sizes)
        maps = [TensorMap(param, Global()) for param in launch.params if len(param) == 128]
        assert [each.address for each in maps] == [tensor.data_ptr() for tensor in given[:3]]
        assert maps[2].sizes == [k, rows] and maps[2].strides[1:] == [2 * pitch]
        assert maps[2].boxes == [64, config.token_tile] and maps[2].swizzle == 3
