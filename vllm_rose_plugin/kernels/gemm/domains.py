"""The grouped GEMM on a weight in parts by columns (see column_split.py), each in a locality domain: one launch.

The arguments and, bit for bit, the results of :mod:`launch` on the whole weight. Blocks take tiles of the part that
lies beside their SM first; see domain_queue.py. Nothing here reads the device or waits for it, and all of it can be
captured into a CUDA graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm import launch
from vllm_rose_plugin.kernels.gemm.call import Call
from vllm_rose_plugin.kernels.gemm.checks import check_call, check_packed, check_tensor, checked_out_dtype
from vllm_rose_plugin.kernels.gemm.config import MAX_DOMAINS
from vllm_rose_plugin.kernels.gemm.one_run import one_run
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight
from vllm_rose_plugin.kernels.gemm.workspace import domain_counters, give_back_counters, prepare_counters


@dataclass(frozen=True)
class WeightInParts(PackedWeight):
    """Parts of one weight; codes and scales are the first part's."""

    parts: tuple[PackedWeight, ...]

    @property
    def n(self) -> int:
        """Rows of a group of all parts."""
        return self.codes.shape[1] * len(self.parts)

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """Codes and scales by turns; the kernel takes as many parts as there can be, and leaves further ones alone."""
        filled = self.parts + self.parts[-1:] * (MAX_DOMAINS - len(self.parts))
        return tuple(tensor for part in filled for tensor in (part.codes, part.scales))


