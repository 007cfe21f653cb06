"""SwiGLU and the quantization of its result, in plain torch."""

import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8


def swiglu_quantize(
    x: torch.Tensor,
    *,
    activation: Activation | str = Activation.MXFP8,
    rounding: Rounding | str = Rounding.RCEIL,
    limit: float | None = None,
) -> torch.Tensor | Mxfp8Tensor:
    """``silu(gate) * up`` in float32.

    Args:
        x: ``[..., 2 * I]`` bf16, fp16 or fp32: first the gate, then up (vLLM's w13 order).
        activation: MXFP8 quantizes the product, from float32; BF16 rounds it to x's dtype.
        rounding: how the product is quantized.
        limit: vLLM's ``swiglu_limit``: gate is clamped from above, up from both sides. Models of the Qwen family have
            none.

    Returns:
        ``[..., I]``. Zero rows give zero rows.

    Raises:
        ValueError: the last dimension is odd, or I is not a multiple of 32 and shall be quantized.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"SwiGLU needs gate and up, an even last dimension, got {x.shape[-1]}")
    gate, up = x.float().chunk(2, -1)  # (..., I) each
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    product = torch.nn.functional.silu(gate) * up
    if Activation(activation) is Activation.BF16:
        return product.to(x.dtype)
    return Mxfp8Tensor(*quantize_mxfp8(product, rounding=rounding))
