"""The warp that issues matrix instructions, and the copies of scales that come before them."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E8M0FNU, Int32
from cutlass.cute.nvgpu import tcgen05

from vllm_rose_plugin.kernels.gemm.config_sm100 import (
    ROWS,
    SCALE_ROWS,
    SCALE_TILE_BYTES,
    SCALE_TILE_COLUMNS,
    Sm100Config,
)
from vllm_rose_plugin.kernels.gemm.sm100_load import k_range
from vllm_rose_plugin.kernels.gemm.sm100_ring import LAST, next_place, read, ticket_of
from vllm_rose_plugin.kernels.gemm.sm100_schedule import find_tile, make_schedule
from vllm_rose_plugin.kernels.ptx.pdl import pdl_wait

_BOTH = 0b11
_LANES = 32
_COLUMN = 4
"""Scales in a column of tensor memory; pointers to scales count them."""
_TILE = _COLUMN * SCALE_TILE_COLUMNS


class Barriers(NamedTuple):
    """Pointers to arrays of mbarriers. Of a pair, both blocks load into and read from the first one's."""

    full: cute.Pointer
    """[stages] of the first block: a stage is loaded."""
    empty: cute.Pointer
    """[stages]: the matrix unit has read a stage."""
    early: cute.Pointer
    """[prefetch]: weights that were asked for early are there."""
    done: cute.Pointer
    """[accumulators]: a tile is computed."""
    drained: cute.Pointer
    """[accumulators] of the first block: all warps have read a tile."""
    partial: cute.Pointer
    """[1]: the other blocks' sums are there, where blocks share the k."""
    taken: cute.Pointer
    """[1] of the other blocks: the first one has read them."""


def fence_after() -> None:
    """Orders tcgen05 instructions behind a wait (`tcgen05.fence::after_thread_sync`)."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def fence_before() -> None:
    """Orders tcgen05 instructions before a signal (`tcgen05.fence::before_thread_sync`)."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def token_scale_place(first: Int32) -> tuple[Int32, Int32]:
    """(lanes, columns) by which the scales of a tile that begins at the group's token `first` lie off in tensor memory.

    Scale row r of 128 is in lane r % 32 of column r // 32. The matrix unit reads from lane 0 of any column. Columns are
    skipped by address. Lanes, where a tile has less than 32 tokens, by where the copy begins to read: a lane is 16
    bytes of the tile in shared memory, and what it reads past the tile goes to lanes of tokens that are never stored.
    """
    row = first % SCALE_ROWS
    return row % _LANES, row // _LANES


@cute.jit
def issue_products(
    tiled_mma: cute.TiledMma,
    a: cute.Tensor,  # (MMA, 1, K, stages * halves)
    b: cute.Tensor,  # (MMA, 1, K, stages)
    sfa: cute.Pointer,  # tiles of 512 bytes: (stages, halves)
    sfb: cute.Pointer,  # (stages, token scale tiles)
    scale_layout: cute.Layout,
    tmem_scale_layout: cute.Layout,
    tmem: cute.Pointer,
    barriers: Barriers,
    counts: cute.Tensor,
    first: Int32,
    step: Int32,
    rank: Int32,
    ring: tuple,
    config: cutlass.Constexpr[Sm100Config],
):
    """Goes through tiles first, first + step, …, or the ring's. Of a pair, only the first block issues anything."""
    pdl_wait()
    schedule = make_schedule(counts, cute.arch.lane_idx(), config)
    a_parts = tiled_mma.make_fragment_A(a)
    b_parts = tiled_mma.make_fragment_B(b)
    result = tiled_mma.make_fragment_C(tiled_mma.partition_shape_C((ROWS * config.row_blocks, config.token_tile)))
    scales = cute.recast_ptr(tmem + config.accumulator_columns, dtype=Float8E8M0FNU)
    issues = rank == 0 if cutlass.const_expr(config.pair) else Boolean(True)
    of = (a_parts, b_parts, result, sfa, sfb, scales)
    if issues:
        at = (Int32(0), Int32(0), Int32(0), Int32(0), Int32(1))
        if cutlass.const_expr(config.domains > 1):
            place, turn = Int32(0), Int32(0)
            word = read(ring, place, turn)
            while word != LAST:
                tile = find_tile(schedule, ticket_of(word), config)
                at = issue_tile(
                    tiled_mma, of, scale_layout, tmem_scale_layout, tmem, barriers, tile.first, rank, at, config
                )
                place, turn = next_place(place, turn, config)
                word = read(ring, place, turn)
        else:
            for index in cutlass.range(first, schedule.tiles, step, unroll=1):
                tile = find_tile(schedule, index, config)
                at = issue_tile(
                    tiled_mma, of, scale_layout, tmem_scale_layout, tmem, barriers, tile.first, rank, at, config
                )