def linear_domains(
    x: torch.Tensor | Mxfp8Tensor,
    parts: Sequence[PackedWeight],
    *,
    sm_domains: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation | str = Activation.MXFP8,
    rounding: Rounding | str = Rounding.RCEIL,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """As :func:`launch.linear`, of all parts' columns side by side.

    Where the whole weight's kernel shares K among blocks, the bits are those of the one that doesn't.

    Args:
        x, bias, activation, rounding, out_dtype, batch_invariant: as there.
        parts, sm_domains: as in :func:`grouped_gemm_domains`, each part of one group.

    Returns:
        ``[M, N]``.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`launch.linear` and :func:`grouped_gemm_domains`.
    """
    weight = in_parts(parts, sm_domains)
    given = launch.linear_operands(
        x,
        weight,
        bias=bias,
        activation=activation,
        rounding=rounding,
        out_dtype=out_dtype,
        batch_invariant=batch_invariant,
    )
    device = weight.codes.device
    if given.tokens is None:
        return torch.empty((0, weight.n), dtype=given.out_dtype, device=device)
    offsets, counts = one_run(device, given.tokens.num_rows)
    return grouped_gemm_domains(
        given.tokens,
        parts,
        sm_domains=sm_domains,
        expert_offsets=offsets,
        expert_counts=counts,
        out_dtype=given.out_dtype,
        bias=None if given.bias is None else given.bias.view(1, -1),
        early_counts=True,
        batch_invariant=batch_invariant,
    )


def grouped_gemm_domains(
    tokens: PackedTokens,
    parts: Sequence[PackedWeight],
    *,
    sm_domains: torch.Tensor,
    expert_offsets: torch.Tensor,
    expert_counts: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    expected_rows: int | None = None,
    early_counts: bool = False,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """As :func:`launch.grouped_gemm`, of all parts' columns side by side.

    Args:
        tokens, expert_offsets, expert_counts, out_dtype, out, expected_rows, early_counts, batch_invariant: as there.
        parts: 1 to 4 of the same shape, as ``column_split.plan_split`` has it, on one device.
        sm_domains: int32 ``[SMs]`` there: the number of the part that lies beside each SM (``sm_domain_probe`` learns
            it); -1 where it isn't known. Any table is right, a wrong one is slow.
        bias: float32 ``[G, N]`` of all columns.

    Returns:
        ``[S, N]``; rows that belong to no run are undefined.

    Raises:
        TypeError, ValueError: what doesn't fit; the message names it.
        RuntimeError: see :func:`workspace.domain_counters`.
    """
    out_dtype = checked_out_dtype(None, out_dtype)
    weight = in_parts(parts, sm_domains)
    if len(weight.parts) == 1:
        return launch.grouped_gemm(
            tokens,
            parts[0],
            expert_offsets=expert_offsets,
            expert_counts=expert_counts,
            out_dtype=out_dtype,
            bias=bias,
            out=out,
            expected_rows=expected_rows,
            early_counts=early_counts,
            batch_invariant=batch_invariant,
        )
    check_call(tokens, weight, expert_offsets, expert_counts)
    device, shape = weight.codes.device, (tokens.num_rows, weight.n)
    if bias is not None:
        check_tensor("bias", bias, torch.float32, (weight.num_groups, weight.n), device)
    if out is None:
        out = torch.empty(shape, dtype=out_dtype, device=device)
    else:
        check_tensor("out", out, out_dtype, shape, device)
    call = launch.plain_call(
        tokens,
        weight,
        out_dtype=out_dtype,
        bias=bias is not None,
        early_counts=early_counts,
        batch_invariant=batch_invariant,
        domains=len(weight.parts),
    )
    if tokens.num_rows:
        rows = launch._rows(tokens, weight, expected_rows, batch_invariant)
        _launch(call, rows, tokens, weight, sm_domains, expert_offsets, expert_counts, bias, out)
    return out


def grouped_gemm_swiglu_domains(
    tokens: PackedTokens,
    parts: Sequence[PackedWeight],
    *,
    sm_domains: torch.Tensor,
    expert_offsets: torch.Tensor,
    expert_counts: torch.Tensor,
    activation: Activation | str = Activation.MXFP8,
    rounding: Rounding | str = Rounding.RCEIL,
    limit: float | None = None,
    out_format: TokenFormat | None = None,
    out: PackedTokens | None = None,
    expected_rows: int | None = None,
    early_counts: bool = False,
    batch_invariant: bool = False,
) -> PackedTokens:
    """As :func:`launch.grouped_gemm_swiglu`, of all parts' columns side by side.

    Args:
        tokens, expert_offsets, expert_counts, activation, rounding, limit, out_format, out, expected_rows,
            early_counts, batch_invariant: as there.
        parts, sm_domains: as in :func:`grouped_gemm_domains`; w13, each part with the gate and up of its columns.

    Returns:
        S rows of I. Those that belong to no run are undefined.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`grouped_gemm_domains`.
    """
    weight = in_parts(parts, sm_domains)
    if len(weight.parts) == 1:
        return launch.grouped_gemm_swiglu(
            tokens,
            parts[0],
            expert_offsets=expert_offsets,
            expert_counts=expert_counts,
            activation=activation,
            rounding=rounding,
            limit=limit,
            out_format=out_format,
            out=out,
            expected_rows=expected_rows,
            early_counts=early_counts,
            batch_invariant=batch_invariant,
        )
    call, result = launch.swiglu_call(
        tokens,
        weight,
        expert_offsets=expert_offsets,
        expert_counts=expert_counts,
        activation=activation,
        rounding=rounding,
        limit=limit,
        out_format=out_format,
        out=out,
        early_counts=early_counts,
        batch_invariant=batch_invariant,
        domains=len(weight.parts),
    )
    if tokens.num_rows:
        rows = launch._rows(tokens, weight, expected_rows, batch_invariant)
        _launch(call, rows, tokens, weight, sm_domains, expert_offsets, expert_counts, None, result)
    return result


def in_parts(parts: Sequence[PackedWeight], sm_domains: torch.Tensor) -> WeightInParts:
    """The parts as one weight, checked, with the table that goes with them.

    Raises:
        TypeError, ValueError: another number of parts, parts that differ, or another table.
    """
    if not 1 <= len(parts) <= MAX_DOMAINS:
        raise ValueError(f"a weight in {len(parts)} parts; one launch takes 1 to {MAX_DOMAINS}")
    first = parts[0]
    wanted = _kind(first)
    for number, part in enumerate(parts):
        if _kind(part) != wanted:
            raise ValueError(f"part {number} is {_kind(part)}, part 0 is {wanted}: parts must be alike")
    if sm_domains.ndim != 1 or not len(sm_domains):
        raise ValueError(f"sm_domains must be [SMs], got {tuple(sm_domains.shape)}")
    check_tensor("sm_domains", sm_domains, torch.int32, tuple(sm_domains.shape), first.codes.device, alignment=4)
    return WeightInParts(first.codes, first.scales, first.gate_up, first.target, tuple(parts))


def prepare_domains(device: torch.device) -> None:
    """Make what launches share on a device, so that none of them does it during a capture."""
    prepare_counters(device)


def _kind(part: PackedWeight) -> tuple:
    return tuple(part.codes.shape), part.gate_up, part.target, part.codes.device


def _launch(
    call: Call,
    expected_rows: int,
    tokens: PackedTokens,
    weight: WeightInParts,
    sm_domains: torch.Tensor,
    expert_offsets: torch.Tensor,
    expert_counts: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | PackedTokens,
) -> None:
    check_packed(tokens, weight)
    device = weight.codes.device
    with torch.cuda.device(device):
        num_rows = tokens.num_rows if call.grid_follows_rows else 0
        kernel, config, grid = launch._kernel(call, expected_rows, num_rows)
        workspace = (sm_domains, domain_counters(device, domains=call.domains))
        try:
            launch.run_kernel(
                kernel, config, grid, tokens, weight, expert_offsets, expert_counts, bias, out, workspace=workspace
            )
        except BaseException:
            give_back_counters(device)
            raise
