"""The W8A16 kernel with narrow tiles: its PTX run on the CPU (``sm90_machine``), bit for bit as with wide ones."""

import functools
from dataclasses import replace

import pytest
import torch
from sm90_machine import POISON, run
from test_stream_k_run import random_operand

from vllm_rose_plugin.kernels.contracts import TokenFormat
from vllm_rose_plugin.kernels.gemm.choose import choose_config
from vllm_rose_plugin.kernels.gemm.config import GemmConfig, with_stages
from vllm_rose_plugin.kernels.gemm.sm90 import build
from vllm_rose_plugin.kernels.gemm.tokens import pack_tokens
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.jit.compile import compile_to_artifacts


def config_of(token_tile: int, narrow_tokens: int, *, row_groups: int = 1, **shape) -> GemmConfig:
    shape = dict(num_groups=4, n=136, k=160) | shape
    config = choose_config(**shape, num_rows=48, token_format=TokenFormat.BF16_PERMUTED, early_counts=True)
    pass_k = 256 if token_tile > 64 else 128
    tile = dict(row_groups=row_groups, token_tile=token_tile, pass_k=pass_k, blocks_per_sm=1)
    return with_stages(replace(config, **tile, narrow_tokens=narrow_tokens))


@functools.cache
def ptx_of(config: GemmConfig) -> str:
    return compile_to_artifacts(family="gemm", config=config, build=build, target="sm_90a").ptx


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tile", "narrow", "counts"),
    [
        (32, 16, [0, 16, 17, 33]),
        (32, 8, [40, 1, 8, 9]),
        (64, 48, [48, 49, 0, 113]),
        (96, 64, [64, 65, 97, 1]),
    ],
)
def test_narrow_tiles_give_what_wide_ones_give(tile, narrow, counts):
    """Groups of as many tokens as the narrow tile has, one more, none, and with a narrow tile behind a wide one."""
    config = config_of(tile, narrow, row_groups=1 + tile // 64, bias=tile == 32)
    weight = random_operand(config.num_groups, config.n, config.k, seed=1)
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count + 1)
    launch = dict(
        tokens=pack_tokens(random_operand(offsets[-1] + 2, config.k, seed=5), token_format=config.token_format),
        offsets=offsets,
        counts=counts,
        bias=torch.randn(config.num_groups * config.n) if config.bias else torch.zeros(4),
        together=False,
        seed=3,
        grid=3,
    )
    packed = [pack_weight(weight, target="sm_90a")]
    expected = run(ptx_of(replace(config, narrow_tokens=0)), replace(config, narrow_tokens=0), packed, **launch)
    out = run(ptx_of(config), config, packed, **launch)
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
    written = (out.view(torch.uint8) != POISON).any(dim=1)
    assert int(written.sum()) == sum(counts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(narrow_tokens=12), "narrow_tokens is 12"),
        (dict(narrow_tokens=64), "narrow_tokens is 64"),
        (dict(narrow_tokens=16, cluster=2, split_k=True), "k isn't shared"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(config_of(64, 0), **changes)
