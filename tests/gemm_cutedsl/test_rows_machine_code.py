"""What the compiler makes of the W8A16 GEMM on tokens as they lie. Needs no GPU."""

from dataclasses import replace

import pytest
from test_sm90_machine_code import STREAM_K, assert_hands_over, check, compiled, count, stream_k

from vllm_rose_plugin.kernels.contracts import TokenFormat
from vllm_rose_plugin.kernels.gemm.choose import choose_config
from vllm_rose_plugin.kernels.gemm.config import GemmConfig, with_stages

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
