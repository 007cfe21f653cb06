"""Matrix products with MXFP8 weights on an NVIDIA GPU: a linear layer, and the grouped GEMM of experts.

Nothing here reads the device or waits for it, and memory comes from torch's allocator, so all of it can be captured
into a CUDA graph. A config's first call compiles its kernel and loads it onto the device, so it must come before.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vllm_rose_plugin.kernels.contracts import (
    MXFP8_BLOCK,
    Activation,
    Mxfp8Tensor,
    Rounding,
    ScaleLayout,
    TokenFormat,
)
from vllm_rose_plugin.kernels.gemm import tuned
from vllm_rose_plugin.kernels.gemm.call import Call
from vllm_rose_plugin.kernels.gemm.checks import (
    OUT_DTYPES,
    check_call,
    check_k,
    check_on_gpu,
    check_packed,
    check_tensor,
    check_tokens,
    checked_out_dtype,
    tiled_bytes,
)
from vllm_rose_plugin.kernels.gemm.config import Epilogue, GemmConfig
from vllm_rose_plugin.kernels.gemm.config_sm100 import Sm100Config
from vllm_rose_plugin.kernels.gemm.one_run import Dummies, dummies_of, one_run
from vllm_rose_plugin.kernels.gemm.plan import batch_invariant_rows, plan, token_format_of
from vllm_rose_plugin.kernels.gemm.tokens import LAYOUT_OF, PackedTokens, fp32_scales
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight, packed_shape, wrap_weight
from vllm_rose_plugin.kernels.gemm.workspace import stream_k_workspace
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import check_rows, device_facts, permute_tokens, quantize_mxfp8
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import (
    fp32_pitch,
    permuted_size,
    row_major,
    tile_scales,
)


def linear(
    x: torch.Tensor | Mxfp8Tensor,
    weight: PackedWeight,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation | str = Activation.MXFP8,
    rounding: Rounding | str = Rounding.RCEIL,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """``x @ weight.T + bias`` of one group: tokens are brought into the kernel's format, then one GEMM.

    Args:
        x: bf16, fp16 or fp32 ``[M, K]`` with contiguous rows, or MXFP8 with row-major or tiled scales.
        weight: of one group, on x's device, packed for its target.
        bias: floating point ``[N]``; added in fp32 before the result is rounded.
        activation: MXFP8 quantizes a plain x, BF16 rounds it to bf16 (sm_90 only). Says nothing about an MXFP8 x.
        rounding: how x is quantized.
        out_dtype: bf16 or fp16; x's own by default, which an MXFP8 x doesn't have.
        batch_invariant: one config for every M, so that a row's bits depend on that row alone.

    Returns:
        ``[M, N]``.

    Raises:
        TypeError, ValueError: what doesn't fit; the message names it.
        RuntimeError: the device has no compile target, or nvidia-cutlass-dsl is missing.
    """
    given = linear_operands(
        x,
        weight,
        bias=bias,
        activation=activation,
        rounding=rounding,
        out_dtype=out_dtype,
        batch_invariant=batch_invariant,
    )
    if given.tokens is None:
        return torch.empty((0, weight.n), dtype=given.out_dtype, device=weight.codes.device)
    num_rows = given.tokens.num_rows
    offsets, counts = one_run(weight.codes.device, num_rows)
    return _gemm(
        given.tokens,
        weight,
        offsets,
        counts,
        bias=given.bias,
        out_dtype=given.out_dtype,
        early_counts=True,
        batch_invariant=batch_invariant,
        expected_rows=batch_invariant_rows(1) if batch_invariant else num_rows,
    )


class LinearOperands(NamedTuple):
    """What a linear layer's GEMM takes."""

    tokens: PackedTokens | None
    """None: no rows, nothing to compute."""
    bias: torch.Tensor | None  # (N) fp32
    out_dtype: torch.dtype


