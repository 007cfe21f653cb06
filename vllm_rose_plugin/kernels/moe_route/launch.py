"""Routing on an NVIDIA GPU, as a launch of its own."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_rose_plugin.kernels.jit.compile import compile
from vllm_rose_plugin.kernels.moe_route.config import RouteConfig, choose_config, warm_configs, workspace_words
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DeviceFacts, device_facts

_BUFFER_WORDS = 4
"""Results begin at multiples of so many int32: slots are read 16 bytes at a time."""


@dataclass(frozen=True)
class Routed:
    """Where the tokens of the local experts go."""

    expert_counts: torch.Tensor  # [E] int32
    expert_offsets: torch.Tensor  # [E + 1] int32
    slots: torch.Tensor  # [T, top_k] int32, -1 where the expert is not here
    scale_rows: torch.Tensor | None = None  # [T, top_k] int32: rows of tiled scales, where these are not the slots


def route_tokens(
    topk_ids: torch.Tensor,
    *,
    num_local_experts: int,
    workspace: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    alignment: int = 1,
    with_scale_rows: bool = False,
    out: Routed | None = None,
) -> Routed:
    """The integers of ``reference.route_tokens``, in one cooperative launch.

    Args:
        topk_ids: ``[T, top_k]`` int32 or int64, contiguous, on a CUDA device. An id that names no expert gets no row,
            and reads no memory.
        num_local_experts: E, 1 to 512.
        workspace: of :func:`route_workspace`; a second launch must not use it before this one has ended.
        expert_map: int32 ``[E_global]``, contiguous, not empty; its content may change from launch to launch.
        alignment: rows to which runs are padded.
        with_scale_rows: also say which row of the tiled scales each pair gets; see :class:`Routed`.
        out: where to write; see :func:`routed_views`.

    Raises:
        TypeError, ValueError: what doesn't fit; the message names it.
        RuntimeError: the device has no compile target, or nvidia-cutlass-dsl is missing.
    """
    check_ids(topk_ids, expert_map, workspace)
    out = routed_like(topk_ids, num_local_experts=num_local_experts, with_scale_rows=with_scale_rows, out=out)
    if not topk_ids.numel():
        nothing_routed(out)
        return out
    with torch.cuda.device(topk_ids.device):
        kernel = _kernel_for(
            device_facts(topk_ids.device.index),
            topk_ids.numel(),
            num_local_experts,
            alignment,
            dtype_name(topk_ids),
            expert_map is not None,
            with_scale_rows,
        )
        check_workspace(workspace, num_local_experts=num_local_experts)
        scale_rows = None if out.scale_rows is None else out.scale_rows.view(-1)
        kernel(
            topk_ids.view(-1),
            expert_map,
            workspace,
            out.expert_counts,
            out.expert_offsets,
            out.slots.view(-1),
            scale_rows,
        )
    return out


def nothing_routed(out: Routed) -> None:
    """What routing no tokens gives."""
    out.expert_counts.zero_()
    out.expert_offsets.zero_()


def route_workspace(*, num_local_experts: int, device: torch.device) -> torch.Tensor:
    """Memory that launches of up to num_local_experts experts share, one after another; the host never resets it.

    Make it before a graph is captured, and one for each stream that routes at the same time.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    words = workspace_words(num_experts=num_local_experts, sm_count=device_facts(index).sm_count)
    return torch.zeros(words, dtype=torch.int32, device=device)


def routed_size(*, num_tokens: int, top_k: int, num_local_experts: int) -> int:
    """int32 elements that :func:`routed_views` needs."""
    return sum(map(_padded, (num_local_experts, num_local_experts + 1, num_tokens * top_k, num_tokens * top_k)))


def routed_views(
    buffer: torch.Tensor, *, num_tokens: int, top_k: int, num_local_experts: int, with_scale_rows: bool
) -> Routed:
    """A place for results inside of memory that somebody else owns.

    Args:
        buffer: flat int32, starting at a multiple of 16 bytes, of at least :func:`routed_size` elements.

    Raises:
        ValueError: a buffer that is none of these.
    """
    needed = routed_size(num_tokens=num_tokens, top_k=top_k, num_local_experts=num_local_experts)
    if buffer.dtype != torch.int32 or buffer.dim() != 1 or buffer.numel() < needed or buffer.data_ptr() % 16:
        raise ValueError(
            f"routing {num_tokens} tokens needs flat int32 memory of {needed} elements that starts at a multiple of 16 "
            f"bytes, got {buffer.dtype} {tuple(buffer.shape)} at {buffer.data_ptr():#x}"
        )
    parts, start = [], 0
    for size in (num_local_experts, num_local_experts + 1, num_tokens * top_k, num_tokens * top_k):
        parts.append(buffer[start : start + size])
        start += _padded(size)
    counts, offsets, slots, scale_rows = parts
    shape = (num_tokens, top_k)
    return Routed(counts, offsets, slots.view(shape), scale_rows.view(shape) if with_scale_rows else None)


