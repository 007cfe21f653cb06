"""Dispatch on an NVIDIA GPU: its two launches. Tensors are checked by whoever owns the exchange."""

import functools
from collections.abc import Callable

import torch

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.dp_dispatch.config import (
    ReceiveConfig,
    SendConfig,
    choose_receive,
    choose_send,
    receive_sizes,
    send_sizes,
)
from vllm_rose_plugin.kernels.dp_exchange.interface import ReceivedTokens
from vllm_rose_plugin.kernels.dp_exchange.memory import Place
from vllm_rose_plugin.kernels.jit.compile import compile


def send(place: Place, x: torch.Tensor | Mxfp8Tensor, *, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
    """Send tokens and plans; see :meth:`Exchange.dispatch_send`. Waits for nobody."""
    if not len(topk_ids):
        x, topk_ids, topk_weights = place.nothing
    codes = isinstance(x, Mxfp8Tensor)
    elements = x.codes.view(torch.uint8) if isinstance(x, Mxfp8Tensor) else x
    config, blocks = choose_send(
        num_tokens=len(elements),
        shape=place.shape,
        input="mxfp8" if codes else "bfloat16",
        sm_count=place.facts.sm_count,
    )
    _send_kernel(config, place.facts.target)(
        elements,
        x.scales.view(-1) if isinstance(x, Mxfp8Tensor) else None,
        topk_ids.view(-1),
        topk_weights.view(-1),
        blocks,
        place.rank,
        place.base,
        place.stride,
    )


def receive(place: Place, out: ReceivedTokens) -> None:
    """Wait for plans and tokens; see :meth:`Exchange.dispatch_receive`."""
    config, blocks = choose_receive(total_rows=len(out.row_sources), shape=place.shape, sm_count=place.facts.sm_count)
    tokens = out.tokens
    _receive_kernel(config, place.facts.target)(
        tokens.codes.view(torch.uint8) if isinstance(tokens, Mxfp8Tensor) else tokens,
        tokens.scales.view(-1) if isinstance(tokens, Mxfp8Tensor) else None,
        out.topk_ids.view(-1),
        out.topk_weights.view(-1),
        out.row_sources,
        out.num_rows,
        blocks,
        place.rank,
        place.base,
        place.stride,
        place.nanoseconds,
        place.report,
    )


def warm_up(place: Place, *, step_tokens: tuple[int, ...] | None, input: str) -> None:
    """Compile, or load, what steps of exactly so many tokens of a rank, or of one, can need; None: all steps."""
    shape, (target, sm_count) = place.shape, place.facts
    nothing, _ = choose_send(num_tokens=1, shape=shape, input="bfloat16", sm_count=sm_count)
    _send_kernel(nothing, target)
    for num_tokens in send_sizes(shape, sm_count) if step_tokens is None else (1, *step_tokens):
        sending, _ = choose_send(num_tokens=num_tokens, shape=shape, input=input, sm_count=sm_count)
        _send_kernel(sending, target)
    given = [most * shape.group_size for most in step_tokens or ()]
    for total_rows in receive_sizes(shape, sm_count) if step_tokens is None else given:
        receiving, _ = choose_receive(total_rows=total_rows, shape=shape, sm_count=sm_count)
        _receive_kernel(receiving, target)


@functools.cache
def _send_kernel(config: SendConfig, target: str) -> Callable:
    from vllm_rose_plugin.kernels.dp_dispatch.kernel import build_send  # imports cutlass

    return compile(family="dp_dispatch", config=config, build=build_send, target=target)


@functools.cache
def _receive_kernel(config: ReceiveConfig, target: str) -> Callable:
    from vllm_rose_plugin.kernels.dp_dispatch.kernel import build_receive  # imports cutlass

    return compile(family="dp_dispatch", config=config, build=build_receive, target=target)
