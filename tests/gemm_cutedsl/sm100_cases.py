"""Inputs for the tcgen05 GEMM, its launch as the machine runs it, and what must come out."""

import functools
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sm100_machine import Machine, Program
from sm100_units import SHARED_OFFSET, Global, numbers

from vllm_rose_plugin.kernels.contracts import Rounding
from vllm_rose_plugin.kernels.gemm import sm100
from vllm_rose_plugin.kernels.gemm.config import Epilogue
from vllm_rose_plugin.kernels.gemm.config_sm100 import K_TILE, ROWS, Sm100Config, fill_up
from vllm_rose_plugin.kernels.jit.compile import Artifacts, compile_to_artifacts
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import padded_rows, tile_scales
from vllm_rose_plugin.kernels.swiglu_quantize.reference import swiglu_quantize

POISON = 0xA5


def make_config(target: str, token_tile: int, *, pair: bool = False, split: int = 1, **shape) -> Sm100Config:
    """Small unless told otherwise."""
    fields = {"num_groups": 1, "n": 128, "k": 128, "epilogue": Epilogue.PLAIN, "out_dtype": "bfloat16", "bias": False}
    fields |= {"rounding": Rounding.RCEIL, "limit": None}
    return fill_up(fields | shape, target=target, token_tile=token_tile, pair=pair, split=split)


@functools.cache
def artifacts(config: Sm100Config, target: str) -> Artifacts:
    return compile_to_artifacts(family="gemm", config=config, build=sm100.build, target=target)


