"""Index functions of the tcgen05 GEMM on CPU tensors, layouts as the compiler computes them, configs by arithmetic."""

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32
from cutlass.cute.runtime import from_dlpack
from sm100_cases import make_config

from vllm_rose_plugin.kernels.contracts import Rounding
from vllm_rose_plugin.kernels.gemm.config import Epilogue
from vllm_rose_plugin.kernels.gemm.config_sm100 import (
    K_TILE,
    MAX_GROUPS,
    ROWS,
    TOKEN_TILES,
    Sm100Config,
    choose_config_sm100,
    fill_up,
)
from vllm_rose_plugin.kernels.gemm.sm100_epilogue import scale_word_offset
from vllm_rose_plugin.kernels.gemm.sm100_layouts import make_tiled_mma, operand_layouts, tma_layout
from vllm_rose_plugin.kernels.gemm.sm100_mma import token_scale_place
from vllm_rose_plugin.kernels.jit.targets import limits_of
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import padded_rows, tile_scales

TARGETS = ("sm_100a", "sm_100f", "sm_103a", "sm_107a")


@cute.jit
def places(found: cute.Tensor, scale_tile: Int32, k_tiles: cutlass.Constexpr[int]):
    """found[row, k tile] = where its scales are written; found[row, k_tiles:] = where they are in tensor memory."""
    for row in range(found.shape[0]):
        for k_tile in cutlass.range_constexpr(k_tiles):
            found[row, k_tile] = Int32(scale_word_offset(scale_tile, Int32(row), Int32(k_tile), k_tiles))
        lanes, columns = token_scale_place(Int32(row))
        found[row, k_tiles] = lanes
        found[row, k_tiles + 1] = columns


