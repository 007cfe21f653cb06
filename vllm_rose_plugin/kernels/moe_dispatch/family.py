"""Route and dispatch as a family of providers, with what the self-check compares.

A second family asks whether one launch is quicker than two where a call of few tokens would take one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding, ScaleLayout, TokenFormat
from vllm_rose_plugin.kernels.gemm.tokens import LAYOUT_OF, PackedTokens, pack_tokens
from vllm_rose_plugin.kernels.jit.chosen import REFERENCE
from vllm_rose_plugin.kernels.jit.providers import Family, Provider
from vllm_rose_plugin.kernels.moe_dispatch import launch, reference
from vllm_rose_plugin.kernels.moe_route import launch as route
from vllm_rose_plugin.kernels.moe_route.family import RouteShape, random_routing
from vllm_rose_plugin.kernels.moe_route.reference import route_tokens
from vllm_rose_plugin.kernels.mxfp8_quantize.family import ROSE, everywhere, on_gpu, random_rows
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import TILE_ROWS, untile_scales


@dataclass(frozen=True)
class DispatchShape:
    """One call."""

    routing: RouteShape
    hidden_size: int
    dtype: str
    """Of x: "bfloat16", "float16", "float32", or "mxfp8"."""
    token_format: TokenFormat
    activation: Activation
    rounding: Rounding
    weighted: bool


Inputs = tuple[torch.Tensor | Mxfp8Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
Result = tuple[route.Routed, PackedTokens]


def make_inputs(shape: DispatchShape, seed: int) -> Inputs:
    """(x, topk_ids, expert_map or None, topk_weights or None)"""
    topk_ids, expert_map = random_routing(shape.routing, seed)
    quantized = shape.dtype == "mxfp8"
    rows = random_rows(shape.routing.num_tokens, shape.hidden_size, "bfloat16" if quantized else shape.dtype, seed)
    x = Mxfp8Tensor(*quantize_mxfp8(rows)) if quantized else rows
    weights = None
    if shape.weighted:
        generator = torch.Generator(rows.device).manual_seed(seed + 1)
        weights = torch.rand(topk_ids.shape, device=rows.device, generator=generator) * 2
    return x, topk_ids, expert_map, weights


def by_reference(shape: DispatchShape) -> Callable[..., Result]:
    """Plain torch; scales are those of whole tiles only where runs are padded to them."""
    experts, alignment = shape.routing.num_local_experts, shape.routing.alignment

    def dispatch(x, topk_ids, expert_map, topk_weights) -> Result:
        routed = route_tokens(topk_ids, num_local_experts=experts, expert_map=expert_map, alignment=alignment)
        tokens = reference.dispatch_tokens(
            x,
            slots=routed.slots,
            num_local_experts=experts,
            alignment=alignment,
            activation=shape.activation,
            rounding=shape.rounding,
            topk_weights=topk_weights,
        )
        packed = pack_tokens(tokens, token_format=shape.token_format, activation=shape.activation)
        return route.Routed(*routed), packed

    return dispatch


def by_rose(shape: DispatchShape, *, two_launches: bool = False) -> Callable[..., Result]:
    """Our kernels, as many launches as a call takes, or two; compiled, or loaded, before this returns."""
    routing = shape.routing
    launch.warm_up(
        hidden_size=shape.hidden_size,
        top_k=routing.top_k,
        num_local_experts=routing.num_local_experts,
        max_tokens=routing.num_tokens,
        dtype=shape.dtype,
        id_dtype=routing.id_dtype,
        has_map=routing.has_map,
        token_formats=(shape.token_format,),
        alignment=routing.alignment,
        activation=shape.activation,
        rounding=shape.rounding,
        weighted=shape.weighted,
        two_launches=two_launches,
    )
    device = torch.device("cuda", torch.cuda.current_device())
    workspace = route.route_workspace(num_local_experts=routing.num_local_experts, device=device)

    def dispatch(x, topk_ids, expert_map, topk_weights) -> Result:
        return launch.route_and_dispatch(
            x,
            topk_ids,
            num_local_experts=routing.num_local_experts,
            workspace=workspace,
            token_format=shape.token_format,
            expert_map=expert_map,
            alignment=routing.alignment,
            activation=shape.activation,
            rounding=shape.rounding,
            topk_weights=topk_weights,
            two_launches=two_launches,
        )

    return dispatch


def compare(result: Result, expected: Result) -> str:
    """The same integers and, in the rows of tokens and of padding, the same bits; NaN is NaN."""
    (routed, tokens), (right, wanted) = result, expected
    for name in ("expert_counts", "expert_offsets", "slots"):
        if not torch.equal(getattr(routed, name), getattr(right, name)):
            return f"{name} are others"
    used = int(right.expert_offsets[-1])  # past the last run there may be anything
    rows = _bits(tokens.data)[:used] != _bits(wanted.data)[:used]
    if tokens.token_format is TokenFormat.BF16_PERMUTED:
        rows &= ~(tokens.data[:used].isnan() & wanted.data[:used].isnan())
    wrong = rows.any(-1).nonzero()
    if len(wrong):
        return f"{len(wrong)} of {used} rows are others, the first is row {wrong[0].item()}"
    if tokens.scales is None:
        return ""
    mine, theirs = _scales(tokens, routed, right)[:used], _scales(wanted, right, right)[:used]
    here = torch.zeros(used, dtype=torch.bool, device=mine.device)
    here[right.slots[right.slots >= 0].long()] = True
    wrong = ((mine != theirs).any(-1) & here).nonzero()
    if len(wrong):
        return f"{len(wrong)} of {used} rows have other scales, the first is row {wrong[0].item()}"
    return ""


def _scales(tokens: PackedTokens, routed: route.Routed, right: route.Routed) -> torch.Tensor:
    """The scales of each row, as integers ``[S, H/32]``."""
    assert tokens.scales is not None
    if LAYOUT_OF[tokens.token_format] is ScaleLayout.FP32_K_MAJOR:
        return tokens.scales[:, : tokens.num_rows].t().contiguous().view(torch.int32)
    blocks = tokens.k // 32
    num_rows = tokens.scales.numel() // (-(-blocks // 4) * 4)
    plain = untile_scales(tokens.scales, num_rows=num_rows, num_blocks=blocks)
    if routed.scale_rows is None:
        return plain
    assert num_rows % TILE_ROWS == 0
    here = right.slots >= 0
    rows = plain.new_zeros(tokens.num_rows, blocks)
    rows[right.slots[here].long()] = plain[routed.scale_rows[here].long()]
    return rows


def _bits(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.int16 if data.dtype == torch.bfloat16 else torch.uint8)


FAMILY = Family(
    name="moe_dispatch",
    reference=Provider(name=REFERENCE, supports=everywhere, make=by_reference),
    providers=(Provider(name=ROSE, supports=on_gpu, make=by_rose),),
    make_inputs=make_inputs,
    compare=compare,
)

TWO_LAUNCHES = "two_launches"

LAUNCHES = Family(
    name="moe_dispatch_launches",
    reference=Provider(name=TWO_LAUNCHES, supports=on_gpu, make=partial(by_rose, two_launches=True)),
    providers=(Provider(name=ROSE, supports=on_gpu, make=by_rose),),
    make_inputs=make_inputs,
    compare=compare,
)
"""Asked at start-up for the most tokens that one launch takes (``moe_experts.one_launch``)."""
