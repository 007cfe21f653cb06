"""A layer of experts as a family of providers, with what the self-check compares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, Mxfp8Tensor, Rounding
from vllm_rose_plugin.kernels.gemm import plan, tuned
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight, pack_weight
from vllm_rose_plugin.kernels.jit.chosen import REFERENCE
from vllm_rose_plugin.kernels.jit.providers import Family, Provider
from vllm_rose_plugin.kernels.moe_dispatch import threshold
from vllm_rose_plugin.kernels.moe_experts import reference
from vllm_rose_plugin.kernels.moe_experts.config import LayerShape, step_configs, token_formats_of
from vllm_rose_plugin.kernels.mxfp8_quantize.family import ROSE
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8

if TYPE_CHECKING:
    from vllm_rose_plugin.kernels.moe_experts.ways import Way

_ROW_ERROR, _ELEMENT_ERROR = 3e-2, 0.25
"""Of a row, relative, and of an element, against the root mean square of its row. SwiGLU's results that fall to the
other side of a rounding boundary move most rows by up to 1.5 %."""
_FAR_ROW_ERROR, _FAR_ELEMENT_ERROR, _FAR_ROWS = 0.1, 0.6, 0.01
"""What a share of the rows, or one, may have. A row of few experts with few columns each hangs on single results: with
I = 64 or 128 and SwiGLU off by 1.5e-4, as FP8 accumulation may leave it, one row in a thousand moves by more than 3 %
and the worst of 16,000 by 6 %, with 5e-4 one in 200 and by 9 %."""
_CODE_BITS = 0xBF
"""E4M3 codes below 2 in magnitude, none of them NaN."""


@dataclass(frozen=True)
class ExpertsShape:
    """One call."""

    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_local_experts: int
    num_experts: int
    """On all ranks; if more than the local ones, an expert map names those that are here."""
    top_k: int
    dtype: str
    """Of x and of the result: "bfloat16" or "float16"."""
    activation: Activation
    rounding: Rounding
    captured: bool
    """Whether calls are captured into CUDA graphs, which the reference can't be."""
    quantized: bool = False
    """Whether x arrives as MXFP8."""
    batch_invariant: bool = False
    """Whether a token's bits may depend on that token alone."""


class Inputs(NamedTuple):
    """Of one call."""

    x: torch.Tensor | Mxfp8Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    expert_map: torch.Tensor | None
    w13: Mxfp8Tensor
    w2: Mxfp8Tensor
    packed: tuple[PackedWeight, PackedWeight] | None
    """For the GPU at hand."""


