"""The receiving launch of dispatch.

Every block waits for all plans and adds up their bits, so that it knows for each row which token of which sender
belongs there; its teams then wait for one token's flag after another and copy the rows. It starts while the sending
launch still runs, and waits for that one's end only before it writes.
"""

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK
from vllm_rose_plugin.kernels.dp_dispatch.config import ReceiveConfig
from vllm_rose_plugin.kernels.dp_exchange.device import (
    WARP,
    Memory,
    Patience,
    count_launch,
    has_abandoned,
    launches,
    local_id,
    wait_for,
)
from vllm_rose_plugin.kernels.dp_exchange.layout import PLAN_BITS, RECEIVE, VECTOR, Layout, Payload
from vllm_rose_plugin.kernels.moe_route.block import scan_warp
from vllm_rose_plugin.kernels.mxfp8_quantize.block import wait_for_all
from vllm_rose_plugin.kernels.ptx.deadline import deadline_after
from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next, pdl_wait
from vllm_rose_plugin.kernels.ptx.wide import load_global, pointer_to, store_global


class Received(NamedTuple):
    """What the launch writes."""

    tokens: cute.Tensor  # (R, H) uint8 codes, or bf16
    scales: Any  # (R * H/32,) uint8, or None
    topk_ids: cute.Tensor  # (R * top_k,) int32
    topk_weights: cute.Tensor  # (R * top_k,) float32
    row_sources: cute.Tensor  # (R,) int32
    num_rows: cute.Tensor  # (1,) int32


