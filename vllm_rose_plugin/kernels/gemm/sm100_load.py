"""The warp that fills the stages: weights, tokens and both scales of 128 k each, by TMA."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from vllm_rose_plugin.kernels.gemm.config_sm100 import K_TILE, ROWS, SCALE_ROWS, SCALE_TILE_BYTES, Sm100Config
from vllm_rose_plugin.kernels.gemm.sm100_schedule import Tile, find_tile, make_schedule
from vllm_rose_plugin.kernels.ptx.pdl import pdl_wait

_BOTH = 0b11
"""Blocks of a cluster, as a mask."""


class Operand(NamedTuple):
    """What TMA needs to know of one input."""

    tma: cute.CopyAtom
    coords: cute.Tensor
    """The input's shape, holding coordinates."""


class Loads(NamedTuple):
    """One input cut into boxes."""

    tma: cute.CopyAtom
    source: cute.Tensor
    """(box, …) of coordinates."""
    target: cute.Tensor
    """(box, places) in shared memory."""


def weight_bytes(config: Sm100Config) -> int:
    """Of a stage, in both blocks of a pair: both signal to the first one's barriers."""
    return config.row_blocks * config.halves * (ROWS * K_TILE + SCALE_TILE_BYTES)


def token_bytes(config: Sm100Config) -> int:
    """Likewise."""
    return config.row_blocks * (config.block_tokens * K_TILE + config.token_scale_tiles * SCALE_TILE_BYTES)


def k_range(rank: Int32, config: Sm100Config) -> tuple[Int32, Int32]:
    """The k tiles of a block of its cluster: (first, one past the last)."""
    if config.split == 1:
        return Int32(0), Int32(config.k_tiles)
    return rank * config.k_tiles // config.split, (rank + 1) * config.k_tiles // config.split


def cut(operand: Operand, target: cute.Tensor, box: tuple, place: tuple, rank=0, parts: int = 1) -> Loads:
    """Pairs boxes of an input with their places.

    Args:
        target: (box[0], box[1], places) in shared memory.
        place: which box; None where it varies.
        rank, parts: this block's part of boxes that both blocks of a pair get.
    """
    boxes = cute.local_tile(operand.coords, box, place)
    to, source = cpasync.tma_partition(
        operand.tma, rank, cute.make_layout(parts), cute.group_modes(target, 0, 2), cute.group_modes(boxes, 0, 2)
    )
    return Loads(operand.tma, source, to)


@cute.jit
def load_stages(
    a: Operand,  # (rows of a half, K, G * halves)
    b: Operand,  # (S, K)
    sfa: Operand,  # (256, tiles)
    sfb: Operand,  # (256, tiles)
    a_places: cute.Tensor,  # (128, 128, stages * halves)
    b_places: cute.Tensor,  # (tokens of a block, 128, stages)
    sfa_places: cute.Tensor,  # (256, 1, stages * halves)
    sfb_places: cute.Tensor,  # (256, 1, stages * token scale tiles)
    barriers,
    offsets: cute.Tensor,
    counts: cute.Tensor,
    first: Int32,
    step: Int32,
    rank: Int32,
    config: cutlass.Constexpr[Sm100Config],
):
    """Goes through tiles first, first + step, …; `rank` is this block's place in its cluster."""
    lane = cute.arch.lane_idx()
    weights = cut(a, a_places, (ROWS, K_TILE), (None, None, None))
    weight_scales = cut(sfa, sfa_places, (sfa_places.shape[0], 1), (0, None))
    pair_rank = rank if cutlass.const_expr(config.pair) else Int32(0)
    token_scales = cut(sfb, sfb_places, (sfb_places.shape[0], 1), (0, None), pair_rank, config.row_blocks)
    k_first, _ = k_range(rank, config)

    # Which weights this block starts with depends on counts that the previous kernel may still be writing. So guess
    # from what lies there now, and throw the guess away if it was wrong.
    early = Boolean(False)
    guess = Tile(Int32(0), Int32(0), Int32(0), Int32(0))
    if cutlass.const_expr(config.prefetch > 0):
        schedule = make_schedule(counts, lane, config)
        early = first < schedule.tiles
        guess = find_tile(schedule, cutlass.min(first, cutlass.max(schedule.tiles - 1, 0)), config)
        if early:
            for k in cutlass.range_constexpr(config.prefetch):
                barrier = barriers.early + k
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, weight_bytes(config))
                load_weights(weights, weight_scales, guess, k_first + k, Int32(k), pair_rank, barrier, config)
    pdl_wait()
    schedule = make_schedule(counts, lane, config)
    begun = Int32(0)  # stages whose weights are there or on their way
    if cutlass.const_expr(config.prefetch > 0):
        truth = find_tile(schedule, cutlass.min(first, cutlass.max(schedule.tiles - 1, 0)), config)
        if early:
            # The row tile follows from the number alone.
            if first < schedule.tiles and truth.group == guess.group:
                begun = Int32(config.prefetch)
            else:
                for k in cutlass.range_constexpr(config.prefetch):
                    cute.arch.mbarrier_wait(barriers.early + k, 0)

    stage, phase = Int32(0), Int32(1)  # the parity that an unused barrier has behind it
    for index in cutlass.range(first, schedule.tiles, step, unroll=1):
        tile = find_tile(schedule, index, config)
        stage, phase = load_tile(
            (weights, weight_scales, b, token_scales), b_places, barriers, offsets, tile, (), begun, stage, phase, rank,
            config,
        )  # fmt: skip
        begun = Int32(0)


