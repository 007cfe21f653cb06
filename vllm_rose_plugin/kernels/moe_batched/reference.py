"""Batched experts in plain torch: tokens come sorted by expert, results stay so."""

import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding
from vllm_rose_plugin.kernels.gemm.reference import grouped_gemm
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8
from vllm_rose_plugin.kernels.swiglu_quantize.reference import swiglu_quantize


def moe_batched(
    x: torch.Tensor | Mxfp8Tensor,
    *,
    expert_counts: torch.Tensor,
    w13: Mxfp8Tensor,
    w2: Mxfp8Tensor,
    activation: Activation | str = Activation.MXFP8,
    rounding: Rounding | str = Rounding.RCEIL,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``w2[e] @ (silu(gate) * up)`` with ``gate, up = w13[e] @ x[e, m]``, for the first expert_counts[e] rows.

    SwiGLU sees float32 and the result is rounded to out_dtype, as in ``moe_experts.reference``. It reads counts on the
    host, so it can't be captured into a CUDA graph.

    Args:
        x: ``[E, M, H]`` bf16, fp16 or fp32, or MXFP8 with row-major scales, which is taken as it is.
        expert_counts: ``[E]`` int32, at most M. Rows past a count may hold anything.
        w13: codes ``[E, 2 * I, H]``, gate rows before up rows, with row-major scales.
        w2: codes ``[E, H, I]``, with row-major scales.
        activation: MXFP8 quantizes the input and SwiGLU's result; BF16 rounds SwiGLU's result to bf16.
        rounding: how they are quantized.
        out_dtype: x's dtype by default, which an MXFP8 x doesn't have.

    Returns:
        ``[E, M, H]``; zero past the counts.

    Raises:
        TypeError: an MXFP8 x without out_dtype. ValueError: an MXFP8 x with activation BF16.
    """
    activation = Activation(activation)
    tokens: torch.Tensor | Mxfp8Tensor
    if isinstance(x, Mxfp8Tensor):
        if out_dtype is None:
            raise TypeError("MXFP8 tokens carry no output dtype: pass out_dtype (bf16, fp16 or fp32)")
        if activation is not Activation.MXFP8:
            raise ValueError(f"tokens that arrive quantized can't be served with activation={activation.value!r}")
        tokens = Mxfp8Tensor(x.codes.flatten(0, 1), x.scales.flatten(0, 1))
        experts, each, hidden_size = x.codes.shape
    else:
        experts, each, hidden_size = x.shape
        tokens, out_dtype = x.flatten(0, 1), out_dtype or x.dtype
        if activation is Activation.MXFP8:
            tokens = Mxfp8Tensor(*quantize_mxfp8(tokens, rounding=rounding))
    offsets = torch.arange(experts + 1, dtype=torch.int32, device=expert_counts.device) * each
    runs = {"expert_offsets": offsets, "expert_counts": expert_counts}
    gate_up = grouped_gemm(tokens, w13, out_dtype=torch.float32, **runs)
    product = swiglu_quantize(gate_up, activation=activation, rounding=rounding)
    if isinstance(product, torch.Tensor):
        product = product.to(torch.bfloat16)
    return grouped_gemm(product, w2, out_dtype=out_dtype, **runs).view(experts, each, hidden_size)
