"""MXFP8 quantization as a family of providers, with what the self-check compares."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor, Rounding, ScaleLayout
from vllm_rose_plugin.kernels.jit.chosen import REFERENCE
from vllm_rose_plugin.kernels.jit.providers import Family, Provider
from vllm_rose_plugin.kernels.mxfp8_quantize import reference
from vllm_rose_plugin.kernels.mxfp8_quantize.config import QuantizeConfig, choose_config, widest_load

ROSE = "rose"
"""The name of our own kernels among the providers."""


@dataclass(frozen=True)
class QuantizeShape:
    """One call."""

    num_tokens: int
    hidden_size: int
    dtype: str
    """Of the input: "bfloat16", "float16" or "float32"."""
    rounding: Rounding


def everywhere(shape: Any, target: str | None) -> bool:
    """The reference serves any shape on any device."""
    return True


def on_gpu(shape: Any, target: str | None) -> bool:
    """Our kernels serve any shape on a device that has a target."""
    return target is not None


def random_rows(num_tokens: int, width: int, dtype: str, seed: int) -> torch.Tensor:
    """``[T, width]`` on the current device: normal, each row at a scale of its own.

    The last rows hold NaN, inf, zeros, and numbers as large and as small as the dtype goes.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(num_tokens, width, device=device, generator=generator)
    x *= torch.exp2(torch.randint(-12, 5, (num_tokens, 1), device=device, generator=generator).float())
    if num_tokens > 8:
        limits = torch.finfo(getattr(torch, dtype))
        x[-1, ::7], x[-2, 3], x[-3] = float("nan"), float("inf"), 0.0
        x[-4:-3] = x[-4:-3].clamp(-2, 2) * (limits.max / 4)
        x[-5:-4] = x[-5:-4].clamp(-2, 2) * (limits.smallest_normal * 4)  # some are subnormal
    return x.to(getattr(torch, dtype))


def make_inputs(shape: QuantizeShape, seed: int) -> tuple[torch.Tensor]:
    """(x)"""
    return (random_rows(shape.num_tokens, shape.hidden_size, shape.dtype, seed),)


def by_reference(shape: QuantizeShape) -> Callable[..., Mxfp8Tensor]:
    """Plain torch."""

    def quantize(x: torch.Tensor) -> Mxfp8Tensor:
        return Mxfp8Tensor(*reference.quantize_mxfp8(x, rounding=shape.rounding))

    return quantize


def by_rose(shape: QuantizeShape) -> Callable[..., Mxfp8Tensor]:
    """Our kernel; compiled, or loaded, before this returns."""
    from vllm_rose_plugin.kernels.mxfp8_quantize import launch

    launch.warm_up(
        hidden_size=shape.hidden_size, dtype=shape.dtype, layout=ScaleLayout.ROW_MAJOR, rounding=shape.rounding
    )
    return partial(launch.quantize_mxfp8, rounding=shape.rounding)


def config_of(shape: QuantizeShape, target: str, sm_count: int) -> QuantizeConfig:
    """Of our kernel, with aligned rows."""
    return choose_config(
        dtype=shape.dtype,
        num_rows=shape.num_tokens,
        hidden_size=shape.hidden_size,
        layout=ScaleLayout.ROW_MAJOR,
        rounding=shape.rounding,
        alignment=widest_load(target),
        sm_count=sm_count,
    )


def compare(result: Mxfp8Tensor, expected: Mxfp8Tensor) -> str:
    """Bit for bit."""
    for name, a, b in (
        ("scales", result.scales, expected.scales),
        ("codes", result.codes.view(torch.uint8), expected.codes.view(torch.uint8)),
    ):
        wrong = (a != b).any(-1).nonzero()
        if len(wrong):
            return f"{len(wrong)} of {len(a)} rows have other {name}, the first is row {wrong[0].item()}"
    return ""


FAMILY = Family(
    name="mxfp8_quantize",
    reference=Provider(name=REFERENCE, supports=everywhere, make=by_reference),
    providers=(Provider(name=ROSE, supports=on_gpu, make=by_rose),),
    make_inputs=make_inputs,
    compare=compare,
    config_of=config_of,
)
