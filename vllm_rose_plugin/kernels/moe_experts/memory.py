"""What a call keeps in its workspace, and where.

One block of memory holds everything, chunk after chunk: the routing, the input's tokens, SwiGLU's result, and the
experts' results in the place of the input's tokens.
"""

from typing import Any, NamedTuple

import torch

from vllm_rose_plugin.kernels.contracts import TokenFormat
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens
from vllm_rose_plugin.kernels.moe_dispatch import launch as dispatch
from vllm_rose_plugin.kernels.moe_dispatch.config import needs_scale_rows
from vllm_rose_plugin.kernels.moe_experts.config import LayerShape, Step, chunk_tokens
from vllm_rose_plugin.kernels.moe_route import launch as route

ALIGNMENT = 128
"""Bytes, of everything that lies in the workspace."""


class _Parts(NamedTuple):
    """Where things begin in the workspace, in bytes."""

    tokens: int
    """Of the input, and once w13 has read them, the experts' results."""
    intermediate: int
    end: int


def workspace_bytes(
    *,
    num_tokens: int,
    top_k: int,
    num_local_experts: int,
    hidden_size: int,
    intermediate_size: int,
    token_formats: tuple[TokenFormat, ...],
) -> int:
    """Bytes that a call of num_tokens or fewer needs; more tokens never need less.

    Args:
        num_tokens: T.
        top_k, num_local_experts, hidden_size, intermediate_size: of the layer.
        token_formats: of ``config.token_formats_of``.
    """
    tokens = min(num_tokens, chunk_tokens(top_k))
    if not tokens:
        return 0
    ends = (
        _parts(tokens, top_k, num_local_experts, hidden_size, intermediate_size, token_format).end
        for token_format in token_formats
    )
    return max(ends)


def _parts(
    num_tokens: int,
    top_k: int,
    num_local_experts: int,
    hidden_size: int,
    intermediate_size: int,
    token_format: TokenFormat,
) -> _Parts:
    num_rows = num_tokens * top_k
    rows: dict[str, Any] = {"num_rows": num_rows, "num_local_experts": num_local_experts, "token_format": token_format}
    routed = 4 * route.routed_size(num_tokens=num_tokens, top_k=top_k, num_local_experts=num_local_experts)
    tokens = max(dispatch.tokens_bytes(hidden_size=hidden_size, **rows), num_rows * hidden_size * 2)
    at_tokens = _aligned(routed)
    at_intermediate = at_tokens + _aligned(tokens)
    end = at_intermediate + _aligned(dispatch.tokens_bytes(hidden_size=intermediate_size, **rows))
    return _Parts(at_tokens, at_intermediate, end)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Memory(NamedTuple):
    """Views of the workspace. `y` lies where `tokens` did: w2 writes nothing before w13 has ended."""

    routed: route.Routed
    tokens: PackedTokens  # S rows of H
    intermediate: PackedTokens  # S rows of I
    y: torch.Tensor  # (S, H)


def views(shape: LayerShape, step: Step, num_tokens: int, workspace: torch.Tensor, dtype: torch.dtype) -> Memory:
    """The places of a chunk's tensors.

    Args:
        workspace: uint8, of at least :func:`workspace_bytes`.
        dtype: of the experts' results.
    """
    experts, token_format = shape.num_local_experts, step.token_format
    parts = _parts(num_tokens, shape.top_k, experts, shape.hidden_size, shape.intermediate_size, token_format)
    routed = route.routed_views(
        workspace[: parts.tokens].view(torch.int32),
        num_tokens=num_tokens,
        top_k=shape.top_k,
        num_local_experts=experts,
        with_scale_rows=needs_scale_rows(token_format=token_format, alignment=1),
    )
    at_tokens = workspace[parts.tokens : parts.intermediate]
    rows: dict[str, Any] = {"num_rows": step.num_rows, "num_local_experts": experts, "token_format": token_format}
    tokens = dispatch.tokens_views(at_tokens, hidden_size=shape.hidden_size, **rows)
    intermediate = dispatch.tokens_views(
        workspace[parts.intermediate : parts.end], hidden_size=shape.intermediate_size, **rows
    )
    y = at_tokens[: step.num_rows * shape.hidden_size * 2].view(dtype).view(step.num_rows, shape.hidden_size)
    return Memory(routed, tokens, intermediate, y)
