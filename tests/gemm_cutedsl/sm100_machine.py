"""Runs the PTX of the tcgen05 GEMM on the CPU: warps, mbarriers, TMA, tensor memory and the matrix unit.

What it models follows the PTX ISA: shared-memory and instruction descriptors, scale layouts, the swizzle, arrival and
transaction counts, blocks of a pair. Asynchronous work is done late, in an order drawn at random, except where an order
is promised: matrix instructions among themselves, a copy of scales before the matrix instructions behind it, a commit
behind everything. A copy of scales is not held back by matrix instructions in front of it. So a missing wait shows as a
wrong result, and one too many as a deadlock. It knows nothing of time, nor of what hardware does beyond the manual.
An instruction that it doesn't know is an error.
"""

import functools
import random
import re
import struct
from collections import Counter

import numpy as np
from sm100_units import WIDTHS, Block, Global, TensorMap, multiply, operation

LANES = 32
ALL = np.ones(LANES, bool)
NOWHERE = 2**62
DIVERGED = NOWHERE + 1
"""Behind every program; no place of a group."""
_PLAIN = {"add", "sub", "mul", "mad", "fma", "and", "or", "xor", "shl", "shr", "setp", "selp", "mov", "cvt", "popc"}
_KINDS = {"b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64", "pred"}
_BLOCKING = ("mbarrier.try_wait", "bar.sync", "barrier.cluster.wait", "griddepcontrol.wait")


class Program:
    """PTX as a list of (guard, opcode, its parts, operands), and where its labels are."""

    def __init__(self, ptx: str):
        shared = re.search(r"\.extern \.shared .* (\S+)\[\]", ptx)
        self.shared_name = shared[1] if shared else ""
        self.threads = int(re.search(r"\.reqntid (\d+)", ptx)[1])
        self.target = re.search(r"\.target (\S+)", ptx)[1]
        self.code, self.labels = [], {}
        self.plain = []
        """Of each instruction that no machine reads in its own way: what it does, and where it reads."""
        body = ptx[ptx.index("\n{") + 2 : ptx.rindex("}")]
        body = re.sub(r"//[^\n]*", "", body)
        inline = 0
        for raw in body.split("\n"):
            line = raw.strip()
            if line == "{" or line.startswith("{ .reg"):
                inline += 1
                line = line[1:].removesuffix("}")
            if line == "}" or line.startswith(".pragma"):
                continue
            for part in line.split(";"):
                self._add(part.strip(), inline)

    def _add(self, text: str, inline: int) -> None:
        if not text or text.startswith(".") or text == "}":
            return
        if re.fullmatch(r"[$\w]+:", text):
            self.labels[self._label(text[:-1], inline)] = len(self.code)
            return
        guard = re.match(r"@(!?)(%?\w+)\s+", text)
        if guard:
            text = text[guard.end() :]
        opcode, _, rest = text.replace("\t", " ").partition(" ")
        operands = [o.strip() for o in re.findall(r"\[[^\]]*\]|\{[^}]*\}|[^,\s]+", rest)]
        if opcode.startswith("bra"):
            operands = [self._label(operands[0], inline)]
        parts = opcode.replace("::", ":").split(".")
        self.code.append(((guard[1] == "!", guard[2]) if guard else None, opcode, parts, operands))
        self.plain.append((operation(parts[0], tuple(parts[1:])), operands[1:]) if _plain(parts, operands) else None)

    @staticmethod
    def _label(name: str, inline: int) -> str:
        return name if name.startswith("$") else f"{name}/{inline}"


