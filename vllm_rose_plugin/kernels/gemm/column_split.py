"""A weight in parts by columns of the result, the rows of ``[G, N, K]``: one for each locality domain.

A part is a weight of its own, of N / parts rows, that any kernel takes: its codes are contiguous, its scales packed as
:mod:`~vllm_rose_plugin.kernels.gemm.weights` packs any others. With gate_up it holds the gate rows of its columns, then
their up rows, so that SwiGLU needs nothing of another part. K is whole everywhere, so a column's sum is added up in the
same order with and without a split.

Parts are filled by copies out of the checkpoint's shards, each byte once; nothing here allocates but what a caller
makes. A split is by equal numbers of whole tiles, or there is none and ``reason`` says why.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK
from vllm_rose_plugin.kernels.gemm.weights import ROW_TILE, PackedWeight, is_sm90, packed_shape
from vllm_rose_plugin.kernels.jit.targets import limits_of
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import TILE_ROWS

Half = Literal["gate", "up"]
Make = Callable[[int, tuple[int, ...], torch.dtype], torch.Tensor]
"""(part, shape, dtype) -> an empty contiguous tensor, in that part's domain."""


@dataclass(frozen=True)
class ColumnSplit:
    """How a weight is split; made by :func:`plan_split`."""

    n: int
    """Rows of a group of the whole weight; with gate_up, gate and up together."""
    gate_up: bool
    target: str
    parts: int
    """1: not split."""
    reason: str = ""
    """Why it isn't, for the log; empty: it is, or nothing else was asked for."""

    @property
    def halves(self) -> int:
        """Rows for each column: gate and up, or one."""
        return 2 if self.gate_up else 1

    @property
    def part_columns(self) -> int:
        """Columns of the result that a part computes; part p has those from ``p * part_columns`` on."""
        return self.n // self.halves // self.parts

    @property
    def part_n(self) -> int:
        """Rows of a group of a part."""
        return self.n // self.parts

    def part_shape(self, num_groups: int, width: int) -> tuple[int, int, int]:
        """Shape of a part of ``[G, N, width]``: codes, with K, or row-major scales, with K / 32."""
        return num_groups, self.part_n, width


def column_tile(target: str) -> int:
    """What the columns of a part are a multiple of.

    From sm_100 on a tile of packed scales, 128. On sm_90 64: also what permuted bf16 tokens, which SwiGLU can write,
    are cut into.
    """
    limits_of(target)
    return ROW_TILE if is_sm90(target) else TILE_ROWS


def plan_split(*, n: int, parts: int, target: str, gate_up: bool = False, name: str = "the weight") -> ColumnSplit:
    """How a weight is split, or why it isn't.

    Args:
        n: rows of a group; with gate_up, gate and up together.
        parts: domains.
        target: compile target.
        gate_up: w13.
        name: of the weight, for the reason.

    Raises:
        ValueError: no parts, or an odd n with gate_up.
    """
    if parts < 1:
        raise ValueError(f"parts={parts} must be 1 or more")
    if gate_up and n % 2:
        raise ValueError(f"n={n} must be even: as many gate as up rows")
    columns, tile = n // (2 if gate_up else 1), column_tile(target)
    if parts > 1 and columns % (parts * tile):
        reason = (
            f"{name} is not split over {parts} locality domains: {columns} columns are {columns / parts:g} for each, "
            f"no multiple of {target}'s tile of {tile}"
        )
        return ColumnSplit(n, gate_up, target, 1, reason)
    return ColumnSplit(n, gate_up, target, parts)


def empty_parts(
    split: ColumnSplit, *, num_groups: int, width: int, dtype: torch.dtype, make: Make
) -> list[torch.Tensor]:
    """Tensors ``[G, N / parts, width]`` for :func:`copy_shard` to fill.

    Args:
        split: of the weight.
        num_groups: G.
        width: K of codes, K / 32 of row-major scales.
        dtype: of the shards.
        make: makes each; an exception in it passes, and what it made before is its own to free.
    """
    return [make(part, split.part_shape(num_groups, width), dtype) for part in range(split.parts)]


