"""Device functions of routing: what one block does with its pairs, for both launches that route.

Everything is counted, nothing raced for: a pair's place is the number of pairs of its expert before it, in the order
of the pairs. So the result is that of the reference, bit for bit.

Pairs whose expert isn't here, and those past the end, count as expert E: that has a counter of its own in each warp,
which nobody reads.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from vllm_rose_plugin.kernels.moe_route.config import WARP, RouteConfig

SCALE_ROWS = 128
"""Rows of a tile of scales."""


def shared_memory(config: RouteConfig):
    """What a routing block needs, as a struct for the allocator."""
    experts, width = config.num_experts, config.chunks * WARP
    counter_words, part_words = config.warps * (experts + 1), config.parts * width

    @cute.struct
    class Storage:
        counters: cute.struct.MemRange[Int32, counter_words]
        totals: cute.struct.MemRange[Int32, part_words]
        before: cute.struct.MemRange[Int32, part_words]
        rows: cute.struct.MemRange[Int32, width]
        scale_rows: cute.struct.MemRange[Int32, width]

    return Storage


def shared_tensors(storage, config: RouteConfig) -> tuple:
    """(counters (warps, E + 1), totals (parts, E'), before (parts, E'), rows (E'), scale_rows (E')) of the struct."""
    experts, width = config.num_experts, config.chunks * WARP
    by_warp = cute.make_layout((config.warps, experts + 1), stride=(experts + 1, 1))
    by_part = cute.make_layout((config.parts, width), stride=(width, 1))
    flat = cute.make_layout((width,))
    return (
        storage.counters.get_tensor(by_warp),
        storage.totals.get_tensor(by_part),
        storage.before.get_tensor(by_part),
        storage.rows.get_tensor(flat),
        storage.scale_rows.get_tensor(flat),
    )


def first_pair(block, thread, config: RouteConfig):
    """The first of this thread's pairs; the others follow 32 apart."""
    warp = block * config.warps + thread // WARP
    return warp * (WARP * config.items) + thread % WARP


def load_experts(ids: cute.Tensor, expert_map, first, config: RouteConfig) -> list:
    """Local experts of this thread's pairs, E where there is none. All loads are under way at once.

    Args:
        ids: (P,) int32 or int64, P at least 1.
        expert_map: (E_global,) int32, or None without a map.
        first: of :func:`first_pair`.
    """
    last = Int32(ids.shape[0]) - 1
    pairs = [first + WARP * i for i in range(config.items)]
    found = [ids[cutlass.min(pair, last)] for pair in pairs]
    limit = Int32(expert_map.shape[0]) if config.has_map else Int32(config.num_experts)
    known = [(found[i] >= 0) & (found[i] < limit) & (pairs[i] <= last) for i in range(config.items)]
    local = [Int32(cutlass.select_(known[i], Int32(found[i]), Int32(0))) for i in range(config.items)]
    if config.has_map:
        local = [expert_map[index] for index in local]
        known = [known[i] & (local[i] >= 0) & (local[i] < config.num_experts) for i in range(config.items)]
    return [Int32(cutlass.select_(known[i], local[i], Int32(config.num_experts))) for i in range(config.items)]


