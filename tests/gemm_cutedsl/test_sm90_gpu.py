"""Ways to cut the work that the heuristics choose for some shapes only, against float64. Needs an H100 or H200."""

from dataclasses import replace

import pytest
import torch

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor, TokenFormat
from vllm_rose_plugin.kernels.gemm.choose import choose_config
from vllm_rose_plugin.kernels.gemm.config import GemmConfig, with_stages
from vllm_rose_plugin.kernels.gemm.sm90 import build
from vllm_rose_plugin.kernels.gemm.tokens import pack_tokens, unpack_tokens
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.jit.compile import compile
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8

pytestmark = pytest.mark.gpu
MXFP8, BF16 = TokenFormat.MXFP8_FP32_SCALES, TokenFormat.BF16_PERMUTED
N, K, GAP, POISON = 1856, 2688, 3, -7.0


def config_of(token_format: TokenFormat, *, groups: int = 5, n: int = N, k: int = K, **how) -> GemmConfig:
    chosen = choose_config(num_groups=groups, n=n, k=k, num_rows=8 * groups, token_format=token_format)
    usual = dict(row_groups=2, blocks_per_sm=1, in_flight=4, cluster=1, split_k=False)
    return with_stages(replace(chosen, **{**usual, **how}))


def split(blocks: int) -> dict:
    return dict(cluster=blocks, split_k=True)


CONFIGS = {
    "W8A8": config_of(MXFP8, token_tile=8),
    "W8A8, 32 tokens, long pass": config_of(MXFP8, token_tile=32, pass_k=256, in_flight=2),
    "W8A8, K over 2": config_of(MXFP8, token_tile=8, **split(2)),
    "W8A8, K over 4": config_of(MXFP8, token_tile=16, row_groups=1, **split(4)),
    "W8A8, tokens to 2": config_of(MXFP8, token_tile=32, cluster=2),
    "W8A8, 512 groups": config_of(MXFP8, groups=512, n=192, k=96, token_tile=8),
    "W8A16, 3 blocks": config_of(BF16, token_tile=16, row_groups=1, blocks_per_sm=3),
    "W8A16, 256 tokens": config_of(BF16, token_tile=256, k_tile=64, pass_k=256),
    "W8A16, 256 tokens to 2": config_of(BF16, token_tile=256, k_tile=64, pass_k=256, cluster=2),
    "W8A16, K ends in the first stage": config_of(BF16, n=32, k=32, token_tile=256, k_tile=64, pass_k=256),
    **{f"W8A16, {t}, K over 2": config_of(BF16, token_tile=t, **split(2)) for t in (48, 96, 128)},
    **{f"W8A16, {t}, K over 4": config_of(BF16, token_tile=t, **split(4)) for t in (16, 48, 64, 96)},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_against_float64(name):
    config = CONFIGS[name]
    groups, n, k = config.num_groups, config.n, config.k
    generator = torch.Generator().manual_seed(7)
    counts = torch.randint(0, config.token_tile + 2, (groups,), generator=generator)
    counts[0] = counts[groups // 2] = counts[-1] = 0
    counts[1] = 2 * config.token_tile + 5
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), (counts + GAP).cumsum(0)])
    num_rows = int(offsets[-1])

    def random(*shape) -> Mxfp8Tensor:
        codes = (torch.randn(*shape, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        scales = torch.randint(118, 132, (*shape[:-1], k // 32), generator=generator).to(torch.uint8)
        return Mxfp8Tensor(codes.cuda(), scales.cuda())

    weight, x = random(groups, n, k), random(num_rows, k)
    packed = pack_weight(weight, target="sm_90a")
    tokens = pack_tokens(x, token_format=config.token_format)
    unused = torch.zeros(4, 4, device="cuda")
    out = torch.full((num_rows, n), POISON, dtype=torch.bfloat16, device="cuda")
    arguments = (
        packed.codes.view(groups, n, k),
        packed.scales.view(groups * -(-n // 64), -1),
        tokens.data.view(torch.uint8) if config.w8a8 else tokens.data,
        tokens.scales if config.w8a8 else unused,
        offsets.to(torch.int32).cuda(),
        counts.to(torch.int32).cuda(),
        torch.zeros(4, device="cuda"),
        out,
        unused,
        config.grid(torch.cuda.get_device_properties(0).multi_processor_count),
    )
    kernel = compile(family="gemm", config=config, build=build, target="sm_90a")
    kernel(*arguments)
    first = out.clone()
    for _ in range(20):
        kernel(*arguments)
    assert torch.equal(first.view(torch.int16), out.view(torch.int16)), "differs from run to run"

    values = unpack_tokens(tokens).double()
    outside = torch.ones(num_rows, dtype=torch.bool, device="cuda")
    for group, (start, count) in enumerate(zip(offsets.tolist(), counts.tolist(), strict=False)):
        if not count:
            continue
        rows = slice(start, start + count)
        outside[rows] = False
        expected = values[rows] @ dequantize_mxfp8(weight.codes[group], weight.scales[group]).double().t()
        error = (out[rows].double() - expected).norm(dim=1) / expected.norm(dim=1)
        assert error.max() < 5e-3, f"group {group}: {error.max():.1e}"
    assert (out[outside] == POISON).all(), "rows outside the runs were written"
