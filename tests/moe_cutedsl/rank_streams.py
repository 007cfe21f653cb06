"""Runs the PTX of kernels that wait for other GPUs on the CPU: all ranks of a group side by side, launch after launch.

Multimem is as the PTX manual describes it, with sums in the order of the ranks.

What grid_machine is for one launch: warps, blocks and ranks come to every point in any order, and plain stores reach
others late but for those before a release. A block that looked at a flag in vain is mostly left alone until the memory
has changed. A rank's launches run one after another, as in a stream; ranks may lag.
A launch that is `early` may start while the one before it runs, once all blocks of that have let it
(programmatic dependent launch), and stops at its `griddepcontrol.wait` until that has ended.
"""

import functools
import random
from collections import deque
from typing import NamedTuple

import grid_machine
import numpy as np
import torch

from vllm_rose_plugin.kernels.all_reduce.reference import all_reduce

NEVER = 2**60
MULTICAST = 1 << 50
"""Where the multicast mapping is: no memory, so an ordinary access there is an error."""
_TICK = 7
"""Nanoseconds that pass with every look at the clock."""


class RankBlock(grid_machine.Block):
    """One block of one rank."""

    clock = 0

    def __init__(self, machine, index):
        super().__init__(machine, index)
        self.triggered = np.zeros(self.threads, bool)  # has let the next launch start

    def other(self, operand):
        if operand == "%globaltimer":
            RankBlock.clock += _TICK
            return np.full(self.threads, np.uint64(RankBlock.clock))
        return super().other(operand)

    def execute(self, opcode, parts, operands, active):
        if parts[0] == "mov" and operands[1].startswith("{"):
            # Where a pair is made of a register that nobody wrote, the other half alone counts: here it holds poison.
            for half in operands[1].strip("{} ").split(","):
                if half.strip().startswith("%r") and half.strip() not in self.registers:
                    self.registers[half.strip()] = np.full(self.threads, np.uint64(0xDEADBEEF))
            super().execute(opcode, parts, operands, active)
        elif parts[0] == "st" and "release" in parts:
            self.publish()
            super().execute(opcode, parts, operands, active)
            self.publish()
        elif parts[0] == "multimem":
            self.multimem(parts[1], parts[-1], operands, active)
        elif opcode == "griddepcontrol.launch_dependents":
            self.triggered |= active
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
        elif parts[0] == "add" and parts[-3:] in (["f32x2", "bf16x2", "f32x2"], ["f32x2", "f16x2", "f32x2"]):
            self.write(operands[0], self.mixed(parts[-2], *(self.value(o) for o in operands[1:])), active)
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
    def mixed(kind, narrow, wide):
        """sm_107's a + b of a pair of 16-bit numbers and a pair of float32 ones."""
        halves = []
        for i in range(2):
            bits = (narrow >> np.uint64(16 * i)).astype(np.uint16)
            if kind == "bf16x2":
                a = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
            else:
                a = bits.view(np.float16).astype(np.float32)
            b = (wide >> np.uint64(32 * i)).astype(np.uint32).view(np.float32)
            with np.errstate(all="ignore"):
                halves.append((a + b).view(np.uint32).astype(np.uint64) << np.uint64(32 * i))
        return halves[0] | halves[1]

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
    shared: int = 1024
    early: bool = False


class Streams:
    """A group's memory, and a stream of launches for each rank.

    Subclasses put tensors into `tensors` and launches into `queues`.
    """

    def __init__(self, size: int, stride: int, *, seed: int = 0, poison: int = 0, skip_polls: bool = True):
        """Args:
        stride: bytes of a rank's part.
        poison: 16 bits that fill all of the memory.
        skip_polls: leave a block that looked at a flag in vain mostly alone until the memory has changed. Without, a
            run takes longer, and a block more often looks in the few turns after a flag has come.
        """
        self.size, self.stride, self.skip_polls = size, stride, skip_polls
        self.memory = aligned(stride * size, poison)
        self.report = torch.zeros(size, 1, dtype=torch.int64)
        self.tensors = {"memory": self.memory, "report": self.report}
        self.queues: list[deque[Launch]] = [deque() for _ in range(size)]
        self.ended = [0] * size
        self.random = random.Random(seed)
        RankBlock.clock = 0

    def part(self, rank: int) -> torch.Tensor:
        return self.memory[rank * self.stride : (rank + 1) * self.stride]

    def run(self, *, pace: list[float] | None = None, before=None) -> None:
        """Until all streams are empty.

        Args:
            pace: how often each rank gets a turn, 0 to 1.
            before: called with (rank, number of its launch) when a launch starts; what the stream does before it.
        """
        memory = grid_machine.Memory(self.tensors, {*self.tensors})
        pace = pace or [self.random.choice((1.0, 0.5, 0.1)) for _ in range(self.size)]
        running: list[list[list[RankBlock]]] = [[] for _ in range(self.size)]  # of each launch of each rank
        idle = 0
        while any(running) or any(self.queues):
            moved = False
            active = [rank for rank in range(self.size) if running[rank] or self.queues[rank]]
            fastest = max(pace[rank] for rank in active)  # of what is left; else time would pass for nothing
            for rank in self.random.sample(active, len(active)):
                if self.random.random() * fastest > pace[rank]:
                    continue
                if self.queues[rank] and self._may_start(running[rank], self.queues[rank][0]):
                    if before:
                        before(rank, self.ended[rank] + len(running[rank]))
                    running[rank].append(self._start(rank, memory, alone=not running[rank]))
                blocks = [block for launch in running[rank] for block in launch]
                for block in self.random.sample(blocks, len(blocks)):
                    if self.skip_polls and block.polled == memory.changes and self.random.random() < 0.9:
                        RankBlock.clock += _TICK  # it would see what it saw
                        moved = True
                    elif self.random.random() < 0.7:
                        moved |= block.turn()
                    if self.random.random() < 0.3:
                        block.publish_some()
                first = running[rank][0]
                for block in [b for b in first if b.left.all()]:
                    block.publish()
                    first.remove(block)
                if not first:
                    self.ended[rank] += 1
                    running[rank].pop(0)
                    for block in running[rank][0] if running[rank] else []:
                        block.machine.previous_ended = True
            idle = 0 if moved else idle + 1
            assert idle < 20_000, f"deadlock; launches that have ended: {self.ended}"

    def _may_start(self, running: list[list[RankBlock]], launch: Launch) -> bool:
        if not running:
            return True
        let = all((block.triggered | block.left).all() for block in running[0])
        return launch.early and len(running) == 1 and let and self.random.random() < 0.5

    def _start(self, rank: int, memory: grid_machine.Memory, *, alone: bool) -> list[RankBlock]:
        launch = self.queues[rank].popleft()
        seed = self.random.randrange(2**31)
        machine = grid_machine.Machine(
            launch.ptx, memory, launch.params, grid=launch.blocks, shared=launch.shared, seed=seed
        )
        machine.previous_ended = alone
        machine.parts = [self.part(r).numpy() for r in range(self.size)]
        return [RankBlock(machine, index) for index in range(launch.blocks)]


def aligned(size: int, poison: int) -> torch.Tensor:
    """Bytes that start at a multiple of 256, filled with 16 bits of poison."""
    whole = torch.full((size // 2 + 256,), poison, dtype=torch.int16).view(torch.uint8)
    skip = -whole.data_ptr() % 256
    return whole[skip : skip + size]
