"""Runs the PTX of all-reduce on the CPU: the blocks of all ranks of a group side by side, launch after launch.

Multimem is as the PTX manual describes it, with sums in the order of the ranks.

What grid_machine is for one launch: warps, blocks and ranks come to every point in any order, and plain stores reach
others late but for those before a release. A rank's launches run one after another, as in a stream; ranks may lag.
"""

import functools
import random
import struct
import sys
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "moe_cutedsl"))
import grid_machine

from vllm_rose_plugin.kernels.all_reduce.config import AllReduceConfig, Plan
from vllm_rose_plugin.kernels.all_reduce.kernel import build
from vllm_rose_plugin.kernels.all_reduce.layout import Layout
from vllm_rose_plugin.kernels.all_reduce.reference import all_reduce
from vllm_rose_plugin.kernels.jit.compile import Artifacts, compile_to_artifacts

POISON = 0x7FAD  # a NaN of bf16 and of fp16
NEVER = 2**60
MULTICAST = 1 << 50
"""Where the multicast mapping is: no memory, so an ordinary access there is an error."""
_TICK = 7
"""Nanoseconds that pass with every look at the clock."""


@functools.cache
def artifacts(config: AllReduceConfig, target: str) -> Artifacts:
    return compile_to_artifacts(family="all_reduce", config=config, build=build, target=target)


