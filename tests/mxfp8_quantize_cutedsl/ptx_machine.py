"""Runs the PTX of a kernel on the CPU, every thread of the grid at once, so that its bits can be tested with no GPU.

It knows the instructions that the quantizers compile to and nothing else: an unknown one is an error. Branches may only
go forward. Loads and stores are checked for bounds and alignment. `ex2.approx` and `rcp.approx` are rounded correctly,
which the hardware's are not; everything else has one legal result.
"""

import re

import numpy as np
import torch

WARP = 32
_REGISTER = re.compile(r"^%?[A-Za-z_][\w.]*$")
_TYPES = {"b8": 8, "b16": 16, "u16": 16, "s16": 16, "b32": 32, "u32": 32, "s32": 32, "f32": 32, "b64": 64, "s64": 64}
_TYPES |= {"u64": 64, "u16x2": 32}
_BASE = 1 << 40
"""Address of the memory's first byte: beyond 32 bits, so that a lost upper half is noticed."""


def f32(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def bits_of(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).view(np.uint32).astype(np.uint64)


def signed(bits: np.ndarray, width: int) -> np.ndarray:
    return bits.astype({16: np.uint16, 32: np.uint32, 64: np.uint64}[width]).view(f"i{width // 8}").astype(np.int64)


def e4m3(values: np.ndarray) -> np.ndarray:
    """cvt.rn.satfinite.e4m3x2 of one half."""
    clamped = torch.from_numpy(values.copy()).clamp(-448.0, 448.0)
    codes = clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.uint64)
    return np.where(np.isnan(values), 0x7F, codes)


