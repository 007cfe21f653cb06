"""Dispatch in one launch, for small steps in which nothing runs between sending and receiving.

Every block sends its share, then receives its share: no block waits for another of its own launch, and all of them are
on the device at once, so what a peer waits for is always sent.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from vllm_rose_plugin.kernels.dp_dispatch.config import FusedConfig
from vllm_rose_plugin.kernels.dp_dispatch.kernel import Send, build_receive, build_send
from vllm_rose_plugin.kernels.dp_dispatch.receive import Receive
from vllm_rose_plugin.kernels.dp_exchange.device import WARP
from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next, pdl_wait


class Fused:
    """The launch, for one config."""

    def __init__(self, config: FusedConfig):
        self.config = config
        self.send, self.receive = Send(config.send), Receive(config.receive)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (T, H) bf16, or uint8 codes
        x_scales,  # (T * H/32,) uint8, or None
        sent_ids: cute.Tensor,  # (T * top_k,) int32
        sent_weights: cute.Tensor,  # (T * top_k,) float32
        tokens: cute.Tensor,  # (R, H) uint8 codes, or bf16
        scales,  # (R * H/32,) uint8, or None
        topk_ids: cute.Tensor,  # (R * top_k,) int32
        topk_weights: cute.Tensor,  # (R * top_k,) float32
        row_sources: cute.Tensor,  # (R,) int32
        num_rows: cute.Tensor,  # (1,) int32
        blocks: Int32,
        rank: Int32,
        base: Int64,  # address of rank 0's part of the memory
        stride: Int64,  # bytes between the parts
        nanoseconds: Int64,  # of all waits
        report: Int64,  # address of the word on the host
        stream,
    ):
        self.kernel(
            x,
            x_scales,
            sent_ids,
            sent_weights,
            tokens,
            scales,
            topk_ids,
            topk_weights,
            row_sources,
            num_rows,
            rank,
            base,
            stride,
            nanoseconds,
            report,
        ).launch(
            grid=(blocks, 1, 1), block=(self.config.send.threads, 1, 1), stream=stream, use_pdl=True
        )  # fmt: skip

    @cute.kernel
    def kernel(
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
        rank: Int32,
        base: Int64,
        stride: Int64,
        nanoseconds: Int64,
        report: Int64,
    ):
        shape = self.config.send.shape
        memory = cutlass.memory.SmemAllocator()
        words = memory.allocate_array(Int32, shape.plan_words)
        before = memory.allocate_array(Int32, shape.group_size * shape.plan_words)
        sums = memory.allocate_array(Int32, self.config.send.threads // WARP)
        gone = memory.allocate_array(Int32, 2)  # a word for each half: a warp may still look at the first
        pdl_wait()
        pdl_launch_next()
        self.send.run(x, x_scales, sent_ids, sent_weights, rank, base, stride, words, gone)
        self.receive.run(
            tokens, scales, topk_ids, topk_weights, row_sources, num_rows, rank, base, stride, nanoseconds, report,
            before, sums, gone + 1, False,
        )  # fmt: skip


def build_fused(config: FusedConfig):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`: the arguments of `Fused.__call__`."""
    _, (*sent, _, _, _, _, _) = build_send(config.send)
    _, received = build_receive(config.receive)
    return Fused(config), (*sent, *received)