class Receive:
    """The launch that receives, for one config."""

    def __init__(self, config: ReceiveConfig):
        self.config, self.layout = config, Layout(config.shape)
        self.has_scales = config.shape.payload is Payload.MXFP8
        self.scale_bytes = config.shape.hidden_size // MXFP8_BLOCK
        self.dtype = Uint8 if self.has_scales else BFloat16
        self.vector = VECTOR * 8 // self.dtype.width  # elements of 128 bits

    @cute.jit
    def __call__(
        self,
        tokens: cute.Tensor,
        scales,
        topk_ids: cute.Tensor,
        topk_weights: cute.Tensor,
        row_sources: cute.Tensor,
        num_rows: cute.Tensor,
        blocks: Int32,
        rank: Int32,
        base: Int64,
        stride: Int64,
        nanoseconds: Int64,
        report: Int64,
        stream,
    ):
        """Tensors of `Received`, numbers of `Memory` and `Patience`."""
        out = Received(tokens, scales, topk_ids, topk_weights, row_sources, num_rows)
        self.kernel(out, Memory(rank, base, stride), Patience(nanoseconds, report)).launch(
            grid=(blocks, 1, 1), block=(self.config.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, out: Received, mapped: Memory, patience: Patience):
        memory = cutlass.memory.SmemAllocator()
        before = memory.allocate_array(Int32, self.config.shape.group_size * self.config.shape.plan_words)
        sums = memory.allocate_array(Int32, self.config.threads // WARP)
        gone = memory.allocate_array(Int32, 1)
        self.run(out, mapped, patience, before, sums, gone, True)

    @cute.jit
    def run(
        self,
        out: Received,
        mapped: Memory,
        patience: Patience,
        before: cute.Pointer,
        sums: cute.Pointer,
        gone: cute.Pointer,
        early: cutlass.Constexpr,
    ):
        """All that is received, and the count of this launch.

        Args:
            before: Int32 ``[group_size * plan_words]`` in shared memory.
            sums: Int32 for each warp in shared memory.
            gone: Int32 in shared memory.
            early: this kernel starts while the one that sends runs, and waits for its end before it writes.
        """
        config, shape, layout = self.config, self.config.shape, self.layout
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        own = mapped.base + Int64(mapped.rank) * mapped.stride
        total_rows = Int32(out.row_sources.shape[0])
        words = (total_rows // shape.group_size + (PLAN_BITS - 1)) // PLAN_BITS  # of each plan
        if thread == 0:
            gone.store(Int32(0))
        cute.arch.sync_threads()
        epoch = launches(own, RECEIVE, block, layout) + 1
        parity = Int32(epoch & 1)
        deadline = deadline_after(patience.nanoseconds)

        if has_abandoned(own, layout):
            gone.store(Int32(1))
        elif thread < shape.group_size:
            flag = own + Int64(layout.plan_flag_at(thread))
            if not wait_for(flag, epoch, deadline, thread, 0, own, patience.report, layout):
                gone.store(Int32(1))
        cute.arch.sync_threads()
        used = Int32(0)
        if gone.load() == 0:
            used = self.add_plans(own, parity, words, before, sums, thread)
            used = cutlass.min(used, total_rows)
        if cutlass.const_expr(early):
            # What comes before reads what no kernel of this stream writes but `Send`, through flags; and no block of
            # `Send` lets us start before everything in front of it has ended. What comes after writes tensors of the
            # caller's.
            pdl_wait()
            pdl_launch_next()
        if used > 0:
            teams = cutlass.const_expr(config.threads // config.team)
            row = block * teams + thread // config.team
            while row < used:
                word = self.word_of(before, words * shape.group_size, row)
                sender = word // words
                plan = Int64(layout.plan_at(parity, sender)) + Int64((word - sender * words) * 4)
                bits = pointer_to(Int32, own + plan, 4).load()
                token = (word - sender * words) * PLAN_BITS + _nth_bit(bits, row - (before + word).load())
                self.receive_row(
                    out,
                    row,
                    sender,
                    token,
                    mapped.rank,
                    own,
                    epoch,
                    deadline,
                    patience.report,
                    thread % config.team,
                )
                row += grid * teams
        self.clear(out, used, total_rows, block * config.threads + thread)
        if block == 0 and thread == 0:
            out.num_rows[0] = used
        count_launch(own, RECEIVE, epoch, layout)

    @cute.jit
    def add_plans(
        self, own: Int64, parity: Int32, words: Int32, before: cute.Pointer, sums: cute.Pointer, thread: Int32
    ) -> Int32:
        """Puts into `before` how many tokens come before those of each word of the plans; gives how many come."""
        config = self.config
        size = words * config.shape.group_size
        each = (size + (config.threads - 1)) // config.threads
        first, last = cutlass.min(thread * each, size), cutlass.min((thread + 1) * each, size)
        count = Int32(0)
        word = first
        while word < last:
            bits = self.plan_word(own, parity, words, word)
            count += Int32(cute.arch.popc(bits))
            word += 1
        running, total = scan_warp(count, thread % WARP, Int32(0))
        if thread % WARP == 0:
            (sums + thread // WARP).store(total)
        cute.arch.sync_threads()
        total = Int32(0)
        for warp in cutlass.range_constexpr(config.threads // WARP):
            of_warp = (sums + warp).load()
            running = running + Int32(cutlass.select_(warp < thread // WARP, of_warp, Int32(0)))
            total = total + of_warp
        word = first
        while word < last:
            (before + word).store(running)
            running += Int32(cute.arch.popc(self.plan_word(own, parity, words, word)))
            word += 1
        cute.arch.sync_threads()
        return total

    def plan_word(self, own, parity, words, word):
        """A word of the plans, counted through those of all senders."""
        sender = word // words
        at = own + Int64(self.layout.plan_at(parity, sender)) + Int64((word - sender * words) * 4)
        return pointer_to(Int32, at, 4).load()

    @cute.jit
    def word_of(self, before: cute.Pointer, size: Int32, row: Int32) -> Int32:
        """The last word before whose tokens at most `row` come: the one that holds the row's token."""
        low, high = Int32(0), size
        while low + 1 < high:
            middle = (low + high) // 2
            if (before + middle).load() <= row:
                low = middle
            else:
                high = middle
        return low

    @cute.jit
    def receive_row(
        self,
        out: Received,
        row: Int32,
        sender: Int32,
        token: Int32,
        rank: Int32,
        own: Int64,
        epoch: Int64,
        deadline: Int64,
        report: Int64,
        lane: Int32,
    ):
        """Waits for one token and copies it. Every thread waits for itself, so none needs another's word."""
        topk_ids, topk_weights, row_sources = out.topk_ids, out.topk_weights, out.row_sources
        shape, layout = self.config.shape, self.layout
        flag = own + Int64(layout.token_flag_at(sender, token))
        came = wait_for(flag, epoch, deadline, sender, 1, own, report, layout)
        source = own + layout.dispatch_rows
        source += Int64(layout.dispatch_row_index(Int32(epoch & 1), sender, token)) * layout.row_bytes
        if lane < shape.top_k:
            expert, weight = Int32(-1), Float32(0.0)
            if came:
                expert = local_id(pointer_to(Int32, source + layout.ids + Int64(lane * 4), 4).load(), rank, shape)
                if expert >= 0:
                    weight = pointer_to(Float32, source + layout.weights + Int64(lane * 4), 4).load()
            topk_ids[row * shape.top_k + lane] = expert
            topk_weights[row * shape.top_k + lane] = weight
        if lane == shape.top_k:
            place = Int32(-1)
            if came:
                slot = pointer_to(Int32, source + layout.slot, 4).load()
                place = (sender * shape.max_tokens + token) * shape.slots + slot
            row_sources[row] = place
        if came:
            self.copy_row(out, row, source, lane)

    @cute.jit
    def copy_row(self, out: Received, row: Int32, source: Int64, lane: Int32):
        """Elements, and scales where there are any."""
        config, layout = self.config, self.layout
        vectors = cutlass.const_expr(layout.code_bytes // VECTOR)
        target = out.tokens.iterator.toint() + Int64(row) * layout.code_bytes
        steps = cutlass.const_expr(min(config.unroll, -(-vectors // config.team)))
        for number in cutlass.range(-(-vectors // (config.team * steps)), unroll=1):
            places = [(number * steps + u) * config.team + lane for u in range(steps)]
            loads = [
                load_global(
                    pointer_to(self.dtype, source + Int64(cutlass.min(place, vectors - 1) * VECTOR), VECTOR),
                    self.vector,
                )
                for place in places
            ]
            wait_for_all(loads, row, load_bytes=VECTOR)
            for u in cutlass.range_constexpr(steps):
                if places[u] < vectors:
                    store_global(pointer_to(self.dtype, target + Int64(places[u] * VECTOR), VECTOR), loads[u])
        if cutlass.const_expr(self.has_scales):
            each = cutlass.const_expr(math.gcd(self.scale_bytes, VECTOR))
            place = lane
            while place < self.scale_bytes // each:
                piece = load_global(pointer_to(Uint8, source + layout.scales + Int64(place * each), each), each)
                at = out.scales.iterator.toint() + Int64(row) * self.scale_bytes + Int64(place * each)
                store_global(pointer_to(Uint8, at, each), piece)
                place += config.team

    @cute.jit
    def clear(self, out: Received, used: Int32, total_rows: Int32, thread: Int32):
        """Rows that no token came for have no experts."""
        grid, _, _ = cute.arch.grid_dim()
        top_k = cutlass.const_expr(self.config.shape.top_k)
        step = grid * self.config.threads
        pair = used * top_k + thread
        while pair < total_rows * top_k:
            out.topk_ids[pair] = Int32(-1)
            out.topk_weights[pair] = Float32(0.0)
            pair += step
        row = used + thread
        while row < total_rows:
            out.row_sources[row] = Int32(-1)
            row += step


def _nth_bit(bits, number):
    """Place of the set bit that has `number` set bits below it. All lanes of a warp take part."""
    lane = cute.arch.lane_idx()
    mine = ((Uint32(bits) >> Uint32(lane)) & Uint32(1)) != 0
    below = Int32(cute.arch.popc(Int32(Uint32(bits) & Uint32(cute.arch.lanemask_lt()))))
    only = Uint32(cute.arch.vote_ballot_sync(mine & (below == number)))
    return Int32(cute.arch.popc(Int32(only - Uint32(1))))