def copy_shard(
    split: ColumnSplit, shard: torch.Tensor, parts: Sequence[torch.Tensor], *, group: int, half: Half | None = None
) -> None:
    """Copy one expert's rows, as the checkpoint has them, to where they belong; nothing else is made.

    Args:
        split: of the weight.
        shard: codes or row-major scales of one group, this rank's rows: ``[N, width]``, or ``[N / 2, width]`` with a
            half. Any device, any strides, such as a view of the checkpoint's mapped file.
        parts: ``[G, N / parts, width]`` each, of the shard's dtype.
        group: g.
        half: with gate_up: the shard holds only these rows (w1 is gate, w3 is up); None: all rows.

    Raises:
        TypeError, ValueError: a dtype or shape that doesn't fit; nothing is copied.
    """
    if half is not None and not split.gate_up:
        raise ValueError(f"half={half!r} is for weights with gate and up")
    halves: list[int] = list(range(split.halves)) if half is None else [("gate", "up").index(half)]
    width = shard.shape[-1]
    expected = (split.n // split.halves * len(halves), width)
    if tuple(shard.shape) != expected:
        raise ValueError(f"the shard must be {list(expected)}, got {list(shard.shape)}")
    _check_parts(split, parts, width=width, dtype=shard.dtype)
    if not 0 <= group < parts[0].shape[0]:
        raise ValueError(f"group={group} must be 0 to {parts[0].shape[0] - 1}")
    for source, which in zip(shard.chunk(len(halves)), halves, strict=True):
        for part, columns in zip(parts, source.chunk(split.parts), strict=True):
            _rows_of(split, part[group], which).copy_(columns)


def split_rows(split: ColumnSplit, whole: torch.Tensor, make: Make) -> list[torch.Tensor]:
    """Codes or row-major scales ``[G, N, width]`` that are loaded already, as parts: a second copy, of a tensor."""
    num_groups, _, width = whole.shape
    parts = empty_parts(split, num_groups=num_groups, width=width, dtype=whole.dtype, make=make)
    for group in range(num_groups):
        copy_shard(split, whole[group], parts, group=group)
    return parts


def join_rows(split: ColumnSplit, parts: Sequence[torch.Tensor], *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The inverse, for export: ``[G, N, width]`` as the checkpoint has it.

    Args:
        split: of the weight.
        parts: ``[G, N / parts, width]`` each.
        out: written into, ``[G, N, width]`` of any device; None: a new tensor on the first part's.

    Raises:
        TypeError, ValueError: a dtype or shape that doesn't fit.
    """
    num_groups, _, width = parts[0].shape
    _check_parts(split, parts, width=width, dtype=parts[0].dtype)
    shape = (num_groups, split.n, width)
    if out is None:
        out = parts[0].new_empty(shape)
    elif tuple(out.shape) != shape or out.dtype != parts[0].dtype:
        raise ValueError(f"out must be {parts[0].dtype} {list(shape)}, got {out.dtype} {list(out.shape)}")
    for which, target in enumerate(out.chunk(split.halves, dim=1)):
        for part, columns in zip(parts, target.chunk(split.parts, dim=1), strict=True):
            columns.copy_(_rows_of(split, part, which))
    return out


def split_packed(split: ColumnSplit, weight: PackedWeight, make: Make) -> list[PackedWeight]:
    """A packed weight as packed parts, bit for bit what packing the parts' own scales gives.

    Raises:
        ValueError: the weight is another one than the split's.
    """
    _check_packed(split, weight.n, weight)
    codes = split_rows(split, weight.codes, make)
    per_group = packed_shape(num_groups=1, n=split.part_n, k=weight.k, target=split.target, gate_up=split.gate_up)
    shape = (weight.num_groups * per_group[0], *per_group[1:])
    parts = []
    for part, own in enumerate(codes):
        scales = make(part, shape, torch.uint8)
        tiles = _tiles(split, weight.scales, weight).chunk(split.parts, dim=2)[part]
        _tiles(split, scales, weight).copy_(tiles)
        parts.append(PackedWeight(own, scales, split.gate_up, split.target))
    return parts


def join_packed(split: ColumnSplit, parts: Sequence[PackedWeight]) -> PackedWeight:
    """The inverse: the whole weight, in new tensors on the first part's device.

    Raises:
        ValueError: another number of parts, or parts of another weight.
    """
    for part in parts:
        _check_packed(split, split.part_n, part)
    codes = join_rows(split, [part.codes for part in parts])
    first = parts[0]
    shape = packed_shape(num_groups=first.num_groups, n=split.n, k=first.k, target=split.target, gate_up=split.gate_up)
    scales = first.scales.new_empty(shape)
    for part, tiles in zip(parts, _tiles(split, scales, first).chunk(split.parts, dim=2), strict=True):
        tiles.copy_(_tiles(split, part.scales, first))
    return PackedWeight(codes, scales, split.gate_up, split.target)


def _rows_of(split: ColumnSplit, part: torch.Tensor, half: int) -> torch.Tensor:
    """A view of a part's gate (0) or up rows (1), or of all rows of a plain weight; rows are dimension -2."""
    return part.narrow(-2, half * split.part_columns, split.part_columns)


def _tiles(split: ColumnSplit, scales: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Packed scales as ``[G, halves, tiles of rows, bytes]``, a view.

    On sm_90 gate and up lie in one tile, 32 columns of either, so there is one half.
    """
    halves = 1 if is_sm90(split.target) else split.halves
    blocks = weight.k // MXFP8_BLOCK
    tile_bytes = ROW_TILE if is_sm90(split.target) else TILE_ROWS
    tile_bytes *= -(-blocks // 4) * 4
    return scales.view(weight.num_groups, halves, -1, tile_bytes)


def _check_parts(split: ColumnSplit, parts: Sequence[torch.Tensor], *, width: int, dtype: torch.dtype) -> None:
    if len(parts) != split.parts:
        raise ValueError(f"{len(parts)} parts for a split into {split.parts}")
    expected = split.part_shape(parts[0].shape[0], width)
    for number, part in enumerate(parts):
        if tuple(part.shape) != expected:
            raise ValueError(f"part {number} must be {list(expected)}, got {list(part.shape)}")
        if part.dtype != dtype:
            raise TypeError(f"part {number} must be {dtype}, got {part.dtype}: a copy would convert the values")


def _check_packed(split: ColumnSplit, n: int, weight: PackedWeight) -> None:
    found, expected = (weight.n, weight.gate_up, weight.target), (n, split.gate_up, split.target)
    if found != expected:
        raise ValueError(f"a weight with (n, gate_up, target) = {expected} is wanted, got {found}")
