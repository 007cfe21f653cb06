"""The MXFP8 linear layer as a family of providers, with what the self-check compares."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding, ScaleLayout, TokenFormat
from vllm_rose_plugin.kernels.gemm import flashinfer, launch, plan, reference, tuned
from vllm_rose_plugin.kernels.gemm.call import Call
from vllm_rose_plugin.kernels.gemm.tokens import LAYOUT_OF
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight, pack_weight
from vllm_rose_plugin.kernels.jit.chosen import REFERENCE
from vllm_rose_plugin.kernels.jit.providers import Family, Provider
from vllm_rose_plugin.kernels.mxfp8_quantize import launch as quantize
from vllm_rose_plugin.kernels.mxfp8_quantize.config import choose_config, widest_load
from vllm_rose_plugin.kernels.mxfp8_quantize.family import ROSE, everywhere
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts

_ROW_ERROR = 6e-3
"""Of a row, relative: both results are rounded to 16 bits, 1.7e-3 each on average in bf16, and Hopper's FP8 products
are added in few bits. One element of a thousand that is off by itself is 3e-2."""
_COLUMN_ERROR = 2e-2
"""Of a column, where it has a few elements: one alone may be what is left of terms that cancel."""
_FEW = 4


@dataclass(frozen=True)
class LinearShape:
    """One call."""

    num_tokens: int
    n: int
    k: int
    dtype: str
    """Of x and of the result: "bfloat16" or "float16"."""
    bias: bool
    activation: Activation
    rounding: Rounding
    batch_invariant: bool


Inputs = tuple[torch.Tensor, Mxfp8Tensor, PackedWeight | None, torch.Tensor | None]


def make_inputs(shape: LinearShape, seed: int) -> Inputs:
    """(x, weight, the same packed for the GPU, bias).

    Rows of x and of the weight have scales of their own; a row of x is zero, and where there are a few, one is NaN.
    """
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(seed)

    def rows(count: int, width: int) -> torch.Tensor:
        power = torch.randint(-3, 4, (count, 1), device=device, generator=generator).float()
        return torch.randn(count, width, device=device, generator=generator) * torch.exp2(power)

    x = rows(shape.num_tokens, shape.k)
    if shape.num_tokens > 4:
        x[-1], x[-2, 3] = 0.0, float("nan")
    weight = Mxfp8Tensor(*reference.quantize_mxfp8(rows(shape.n, shape.k) / shape.k**0.5))
    packed = pack_weight(weight, target=device_facts(device.index).target) if gpu else None
    bias = rows(1, shape.n)[0] if shape.bias else None
    return x.to(getattr(torch, shape.dtype)), weight, packed, bias


def by_reference(shape: LinearShape) -> Callable[..., torch.Tensor]:
    """Plain torch."""

    def linear(x, weight, packed, bias):
        return reference.mxfp8_linear(x, weight, bias=bias, activation=shape.activation, rounding=shape.rounding)

    return linear


def config_of(shape: LinearShape, target: str, sm_count: int) -> Any:
    """Of our kernels: the GEMM, and the quantizer in front of it."""
    quantizer = choose_config(
        **quantizer_call(shape, target), num_rows=shape.num_tokens, alignment=widest_load(target), sm_count=sm_count
    )
    return plan_of(shape, target, sm_count).config, quantizer


def by_rose(shape: LinearShape) -> Callable[..., torch.Tensor]:
    """Our kernels; those of this many tokens are compiled, or loaded, before this returns."""
    facts = device_facts(torch.cuda.current_device())
    plan_of(shape, facts.target, facts.sm_count).compile()
    quantize.warm_up(**quantizer_call(shape, facts.target))
    return partial(_linear, shape)


def by_flashinfer(shape: LinearShape) -> Callable[..., torch.Tensor]:
    """FlashInfer's GEMM; a call before this returns loads its module and makes its workspace."""
    facts = device_facts(torch.cuda.current_device())
    quantize.warm_up(**quantizer_call(shape, facts.target))

    def linear(x, weight, packed, bias):
        return flashinfer.linear(x, packed, bias=bias, rounding=shape.rounding)

    linear(*make_inputs(shape, 0))
    return linear


