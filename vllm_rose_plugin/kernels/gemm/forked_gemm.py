"""The grouped GEMM on a weight in parts by columns (see column_split.py): one launch for each part, on its own SMs.

Every part's kernel writes its columns into their place among those of the whole result. Its config shares K as the
whole weight's does, so that results are bit for bit those of :mod:`launch` on the whole weight, but for three cases:
stream-K, which serves a single group only; SMs that can't launch clusters, where the whole weight's kernel uses them;
and configs that were measured for whole weights don't count, except for how they share K.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm import launch
from vllm_rose_plugin.kernels.gemm.call import Call
from vllm_rose_plugin.kernels.gemm.checks import OUT_DTYPES, check_call, check_packed, check_tensor, check_tokens
from vllm_rose_plugin.kernels.gemm.config import Epilogue
from vllm_rose_plugin.kernels.gemm.forked import ForkedStreams, Launch
from vllm_rose_plugin.kernels.gemm.plan import grid_of
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import TILE_ROWS

_SCALE_TILE_BYTES = 512


@dataclass(frozen=True)
class Forked:
    """Partitions of the SMs with a stream each; part i is multiplied on partition i."""

    streams: ForkedStreams
    sm_counts: tuple[int, ...]
    """Of each partition."""
    clusters: bool
    """Whether clusters can be launched there."""

    def part_of(self, parts: int) -> Callable[[Call], Call]:
        """The call on one of so many parts of a weight, from that on the whole; alike for all parts.

        The config is chosen for the SMs of the smallest partition.
        """
        sm_count = min(self.sm_counts)
        return lambda whole: whole.part(n=whole.n // parts, sm_count=sm_count, clusters=self.clusters)


def swiglu_launches(
    tokens: PackedTokens,
    parts: Sequence[PackedWeight],
    *,
    forked: Forked,
    expert_offsets: torch.Tensor,
    expert_counts: torch.Tensor,
    out: PackedTokens,
    activation: Activation | str = Activation.MXFP8,
    rounding: Rounding | str = Rounding.RCEIL,
    limit: float | None = None,
    expected_rows: int | None = None,
    early_counts: bool = False,
) -> list[Launch]:
    """``launch.grouped_gemm_swiglu`` as launches for :meth:`ForkedStreams.run`; nothing is launched here.

    Args:
        parts: w13's, in the order of their columns, as many as there are partitions.
        out: of all parts, S rows of I in the format that w2's GEMM reads.
        (others): as there.

    Raises:
        TypeError, ValueError: what doesn't fit; the message names it.
    """
    first = _checked_parts(parts, forked, gate_up=True)
    check_call(tokens, first, expert_offsets, expert_counts)
    check_packed(tokens, first)
    size = sum(part.n for part in parts) // 2
    if out.k != size or out.num_rows != tokens.num_rows:
        raise ValueError(
            f"out must hold {tokens.num_rows} rows of {size}, got {out.num_rows} rows of {out.k} as {out.token_format}"
        )
    check_tokens(out, first.codes.device, num_groups=first.num_groups)
    call = Call(
        target=first.target,
        sm_count=launch.device_facts(first.codes.device.index).sm_count,
        num_groups=first.num_groups,
        n=2 * size,
        k=first.k,
        token_format=tokens.token_format,
        epilogue=Epilogue.SWIGLU,
        out_format=out.token_format,
        activation=Activation(activation),
        rounding=Rounding(rounding),
        limit=None if limit is None else float(limit),
        early_counts=early_counts,
    )
    slices = [columns_of(out, number, len(parts)) for number in range(len(parts))]
    return _launches(call, tokens, parts, forked, expert_offsets, expert_counts, expected_rows, slices)


def gemm_launches(
    tokens: PackedTokens,
    parts: Sequence[PackedWeight],
    *,
    forked: Forked,
    expert_offsets: torch.Tensor,
    expert_counts: torch.Tensor,
    out: torch.Tensor,
    expected_rows: int | None = None,
    early_counts: bool = False,
) -> list[Launch]:
    """``launch.grouped_gemm`` as launches for :meth:`ForkedStreams.run`; nothing is launched here.

    Args:
        parts: in the order of their columns, as many as there are partitions.
        out: of all parts, ``[S, N]`` bf16 or fp16.
        (others): as there.

    Raises:
        TypeError, ValueError: what doesn't fit; the message names it.
    """
    first = _checked_parts(parts, forked, gate_up=False)
    check_call(tokens, first, expert_offsets, expert_counts)
    check_packed(tokens, first)
    n = sum(part.n for part in parts)
    if out.dtype not in OUT_DTYPES:
        raise TypeError(f"the kernel writes bf16 or fp16, got {out.dtype}: serve with --dtype bfloat16")
    check_tensor("out", out, out.dtype, (tokens.num_rows, n), first.codes.device)
    call = Call(
        target=first.target,
        sm_count=launch.device_facts(first.codes.device.index).sm_count,
        num_groups=first.num_groups,
        n=n,
        k=first.k,
        token_format=tokens.token_format,
        out_dtype=OUT_DTYPES[out.dtype],
        early_counts=early_counts,
    )
    slices = out.chunk(len(parts), dim=1)
    return _launches(call, tokens, parts, forked, expert_offsets, expert_counts, expected_rows, slices)


def columns_of(tokens: PackedTokens, number: int, parts: int) -> PackedTokens:
    """A view of one of so many equal shares of the columns: whole blocks of 64 where k is permuted, or of 128 where
    scales are tiled.

    Raises:
        ValueError: shares that begin inside of a block.
    """
    size, rest = divmod(tokens.k, parts)
    grain = {TokenFormat.BF16_PERMUTED: 64, TokenFormat.MXFP8_TCGEN05: TILE_ROWS}.get(tokens.token_format, MXFP8_BLOCK)
    if rest or size % grain:
        raise ValueError(f"{tokens.k} columns can't be {parts} shares of whole blocks of {grain}")
    begin = number * size
    data, scales = tokens.data[:, begin : begin + size], tokens.scales
    if scales is not None and tokens.token_format is TokenFormat.MXFP8_FP32_SCALES:
        scales = scales[begin // MXFP8_BLOCK : (begin + size) // MXFP8_BLOCK]
    elif scales is not None:
        scales = scales[begin // TILE_ROWS * _SCALE_TILE_BYTES :]
    return PackedTokens(tokens.token_format, data, scales, size)


def _checked_parts(parts: Sequence[PackedWeight], forked: Forked, *, gate_up: bool) -> PackedWeight:
    """The first of them."""
    if len(parts) != len(forked.streams.streams) or len(parts) != len(forked.sm_counts):
        raise ValueError(
            f"{len(parts)} parts for {len(forked.streams.streams)} streams on {len(forked.sm_counts)} partitions"
        )
    first = parts[0]
    kinds = [(tuple(p.codes.shape), p.gate_up, p.target, p.codes.device) for p in parts]
    if len(set(kinds)) > 1 or first.gate_up is not gate_up:
        raise ValueError(f"parts must be alike and packed with gate_up={gate_up}, got {kinds}")
    return first


def _launches(
    call: Call,
    tokens: PackedTokens,
    parts: Sequence[PackedWeight],
    forked: Forked,
    expert_offsets: torch.Tensor,
    expert_counts: torch.Tensor,
    expected_rows: int | None,
    slices: Sequence[torch.Tensor | PackedTokens],
) -> list[Launch]:
    rows = launch._rows(tokens, parts[0], expected_rows, batch_invariant=False)
    own = forked.part_of(len(parts))(call)
    kernel, config, _ = launch._kernel(own, rows, tokens.num_rows if call.grid_follows_rows else 0)

    def launch_of(part: PackedWeight, out: torch.Tensor | PackedTokens, grid: int) -> Launch:
        return lambda: launch.run_kernel(kernel, config, grid, tokens, part, expert_offsets, expert_counts, None, out)

    made = []
    for part, out, sm_count in zip(parts, slices, forked.sm_counts, strict=True):
        grid = grid_of(config, sm_count=sm_count, num_rows=tokens.num_rows)
        made.append(launch_of(part, out, grid))
    return made
