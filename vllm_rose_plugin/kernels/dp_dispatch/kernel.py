"""Dispatch on the device, as two launches: one sends this rank's tokens, one waits for those that come (`receive.py`).

The protocol is in ``dp_exchange/interface.py``, where things lie in ``dp_exchange/layout.py``.

Send: block b below group_size makes the plan for one peer. Every other block, or warp, takes a token: it reads and
quantizes it once, stores it to each destination in the order of ranks, and then sets the flag at each. It never waits
for a peer.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Rounding
from vllm_rose_plugin.kernels.dp_dispatch.config import ELEMENTS, ReceiveConfig, SendConfig
from vllm_rose_plugin.kernels.dp_dispatch.receive import Receive
from vllm_rose_plugin.kernels.dp_exchange.device import (
    WARP,
    Memory,
    block_has_abandoned,
    count_launch,
    launches,
    local_id,
    next_rank,
    ranks_of,
    sync_team,
)
from vllm_rose_plugin.kernels.dp_exchange.layout import PLAN_BITS, SEND, VECTOR, WORD, Layout, Payload
from vllm_rose_plugin.kernels.mxfp8_quantize import block as mx
from vllm_rose_plugin.kernels.ptx.memory_order import store_release
from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next, pdl_wait
from vllm_rose_plugin.kernels.ptx.wide import load_global, pointer_to, store_global


class Sent(NamedTuple):
    """What the launch sends."""

    x: cute.Tensor  # (T, H) bf16, or uint8 codes
    scales: Any  # (T * H/32,) uint8, or None
    topk_ids: cute.Tensor  # (T * top_k,) int32
    topk_weights: cute.Tensor  # (T * top_k,) float32


class Send:
    """The launch that sends, for one config."""

    def __init__(self, config: SendConfig):
        self.config, self.layout = config, Layout(config.shape)
        self.quantizes = config.input == "bfloat16" and config.shape.payload is Payload.MXFP8
        self.has_scales = config.shape.payload is Payload.MXFP8
        self.vectors = config.shape.hidden_size // ELEMENTS

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        x_scales,
        topk_ids: cute.Tensor,
        topk_weights: cute.Tensor,
        token_blocks: Int32,
        rank: Int32,
        base: Int64,
        stride: Int64,
        stream,
    ):
        """Tensors of `Sent`, numbers of `Memory`."""
        self.kernel(Sent(x, x_scales, topk_ids, topk_weights), Memory(rank, base, stride)).launch(
            grid=(token_blocks + self.config.shape.group_size, 1, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, sent: Sent, mapped: Memory):
        memory = cutlass.memory.SmemAllocator()
        words = memory.allocate_array(Int32, self.config.shape.plan_words)
        gone = memory.allocate_array(Int32, 1)
        pdl_wait()
        pdl_launch_next()  # after the wait: see early_counts in gemm/launch.py
        self.run(sent, mapped, words, gone)

    @cute.jit
    def run(self, sent: Sent, mapped: Memory, words: cute.Pointer, gone: cute.Pointer):
        """All that is sent, and the count of this launch.

        Args:
            words: Int32 ``[plan_words]`` in shared memory.
            gone: Int32 in shared memory.
        """
        size = cutlass.const_expr(self.config.shape.group_size)
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rank, base, stride = mapped
        own = base + Int64(rank) * stride
        epoch = launches(own, SEND, block, self.layout) + 1
        # The barrier is needed for the count too: a warp that is done adds this launch, which the others must not see.
        if not block_has_abandoned(own, gone, self.layout):
            if block < size:
                # From the next rank on, so that the ranks don't all store to the same one at once.
                peer = rank + 1 + block
                if peer >= size:
                    peer -= size
                self.send_plan(
                    sent.topk_ids, words, Int32(sent.x.shape[0]), peer, rank, base + Int64(peer) * stride, epoch
                )
            else:
                self.send_tokens(sent, block - size, thread, mapped, epoch)
        count_launch(own, SEND, epoch, self.layout)

    @cute.jit
    def send_plan(
        self,
        topk_ids: cute.Tensor,
        words: cute.Pointer,
        num_tokens: Int32,
        peer: Int32,
        rank: Int32,
        there: Int64,
        epoch: Int64,
    ):
        """One bit for each token: whether it goes to `peer`."""
        shape = self.config.shape
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % WARP
        word = thread // WARP
        while word < shape.plan_words:
            token = word * PLAN_BITS + lane
            hit = Boolean(False)
            if token < num_tokens:
                for i in cutlass.range_constexpr(shape.top_k):
                    hit = hit | (local_id(topk_ids[token * shape.top_k + i], peer, shape) >= 0)
            bits = cute.arch.vote_ballot_sync(hit)
            if lane == 0:
                (words + word).store(Int32(bits))
            word += self.config.threads // WARP
        cute.arch.sync_threads()
        plan = there + Int64(self.layout.plan_at(Int32(epoch & 1), rank))
        piece = thread
        while piece < shape.plan_words // 4:
            four = cute.make_rmem_tensor((4,), Int32)
            for i in cutlass.range_constexpr(4):
                four[i] = (words + (piece * 4 + i)).load()
            store_global(pointer_to(Int32, plan + Int64(piece) * VECTOR, VECTOR), four)
            piece += self.config.threads
        cute.arch.sync_threads()
        if thread == 0:
            store_release(pointer_to(Int64, there + Int64(self.layout.plan_flag_at(rank)), WORD), epoch, scope="sys")

    @cute.jit
    def send_tokens(self, sent: Sent, block: Int32, thread: Int32, mapped: Memory, epoch: Int64):
        """This block's tokens, each by one team."""
        rank, base, stride = mapped
        config, shape, layout = self.config, self.config.shape, self.layout
        grid, _, _ = cute.arch.grid_dim()
        teams = cutlass.const_expr(config.threads // config.team)
        passes = cutlass.const_expr(-(-self.vectors // (config.team * config.unroll)))
        lane = thread % config.team
        token = block * teams + thread // config.team
        while token < Int32(sent.x.shape[0]):
            ids = [sent.topk_ids[token * shape.top_k + i] for i in range(shape.top_k)]
            ranks = ranks_of(ids, shape)
            row = Int64(layout.dispatch_row_index(Int32(epoch & 1), rank, token)) * layout.row_bytes
            row = base + layout.dispatch_rows + row  # at rank 0
            for number in cutlass.range(passes, unroll=1):
                self.send_vectors(sent, token, number * config.unroll, lane, ranks, row, stride)
            mine, destination = Int32(shape.group_size), next_rank(ranks, Int32(-1), shape)
            slot = Int32(0)
            while destination < shape.group_size:
                self.send_routing(sent, token, lane, slot, row + Int64(destination) * stride + layout.ids)
                if lane == slot:
                    mine = destination
                slot += 1
                destination = next_rank(ranks, destination, shape)
            sync_team(config.team)
            if mine < shape.group_size:  # one thread for each destination
                flag = base + Int64(mine) * stride + Int64(layout.token_flag_at(rank, token))
                store_release(pointer_to(Int64, flag, WORD), epoch, scope="sys")
            token += (grid - shape.group_size) * teams

    @cute.jit
    def send_vectors(self, sent: Sent, token: Int32, first: Int32, lane: Int32, ranks: list, row: Int64, stride: Int64):
        """`unroll` vectors of each thread, read once and stored to every destination of the token."""
        config, shape, layout = self.config, self.config.shape, self.layout
        x = sent.x
        vectors = [(first + u) * config.team + lane for u in range(config.unroll)]
        # Past the end the last vector is loaded: loads behind a branch would wait for each other.
        taken = [cutlass.min(vector, self.vectors - 1) for vector in vectors]
        item = cutlass.const_expr(x.element_type.width // 8)
        start = x.iterator.toint() + Int64(token) * (shape.hidden_size * item)
        loads = [
            load_global(pointer_to(x.element_type, start + Int64(vector * (ELEMENTS * item)), VECTOR), ELEMENTS)
            for vector in taken
        ]
        mx.wait_for_all(loads, token, load_bytes=VECTOR)
        results, words = [], []
        for u in cutlass.range_constexpr(config.unroll):
            code = Int32(0)
            result = loads[u]
            if cutlass.const_expr(self.quantizes):
                amax = mx.block_amax(mx.magnitude_of(loads[u]), dtype=BFloat16, lanes=MXFP8_BLOCK // ELEMENTS)
                code, factor = mx.scale_of(amax, rounding=Rounding.RCEIL)
                result = mx.elements_of(mx.values_of(loads[u]), factor)
            elif cutlass.const_expr(self.has_scales):
                blocks = cutlass.const_expr(shape.hidden_size // MXFP8_BLOCK)
                code = Int32(sent.scales[token * blocks + taken[u] // (MXFP8_BLOCK // ELEMENTS)])
            results.append(result)
            if cutlass.const_expr(self.has_scales):
                words.append(_scales_of_eight(code, lane))
        destination = next_rank(ranks, Int32(-1), shape)
        while destination < shape.group_size:
            there = row + Int64(destination) * stride
            for u in cutlass.range_constexpr(config.unroll):
                if vectors[u] < self.vectors:
                    bytes_of = cutlass.const_expr(layout.code_bytes // self.vectors)
                    target = there + Int64(vectors[u] * bytes_of)
                    store_global(pointer_to(results[u].element_type, target, VECTOR), results[u])
                    if cutlass.const_expr(self.has_scales):  # noqa: SIM102  one is the compiler's, one the device's
                        if lane % 8 == 0:  # what lies past the row's scales is padding
                            at = there + layout.scales + Int64(vectors[u] // 8 * 4)
                            pointer_to(Uint32, at, 4).store(words[u])
            destination = next_rank(ranks, destination, shape)

    @cute.jit
    def send_routing(self, sent: Sent, token: Int32, lane: Int32, slot: Int32, there: Int64):
        """The token's ids and weights, and the how many-th of its destinations this is."""
        shape, layout = self.config.shape, self.layout
        if lane < shape.top_k:
            pair = token * shape.top_k + lane
            pointer_to(Int32, there + Int64(lane * 4), 4).store(sent.topk_ids[pair])
            weight = there + (layout.weights - layout.ids) + Int64(lane * 4)
            pointer_to(Float32, weight, 4).store(sent.topk_weights[pair])
        if lane == shape.top_k:
            pointer_to(Int32, there + (layout.slot - layout.ids), 4).store(slot)


def _scales_of_eight(code, lane):
    """The scales of four blocks that eight lanes hold, as a word in each of them. All lanes of a warp take part."""
    word = Uint32(code) << Uint32(lane % 8 // 2 * 8)
    for distance in (2, 4):
        word = word | cute.arch.shuffle_sync_bfly(word, distance)
    return word


def _flat(dtype, symbol: str, align: int):
    return make_fake_tensor(dtype, (cute.sym_int64(symbol=symbol),), (1,), assumed_align=align)


def build_send(config: SendConfig):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`: the arguments of `Send.__call__`."""
    size = config.shape.hidden_size
    codes = config.input == "mxfp8"
    x = make_fake_tensor(
        Uint8 if codes else BFloat16, (cute.sym_int64(symbol="T"), size), (size, 1), assumed_align=VECTOR
    )
    return Send(config), (
        x,
        _flat(Uint8, "B", 1) if codes else None,
        _flat(Int32, "P", 4),
        _flat(Float32, "W", 4),
        *(Int32(1), Int32(0), Int64(0), Int64(0)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def build_receive(config: ReceiveConfig):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`: the arguments of `Receive.__call__`.

    No size has the name of one in `build_send`: `fused.py` has both.
    """
    size = config.shape.hidden_size
    codes = config.shape.payload is Payload.MXFP8
    rows = cute.sym_int64(symbol="R")
    return Receive(config), (
        make_fake_tensor(Uint8 if codes else BFloat16, (rows, size), (size, 1), assumed_align=VECTOR),
        _flat(Uint8, "C", VECTOR) if codes else None,
        _flat(Int32, "Q", 4),
        _flat(Float32, "V", 4),
        make_fake_tensor(Int32, (rows,), (1,), assumed_align=4),
        make_fake_tensor(Int32, (1,), (1,), assumed_align=4),
        *(Int32(1), Int32(0), *(Int64(0) for _ in range(4))),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
