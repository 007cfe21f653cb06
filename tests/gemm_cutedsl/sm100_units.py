"""What stands around the warps in ``sm100_machine``: memories, mbarriers, tensor maps, the matrix unit, arithmetic."""

import functools
import struct
from collections.abc import Callable, Sequence

import numpy as np
import torch

SHARED_OFFSET = 1024
"""Of dynamic shared memory: the system has what comes before."""
_LANES = 128


class Global:
    """Tensors with an address each, far from one another."""

    def __init__(self):
        self.tensors = []  # (address, bytes, writable)

    def place(self, data: np.ndarray, *, writable: bool = False) -> int:
        """Address of the bytes of `data`, which is used in place."""
        address = (len(self.tensors) + 1) << 36
        self.tensors.append((address, data, writable))
        return address

    def find(self, address: int, size: int, writable: bool = False) -> np.ndarray:
        start, data, may_write = self.tensors[(address >> 36) - 1]
        assert 0 <= address - start <= len(data) - size, "an access leaves its tensor"
        assert may_write or not writable, "a store into an input"
        return data[address - start : address - start + size]

    def span(self, addresses: np.ndarray, size: int, writable: bool) -> tuple[np.ndarray, np.ndarray]:
        """(bytes, where in them accesses of `size` bytes begin); one instruction stays within one tensor."""
        first = int(addresses.min())
        data = self.find(first, int(addresses.max()) - first + size, writable)
        return data, (addresses - np.uint64(first)).astype(int)


class Barrier:
    """An mbarrier. Bytes may be completed before they are expected; the phase waits for both."""

    def __init__(self, count: int):
        self.count = self.pending = count
        self.pending_bytes = self.phase = 0

    def expect(self, size: int) -> None:
        self.pending_bytes += size

    def complete(self, size: int) -> None:
        self.pending_bytes -= size
        self._turn()

    def arrive(self) -> None:
        assert self.pending > 0, "more arrivals than a phase has"
        self.pending -= 1
        self._turn()

    def _turn(self) -> None:
        if self.pending == 0 and self.pending_bytes == 0:
            self.phase += 1
            self.pending = self.count