@cute.jit
def clear_counters(counters: cute.Tensor, thread: Int32, config: cutlass.Constexpr[RouteConfig]):
    """Zeroes the counters of this thread's warp."""
    mine = counters[thread // WARP, None]
    for i in cutlass.range_constexpr((config.num_experts + WARP) // WARP):
        expert = i * WARP + thread % WARP
        if expert <= config.num_experts:
            mine[expert] = Int32(0)
    cute.arch.sync_warp()


def rank_in_warp(experts: list, counters: cute.Tensor, thread, config: RouteConfig) -> list:
    """For each of this thread's pairs, how many pairs of its warp before it have the same expert. All lanes take part.

    Afterwards the warp's counters hold how many pairs each expert has.
    """
    mine = counters[thread // WARP, None]
    below = cute.arch.lanemask_lt()
    ranks = []
    for expert in experts:
        peers = cute.arch.match_sync(-1, expert, "any")
        seen = mine[expert]
        cute.arch.sync_warp()
        mine[expert] = seen + Int32(cute.arch.popc(peers))  # every peer writes the same
        cute.arch.sync_warp()
        ranks.append(seen + Int32(cute.arch.popc(peers & below)))
    return ranks


@cute.jit
def sum_warps(counters: cute.Tensor, totals: cute.Tensor, thread: Int32, config: cutlass.Constexpr[RouteConfig]):
    """Turns the warps' counts into what lies before each warp, and puts the block's counts into totals[0].

    Between two barriers of the block.
    """
    width = cutlass.const_expr(config.chunks * WARP)
    for i in cutlass.range_constexpr((width + config.threads - 1) // config.threads):
        expert = i * config.threads + thread
        if expert < config.num_experts:
            counts = [counters[warp, expert] for warp in range(config.warps)]
            running = Int32(0)
            for warp in cutlass.range_constexpr(config.warps):
                counters[warp, expert] = running
                running = running + counts[warp]
            totals[0, expert] = running


@cute.jit
def lay_out_runs(
    shared: tuple,
    expert_counts: cute.Tensor,
    expert_offsets: cute.Tensor,
    thread: Int32,
    writes: cutlass.Boolean,
    parts: cutlass.Constexpr[int],
    config: cutlass.Constexpr[RouteConfig],
):
    """Where each expert's run begins, and in it this block's part. The first warp does it, between two barriers.

    Args:
        shared: of :func:`shared_tensors`; totals and before hold `parts` summands.
        writes: whether this block writes the counts and offsets of all.
        parts: 0: this block is the only one, and its counts are the totals.
    """
    _, totals, before, rows, scale_rows = shared
    if thread < WARP:
        row_total, tile_total = Int32(0), Int32(0)
        for chunk in cutlass.range_constexpr(config.chunks):
            expert = chunk * WARP + thread
            count, ahead = totals[0, expert], Int32(0)
            if cutlass.const_expr(parts > 0):
                ahead = before[0, expert]
                for part in range(1, parts):
                    count = count + totals[part, expert]
                    ahead = ahead + before[part, expert]
            count = Int32(cutlass.select_(expert < config.num_experts, count, Int32(0)))
            padded = count
            if cutlass.const_expr(config.alignment > 1):
                padded = cute.ceil_div(count, config.alignment) * config.alignment
            row, row_total = scan_warp(padded, thread, row_total)
            rows[expert] = row + ahead
            if cutlass.const_expr(config.scale_rows):
                tile, tile_total = scan_warp(cute.ceil_div(count, SCALE_ROWS), thread, tile_total)
                scale_rows[expert] = tile * SCALE_ROWS + ahead
            if writes and expert < config.num_experts:
                expert_counts[expert] = count
                expert_offsets[expert] = row
        if writes and thread == 0:
            expert_offsets[config.num_experts] = row_total


@cute.jit
def store_slots(
    shared: tuple,
    experts: list,
    ranks: list,
    slots: cute.Tensor,  # (P,)
    tiled_rows,  # (P,), None without config.scale_rows
    first: Int32,
    thread: Int32,
    config: cutlass.Constexpr[RouteConfig],
):
    """Writes the rows of this thread's pairs, -1 where the expert isn't here."""
    counters, _, _, rows, scale_rows = shared
    num_pairs = Int32(slots.shape[0])
    for i in cutlass.range_constexpr(config.items):
        pair = first + WARP * i
        here = experts[i] < config.num_experts
        expert = cutlass.min(experts[i], config.num_experts - 1)
        place = counters[thread // WARP, expert] + ranks[i]
        if pair < num_pairs:
            slots[pair] = Int32(cutlass.select_(here, rows[expert] + place, Int32(-1)))
            if cutlass.const_expr(config.scale_rows):
                tiled_rows[pair] = Int32(cutlass.select_(here, scale_rows[expert] + place, Int32(-1)))


def scan_warp(number, lane, total) -> tuple:
    """(total and the numbers of the lanes before this one, total and the numbers of all lanes)."""
    running = number
    for distance in (1, 2, 4, 8, 16):
        other = cute.arch.shuffle_sync_up(running, distance)
        running = running + Int32(cutlass.select_(lane >= distance, other, 0))
    return total + running - number, total + cute.arch.shuffle_sync(running, WARP - 1)


@cute.jit
def route_alone(
    storage,
    ids: cute.Tensor,
    expert_map,
    expert_counts: cute.Tensor,
    expert_offsets: cute.Tensor,
    slots: cute.Tensor,
    tiled_rows,
    thread: Int32,
    config: cutlass.Constexpr[RouteConfig],
):
    """All of routing in one block. Its threads' writes aren't ordered when this returns."""
    shared = shared_tensors(storage, config)
    counters, totals, _, _, _ = shared
    first = first_pair(0, thread, config)
    experts = load_experts(ids, expert_map, first, config)
    clear_counters(counters, thread, config)
    ranks = rank_in_warp(experts, counters, thread, config)
    cute.arch.sync_threads()
    sum_warps(counters, totals, thread, config)
    cute.arch.sync_threads()
    lay_out_runs(shared, expert_counts, expert_offsets, thread, cutlass.Boolean(True), 0, config)
    cute.arch.sync_threads()
    store_slots(shared, experts, ranks, slots, tiled_rows, first, thread, config)
