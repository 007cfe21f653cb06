"""Batched experts as a family of providers, with what the self-check compares."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding
from vllm_rose_plugin.kernels.gemm import plan
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight, pack_weight
from vllm_rose_plugin.kernels.jit.chosen import REFERENCE
from vllm_rose_plugin.kernels.jit.providers import Family, Provider
from vllm_rose_plugin.kernels.moe_batched import flashinfer, reference
from vllm_rose_plugin.kernels.moe_batched.config import LayerShape, call_configs
from vllm_rose_plugin.kernels.moe_experts.config import token_formats_of
from vllm_rose_plugin.kernels.moe_experts.family import compare_rows, random_weight
from vllm_rose_plugin.kernels.mxfp8_quantize.family import ROSE
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts

_ROW_ERROR, _ELEMENT_ERROR = 0.1, 0.6
"""As in ``moe_experts.family``, but a row here is one expert's, not the sum over several: where SwiGLU's results are
off by 2**-10, as FP8 accumulation may leave them, and fall to the other side of a rounding boundary, one row in 200
moves by more than 3 % and the worst of 16,000 by 9 % (I = 64), an element of them by 0.45."""
_MEAN_ERROR = 1.5e-2
"""Of all rows, relative: 0.9 % then."""


@dataclass(frozen=True)
class BatchedShape:
    """One call."""

    max_tokens: int
    """M, rows of an expert."""
    expected_rows: int
    """Tokens to expect in all experts."""
    hidden_size: int
    intermediate_size: int
    num_local_experts: int
    dtype: str
    """Of x and of the result: "bfloat16" or "float16"."""
    activation: Activation
    rounding: Rounding
    captured: bool
    """Whether calls are captured into CUDA graphs, which the reference can't be."""
    served_tokens: int = 0
    """M of the calls that it stands for, where that is more than max_tokens; FlashInfer compiles for each M."""


class Inputs(NamedTuple):
    """Of one call."""

    x: torch.Tensor
    expert_counts: torch.Tensor
    w13: Mxfp8Tensor
    w2: Mxfp8Tensor
    packed: tuple[PackedWeight, PackedWeight] | None
    """For the GPU at hand."""