def test_places_of_scales():
    """Two groups' scales, one behind the other: the kernel's offsets are those of tile_scales."""
    k_tiles, first, count = 3, 130, 300
    number = torch.arange((first + count) * k_tiles * 4, dtype=torch.int32).view(-1, k_tiles * 4)  # (row, block)
    tiled = torch.cat([_tiled(number[:first]), _tiled(number[first:])])
    found = torch.zeros(count, k_tiles + 2, dtype=torch.int32)
    places(from_dlpack(found), padded_rows(first) // 128, k_tiles)
    for row in range(count):
        for k_tile in range(k_tiles):
            four = tiled[found[row, k_tile] :][:4]
            assert torch.equal(four, number[first + row, 4 * k_tile : 4 * k_tile + 4])
        # tcgen05.cp puts byte 16 * lane + 4 * column + b of a tile into lane and column
        lane, column = found[row, k_tiles].item(), found[row, k_tiles + 1].item()
        assert found[row, 0] % 512 == 16 * lane + 4 * column


def _tiled(numbers: torch.Tensor) -> torch.Tensor:
    """tile_scales of numbers that need more than a byte."""
    parts = [tile_scales((numbers >> shift & 255).to(torch.uint8)).int() << shift for shift in (0, 8, 16)]
    return sum(parts)


_seen: dict = {}


@cute.jit
def look_at_layouts(config: cutlass.Constexpr[Sm100Config]):
    """Evaluates layouts while it is traced, for the target that it is compiled for."""
    tiled_mma = make_tiled_mma(config)
    a, b, _, tmem = operand_layouts(tiled_mma, config)
    each = cute.size(tiled_mma.shape_mnk, mode=[2])  # k of an instruction
    operands = (("a", a, ROWS, config.stages * config.halves), ("b", b, config.block_tokens, config.stages))
    for name, mine, rows, stages in operands:
        theirs = tma_layout(rows, stages)
        assert str(mine.inner) == str(theirs.inner), "swizzles differ"
        for row in {0, 1, 7, min(8, rows - 1), rows // 2, rows - 1}:
            for k in (0, 15, 16, 31, 32, 63, 64, 127):
                for stage in (0, 1, stages - 1):
                    there = cute.crd2idx(((row, k % each), 0, k // each, stage), mine.outer)
                    _seen[name, row, k, stage] = (int(there), int(cute.crd2idx((row, k, stage), theirs.outer)))
    _seen["k of an instruction"] = each
    _seen["scale columns"] = [int(cute.crd2idx(((((r % 32, r // 32), 0), 0), 0, 0), tmem)) for r in (0, 32, 64, 96)]


@pytest.mark.parametrize("target", ["sm_100f", "sm_107a"])
@pytest.mark.parametrize("tile, pair", [(8, False), (192, True)])
def test_tma_fills_what_the_matrix_unit_reads(target, tile, pair):
    _seen.clear()
    config = make_config(target, tile, pair=pair, k=512)
    cute.compile(look_at_layouts, config, options=f"--gpu-arch {target}")
    assert _seen.pop("k of an instruction") == (64 if target == "sm_107a" else 32)
    columns = _seen.pop("scale columns")
    assert [c - columns[0] for c in columns] == [0, 4, 8, 12], "32 rows of scales are a column, four bytes"
    assert len(_seen) > 150
    for place, (mine, theirs) in _seen.items():
        name, row, k, stage = place
        rows = ROWS if name == "a" else config.block_tokens
        assert mine == theirs == stage * rows * K_TILE + row * K_TILE + k, place


@pytest.mark.parametrize("target", TARGETS)
def test_every_config_fits(target):
    limits = limits_of(target)
    seen = set()
    layers = [(1, 192, 96), (1, 9216, 4096), (1, 4096, 8192), (16, 3072, 4096), (128, 4096, 1536), (8, 1856, 2688)]
    for epilogue in Epilogue:
        for groups, n, k in layers:
            for rows in (1, 8, 17, 64, 128, 500, 1024, 4096, 32768):
                for clusters in (True, False):
                    config = choose_config_sm100(
                        target=target, num_groups=groups, n=n, k=k, num_rows=rows, epilogue=epilogue, clusters=clusters
                    )
                    assert config.shared_bytes <= limits.shared_memory
                    assert config.used_columns <= config.tmem_columns <= limits.tmem_columns
                    assert config.stages >= 3 and config.scale_slots >= 3
                    assert clusters or config.blocks == 1
                    for sm_count in (7, limits.sm_count):
                        grid = config.grid(sm_count=sm_count, num_rows=rows)
                        assert grid % config.blocks == 0 and config.blocks <= grid <= max(sm_count, config.blocks)
                    seen.add((config.token_tile, config.pair, config.split, config.tmem_columns))
    assert {pair for _, pair, _, _ in seen} == {True, False} and {s for _, _, s, _ in seen} == {1, 2, 4}
    assert {tile for tile, *_ in seen} >= {8, 32, 64, 256 if target == "sm_107a" else 192}
    assert (576 in {columns for *_, columns in seen}) == (target == "sm_107a"), "Rubin's larger tensor memory"


def test_a_tile_touches_as_many_scale_tiles_as_it_can():
    for tile in TOKEN_TILES:
        config = make_config("sm_107a", tile)
        starts = range(0, 128 * tile, tile)
        assert config.token_scale_tiles == max((start + tile - 1) // 128 - start // 128 + 1 for start in starts)


def test_few_tiles_share_their_k():
    def split(**shape):
        fields = {"target": "sm_100a", "num_groups": 1, "n": 4096, "k": 8192, "num_rows": 8} | shape
        return choose_config_sm100(**fields).split

    assert split() == 4  # 32 tiles
    assert split(n=9216) == 2  # 72
    assert split(n=18944, num_rows=1) == 1  # 148
    assert split(num_rows=64) == 1
    assert split(k=1024) == 2 and split(k=512) == 1


@pytest.mark.parametrize(
    "change, words",
    [
        ({"n": 100}, "n = 100"),
        ({"k": 40}, "k = 40"),
        ({"num_groups": MAX_GROUPS + 1}, f"1 to {MAX_GROUPS}"),
        ({"n": 96, "epilogue": Epilogue.SWIGLU}, "multiple of 64"),
        ({"token_tile": 24}, "token_tile = 24"),
        ({"token_tile": 8, "pair": True}, "no less than 16"),
        ({"token_tile": 256}, "columns of tensor memory"),
        ({"split": 8}, "split = 8"),
        ({"split": 2, "epilogue": Epilogue.SWIGLU, "n": 128}, "neither a pair"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(change, words):
    fields = {"num_groups": 1, "n": 128, "k": 4096, "epilogue": Epilogue.PLAIN, "out_dtype": "bfloat16", "bias": False}
    fields |= {"rounding": Rounding.RCEIL, "limit": None}
    how = {"token_tile": 8, "pair": False, "split": 1}
    how |= {key: change[key] for key in change if key in how}
    fields |= {key: value for key, value in change.items() if key not in how}
    with pytest.raises(ValueError, match=words):
        fill_up(fields, target="sm_100f", **how)
