"""Combine in one launch, for small steps in which nothing runs between sending and receiving.

As in dispatch's: every block sends its share of the rows, then adds its share of the tokens.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64

from vllm_rose_plugin.kernels.dp_combine.config import FusedConfig
from vllm_rose_plugin.kernels.dp_combine.kernel import Receive, Send, build_receive, build_send
from vllm_rose_plugin.kernels.dp_exchange.device import Memory, Patience
from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next, pdl_wait


class Fused:
    """The launch, for one config."""

    def __init__(self, config: FusedConfig):
        self.config = config
        self.send, self.receive = Send(config.send), Receive(config.receive)

    @cute.jit
    def __call__(
        self,
        rows: cute.Tensor,  # (R, H) bf16
        row_sources: cute.Tensor,  # (R,) int32, of dispatch
        num_rows: cute.Tensor,  # (1,) int32, of dispatch
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
        mapped, patience = Memory(rank, base, stride), Patience(nanoseconds, report)
        self.kernel(rows, row_sources, num_rows, topk_ids, out, mapped, patience).launch(
            grid=(blocks, 1, 1), block=(self.config.send.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        rows: cute.Tensor,
        row_sources: cute.Tensor,
        num_rows: cute.Tensor,
        topk_ids: cute.Tensor,
        out: cute.Tensor,
        mapped: Memory,
        patience: Patience,
    ):
        pdl_wait()
        pdl_launch_next()
        self.send.run(rows, row_sources, num_rows, mapped)
        self.receive.run(topk_ids, out, mapped, patience, False)


def build_fused(config: FusedConfig):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`: the arguments of `Fused.__call__`."""
    _, (*sent, _, _, _, _, _) = build_send(config.send)
    _, received = build_receive(config.receive)
    return Fused(config), (*sent, *received)
