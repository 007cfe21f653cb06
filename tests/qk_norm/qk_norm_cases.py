"""Random heads, the float64 oracle and how far from it roundings may lead."""

import torch

from vllm_rose_plugin.kernels.qk_norm.reference import normalize_heads, rotate_heads

HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of one rounding."""
_FP32 = 2.0**-20
"""Relative error of the sum, the rsqrt and the products in float32, generously."""
_TINY = {torch.bfloat16: 2.0**-132, torch.float16: 2.0**-24}
"""Absolute error of one rounding to a subnormal."""


def random_heads(tokens: int, heads: int, head_dim: int, dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """``[T, heads, D]`` whose rows differ in size by up to 2^12."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads, head_dim, generator=generator)
    size = torch.exp2(torch.randint(-6, 7, (tokens, heads, 1), generator=generator).float())
    return (x * size).to(dtype)


def random_weight(head_dim: int, dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(head_dim, generator=torch.Generator().manual_seed(1000 + seed)).to(dtype)


def random_cache(rows: int, rotary_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """A real cos_sin_cache, ``[P, rotary_dim]``."""
    frequency = 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    angle = torch.arange(rows).unsqueeze(1) * frequency
    return torch.cat([angle.cos(), angle.sin()], 1).to(dtype)


def assert_near_exact(out, x, weight, *, eps, weight_offset=0.0, rope=None) -> None:
    """Every element of out within its roundings of float64 maths.

    Args:
        out, x: ``[T, heads, D]``.
        weight: ``[D]``.
        rope: None, or ``(positions, cos_sin_cache, interleaved)``.
    """
    dtype = x.dtype
    roundings = 2 if weight.dtype == dtype and weight_offset == 0.0 else 1
    exact = normalize_heads(x, weight, eps=eps, weight_offset=weight_offset, exact=True)
    relative = roundings * HALF_ULP[dtype] * (1 + HALF_ULP[dtype]) + _FP32
    # A subnormal loses _TINY whatever its size, before the weight and after it.
    bound = exact.abs() * relative + _TINY[dtype] * (1 + weight.double().abs())
    if rope is not None:
        positions, cache, interleaved = rope
        # The bound of a rotated element: both parts' bounds times |cos| and |sin|, and one rounding more.
        bound = _rotate_bound(bound, positions, cache, interleaved)
        exact = rotate_heads(exact, positions, cache, interleaved=interleaved)
        rotary_dim = cache.shape[1]
        bound[..., :rotary_dim] += (exact.abs() * (HALF_ULP[dtype] + _FP32) + _TINY[dtype])[..., :rotary_dim]
        magnitude = _rotate_bound(exact.abs(), positions, cache, interleaved)
        bound[..., :rotary_dim] += (magnitude * (_FP32 + HALF_ULP[dtype] ** 2))[..., :rotary_dim]
    error = (out.double() - exact).abs()
    worst = (error / bound).max().item()
    assert worst <= 1.0, f"an element is {worst:.3f} times its bound from float64"


def _rotate_bound(bound, positions, cache, interleaved):
    """|cos| a + |sin| b, what the rotation makes of bounds."""
    half = cache.shape[1] // 2
    absolute = torch.cat([cache[:, :half].abs(), -cache[:, half:].abs()], 1)
    turned = rotate_heads(bound, positions, absolute, interleaved=interleaved)  # first of a pair: |c| a + |s| b
    other = torch.cat([cache[:, :half].abs(), cache[:, half:].abs()], 1)
    second = rotate_heads(bound, positions, other, interleaved=interleaved)  # second of a pair: |c| b + |s| a
    return torch.maximum(turned, second)