def _token_format(shape: LinearShape, target: str) -> TokenFormat:
    return plan.token_format_of(
        target=target,
        activation=shape.activation,
        num_groups=1,
        num_rows=shape.num_tokens,
        batch_invariant=shape.batch_invariant,
    )


def quantizer_call(shape: LinearShape, target: str) -> dict[str, Any]:
    """What brings x into the kernel's format, as its ``choose_config`` wants it."""
    token_format = _token_format(shape, target)
    return {
        "dtype": shape.dtype,
        "hidden_size": shape.k,
        "layout": LAYOUT_OF.get(token_format, ScaleLayout.ROW_MAJOR),
        "rounding": shape.rounding,
        "activation": shape.activation,
        "permuted": token_format is TokenFormat.BF16_PERMUTED,
    }


def call_of(shape: LinearShape, target: str, sm_count: int) -> Call:
    """What our GEMM computes for it."""
    return Call(
        target=target,
        sm_count=sm_count,
        num_groups=1,
        n=shape.n,
        k=shape.k,
        token_format=_token_format(shape, target),
        out_dtype=shape.dtype,
        bias=shape.bias,
        early_counts=True,
        batch_invariant=shape.batch_invariant,
    )


def plan_of(shape: LinearShape, target: str, sm_count: int, *, domains: int = 1) -> plan.Plan:
    """The kernel for it; with domains, on a weight in so many parts."""
    expected_rows = plan.batch_invariant_rows(1) if shape.batch_invariant else shape.num_tokens
    call = replace(call_of(shape, target, sm_count), domains=domains)
    return plan.plan(call, expected_rows=expected_rows, num_rows=shape.num_tokens)


def _linear(shape: LinearShape, x, weight, packed, bias) -> torch.Tensor:
    return launch.linear(
        x,
        packed,
        bias=bias,
        activation=shape.activation,
        rounding=shape.rounding,
        batch_invariant=shape.batch_invariant,
    )


def compare(result: torch.Tensor, expected: torch.Tensor) -> str:
    """Every row close, every column close, and NaN in the same elements."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"{result.dtype} {tuple(result.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if not torch.equal(result.isnan(), expected.isnan()):
        return f"{(result.isnan() != expected.isnan()).sum()} elements are NaN where they shouldn't be, or aren't"
    a, b = (tensor.double().nan_to_num(0, 0, 0) for tensor in (result, expected))
    for what, dim, tolerance in (("rows", -1, _ROW_ERROR), ("columns", 0, _COLUMN_ERROR)):
        wrong = ((a - b).norm(dim=dim) > tolerance * b.norm(dim=dim)).nonzero()
        if len(wrong) and a.shape[dim] >= _FEW:
            return f"{len(wrong)} {what} are off by more than {tolerance:.1%}, the first is {wrong[0].item()}"
    return ""


def _served(shape: Any, target: str | None) -> bool:
    return plan.serves(target=target, activation=shape.activation)


def _served_by_flashinfer(shape: LinearShape, target: str | None) -> bool:
    return flashinfer.serves(
        target=target, n=shape.n, k=shape.k, activation=shape.activation, batch_invariant=shape.batch_invariant
    )


FAMILY = Family(
    name="mxfp8_linear",
    reference=Provider(name=REFERENCE, supports=everywhere, make=by_reference),
    providers=(
        Provider(name=ROSE, supports=_served, make=by_rose),
        Provider(
            name=flashinfer.NAME,
            supports=_served_by_flashinfer,
            make=by_flashinfer,
            version=flashinfer.installed_version(),
        ),
    ),
    make_inputs=make_inputs,
    compare=compare,
    config_of=config_of,
    state=tuned.digest,
)