@cute.jit
def issue_tile(
    tiled_mma: cute.TiledMma,
    of: tuple,
    scale_layout: cute.Layout,
    tmem_scale_layout: cute.Layout,
    tmem: cute.Pointer,
    barriers: Barriers,
    first: Int32,
    rank: Int32,
    at: tuple,
    config: cutlass.Constexpr[Sm100Config],
) -> tuple:
    """All products of one tile; gives `at` after them.

    Args:
        of: fragments of weights, tokens and result; scales of weights and tokens in shared memory, and in TMEM.
        first: the tile's first token, counted in the group.
        at: stage, its phase, slot of scales, accumulator, and phase of its being drained.
    """
    a_parts, b_parts, result, sfa, sfb, scales = of
    stage, phase, slot, accumulator, drained = at
    group = cutlass.const_expr(tcgen05.CtaGroup.TWO if config.pair else tcgen05.CtaGroup.ONE)
    mask = cutlass.const_expr(_BOTH if config.pair else None)
    k_first, k_end = k_range(rank, config)
    lanes, columns = token_scale_place(first)
    cute.arch.mbarrier_wait(barriers.drained + accumulator, drained)
    fence_after()
    for k in cutlass.range(k_first, k_end, unroll=1):
        cute.arch.mbarrier_wait(barriers.full + stage, phase)
        if cutlass.const_expr(config.scale_slots < config.stages):
            # Who used the slot last must have been computed; no order of copies behind products is promised.
            last, parity = stage - config.scale_slots, phase
            if last < 0:
                last, parity = last + config.stages, phase ^ 1
            cute.arch.mbarrier_wait(barriers.empty + last, parity)
        fence_after()
        place = scales + slot * (_COLUMN * config.slot_columns)
        for half in cutlass.range_constexpr(config.halves):
            source = sfa + (stage * config.halves + half) * SCALE_TILE_BYTES
            copy_scales(source, place + _TILE * half, scale_layout, tmem_scale_layout, group)
        token_place = place + _TILE * config.halves
        for i in cutlass.range_constexpr(config.token_scale_tiles):
            source = sfb + (stage * config.token_scale_tiles + i) * SCALE_TILE_BYTES + lanes * 16
            copy_scales(source, token_place + _TILE * i, scale_layout, tmem_scale_layout, group)
        for half in cutlass.range_constexpr(config.halves):
            column = (accumulator * config.halves + half) * config.token_tile
            to = cute.make_tensor(tmem + column, result.layout)
            for i in cutlass.range_constexpr(cute.size(a_parts, mode=[2])):
                sfa_part = cute.make_tensor(place + _TILE * half, tmem_scale_layout)
                sfb_part = cute.make_tensor(token_place + _COLUMN * columns, tmem_scale_layout)
                tiled_mma.set(tcgen05.Field.ACCUMULATE, Boolean(k > k_first) if i == 0 else True)
                tiled_mma.set(tcgen05.Field.SFA, sfa_part[None, None, i].iterator)
                tiled_mma.set(tcgen05.Field.SFB, sfb_part[None, None, i].iterator)
                cute.gemm(
                    tiled_mma,
                    to,
                    a_parts[None, None, i, stage * config.halves + half],
                    b_parts[None, None, i, stage],
                    to,
                )
        with cute.arch.elect_one():
            tcgen05.commit(barriers.empty + stage, mask, group)
        stage += 1
        if stage == config.stages:
            stage = Int32(0)
            phase = phase ^ 1
        slot += 1
        if slot == config.scale_slots:
            slot = Int32(0)
    with cute.arch.elect_one():
        tcgen05.commit(barriers.done + accumulator, mask, group)
    accumulator += 1
    if accumulator == config.accumulators:
        accumulator = Int32(0)
        drained = drained ^ 1
    return stage, phase, slot, accumulator, drained


def copy_scales(source, target, scale_layout, tmem_scale_layout, group) -> None:
    """One tile of 512 bytes to four columns, the same in each quarter of the lanes (`tcgen05.cp.32x128b.warpx4`)."""
    memory = cute.filter_zeros(cute.make_tensor(cute.recast_ptr(source, dtype=Float8E8M0FNU), scale_layout))
    tensor_memory = cute.filter_zeros(cute.make_tensor(target, tmem_scale_layout))
    atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(group), Float8E8M0FNU)
    copy = tcgen05.make_s2t_copy(atom, tensor_memory)
    part = copy.get_slice(0)
    described = tcgen05.get_s2t_smem_desc_tensor(copy, part.partition_S(memory))
    cute.copy(copy, described[None, None, None, None, 0], part.partition_D(tensor_memory))
