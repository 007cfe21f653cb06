"""Device functions that fill up what no token fills: rows up to a run's end, and scales up to the end of a tile."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, TokenFormat
from vllm_rose_plugin.kernels.moe_dispatch.config import DispatchConfig
from vllm_rose_plugin.kernels.mxfp8_quantize.block import scale_value
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import ROW_GROUP, TILE_ROWS
from vllm_rose_plugin.kernels.ptx.reduce import WARP, warp_sums
from vllm_rose_plugin.kernels.ptx.wide import store_global

_UNIT = 16
"""Bytes that a thread writes at a time; in a tile of scales, those of four rows that are 32 apart."""


@cute.jit
def fill_up(
    expert_counts: cute.Tensor,
    expert_offsets: cute.Tensor,
    y: cute.Tensor,
    scales: cute.Tensor,
    number: Int32,
    thread: Int32,
    config: cutlass.Constexpr[DispatchConfig],
):
    """Writes zeros behind the tokens of the number-th expert that has any."""
    expert, count, tiles_before = find_expert(expert_counts, number, thread % WARP, config)
    if expert >= 0:
        first, last = expert_offsets[expert], expert_offsets[expert + 1]
        if cutlass.const_expr(config.alignment > 1):
            fill_rows(y, scales, first + count, last - first - count, thread, config)
        if cutlass.const_expr(config.tiled):
            tile, end = first // TILE_ROWS, last // TILE_ROWS
            if cutlass.const_expr(config.scale_rows):
                tile = tiles_before
                end = tiles_before + cute.ceil_div(count, TILE_ROWS)
            fill_tiles(scales, tile, end - tile, count, thread, config)


def find_expert(expert_counts: cute.Tensor, number, lane, config: DispatchConfig) -> tuple:
    """(the number-th expert that has tokens, their number, tiles of scales before it), expert -1 where there is none.

    All lanes of a warp take part and get the same.
    """
    experts = [WARP * i + lane for i in range(-(-config.num_experts // WARP))]
    counts = [expert_counts[cutlass.min(expert, config.num_experts - 1)] for expert in experts]
    below = cute.arch.lanemask_lt()
    before, found, count = Int32(0), Int32(0), Int32(0)
    for i, expert in enumerate(experts):
        counts[i] = Int32(cutlass.select_(expert < config.num_experts, counts[i], Int32(0)))
        used = cute.arch.vote_ballot_sync(counts[i] > 0)
        hit = (counts[i] > 0) & (before + Int32(cute.arch.popc(used & below)) == number)
        found = found + Int32(cutlass.select_(hit, expert + 1, Int32(0)))
        count = count + Int32(cutlass.select_(hit, counts[i], Int32(0)))
        before = before + Int32(cute.arch.popc(used))
    found, count = warp_sums([found, count])
    tiles = Int32(0)
    if config.scale_rows:
        for i, expert in enumerate(experts):
            tiles = tiles + Int32(cutlass.select_(expert + 1 < found, cute.ceil_div(counts[i], TILE_ROWS), Int32(0)))
        (tiles,) = warp_sums([tiles])
    return found - 1, count, tiles


@cute.jit
def fill_rows(
    y: cute.Tensor,
    scales: cute.Tensor,
    first: Int32,
    count: Int32,
    thread: Int32,
    config: cutlass.Constexpr[DispatchConfig],
):
    """Zeroes rows first to first + count, and their scales where they are float32."""
    zeros = cute.make_rmem_tensor((_UNIT // 4,), Uint32)
    zeros.fill(0)
    start = y.iterator.toint() + Int64(first) * config.row_bytes
    for i in cutlass.range(thread, count * (config.row_bytes // _UNIT), config.threads, unroll=4):
        store_global(_words(start + Int64(i) * _UNIT, _UNIT), zeros)
    if cutlass.const_expr(config.token_format is TokenFormat.MXFP8_FP32_SCALES):
        smallest = scale_value(Int32(0))
        for i in cutlass.range(thread, count * (config.hidden_size // MXFP8_BLOCK), config.threads, unroll=1):
            scales[Int64(i // count), Int64(first + i % count)] = smallest


@cute.jit
def fill_tiles(
    scales: cute.Tensor,
    tile: Int32,
    tiles: Int32,
    count: Int32,
    thread: Int32,
    config: cutlass.Constexpr[DispatchConfig],
):
    """Zeroes the scales of rows from count on, in `tiles` tiles of rows from `tile` on."""
    zeros = cute.make_rmem_tensor((_UNIT // 4,), Uint32)
    zeros.fill(0)
    full = count // TILE_ROWS
    start = scales.iterator.toint() + Int64(tile + full) * (config.k_tiles * TILE_ROWS * 4)
    units = (tiles - full) * (config.k_tiles * ROW_GROUP)
    for i in cutlass.range(thread, units, config.threads, unroll=1):
        place = start + Int64(i) * _UNIT
        row = full * TILE_ROWS + i // (config.k_tiles * ROW_GROUP) * TILE_ROWS + i % ROW_GROUP
        if row >= count:
            store_global(_words(place, _UNIT), zeros)
        else:
            for quarter in cutlass.range_constexpr(1, TILE_ROWS // ROW_GROUP):
                if row + quarter * ROW_GROUP >= count:
                    _words(place + 4 * quarter, 4).store(Uint32(0))


def _words(address, align: int):
    return cute.make_ptr(Uint32, address, cute.AddressSpace.gmem, assumed_align=align)