@cute.jit
def load_tile(
    loads: tuple,
    b_places: cute.Tensor,
    barriers,
    offsets: cute.Tensor,
    tile: Tile,
    maps: tuple,
    begun: Int32,
    stage: Int32,
    phase: Int32,
    rank: Int32,
    config: cutlass.Constexpr[Sm100Config],
) -> tuple[Int32, Int32]:
    """All stages of one tile; gives the stage and phase after them.

    Args:
        loads: of weights and their scales; the tokens; of their scales.
        maps: tensor maps of weights and their scales, where these aren't those of the loads.
        begun: stages, the first ones, whose weights are there or on their way.
    """
    weights, weight_scales, b, token_scales = loads
    pair_rank = rank if cutlass.const_expr(config.pair) else Int32(0)
    k_first, k_end = k_range(rank, config)
    token = offsets[tile.group] + tile.first + pair_rank * config.block_tokens
    tokens = cut(
        Operand(b.tma, cute.domain_offset((token, 0), b.coords)),
        b_places,
        (config.block_tokens, K_TILE),
        (0, None),
    )
    for k in cutlass.range(begun, unroll=1):
        with cute.arch.elect_one():
            cute.arch.mbarrier_expect_tx(barriers.full + k, token_bytes(config))
        load_tokens(tokens, token_scales, tile, k_first + k, k, barriers.full + k, config)
    for k in cutlass.range(begun, unroll=1):
        cute.arch.mbarrier_wait(barriers.early + k, 0)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barriers.full + k)
    if begun > 0:
        stage = begun
        if stage == config.stages:
            stage = Int32(0)
            phase = phase ^ 1
    for k in cutlass.range(k_first + begun, k_end, unroll=1):
        cute.arch.mbarrier_wait(barriers.empty + stage, phase)
        if pair_rank == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(
                    barriers.full + stage, weight_bytes(config) + token_bytes(config)
                )
        load_weights(weights, weight_scales, tile, k, stage, pair_rank, barriers.full + stage, config, maps)
        load_tokens(tokens, token_scales, tile, k, stage, barriers.full + stage, config)
        stage += 1
        if stage == config.stages:
            stage = Int32(0)
            phase = phase ^ 1
    return stage, phase


def load_weights(
    weights: Loads, scales: Loads, tile: Tile, k, stage, pair_rank, barrier, config: Sm100Config, maps: tuple = ()
) -> None:
    """Asks for the weights of k tile k, to lie in a stage."""
    options, scale_options = ({"tma_desc_ptr": map} for map in maps) if maps else ({}, {})
    row_tile = tile.row_tile * config.row_blocks + pair_rank
    for half in range(config.halves):
        matrix = tile.group * config.halves + half
        place = stage * config.halves + half
        cute.copy(
            weights.tma,
            weights.source[None, row_tile, k, matrix],
            weights.target[None, place],
            tma_bar_ptr=barrier,
            **options,
        )
        # A pair's second block may have no rows left; what it loads as scales then is never used.
        scale_tile = (matrix * config.part_row_blocks + row_tile) * config.k_tiles + k
        cute.copy(
            scales.tma,
            scales.source[None, scale_tile],
            scales.target[None, place],
            tma_bar_ptr=barrier,
            **scale_options,
        )


def load_tokens(tokens: Loads, scales: Loads, tile: Tile, k, stage, barrier, config: Sm100Config) -> None:
    """Asks for the tokens of k tile k. Scales past the group's, or past all, are of tokens that are never stored."""
    cute.copy(tokens.tma, tokens.source[None, k], tokens.target[None, stage], tma_bar_ptr=barrier)
    for i in range(config.token_scale_tiles):
        scale_tile = (tile.scale_tile + tile.first // SCALE_ROWS + i) * config.k_tiles + k
        options = {"mcast_mask": cutlass.Int16(_BOTH)} if config.pair else {}
        cute.copy(
            scales.tma,
            scales.source[None, scale_tile],
            scales.target[None, stage * config.token_scale_tiles + i],
            tma_bar_ptr=barrier,
            **options,
        )
