"""RMS norm per head and rotary embedding in plain torch.

The order of roundings is that of vLLM's RMSNorm: mean of squares, rsqrt and scaling in float32; a weight in the model's
dtype is multiplied after the scaled value was rounded to that dtype, so the result is rounded twice; a float32 weight
(GemmaRMSNorm makes one, 1 + w) is multiplied in float32 and the result rounded once. The rotation starts from that
rounded result, as if it had been written to memory, is computed in float32 and rounded once.
"""

import torch


def normalize_heads(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, weight_offset: float = 0.0, exact: bool = False
) -> torch.Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * (weight + weight_offset)`` over the last dimension.

    Args:
        x: ``[..., D]`` bf16 or fp16.
        weight: ``[D]`` in x's dtype or float32.
        eps: added to the mean of squares.
        weight_offset: added to the weight, in float32.
        exact: compute in float64 and round nothing: the oracle of both this function and the kernel.

    Returns:
        ``[..., D]`` in x's dtype, float64 if exact.
    """
    if exact:
        wide = x.double()
        scaled = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return scaled * (weight.double() + weight_offset)
    if weight_offset:
        weight = weight.float() + weight_offset
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled.to(weight.dtype) * weight).to(x.dtype)


def rotate_heads(
    x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """Rotary embedding of the first ``rotary_dim`` elements of every head.

    Args:
        x: ``[T, heads, D]`` bf16, fp16, or float64 for the oracle.
        positions: ``[T]`` int64, rows of the cache.
        cos_sin_cache: ``[P, rotary_dim]``, first the cosines, then the sines, as vLLM lays it out.
        interleaved: pairs are (2i, 2i + 1); otherwise (i, i + rotary_dim / 2).

    Returns:
        ``[T, heads, D]`` in x's dtype.
    """
    rotary_dim = cos_sin_cache.shape[1]
    wide = x if x.dtype == torch.float64 else x.float()
    cos, sin = cos_sin_cache[positions].to(wide.dtype).unsqueeze(1).chunk(2, -1)  # (T, 1, rotary_dim / 2) each
    out = wide.clone()
    first, second = (
        (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2))
        if interleaved
        else (
            slice(0, rotary_dim // 2),
            slice(rotary_dim // 2, rotary_dim),
        )
    )
    a, b = wide[..., first], wide[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out.to(x.dtype)
