"""Routing as a launch of its own: blocks count their pairs, add up behind a grid barrier, then place them."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from vllm_rose_plugin.kernels.moe_route import block as routing
from vllm_rose_plugin.kernels.moe_route.config import BARRIER_WORD, HEADER_WORDS, WARP, RouteConfig
from vllm_rose_plugin.kernels.ptx.grid_barrier import grid_barrier
from vllm_rose_plugin.kernels.ptx.memory_order import load_relaxed
from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next, pdl_wait

_IN_FLIGHT = 8
"""Loads of a thread while it adds up what the blocks counted."""


class Route:
    """The kernel for one config."""

    def __init__(self, config: RouteConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        ids: cute.Tensor,  # (P,) int32 or int64
        expert_map,  # (E_global,) int32, or None
        workspace: cute.Tensor,  # (W,) int32: barrier, flag, counts of each block
        expert_counts: cute.Tensor,  # (E,) int32
        expert_offsets: cute.Tensor,  # (E + 1,) int32
        slots: cute.Tensor,  # (P,) int32
        scale_rows,  # (P,) int32, or None
        stream,
    ):
        blocks = cute.ceil_div(Int32(ids.shape[0]), self.config.pairs_per_block)
        self.storage = routing.shared_memory(self.config)
        self.kernel(ids, expert_map, workspace, expert_counts, expert_offsets, slots, scale_rows).launch(
            grid=(blocks, 1, 1), block=(self.config.threads, 1, 1), stream=stream, cooperative=True, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        ids: cute.Tensor,
        expert_map,
        workspace: cute.Tensor,
        expert_counts: cute.Tensor,
        expert_offsets: cute.Tensor,
        slots: cute.Tensor,
        scale_rows,
    ):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        shared = routing.shared_tensors(storage, config)
        counters, totals, before, _, _ = shared
        block_counts = workspace.iterator + HEADER_WORDS  # (blocks, E)
        pdl_wait()
        pdl_launch_next()

        first = routing.first_pair(block, thread, config)
        experts = routing.load_experts(ids, expert_map, first, config)
        routing.clear_counters(counters, thread, config)
        ranks = routing.rank_in_warp(experts, counters, thread, config)
        cute.arch.sync_threads()
        routing.sum_warps(counters, totals, thread, config)
        cute.arch.sync_threads()
        for expert in cutlass.range(thread, config.num_experts, config.threads):
            (block_counts + (block * config.num_experts + expert)).store(totals[0, expert])
        barrier = cute.make_ptr(
            cutlass.Uint32, workspace.iterator.toint() + 4 * BARRIER_WORD, cute.AddressSpace.gmem, assumed_align=4
        )
        grid_barrier(barrier)

        # Several threads share an expert: each takes every `parts`-th block.
        width = cutlass.const_expr(config.chunks * WARP)
        expert, part = thread % width, thread // width
        if expert < config.num_experts and part < config.parts:
            total, ahead = Int32(0), Int32(0)
            for first_block in cutlass.range(part, blocks, config.parts * _IN_FLIGHT, unroll=1):
                others = [first_block + config.parts * i for i in range(_IN_FLIGHT)]
                # Past the end the last block's are read again: loads behind a branch would wait for each other.
                places = [cutlass.min(other, blocks - 1) * config.num_experts + expert for other in others]
                counts = [load_relaxed(block_counts + place, Int32, scope="gpu") for place in places]
                for i in cutlass.range_constexpr(_IN_FLIGHT):
                    total = total + Int32(cutlass.select_(others[i] < blocks, counts[i], Int32(0)))
                    ahead = ahead + Int32(cutlass.select_(others[i] < block, counts[i], Int32(0)))
            totals[part, expert] = total
            before[part, expert] = ahead
        cute.arch.sync_threads()
        routing.lay_out_runs(shared, expert_counts, expert_offsets, thread, block == 0, config.parts, config)
        cute.arch.sync_threads()
        routing.store_slots(shared, experts, ranks, slots, scale_rows, first, thread, config)


def fake_ids(config: RouteConfig) -> tuple:
    """(ids, expert_map or None, expert_counts, expert_offsets, slots, scale_rows or None) as they come to a kernel."""
    pairs = cute.sym_int64(symbol="P")

    def flat(dtype, size, align=4):
        return make_fake_tensor(dtype, (size,), (1,), assumed_align=align)

    ids = flat(Int64, pairs, 8) if config.id_dtype == "int64" else flat(Int32, pairs)
    return (
        ids,
        flat(Int32, cute.sym_int64(symbol="G")) if config.has_map else None,
        flat(Int32, config.num_experts),
        flat(Int32, config.num_experts + 1),
        flat(Int32, pairs, 16),
        flat(Int32, pairs, 16) if config.scale_rows else None,
    )


def fake_workspace():
    """int32, flat."""
    return make_fake_tensor(Int32, (cute.sym_int64(symbol="W"),), (1,), assumed_align=16)


def build(config: RouteConfig):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`: the arguments of `Route.__call__`, flat, P >= 1."""
    ids, expert_map, counts, offsets, slots, scale_rows = fake_ids(config)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return Route(config), (ids, expert_map, fake_workspace(), counts, offsets, slots, scale_rows, stream)
