"""The tcgen05 GEMM's PTX run on the CPU (see ``sm100_machine``), each case against float64.

Asynchronous work is finished in random order, so a wait that is missing fails here, and so does one that never ends.
"""

import pytest
import torch
from sm100_cases import POISON, Case, make_config

from vllm_rose_plugin.kernels.contracts import Rounding
from vllm_rose_plugin.kernels.gemm.config import Epilogue


def run(target: str, config, counts: list[int], *, grid: int, guess=None, seed: int = 0, **inputs) -> tuple:
    case = Case(config, counts, seed=seed, **inputs)
    out, out_scales = case.run(target, grid=grid, guess=guess, seed=seed)
    case.check(out, out_scales)
    return case, out, out_scales


def test_groups_of_all_sizes():
    """Empty groups in front, between and behind, one larger than a tile, more groups than lanes; 4 blocks.

    Eight tokens: tiles begin amid the 32 lanes of scales. N and K are no multiples of a tile.
    """
    counts = [0, 5, *[0] * 30, 27, 0, 0, 1, 0]
    config = make_config("sm_100f", 8, num_groups=len(counts), n=136, k=160)
    run("sm_100f", config, counts, grid=4)


@pytest.mark.parametrize("guess", [[0, 5, 0, 7], [3, 9, 1, 0], [-7, 2**31 - 1, 5, 2**30]])
def test_weights_asked_for_too_early(guess):
    """Before the previous kernel ends, counts are right, wrong or garbage; the ring of stages comes round."""
    config = make_config("sm_100f", 8, num_groups=4, n=264, k=2688, bias=True)
    run("sm_100f", config, [0, 5, 0, 7], grid=2, guess=guess)


@pytest.mark.parametrize("target, tile, counts", [("sm_107a", 32, [5, 121]), ("sm_100f", 96, [200])])
def test_tiles_that_begin_amid_a_tile_of_scales(target, tile, counts):
    config = make_config(target, tile, num_groups=len(counts), n=96, k=192, out_dtype="float16")
    run(target, config, counts, grid=1, low=118, high=128)


def test_pair():
    """The second block of the last pair has only a few rows; tokens end in the middle of a block's half."""
    config = make_config("sm_100f", 64, pair=True, num_groups=2, n=392, k=224)
    run("sm_100f", config, [70, 0], grid=4)


def test_all_of_rubins_tensor_memory():
    """576 columns hold the scales of fewer stages than shared memory does, so copies of scales must wait."""
    config = make_config("sm_107a", 256, pair=True, n=256, k=128 * 7)
    assert config.scale_slots < config.stages and config.tmem_columns == 576
    run("sm_107a", config, [33], grid=2)


@pytest.mark.parametrize("target, tile, split, k", [("sm_107a", 8, 4, 1184), ("sm_100f", 64, 2, 544)])
def test_blocks_that_share_the_k(target, tile, split, k):
    """Twice per block of the grid, so that the first one's memory is used again; with two chunks and one."""
    config = make_config(target, tile, split=split, n=136, k=k, bias=True)
    run(target, config, [13 if tile == 8 else 40], grid=split)


@pytest.mark.parametrize(
    "target, tile, counts, change",
    [
        ("sm_100f", 8, [3, 21], {"rounding": Rounding.FLOOR, "n": 320}),
        ("sm_107a", 32, [40], {"limit": 0.5, "n": 192}),
    ],
)
def test_swiglu(target, tile, counts, change):
    """Gate and up of a lane, a block of 32 in a warp; I is no multiple of 128."""
    config = make_config(target, tile, num_groups=len(counts), k=96, epilogue=Epilogue.SWIGLU, **change)
    run(target, config, counts, grid=2, low=119, high=125)


@pytest.mark.parametrize("epilogue", Epilogue)
def test_parts_of_a_weight_fill_the_rows_of_the_whole(epilogue):
    """Bit by bit, scales included; a group without tokens, one of two tiles."""
    halves = 2 if epilogue is Epilogue.SWIGLU else 1
    counts, columns = [3, 0, 9], 256
    shape = {"num_groups": 3, "k": 96, "epilogue": epilogue}
    whole = make_config("sm_107a", 8, n=halves * columns, **shape)
    case = Case(whole, counts, low=119, high=125)
    expected, expected_scales = case.run("sm_107a", grid=2)
    part = make_config("sm_107a", 8, n=halves * 128, out_columns=columns, **shape)
    found = None
    for column in range(0, columns, 128):
        own = Case(part, counts, low=119, high=125)
        own.token_codes, own.token_scales = case.token_codes, case.token_scales
        for name in ("weight_codes", "weight_scales"):
            rows = getattr(case, name).view(3, halves, columns, -1)[:, :, column : column + 128]
            setattr(own, name, rows.reshape(3, halves * 128, -1))
        found = own.run("sm_107a", grid=1, into=found, column=column)
    assert torch.equal(found[0].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(found[1], expected_scales)


def test_extreme_scales():
    """0 is 2**-127; 255 spoils the outputs that use it and no others."""
    config = make_config("sm_100f", 8, k=64)
    case = Case(config, [9], low=60, high=100)
    case.token_scales[case.offsets[0] + 2] = 0
    case.weight_scales[0, 5] = 254
    case.token_scales[case.offsets[0] + 4, 1] = 255
    case.weight_scales[0, 77, 0] = 255
    out, _ = case.run("sm_100f", grid=1)
    case.check(out, torch.empty(0))
    run_of_it = out[case.offsets[0] : case.offsets[0] + 9].float()
    bad = torch.zeros_like(run_of_it, dtype=torch.bool)
    bad[4], bad[:, 77] = True, True
    assert torch.equal(run_of_it.isnan(), bad)


def test_the_same_every_time():
    """Whatever the order in which copies arrive."""
    config = make_config("sm_100f", 8, split=2, n=128, k=544)
    case = Case(config, [6])
    first, second = (case.run("sm_100f", grid=2, seed=seed)[0] for seed in (1, 2))
    assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    assert (first.view(torch.uint8) == POISON).all(1).sum() == len(first) - 6


@pytest.mark.parametrize("unheeded", ["full", "empty", "early", "done", "drained", "partial", "taken"])
def test_a_missing_wait_is_noticed(unheeded):
    """Of every kind: the machine is not blind to what it is there for."""
    split = 2 if unheeded in ("partial", "taken") else 1
    shape = {"k": 128 * 14} if unheeded in ("empty", "early") else {"k": 256, "n": 384}
    config = make_config("sm_100f", 8, split=split, **shape)
    with pytest.raises(AssertionError):
        for seed in range(8):
            case = Case(config, [9], seed=seed)
            case.check(*case.run("sm_100f", grid=split, seed=seed, unheeded=unheeded))