class Warp:
    """32 threads, each with a place in the program; those furthest behind go first."""

    def __init__(self, machine: "Machine", block: Block, number: int):
        self.machine, self.block, self.number = machine, block, number
        self.at = np.zeros(LANES, np.int64)
        self.left = np.zeros(LANES, bool)
        lanes = np.arange(LANES, dtype=np.uint64)
        special = {
            "tid.x": lanes + np.uint64(number * LANES),
            "laneid": lanes,
            "ctaid.x": block.index,
            "nctaid.x": machine.grid,
            "cluster_ctarank": block.rank,
            "smid": machine.sm_of(block.index),
        }
        self.registers = {f"%{k}": np.broadcast_to(np.uint64(v), LANES) for k, v in special.items()}
        self.stuck = ""
        self.waiting = None

    @property
    def ended(self) -> bool:
        return bool(self.left.all())

    def run(self) -> bool:
        """Goes on until something must be waited for. False: nothing could be done."""
        moved = False
        program, blocking = self.machine.program, self.machine.blocking
        while not self.ended:
            at, mask, following = foremost(self.at, ~self.left)
            while at < following:
                guard, opcode, parts, operands = program.code[at]
                active = mask
                if guard is not None:
                    held = self.value(guard[1]).astype(bool)
                    active = mask & (~held if guard[0] else held)
                if parts[0] == "bra":
                    at = branch(self.at, mask, active, at, program.labels[operands[0]])
                    continue
                if opcode.startswith(blocking) and not self.machine.may_pass(self, opcode, operands, active):
                    self.stuck = f"{opcode} {operands}"
                    self.at[mask] = at
                    return moved
                moved = True
                plain = program.plain[at]
                at += 1
                if opcode == "ret":
                    self.left |= active
                    break
                if guard is None or np.count_nonzero(active):
                    if plain is None:
                        self.machine.execute(self, opcode, parts, operands, active)
                    else:
                        with np.errstate(all="ignore"):
                            self.write(operands[0], plain[0](*map(self.value, plain[1])), active)
            if at != DIVERGED:
                self.at[mask] = at
        return moved

    # ---- operands ----

    def value(self, operand: str) -> np.ndarray:
        found = self.registers.get(operand)
        if found is not None:
            return found
        if operand == self.machine.program.shared_name:
            return np.full(LANES, self.block.shared_base, np.uint64)
        if "_param_" in operand:
            return np.full(LANES, self.machine.parameter_address(operand), np.uint64)
        return _constant(operand)

    def one(self, operand: str, active: np.ndarray) -> int:
        """The value of the only active thread, or the same in all."""
        values = set(self.value(operand)[active].tolist())
        assert len(values) == 1, f"{operand} differs among threads"
        return values.pop()

    def write(self, register: str, bits: np.ndarray, active: np.ndarray) -> None:
        if register == "_":
            return
        bits = np.asarray(bits)
        if bits.shape != (LANES,) or bits.dtype != np.uint64:
            bits = np.broadcast_to(bits, LANES).astype(np.uint64)
        if np.count_nonzero(active) == LANES:
            self.registers[register] = bits
        else:
            self.registers[register] = np.where(active, bits, self.registers.get(register, np.uint64(0)))

    def address(self, operand: str) -> np.ndarray:
        base, offset = _address(operand)
        return self.value(base) + offset if offset else self.value(base)


def _plain(parts: list[str], operands: list[str]) -> bool:
    """On registers alone, of integers and in one of the well-known forms."""
    name, *modifiers = parts
    kinds = modifiers[-2:] if name == "cvt" else modifiers[-1:]
    known = {*kinds} <= _KINDS or (name in ("add", "sub", "mul", "fma", "mov") and kinds == ["f32"])
    return name in _PLAIN and known and "hi" not in modifiers and not any(o.startswith("{") for o in operands)


def foremost(places: np.ndarray, ready: np.ndarray) -> tuple[int, np.ndarray, int]:
    """(where those threads are that have come least far, who they are, where the next ones are)."""
    taken = places[ready]
    at = int(taken.min())
    behind = taken[taken > at]
    return at, (places == at) & ready, int(behind.min()) if len(behind) else NOWHERE


