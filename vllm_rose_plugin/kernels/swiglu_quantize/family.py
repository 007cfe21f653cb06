"""SwiGLU with quantization as a family of providers, with what the self-check compares."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, Mxfp8Tensor, Rounding, ScaleLayout
from vllm_rose_plugin.kernels.jit.chosen import REFERENCE
from vllm_rose_plugin.kernels.jit.providers import Family, Provider
from vllm_rose_plugin.kernels.mxfp8_quantize.config import ITEM_BYTES, widest_load
from vllm_rose_plugin.kernels.mxfp8_quantize.family import ROSE, everywhere, on_gpu, random_rows
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8
from vllm_rose_plugin.kernels.swiglu_quantize import reference
from vllm_rose_plugin.kernels.swiglu_quantize.config import SwigluConfig, choose_config

_FEW = 4
_DIFFERING = {torch.float8_e4m3fn: 1e-4, torch.bfloat16: 2e-4, torch.float16: 1.5e-3, torch.float32: 1.0}
"""Share of elements (and, in MXFP8, of scales) that may differ beyond a few: a product within 3 ulp of float32 may fall
to the other side of a rounding boundary, which lie the closer the finer the result is."""


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
    """Every element within one step of the format, and few that differ at all; NaN and inf in the same places."""
    if isinstance(result, Mxfp8Tensor) and isinstance(expected, Mxfp8Tensor):
        scale_steps = (result.scales.int() - expected.scales.int()).abs()
        share = _DIFFERING[expected.codes.dtype]
        others = int((scale_steps > 0).sum())
        if scale_steps.max() > 1 or others > max(_FEW, share * scale_steps.numel()):
            return f"{others} of {scale_steps.numel()} scales differ, by up to {scale_steps.max()}"
        a = dequantize_mxfp8(result.codes, result.scales)
        b = dequantize_mxfp8(expected.codes, expected.scales)
        scale = torch.exp2(torch.minimum(result.scales, expected.scales).float() - 127)
        # A step is 2**-3 of an element, 2**-9 of its scale where that is more. With ``floor`` the same maximum may
        # saturate in one result and, with the next scale, not in the other: 448 and 512 times the smaller scale.
        step = torch.where(scale_steps > 0, 64.0, 2.0**-9) * scale
        allowed = torch.maximum(b.abs() * 2**-3, step.repeat_interleave(MXFP8_BLOCK, -1))
    elif isinstance(result, torch.Tensor) and isinstance(expected, torch.Tensor):
        if result.dtype != expected.dtype or result.shape != expected.shape:
            return f"{result.dtype} {tuple(result.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
        a, b = result.float(), expected.float()
        limits, share = torch.finfo(expected.dtype), _DIFFERING[expected.dtype]
        # fp32 isn't rounded again: there the product's own 3 ulp count.
        steps = 4 if expected.dtype == torch.float32 else 1
        allowed = steps * limits.eps * torch.maximum(b.abs(), torch.full_like(b, limits.smallest_normal))
    else:
        return f"a {type(result).__name__} instead of a {type(expected).__name__}"
    for what, x, y in (("NaN", a.isnan(), b.isnan()), ("inf", a.isinf() * a.sign(), b.isinf() * b.sign())):
        if not torch.equal(x.nan_to_num(), y.nan_to_num()):
            return f"other elements are {what}"
    finite = b.isfinite()
    a, b, allowed = (torch.where(finite, x, 0.0) for x in (a, b, allowed))
    far = ((a - b).abs() > allowed).any(-1).nonzero()
    if len(far):
        return f"{len(far)} of {len(a)} rows are off by more than a rounding step, the first is row {far[0].item()}"
    differing = int((a != b).sum())
    if differing > max(_FEW, share * a.numel()):
        return f"{differing} of {a.numel()} elements differ"
    return ""


def config_of(shape: SwigluShape, target: str, sm_count: int) -> SwigluConfig:
    """Of our kernel, with aligned rows."""
    row_bytes = shape.intermediate_size * ITEM_BYTES[shape.dtype]
    return choose_config(
        dtype=shape.dtype,
        num_rows=shape.num_tokens,
        intermediate_size=shape.intermediate_size,
        activation=shape.activation,
        layout=ScaleLayout.ROW_MAJOR,
        rounding=shape.rounding,
        limit=None,
        alignment=min(widest_load(target), row_bytes & -row_bytes),
        sm_count=sm_count,
    )


FAMILY = Family(
    name="swiglu_quantize",
    reference=Provider(name=REFERENCE, supports=everywhere, make=by_reference),
    providers=(Provider(name=ROSE, supports=on_gpu, make=by_rose),),
    make_inputs=make_inputs,
    compare=compare,
    config_of=config_of,
)