def make_inputs(shape: ExpertsShape, seed: int) -> Inputs:
    """Random tokens, routing and weights.

    A token's experts are distinct. Where there are a few tokens, the last ones go nowhere (ids of -1 and beyond the
    end), one is NaN, one is zero, and a third of all go to one expert first.
    """
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    g = torch.Generator(device).manual_seed(seed)
    tokens, top_k, experts = shape.num_tokens, shape.top_k, shape.num_experts
    x = torch.randn(tokens, shape.hidden_size, device=device, generator=g)
    x *= torch.exp2(torch.randint(-2, 3, (tokens, 1), device=device, generator=g).float())
    ids = torch.rand(tokens, experts, device=device, generator=g).argsort(-1)[:, :top_k].to(torch.int32).contiguous()
    weights = torch.rand(tokens, top_k, device=device, generator=g) / 2 + 0.5
    if tokens > 4:
        crowded = ids[: tokens // 3]
        crowded[:, 0] = torch.where((crowded == 0).any(-1), crowded[:, 0], 0)
        ids[-1], ids[-2, 0] = -1, experts + 3
        x[-3, 5], x[-4] = float("nan"), 0.0
    expert_map = None
    local = shape.num_local_experts
    if local < experts:
        order = torch.randperm(experts, device=device, generator=g)
        expert_map = torch.where(order < local, order, -1).to(torch.int32)
    w13 = random_weight(local, 2 * shape.intermediate_size, shape.hidden_size, g)
    w2 = random_weight(local, shape.hidden_size, shape.intermediate_size, g)
    packed = None
    if gpu:
        target = device_facts(device.index).target
        packed = pack_weight(w13, target=target, gate_up=True), pack_weight(w2, target=target)
    given = Mxfp8Tensor(*quantize_mxfp8(x)) if shape.quantized else x.to(getattr(torch, shape.dtype))
    return Inputs(given, ids, weights, expert_map, w13, w2, packed)


def random_weight(experts: int, n: int, k: int, generator: torch.Generator) -> Mxfp8Tensor:
    """MXFP8 ``[E, N, K]`` made in place, since experts may take most of a GPU; rows have norms of about 1."""
    how: dict[str, Any] = {"dtype": torch.uint8, "device": generator.device}
    codes = torch.empty(experts, n, k, **how).random_(0, 256, generator=generator).bitwise_and_(_CODE_BITS)
    one = 127 - round(0.5 * (k - 1).bit_length())
    scales = torch.empty(experts, n, k // MXFP8_BLOCK, **how).random_(one - 1, one + 2, generator=generator)
    return Mxfp8Tensor(codes.view(torch.float8_e4m3fn), scales)


def by_reference(shape: ExpertsShape) -> Callable[..., torch.Tensor]:
    """Plain torch."""

    def experts(*inputs: Any) -> torch.Tensor:
        given = Inputs(*inputs)
        return reference.moe_experts(
            given.x,
            topk_ids=given.topk_ids,
            topk_weights=given.topk_weights,
            w13=given.w13,
            w2=given.w2,
            expert_map=given.expert_map,
            activation=shape.activation,
            rounding=shape.rounding,
            out_dtype=getattr(torch, shape.dtype),
        )

    return experts


def by_rose(shape: ExpertsShape) -> Callable[..., torch.Tensor]:
    """Our kernels; those of this many tokens are compiled, or loaded, at the first call."""

    def experts(*inputs: Any) -> torch.Tensor:
        given = Inputs(*inputs)
        assert given.packed is not None
        return run_kernels(shape, given, given.packed[:1], given.packed[1:])

    return experts


def run_kernels(
    shape: ExpertsShape,
    given: Inputs,
    w13: Sequence[PackedWeight],
    w2: Sequence[PackedWeight],
    *,
    way: "Way | None" = None,
) -> torch.Tensor:
    """Our kernels on weights that may lie in parts.

    Args:
        shape: of the call.
        given: its inputs, of which the packed weights aren't used.
        w13, w2, way: as in ``launch.moe_experts``.
    """
    from vllm_rose_plugin.kernels.moe_experts import launch, memory
    from vllm_rose_plugin.kernels.moe_route.launch import route_workspace

    device = given.topk_ids.device
    size = memory.workspace_bytes(
        num_tokens=shape.num_tokens,
        top_k=shape.top_k,
        num_local_experts=shape.num_local_experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        token_formats=token_formats_of(w13[0].target, shape.activation),
    )
    out = torch.empty(shape.num_tokens, shape.hidden_size, dtype=getattr(torch, shape.dtype), device=device)
    launch.moe_experts(
        given.x,
        topk_ids=given.topk_ids,
        topk_weights=given.topk_weights,
        w13=w13,
        w2=w2,
        way=way,
        out=out,
        workspace=torch.empty(size, dtype=torch.uint8, device=device),
        route_workspace=route_workspace(num_local_experts=shape.num_local_experts, device=device),
        num_experts=shape.num_experts,
        expert_map=given.expert_map,
        activation=shape.activation,
        rounding=shape.rounding,
        batch_invariant=shape.batch_invariant,
    )
    return out


def compare(result: torch.Tensor, expected: torch.Tensor) -> str:
    """Every row not far, nearly all of them close, NaN in the same elements.

    Args:
        result, expected: ``[rows, columns]``.
    """
    if fault := compare_rows(result, expected, row_error=_FAR_ROW_ERROR, element_error=_FAR_ELEMENT_ERROR):
        return fault
    far = max(1, int(_FAR_ROWS * len(result)))
    return compare_rows(result, expected, row_error=_ROW_ERROR, element_error=_ELEMENT_ERROR, but=far)


def compare_rows(
    result: torch.Tensor, expected: torch.Tensor, *, row_error: float, element_error: float, but: int = 0
) -> str:
    """Every row close, every element not far, NaN in the same elements.

    Args:
        result, expected: ``[rows, columns]``.
        row_error: allowed, relative to the norm of a row.
        element_error: allowed, relative to the root mean square of an element's row.
        but: rows that may exceed these.
    """
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"{result.dtype} {tuple(result.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if not torch.equal(result.isnan(), expected.isnan()):
        return f"{(result.isnan() != expected.isnan()).sum()} elements are NaN where they shouldn't be, or aren't"
    a, b = (tensor.double().nan_to_num(0, 0, 0) for tensor in (result, expected))
    difference, norm = a - b, b.norm(dim=-1)
    wrong = (difference.norm(dim=-1) > row_error * norm).nonzero()
    if len(wrong) > but:
        return f"{len(wrong)} rows are off by more than {row_error:.1%}, the first is {wrong[0].item()}"
    far = difference.abs() > element_error * (norm / b.shape[-1] ** 0.5).unsqueeze(-1)
    if far.any(-1).sum() > but:
        return f"{far.sum()} elements are far off, the first is {far.nonzero()[0].tolist()}"
    return ""


def layer_of(shape: ExpertsShape, target: str) -> LayerShape:
    """What all calls of the layer have in common."""
    return LayerShape(
        target=target,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_local_experts=shape.num_local_experts,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        activation=shape.activation,
        batch_invariant=shape.batch_invariant,
    )


def config_of(shape: ExpertsShape, target: str, sm_count: int) -> Any:
    """Of the kernels of a call; see :func:`step_configs`."""
    return step_configs(
        layer_of(shape, target),
        shape.num_tokens,
        sm_count=sm_count,
        dtype=shape.dtype,
        rounding=shape.rounding,
        quantized=shape.quantized,
    )


def _by_reference(shape: ExpertsShape, target: str | None) -> bool:
    return target is None or not (shape.captured or shape.batch_invariant)  # its products' bits follow their rows


def _served(shape: ExpertsShape, target: str | None) -> bool:
    return plan.serves(target=target, activation=shape.activation)


def state() -> str:
    """What decides, beside shapes, which kernels a call launches: what was tuned, and where one launch ends."""
    return tuned.digest() + threshold.digest()


FAMILY = Family(
    name="moe_experts",
    reference=Provider(name=REFERENCE, supports=_by_reference, make=by_reference),
    providers=(Provider(name=ROSE, supports=_served, make=by_rose),),
    make_inputs=make_inputs,
    compare=compare,
    config_of=config_of,
    state=state,
)
