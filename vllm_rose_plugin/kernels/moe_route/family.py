"""Routing as a family of providers, with what the self-check compares."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_rose_plugin.kernels.jit.chosen import REFERENCE
from vllm_rose_plugin.kernels.jit.providers import Family, Provider
from vllm_rose_plugin.kernels.moe_route import launch, reference
from vllm_rose_plugin.kernels.mxfp8_quantize.family import ROSE, everywhere, on_gpu


@dataclass(frozen=True)
class RouteShape:
    """One call."""

    num_tokens: int
    top_k: int
    num_local_experts: int
    num_global_experts: int
    """More than are local: ids go through a map."""
    alignment: int
    id_dtype: str
    """"int32" or "int64"."""

    @property
    def has_map(self) -> bool:
        return self.num_global_experts != self.num_local_experts


Inputs = tuple[torch.Tensor, torch.Tensor | None]


def random_routing(shape: RouteShape, seed: int) -> Inputs:
    """(topk_ids, expert_map or None) on the current device. A few ids name no expert, and a token may name one twice;
    loads are uneven."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.rand(size, device=device, generator=generator)

    ids = (draw(shape.num_tokens, shape.top_k) ** 2 * shape.num_global_experts).to(torch.int64)
    ids = torch.where(draw(*ids.shape) < 0.03, -1, ids)
    ids = torch.where(draw(*ids.shape) < 0.03, 2**31 - 1, ids)
    expert_map = None
    if shape.has_map:
        expert_map = torch.full((shape.num_global_experts,), -1, dtype=torch.int32, device=device)
        here = draw(shape.num_global_experts).argsort()[: shape.num_local_experts]
        expert_map[here] = torch.arange(shape.num_local_experts, dtype=torch.int32, device=device)
    return ids.to(getattr(torch, shape.id_dtype)), expert_map


def by_reference(shape: RouteShape) -> Callable[..., launch.Routed]:
    """Plain torch."""

    def route(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> launch.Routed:
        return launch.Routed(
            *reference.route_tokens(
                topk_ids,
                num_local_experts=shape.num_local_experts,
                expert_map=expert_map,
                alignment=shape.alignment,
            )
        )

    return route


def by_rose(shape: RouteShape) -> Callable[..., launch.Routed]:
    """Our kernel; compiled, or loaded, before this returns."""
    launch.warm_up(
        max_tokens=shape.num_tokens,
        top_k=shape.top_k,
        num_local_experts=shape.num_local_experts,
        id_dtype=shape.id_dtype,
        has_map=shape.has_map,
        alignment=shape.alignment,
    )
    device = torch.device("cuda", torch.cuda.current_device())
    workspace = launch.route_workspace(num_local_experts=shape.num_local_experts, device=device)

    def route(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> launch.Routed:
        return launch.route_tokens(
            topk_ids,
            num_local_experts=shape.num_local_experts,
            workspace=workspace,
            expert_map=expert_map,
            alignment=shape.alignment,
        )

    return route


def compare(result: launch.Routed, expected: launch.Routed) -> str:
    """The same integers."""
    for name in ("expert_counts", "expert_offsets", "slots"):
        wrong = (getattr(result, name) != getattr(expected, name)).nonzero()
        if len(wrong):
            return f"{len(wrong)} of the {name} are others, the first is {wrong[0].tolist()}"
    return ""


FAMILY = Family(
    name="moe_route",
    reference=Provider(name=REFERENCE, supports=everywhere, make=by_reference),
    providers=(Provider(name=ROSE, supports=on_gpu, make=by_rose),),
    make_inputs=random_routing,
    compare=compare,
)