def linear_operands(
    x: torch.Tensor | Mxfp8Tensor,
    weight: PackedWeight,
    *,
    bias: torch.Tensor | None,
    activation: Activation | str,
    rounding: Rounding | str,
    out_dtype: torch.dtype | None,
    batch_invariant: bool,
) -> LinearOperands:
    """The arguments of :func:`linear`, checked and in the kernel's format; they and the errors are as there."""
    if weight.num_groups != 1:
        raise ValueError(f"a linear layer has one group, the weight has {weight.num_groups}: use grouped_gemm")
    check_on_gpu("the weight", weight.codes)
    if isinstance(x, torch.Tensor):
        check_rows(x, what="x")
        (num_rows, k), own_dtype = x.shape, x.dtype
    else:
        (num_rows, k), own_dtype = x.codes.shape, None
    check_k(k, weight)
    out_dtype = checked_out_dtype(own_dtype, out_dtype)
    if bias is not None:
        if tuple(bias.shape) != (weight.n,) or bias.device != weight.codes.device:
            raise ValueError(
                f"bias must be [{weight.n}] on {weight.codes.device}, got {tuple(bias.shape)} on {bias.device}"
            )
        bias = bias.float()
    if not num_rows:
        return LinearOperands(None, bias, out_dtype)
    if isinstance(x, torch.Tensor):
        token_format = token_format_of(
            target=weight.target,
            activation=Activation(activation),
            num_groups=1,
            num_rows=num_rows,
            batch_invariant=batch_invariant,
        )
        tokens = quantize_tokens(x, token_format=token_format, activation=activation, rounding=rounding)
    else:
        tokens = from_quantized(x, target=weight.target)
    return LinearOperands(tokens, bias, out_dtype)


