"""The weighted sum of all ranks' experts on the device: moe_combine in front of one-shot all-reduce, in one launch.

Epochs, flags, staging buffers and deadlines are those of ``all_reduce/kernel.py``, which also says why nothing is
overwritten that is still read; launches of both may follow each other. Where all-reduce copies its input into the
staging buffer, this sums a rank's own experts straight into it, rounded to the result's dtype as moe_combine does.
Block b sums the vectors over experts that it then sums over ranks, so blocks still wait only for those of their number.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from vllm_rose_plugin.kernels.all_reduce.access import pointer_to
from vllm_rose_plugin.kernels.all_reduce.kernel import AllReduce
from vllm_rose_plugin.kernels.all_reduce.layout import MAX_BLOCKS, state_offset
from vllm_rose_plugin.kernels.ep_combine.config import EpCombineConfig
from vllm_rose_plugin.kernels.moe_combine.kernel import Combine, fake_operands
from vllm_rose_plugin.kernels.ptx.memory_order import load_relaxed
from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next, pdl_wait


class EpCombine(AllReduce):
    """The kernel for one config."""

    config: Any

    def __init__(self, config: EpCombineConfig):
        super().__init__(config)  # type: ignore[arg-type]  # it has what the protocol asks of one
        self.combine = Combine(config.combine)

    @cute.jit
    def __call__(  # type: ignore[override]
        self,
        y: cute.Tensor,  # (S, H) the results of this rank's experts
        slots: cute.Tensor,  # (T * top_k) int32; -1: no row
        weights: cute.Tensor,  # (T * top_k) float32; not touched where sums aren't weighted
        shared: cute.Tensor,  # (T, H) this rank's part; not touched where there is none
        out: cute.Tensor,  # (T, H)
        blocks: Int32,
        rank: Int32,
        base: Int64,  # from here on as in all_reduce
        stride: Int64,
        multicast: Int64,
        source: Int64,
        source_step: Int64,
        target: Int64,
        target_step: Int64,
        nanoseconds: Int64,
        report: Int64,
        stream,
    ):
        self.kernel(
            y, slots, weights, shared, out,
            rank, base, stride, multicast, source, source_step, nanoseconds, report,
        ).launch(
            grid=(blocks, 1, 1),
            block=(self.config.threads, 1, 1),
            min_blocks_per_mp=1,  # as in all_reduce_norm
            stream=stream,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(  # type: ignore[override]
        self,
        y: cute.Tensor,
        slots: cute.Tensor,
        weights: cute.Tensor,
        shared: cute.Tensor,
        out: cute.Tensor,
        rank: Int32,
        base: Int64,
        stride: Int64,
        multicast: Int64,
        source: Int64,
        source_step: Int64,
        nanoseconds: Int64,
        report: Int64,
    ):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        gone = cutlass.memory.SmemAllocator().allocate_array(Int32, 1)
        own = base + Int64(rank) * stride
        state = pointer_to(Int64, own + state_offset(config.group_size), 8)
        memory = (base, stride, rank, multicast)
        num_tokens = Int32(out.shape[0])
        vectors = num_tokens * config.combine.row_vectors  # fits: config.py refuses more
        mine, step = block * config.threads + thread, blocks * config.threads
        if thread == 0:
            gone.store(Int32(0))
        cute.arch.sync_threads()
        pdl_wait()
        pdl_launch_next()  # after the wait: see early_counts in gemm/launch.py

        epoch = (state + block).load() + 1
        abandoned = load_relaxed(self.abandoned(state), Int32, scope="gpu")
        source = source + (epoch & 1) * source_step
        if abandoned != 0:
            gone.store(Int32(1))
        else:
            rows = self.combine.vectors(y, Int32(y.shape[0])), self.combine.vectors(shared, num_tokens)
            self.sum_own((rows[0], slots, weights, rows[1]), own + source, num_tokens, vectors, mine, step)
        self.meet(0, own, base, stride, rank, block, thread, epoch, nanoseconds, report, state, gone)
        if gone.load() == 0:
            j = mine
            while j < vectors:
                places = [self.clamped(j, u, step, vectors) for u in range(config.sums)]
                values = self.access.reduce_load(memory, [source + self.bytes_of(place) for place in places])
                for u in cutlass.range_constexpr(config.sums):
                    if j + u * step < vectors:
                        self.store_own(out.iterator.toint() + self.bytes_of(places[u]), values[u])
                j += step * config.sums

        # As in all_reduce: all copies of the epoch.
        if block + thread * blocks < MAX_BLOCKS:
            (state + (block + thread * blocks)).store(epoch)

    @cute.jit
    def sum_own(self, tensors, address: Int64, num_tokens: Int32, vectors: Int32, mine: Int32, step: Int32):
        """Sums this block's vectors over the rank's own experts, into this rank's part of the symmetric buffer."""
        unroll = cutlass.const_expr(self.config.combine.unroll)
        j = mine
        while j < vectors:
            places = [self.combine.place(j + u * step) for u in range(unroll)]
            values = self.combine.sums(tensors, places, num_tokens)
            for u in cutlass.range_constexpr(unroll):
                if j + u * step < vectors:
                    self.store_own(address + self.bytes_of(j + u * step), values[u])
            j += step * unroll


def build(config: EpCombineConfig):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`: takes moe_combine's tensors, blocks and what
    :meth:`vllm_rose_plugin.kernels.all_reduce.launch.AllReduce.numbers` gives."""
    numbers = (Int32(1), Int32(0), *(Int64(0) for _ in range(9)))
    return EpCombine(config), (*fake_operands(config.combine), *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))