def branch(places: np.ndarray, group: np.ndarray, active: np.ndarray, at: int, target: int) -> int:
    """Where the group goes on together; DIVERGED, with their places noted, if only some threads take the branch."""
    count = np.count_nonzero(active)
    if count == 0:
        return at + 1
    if count == np.count_nonzero(group):
        return target
    places[group] = at + 1
    places[active] = target
    return DIVERGED


@functools.cache
def _constant(operand: str) -> np.ndarray:
    if operand.startswith("0f"):
        number = int(operand[2:], 16)
    elif re.fullmatch(r"-?\d+", operand):
        number = int(operand) & (2**64 - 1)
    else:
        raise KeyError(f"{operand} is read before it is written")
    return np.full(LANES, number, np.uint64)


@functools.cache
def _address(operand: str) -> tuple[str, np.uint64]:
    base, offset = re.fullmatch(r"\[([^+\]]+?)(?:\+(-?\d+))?\]", operand).groups()
    return base, np.uint64(int(offset or 0) & (2**64 - 1))


class Machine:
    """The blocks of one cluster, and what works beside their warps."""

    blocking = _BLOCKING
    """Instructions that :meth:`may_pass` is asked about."""

    def __init__(self, program: Program, memory: Global, params: list, *, grid: int, blocks: int, seed: int):
        self.program, self.memory, self.params, self.grid = program, memory, params, grid
        self.random = random.Random(seed)
        self.wide = program.target.startswith("sm_107")
        self.cluster_blocks = blocks
        self.unheeded = range(0)
        self.sms: list[int] = []
        """Where the grid's blocks run; empty: block 0 on SM 0, and so on."""

    def run(self, *, shared: int, before, released) -> None:
        """All clusters of the grid, one after another. `before` each of them, and when the previous kernel has ended,
        the caller can change memory."""
        for cluster in range(self.grid // self.cluster_blocks):
            first = cluster * self.cluster_blocks
            self.blocks = [
                Block(self, rank, first + rank, shared, self.random.randrange(2**32))
                for rank in range(self.cluster_blocks)
            ]
            self.warps = [Warp(self, b, w) for b in self.blocks for w in range(self.program.threads // LANES)]
            self.later, self.products = [], []  # asynchronous work: in any order; in this order
            self.previous_ended = False
            self.backwards, self.slow = self.random.random() < 0.5, self.random.random() < 0.5
            self.arrived, self.passed = Counter(), Counter()  # by barrier: warps that wait, times that all have come
            before()
            self.run_cluster(released)
            for block in self.blocks:
                assert block.tensor_columns == 0, "tensor memory was not given back"
                assert all(barrier.pending_bytes == 0 for barrier in block.barriers.values())

    def run_cluster(self, released) -> None:
        idle = 0
        while not all(warp.ended for warp in self.warps):
            order = self.warps[:]
            self.random.shuffle(order)
            moved = False
            for warp in order:
                if not self.previous_ended or self.random.random() < 0.8:  # others lag behind
                    moved |= warp.run()
                for _ in range(self.random.choice((0, 0, 1) if self.slow else (0, 1, 40))):
                    moved |= self.do_some()
            if not self.previous_ended and self.random.random() < 0.5:
                self.previous_ended = moved = True
                released()
            if moved:
                idle = 0
                continue
            idle += 1
            if idle < 50:
                continue
            stuck = {(w.block.rank, w.number): w.stuck for w in self.warps if not w.ended}
            raise AssertionError(f"deadlock: {stuck}")
        assert not self.later and not self.products, "a block left before its copies were done"

    def do_some(self) -> bool:
        """A piece of asynchronous work."""
        if not (self.later or self.products):
            return False
        if self.later and (not self.products or self.random.random() < 0.5):
            newest = len(self.later) - 1
            self.later.pop(newest if self.backwards else self.random.randint(0, newest))()
        else:
            self.products.pop(0)()
        return True

    def sm_of(self, block: int) -> int:
        """Where a block of the grid runs."""
        return self.sms[block] if self.sms else block

    # ---- what blocks ----

    def may_pass(self, warp: Warp, opcode: str, operands: list[str], active: np.ndarray) -> bool:
        if opcode == "griddepcontrol.wait":
            return self.previous_ended
        if opcode.startswith("mbarrier.try_wait"):
            address = int(warp.address(operands[1])[active][0])
            barrier = self.barrier(address)
            return address & 0xFFFFFF in self.unheeded or barrier.phase & 1 != warp.one(operands[2], active) & 1
        # Threads of a warp come to a barrier together here, and warps are counted.
        if opcode == "bar.sync":
            name = (warp.block.rank, warp.one(operands[0], active))
            needed = warp.one(operands[1], active) // LANES if len(operands) > 1 else self.program.threads // LANES
        else:
            name, needed = ("cluster",), len(self.warps)
        if warp.waiting is None:
            warp.waiting = self.passed[name]
            self.arrived[name] += 1
            if self.arrived[name] == needed:
                self.arrived[name] = 0
                self.passed[name] += 1
        if self.passed[name] > warp.waiting:
            warp.waiting = None
            return True
        return False

    # ---- places ----

    def barrier(self, address: int):
        return self.blocks[address >> 24].barriers[address & 0xFFFFFF]

    def parameter_address(self, operand: str) -> int:
        return (1 << 60) + int(re.search(r"_param_(\d+)$", operand)[1])

    def tensor_map(self, address: int) -> TensorMap:
        return TensorMap(self.params[address - (1 << 60)], self.memory)

    # ---- instructions ----

    def execute(self, warp: Warp, opcode: str, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        name, *modifiers = parts
        if name in ("fence", "prefetch") or opcode.startswith(_BLOCKING):
            if opcode.startswith("mbarrier.try_wait"):
                warp.write(operands[0], 1, active)
        elif name in ("griddepcontrol", "barrier") or opcode == "bar.warp.sync":
            pass
        elif name == "tcgen05":
            self.tcgen05(warp, modifiers, operands, active)
        elif name == "mbarrier":
            self.mbarrier(warp, modifiers, operands, active)
        elif opcode.startswith("cp.async.bulk.tensor"):
            self.copy_tensor(warp, modifiers, operands, active)
        elif name == "elect":
            register, predicate = operands[0].split("|")
            lane = int(np.flatnonzero(active)[0])
            assert active.all(), "elect.sync by a part of a warp"
            warp.write(register, lane, active)
            warp.write(predicate, np.arange(LANES) == lane, active)
        elif name in ("shfl", "vote", "redux"):
            assert active.all(), f"{name} by a part of a warp"
            self.exchange(warp, name, modifiers, operands)
        elif opcode.startswith("st.async"):
            self.store_async(warp, operands, active)
        elif name in ("ld", "st"):
            self.move(warp, name, modifiers, operands, active)
        elif name == "atom":
            assert {"global", "add", "u32"} <= set(modifiers) and active.sum() == 1
            address = int(warp.address(operands[1])[active][0])
            memory, starts = self.memory.span(np.array([address], np.uint64), 4, True)
            word = memory[starts[0] : starts[0] + 4].view(np.uint32)
            warp.write(operands[0], int(word[0]), active)
            word += np.uint32(warp.one(operands[2], active))
        elif name == "mov" and any(o.startswith("{") for o in operands):
            self.split(warp, WIDTHS[modifiers[-1]] // 2, operands, active)
        elif name in ("mapa", "cvta"):
            value = warp.value(operands[1])
            if name == "mapa":
                value = (value & np.uint64(0xFFFFFF)) | (warp.value(operands[2]) << np.uint64(24))
            warp.write(operands[0], value, active)
        else:
            values = [warp.value(o) for o in operands[1:]]
            with np.errstate(all="ignore"):
                warp.write(operands[0], operation(name, tuple(modifiers))(*values), active)

    def exchange(self, warp: Warp, name: str, modifiers: list[str], operands: list[str]) -> None:
        value = warp.value(operands[1])
        lanes = np.arange(LANES)
        if name == "redux":
            assert modifiers == ["sync", "max", "u32"]
            result = np.full(LANES, value.max())
        elif name == "vote":
            result = np.full(LANES, sum(1 << i for i in lanes if value[i]), np.uint64)
        else:
            other = warp.value(operands[2]).astype(np.int64)
            source = {"up": lanes - other, "idx": other & 31, "bfly": lanes ^ other}[modifiers[1]]
            result = value[np.where(source >= 0, source, lanes)]
        warp.write(operands[0], result, ALL)

    def split(self, warp: Warp, width: int, operands: list[str], active: np.ndarray) -> None:
        shift, half = np.uint64(width), np.uint64(2**width - 1)
        if operands[0].startswith("{"):
            low, high = (o.strip() for o in operands[0].strip("{}").split(","))
            word = warp.value(operands[1])
            warp.write(low, word & half, active)
            warp.write(high, (word >> shift) & half, active)
        else:
            low, high = (warp.value(o.strip()) & half for o in operands[1].strip("{}").split(","))
            warp.write(operands[0], low | (high << shift), active)

    def move(self, warp: Warp, name: str, modifiers: list[str], operands: list[str], active: np.ndarray) -> None:
        width = WIDTHS[modifiers[-1]] // 8
        at, held = (operands[1], operands[0]) if name == "ld" else (operands[0], operands[1])
        registers = [r.strip() for r in held.strip("{} ").split(",")]
        if modifiers[0] == "param":
            number, offset = re.search(r"_param_(\d+)(?:\+(\d+))?\]$", at).groups()
            for i, register in enumerate(registers):
                start = int(offset or 0) + i * width
                piece = self.params[int(number)][start : start + width]
                warp.write(register, int.from_bytes(piece, "little"), active)
            return
        addresses, size = warp.address(at)[active], width * len(registers)
        assert (addresses % np.uint64(size) == 0).all(), "an access is not aligned"
        space = self.memory if "global" in modifiers else warp.block
        memory, starts = space.span(addresses, size, name == "st")
        places = starts[:, None] + np.arange(size)
        for i, register in enumerate(registers):
            part = places[:, i * width : (i + 1) * width]
            if name == "st":
                memory[part] = warp.value(register)[active].view(np.uint8).reshape(-1, 8)[:, :width]
            else:
                bits = np.zeros((LANES, 8), np.uint8)
                bits[active, :width] = memory[part]
                warp.write(register, bits.view(np.uint64)[:, 0], active)

    def store_async(self, warp: Warp, operands: list[str], active: np.ndarray) -> None:
        registers = [r.strip() for r in operands[1].strip("{} ").split(",")]
        words = np.stack([warp.value(r) for r in registers], 1).astype(np.uint32).view(np.uint8)  # (lane, bytes)
        targets, signals = warp.address(operands[0]), warp.address(operands[2])
        for lane in np.flatnonzero(active):
            target, signal = int(targets[lane]), int(signals[lane])
            assert target % words.shape[1] == 0

            def finish(target=target, signal=signal, data=words[lane]) -> None:
                offset = target & 0xFFFFFF
                self.blocks[target >> 24].shared[offset : offset + len(data)] = data
                self.barrier(signal).complete(len(data))

            self.later.append(finish)

    def mbarrier(self, warp: Warp, modifiers: list[str], operands: list[str], active: np.ndarray) -> None:
        kind = modifiers[0]
        place = operands[0] if kind in ("init", "expect_tx") else operands[1]
        assert active.sum() == 1, f"mbarrier.{kind} by {active.sum()} threads"
        address = int(warp.address(place)[active][0])
        if kind == "init":
            self.blocks[address >> 24].new_barrier(address & 0xFFFFFF, warp.one(operands[1], active))
            return
        barrier = self.barrier(address)
        if "expect_tx" in modifiers:
            barrier.expect(warp.one(operands[-1], active))
        if kind == "arrive":
            barrier.arrive()

    def copy_tensor(self, warp: Warp, modifiers: list[str], operands: list[str], active: np.ndarray) -> None:
        assert active.sum() == 1
        target = int(warp.address(operands[0])[active][0])
        map_register, coordinates = re.fullmatch(r"\[(\S+), \{(.*)\}\]", operands[1]).groups()
        tensor = self.tensor_map(warp.one(map_register, active))
        place = [warp.one(c.strip(), active) for c in coordinates.split(",")]
        signal = int(warp.address(operands[2])[active][0])
        ranks = [target >> 24]
        if "multicast:cluster" in modifiers:
            ranks = [r for r in range(self.cluster_blocks) if warp.one(operands[3], active) >> r & 1]

        def finish() -> None:
            data = tensor.box([c - 2**32 if c >= 2**31 else c for c in place])
            for rank in ranks:
                tensor.fill(self.blocks[rank], target & 0xFFFFFF, data)
                self.barrier(signal).complete(data.size)

        self.later.append(finish)

    def tcgen05(self, warp: Warp, modifiers: list[str], operands: list[str], active: np.ndarray) -> None:
        kind = modifiers[0]
        blocks = self.blocks if "cta_group:2" in modifiers else [warp.block]
        if kind.startswith(("fence:", "wait:", "relinquish_alloc_permit")):
            return
        if kind == "alloc":
            columns = warp.one(operands[1], active)
            assert columns in (32, 64, 128, 256, 512) or ("exclusive" in modifiers and columns == 576)
            base = warp.block.allocate(columns, self.cluster_blocks)
            address = int(warp.address(operands[0])[active][0])
            offset = address & 0xFFFFFF
            warp.block.shared[offset : offset + 4] = np.frombuffer(struct.pack("<I", base), np.uint8)
        elif kind == "dealloc":
            assert warp.one(operands[1], active) == warp.block.tensor_columns
            warp.block.tensor_columns = 0
        elif kind == "ld":
            registers = [r.strip() for r in operands[0].strip("{}").split(",")]
            address = int(warp.address(operands[1])[active][0])
            lane = address >> 16
            assert lane == warp.number % 4 * LANES, "a warp reads lanes that are not its own"
            for i, register in enumerate(registers):
                column = (address & 0xFFFF) + i
                warp.write(register, warp.block.tensor[column, lane : lane + LANES].view(np.uint32), active)
        else:
            self.issue(warp, kind, modifiers, operands, active, blocks)

    def issue(self, warp, kind, modifiers, operands, active, blocks) -> None:
        assert active.sum() == 1 and (len(blocks) == 1 or warp.block is self.blocks[0])
        if kind == "commit":
            address = int(warp.address(operands[0])[active][0])
            ranks = [address >> 24]
            if "multicast:cluster" in modifiers:
                ranks = [r for r in range(self.cluster_blocks) if warp.one(operands[1], active) >> r & 1]
            self.products.append(lambda: [self.barrier((rank << 24) | (address & 0xFFFFFF)).arrive() for rank in ranks])
        elif kind == "cp":
            column = int(warp.address(operands[0])[active][0])
            descriptor = warp.one(operands[1], active)
            for block in blocks:
                block.copy_scales(column, descriptor, self.wide)
        else:
            assert kind == "mma"
            result = int(warp.address(operands[0])[active][0])
            a, b, description = (warp.one(o, active) for o in operands[1:4])
            sfa, sfb = (int(warp.address(o)[active][0]) for o in operands[4:6])
            add = bool(warp.one(operands[6], active))
            self.products.append(lambda: multiply(blocks, result, a, b, description, sfa, sfb, add, self.wide))
