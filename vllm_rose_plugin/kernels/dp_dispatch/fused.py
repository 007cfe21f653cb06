"""Dispatch in one launch, for small steps in which nothing runs between sending and receiving.

Every block sends its share, then receives its share: no block waits for another of its own launch, and all of them are
on the device at once, beside a collective of another stream too (see `fused_blocks`), so what a peer waits for is
always sent.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from vllm_rose_plugin.kernels.dp_dispatch.config import FusedConfig
from vllm_rose_plugin.kernels.dp_dispatch.kernel import Send, Sent, build_receive, build_send
from vllm_rose_plugin.kernels.dp_dispatch.receive import Receive, Received
from vllm_rose_plugin.kernels.dp_exchange.device import WARP, Memory, Patience
from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next, pdl_wait


class Fused:
    """The launch, for one config."""

    def __init__(self, config: FusedConfig):
        self.config = config
        self.send, self.receive = Send(config.send), Receive(config.receive)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        x_scales,
        sent_ids: cute.Tensor,
        sent_weights: cute.Tensor,
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
        """Tensors of `Sent` and `Received`, numbers of `Memory` and `Patience`."""
        sent = Sent(x, x_scales, sent_ids, sent_weights)
        out = Received(tokens, scales, topk_ids, topk_weights, row_sources, num_rows)
        self.kernel(sent, out, Memory(rank, base, stride), Patience(nanoseconds, report)).launch(
            grid=(blocks, 1, 1), block=(self.config.send.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, sent: Sent, out: Received, mapped: Memory, patience: Patience):
        shape = self.config.send.shape
        memory = cutlass.memory.SmemAllocator()
        words = memory.allocate_array(Int32, shape.plan_words)
        before = memory.allocate_array(Int32, shape.group_size * shape.plan_words)
        sums = memory.allocate_array(Int32, self.config.send.threads // WARP)
        gone = memory.allocate_array(Int32, 2)  # a word for each half: a warp may still look at the first
        pdl_wait()
        pdl_launch_next()
        self.send.run(sent, mapped, words, gone)
        self.receive.run(out, mapped, patience, before, sums, gone + 1, False)


def build_fused(config: FusedConfig):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`: the arguments of `Fused.__call__`."""
    _, (*sent, _, _, _, _, _) = build_send(config.send)
    _, received = build_receive(config.receive)
    return Fused(config), (*sent, *received)
