"""A weight in several parts on tcgen05: one warp of a cluster draws tiles from the parts' queues, and tells the others.

See domain_queue.py, and sm100_ring.py for how they tell. The loading warp of the cluster's first block draws.

The kernel behind this one may start only after this one's wait, unlike with a whole weight: counters want it so.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from vllm_rose_plugin.kernels.gemm.config_sm100 import K_TILE, ROWS, Sm100Config
from vllm_rose_plugin.kernels.gemm.domain_tickets import draw, first_domain, leave, settle
from vllm_rose_plugin.kernels.gemm.sm100_load import cut, load_tile, load_weights, weight_bytes
from vllm_rose_plugin.kernels.gemm.sm100_ring import (
    LAST,
    PART_SHIFT,
    Ring,
    next_place,
    part_of,
    receive,
    tell,
    ticket_of,
)
from vllm_rose_plugin.kernels.gemm.sm100_schedule import Tile, find_tile, make_schedule
from vllm_rose_plugin.kernels.gemm.tensor_maps import tensor_map_of
from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next, pdl_wait


@cute.jit
def load_parts(
    operands: tuple,  # weights, tokens, scales of both; see load_stages
    atoms: tuple,  # TMA atoms of all parts: weights, scales
    places: tuple,  # in shared memory, of each operand
    barriers,
    ring: Ring,
    workspace: tuple,  # (SMs) int32, the domain of each; counters of the launch
    offsets: cute.Tensor,
    counts: cute.Tensor,
    clusters: Int32,
    rank: Int32,
    config: cutlass.Constexpr[Sm100Config],
):
    """The loading warp: as ``sm100_load.load_stages``, with tiles from the queues."""
    sm_domains, counters = workspace
    domains = cutlass.const_expr(config.domains)
    lane = cute.arch.lane_idx()
    pair_rank = rank if cutlass.const_expr(config.pair) else Int32(0)
    a, b, sfa, sfb = operands
    a_places, b_places, sfa_places, sfb_places = places
    loads = (
        cut(a, a_places, (ROWS, K_TILE), (None, None, None)),
        cut(sfa, sfa_places, (sfa_places.shape[0], 1), (0, None)),
        b,
        cut(sfb, sfb_places, (sfb_places.shape[0], 1), (0, None), pair_rank, config.row_blocks),
    )
    draws = pair_rank == 0
    domain, left, ticket = Int32(0), Int32(domains - 1), Int32(0)
    if draws:
        domain = first_domain(sm_domains, domains)
        ticket = draw(counters, domain)

    # The first ticket is known already, its tile follows from counts that may still change: see load_stages.
    early = Boolean(False)
    guess = Tile(Int32(0), Int32(0), Int32(0), Int32(0))
    if cutlass.const_expr(config.prefetch > 0):
        schedule = make_schedule(counts, lane, config)
        ticket = cute.arch.shuffle_sync(ticket, 0)
        early = ticket < schedule.tiles
        guess = find_tile(schedule, cutlass.min(ticket, cutlass.max(schedule.tiles - 1, 0)), config)
        if early:
            maps = tuple(tensor_map_of(each, domain) for each in atoms)
            for k in cutlass.range_constexpr(config.prefetch):
                barrier = barriers.early + k
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, weight_bytes(config))
                load_weights(loads[0], loads[1], guess, k, Int32(k), pair_rank, barrier, config, maps)
    pdl_wait()
    pdl_launch_next()
    schedule = make_schedule(counts, lane, config)
    begun = Int32(0)
    if cutlass.const_expr(config.prefetch > 0):
        truth = find_tile(schedule, cutlass.min(ticket, cutlass.max(schedule.tiles - 1, 0)), config)
        if early:
            if ticket < schedule.tiles and truth.group == guess.group:
                begun = Int32(config.prefetch)
            else:
                for k in cutlass.range_constexpr(config.prefetch):
                    cute.arch.mbarrier_wait(barriers.early + k, 0)

    stage, phase = Int32(0), Int32(1)  # the parity that an unused barrier has behind it
    place, turn = Int32(0), Int32(0)
    word = Int32(0)
    while word != LAST:
        if draws:
            ticket, domain, left = settle(counters, ticket, domain, left, schedule.tiles, domains)
            found = (domain << PART_SHIFT) | ticket
            word = Int32(cutlass.select_(ticket < schedule.tiles, found, Int32(LAST)))
        else:
            word = receive(ring, place, turn)
        tell(ring, place, word, pair_rank, config)
        place, turn = next_place(place, turn, config)
        if word != LAST:
            if draws:
                ticket = draw(counters, domain)
            tile = find_tile(schedule, ticket_of(word), config)
            maps = tuple(tensor_map_of(each, part_of(word)) for each in atoms)
            stage, phase = load_tile(loads, b_places, barriers, offsets, tile, maps, begun, stage, phase, rank, config)
            begun = Int32(0)
    if draws:
        leave(counters, clusters, domains)