def grouped_gemm(
    tokens: PackedTokens,
    weight: PackedWeight,
    *,
    expert_offsets: torch.Tensor,
    expert_counts: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    expected_rows: int | None = None,
    early_counts: bool = False,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """``tokens[run of g] @ weight[g].T + bias[g]`` for every group g, in one launch.

    Args:
        tokens: S rows in the format that :func:`plan.token_format_of` names. On sm_90 a run begins at any row. From
            sm_100 on, too, but its scales begin at the first free tile of 128 rows (see ``sm100.py``); where runs are
            padded to 128 rows that is the plain tiling of all S rows.
        weight: G groups, packed for the device's target.
        expert_offsets, expert_counts: int32 ``[G + 1]`` and ``[G]`` on the device: first row and length of the runs.
        out_dtype: bf16 or fp16.
        bias: float32 ``[G, N]``.
        out: where to write, ``[S, N]``, starting at a multiple of 16 bytes. Rows of no run keep what they hold.
        expected_rows: how many tokens to expect in all runs, where that is much less than S; decides the config.
        early_counts: counts and offsets were written at least two launches before this one, by kernels that let their
            successor start only after their own wait (or without programmatic dependent launch). Then weights are
            fetched before the kernel in front has ended.
        batch_invariant: one config for every S, so that a row's bits depend on that row alone.

    Returns:
        ``[S, N]``; rows that belong to no run are undefined.

    Raises:
        TypeError, ValueError: what doesn't fit; the message names it.
    """
    out_dtype = checked_out_dtype(None, out_dtype)
    check_call(tokens, weight, expert_offsets, expert_counts)
    if bias is not None:
        check_tensor("bias", bias, torch.float32, (weight.num_groups, weight.n), weight.codes.device)
    if out is not None:
        check_tensor("out", out, out_dtype, (tokens.num_rows, weight.n), weight.codes.device)
    if not tokens.num_rows:
        return torch.empty((0, weight.n), dtype=out_dtype, device=weight.codes.device) if out is None else out
    return _gemm(
        tokens,
        weight,
        expert_offsets,
        expert_counts,
        bias=bias,
        out_dtype=out_dtype,
        out=out,
        early_counts=early_counts,
        batch_invariant=batch_invariant,
        expected_rows=_rows(tokens, weight, expected_rows, batch_invariant),
    )


def grouped_gemm_swiglu(
    tokens: PackedTokens,
    weight: PackedWeight,
    *,
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
    """``silu(gate) * up`` of every run's products with w13, as the tokens of w2's GEMM, in one launch.

    Args:
        tokens, expert_offsets, expert_counts, expected_rows, early_counts, batch_invariant: as in :func:`grouped_gemm`.
        weight: w13, packed with gate_up; N = 2 * I, I a multiple of 32.
        activation, rounding, limit: of the product, as in ``swiglu_quantize``.
        out_format: what w2's GEMM reads; the tokens' own format by default.
        out: where to write, S rows of I as out_format; tiled scales have room for every run to begin a tile.

    Returns:
        S rows of I. Those that belong to no run are undefined.

    Raises:
        TypeError, ValueError: what doesn't fit; the message names it.
    """
    call, result = swiglu_call(
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
    )
    if tokens.num_rows:
        rows = _rows(tokens, weight, expected_rows, batch_invariant)
        _launch(call, rows, tokens, weight, expert_offsets, expert_counts, None, result)
    return result


def swiglu_call(
    tokens: PackedTokens,
    weight: PackedWeight,
    *,
    expert_offsets: torch.Tensor,
    expert_counts: torch.Tensor,
    activation: Activation | str,
    rounding: Rounding | str,
    limit: float | None,
    out_format: TokenFormat | None,
    out: PackedTokens | None,
    early_counts: bool,
    batch_invariant: bool,
    domains: int = 1,
) -> tuple[Call, PackedTokens]:
    """What :func:`grouped_gemm_swiglu` computes, once its arguments are checked, and where the result goes.

    Args:
        domains: parts of the weight.
        (others): as there.
    """
    if not weight.gate_up:
        raise ValueError("the weight wasn't packed with gate_up=True, so its rows aren't gate and up")
    if weight.n % (2 * MXFP8_BLOCK):
        raise ValueError(f"N is {weight.n}; with SwiGLU it must be a multiple of {2 * MXFP8_BLOCK}")
    check_call(tokens, weight, expert_offsets, expert_counts)
    out_format = out_format or tokens.token_format
    activation = Activation(activation)
    if (tokens.token_format is TokenFormat.MXFP8_TCGEN05) != (out_format is TokenFormat.MXFP8_TCGEN05):
        raise ValueError(f"{weight.target} reads {tokens.token_format} and can't write {out_format}")
    if activation is Activation.BF16 and out_format is not TokenFormat.BF16_PERMUTED:
        raise ValueError(f"activation={activation.value!r} needs out_format {TokenFormat.BF16_PERMUTED}")
    result = _checked_tokens(out, tokens, weight, out_format)
    call = Call(
        target=weight.target,
        sm_count=device_facts(weight.codes.device.index).sm_count,
        num_groups=weight.num_groups,
        n=weight.n,
        k=weight.k,
        token_format=tokens.token_format,
        epilogue=Epilogue.SWIGLU,
        out_format=out_format,
        activation=activation,
        rounding=Rounding(rounding),
        limit=None if limit is None else float(limit),
        early_counts=early_counts,
        batch_invariant=batch_invariant,
        domains=domains,
    )
    return call, result


def packed_linear_weight(codes: torch.Tensor, packed_scales: torch.Tensor) -> PackedWeight:
    """A linear layer's weight out of what :func:`weights.pack_weight` made for the device it lies on.

    Args:
        codes: float8_e4m3fn ``[N, K]`` on a CUDA device.
        packed_scales: as packed.
    """
    check_on_gpu("the weight", codes)
    target = device_facts(codes.device.index).target
    n, k = codes.shape
    shape = packed_shape(num_groups=1, n=n, k=k, target=target, gate_up=False)
    check_tensor("packed scales", packed_scales, torch.uint8, shape, codes.device)
    return PackedWeight(wrap_weight(codes, target=target), packed_scales, gate_up=False, target=target)


def quantize_tokens(
    x: torch.Tensor,
    *,
    token_format: TokenFormat,
    activation: Activation | str = Activation.MXFP8,
    rounding: Rounding | str = Rounding.RCEIL,
) -> PackedTokens:
    """The bits of ``tokens.pack_tokens``, in one launch.

    Args:
        x: bf16, fp16 or fp32 ``[S, K]`` on a CUDA device.
        token_format, activation, rounding: as there.
    """
    activation = Activation(activation)
    if token_format is TokenFormat.BF16_PERMUTED:
        data = permute_tokens(x, activation=activation, rounding=rounding)
        return PackedTokens(token_format, data, None, x.shape[1])
    if activation is not Activation.MXFP8:
        raise ValueError(f"{token_format} holds quantized tokens only, got activation={activation.value!r}")
    return PackedTokens.of(quantize_mxfp8(x, rounding=rounding, layout=LAYOUT_OF[token_format]))


def from_quantized(x: Mxfp8Tensor, *, target: str) -> PackedTokens:
    """Tokens that somebody else has quantized; codes are taken as they are.

    Tiled scales are what sm_100 reads. Others are moved by a few small torch kernels; sm_90 multiplies W8A8 then,
    however many tokens there are.

    Args:
        x: ``[S, K]``, scales ``ROW_MAJOR``, ``TCGEN05_128X4`` or ``FP32_K_MAJOR``.
        target: whose GEMM will read them.
    """
    wanted = LAYOUT_OF[TokenFormat.MXFP8_FP32_SCALES if target.startswith("sm_90") else TokenFormat.MXFP8_TCGEN05]
    if x.layout is not wanted:
        scales = row_major(x).scales
        scales = tile_scales(scales) if wanted is ScaleLayout.TCGEN05_128X4 else fp32_scales(scales)
        x = Mxfp8Tensor(x.codes, scales, wanted)
    return PackedTokens.of(x)


def _gemm(
    tokens: PackedTokens,
    weight: PackedWeight,
    expert_offsets: torch.Tensor,
    expert_counts: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    early_counts: bool,
    batch_invariant: bool,
    expected_rows: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    call = plain_call(
        tokens,
        weight,
        out_dtype=out_dtype,
        bias=bias is not None,
        early_counts=early_counts,
        batch_invariant=batch_invariant,
    )
    if out is None:
        out = torch.empty((tokens.num_rows, weight.n), dtype=out_dtype, device=weight.codes.device)
    _launch(call, expected_rows, tokens, weight, expert_offsets, expert_counts, bias, out)
    return out


def plain_call(
    tokens: PackedTokens,
    weight: PackedWeight,
    *,
    out_dtype: torch.dtype,
    bias: bool,
    early_counts: bool,
    batch_invariant: bool,
    domains: int = 1,
) -> Call:
    """What :func:`grouped_gemm` computes; its arguments aren't checked.

    Args:
        domains: parts of the weight.
        (others): as there.
    """
    return Call(
        target=weight.target,
        sm_count=device_facts(weight.codes.device.index).sm_count,
        num_groups=weight.num_groups,
        n=weight.n,
        k=weight.k,
        token_format=tokens.token_format,
        out_dtype=OUT_DTYPES[out_dtype],
        bias=bias,
        early_counts=early_counts,
        batch_invariant=batch_invariant,
        domains=domains,
    )


def _launch(
    call: Call,
    expected_rows: int,
    tokens: PackedTokens,
    weight: PackedWeight,
    expert_offsets: torch.Tensor,
    expert_counts: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | PackedTokens,
) -> None:
    check_packed(tokens, weight)
    with torch.cuda.device(weight.codes.device):
        kernel, config, grid = _kernel(call, expected_rows, tokens.num_rows if call.grid_follows_rows else 0)
        run_kernel(kernel, config, grid, tokens, weight, expert_offsets, expert_counts, bias, out)


def run_kernel(
    kernel: Callable[..., Any],
    config: GemmConfig | Sm100Config,
    grid: int,
    tokens: PackedTokens,
    weight: PackedWeight,
    expert_offsets: torch.Tensor,
    expert_counts: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | PackedTokens,
    *,
    workspace: tuple[torch.Tensor, ...] = (),
) -> None:
    """Launch a compiled kernel on the current device, whichever config it was made for; operands aren't checked.

    Args:
        kernel, config, grid: of a :class:`plan.Plan` for these operands.
        tokens, weight, expert_offsets, expert_counts: as in :func:`grouped_gemm`.
        bias: float32 ``[G, N]``, or None.
        out: ``[S, N]``; with SwiGLU, tokens of I as :func:`empty_tokens` makes them.
        workspace: of a weight in parts: the domain of each SM, counters.

    Raises:
        ValueError: more tokens than stream-K can count.
    """
    device = weight.codes.device
    dummies = dummies_of(device)
    data, scales = _arguments(tokens, dummies)
    bias = dummies.bias if bias is None else bias.view(-1)
    if isinstance(out, PackedTokens):
        out, out_scales = _arguments(out, dummies)
    else:
        out_scales = dummies.scales if weight.target.startswith("sm_90") else dummies.bytes
    if isinstance(config, GemmConfig) and config.stream_k:
        config.check_units(tokens.num_rows)
        workspace = stream_k_workspace(device, blocks=grid, handed_over=config.handed_over)
    kernel(*weight.operands, data, scales, expert_offsets, expert_counts, bias, out, out_scales, *workspace, grid)


def _arguments(tokens: PackedTokens, dummies: Dummies) -> tuple[torch.Tensor, torch.Tensor]:
    data = tokens.data if tokens.data.dtype == torch.bfloat16 else tokens.data.view(torch.uint8)
    return data, dummies.scales if tokens.scales is None else tokens.scales


@tuned.follows_table
@functools.lru_cache(maxsize=8192)
def _kernel(call: Call, expected_rows: int, num_rows: int) -> tuple[Callable[..., Any], GemmConfig | Sm100Config, int]:
    made = plan(call, expected_rows=expected_rows, num_rows=num_rows)
    return made.compile(), made.config, made.grid


def _rows(tokens: PackedTokens, weight: PackedWeight, expected_rows: int | None, batch_invariant: bool) -> int:
    if batch_invariant:
        return batch_invariant_rows(weight.num_groups)
    if expected_rows is None:
        return tokens.num_rows
    if not 1 <= expected_rows <= tokens.num_rows:
        raise ValueError(f"expected_rows is {expected_rows}; it must be 1 to S = {tokens.num_rows}")
    return expected_rows


def _checked_tokens(
    out: PackedTokens | None, tokens: PackedTokens, weight: PackedWeight, out_format: TokenFormat
) -> PackedTokens:
    """Where SwiGLU's result goes: `out` once it is checked, or new memory."""
    if out is None:
        return empty_tokens(tokens, weight, out_format)
    size = weight.n // 2
    if out.token_format is not out_format or out.k != size or out.num_rows != tokens.num_rows:
        raise ValueError(
            f"out must hold {tokens.num_rows} rows of {size} as {out_format}, "
            f"got {out.num_rows} rows of {out.k} as {out.token_format}"
        )
    check_tokens(out, weight.codes.device, num_groups=weight.num_groups)
    return out


def empty_tokens(tokens: PackedTokens, weight: PackedWeight, out_format: TokenFormat) -> PackedTokens:
    """Memory for SwiGLU's result: rows of I in a format that w2's GEMM reads."""
    s, size, device = tokens.num_rows, weight.n // 2, weight.codes.device
    if out_format is TokenFormat.BF16_PERMUTED:
        width = permuted_size(size)  # the kernel also writes what fills up a row
        return PackedTokens(out_format, torch.empty((s, width), dtype=torch.bfloat16, device=device), None, size)
    codes = torch.empty((s, size), dtype=torch.float8_e4m3fn, device=device)
    if out_format is TokenFormat.MXFP8_FP32_SCALES:
        scales = torch.empty((size // MXFP8_BLOCK, fp32_pitch(s)), dtype=torch.float32, device=device)
        return PackedTokens(out_format, codes, scales, size)
    scales = torch.empty(tiled_bytes(s, size, num_groups=weight.num_groups), dtype=torch.uint8, device=device)
    return PackedTokens(out_format, codes, scales, size)