class Memory:
    """Flat memory with an address for each tensor, and a fence of poison around all of them."""

    FENCE = 512

    def __init__(self, poison: int = 0xAB):
        self.poison = poison
        self.bytes = np.zeros(0, np.uint8)
        self.writable = np.zeros(0, bool)

    def place(self, data: bytes | int, *, offset: int = 0, writable: bool = False) -> int:
        """Address of a copy of `data`, or of that many bytes of poison, `offset` past a multiple of 256."""
        start = -(-len(self.bytes) // 256) * 256 + self.FENCE + offset
        size = data if isinstance(data, int) else len(data)
        grown = np.full(start + size + self.FENCE, self.poison, np.uint8)
        grown[: len(self.bytes)] = self.bytes
        may = np.zeros(len(grown), bool)
        may[: len(self.writable)] = self.writable
        if not isinstance(data, int):
            grown[start : start + size] = np.frombuffer(data, np.uint8)
        may[start : start + size] = writable
        self.bytes, self.writable = grown, may
        return _BASE + start

    def read(self, address: int, size: int) -> np.ndarray:
        return self.bytes[address - _BASE : address - _BASE + size].copy()


def run(ptx: str, *, grid: int, params: list[bytes], memory: Memory) -> None:
    """Runs the only kernel of `ptx` for `grid` blocks."""
    threads = int(re.search(r"\.reqntid (\d+)", ptx)[1])
    _Machine(grid, threads, params, memory).run(ptx)


class _Machine:
    def __init__(self, grid: int, threads: int, params: list[bytes], memory: Memory):
        self.count = grid * threads
        index = np.arange(self.count, dtype=np.uint64)
        self.registers = {"%tid.x": index % threads, "%ctaid.x": index // threads}
        self.params, self.memory = params, memory
        self.waiting = np.full(self.count, "", dtype=object)  # label at which a thread goes on

    def run(self, ptx: str) -> None:
        body = ptx[ptx.index("\n{") + 2 :]
        with np.errstate(all="ignore"):
            for raw in body.split("\n"):
                line = raw.split("//")[0].strip()
                if line.startswith("{ .reg"):
                    line = line[1:].rstrip().removesuffix("}")
                if line.endswith(":"):
                    self.waiting[self.waiting == line[:-1]] = ""
                    continue
                if line == "}":
                    break
                for statement in line.split(";"):
                    if statement.strip():
                        self.step(statement.strip())

    def step(self, statement: str) -> None:
        if statement.startswith("."):
            return
        active = self.waiting == ""
        guard = re.match(r"@(!?)(%p\d+)\s+", statement)
        if guard:
            held = self.registers[guard[2]].astype(bool)
            active = active & (~held if guard[1] else held)
            statement = statement[guard.end() :]
        opcode, _, rest = statement.partition(" ") if " " in statement else statement.partition("\t")
        operands = [o.strip() for o in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)]
        name, *modifiers = opcode.split(".")
        if name == "bra":
            self.waiting[active] = operands[0]
        elif name == "ret":
            self.waiting[active] = "end"
        elif name == "griddepcontrol" or opcode == "bar.warp.sync":
            pass  # every thread runs in step with the others
        elif name == "ld":
            self.load(modifiers, operands, active)
        elif name == "st":
            self.store(modifiers, operands, active)
        elif name == "mov" and (operands[0].startswith("{") or operands[1].startswith("{")):
            self.move_halves(_TYPES[modifiers[-1]] // 2, operands, active)
        else:
            kind = modifiers[-1] if modifiers else ""
            result = self.compute(name, modifiers, kind, [self.value(o) for o in operands[1:]])
            self.write(operands[0], result, active)

    # ---- operands ----

    def value(self, operand: str) -> np.ndarray:
        if operand in self.registers:
            return self.registers[operand]
        if operand.startswith("0f"):
            number = int(operand[2:], 16)
        elif re.match(r"^-?\d+$", operand):
            number = int(operand) & (2**64 - 1)
        elif _REGISTER.match(operand):
            raise KeyError(f"{operand} is read before it is written")
        else:
            raise NotImplementedError(f"operand {operand}")
        return np.full(self.count, number, np.uint64)

    def write(self, register: str, bits: np.ndarray, active: np.ndarray) -> None:
        old = self.registers.get(register, np.zeros(self.count, np.uint64))
        self.registers[register] = np.where(active, bits.astype(np.uint64), old)

    def address(self, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[]").partition("+")
        return (self.value(base) + np.uint64(int(offset or 0))).astype(np.int64) - _BASE

    def move_halves(self, width: int, operands: list[str], active: np.ndarray) -> None:
        shift, half = np.uint64(width), np.uint64(2**width - 1)
        if operands[0].startswith("{"):
            word = self.value(operands[1])
            low, high = (o.strip() for o in operands[0].strip("{}").split(","))
            self.write(low, word & half, active)
            self.write(high, (word >> shift) & half, active)
        else:
            low, high = (self.value(o.strip()) & half for o in operands[1].strip("{}").split(","))
            self.write(operands[0], low | (high << shift), active)

    # ---- memory ----

    def load(self, modifiers: list[str], operands: list[str], active: np.ndarray) -> None:
        width = _TYPES[modifiers[-1]] // 8
        if modifiers[0] == "param":
            index, offset = re.search(r"_param_(\d+)(?:\+(\d+))?\]$", operands[1]).groups()
            piece = self.params[int(index)][int(offset or 0) :][:width]
            number = int.from_bytes(piece, "little")
            self.write(operands[0], np.full(self.count, number, np.uint64), active)
            return
        registers = operands[0].strip("{} ").split(",")
        self.move(registers, self.address(operands[1]), width, active, loads=True)

    def store(self, modifiers: list[str], operands: list[str], active: np.ndarray) -> None:
        registers = operands[1].strip("{} ").split(",")
        self.move(registers, self.address(operands[0]), _TYPES[modifiers[-1]] // 8, active, loads=False)

    def move(self, registers: list[str], at: np.ndarray, width: int, active: np.ndarray, *, loads: bool) -> None:
        places = at[active]
        total = width * len(registers)
        assert (places % total == 0).all(), f"an access of {total} bytes is not aligned"
        assert ((places >= 0) & (places + total <= len(self.memory.bytes))).all(), "an access leaves the memory"
        span = places[:, None] + np.arange(total)
        if not loads:
            assert self.memory.writable[span].all(), "a store outside of the results"
        for i, register in enumerate(registers):
            part = span[:, i * width : (i + 1) * width]
            if loads:
                bits = np.zeros(self.count, np.uint64)
                padded = np.zeros((len(places), 8), np.uint8)
                padded[:, :width] = self.memory.bytes[part]
                bits[active] = padded.view(np.uint64)[:, 0]
                self.write(register.strip(), bits, active)
            else:
                values = self.value(register.strip())[active]
                self.memory.bytes[part] = values.view(np.uint8).reshape(-1, 8)[:, :width]

    # ---- arithmetic ----

    def compute(self, name: str, modifiers: list[str], kind: str, args: list[np.ndarray]) -> np.ndarray:
        if name == "cvt":
            return self.convert(modifiers, args)
        if kind == "f32" and name not in ("mov", "selp"):
            return bits_of(self.float_math(name, modifiers, [f32(a) for a in args]))
        if name == "shfl":
            lanes = np.arange(self.count) ^ int(args[1][0])
            return args[0][lanes]
        if name == "selp":
            return np.where(args[2].astype(bool), args[0], args[1])
        if name == "mov":
            return args[0]
        if kind == "pred":
            args = [a.astype(bool) for a in args]
            return {"and": lambda: args[0] & args[1], "or": lambda: args[0] | args[1], "not": lambda: ~args[0]}[name]()
        width = _TYPES[kind]
        keep = np.uint64(2**width - 1)
        if name == "setp":
            return self.compare(modifiers[0], kind, args)
        if kind == "u16x2":
            low, high = (
                np.maximum((args[0] >> s) & np.uint64(0xFFFF), (args[1] >> s) & np.uint64(0xFFFF)) << s
                for s in (np.uint64(0), np.uint64(16))
            )
            return low | high
        if name == "shr" and kind.startswith("s"):
            return (signed(args[0], width) >> args[1].astype(np.int64)).astype(np.uint64) & keep
        a = [x & keep for x in args]
        if name == "mul" and "wide" in modifiers:
            return a[0] * a[1]
        if name == "mul" and "hi" in modifiers:
            product = a[0].astype(object) * a[1].astype(object)  # Python's integers: it has up to 128 bits
            return (product >> width).astype(np.uint64)
        actions = {
            "add": lambda: a[0] + a[1],
            "sub": lambda: a[0] - a[1],
            "mul": lambda: a[0] * a[1],
            "mad": lambda: a[0] * a[1] + a[2],
            "and": lambda: a[0] & a[1],
            "or": lambda: a[0] | a[1],
            "xor": lambda: a[0] ^ a[1],
            "shl": lambda: a[0] << a[1],
            "shr": lambda: a[0] >> a[1],
            "max": lambda: np.maximum(a[0], a[1]),
            "min": lambda: np.minimum(a[0], a[1]),
        }
        if name not in actions or (name in ("max", "min") and not kind.startswith("u")):
            raise NotImplementedError(f"{name}.{'.'.join(modifiers)}")
        return actions[name]() & keep

    def compare(self, relation: str, kind: str, args: list[np.ndarray]) -> np.ndarray:
        width = _TYPES[kind]
        if kind.startswith("s"):
            a, b = (signed(x & np.uint64(2**width - 1), width) for x in args)
        else:
            a, b = (x & np.uint64(2**width - 1) for x in args)
        return {
            "eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b
        }[relation]  # fmt: skip

    def convert(self, modifiers: list[str], args: list[np.ndarray]) -> np.ndarray:
        to, source = modifiers[-2:]
        if to == "e4m3x2":
            return (e4m3(f32(args[0])) << np.uint64(8)) | e4m3(f32(args[1]))
        if to in ("bf16x2", "f16x2") and source == "f32":
            dtype = torch.bfloat16 if to == "bf16x2" else torch.float16
            high, low = (
                torch.from_numpy(f32(a).copy()).to(dtype).view(torch.int16).numpy().view(np.uint16).astype(np.uint64)
                for a in args
            )
            return (high << np.uint64(16)) | low
        if (to, source) == ("f16x2", "e4m3x2"):
            low, high = (
                torch.from_numpy(half.astype(np.uint8)).view(torch.float8_e4m3fn).half().view(torch.int16).numpy()
                for half in (args[0] & np.uint64(0xFF), (args[0] >> np.uint64(8)) & np.uint64(0xFF))
            )
            return (high.view(np.uint16).astype(np.uint64) << np.uint64(16)) | low.view(np.uint16).astype(np.uint64)
        if (to, source) == ("f32", "f16"):
            return bits_of(args[0].astype(np.uint16).view(np.float16))
        if to in ("u16", "u32", "u64") and source in ("u16", "u32", "u64"):
            return args[0] & np.uint64(2 ** min(_TYPES[to], _TYPES[source]) - 1)
        raise NotImplementedError(f"cvt.{'.'.join(modifiers)}")

    def float_math(self, name: str, modifiers: list[str], a: list[np.ndarray]) -> np.ndarray:
        if name == "fma":
            exact = a[0].astype(np.float64) * a[1] + a[2]
            result = exact.astype(np.float32)
            if "rm" in modifiers:
                result = np.where(result > exact, np.nextafter(result, np.float32(-np.inf)), result)
            if "sat" in modifiers:
                result = np.where(np.isnan(result), 0, np.clip(result, 0, 1))
            return result
        if name in ("max", "min"):
            assert "NaN" in modifiers
            return (np.maximum if name == "max" else np.minimum)(a[0], a[1])
        if name in ("rcp", "ex2"):
            result = 1 / a[0].astype(np.float64) if name == "rcp" else np.exp2(a[0].astype(np.float64))
            result = result.astype(np.float32)
            assert "ftz" in modifiers
            return np.where(np.abs(result) < np.finfo(np.float32).tiny, np.copysign(0, result), result)
        assert "ftz" not in modifiers, "flushes subnormals"
        return {
            "add": lambda: a[0] + a[1],
            "sub": lambda: a[0] - a[1],
            "mul": lambda: a[0] * a[1],
            "neg": lambda: -a[0],
            "abs": lambda: np.abs(a[0]),
        }[name]()
