"""Runs the PTX of the sm_90 W8A16 GEMM on the CPU, as ``sm100_machine`` does it for tcgen05.

Matrix instructions are done where they are issued, so waits for them are not tested. A load with acquire order is a
poll: it waits until the word isn't zero. All blocks of the grid run at the same time, or one after another.
"""

import re
import struct

import numpy as np
import torch
from sm100_cases import tensor_map
from sm100_machine import LANES, Machine, Program, Warp
from sm100_units import Global, swizzled

from vllm_rose_plugin.kernels.gemm.config import GemmConfig
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight

POISON = 0xA5
_SHARED = 227 * 1024
_LANE = np.arange(LANES)


def _bf16(words: np.ndarray) -> np.ndarray:
    """(lanes, 2) float32: lower and upper half of each word."""
    halves = np.stack([words << np.uint64(16), words & np.uint64(0xFFFF0000)], 1)
    return (halves & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)


class Sm90Machine(Machine):
    """Blocks of one launch."""

    blocking = (*Machine.blocking, "ld.acquire")

    def may_pass(self, warp: Warp, opcode: str, operands: list[str], active: np.ndarray) -> bool:
        if not opcode.startswith("ld.acquire"):
            return super().may_pass(warp, opcode, operands, active)
        assert active.sum() == 1
        address = int(warp.address(operands[1])[active][0])
        return bool(self.memory.find(address, 4).any())

    def execute(self, warp: Warp, opcode: str, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        if opcode.startswith("ld.acquire"):
            self.move(warp, "ld", parts[1:], operands, active)
        elif opcode.startswith("wgmma.mma_async"):
            assert active.all()
            self.multiply(warp, parts, operands)
        elif parts[0] in ("wgmma", "setmaxnreg") or opcode.startswith("cp.async.bulk.prefetch"):
            pass
        elif opcode.startswith("stmatrix"):
            assert active.all() and "trans" in parts
            self.store_matrices(warp, operands)
        elif opcode == "mul.rn.bf16x2":
            a, b = (torch.from_numpy(_bf16(warp.value(o))).double() for o in operands[1:])
            product = (a * b).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).astype(np.uint64)
            warp.write(operands[0], product[:, 0] | product[:, 1] << np.uint64(16), active)
        elif opcode == "div.s32":
            a, b = (warp.value(o).astype(np.uint32).view(np.int32).astype(np.int64) for o in operands[1:])
            assert (a[active] >= 0).all() and (b[active] > 0).all(), "a share that can't be"
            warp.write(operands[0], a // np.maximum(b, 1), active)
        else:
            super().execute(warp, opcode, parts, operands, active)

    def multiply(self, warp: Warp, parts: list[str], operands: list[str]) -> None:
        """wgmma m64nNk16, the first operand in registers: this warp's 16 rows."""
        n = int(re.search(r"n(\d+)k16", parts[4])[1])
        sums, left = ([r.strip() for r in o.strip("{}").split(",")] for o in operands[:2])
        descriptor, add = warp.one(operands[2], np.ones(LANES, bool)), warp.value(operands[3]).all()
        row, column = _LANE // 4, _LANE % 4 * 2
        a = np.zeros((16, 16), np.float64)
        for i, register in enumerate(left):
            values = _bf16(warp.value(register))
            for v in range(2):
                a[row + i % 2 * 8, column + i // 2 * 8 + v] = values[:, v]
        start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
        assert descriptor >> 62 == 1 and descriptor >> 49 & 7 == 0, "not the 128-byte swizzle"
        rows, byte = np.arange(n)[:, None], np.arange(32)
        codes = warp.block.gather(swizzled(start + rows // 8 * stride + rows % 8 * 128 + byte))
        b = torch.from_numpy(codes.copy()).view(torch.bfloat16).double().numpy()
        with np.errstate(all="ignore"):
            product = a @ b.T  # (16, n)
            for i, register in enumerate(sums):
                own = product[row + i // 2 % 2 * 8, i // 4 * 8 + column + i % 2]
                before = warp.value(register).astype(np.uint32).view(np.float32) if add else 0
                warp.write(register, (own + before).astype(np.float32).view(np.uint32), np.ones(LANES, bool))

    def store_matrices(self, warp: Warp, operands: list[str]) -> None:
        """stmatrix.trans: lane l holds row l / 4, columns 2 (l % 4) and the next; columns are stored."""
        addresses = warp.address(operands[0])
        for m, register in enumerate(r.strip() for r in operands[1].strip("{}").split(",")):
            words = warp.value(register)
            matrix = np.zeros((8, 8), np.uint16)
            for v in range(2):
                matrix[_LANE // 4, _LANE % 4 * 2 + v] = (words >> np.uint64(16 * v)) & np.uint64(0xFFFF)
            memory, starts = warp.block.span(addresses[8 * m : 8 * m + 8], 16, True)
            assert (starts % 16 == 0).all()
            memory[starts[:, None] + np.arange(16)] = np.ascontiguousarray(matrix.T).view(np.uint8)


def run(
    ptx: str,
    config: GemmConfig,
    parts: list[PackedWeight],
    tokens: PackedTokens,
    *,
    offsets: list[int],
    counts: list[int],
    bias: torch.Tensor,
    grid: int,
    together: bool,
    seed: int,
    flags: np.ndarray | None = None,
    counters: np.ndarray | None = None,
    sm_domains: list[int] = (),
    sms: list[int] = (),
    into: torch.Tensor | None = None,
    column: int = 0,
) -> torch.Tensor:
    """A launch; gives all rows, poison where nothing was stored.

    Args:
        parts: of the weight; one, unless the config has several domains.
        offsets, counts: of the runs.
        together: whether all blocks run at the same time; otherwise one after another.
        flags: of stream-K, uint8, as the launch before has left them.
        counters: of several domains, likewise.
        sm_domains: of several domains.
        sms: where the blocks run.
        into: what an earlier launch returned, of which this one writes columns from `column` on.
    """
    rows, memory = tokens.num_rows, Global()
    out = np.full(rows * config.out_pitch * 2, POISON, np.uint8)
    if into is not None:
        out = into.view(-1).view(torch.uint8).numpy()
    partials = np.full(grid * config.handed_over, np.nan, np.float32).view(np.uint8)

    def place(tensor: torch.Tensor) -> int:
        return memory.place(tensor.contiguous().view(-1).view(torch.uint8).numpy())

    columns, width, groups = tokens.data.shape[1], -(-config.k // 128) * 256, config.num_groups
    scale_rows = -(-config.part_n // 64) * groups
    maps = []
    for part in parts:
        sizes, pitches, box = [config.k, config.part_n], [config.k], [config.k_tile, config.row_tile]
        if groups > 1:
            sizes, pitches, box = [*sizes, groups], [*pitches, config.k * config.part_n], [*box, 1]
        maps.append(tensor_map(place(part.codes), 1, sizes, pitches, box, swizzle=True))
        box = [256, config.row_groups]
        maps.append(tensor_map(place(part.scales), 1, [width, scale_rows], [width], box, swizzle=False))
        maps.append(struct.pack("<I", scale_rows))
    data = place(tokens.data)
    brought = tensor_map(data, 2, [columns, rows], [2 * columns], [64, config.token_tile], swizzle=True)
    params = [
        *[bytes(1)] * (2 if config.narrow_tokens else 1),  # one for each width of matrix instructions
        *maps[:3],
        brought,
        struct.pack("<I", rows),
        *maps[3:],
        struct.pack("<Q", place(torch.tensor(offsets, dtype=torch.int32))),
        struct.pack("<Q", place(torch.tensor(counts, dtype=torch.int32))),
        struct.pack("<Q", place(bias)) if config.bias else struct.pack("<QII", place(bias), len(bias), 0),
        struct.pack("<QII", memory.place(out, writable=True) + 2 * column, rows, 0),
        bytes(24),
    ]
    if config.stream_k:
        params.append(struct.pack("<QII", memory.place(partials, writable=True), grid, 0))
        params.append(struct.pack("<QII", memory.place(flags, writable=True), grid, 0))
    elif config.domains > 1:
        params.append(struct.pack("<QII", place(torch.tensor(sm_domains, dtype=torch.int32)), len(sm_domains), 0))
        params.append(struct.pack("<Q", memory.place(counters, writable=True)))
    sizes = [int(size) for size in re.findall(r"_param_\d+\[(\d+)\]", ptx[: ptx.index("\n{")])]
    assert [len(p) for p in params] == sizes, (sizes, [len(p) for p in params])
    machine = Sm90Machine(Program(ptx), memory, params, grid=grid, blocks=grid if together else 1, seed=seed)
    machine.sms = list(sms)
    machine.run(shared=_SHARED, before=lambda: None, released=lambda: None)
    return torch.from_numpy(out).view(getattr(torch, config.out_dtype)).view(rows, config.out_pitch)
