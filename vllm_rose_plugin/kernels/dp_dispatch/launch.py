"""Dispatch on an NVIDIA GPU: two launches, or one. Tensors are checked by whoever owns the exchange."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.dp_dispatch.config import (
    FusedConfig,
    ReceiveConfig,
    SendConfig,
    choose_fused,
    choose_receive,
    choose_send,
    receive_sizes,
    send_sizes,
    tunings_to_warm,
)
from vllm_rose_plugin.kernels.dp_exchange.interface import ReceivedTokens
from vllm_rose_plugin.kernels.dp_exchange.memory import Place
from vllm_rose_plugin.kernels.jit.compile import compile


def send(place: Place, x: torch.Tensor | Mxfp8Tensor, *, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
    """Send tokens and plans; see :meth:`Exchange.dispatch_send`. Waits for nobody."""
    input, sent = _sent(place, x, topk_ids, topk_weights)
    config, blocks = choose_send(
        num_tokens=len(sent[0]), shape=place.shape, input=input, sm_count=place.facts.sm_count, tuning=place.tuning
    )
    _send_kernel(config, place.facts.target)(
        *sent,
        blocks,
        place.rank,
        place.base,
        place.stride,
    )


def receive(place: Place, out: ReceivedTokens) -> None:
    """Wait for plans and tokens; see :meth:`Exchange.dispatch_receive`."""
    config, blocks = choose_receive(
        total_rows=len(out.row_sources), shape=place.shape, sm_count=place.facts.sm_count, tuning=place.tuning
    )
    _receive_kernel(config, place.facts.target)(
        *_received(out),
        blocks,
        place.rank,
        place.base,
        place.stride,
        place.nanoseconds,
        place.report,
    )


def send_and_receive(
    place: Place,
    x: torch.Tensor | Mxfp8Tensor,
    *,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    out: ReceivedTokens,
) -> None:
    """Both, in one launch where the step is small; see :meth:`Exchange.dispatch`."""
    input, sent = _sent(place, x, topk_ids, topk_weights)
    fused = choose_fused(
        num_tokens=len(sent[0]),
        total_rows=len(out.row_sources),
        shape=place.shape,
        input=input,
        sm_count=place.facts.sm_count,
        tuning=place.tuning,
    )
    if fused is None:
        send(place, x, topk_ids=topk_ids, topk_weights=topk_weights)
        receive(place, out)
        return
    config, blocks = fused
    _fused_kernel(config, place.facts.target)(
        *sent,
        *_received(out),
        blocks,
        place.rank,
        place.base,
        place.stride,
        place.nanoseconds,
        place.report,
    )


def _sent(place: Place, x: torch.Tensor | Mxfp8Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor):
    """(what x is, the tensors as the kernels take them); a token that goes nowhere where there is none."""
    if not len(topk_ids):
        x, topk_ids, topk_weights = place.nothing
    routing = topk_ids.view(-1), topk_weights.view(-1)
    if isinstance(x, Mxfp8Tensor):
        return "mxfp8", (x.codes.view(torch.uint8), x.scales.view(-1), *routing)
    return "bfloat16", (x, None, *routing)


def _received(out: ReceivedTokens) -> tuple[torch.Tensor | None, ...]:
    tokens = out.tokens
    routing = out.topk_ids.view(-1), out.topk_weights.view(-1), out.row_sources, out.num_rows
    if isinstance(tokens, Mxfp8Tensor):
        return tokens.codes.view(torch.uint8), tokens.scales.view(-1), *routing
    return tokens, None, *routing


def warm_up(place: Place, *, step_tokens: tuple[int, ...] | None, input: str) -> None:
    """Compile, or load, what steps of exactly so many tokens of a rank, or of one, can need; None: all steps."""
    shape, (target, sm_count) = place.shape, place.facts
    for kind in dict.fromkeys(("bfloat16", input)):
        fused = choose_fused(num_tokens=1, total_rows=shape.group_size, shape=shape, input=kind, sm_count=sm_count)
        if fused is not None:
            _fused_kernel(fused[0], target)
    given = [most * shape.group_size for most in step_tokens or ()]
    for tuning in tunings_to_warm(step_tokens is None):
        how: dict[str, Any] = {"shape": shape, "sm_count": sm_count, "tuning": tuning}
        _send_kernel(choose_send(num_tokens=1, input="bfloat16", **how)[0], target)  # of a rank without tokens
        for num_tokens in send_sizes(shape, sm_count) if step_tokens is None else (1, *step_tokens):
            _send_kernel(choose_send(num_tokens=num_tokens, input=input, **how)[0], target)
        for total_rows in receive_sizes(shape, sm_count) if step_tokens is None else given:
            _receive_kernel(choose_receive(total_rows=total_rows, **how)[0], target)


@functools.cache
def _send_kernel(config: SendConfig, target: str) -> Callable:
    from vllm_rose_plugin.kernels.dp_dispatch.kernel import build_send  # imports cutlass

    return compile(family="dp_dispatch", config=config, build=build_send, target=target)


@functools.cache
def _receive_kernel(config: ReceiveConfig, target: str) -> Callable:
    from vllm_rose_plugin.kernels.dp_dispatch.kernel import build_receive  # imports cutlass

    return compile(family="dp_dispatch", config=config, build=build_receive, target=target)


@functools.cache
def _fused_kernel(config: FusedConfig, target: str) -> Callable:
    from vllm_rose_plugin.kernels.dp_dispatch.fused import build_fused  # imports cutlass

    return compile(family="dp_dispatch", config=config, build=build_fused, target=target)