def aligned(size: int) -> torch.Tensor:
    """Bytes that start at a multiple of 256, poisoned."""
    whole = torch.full((size // 2 + 256,), POISON, dtype=torch.int16).view(torch.uint8)
    skip = -whole.data_ptr() % 256
    return whole[skip : skip + size]


def pack(*, x, out, rank, base, stride, source, target, nanoseconds, report, multicast=MULTICAST) -> list[bytes]:
    """The kernel's parameters; x and out are (address, elements), source and target (offset, step)."""
    numbers = [("<i", rank)] + [("<q", n) for n in (base, stride, multicast, *source, *target, nanoseconds, report)]
    return [struct.pack("<QQ", *x), struct.pack("<QQ", *out), *(struct.pack(form, n) for form, n in numbers)]


class RankBlock(grid_machine.Block):
    """One block of one rank."""

    clock = 0

    def value(self, operand):
        if operand == "%globaltimer":
            RankBlock.clock += _TICK
            return np.broadcast_to(np.uint64(RankBlock.clock), self.threads)
        return super().value(operand)

    def execute(self, opcode, parts, operands, active):
        if parts[0] == "st" and "release" in parts:
            self.publish()
            super().execute(opcode, parts, operands, active)
            self.publish()
        elif parts[0] == "multimem":
            self.multimem(parts[1], parts[-1], operands, active)
        elif opcode.startswith("fence.proxy"):
            pass
        elif parts[0] == "abs":
            bits = self.value(operands[1]).astype(np.uint32).view(np.int32).astype(np.int64)
            self.write(operands[0], np.abs(bits).astype(np.uint64), active)
        elif parts[0] == "rsqrt":
            assert parts[-1] == "f32"  # approximate, but for less than a step of 24 bits
            value = self.value(operands[1]).astype(np.uint32).view(np.float32).astype(np.float64)
            with np.errstate(divide="ignore"):  # in lanes that aren't active
                self.write(operands[0], (1 / np.sqrt(value)).astype(np.float32).view(np.uint32), active)
        elif parts[0] == "cvt" and parts[-2:] == ["f32", "bf16"]:
            self.write(operands[0], (self.value(operands[1]) & np.uint64(0xFFFF)) << np.uint64(16), active)
        elif parts[-1] in ("bf16x2", "f16x2", "bf16", "f16") and parts[0] in ("add", "mul", "fma"):
            self.write(operands[0], self.narrow(parts, [self.value(o) for o in operands[1:]]), active)
        else:
            super().execute(opcode, parts, operands, active)

    def multimem(self, name, kind, operands, active):
        """ld_reduce and st of 128 bits."""
        place, held = (operands[1], operands[0]) if name == "ld_reduce" else (operands[0], operands[1])
        registers = [r.strip() for r in held.strip("{} ").split(",")]
        offsets = (self.address(place)[active] - np.uint64(MULTICAST)).astype(np.int64)
        assert len(registers) == 4 and (offsets % 16 == 0).all() and (offsets >= 0).all()
        places = offsets[:, None] + np.arange(16)
        parts = self.machine.parts
        assert places.max() < len(parts[0])
        if name == "st":
            words = np.stack([self.value(r)[active].astype(np.uint32) for r in registers], 1).view(np.uint8)
            self.stores += [(part, places, words) for part in parts]
            return
        assert name == "ld_reduce"
        dtype = {"bf16x2": torch.bfloat16, "f16x2": torch.float16, "f32": torch.float32}[kind]
        total = all_reduce([torch.from_numpy(part[places]).view(dtype) for part in parts])
        words = total.view(torch.int32).numpy().view(np.uint32)
        for i, register in enumerate(registers):
            bits = np.zeros(self.threads, np.uint64)
            bits[active] = words[:, i]
            self.write(register, bits, active)

    @staticmethod
    def narrow(parts, values):
        """a + b, a * b, or a * 1 + b, of 16-bit numbers, rounded once."""
        dtype = torch.bfloat16 if parts[-1].startswith("bf") else torch.float16
        halves = []
        for shift in (0, 16) if parts[-1].endswith("x2") else (0,):
            bits = [(v >> np.uint64(shift)).astype(np.uint16).view(np.int16) for v in values]
            a, *more = (torch.from_numpy(b.copy()).view(dtype).double() for b in bits)
            exact = a + more[0] if parts[0] == "add" else a * more[0]
            if parts[0] == "fma":
                exact = exact + more[1]
            result = exact.to(dtype)
            halves.append(result.view(torch.int16).numpy().view(np.uint16).astype(np.uint64) << np.uint64(shift))
        return functools.reduce(np.bitwise_or, halves)


class Launch(NamedTuple):
    """A kernel and its parameters; the same object again is a replay."""

    ptx: str
    params: list[bytes]
    blocks: int


class Ranks:
    """A group: its symmetric memory, and a stream of launches for each rank."""

    def __init__(self, size: int, *, max_bytes: int, heap_bytes: int = 0, seed: int = 0, target: str = "sm_90a"):
        self.size, self.target, self.seed = size, target, seed
        self.layout = Layout(size, max_bytes, heap_bytes)
        self.stride = -(-self.layout.size // 256) * 256
        self.memory = aligned(self.stride * size)
        self.report = torch.zeros(size, 1, dtype=torch.int64)
        for rank in range(size):
            self.part(rank)[: self.layout.staging] = 0
        self.tensors = {"memory": self.memory, "report": self.report}
        self.queues: list[deque[Launch]] = [deque() for _ in range(size)]
        self.ended = [0] * size
        self.random = random.Random(seed)
        RankBlock.clock = 0

    def part(self, rank: int) -> torch.Tensor:
        return self.memory[rank * self.stride : (rank + 1) * self.stride]

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

    def run(self, *, pace: list[float] | None = None, before=None) -> None:
        """Until all streams are empty.

        Args:
            pace: how often each rank gets a turn, 0 to 1.
            before: called with (rank, number of its launch) when a launch starts; what the stream does before it.
        """
        memory = grid_machine.Memory(self.tensors, {*self.tensors})
        pace = pace or [self.random.choice((1.0, 0.5, 0.1)) for _ in range(self.size)]
        running: list[list[RankBlock]] = [[] for _ in range(self.size)]
        idle = 0
        while any(running) or any(self.queues):
            moved = False
            for rank in self.random.sample(range(self.size), self.size):
                if self.random.random() > pace[rank]:
                    continue
                if not running[rank] and self.queues[rank]:
                    if before:
                        before(rank, self.ended[rank])
                    running[rank] = self._start(rank, memory)
                for block in self.random.sample(running[rank], len(running[rank])):
                    if self.random.random() < 0.7:
                        moved |= block.turn()
                    if self.random.random() < 0.3:
                        block.publish_some()
                for block in [b for b in running[rank] if b.left.all()]:
                    block.publish()
                    running[rank].remove(block)
                    self.ended[rank] += not running[rank]
            idle = 0 if moved else idle + 1
            assert idle < 3000, f"deadlock; launches that have ended: {self.ended}"

    def _start(self, rank: int, memory: grid_machine.Memory) -> list[RankBlock]:
        launch = self.queues[rank].popleft()
        seed = self.random.randrange(2**31)
        machine = grid_machine.Machine(launch.ptx, memory, launch.params, grid=launch.blocks, shared=1024, seed=seed)
        machine.previous_ended = True
        machine.parts = [self.part(r).numpy() for r in range(self.size)]
        return [RankBlock(machine, index) for index in range(launch.blocks)]
