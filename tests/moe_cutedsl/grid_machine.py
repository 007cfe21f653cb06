"""Runs the PTX of kernels whose blocks wait for each other on the CPU: all blocks of a grid side by side.

A turn gives some warps of one block some instructions, drawn at random, and some warps of a block are much slower than
the others, so warps and blocks come to every point in any order; the lanes of a warp stay together. A block's plain
stores reach the others late and in any order, but for those before its next release. So a missing barrier, or a flag
without release, shows as a wrong result in some runs, and a wait for nobody as a deadlock. Accesses are checked for
bounds and alignment; the arithmetic is `sm100_units`'.
An instruction that it doesn't know is an error.
"""

import functools
import random
import re
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "gemm_cutedsl"))
from sm100_machine import DIVERGED, Program, _address, _constant, branch, foremost
from sm100_units import WIDTHS, operation

WARP = 32
_SHARED, _LOCAL = 1 << 20, 1 << 30
"""Addresses of a block's shared memory, and of each thread's own."""
_LOCAL_BYTES = 64


class Memory:
    """Tensors on the CPU at their own addresses."""

    def __init__(self, tensors: dict[str, torch.Tensor], results: set[str]):
        self.parts = []
        self.changes = 0
        """How often something came to be seen by all blocks."""
        for name, tensor in tensors.items():
            if not tensor.numel():
                continue
            # With what lies between strided rows.
            span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            whole = tensor.as_strided((span,), (1,)).view(torch.uint8).numpy()
            self.parts.append((tensor.data_ptr(), whole, name in results, name))

    def find(self, addresses: np.ndarray, size: int, *, writable: bool) -> tuple[np.ndarray, np.ndarray]:
        """(bytes, where in them the accesses begin); one instruction stays within one tensor."""
        low, high = int(addresses.min()), int(addresses.max()) + size
        for start, data, may_write, name in self.parts:
            if start <= low < start + len(data):
                assert high <= start + len(data), f"an access leaves {name}"
                assert may_write or not writable, f"a store into {name}"
                return data, (addresses - np.uint64(start)).astype(np.int64)
        raise AssertionError(f"an access to {low:#x}, where nothing is")


