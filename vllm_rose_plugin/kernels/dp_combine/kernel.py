"""Combine on the device, as two launches: one sends rows back, one waits for this rank's and adds them.

The protocol is in ``dp_exchange/interface.py``, where things lie in ``dp_exchange/layout.py``. Rows are sums over the
token's experts on one rank, with router weights in them; nothing is multiplied here.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from vllm_rose_plugin.kernels.dp_combine.config import ELEMENTS, ReceiveConfig, SendConfig
from vllm_rose_plugin.kernels.dp_exchange.device import (
    WARP,
    Memory,
    Patience,
    block_has_abandoned,
    has_abandoned,
    launches,
    next_rank,
    ranks_of,
    sync_team,
    wait_for,
)
from vllm_rose_plugin.kernels.dp_exchange.layout import RECEIVE, VECTOR, WORD, Layout
from vllm_rose_plugin.kernels.mxfp8_quantize.block import bf16_of, values_of, wait_for_all
from vllm_rose_plugin.kernels.ptx.deadline import deadline_after
from vllm_rose_plugin.kernels.ptx.memory_order import load_relaxed, store_release
from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next, pdl_wait
from vllm_rose_plugin.kernels.ptx.wide import load_global, pointer_to, store_global, zero_after


class Send:
    """The launch that sends, for one config."""

    def __init__(self, config: SendConfig):
        self.config, self.layout = config, Layout(config.shape)

    @cute.jit
    def __call__(
        self,
        rows: cute.Tensor,  # (R, H) bf16
        row_sources: cute.Tensor,  # (R,) int32, of dispatch
        num_rows: cute.Tensor,  # (1,) int32, of dispatch
        blocks: Int32,
        rank: Int32,
        base: Int64,
        stride: Int64,
        stream,
    ):
        """Tensors; numbers of `Memory`."""
        self.kernel(rows, row_sources, num_rows, Memory(rank, base, stride)).launch(
            grid=(blocks, 1, 1), block=(self.config.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        rows: cute.Tensor,
        row_sources: cute.Tensor,
        num_rows: cute.Tensor,
        mapped: Memory,
    ):
        pdl_wait()
        pdl_launch_next()  # after the wait: see early_counts in gemm/launch.py
        self.run(rows, row_sources, num_rows, mapped)

    @cute.jit
    def run(
        self,
        rows: cute.Tensor,
        row_sources: cute.Tensor,
        num_rows: cute.Tensor,
        mapped: Memory,
    ):
        """All that is sent."""
        config, shape, layout = self.config, self.config.shape, self.layout
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        rank, base, stride = mapped
        own = base + Int64(rank) * stride
        epoch = launches(own, RECEIVE, 0, layout)
        gone = cutlass.memory.SmemAllocator().allocate_array(Int32, 1)
        if not block_has_abandoned(own, gone, layout):
            used = cutlass.min(num_rows[0], Int32(row_sources.shape[0]))
            teams = cutlass.const_expr(config.threads // config.team)
            span = cutlass.const_expr(shape.max_tokens * shape.slots)
            row = block * teams + thread // config.team
            while row < used:
                source = row_sources[row]
                if source >= 0:
                    place = source % span
                    there = base + Int64(source // span) * stride
                    target = there + layout.combine_rows + Int64(place) * layout.combine_row_bytes
                    self.copy_row(rows, row, target, thread % config.team)
                    sync_team(config.team)
                    if thread % config.team == 0:
                        flag = there + Int64(layout.row_flag_at(place))
                        store_release(pointer_to(Int64, flag, WORD), epoch, scope="sys")
                row += grid * teams

    @cute.jit
    def copy_row(self, rows: cute.Tensor, row: Int32, target: Int64, lane: Int32):
        """One row to its source."""
        config = self.config
        vectors = cutlass.const_expr(config.shape.hidden_size // ELEMENTS)
        source = rows.iterator.toint() + Int64(row) * (2 * config.shape.hidden_size)
        for number in cutlass.range(-(-vectors // (config.team * config.unroll)), unroll=1):
            places = [(number * config.unroll + u) * config.team + lane for u in range(config.unroll)]
            # Past the end the last vector is loaded: loads behind a branch would wait for each other.
            loads = [
                load_global(
                    pointer_to(BFloat16, source + Int64(cutlass.min(place, vectors - 1) * VECTOR), VECTOR), ELEMENTS
                )
                for place in places
            ]
            wait_for_all(loads, row, load_bytes=VECTOR)
            for u in cutlass.range_constexpr(config.unroll):
                if places[u] < vectors:
                    store_global(pointer_to(BFloat16, target + Int64(places[u] * VECTOR), VECTOR), loads[u])


class Receive:
    """The launch that adds, for one config."""

    def __init__(self, config: ReceiveConfig):
        self.config, self.layout = config, Layout(config.shape)

    @cute.jit
    def __call__(
        self,
        topk_ids: cute.Tensor,  # (T * top_k,) int32
        out: cute.Tensor,  # (T, H) bf16
        blocks: Int32,
        rank: Int32,
        base: Int64,
        stride: Int64,
        nanoseconds: Int64,
        report: Int64,
        stream,
    ):
        """Tensors; numbers of `Memory` and `Patience`."""
        self.kernel(topk_ids, out, Memory(rank, base, stride), Patience(nanoseconds, report)).launch(
            grid=(blocks, 1, 1), block=(self.config.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, topk_ids: cute.Tensor, out: cute.Tensor, mapped: Memory, patience: Patience):
        self.run(topk_ids, out, mapped, patience, True)

    @cute.jit
    def run(
        self,
        topk_ids: cute.Tensor,
        out: cute.Tensor,
        mapped: Memory,
        patience: Patience,
        early: cutlass.Constexpr,
    ):
        """All that is received and added.

        Args:
            early: this kernel starts while the one that sends runs, and waits for its end before it writes.
        """
        config, shape, layout = self.config, self.config.shape, self.layout
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        rank, base, stride = mapped
        nanoseconds, report = patience
        own = base + Int64(rank) * stride
        epoch = launches(own, RECEIVE, 0, layout)
        deadline = deadline_after(nanoseconds)
        teams = cutlass.const_expr(config.threads // config.team)
        token, count = block * teams + thread // config.team, Int32(0)
        last = Int32(out.shape[0])
        if has_abandoned(own, layout):
            last = Int32(0)
        if token < last:
            count = self.wait_for_rows(topk_ids, token, own, epoch, deadline, report)
        if cutlass.const_expr(early):
            # As in the receiving launch of dispatch: up to here only flags, and ids that are older than `Send`, were
            # read.
            pdl_wait()
            pdl_launch_next()
        while token < last:
            self.add_rows(out, token, own + layout.combine_rows, token * shape.slots, count, thread % config.team)
            token += grid * teams
            if token < last:
                count = self.wait_for_rows(topk_ids, token, own, epoch, deadline, report)

    @cute.jit
    def wait_for_rows(
        self, topk_ids: cute.Tensor, token: Int32, own: Int64, epoch: Int64, deadline: Int64, report: Int64
    ) -> Int32:
        """Waits for all rows of a token, every warp for itself, a lane for each row; how many there are."""
        shape, layout = self.config.shape, self.layout
        thread, _, _ = cute.arch.thread_idx()
        start = topk_ids.iterator.toint() + Int64(token * shape.top_k) * 4
        ids = [
            load_relaxed(pointer_to(Int32, start + 4 * i, 4), Int32, scope="gpu")  # past L1, as `launches`
            for i in range(shape.top_k)
        ]
        ranks = ranks_of(ids, shape)
        count, peer = Int32(0), Int32(0)
        destination = next_rank(ranks, Int32(-1), shape)
        while destination < shape.group_size:
            if thread % WARP == count:
                peer = destination
            count += 1
            destination = next_rank(ranks, destination, shape)
        if thread % WARP < count:
            flag = own + Int64(layout.row_flag_at(token * shape.slots + thread % WARP))
            wait_for(flag, epoch, deadline, peer, 2, own, report, layout)
        cute.arch.sync_warp()
        return count

    @cute.jit
    def add_rows(self, out: cute.Tensor, token: Int32, rows: Int64, place: Int32, count: Int32, lane: Int32):
        """The sum of a token's rows, in the order of ranks."""
        config, shape, layout = self.config, self.config.shape, self.layout
        vectors = cutlass.const_expr(shape.hidden_size // ELEMENTS)
        target = out.iterator.toint() + Int64(token) * (2 * shape.hidden_size)
        for number in cutlass.range(-(-vectors // (config.team * config.unroll)), unroll=1):
            places = [(number * config.unroll + u) * config.team + lane for u in range(config.unroll)]
            loads = []
            for slot in cutlass.range_constexpr(shape.slots):
                parts = [cute.make_rmem_tensor((ELEMENTS,), BFloat16) for _ in places]
                for part in parts:
                    part.fill(0)
                if slot < count:
                    row = rows + Int64(place + slot) * layout.combine_row_bytes
                    for u in cutlass.range_constexpr(config.unroll):
                        at = row + Int64(cutlass.min(places[u], vectors - 1) * VECTOR)
                        parts[u].store(load_global(pointer_to(BFloat16, at, VECTOR), ELEMENTS).load())
                loads.append(parts)
            zero = zero_after([part for parts in loads for part in parts], count)
            for u in cutlass.range_constexpr(config.unroll):
                # What isn't there is zero, and adds nothing to a sum that began with +0.
                total = [zero.bitcast(Float32)] * ELEMENTS
                for slot in cutlass.range_constexpr(shape.slots):
                    total = [a + b for a, b in zip(total, values_of(loads[slot][u]), strict=True)]
                if places[u] < vectors:
                    store_global(pointer_to(BFloat16, target + Int64(places[u] * VECTOR), VECTOR), bf16_of(total))


def build_send(config: SendConfig):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`: the arguments of `Send.__call__`."""
    size, rows = config.shape.hidden_size, cute.sym_int64(symbol="R")
    return Send(config), (
        make_fake_tensor(BFloat16, (rows, size), (size, 1), assumed_align=VECTOR),
        make_fake_tensor(Int32, (rows,), (1,), assumed_align=4),
        make_fake_tensor(Int32, (1,), (1,), assumed_align=4),
        *(Int32(1), Int32(0), Int64(0), Int64(0)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def build_receive(config: ReceiveConfig):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`: the arguments of `Receive.__call__`."""
    size = config.shape.hidden_size
    return Receive(config), (
        make_fake_tensor(Int32, (cute.sym_int64(symbol="P"),), (1,), assumed_align=4),
        make_fake_tensor(BFloat16, (cute.sym_int64(symbol="T"), size), (size, 1), assumed_align=VECTOR),
        *(Int32(1), Int32(0), *(Int64(0) for _ in range(4))),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
