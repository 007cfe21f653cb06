"""Runs the PTX of the fused kernel for all ranks of a group on the CPU, with all-reduce's machine."""

import functools
import struct
import sys
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "all_reduce"))
sys.path.insert(0, str(Path(__file__).parents[1] / "moe_cutedsl"))
import combine_cases
import ranks_machine
from rank_streams import aligned
from ranks_machine import NEVER, POISON, Launch, Ranks, pack

from vllm_rose_plugin.kernels.all_reduce.config import Access
from vllm_rose_plugin.kernels.ep_combine.config import EpCombineConfig, EpCombinePlan, choose_ep_plan
from vllm_rose_plugin.kernels.ep_combine.kernel import build
from vllm_rose_plugin.kernels.jit.compile import Artifacts, compile_to_artifacts

TARGETS = combine_cases.TARGETS
assert_bits = combine_cases.assert_bits
RankBlock = ranks_machine.RankBlock


@functools.cache
def artifacts(config: EpCombineConfig, target: str) -> Artifacts:
    return compile_to_artifacts(family="ep_combine", config=config, build=build, target=target)


def ep_plan(num_tokens, hidden_size, top_k, *, size=2, target="sm_90a", sm_count=132, **how) -> EpCombinePlan:
    return choose_ep_plan(
        **{
            "num_tokens": num_tokens,
            "hidden_size": hidden_size,
            "top_k": top_k,
            "dtype": "bfloat16",
            "out_dtype": "bfloat16",
            "weighted": True,
            "group_size": size,
            "access": Access.PEERS,
            "target": target,
            "sm_count": sm_count,
            **how,
        }
    )


class Operands(NamedTuple):
    """Of a call, of all ranks; the router weights are the same for all."""

    ys: list[torch.Tensor]
    slots: list[torch.Tensor]
    weights: torch.Tensor
    shared: list[torch.Tensor]


def operands(seed, *, size, num_tokens, top_k, hidden_size, dtype=torch.bfloat16) -> Operands:
    """Every slot is one rank's and -1 on the others; of some tokens a rank has all, of some none."""
    g = torch.Generator().manual_seed(seed)
    owner = torch.randint(0, size, (num_tokens, top_k), generator=g)
    if num_tokens > 2:
        owner[1], owner[2] = 0, size - 1
    ys, slots = [], []
    for rank in range(size):
        mine = owner == rank
        own = torch.full((num_tokens, top_k), -1, dtype=torch.int32)
        own[mine] = torch.randperm(int(mine.sum()), generator=g).to(torch.int32)
        scale = torch.exp2(torch.randint(-10, 8, (int(mine.sum()) + 1, 1), generator=g).float())
        ys.append((torch.randn(len(scale), hidden_size, generator=g) * scale).to(dtype))
        slots.append(own)
    weights = torch.rand(num_tokens, top_k, generator=g)
    return Operands(
        ys, slots, weights, [torch.randn(num_tokens, hidden_size, generator=g).to(dtype) for _ in range(size)]
    )


class EpRanks(Ranks):
    """A group whose streams hold launches of both kernels."""

    def copies(self, given: Operands, rank: int) -> list[torch.Tensor]:
        """A rank's (y, slots, weights, shared), each where it may be accessed as widely as possible."""
        return [placed(t) for t in (given.ys[rank], given.slots[rank], given.weights, given.shared[rank])]

    def add_combine(
        self, rank: int, plan: EpCombinePlan, tensors: list[torch.Tensor], out: torch.Tensor, *, nanoseconds=NEVER
    ) -> Launch:
        """Put a launch into a rank's stream; `tensors` of :meth:`copies`."""
        y, slots, weights, shared = tensors
        for name, tensor in (("y", y), ("slots", slots), ("weights", weights), ("shared", shared), ("out", out)):
            self.tensors[f"{name} {rank} {tensor.data_ptr()}"] = tensor
        staged = (self.layout.staging, self.layout.capacity)
        numbers = pack(
            x=(0, 0),
            out=(0, 0),
            rank=rank,
            base=self.memory.data_ptr(),
            stride=self.stride,
            source=staged,
            target=(0, 0),
            nanoseconds=nanoseconds,
            report=self.report[rank].data_ptr(),
        )[2:]
        del numbers[6:8]  # one-shot stores no sums elsewhere
        launch = Launch(
            artifacts(plan.config, self.target).ptx,
            [
                struct.pack("<QQ", y.data_ptr(), len(y)),
                struct.pack("<QQ", slots.data_ptr(), slots.numel()),
                struct.pack("<QQ", weights.data_ptr(), weights.numel()),
                struct.pack("<QQQ", shared.data_ptr(), len(shared), shared.stride(0)),
                struct.pack("<QQ", out.data_ptr(), len(out)),
                *numbers,
            ],
            plan.blocks,
        )
        self.queues[rank].append(launch)
        return launch


def placed(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that starts at a multiple of 256 bytes."""
    memory = aligned(-(-tensor.nbytes // 2) * 2, POISON)
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def fenced(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(a poisoned tensor, everything around it, which must stay 0xA5)."""
    size = shape[0] * shape[1] * dtype.itemsize
    whole = aligned(size + 512, POISON).fill_(0xA5)
    inside = whole[256 : 256 + size].fill_(0xCF)
    return inside.view(dtype).view(shape), whole


def assert_fences(out: torch.Tensor, whole: torch.Tensor) -> None:
    assert (whole[:256] == 0xA5).all() and (whole[256 + out.nbytes :] == 0xA5).all(), "a store beside the result"
