"""Token routing in plain torch: which row of its expert's run each (token, k) gets."""

from typing import NamedTuple

import torch


class Routing(NamedTuple):
    """Where the tokens of the local experts go; see :class:`~vllm_rose_plugin.kernels.contracts.RoutedTokens`."""

    expert_counts: torch.Tensor  # [E_local] int32
    expert_offsets: torch.Tensor  # [E_local + 1] int32
    slots: torch.Tensor  # [T, top_k] int32


def route_tokens(
    topk_ids: torch.Tensor,
    *,
    num_local_experts: int,
    expert_map: torch.Tensor | None = None,
    alignment: int = 1,
) -> Routing:
    """Lay out one run of rows per local expert.

    Runs follow each other in expert order, each padded to a multiple of `alignment` rows; an expert without tokens
    has no rows. Within a run the order is that of the tokens, then of k, so the result is deterministic. An expert
    that a token names twice gets it twice.

    Args:
        topk_ids: ``[T, top_k]`` int32 or int64, global expert ids. An id that names no expert (-1, vLLM's padding
            sentinel, or any other out of range) gets no row.
        num_local_experts: E_local.
        expert_map: ``[E_global]`` int32, local index of each global expert, -1 where it lives on another rank. Without
            it global and local ids are the same.
        alignment: rows, >= 1; the GEMM's tile.

    Raises:
        ValueError: alignment < 1, or topk_ids is not two-dimensional.
    """
    if alignment < 1:
        raise ValueError(f"alignment must be at least 1 row, got {alignment}")
    if topk_ids.dim() != 2:
        raise ValueError(f"topk_ids must be [T, top_k], got shape {tuple(topk_ids.shape)}")
    ids = topk_ids.flatten().to(torch.int64)  # (P) with P = T * top_k
    if expert_map is not None and expert_map.numel() > 0:
        known = (ids >= 0) & (ids < expert_map.numel())
        ids = torch.where(known, expert_map.to(torch.int64)[torch.where(known, ids, 0)], -1)
    elif expert_map is not None:
        ids = torch.full_like(ids, -1)
    here = (ids >= 0) & (ids < num_local_experts)
    experts = torch.where(here, ids, num_local_experts)  # everything else sorts to the end

    experts, order = experts.sort(stable=True)
    bounds = torch.searchsorted(experts, torch.arange(num_local_experts + 1, device=ids.device))  # (E_local + 1)
    counts = bounds.diff()
    offsets = torch.zeros_like(bounds)
    offsets[1:] = ((counts + alignment - 1) // alignment * alignment).cumsum(0)

    rank = torch.arange(ids.numel(), device=ids.device) - bounds[experts]
    sorted_slots = torch.where(experts < num_local_experts, offsets[experts] + rank, -1)
    slots = torch.empty_like(sorted_slots).scatter_(0, order, sorted_slots)
    return Routing(counts.to(torch.int32), offsets.to(torch.int32), slots.view(topk_ids.shape).to(torch.int32))
