"""The protocol of all-reduce as a model: ranks, blocks, flags and memory cells, without a kernel.

It steps through what `all_reduce/kernel.py` says it does, one access at a time, in an order drawn at random, for many
more launches than the kernels' PTX can be run for. A cell knows who reads it at this moment: storing to it then is an
error, and so is a sum of anything but the inputs of its own launch. `Faults` takes one rule of the protocol away, to
show that the model would notice.
"""

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from vllm_rose_plugin.kernels.all_reduce.layout import PHASES

Steps = Generator[None, None, None]
ONE_SHOT, TWO_SHOT, ZERO_COPY = "one_shot", "two_shot", "zero_copy"
MOST_BLOCKS = 4


class ProtocolError(AssertionError):
    """What the protocol is there to prevent."""


@dataclass(frozen=True)
class Faults:
    """Rules left out."""

    one_buffer: bool = False
    """No second staging buffer."""
    no_result_wait: bool = False
    """Two-shot ends without its second wait."""
    epoch_of_block: bool = False
    """A launch counts only for the blocks that it has, so their parities come apart."""
    flag_early: bool = False
    """The flag is set before the input is in place."""
    copies_when_gone: bool = False
    """A rank that gave up goes on writing to its staging buffers."""


@dataclass(frozen=True)
class Call:
    """A launch, the same on all ranks."""

    kind: str
    blocks: int


@dataclass
class Cell:
    value: object = None
    readers: set = field(default_factory=set)


