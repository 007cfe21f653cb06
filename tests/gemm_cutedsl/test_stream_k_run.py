"""The W8A16 kernel's PTX run on the CPU (see ``sm90_machine``): stream-K launch after launch on the same flags."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from sm90_machine import POISON, run

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor, TokenFormat
from vllm_rose_plugin.kernels.gemm.choose import choose_config
from vllm_rose_plugin.kernels.gemm.config import GemmConfig, with_stages
from vllm_rose_plugin.kernels.gemm.sm90 import build
from vllm_rose_plugin.kernels.gemm.tile_order import BAND
from vllm_rose_plugin.kernels.gemm.tokens import pack_tokens, unpack_tokens
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.jit.compile import compile_to_artifacts
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8


def config_of(row_groups: int, token_tile: int, *, n: int, k: int, **how) -> GemmConfig:
    config = choose_config(
        num_groups=1, n=n, k=k, num_rows=token_tile, token_format=TokenFormat.BF16_PERMUTED, early_counts=True
    )
    tile = dict(row_groups=row_groups, token_tile=token_tile, k_tile=128, pass_k=256 if token_tile > 64 else 128)
    single = dict(blocks_per_sm=1, cluster=1, split_k=False, stream_k=True)
    return with_stages(replace(config, **{**tile, **single, **how}))


@functools.cache
def ptx_of(config: GemmConfig) -> str:
    return compile_to_artifacts(family="gemm", config=config, build=build, target="sm_90a").ptx


def random_operand(*shape: int, seed: int) -> Mxfp8Tensor:
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.randn(*shape, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.randint(114, 124, (*shape[:-1], shape[-1] // 32), generator=generator).to(torch.uint8)
    return Mxfp8Tensor(codes, scales)


def launches(config: GemmConfig, counts: list[int], *, grid: int, together: bool, seed: int = 0) -> list[torch.Tensor]:
    """Results of launches with so many tokens each, all checked against float64."""
    weight = random_operand(config.n, config.k, seed=1)
    bias = torch.randn(config.n, generator=torch.Generator().manual_seed(2)) if config.bias else torch.zeros(4)
    exact_weight = dequantize_mxfp8(weight.codes, weight.scales).double()
    packed, flags, found = pack_weight(weight, target="sm_90a"), np.zeros(4 * grid, np.uint8), []
    for number, count in enumerate(counts):
        first, rows = number % 2 * 3, count + 5
        tokens = pack_tokens(random_operand(rows, config.k, seed=10 + count), token_format=config.token_format)
        out = run(
            ptx_of(config),
            config,
            [packed],
            tokens,
            offsets=[first, first + count],
            counts=[count],
            bias=bias,
            flags=flags,
            grid=grid,
            together=together,
            seed=seed + number,
        )
        assert not flags.any(), "a flag stayed raised"
        own = slice(first, first + count)
        untouched = torch.ones(rows, dtype=torch.bool)
        untouched[own] = False
        assert (out[untouched].view(torch.uint8) == POISON).all(), "rows that are no tokens were written"
        expected = unpack_tokens(tokens).double()[own] @ exact_weight.T
        expected = expected + bias.double() if config.bias else expected
        error = (out[own].double() - expected).norm(dim=1) / expected.norm(dim=1)
        assert not count or error.max() < (3e-3 if config.out_dtype == "bfloat16" else 1e-3), error.max()
        found.append(out[own].view(torch.int16))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
def test_launch_after_launch(together):
    """Tiles over two, three and more blocks, fewer units than blocks, whole tiles between, nothing at all."""
    config = config_of(1, 16, n=136, k=416)
    counts = [33, 7, 0, 1, 33]
    first = launches(config, counts, grid=5, together=together)
    again = launches(config, counts, grid=5, together=not together, seed=50)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), "the order of events shows"
    launches(config, [16, 2], grid=14, together=together)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row_groups", "token_tile", "n", "k", "count", "grid", "how"),
    [
        (2, 64, 200, 288, 70, 3, dict(bias=True, out_dtype="float16")),
        (3, 64, 136, 416, 65, 3, dict(early_counts=False)),
        (2, 128, 136, 672, 130, 5, dict(bias=True)),
    ],
)
def test_tiles_of_the_heuristic(row_groups, token_tile, n, k, count, grid, how):
    config = config_of(row_groups, token_tile, n=n, k=k, **how)
    launches(config, [count, 1], grid=grid, together=True)


@pytest.mark.slow
@pytest.mark.parametrize("stream_k", [False, True])
def test_more_token_tiles_than_a_band_has(stream_k):
    """See tile_order.py; whole tiles as well, since the scheduler's order is read nowhere else."""
    config = config_of(1, 16, n=136, k=160, stream_k=stream_k)
    launches(config, [16 * (BAND + 2) + 3], grid=7, together=False)
