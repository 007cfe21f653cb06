"""The parts of benchmarks/sweep_gemm_tiles.py that need no GPU: which tiles it compares, and its check."""

import itertools
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def sweep():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import sweep_gemm_tiles
    finally:
        sys.path.remove(str(BENCHMARKS))
    return sweep_gemm_tiles


def test_the_heuristics_tile_is_among_them(sweep):
    """Else nothing would be said of it."""
    for experts, tokens in itertools.product(sweep.EXPERTS, sweep.TOKENS):
        names = [tiles.name for tiles in sweep.possible(experts, tokens, [])]
        assert sweep.chosen(experts, tokens * sweep.TOP_K) in names and len(set(names)) == len(names)


def test_both_products_have_the_tile(sweep):
    found = sweep.possible(16, 256, ["narrow_64"])
    assert {tiles.name for tiles in found} == {f"w8a16_{tile}_narrow_64" for tile in (96, 128, 192, 256)}
    for tiles, configs in found.items():
        assert {(c.token_tile, c.narrow_tokens) for c in configs} == {(tiles.tile, 64)}


@pytest.mark.parametrize("wrong", (1.1, float("nan")))
def test_one_wrong_row_is_counted(sweep, wrong):
    expected = torch.randn(50, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    out = expected.clone()
    assert sweep.rows_off(out, expected) == 0
    out[17] *= wrong
    assert sweep.rows_off(out, expected) == 1
