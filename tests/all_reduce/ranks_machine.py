"""The PTX of all-reduce on the CPU, for all ranks of a group."""

import functools
import struct
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "moe_cutedsl"))
import grid_machine
from rank_streams import MULTICAST, NEVER, Launch, RankBlock, Streams

from vllm_rose_plugin.kernels.all_reduce.config import AllReduceConfig, Plan
from vllm_rose_plugin.kernels.all_reduce.kernel import build
from vllm_rose_plugin.kernels.all_reduce.layout import Layout
from vllm_rose_plugin.kernels.jit.compile import Artifacts, compile_to_artifacts

POISON = 0x7FAD  # a NaN of bf16 and of fp16
__all__ = ["RankBlock", "Ranks", "artifacts", "grid_machine", "pack"]


@functools.cache
def artifacts(config: AllReduceConfig, target: str) -> Artifacts:
    return compile_to_artifacts(family="all_reduce", config=config, build=build, target=target)


def pack(*, x, out, rank, base, stride, source, target, nanoseconds, report, multicast=MULTICAST) -> list[bytes]:
    """The kernel's parameters; x and out are (address, elements), source and target (offset, step)."""
    numbers = [("<i", rank)] + [("<q", n) for n in (base, stride, multicast, *source, *target, nanoseconds, report)]
    return [struct.pack("<QQ", *x), struct.pack("<QQ", *out), *(struct.pack(form, n) for form, n in numbers)]


class Ranks(Streams):
    """A group: its symmetric memory, and a stream of launches for each rank."""

    def __init__(self, size: int, *, max_bytes: int, heap_bytes: int = 0, seed: int = 0, target: str = "sm_90a"):
        self.layout = Layout(size, max_bytes, heap_bytes)
        super().__init__(size, -(-self.layout.size // 256) * 256, seed=seed, poison=POISON)
        self.target = target
        for rank in range(size):
            self.part(rank)[: self.layout.staging] = 0

    def heap(self, rank: int, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        start = self.layout.heap + offset
        return self.part(rank)[start : start + count * dtype.itemsize].view(dtype)

    def add(self, rank: int, plan: Plan, x: torch.Tensor, out: torch.Tensor, *, nanoseconds: int = NEVER) -> Launch:
        """Put a launch into a rank's stream; x and out outside of the heap are whole tensors of their own."""
        places = []
        for name, tensor, staged in (
            ("x", x, plan.config.copy_in),
            ("out", out, plan.config.copy_out or not self._in_heap(rank, out)),
        ):
            if not self._in_heap(rank, tensor):
                self.tensors[f"{name} {rank} {tensor.data_ptr()}"] = tensor
            offset = tensor.data_ptr() - self.part(rank).data_ptr()
            places.append((self.layout.staging, self.layout.capacity) if staged else (offset, 0))
        launch = Launch(
            artifacts(plan.config, self.target).ptx,
            pack(
                x=(x.data_ptr(), x.numel()),
                out=(out.data_ptr(), out.numel()),
                rank=rank,
                base=self.memory.data_ptr(),
                stride=self.stride,
                source=places[0],
                target=places[1],
                nanoseconds=nanoseconds,
                report=self.report[rank].data_ptr(),
            ),
            plan.blocks,
        )
        self.queues[rank].append(launch)
        return launch

    def _in_heap(self, rank: int, tensor: torch.Tensor) -> bool:
        start = self.part(rank).data_ptr()
        return start <= tensor.data_ptr() < start + self.stride