class Block:
    """Shared and tensor memory of one block, full of noise at first."""

    def __init__(self, machine, rank: int, index: int, shared: int, seed: int):
        noise = np.random.default_rng(seed)
        self.machine, self.rank, self.index = machine, rank, index
        self.shared = noise.integers(0, 256, SHARED_OFFSET + shared, dtype=np.uint8)
        self.barriers = {}
        self.tensor_columns = 0
        self.tensor = np.full((576, _LANES), np.nan, np.float32)  # (column, lane)

    @property
    def shared_base(self) -> int:
        return (self.rank << 24) | SHARED_OFFSET

    def new_barrier(self, offset: int, count: int) -> None:
        self.barriers[offset] = Barrier(count)

    def allocate(self, columns: int, blocks: int) -> int:
        assert self.tensor_columns == 0
        self.tensor_columns = columns
        self.tensor_base = 0 if columns > 256 else 256
        return self.tensor_base

    def span(self, addresses: np.ndarray, size: int, writable: bool) -> tuple[np.ndarray, np.ndarray]:
        """As ``Global.span``."""
        del writable
        assert (addresses >> np.uint64(24) == self.rank).all()
        offsets = (addresses & np.uint64(0xFFFFFF)).astype(int)
        assert offsets.min() >= SHARED_OFFSET and offsets.max() + size <= len(self.shared), "outside of shared memory"
        return self.shared, offsets

    def gather(self, offsets: np.ndarray) -> np.ndarray:
        assert (offsets >= SHARED_OFFSET).all() and (offsets < len(self.shared)).all()
        return self.shared[offsets]

    def columns(self, first: int, count: int) -> np.ndarray:
        """View of tensor memory, which must be allocated there."""
        assert self.tensor_base <= first and first + count <= self.tensor_base + self.tensor_columns
        return self.tensor[first : first + count]

    def copy_scales(self, address: int, descriptor: int, wide: bool) -> None:
        """tcgen05.cp.32x128b.warpx4"""
        start, stride, swizzle = shared_descriptor(descriptor, wide)
        assert swizzle == 0 and address >> 16 == 0
        row, byte = np.arange(32)[:, None], np.arange(16)
        data = self.gather(start + row // 8 * stride + row % 8 * 16 + byte)  # (lane, byte)
        words = data.copy().view(np.float32)  # (32, 4)
        self.columns(address, 4)[:] = np.tile(words, (4, 1)).T

    def scales(self, address: int, count: int, number: int) -> np.ndarray:
        """`number` scales each of `count` rows, as bytes."""
        column, place = address & 0xFFFF, address >> 30
        assert address & 0x3FFF0000 == 0
        words = self.columns(column, -(-count // 32)).copy().view(np.uint8)  # (column, 4 * lane)
        words = words.reshape(-1, 4, 32, 4)  # column, quarter, lane, byte
        assert (words == words[:, :1]).all(), "scales differ among quarters of the lanes"
        return words[:, 0].reshape(-1, 4)[:count, place : place + number]


def shared_descriptor(descriptor: int, wide: bool) -> tuple[int, int, int]:
    """(start, stride between groups of eight rows, swizzle) in bytes; Rubin's addresses have a bit more."""
    start = (descriptor & (0x7FFF if wide else 0x3FFF)) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    assert descriptor >> 46 & 3 == 1 and descriptor >> 49 & 7 == 0, "version or base offset"
    return start, stride, descriptor >> 61


def swizzled(offsets: np.ndarray) -> np.ndarray:
    """The 128-byte swizzle: pieces of 16 bytes change places by the row of 128 bytes that they lie in."""
    return offsets ^ (offsets >> 3 & 0x70)


def operand(block: Block, descriptor: int, rows: int, k: int, wide: bool) -> np.ndarray:
    """E4M3 codes (rows, k), K-major."""
    start, stride, swizzle = shared_descriptor(descriptor, wide)
    assert swizzle == 2, "not the 128-byte swizzle"
    row, byte = np.arange(rows)[:, None], np.arange(k)
    assert start % 1024 + k <= 128, "an operand does not begin in the first row of its group"
    return block.gather(swizzled(start + row // 8 * stride + row % 8 * 128 + byte))


def numbers(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """(rows, k) float64 of codes (rows, k) and scales (rows, k/32)."""
    values = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).double().numpy()
    factors = np.where(scales == 255, np.nan, np.exp2(scales.astype(np.float64) - 127))
    return values * np.repeat(factors, 32, axis=1)


def multiply(blocks, result, a, b, description, sfa, sfb, add, wide) -> None:
    """tcgen05.mma.kind::mxf8f6f4.block_scale, descriptor as in the ISA's table for that kind."""
    k = 64 if description >> 31 else 32
    assert k == 32 or wide, "k = 64 is Rubin's"
    n, m = (description >> 17 & 0x3F) * 8, (description >> 27 & 3) * 128
    n = n or 512
    known = 1 << 31 | 3 << 29 | 3 << 27 | 1 << 23 | 0x3F << 17 | 3 << 4
    assert description >> 23 & 1 == 1 and description & ~known == 0, "not E4M3 x E4M3 with E8M0, both K-major"
    assert description >> 29 & 3 == sfa >> 30 and description >> 4 & 3 == sfb >> 30
    assert m == 128 * len(blocks)
    count = k // 32
    shares = [operand(block, b, n // len(blocks), k, wide) for block in blocks]
    tokens = np.concatenate(shares)
    for block in blocks:
        left = numbers(operand(block, a, 128, k, wide), block.scales(sfa, 128, count))
        right = numbers(tokens, block.scales(sfb, n, count))
        to = block.columns(result & 0xFFFF, n)
        assert result >> 16 == 0
        product = right @ left.T  # (n, lanes)
        with np.errstate(over="ignore"):
            to[:] = (product + to if add else product).astype(np.float32)


class TensorMap:
    """CUtensorMap as the DSL's host code writes it (found by comparing maps of known tensors)."""

    def __init__(self, raw: bytes, memory: Global):
        self.memory = memory
        self.address = struct.unpack_from("<Q", raw, 0)[0]
        flags = struct.unpack_from("<I", raw, 8)[0]
        rank = (flags >> 4 & 7) + 1
        self.item = 1 << (flags >> 7 & 7)
        self.swizzle = flags >> 13 & 7
        self.strides = [self.item, *(s << 4 for s in struct.unpack_from(f"<{rank - 1}I", raw, 12))]
        self.sizes = [s + 1 for s in struct.unpack_from(f"<{rank}I", raw, 32)]
        self.boxes = [b + 1 for b in struct.unpack_from(f"<{rank}B", raw, 55)]

    def box(self, place: list[int]) -> np.ndarray:
        """(rows, bytes of a row) of the box that begins at `place`; zeros outside of the tensor."""
        assert len(place) == len(self.sizes)
        rows = int(np.prod(self.boxes[1:]))
        data = np.zeros((rows, self.boxes[0] * self.item), np.uint8)
        width = min(self.boxes[0], self.sizes[0] - place[0])
        for row in range(rows):
            rest, at, inside = row, place[0] * self.item, width > 0 and place[0] >= 0
            dimensions = zip(place[1:], self.boxes[1:], self.sizes[1:], self.strides[1:], strict=True)
            for first, box, size, stride in dimensions:
                index = first + rest % box
                rest //= box
                inside &= 0 <= index < size
                at += index * stride
            if inside:
                data[row, : width * self.item] = self.memory.find(self.address + at, width * self.item)
        return data

    def fill(self, block: Block, target: int, data: np.ndarray) -> None:
        assert target % (1024 if self.swizzle else 128) == 0
        offsets = target + np.arange(data.size)
        if self.swizzle:
            assert self.swizzle == 3 and data.shape[1] == 128
            offsets = swizzled(offsets)
        assert offsets.max() < len(block.shared)
        block.shared[offsets] = data.reshape(-1)


# ---- arithmetic ----


def _signed(bits: np.ndarray, width: int) -> np.ndarray:
    if width == 64:
        return bits.view(np.int64)
    sign = np.int64(1 << (width - 1))
    return ((bits & np.uint64(2**width - 1)).astype(np.int64) ^ sign) - sign


def _f32(bits: np.ndarray) -> np.ndarray:
    return (bits & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)


def _bits(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)


WIDTHS = {"b8": 8, "s8": 8, "u8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "pred": 1}
WIDTHS |= {t: 32 for t in ("b32", "u32", "s32", "f32", "u16x2")} | {t: 64 for t in ("b64", "u64", "s64", "f32x2")}
_LOW = np.uint64(0xFFFFFFFF)
_RELATIONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_INTEGERS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "neg": lambda a: -a,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}
"""Modulo 2**64, so that the lower bits don't depend on signs."""


@functools.cache
def operation(name: str, modifiers: tuple[str, ...]) -> Callable[..., np.ndarray]:
    """What an instruction that works on registers makes of the bits of its operands."""
    kind = modifiers[-1]
    if name == "cvt":
        return lambda *args: _convert(modifiers, args)
    if name == "selp":
        return lambda a, b, which: np.where(which.astype(bool), a, b)
    keep = np.uint64(2 ** WIDTHS[kind] - 1)
    if name == "mov":
        return lambda a: a & keep
    if kind == "pred":
        logic = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}[name]
        return lambda *args: logic(*(x.astype(bool) for x in args))
    if kind == "f32x2":
        return lambda *args: _pair([_float(name, modifiers, [_f32(x >> np.uint64(s)) for x in args]) for s in (0, 32)])
    if name == "setp":
        relation, read = _RELATIONS[modifiers[0]], _reader(kind)
        return lambda a, b: relation(read(a), read(b))
    if kind == "f32":
        return lambda *args: _bits(_float(name, modifiers, [_f32(x) for x in args]))
    read = _reader(kind)
    if name == "popc":
        return lambda a: np.array([int(x).bit_count() for x in read(a).tolist()], np.uint64)
    if name == "shl":
        return lambda a, by: (a << (by & _LOW)) & keep
    if name == "shr" and kind.startswith("s"):
        return lambda a, by: (read(a) >> (by & _LOW).astype(np.int64)).astype(np.uint64) & keep
    if name == "shr":
        return lambda a, by: read(a) >> (by & _LOW)
    if name in ("max", "min"):
        choose = np.maximum if name == "max" else np.minimum
        return lambda a, b: choose(read(a), read(b)).astype(np.uint64) & keep
    exact = _INTEGERS[name]
    if "hi" in modifiers:
        assert WIDTHS[kind] == 32
        return lambda *args: ((result := exact(*map(read, args))) >> result.dtype.type(32)).astype(np.uint64) & keep
    if "wide" in modifiers:
        return lambda *args: exact(*map(read, args)).astype(np.uint64)
    return lambda *args: exact(*args) & keep


def _reader(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    """Bits as numbers of a kind."""
    width = WIDTHS[kind]
    if kind == "f32":
        return _f32
    if kind.startswith("s"):
        return lambda bits: _signed(bits, width)
    keep = np.uint64(2**width - 1)
    return lambda bits: bits & keep


def _pair(halves: list[np.ndarray]) -> np.ndarray:
    low, high = map(_bits, halves)
    return low | high << np.uint64(32)


def _convert(modifiers: Sequence[str], args: Sequence[np.ndarray]) -> np.ndarray:
    to, source = modifiers[-2:]
    if to == "e4m3x2":
        codes = []
        for x in args:
            values = torch.from_numpy(_f32(x).copy())
            code = values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.uint64)
            codes.append(np.where(np.isnan(values.numpy()), np.uint64(0x7F), code))
        return codes[0] << np.uint64(8) | codes[1]
    if to in ("bf16", "f16", "bf16x2", "f16x2"):
        dtype = torch.bfloat16 if to.startswith("b") else torch.float16
        parts = [
            torch.from_numpy(_f32(x).copy()).to(dtype).view(torch.int16).numpy().view(np.uint16).astype(np.uint64)
            for x in args
        ]
        return parts[0] if len(parts) == 1 else parts[0] << np.uint64(16) | parts[1]
    width, to_width = int(source[1:]), int(to[1:])
    value = _signed(args[0], width) if source[0] == "s" else args[0] & np.uint64(2**width - 1)
    return value.astype(np.uint64) & np.uint64(2**to_width - 1)


def _float(name: str, modifiers: Sequence[str], a: list[np.ndarray]) -> np.ndarray:
    if name == "fma":
        exact = a[0].astype(np.float64) * a[1] + a[2]
        result = exact.astype(np.float32)
        if "rm" in modifiers:
            result = np.where(result > exact, np.nextafter(result, np.float32(-np.inf)), result)
        return np.where(np.isnan(result), 0, np.clip(result, 0, 1)) if "sat" in modifiers else result
    if name in ("rcp", "ex2"):
        exact = 1 / a[0].astype(np.float64) if name == "rcp" else np.exp2(a[0].astype(np.float64))
        result = exact.astype(np.float32)
        return np.where(np.abs(result) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), result), result)
    assert "ftz" not in modifiers
    return {
        "add": lambda: a[0] + a[1],
        "sub": lambda: a[0] - a[1],
        "mul": lambda: a[0] * a[1],
        "neg": lambda: -a[0],
        "abs": lambda: np.abs(a[0]),
        "max": lambda: np.maximum(a[0], a[1]),
        "min": lambda: np.minimum(a[0], a[1]),
    }[name]()
