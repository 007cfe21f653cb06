"""Combine on an NVIDIA GPU: two launches, or one. Tensors are checked by whoever owns the exchange."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from vllm_rose_plugin.kernels.dp_combine.config import (
    FusedConfig,
    ReceiveConfig,
    SendConfig,
    choose_fused,
    choose_receive,
    choose_send,
    receive_sizes,
    send_sizes,
)
from vllm_rose_plugin.kernels.dp_dispatch.config import tunings_to_warm
from vllm_rose_plugin.kernels.dp_exchange.interface import ReceivedTokens
from vllm_rose_plugin.kernels.dp_exchange.memory import Place
from vllm_rose_plugin.kernels.jit.compile import compile


def send(place: Place, rows: torch.Tensor, *, received: ReceivedTokens) -> None:
    """Send rows back; see :meth:`Exchange.combine_send`. Waits for nobody."""
    config, blocks = choose_send(
        total_rows=len(rows), shape=place.shape, sm_count=place.facts.sm_count, tuning=place.tuning
    )
    _send_kernel(config, place.facts.target)(
        rows, received.row_sources, received.num_rows, blocks, place.rank, place.base, place.stride
    )


def receive(place: Place, *, topk_ids: torch.Tensor, out: torch.Tensor) -> None:
    """Wait for rows and add them; see :meth:`Exchange.combine_receive`."""
    if not len(out):
        return
    config, blocks = choose_receive(
        num_tokens=len(out), shape=place.shape, sm_count=place.facts.sm_count, tuning=place.tuning
    )
    _receive_kernel(config, place.facts.target)(
        topk_ids.view(-1), out, blocks, place.rank, place.base, place.stride, place.nanoseconds, place.report
    )


def send_and_receive(
    place: Place, rows: torch.Tensor, *, received: ReceivedTokens, topk_ids: torch.Tensor, out: torch.Tensor
) -> None:
    """Both, in one launch where the step is small; see :meth:`Exchange.combine`."""
    fused = choose_fused(
        num_tokens=max(1, len(out)),
        total_rows=len(rows),
        shape=place.shape,
        sm_count=place.facts.sm_count,
        tuning=place.tuning,
    )
    if fused is None or not len(out):
        send(place, rows, received=received)
        receive(place, topk_ids=topk_ids, out=out)
        return
    config, blocks = fused
    _fused_kernel(config, place.facts.target)(
        rows,
        received.row_sources,
        received.num_rows,
        topk_ids.view(-1),
        out,
        blocks,
        place.rank,
        place.base,
        place.stride,
        place.nanoseconds,
        place.report,
    )


def warm_up(place: Place, *, step_tokens: tuple[int, ...] | None) -> None:
    """Compile, or load, what steps of exactly so many tokens of a rank, or of one, can need; None: all steps."""
    shape, (target, sm_count) = place.shape, place.facts
    fused = choose_fused(num_tokens=1, total_rows=shape.group_size, shape=shape, sm_count=sm_count)
    if fused is not None:
        _fused_kernel(fused[0], target)
    given = [most * shape.group_size for most in step_tokens or ()]
    for tuning in tunings_to_warm(step_tokens is None):
        how: dict[str, Any] = {"shape": shape, "sm_count": sm_count, "tuning": tuning}
        for total_rows in send_sizes(shape, sm_count) if step_tokens is None else given:
            _send_kernel(choose_send(total_rows=total_rows, **how)[0], target)
        for num_tokens in receive_sizes(shape, sm_count) if step_tokens is None else (1, *step_tokens):
            _receive_kernel(choose_receive(num_tokens=num_tokens, **how)[0], target)


@functools.cache
def _send_kernel(config: SendConfig, target: str) -> Callable:
    from vllm_rose_plugin.kernels.dp_combine.kernel import build_send  # imports cutlass

    return compile(family="dp_combine", config=config, build=build_send, target=target)


@functools.cache
def _receive_kernel(config: ReceiveConfig, target: str) -> Callable:
    from vllm_rose_plugin.kernels.dp_combine.kernel import build_receive  # imports cutlass

    return compile(family="dp_combine", config=config, build=build_receive, target=target)


@functools.cache
def _fused_kernel(config: FusedConfig, target: str) -> Callable:
    from vllm_rose_plugin.kernels.dp_combine.fused import build_fused  # imports cutlass

    return compile(family="dp_combine", config=config, build=build_fused, target=target)