def routed_like(topk_ids: torch.Tensor, *, num_local_experts: int, with_scale_rows: bool, out: Routed | None) -> Routed:
    """Memory for a result: `out` once it is checked, or new."""
    num_tokens, top_k = topk_ids.shape
    if out is None:
        size = routed_size(num_tokens=num_tokens, top_k=top_k, num_local_experts=num_local_experts)
        buffer = torch.empty(size, dtype=torch.int32, device=topk_ids.device)
        return routed_views(
            buffer,
            num_tokens=num_tokens,
            top_k=top_k,
            num_local_experts=num_local_experts,
            with_scale_rows=with_scale_rows,
        )
    check_routed(out, num_tokens=num_tokens, top_k=top_k, num_local_experts=num_local_experts, device=topk_ids.device)
    if with_scale_rows and out.scale_rows is None:
        raise ValueError("out has no scale_rows, but rows of tiled scales are asked for")
    return out if with_scale_rows else Routed(out.expert_counts, out.expert_offsets, out.slots)


def check_routed(routed: Routed, *, num_tokens: int, top_k: int, num_local_experts: int, device: torch.device) -> None:
    """That these are tensors a kernel can write or read."""
    for name, tensor, shape, alignment in (
        ("expert_counts", routed.expert_counts, (num_local_experts,), 4),
        ("expert_offsets", routed.expert_offsets, (num_local_experts + 1,), 4),
        ("slots", routed.slots, (num_tokens, top_k), 16),
        ("scale_rows", routed.scale_rows, (num_tokens, top_k), 16),
    ):
        if tensor is None:
            continue
        if tensor.dtype != torch.int32 or tensor.shape != shape or tensor.device != device:
            raise ValueError(
                f"{name} must be int32 {shape} on {device}, got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            )
        if not tensor.is_contiguous() or (tensor.data_ptr() % alignment and tensor.numel()):
            raise ValueError(
                f"{name} must be contiguous and start at a multiple of {alignment} bytes, "
                f"got strides {tensor.stride()} at {tensor.data_ptr():#x}"
            )


def check_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, workspace: torch.Tensor) -> None:
    """Refuse what no kernel routes."""
    if topk_ids.dim() != 2:
        raise ValueError(f"topk_ids must be [T, top_k], got shape {tuple(topk_ids.shape)}")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids must be int32 or int64, got {topk_ids.dtype}")
    if not topk_ids.is_cuda:
        raise ValueError(f"topk_ids are on {topk_ids.device}: the kernel runs on CUDA devices, the reference elsewhere")
    if not topk_ids.is_contiguous():
        raise ValueError(f"topk_ids must be contiguous, got strides {topk_ids.stride()}")
    if workspace.device != topk_ids.device:
        raise ValueError(f"the workspace is on {workspace.device}, topk_ids on {topk_ids.device}")
    if expert_map is None:
        return
    if expert_map.dtype != torch.int32 or expert_map.dim() != 1 or not expert_map.is_contiguous():
        raise ValueError(
            f"expert_map must be contiguous int32 [E_global], got {expert_map.dtype} {tuple(expert_map.shape)}"
        )
    if not expert_map.numel() or expert_map.device != topk_ids.device:
        raise ValueError(
            f"expert_map must name at least one expert on {topk_ids.device}, "
            f"got {expert_map.numel()} on {expert_map.device}"
        )


def check_workspace(workspace: torch.Tensor, *, num_local_experts: int) -> None:
    """That a workspace is large enough for a launch on its device."""
    needed = workspace_words(num_experts=num_local_experts, sm_count=device_facts(workspace.device.index).sm_count)
    if workspace.dtype != torch.int32 or workspace.dim() != 1 or workspace.numel() < needed:
        raise ValueError(
            f"{num_local_experts} experts need a workspace of {needed} int32, got {workspace.dtype} "
            f"{tuple(workspace.shape)}: make it with route_workspace(num_local_experts={num_local_experts}, …)"
        )


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def warm_up(
    *,
    max_tokens: int,
    top_k: int,
    num_local_experts: int,
    id_dtype: str,
    has_map: bool,
    alignment: int = 1,
    with_scale_rows: bool = False,
) -> None:
    """Compile, or load, all kernels that calls of 1 to max_tokens tokens can need on the current device."""
    facts = device_facts(torch.cuda.current_device())
    for config in warm_configs(
        max_pairs=max(1, max_tokens * top_k),
        sm_count=facts.sm_count,
        num_experts=num_local_experts,
        alignment=alignment,
        id_dtype=id_dtype,
        has_map=has_map,
        scale_rows=with_scale_rows,
    ):
        compile_config(config, target=facts.target)


@functools.cache
def compile_config(config: RouteConfig, *, target: str) -> Callable[..., Any]:
    """The compiled kernel of a config."""
    from vllm_rose_plugin.kernels.moe_route.kernel import build  # imports cutlass

    return compile(family="moe_route", config=config, build=build, target=target)


@functools.lru_cache(maxsize=8192)
def _kernel_for(
    facts: DeviceFacts,
    num_pairs: int,
    num_experts: int,
    alignment: int,
    id_dtype: str,
    has_map: bool,
    scale_rows: bool,
) -> Callable[..., Any]:
    config = choose_config(
        num_pairs=num_pairs,
        num_experts=num_experts,
        alignment=alignment,
        id_dtype=id_dtype,
        has_map=has_map,
        scale_rows=scale_rows,
        sm_count=facts.sm_count,
    )
    return compile_config(config, target=facts.target)


def _padded(size: int) -> int:
    return -(-size // _BUFFER_WORDS) * _BUFFER_WORDS