def make_inputs(shape: BatchedShape, seed: int) -> Inputs:
    """Random tokens, counts and weights; every row past a count is NaN.

    Counts are what is expected on average, up to M. Where there are a few experts, one has no token and one as many as
    fit; of its tokens one is NaN and one zero where there are a few.
    """
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    g = torch.Generator(device).manual_seed(seed)
    experts, each = shape.num_local_experts, shape.max_tokens
    mean = min(each, -(-shape.expected_rows // experts))
    counts = torch.randint(0, min(each, 2 * mean) + 1, (experts,), generator=g, device=device, dtype=torch.int32)
    if experts > 2:
        counts[0], counts[1] = 0, each
    x = torch.empty(experts, each, shape.hidden_size, dtype=getattr(torch, shape.dtype), device=device)
    x.normal_(generator=g)
    x *= torch.exp2(torch.randint(-2, 3, (experts, each, 1), device=device, generator=g).to(x.dtype))
    if experts > 2 and each > 4:
        x[1, 2, 5], x[1, 3] = float("nan"), 0.0
    past = torch.arange(each, device=device) >= counts.unsqueeze(1)
    x.masked_fill_(past.unsqueeze(-1), float("nan"))
    w13 = random_weight(experts, 2 * shape.intermediate_size, shape.hidden_size, g)
    w2 = random_weight(experts, shape.hidden_size, shape.intermediate_size, g)
    packed = None
    if gpu:
        target = device_facts(device.index).target
        packed = pack_weight(w13, target=target, gate_up=True), pack_weight(w2, target=target)
    return Inputs(x, counts, w13, w2, packed)


def by_reference(shape: BatchedShape) -> Callable[..., torch.Tensor]:
    """Plain torch."""

    def experts(*inputs: Any) -> torch.Tensor:
        given = Inputs(*inputs)
        return reference.moe_batched(
            given.x,
            expert_counts=given.expert_counts,
            w13=given.w13,
            w2=given.w2,
            activation=shape.activation,
            rounding=shape.rounding,
        )

    return experts


def by_rose(shape: BatchedShape) -> Callable[..., torch.Tensor]:
    """Our kernels; those of this many tokens are compiled, or loaded, at the first call."""
    from vllm_rose_plugin.kernels.moe_batched import launch

    def experts(*inputs: Any) -> torch.Tensor:
        given = Inputs(*inputs)
        assert given.packed is not None
        size = launch.workspace_bytes(
            max_tokens=shape.max_tokens,
            num_local_experts=shape.num_local_experts,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            token_formats=token_formats_of(given.packed[0].target, shape.activation),
        )
        out = torch.zeros_like(given.x)  # rows past the counts stay as they are
        launch.moe_batched(
            given.x,
            expert_counts=given.expert_counts,
            w13=given.packed[0],
            w2=given.packed[1],
            out=out,
            workspace=torch.empty(size, dtype=torch.uint8, device=given.x.device),
            expected_rows=shape.expected_rows,
            activation=shape.activation,
            rounding=shape.rounding,
        )
        return out

    return experts


def by_flashinfer(shape: BatchedShape) -> Callable[..., torch.Tensor]:
    """FlashInfer's GEMMs; those of this many tokens and of the calls that are served are made before this returns."""
    _, _, _, _, weights = make_inputs(replace(shape, max_tokens=1, expected_rows=1), 0)
    assert weights is not None
    dtype = getattr(torch, shape.dtype)
    for each in sorted({shape.max_tokens, max(shape.max_tokens, shape.served_tokens)}):
        flashinfer.warm_up(*weights, max_tokens=each, dtype=dtype, rounding=shape.rounding)

    def experts(*inputs: Any) -> torch.Tensor:
        given = Inputs(*inputs)
        assert given.packed is not None
        size = flashinfer.workspace_bytes(
            max_tokens=shape.max_tokens,
            num_local_experts=shape.num_local_experts,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
        )
        out = torch.empty_like(given.x)
        flashinfer.moe_batched(
            given.x,
            expert_counts=given.expert_counts,
            w13=given.packed[0],
            w2=given.packed[1],
            out=out,
            workspace=torch.empty(size, dtype=torch.uint8, device=given.x.device),
            rounding=shape.rounding,
        )
        past = torch.arange(shape.max_tokens, device=out.device) >= given.expert_counts.unsqueeze(1)
        return out.masked_fill_(past.unsqueeze(-1), 0)  # undefined, and zero in what it is compared with

    return experts


def compare(result: torch.Tensor, expected: torch.Tensor) -> str:
    """Every row close, every element not far, all of them closer on average, NaN in the same elements."""
    if result.shape != expected.shape:
        return f"{tuple(result.shape)} instead of {tuple(expected.shape)}"
    a, b = result.flatten(0, 1), expected.flatten(0, 1)
    if wrong := compare_rows(a, b, row_error=_ROW_ERROR, element_error=_ELEMENT_ERROR):
        return wrong
    a, b = (rows.double().nan_to_num(0, 0, 0) for rows in (a, b))
    norm = b.norm(dim=-1)
    errors = ((a - b).norm(dim=-1) / norm)[norm > 0]
    if len(errors) and errors.mean() > _MEAN_ERROR:
        return f"rows are off by {errors.mean():.1%} on average, more than {_MEAN_ERROR:.1%}"
    return ""


def config_of(shape: BatchedShape, target: str, sm_count: int) -> Any:
    """Of the kernels of a call; see :func:`call_configs`."""
    layer = LayerShape(
        target=target,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_local_experts=shape.num_local_experts,
        activation=shape.activation,
    )
    return call_configs(
        layer,
        max_tokens=shape.max_tokens,
        expected_rows=shape.expected_rows,
        sm_count=sm_count,
        dtype=shape.dtype,
        rounding=shape.rounding,
    )


def _by_reference(shape: BatchedShape, target: str | None) -> bool:
    return target is None or not shape.captured


def _served(shape: BatchedShape, target: str | None) -> bool:
    return plan.serves(target=target, activation=shape.activation)


def _served_by_flashinfer(shape: BatchedShape, target: str | None) -> bool:
    return flashinfer.serves(target=target, intermediate_size=shape.intermediate_size, activation=shape.activation)


FAMILY = Family(
    name="moe_batched",
    reference=Provider(name=REFERENCE, supports=_by_reference, make=by_reference),
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
)