class Block:
    """The threads of one block, each with a place in the program."""

    def __init__(self, machine: "Machine", index: int):
        self.machine = machine
        self.threads = machine.program.threads
        lanes = np.arange(self.threads, dtype=np.uint64)
        special = {
            "tid.x": lanes,
            "laneid": lanes % np.uint64(WARP),
            "ctaid.x": index,
            "nctaid.x": machine.grid,
            "lanemask_lt": (np.uint64(1) << (lanes % np.uint64(WARP))) - np.uint64(1),
        }
        self.registers = {f"%{k}": np.broadcast_to(np.uint64(v), self.threads) for k, v in special.items()}
        self.at = np.zeros(self.threads, np.int64)
        self.left = np.zeros(self.threads, bool)
        self.waits = np.zeros(self.threads, bool)  # at a barrier of the block
        self.shared = machine.noise.integers(0, 256, machine.shared, dtype=np.uint8)
        self.local = machine.noise.integers(0, 256, self.threads * _LOCAL_BYTES, dtype=np.uint8)
        self.stores = []  # that others don't see yet
        self.slow = machine.noise.random(self.threads // WARP) < machine.random.choice((0.0, 0.2, 0.7))
        self.stuck = ""
        self.polled = -1
        """Changes of the memory that it knew of when it last looked at a flag in vain; -1: it didn't."""

    def turn(self) -> bool:
        """Goes on with some warps for a while. False: nothing could be done."""
        machine = self.machine
        warps = self.threads // WARP
        chosen = machine.noise.random(warps) < machine.random.choice((0.15, 0.6, 1.0))
        chosen &= ~self.slow | (machine.noise.random(warps) < 0.05)
        mine = np.repeat(chosen, WARP)
        with np.errstate(all="ignore"):
            return self.run(mine, machine.random.choice((5, 60, 600, 6000)))

    def run(self, mine: np.ndarray, instructions: int) -> bool:
        """Goes on with the warps of those threads. False: nothing could be done."""
        machine, program = self.machine, self.machine.program
        self.polled = -1
        moved, group, at, following = False, None, 0, 0
        for _ in range(instructions):
            if at >= following:
                if group is not None and at != DIVERGED:
                    self.at[group] = at
                ready = mine & ~(self.left | self.waits)
                if not np.count_nonzero(ready):
                    return moved
                at, group, following = foremost(self.at, ready)
            guard, opcode, parts, operands = program.code[at]
            plain = program.plain[at]
            if opcode.startswith("griddepcontrol.wait") and not machine.previous_ended:
                self.stuck = opcode
                break
            active = group
            if guard is not None:
                held = self.value(guard[1]).astype(bool)
                active = group & (~held if guard[0] else held)
            moved = True
            if parts[0] == "bra":
                source, target = at, program.labels[operands[0]]
                at = branch(self.at, group, active, at, target)
                if at != source + 1 and target <= source and machine.random.random() < 0.5:
                    self.polled = machine.memory.changes  # perhaps
                    break
                continue
            at += 1
            if opcode == "ret":
                self.left |= active
                following = 0
            elif opcode.startswith("bar.sync"):
                self.waits |= active
                assert not self.left.any(), "a barrier after threads have left"
                if self.waits.all():
                    self.waits[:] = False
                following = 0
            elif guard is None or np.count_nonzero(active):
                if plain is None:
                    self.execute(opcode, parts, operands, active)
                else:
                    self.write(operands[0], plain[0](*map(self.value, plain[1])), active)
        if at != DIVERGED:
            self.at[group] = at
        return moved

    # ---- operands ----

    def value(self, operand: str) -> np.ndarray:
        found = self.registers.get(operand)
        return self.other(operand) if found is None else found

    def other(self, operand: str) -> np.ndarray:
        """What is no register; it stays the same."""
        if operand == self.machine.program.shared_name:
            number = np.uint64(_SHARED)
        elif operand.startswith("__local_depot"):
            number = np.uint64(_LOCAL)
        else:
            number = _constant(operand)[0]
        self.registers[operand] = np.full(self.threads, number)
        return self.registers[operand]

    def write(self, register: str, bits: np.ndarray, active: np.ndarray) -> None:
        bits = np.asarray(bits)
        if bits.dtype != np.uint64:
            bits = bits.astype(np.uint64)
        if np.count_nonzero(active) == self.threads:
            self.registers[register] = bits if bits.ndim else np.full(self.threads, bits)
        else:
            self.registers[register] = np.where(active, bits, self.registers.get(register, np.uint64(0)))

    def address(self, operand: str) -> np.ndarray:
        base, offset = _address(operand)
        return self.value(base) + offset if offset else self.value(base)

    # ---- instructions ----

    def execute(self, opcode: str, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        name, *modifiers = parts
        if name == "griddepcontrol" or opcode == "bar.warp.sync":
            return
        if name in ("shfl", "match", "vote"):
            self.exchange(name, modifiers, operands, active)
        elif name in ("atom", "red"):
            self.add(name, modifiers, operands, active)
        elif name in ("ld", "st"):
            self.move(name, modifiers, operands, active)
        elif name == "mov" and any(o.startswith("{") for o in operands):
            self.split(WIDTHS[modifiers[-1]] // 2, operands, active)
        else:
            self.write(operands[0], _compute(name, modifiers, [self.value(o) for o in operands[1:]]), active)

    def exchange(self, name: str, modifiers: list[str], operands: list[str], active: np.ndarray) -> None:
        by_warp = active.reshape(-1, WARP)
        assert (by_warp.all(1) | ~by_warp.any(1)).all(), f"{name} by a part of a warp"
        value = self.value(operands[1]).reshape(-1, WARP)
        lanes = np.arange(WARP)
        bits = np.uint64(1) << lanes.astype(np.uint64)
        if name == "vote":
            assert modifiers[:2] == ["sync", "ballot"]
            result = np.broadcast_to((value.astype(bool) * bits).sum(1, keepdims=True, dtype=np.uint64), value.shape)
        elif name == "match":
            assert modifiers[0] == "any"
            same = (value[:, :, None] & np.uint64(0xFFFFFFFF)) == (value[:, None, :] & np.uint64(0xFFFFFFFF))
            result = (same * bits).sum(2, dtype=np.uint64)
        else:
            other = np.broadcast_to(self.value(operands[2]), self.threads).reshape(-1, WARP).astype(np.int64)
            source = {"up": lanes - other, "idx": other & 31, "bfly": lanes ^ other}[modifiers[1]]
            result = np.take_along_axis(value, np.where(source >= 0, source, lanes), 1)
        self.write(operands[0], result.reshape(-1), active)

    def split(self, width: int, operands: list[str], active: np.ndarray) -> None:
        shift, half = np.uint64(width), np.uint64(2**width - 1)
        if operands[0].startswith("{"):
            low, high = (o.strip() for o in operands[0].strip("{}").split(","))
            word = self.value(operands[1])
            self.write(low, word & half, active)
            self.write(high, (word >> shift) & half, active)
        else:
            low, high = (self.value(o.strip()) & half for o in operands[1].strip("{}").split(","))
            self.write(operands[0], low | (high << shift), active)

    def add(self, name: str, modifiers: list[str], operands: list[str], active: np.ndarray) -> None:
        """atom and red: one thread after another, seen by all at once."""
        assert "add" in modifiers and modifiers[-1] in ("u32", "s32") and not {"cta", "cluster"} & {*modifiers}
        if "release" in modifiers or "acq_rel" in modifiers:
            self.publish()
        place, amount = (operands[1], operands[2]) if name == "atom" else (operands[0], operands[1])
        addresses, amounts = self.address(place), self.value(amount)
        for lane in np.flatnonzero(active):
            data, (start,) = self.machine.memory.find(addresses[lane : lane + 1], 4, writable=True)
            word = data[start : start + 4].view(np.uint32)
            if name == "atom":
                self.write(operands[0], np.full(self.threads, word[0]), np.arange(self.threads) == lane)
            self.machine.memory.changes += 1
            word[0] = (int(word[0]) + int(amounts[lane])) & 0xFFFFFFFF

    def publish(self) -> None:
        """Lets all others see what this block has stored."""
        self.machine.memory.changes += len(self.stores)
        for data, places, values in self.stores:
            data[places] = values
        self.stores = []

    def publish_some(self) -> None:
        """One store, not always the oldest: no two of a launch go to the same place."""
        if self.stores:
            self.machine.memory.changes += 1
            data, places, values = self.stores.pop(self.machine.random.randrange(len(self.stores)))
            data[places] = values

    def move(self, name: str, modifiers: list[str], operands: list[str], active: np.ndarray) -> None:
        width = WIDTHS[modifiers[-1]] // 8
        at, held = (operands[1], operands[0]) if name == "ld" else (operands[0], operands[1])
        registers = _registers(held)
        if modifiers[0] == "param":
            number, offset = _parameter(at)
            for i, register in enumerate(registers):
                start = offset + i * width
                piece = self.machine.params[number][start : start + width]
                self.write(register, np.uint64(int.from_bytes(piece, "little")), active)
            return
        assert "nc" not in modifiers, "a load that may be stale"
        addresses, size = self.address(at)[active], width * len(registers)
        assert (addresses % np.uint64(size) == 0).all(), "an access is not aligned"
        own = "shared" in modifiers or "local" in modifiers
        if "local" in modifiers:
            starts = (addresses - np.uint64(_LOCAL)).astype(np.int64)
            assert starts.min() >= 0 and starts.max() + size <= _LOCAL_BYTES, "outside of a thread's memory"
            memory, starts = self.local, starts + np.flatnonzero(active) * _LOCAL_BYTES
        elif own:
            memory, starts = self.shared, (addresses - np.uint64(_SHARED)).astype(np.int64)
            assert starts.min() >= 0 and starts.max() + size <= len(memory), "outside of shared memory"
        else:
            memory, starts = self.machine.memory.find(addresses, size, writable=name == "st")
        places = starts[:, None] + np.arange(size)
        if name == "st":
            words = [self.value(r)[active].view(np.uint8).reshape(-1, 8)[:, :width] for r in registers]
            values = np.concatenate(words, 1)
            if own:
                memory[places] = values
            else:
                self.machine.count_stores(memory, places)
                self.stores.append((memory, places, values))
            return
        if not own:
            self.publish_own(memory, places)
        for i, register in enumerate(registers):
            bits = np.zeros((self.threads, 8), np.uint8)
            bits[active, :width] = memory[places[:, i * width : (i + 1) * width]]
            self.write(register, bits.view(np.uint64)[:, 0], active)

    def publish_own(self, memory: np.ndarray, places: np.ndarray) -> None:
        """A block sees its own stores at once."""
        low, high = places.min(), places.max()
        for data, stored, _ in self.stores:
            if data is memory and stored.min() <= high and stored.max() >= low:
                self.publish()
                return


class Machine:
    """A launch."""

    def __init__(self, ptx: str, memory: Memory, params: list[bytes], *, grid: int, shared: int, seed: int):
        self.program, self.memory, self.params, self.grid = _program(ptx), memory, params, grid
        self.shared = shared
        self.random, self.noise = random.Random(seed), np.random.default_rng(seed)
        self.previous_ended = False
        self.written = {}
        """How often each byte of a tensor was stored to, by the address of its bytes."""

    def count_stores(self, memory: np.ndarray, places: np.ndarray) -> None:
        key = memory.__array_interface__["data"][0]
        counts = self.written.setdefault(key, np.zeros(len(memory), np.int32))
        np.add.at(counts, places, 1)

    def run(self, *, ended=lambda: None) -> None:
        """Until all blocks have left; `ended` is called when the kernel in front has."""
        blocks = [Block(self, index) for index in range(self.grid)]
        idle = 0
        while blocks:
            moved = False
            for block in self.random.sample(blocks, len(blocks)):
                if self.random.random() < 0.7:
                    moved |= block.turn()
                if self.random.random() < 0.3:
                    block.publish_some()
            if not self.previous_ended and self.random.random() < 0.4:
                self.previous_ended = moved = True
                ended()
            for block in [b for b in blocks if b.left.all()]:
                block.publish()
                blocks.remove(block)
            idle = 0 if moved else idle + 1
            assert idle < 3000, f"deadlock: {len(blocks)} blocks are left, {[b.stuck for b in blocks][:4]}"


@functools.cache
def _registers(operand: str) -> list[str]:
    return [r.strip() for r in operand.strip("{} ").split(",")]


@functools.cache
def _parameter(operand: str) -> tuple[int, int]:
    """(number, offset)"""
    number, offset = re.search(r"_param_(\d+)(?:\+(\d+))?\]$", operand).groups()
    return int(number), int(offset or 0)


@functools.lru_cache(maxsize=64)
def _program(ptx: str) -> Program:
    return Program(ptx)


def _compute(name: str, modifiers: list[str], args: list[np.ndarray]) -> np.ndarray:
    kind = modifiers[-1]
    if kind == "u16x2":
        assert name == "max"
        halves = [(a >> s) & np.uint64(0xFFFF) for s in (np.uint64(0), np.uint64(16)) for a in args]
        return np.maximum(*halves[:2]) | np.maximum(*halves[2:]) << np.uint64(16)
    if name == "cvt":
        to, source = modifiers[-2:]
        if (to, source) == ("f32", "f16"):
            return args[0].astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32).astype(np.uint64)
        if (to, source) == ("f16x2", "e4m3x2"):
            halves = [
                torch.from_numpy((args[0] >> s).astype(np.uint8)).view(torch.float8_e4m3fn).half().view(torch.int16)
                for s in (np.uint64(0), np.uint64(8))
            ]
            low, high = (half.numpy().view(np.uint16).astype(np.uint64) for half in halves)
            return low | high << np.uint64(16)
    if name in ("div", "rem"):
        assert kind in ("s32", "u32")
        a, b = (x.astype(np.uint32).view(np.int32 if kind == "s32" else np.uint32).astype(np.int64) for x in args)
        quotient = np.where(b == 0, 0, np.sign(a) * np.sign(b) * (np.abs(a) // np.maximum(np.abs(b), 1)))
        return ((quotient if name == "div" else a - quotient * b) & 0xFFFFFFFF).astype(np.uint64)
    if name == "mul" and "hi" in modifiers and kind != "s32":
        assert kind.startswith("u")
        a, b = ((x & np.uint64(2 ** WIDTHS[kind] - 1)).astype(object) for x in args)
        product = a * b  # Python's integers: it has up to 128 bits
        return (product >> WIDTHS[kind]).astype(np.uint64)
    if name == "not" and kind != "pred":
        return ~args[0] & np.uint64(2 ** WIDTHS[kind] - 1)
    if name in ("max", "min") and kind == "f32":
        assert "NaN" in modifiers
    return operation(name, tuple(modifiers))(*args)
