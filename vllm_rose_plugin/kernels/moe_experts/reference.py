"""A layer of experts in plain torch: the references of its parts, one after another."""

import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding
from vllm_rose_plugin.kernels.gemm.reference import grouped_gemm
from vllm_rose_plugin.kernels.moe_combine.reference import combine_tokens
from vllm_rose_plugin.kernels.moe_dispatch.reference import dispatch_tokens
from vllm_rose_plugin.kernels.moe_route.reference import route_tokens
from vllm_rose_plugin.kernels.swiglu_quantize.reference import swiglu_quantize


def moe_experts(
    x: torch.Tensor | Mxfp8Tensor,
    *,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    w13: Mxfp8Tensor,
    w2: Mxfp8Tensor,
    expert_map: torch.Tensor | None = None,
    activation: Activation | str = Activation.MXFP8,
    rounding: Rounding | str = Rounding.RCEIL,
    weight_on_input: bool = False,
    shared: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``sum over k of topk_weights[t, k] * w2[e] @ (silu(gate) * up)`` with ``gate, up = w13[e] @ x[t]``, e of (t, k).

    SwiGLU sees float32, each expert's result is rounded to out_dtype, and the sum is formed in float32. It reads
    counts on the host (see ``gemm.reference.grouped_gemm``), so it can't be captured into a CUDA graph.

    Args:
        x: ``[T, H]`` bf16, fp16 or fp32; or MXFP8 with row-major scales, with activation MXFP8 and an out_dtype.
        topk_ids: ``[T, top_k]`` int32 or int64, global expert ids; those that are not here are left out.
        topk_weights: ``[T, top_k]``; None sums without weights.
        w13: codes ``[E_local, 2 * I, H]``, gate rows before up rows, with row-major scales.
        w2: codes ``[E_local, H, I]``, with row-major scales.
        expert_map: ``[E_global]`` int32, local index or -1; None: ids are local.
        activation: MXFP8 quantizes the input and SwiGLU's result; BF16 rounds SwiGLU's result to bf16.
        rounding: how they are quantized.
        weight_on_input: the router weight is multiplied to the experts' input and not to their result.
        shared: ``[T, H]``, the shared expert's output, added to the sum.
        out_dtype: x's dtype by default.

    Returns:
        ``[T, H]``.
    """
    activation = Activation(activation)
    if out_dtype is None:
        assert isinstance(x, torch.Tensor), "tokens that arrive quantized say nothing of the result's dtype"
        out_dtype = x.dtype
    experts = w13.codes.shape[0]
    counts, offsets, slots = route_tokens(topk_ids, num_local_experts=experts, expert_map=expert_map)
    runs = {"expert_offsets": offsets, "expert_counts": counts}
    tokens = dispatch_tokens(
        x,
        slots=slots,
        num_local_experts=experts,
        activation=activation,
        rounding=rounding,
        topk_weights=topk_weights if weight_on_input else None,
    )
    gate_up = grouped_gemm(tokens, w13, out_dtype=torch.float32, **runs)
    product = swiglu_quantize(gate_up, activation=activation, rounding=rounding)
    if isinstance(product, torch.Tensor):
        product = product.to(torch.bfloat16)
    y = grouped_gemm(product, w2, out_dtype=out_dtype, **runs)
    weights = None if weight_on_input else topk_weights
    return combine_tokens(y, slots=slots, topk_weights=weights, shared=shared, out_dtype=out_dtype)
