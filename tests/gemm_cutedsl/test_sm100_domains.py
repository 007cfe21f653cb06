"""The tcgen05 kernel on a weight in parts: what the compiler makes of it, and its PTX run on the CPU.

See ``sm100_machine``: results are bit for bit the whole weight's. Never run on a GPU that has tcgen05.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sm100_cases import Case, artifacts, make_config

from vllm_rose_plugin.kernels.gemm.config import Epilogue
from vllm_rose_plugin.kernels.gemm.config_sm100 import Sm100Config, choose_config_sm100
from vllm_rose_plugin.kernels.gemm.domain_queue import counter_words
from vllm_rose_plugin.kernels.jit.sass import resource_usage, sass
from vllm_rose_plugin.kernels.jit.targets import limits_of

BOTH = [0, 1, 0, 1]


def config_of(target: str, token_tile: int, *, domains: int = 2, **how) -> Sm100Config:
    return make_config(target, token_tile, **dict(num_groups=3, n=256, k=256, domains=domains) | how)


def same_as_whole(config: Sm100Config, counts: list[int], target: str, *, sms: list[int], counters=None, **how) -> None:
    counters = np.zeros(4 * counter_words(config.domains), np.uint8) if counters is None else counters
    case, whole = Case(config, counts), Case(replace(config, domains=1), counts)
    found = case.run(target, grid=len(sms), sms=sms, counters=counters, **how)
    expected = whole.run(target, grid=config.blocks)
    assert not counters.any(), "a counter was left"
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_107a", "sm_100f"])
def test_plain(target):
    """Tables, domains without SMs, empty groups, and counters that one launch leaves to the next."""
    config = config_of(target, 16, bias=True)
    counters = np.zeros(4 * counter_words(2), np.uint8)
    same_as_whole(config, [5, 0, 20], target, sms=[0, 1, 2], sm_domains=BOTH, counters=counters)
    same_as_whole(config, [0, 33, 0], target, sms=[0, 2], sm_domains=BOTH, counters=counters, seed=1)
    same_as_whole(config, [0, 0, 0], target, sms=[1], sm_domains=BOTH, counters=counters, seed=2)
    same_as_whole(config, [1, 1, 1], target, sms=[0, 1, 5], sm_domains=[-1, 7], counters=counters, seed=3)


@pytest.mark.slow
def test_guesses():
    """Counts that change until the previous kernel has ended: the guess is right, of another group, or has no tile."""
    config = config_of("sm_107a", 8, k=512)
    assert config.prefetch
    for seed, guess in enumerate(([3, 9, 0], [0, 9, 0], [0, 0, 0], [90, -7, 1000])):
        same_as_whole(config, [3, 9, 0], "sm_107a", sms=[1, 0], sm_domains=BOTH, guess=guess, seed=seed)


@pytest.mark.slow
def test_swiglu():
    config = config_of("sm_107a", 32, n=1024, k=128, epilogue=Epilogue.SWIGLU)
    assert config.part_row_tiles == 2
    same_as_whole(config, [40, 0, 3], "sm_107a", sms=[0, 1], sm_domains=BOTH)


@pytest.mark.slow
def test_four_parts():
    config = config_of("sm_107a", 16, n=512, k=128, domains=4, num_groups=2)
    same_as_whole(config, [20, 1], "sm_107a", sms=[0, 1, 2], sm_domains=[3, 1, 3])


@pytest.mark.slow
@pytest.mark.parametrize("n", [512, 768])
def test_pairs(n):
    """One ticket for both blocks; with 768 columns a part's last tile has rows for the first block only."""
    config = config_of("sm_100f", 64, n=n, k=128, pair=True)
    for seed in range(3):
        same_as_whole(config, [70, 0, 1], "sm_100f", sms=[0, 1, 2, 3], sm_domains=[1, 1, 0, 0], seed=seed)


@pytest.mark.slow
def test_more_tiles_than_the_ring_has_places():
    config = config_of("sm_107a", 8, n=256, k=128, num_groups=2)
    tiles = 150
    assert 2 * tiles > 2 * config.ring
    same_as_whole(config, [8 * tiles, 5], "sm_107a", sms=[0], sm_domains=BOTH)


# ---- machine code ----


@pytest.mark.parametrize("target", ["sm_100f", "sm_103a", "sm_107a"])
@pytest.mark.parametrize("kind", ["w13", "w2", "pair"])
def test_machine_code(target, kind):
    how = {
        "w13": dict(n=3072, k=4096, epilogue=Epilogue.SWIGLU),
        "w2": dict(n=4096, k=1536),
        "pair": dict(n=4096, k=1536, pair=True),
    }[kind]
    config = config_of(target, 64, num_groups=128, **how)
    cubin = artifacts(config, target).cubin
    code, usage = sass(cubin), resource_usage(cubin)
    assert usage["stack"] == 0 and "STL" not in code and "LDL" not in code, "spills"
    assert ("UTCQMMA.2CTA" if kind == "pair" else "UTCQMMA") in code
    assert code.count("ATOMG") == 4, "the first ticket, the next one, one of another queue, the count of drawers"
    assert "SR_VIRTUALSMID" in code
    draw, wait, start = (code.index(name) for name in ("ATOMG", "ACQBULK", "PREEXIT"))
    assert draw < start and wait < start, "a launch behind this one could start before this one's wait"
    assert config.shared_bytes <= limits_of(target).shared_memory


def test_one_domain_has_nothing_of_it():
    code = sass(artifacts(replace(config_of("sm_107a", 16), domains=1), "sm_107a").cubin)
    assert "ATOMG" not in code and "SMID" not in code


# ---- configs ----


def test_barriers_and_ring_fit_before_the_stages():
    for token_tile in (8, 16, 32, 64, 96, 128):
        config = config_of("sm_107a", token_tile, k=4096)
        barriers = 2 * config.stages + config.prefetch + 2 * config.accumulators + 2
        assert 8 * barriers + 24 * config.ring + 4 <= 1024 and config.ring > config.stages + config.accumulators


def test_refusals():
    with pytest.raises(ValueError, match="a weight in 2 parts is for tiles whose k isn't shared, got split=2"):
        config_of("sm_107a", 16, k=1024, split=2)
    with pytest.raises(ValueError, match="384 columns can't be 2 parts of whole tiles of 128"):
        config_of("sm_107a", 16, n=384)
    with pytest.raises(ValueError, match="domains = 5 must be 1 to 4"):
        config_of("sm_107a", 16, n=1280, domains=5)
    how = dict(target="sm_107a", num_groups=2, n=1024, k=4096, num_rows=2)
    assert choose_config_sm100(**how).split > 1 and choose_config_sm100(**how, domains=2).split == 1
