"""Matrix products with MXFP8 weights in plain torch: the oracle of the dense and the grouped GEMM.

Operands are dequantized exactly, products are accumulated in float32, the result is rounded once. Speed is that of a
float32 GEMM plus the dequantization of every weight in use.

A float32 GEMM on CUDA follows ``torch.set_float32_matmul_precision``. Elements of MXFP8, bf16 and fp16 tensors fit into
TF32, so that setting changes nothing for them; fp32 activations with ``Activation.BF16`` do lose bits under it.
"""

import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding, ScaleLayout
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import (
    dequantize_mxfp8,
    e8m0_to_float,
    quantize_mxfp8,
)

_LIFTED_SCALE = 100  # with a scale of at least 2**(100 - 127), no E4M3 element gives a subnormal


def mxfp8_linear(
    x: torch.Tensor | Mxfp8Tensor,
    weight: Mxfp8Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation | str = Activation.MXFP8,
    rounding: Rounding | str = Rounding.RCEIL,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, or the same already in MXFP8.
        weight: ``[N, K]``.
        bias: ``[N]``, floating point; added in float32, before the result is rounded.
        activation: MXFP8 quantizes a plain x, BF16 leaves it. It says nothing about an x that is MXFP8 already.
        rounding: how x is quantized.
        out_dtype: x's own dtype by default; an MXFP8 x has none, so it must be given then.

    Returns:
        ``[..., N]`` in out_dtype. NaN in x or in a scale spoils the rows or columns that use it, and no others.

    Raises:
        TypeError: a dtype that doesn't fit. ValueError: shapes or a scale layout that don't fit.
    """
    _check_layout(weight)
    out_dtype = _out_dtype(x, out_dtype)
    if isinstance(x, torch.Tensor) and Activation(activation) is Activation.MXFP8:
        x = Mxfp8Tensor(*quantize_mxfp8(x, rounding=rounding))
    out = _matmul(x, weight)
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def grouped_gemm(
    tokens: torch.Tensor | Mxfp8Tensor,
    weight: Mxfp8Tensor,
    *,
    expert_offsets: torch.Tensor,
    expert_counts: torch.Tensor,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``tokens[run of e] @ weight[e].T`` for every expert e.

    Reads the counts and offsets to the host, since it launches one GEMM for each expert that has tokens and skips
    the others: on CUDA it synchronizes and can't be captured into a graph.

    Args:
        tokens: ``[S, K]``, MXFP8 (W8A8) or bf16/fp16/fp32 (W8A16).
        weight: ``[E_local, N, K]``.
        expert_offsets: ``[E_local + 1]`` int32, first row of each run.
        expert_counts: ``[E_local]`` int32, tokens in each run.
        out_dtype: the tokens' own dtype by default; MXFP8 tokens have none, so it must be given then.

    Returns:
        ``[S, N]`` in out_dtype. A row that belongs to no token is zero, whatever `tokens` holds there.

    Raises:
        TypeError: a dtype that doesn't fit. ValueError: shapes or a scale layout that don't fit.
    """
    _check_layout(weight)
    out_dtype = _out_dtype(tokens, out_dtype)
    num_experts, num_columns, _ = weight.codes.shape
    if expert_counts.shape != (num_experts,) or expert_offsets.shape != (num_experts + 1,):
        raise ValueError(
            f"{num_experts} experts need expert_counts ({num_experts},) and expert_offsets ({num_experts + 1},), "
            f"got {tuple(expert_counts.shape)} and {tuple(expert_offsets.shape)}"
        )
    num_rows = (tokens.codes if isinstance(tokens, Mxfp8Tensor) else tokens).shape[0]
    out = torch.zeros(num_rows, num_columns, dtype=out_dtype, device=weight.codes.device)  # (S, N)
    for expert, (start, count) in enumerate(zip(expert_offsets.tolist(), expert_counts.tolist(), strict=False)):
        if count == 0:
            continue
        rows = slice(start, start + count)
        if isinstance(tokens, Mxfp8Tensor):
            run: torch.Tensor | Mxfp8Tensor = Mxfp8Tensor(tokens.codes[rows], tokens.scales[rows])
        else:
            run = tokens[rows]
        out[rows] = _matmul(run, Mxfp8Tensor(weight.codes[expert], weight.scales[expert])).to(out_dtype)
    return out


def _matmul(x: torch.Tensor | Mxfp8Tensor, weight: Mxfp8Tensor) -> torch.Tensor:
    """float32 ``x @ weight.T``."""
    w, w_factor = _lift(weight)  # (N, K), (N)
    if not isinstance(x, Mxfp8Tensor):
        return (x.float() @ w.t()) * w_factor
    _check_layout(x)
    a, a_factor = _lift(x)  # (..., K), (...)
    return (a @ w.t()) * a_factor.unsqueeze(-1) * w_factor


def _lift(x: Mxfp8Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(values [..., K], factor [...])`` in float32, whose product is x; both are free of subnormals.

    A row whose largest scale is tiny is raised by a power of two, which changes no rounding in a GEMM. Without it, a
    process that flushes subnormals would multiply by zero. (In a row that mixes tiny scales with others, elements
    below 2**-126 remain and may be flushed there.)
    """
    # uint8, 0 .. 100; nothing wraps around, and a row that holds a NaN scale has lift 0, so it keeps it.
    lift = _LIFTED_SCALE - x.scales.amax(-1, keepdim=True).clamp(max=_LIFTED_SCALE)
    return dequantize_mxfp8(x.codes, x.scales + lift), e8m0_to_float(127 - lift).squeeze(-1)


def _check_layout(x: Mxfp8Tensor) -> None:
    if x.layout is not ScaleLayout.ROW_MAJOR:
        raise ValueError(f"the torch reference reads scales in layout {ScaleLayout.ROW_MAJOR}, got {x.layout}")


def _out_dtype(x: torch.Tensor | Mxfp8Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    if out_dtype is not None:
        return out_dtype
    if isinstance(x, Mxfp8Tensor):
        raise TypeError("MXFP8 activations carry no output dtype: pass out_dtype (bf16, fp16 or fp32)")
    return x.dtype
