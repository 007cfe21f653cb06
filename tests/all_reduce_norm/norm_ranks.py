"""Runs the PTX of the fused kernel for all ranks of a group on the CPU, with all-reduce's machine."""

import functools
import struct
import sys
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "all_reduce"))
import ranks_machine
from ranks_machine import NEVER, Launch, Ranks, pack

from vllm_rose_plugin.kernels.all_reduce.config import Access, Algorithm, Tuning
from vllm_rose_plugin.kernels.all_reduce_norm.config import AllReduceNormConfig, NormPlan, choose_norm_plan
from vllm_rose_plugin.kernels.all_reduce_norm.kernel import build
from vllm_rose_plugin.kernels.contracts import TokenFormat
from vllm_rose_plugin.kernels.gemm.tokens import LAYOUT_OF
from vllm_rose_plugin.kernels.jit.compile import Artifacts, compile_to_artifacts
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import scale_shape

EPS = 1e-5
TILED = TokenFormat.MXFP8_TCGEN05
FP32_SCALES = TokenFormat.MXFP8_FP32_SCALES


@functools.cache
def artifacts(config: AllReduceNormConfig, target: str) -> Artifacts:
    return compile_to_artifacts(family="all_reduce_norm", config=config, build=build, target=target)


def norm_plan(num_rows, hidden_size, *, size=2, algorithm=Algorithm.ONE_SHOT, blocks=1, target="sm_90a", **how):
    """A launch with that many blocks where there are rows for them."""
    return choose_norm_plan(
        **{
            "num_rows": num_rows,
            "hidden_size": hidden_size,
            "dtype": "bfloat16",
            "group_size": size,
            "access": Access.PEERS,
            "zero_copy_in": False,
            "alignment": 32,
            "target": target,
            "sm_count": 132,
            "tuning": Tuning(algorithm, blocks),
            **how,
        }
    )


class Call(NamedTuple):
    """A launch's tensors on one rank, and what lies around each of those that are written."""

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    scales: torch.Tensor
    residual_out: torch.Tensor
    fences: tuple[torch.Tensor, ...]

    def assert_fences(self) -> None:
        for around in self.fences:
            assert (around == 0xA5).all(), "a store beside a result"


def fenced(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a poisoned tensor that starts at a multiple of 256 bytes, what lies before it, what lies behind)."""
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    around = torch.full((size + 1024,), 0xA5, dtype=torch.uint8)
    start = 256 + -around.data_ptr() % 256
    inside = around[start : start + size].fill_(0xCF)
    return inside.view(dtype).view(shape), around[:start], around[start + size :]


class NormRanks(Ranks):
    """A group whose streams hold launches of both kernels."""

    def tensors_of(self, plan: NormPlan, x, residual, weight, *, in_place: bool = False) -> Call:
        """Results for a launch, and copies of its inputs; x as it is if it lies in the heap."""
        config, (num_rows, hidden_size) = plan.config, x.shape
        fences: list[torch.Tensor] = []

        def made(shape, dtype, value=None):
            tensor, *around = fenced(shape, dtype)
            fences.extend(around)
            return tensor if value is None else tensor.copy_(value)

        quantized = config.token_format in LAYOUT_OF
        own = made(residual.shape, residual.dtype, residual)
        scale_dtype = torch.float32 if config.token_format is FP32_SCALES else torch.uint8
        shape = (
            scale_shape(num_rows=num_rows, hidden_size=hidden_size, layout=LAYOUT_OF[config.token_format])
            if quantized
            else (16,)
        )
        return Call(
            x=x if not config.copy_in else made(x.shape, x.dtype, x),
            residual=own,
            weight=made(weight.shape, weight.dtype, weight),
            out=made(x.shape, torch.uint8 if quantized else x.dtype),
            scales=made(shape, scale_dtype),
            residual_out=own if in_place else made(residual.shape, residual.dtype),
            fences=tuple(fences),
        )

    def add_norm(self, rank: int, plan: NormPlan, call: Call, *, nanoseconds: int = NEVER) -> Launch:
        """Put a launch into a rank's stream."""
        config, num_rows = plan.config, call.x.shape[0]
        for name, tensor in call._asdict().items():
            if name != "fences" and not self._in_heap(rank, tensor):
                self.tensors[f"{name} {rank} {tensor.data_ptr()}"] = tensor
        staged = (self.layout.staging, self.layout.capacity)
        source = staged if config.copy_in else (call.x.data_ptr() - self.part(rank).data_ptr(), 0)
        numbers = pack(
            x=(0, 0),
            out=(0, 0),
            rank=rank,
            base=self.memory.data_ptr(),
            stride=self.stride,
            source=source,
            target=staged,
            nanoseconds=nanoseconds,
            report=self.report[rank].data_ptr(),
        )[2:]

        def matrix(tensor):
            return struct.pack("<QQ", tensor.data_ptr(), num_rows)

        scales = [call.scales.data_ptr(), call.scales.shape[-1]]
        if config.token_format is FP32_SCALES:
            scales.append(call.scales.stride(0))
        launch = Launch(
            artifacts(config, self.target).ptx,
            [
                matrix(call.x),
                matrix(call.residual),
                struct.pack("<Q", call.weight.data_ptr()),
                matrix(call.out),
                struct.pack(f"<{len(scales)}Q", *scales),
                matrix(call.residual_out),
                struct.pack("<f", EPS),
                *numbers,
            ],
            plan.blocks,
        )
        self.queues[rank].append(launch)
        return launch


RankBlock = ranks_machine.RankBlock