class Model:
    """A group of ranks, each with a stream of calls."""

    def __init__(
        self,
        size: int,
        calls: list[Call],
        *,
        seed: int,
        units: int = 0,
        patience: int = 10**9,
        faults: Faults | None = None,
    ):
        self.size, self.calls, self.patience = size, calls, patience
        self.faults = faults or Faults()
        self.random = random.Random(seed)
        self.part = -(-(units or 2 * size) // size)  # units that one rank reduces in two-shot
        self.units = self.part * size
        ranks = range(size)
        self.staging = [[[Cell() for _ in range(self.units)] for _ in range(2)] for _ in ranks]
        self.heap = [[Cell() for _ in range(self.units)] for _ in ranks]
        self.flags = [[[[0] * size for _ in range(MOST_BLOCKS)] for _ in PHASES] for _ in ranks]
        self.epochs = [[0] * MOST_BLOCKS for _ in ranks]
        self.abandoned = [False] * size
        self.reports: list[tuple[int, str, int] | None] = [None] * size  # (peer, phase, epoch)
        self.launched = [0] * size
        self.results: list[list[list[object]]] = [[] for _ in ranks]
        self.clock = 0

    def run(self, *, pace: list[float] | None = None, dies: tuple[int, int] | None = None) -> None:
        """Until all streams have ended.

        Args:
            pace: how often each rank gets a turn.
            dies: (rank, turn): it stops there, wherever it is.
        """
        pace = pace or [self.random.choice((1.0, 0.6, 0.08)) for _ in range(self.size)]
        streams = {rank: self.stream(rank) for rank in range(self.size)}
        while streams:
            rank = self.random.choice([*streams])
            self.clock += 1
            dead = dies is not None and rank == dies[0] and self.clock >= dies[1]
            if dead:
                for cell in self.cells():
                    cell.readers.discard(rank)
            if dead or (self.random.random() < pace[rank] and next(streams[rank], "end") == "end"):
                del streams[rank]

    def cells(self) -> Iterator[Cell]:
        for staging, heap in zip(self.staging, self.heap, strict=True):
            yield from (*staging[0], *staging[1], *heap)

    def stream(self, rank: int) -> Iterator[None]:
        for number, call in enumerate(self.calls):
            mine = [(rank, number, unit) for unit in range(self.units)]
            x: list = mine
            if call.kind == ZERO_COPY:  # the kernel before writes where everybody will read
                x = self.heap[rank]
                for cell, value in zip(x, mine, strict=True):
                    yield from self.store(rank, cell, value)
            self.launched[rank] += 1
            out: list = [None] * self.units
            blocks = [self.block(rank, block, call, x, out) for block in range(call.blocks)]
            while blocks:
                block = self.random.choice(blocks)
                if next(block, "end") == "end":
                    blocks.remove(block)
                yield
            self.results[rank].append([cell.value for cell in x] if call.kind == ZERO_COPY else out)

    def share(self, call: Call, block: int, owner: int | None) -> list[int]:
        """Units of one block, of one rank's part or, where owner is None, of everything."""
        first, count = (0, self.units) if owner is None else (owner * self.part, self.part)
        return [first + j for j in range(count) if j % call.blocks == block]

    def block(self, rank: int, block: int, call: Call, x: list, out: list) -> Steps:
        epoch = self.epochs[rank][block] + 1
        gone = self.abandoned[rank]
        two_shot = call.kind != ONE_SHOT
        parity = 0 if self.faults.one_buffer else epoch & 1

        def source(peer: int) -> list[Cell]:
            return self.heap[peer] if call.kind == ZERO_COPY else self.staging[peer][parity]

        owners = range(self.size) if two_shot else [None]
        if self.faults.flag_early:
            yield from self.signal(rank, block, 0, epoch)
        if call.kind != ZERO_COPY and (not gone or self.faults.copies_when_gone):
            for owner in owners:
                for unit in self.share(call, block, owner):
                    yield from self.store(rank, source(rank)[unit], x[unit])
        gone = yield from self.meet(rank, block, 0, epoch, gone)
        if not gone:
            for unit in self.share(call, block, rank if two_shot else None):
                values = []
                for peer in range(self.size):
                    value = yield from self.load(rank, source(peer)[unit])
                    values.append(value)
                total = self.sum_of(values, rank, unit)
                if not two_shot:
                    out[unit] = total
                else:
                    for peer in range(self.size):
                        yield from self.store(rank, source(peer)[unit], total)
        if two_shot:
            if not self.faults.no_result_wait:
                gone = yield from self.meet(rank, block, 1, epoch, gone)
            if not gone and call.kind == TWO_SHOT:
                for owner in owners:
                    for unit in self.share(call, block, owner):
                        out[unit] = yield from self.load(rank, source(rank)[unit])
        copies = [block] if self.faults.epoch_of_block else range(block, MOST_BLOCKS, call.blocks)
        for copy in copies:
            self.epochs[rank][copy] = epoch

    def signal(self, rank: int, block: int, phase: int, epoch: int) -> Steps:
        for peer in self.random.sample(range(self.size), self.size):
            self.flags[peer][phase][block][rank] = epoch
            yield

    def meet(self, rank: int, block: int, phase: int, epoch: int, gone: bool) -> Generator[None, None, bool]:
        if gone:
            return True
        if not (self.faults.flag_early and phase == 0):
            yield from self.signal(rank, block, phase, epoch)
        start = self.clock
        for peer in range(self.size):
            while self.flags[rank][phase][block][peer] < epoch:
                if self.clock - start > self.patience:
                    self.reports[rank] = self.reports[rank] or (peer, PHASES[phase], epoch)
                    self.abandoned[rank] = True
                    return True
                yield
        return False

    def load(self, rank: int, cell: Cell) -> Generator[None, None, object]:
        cell.readers.add(rank)
        value = cell.value
        yield
        if cell.value != value:
            raise ProtocolError(f"rank {rank} read a cell that changed meanwhile")
        cell.readers.discard(rank)
        return value

    def store(self, rank: int, cell: Cell, value: object) -> Steps:
        if cell.readers - {rank}:
            raise ProtocolError(f"rank {rank} overwrites what ranks {sorted(cell.readers)} read")
        cell.value = value
        yield

    def sum_of(self, values: list, rank: int, unit: int) -> object:
        number = self.launched[rank] - 1
        expected = [(peer, number, unit) for peer in range(self.size)]
        if values != expected:
            raise ProtocolError(f"rank {rank} adds {values} in launch {number}")
        return ("sum", number, unit)


def all_sums(model: Model, number: int) -> list:
    """What every rank must have after a launch."""
    return [("sum", number, unit) for unit in range(model.units)]


def random_calls(count: int, *, seed: int, kinds: tuple[str, ...] = (ONE_SHOT, TWO_SHOT, ZERO_COPY)) -> list[Call]:
    """A graph's calls, of any kind and number of blocks."""
    draw: Callable = random.Random(seed).choice
    return [Call(draw(kinds), draw(range(1, MOST_BLOCKS + 1))) for _ in range(count)]
