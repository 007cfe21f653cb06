"""The W8A16 kernel on a weight in parts: its PTX run on the CPU (``sm90_machine``), bit for bit as the whole weight."""

import functools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from sm90_machine import POISON, run
from test_stream_k_run import random_operand

from vllm_rose_plugin.kernels.contracts import TokenFormat
from vllm_rose_plugin.kernels.gemm.choose import choose_config
from vllm_rose_plugin.kernels.gemm.column_split import plan_split, split_packed
from vllm_rose_plugin.kernels.gemm.config import GemmConfig, with_stages
from vllm_rose_plugin.kernels.gemm.domain_queue import counter_words
from vllm_rose_plugin.kernels.gemm.sm90 import build
from vllm_rose_plugin.kernels.gemm.tokens import pack_tokens
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.jit.compile import compile_to_artifacts

SHAPE = dict(num_groups=3, n=384, k=160)


def config_of(domains: int, *, row_groups: int, token_tile: int = 16, early: bool = True, **shape) -> GemmConfig:
    config = choose_config(
        **SHAPE | shape, num_rows=48, token_format=TokenFormat.BF16_PERMUTED, early_counts=early, domains=domains
    )
    tile = dict(row_groups=row_groups, token_tile=token_tile, narrow_tokens=0, blocks_per_sm=1)
    return with_stages(replace(config, **tile))


@functools.cache
def ptx_of(config: GemmConfig) -> str:
    return compile_to_artifacts(family="gemm", config=config, build=build, target="sm_90a").ptx


class Launches:
    """One launch after another on the same counters, each beside the whole weight's."""

    def __init__(self, config: GemmConfig):
        self.config, self.whole = config, replace(config, domains=1)
        weight = random_operand(config.num_groups, config.n, config.k, seed=1)
        self.packed = pack_weight(weight, target="sm_90a")
        split = plan_split(n=config.n, parts=config.domains, target="sm_90a")
        assert split.parts == config.domains
        self.parts = split_packed(split, self.packed, lambda part, shape, dtype: torch.empty(shape, dtype=dtype))
        self.bias = torch.randn(config.num_groups * config.n) if config.bias else torch.zeros(4)
        self.counters = np.zeros(4 * counter_words(config.domains), np.uint8)

    def check(self, counts: list[int], *, sms: list[int], sm_domains: list[int], together: bool, seed: int = 0) -> None:
        offsets = [0]
        for count in counts:
            offsets.append(offsets[-1] + count + seed % 2)
        rows = offsets[-1] + 3
        operand = random_operand(rows, self.config.k, seed=seed + 5)
        launch = dict(
            tokens=pack_tokens(operand, token_format=self.config.token_format),
            offsets=offsets,
            counts=counts,
            bias=self.bias,
            together=together,
            seed=seed,
        )
        expected = run(ptx_of(self.whole), self.whole, [self.packed], **launch, grid=2)
        out = run(
            ptx_of(self.config),
            self.config,
            self.parts,
            **launch,
            grid=len(sms),
            sms=sms,
            sm_domains=sm_domains,
            counters=self.counters,
        )
        assert not self.counters.any(), "a counter was left"
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
        inside = sum(min(count, 1) for count in counts)
        assert bool((out.view(torch.uint8) != POISON).any()) == bool(inside)


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
def test_launch_after_launch(together):
    """Both domains, one without SMs, SMs that nobody knows or that the table lacks; empty groups, no tokens at all."""
    launches = Launches(config_of(2, row_groups=1))  # three row tiles to a part
    both = [0, 1, 0, 1]
    launches.check([5, 17, 1], sms=[0, 1, 2], sm_domains=both, together=together)
    launches.check([0, 33, 0], sms=[0, 2], sm_domains=both, together=together, seed=1)
    launches.check([0, 0, 0], sms=[3, 1], sm_domains=both, together=together, seed=2)
    launches.check([16, 0, 2], sms=[0, 1, 2, 3, 7], sm_domains=[-1, 1, 5, -1], together=together, seed=3)
    launches.check([1, 0, 0], sms=list(range(9)), sm_domains=[0] * 9, together=together, seed=4)


@pytest.mark.slow
def test_part_that_ends_inside_a_tile():
    """192 rows to a part in tiles of 128: rows past its end are the other part's, and must not be written twice."""
    for early in (True, False):
        launches = Launches(config_of(2, row_groups=2, token_tile=32, early=early, bias=True))
        launches.check([3, 40, 0], sms=[0, 1, 2], sm_domains=[1, 0, 1], together=True)


@pytest.mark.slow
def test_four_parts():
    launches = Launches(config_of(4, row_groups=1, num_groups=2, n=256))
    for seed in range(3):
        drawn = random.Random(seed)
        domains = [drawn.randrange(-1, 4) for _ in range(5)]
        launches.check([drawn.randrange(40), 20], sms=[0, 1, 2, 3, 4], sm_domains=domains, together=True, seed=seed)


@pytest.mark.slow
def test_three_parts_of_a_single_weight():
    launches = Launches(config_of(3, row_groups=1, num_groups=1, n=192))
    launches.check([50], sms=[0, 1], sm_domains=[2, 2], together=False)


@pytest.mark.slow
def test_a_linear_layer_with_a_bias():
    launches = Launches(config_of(2, row_groups=1, num_groups=1, n=256, bias=True))
    for seed, rows in enumerate((1, 33, 16)):
        launches.check([rows], sms=[0, 1, 2], sm_domains=[0, 1, 1], together=bool(seed % 2), seed=2 * seed)