@dataclass
class Case:
    """A call with random inputs; runs lie apart, with rows of garbage between them."""

    config: Sm100Config
    counts: list[int]
    seed: int = 0
    gap: int = 3
    low: int = 110
    high: int = 140

    def __post_init__(self):
        config = self.config
        generator = torch.Generator().manual_seed(self.seed)

        def codes(*shape):
            drawn = torch.randint(0, 256, shape, generator=generator, dtype=torch.int32).to(torch.uint8)
            return torch.where(drawn & 0x7F == 0x7F, 0x3C, drawn)  # no NaN

        def scales(*shape):
            return torch.randint(self.low, self.high, shape, generator=generator, dtype=torch.int32).to(torch.uint8)

        self.offsets, row = [], self.gap
        for count in self.counts:
            self.offsets.append(row)
            row += count + self.gap
        self.offsets.append(row)
        blocks = config.k // 32
        self.weight_codes = codes(config.num_groups, config.n, config.k)
        self.weight_scales = scales(config.num_groups, config.n, blocks)
        self.token_codes = codes(row, config.k)
        self.token_scales = scales(row, blocks)
        self.bias = torch.randn(config.num_groups * config.n, generator=generator)

    def runs(self):
        """(group, rows of its run)."""
        for group, (start, count) in enumerate(zip(self.offsets, self.counts, strict=False)):
            yield group, slice(start, start + count)

    def expected(self, group: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 [count, N]: the result, and the sum of all magnitudes that it is made of."""
        left = numbers(self.token_codes[rows].numpy(), self.token_scales[rows].numpy())
        right = numbers(self.weight_codes[group].numpy(), self.weight_scales[group].numpy())
        result, magnitude = torch.from_numpy(left @ right.T), torch.from_numpy(abs(left) @ abs(right).T)
        if self.config.bias:
            bias = self.bias.view(self.config.num_groups, -1)[group]
            result, magnitude = result + bias, magnitude + bias.abs()
        return result, magnitude

    def weight_parts(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(codes, tiled scales) of each part: gate and up of its own columns."""
        config, found = self.config, []
        for part in range(config.domains):
            columns = slice(part * config.part_columns, (part + 1) * config.part_columns)
            codes, scales = (
                each.view(config.num_groups * config.halves, config.columns, -1)[:, columns]
                for each in (self.weight_codes, self.weight_scales)
            )
            found.append((codes.reshape(-1), torch.cat([tile_scales(each) for each in scales])))
        return found

    def tiled_token_scales(self) -> torch.Tensor:
        tiled = [tile_scales(self.token_scales[rows]) for _, rows in self.runs() if rows.stop > rows.start]
        return torch.cat([*tiled, torch.full((512,), 255, dtype=torch.uint8)])

    def run(
        self,
        target: str,
        *,
        grid: int,
        guess: list[int] | None = None,
        seed: int = 0,
        unheeded: str = "",
        into: tuple[torch.Tensor, torch.Tensor] | None = None,
        column: int = 0,
        sms: Sequence[int] = (),
        sm_domains: Sequence[int] = (0,),
        counters: np.ndarray | None = None,
    ) -> tuple:
        """(out, out_scales) as the machine leaves them, poison where nothing was stored.

        Args:
            guess: what lies in place of the counts until the previous kernel has ended.
            unheeded: an array of mbarriers that nobody waits for, to see that it is missed.
            into: what an earlier run returned, of which this one writes columns from `column` on.
            sms: where the grid's blocks run.
            sm_domains, counters: of several domains; counters as the launch before has left them.
        """
        config, memory = self.config, Global()
        swiglu = config.epilogue is Epilogue.SWIGLU
        out_dtype = torch.uint8 if swiglu else getattr(torch, config.out_dtype)
        total = self.offsets[-1]
        out = np.full(total * config.out_pitch * out_dtype.itemsize, POISON, np.uint8)
        scale_rows = sum(padded_rows(count) for count in self.counts)
        out_scales = np.full(max(4, scale_rows * config.out_scale_tiles * 4), POISON, np.uint8)
        if into is not None:
            out, out_scales = into[0].reshape(-1).view(torch.uint8).numpy(), into[1].numpy()
        held = np.zeros(4 * config.num_groups, np.uint8)
        parts, token_scales = self.weight_parts(), self.tiled_token_scales().numpy()
        places = {
            "parts": [(memory.place(codes.numpy()), memory.place(scales.numpy())) for codes, scales in parts],
            "tokens": memory.place(self.token_codes.numpy().reshape(-1)),
            "token_scales": memory.place(token_scales),
            "offsets": memory.place(np.array(self.offsets, np.int32).view(np.uint8)),
            "counts": memory.place(held),
            "bias": memory.place(self.bias.numpy().view(np.uint8)),
            "out": memory.place(out, writable=True),
            "out_scales": memory.place(out_scales, writable=True),
        }
        if config.domains > 1:
            places["sm_domains"] = memory.place(np.array(sm_domains, np.int32).view(np.uint8))
            places["counters"] = memory.place(counters, writable=True)
        places["out"] += column * out_dtype.itemsize
        places["out_scales"] += column // ROWS * 512
        ptx = artifacts(config, target).ptx
        params = parameters(config, places, total, len(parts[0][1]) // 512, len(token_scales) // 512, len(sm_domains))
        sizes = [int(size) for size in re.findall(r"_param_\d+\[(\d+)\]", ptx[: ptx.index("\n{")])]
        assert [len(p) for p in params] == sizes
        machine = Machine(Program(ptx), memory, params, grid=grid, blocks=config.blocks, seed=seed)
        machine.sms = list(sms)

        if unheeded:
            machine.unheeded = barrier_places(config)[unheeded]

        def set_counts(numbers: list[int]) -> None:
            held[:] = np.array(numbers, np.int32).view(np.uint8)

        machine.run(
            shared=config.shared_bytes,
            before=lambda: set_counts(guess or self.counts),
            released=lambda: set_counts(self.counts),
        )
        return torch.from_numpy(out).view(out_dtype).view(total, config.out_pitch), torch.from_numpy(out_scales)

    def check(self, out: torch.Tensor, out_scales: torch.Tensor) -> None:
        """Every token's row is right, and nothing else was touched."""
        untouched = torch.ones(len(out), dtype=torch.bool)
        first = 0
        for group, rows in self.runs():
            untouched[rows] = False
            count = rows.stop - rows.start
            if count == 0:
                continue
            expected, magnitude = self.expected(group, rows)
            if self.config.epilogue is Epilogue.PLAIN:
                wanted = expected.to(out.dtype)
                special = ~wanted.isfinite()
                torch.testing.assert_close(out[rows][special], wanted[special], rtol=0, atol=0, equal_nan=True)
                limit = 2**-8 * expected.abs() + 2**-20 * magnitude + torch.finfo(out.dtype).smallest_normal * 2**-9
                assert ((out[rows].double() - expected).abs() <= limit)[~special].all()
            else:
                self._check_quantized(expected, out[rows], out_scales, first, count)
            first += padded_rows(count)
        assert (out[untouched].view(torch.uint8) == POISON).all(), "rows that are no tokens were written"

    def _check_quantized(self, expected, codes, out_scales, first: int, count: int) -> None:
        config = self.config
        wanted = swiglu_quantize(expected.float(), rounding=config.rounding, limit=config.limit)
        columns = config.scale_row_tiles * 4
        tiled = torch.zeros(count, columns, dtype=torch.uint8)
        tiled[:, : config.columns // 32] = wanted.scales
        found = torch.empty_like(tiled)
        for row in range(count):
            for block in range(columns):
                tile = (first + row) // 128 * config.scale_row_tiles + block // 4
                found[row, block] = out_scales[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4]
        # Sums and exp differ in their last bits: a scale may be off by one where amax is at a boundary, rarely.
        off = (found.int() - tiled.int()).abs()
        assert off.max() <= 1 and (off > 0).float().mean() < 0.01, (off > 0).float().mean()
        got = dequantize_mxfp8(codes.view(torch.float8_e4m3fn), found[:, : config.columns // 32])
        ideal = dequantize_mxfp8(wanted.codes, wanted.scales)
        torch.testing.assert_close(got, ideal, rtol=0.13, atol=float(ideal.abs().max()) * 2**-9)


def barrier_places(config: Sm100Config) -> dict[str, range]:
    """Where the kernel's mbarriers lie in shared memory."""
    at, found = SHARED_OFFSET, {}
    counts = {"full": config.stages, "empty": config.stages, "early": max(config.prefetch, 1)}
    counts |= {"done": config.accumulators, "drained": config.accumulators, "partial": 1, "taken": 1}
    for name, count in counts.items():
        found[name] = range(at, at + 8 * count, 8)
        at += 8 * count
    return found


def parameters(
    config: Sm100Config, places: dict, rows: int, weight_tiles: int, token_tiles: int, sms: int
) -> list[bytes]:
    """The kernel's parameters as the host function fills them in."""

    def tile_map(address: int, tiles: int, parts: int) -> bytes:
        return tensor_map(address, 2, [256, tiles], [512], [256 // parts, 1], swizzle=False)

    k, columns = config.k, config.part_columns
    matrices = config.num_groups * config.halves
    rank = 3 if matrices > 1 else 2  # the DSL drops a dimension of one
    weights, sizes, strides = [], [k, columns, matrices][:rank], [k, k * columns][: rank - 1]
    for codes, scales in places["parts"]:
        weights.append(tensor_map(codes, 1, sizes, strides, [K_TILE, ROWS, 1][:rank], swizzle=True))
        weights += [tile_map(scales, weight_tiles, 1), struct.pack("<I", weight_tiles)]
    b = tensor_map(places["tokens"], 1, [k, rows], [k], [K_TILE, config.block_tokens], swizzle=True)

    def tensor(name: str, size: int) -> bytes:
        return struct.pack("<QII", places[name], size, 0)

    return [
        bytes(12),
        weights[0],
        b,
        struct.pack("<I", rows),
        *weights[1:3],
        tile_map(places["token_scales"], token_tiles, config.row_blocks),
        struct.pack("<I", token_tiles),
        struct.pack("<Q", places["offsets"]),
        struct.pack("<Q", places["counts"]),
        tensor("bias", 1),
        tensor("out", rows),
        tensor("out_scales", 1),
        *weights[3:],
        *([tensor("sm_domains", sms), struct.pack("<Q", places["counters"])] if config.domains > 1 else []),
    ]


def tensor_map(address: int, item: int, sizes: list, strides: list, boxes: list, *, swizzle: bool) -> bytes:
    """A CUtensorMap, as ``sm100_units.TensorMap`` reads it."""
    raw = bytearray(128)
    rank = len(sizes)
    flags = (rank - 1) << 4 | (item - 1) << 7 | (3 if swizzle else 0) << 13
    struct.pack_into("<QI", raw, 0, address, flags)
    struct.pack_into(f"<{rank - 1}I", raw, 12, *(s >> 4 for s in strides))
    struct.pack_into(f"<{rank}I", raw, 32, *(s - 1 for s in sizes))
    struct.pack_into(f"<{rank}B", raw, 55, *(b - 1 for b in boxes))
    return bytes(raw)
