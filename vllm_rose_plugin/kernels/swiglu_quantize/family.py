"""SwiGLU with quantization as a family of providers, with what the self-check compares."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding
from vllm_rose_plugin.kernels.jit.chosen import REFERENCE
from vllm_rose_plugin.kernels.jit.providers import Family, Provider
from vllm_rose_plugin.kernels.mxfp8_quantize.family import ROSE, everywhere, on_gpu, random_rows
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8
from vllm_rose_plugin.kernels.swiglu_quantize import reference

_DIFFERING = 1e-3
"""Share of blocks and elements that may differ: a product within 3 ulp of float32 may fall to the other side of a
rounding boundary."""


@dataclass(frozen=True)
class SwigluShape:
    """One call."""

    num_tokens: int
    intermediate_size: int
    dtype: str
    """Of the input: "bfloat16", "float16" or "float32"."""
    activation: Activation
    rounding: Rounding


def make_inputs(shape: SwigluShape, seed: int) -> tuple[torch.Tensor]:
    """(x)"""
    return (random_rows(shape.num_tokens, 2 * shape.intermediate_size, shape.dtype, seed),)


def by_reference(shape: SwigluShape) -> Callable[..., torch.Tensor | Mxfp8Tensor]:
    """Plain torch."""
    return partial(reference.swiglu_quantize, activation=shape.activation, rounding=shape.rounding)


def by_rose(shape: SwigluShape) -> Callable[..., torch.Tensor | Mxfp8Tensor]:
    """Our kernel; compiled, or loaded, before this returns."""
    from vllm_rose_plugin.kernels.swiglu_quantize import launch

    launch.warm_up(
        intermediate_size=shape.intermediate_size,
        dtype=shape.dtype,
        activation=shape.activation,
        rounding=shape.rounding,
    )
    return partial(launch.swiglu_quantize, activation=shape.activation, rounding=shape.rounding)


def compare(result: torch.Tensor | Mxfp8Tensor, expected: torch.Tensor | Mxfp8Tensor) -> str:
    """Every element within one step of the format, and few that differ at all."""
    if isinstance(result, Mxfp8Tensor) and isinstance(expected, Mxfp8Tensor):
        scale_steps = (result.scales.int() - expected.scales.int()).abs()
        if scale_steps.max() > 1 or (scale_steps > 0).float().mean() > _DIFFERING:
            return f"{(scale_steps > 0).sum()} of {scale_steps.numel()} scales differ, by up to {scale_steps.max()}"
        a = dequantize_mxfp8(result.codes, result.scales)
        b = dequantize_mxfp8(expected.codes, expected.scales)
        step = 2**-3
        # Below the format's normal numbers the step is absolute: 2**-9 of a block's scale.
        floor = torch.exp2(expected.scales.float() - 127 - 9 + 1).repeat_interleave(32, -1)
    elif isinstance(result, torch.Tensor) and isinstance(expected, torch.Tensor):
        a, b = result.float(), expected.float()
        step, floor = 2 * torch.finfo(result.dtype).eps, torch.full_like(b, 1e-30)
    else:
        return f"a {type(result).__name__} instead of a {type(expected).__name__}"
    if not torch.equal(a.isnan(), b.isnan()):
        return "other elements are NaN"
    a, b, floor = a.nan_to_num(), b.nan_to_num(), floor.nan_to_num()
    far = ((a - b).abs() > b.abs() * step + floor).any(-1).nonzero()
    if len(far):
        return f"{len(far)} of {len(a)} rows are off by more than a rounding step, the first is row {far[0].item()}"
    differing = (a != b).float().mean().item()
    if isinstance(result, Mxfp8Tensor) and differing > _DIFFERING:
        return f"{differing:.2%} of the elements differ"
    return ""


FAMILY = Family(
    name="swiglu_quantize",
    reference=Provider(name=REFERENCE, supports=everywhere, make=by_reference),
    providers=(Provider(name=ROSE, supports=on_gpu, make=by_rose),),
    make_inputs=make_inputs,
    compare=compare,
)
