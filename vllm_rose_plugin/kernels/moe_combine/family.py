"""The weighted sum as a family of providers, with what the self-check compares."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vllm_rose_plugin.kernels.jit.chosen import REFERENCE
from vllm_rose_plugin.kernels.jit.providers import Family, Provider
from vllm_rose_plugin.kernels.moe_combine import reference
from vllm_rose_plugin.kernels.mxfp8_quantize.family import ROSE, everywhere, on_gpu, random_rows


@dataclass(frozen=True)
class CombineShape:
    """One call."""

    num_tokens: int
    hidden_size: int
    top_k: int
    dtype: str
    """Of the experts' results and of the sum: "bfloat16" or "float16"."""
    weighted: bool


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def make_inputs(shape: CombineShape, seed: int) -> Inputs:
    """(y, slots, topk_weights).

    Every row belongs to one (token, k), in an order that is random; a third of the slots is -1 instead. Some rows are
    zero, inf and NaN, and so are some router weights, those of slots that are -1 among them.
    """
    pairs = shape.num_tokens * shape.top_k
    y = random_rows(pairs, shape.hidden_size, shape.dtype, seed)
    generator = torch.Generator(y.device).manual_seed(seed + 1)
    slots = torch.randperm(pairs, generator=generator, device=y.device).to(torch.int32)
    skipped = torch.rand(pairs, generator=generator, device=y.device) < 1 / 3
    slots = torch.where(skipped, -1, slots).view(shape.num_tokens, shape.top_k)
    if not shape.weighted:
        return y, slots, None
    weights = torch.rand(pairs, generator=generator, device=y.device)
    weights[skipped & (weights > 0.5)] = float("nan")
    return y, slots, weights.view(shape.num_tokens, shape.top_k)


def by_reference(shape: CombineShape) -> Callable[..., torch.Tensor]:
    """Plain torch."""
    return partial(_call, reference.combine_tokens)


def by_rose(shape: CombineShape) -> Callable[..., torch.Tensor]:
    """Our kernel; compiled, or loaded, before this returns."""
    from vllm_rose_plugin.kernels.moe_combine import launch

    launch.warm_up(hidden_size=shape.hidden_size, top_k=shape.top_k, dtype=shape.dtype, weighted=shape.weighted)
    return partial(_call, launch.combine_tokens)


def _call(function: Any, y: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    return function(y, slots=slots, topk_weights=weights)


def compare(result: torch.Tensor, expected: torch.Tensor) -> str:
    """Bit for bit, but for the payload of a NaN."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"{result.dtype} {tuple(result.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    nan = expected.isnan()
    wrong = (result.isnan() != nan) | (~nan & (result.view(torch.int16) != expected.view(torch.int16)))
    rows = wrong.any(-1).nonzero()
    return f"{len(rows)} of {len(result)} rows differ, the first is row {rows[0].item()}" if len(rows) else ""


FAMILY = Family(
    name="moe_combine",
    reference=Provider(name=REFERENCE, supports=everywhere, make=by_reference),
    providers=(Provider(name=ROSE, supports=on_gpu, make=by_rose),),
    make_inputs=make_inputs,
    compare=compare,
)
