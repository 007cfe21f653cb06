"""Combine on an NVIDIA GPU: its two launches. Tensors are checked by whoever owns the exchange."""

import functools
from collections.abc import Callable

import torch

from vllm_rose_plugin.kernels.dp_combine.config import ReceiveConfig, SendConfig, choose_receive, choose_send
from vllm_rose_plugin.kernels.dp_exchange.interface import ReceivedTokens
from vllm_rose_plugin.kernels.dp_exchange.memory import Place
from vllm_rose_plugin.kernels.jit.compile import compile


def send(place: Place, rows: torch.Tensor, *, received: ReceivedTokens) -> None:
    """Send rows back; see :meth:`Exchange.combine_send`. Waits for nobody."""
    config, blocks = choose_send(total_rows=len(rows), shape=place.shape, sm_count=place.facts.sm_count)
    _send_kernel(config, place.facts.target)(
        rows, received.row_sources, received.num_rows, blocks, place.rank, place.base, place.stride
    )


def receive(place: Place, *, topk_ids: torch.Tensor, out: torch.Tensor) -> None:
    """Wait for rows and add them; see :meth:`Exchange.combine_receive`."""
    if not len(out):
        return
    config, blocks = choose_receive(num_tokens=len(out), shape=place.shape, sm_count=place.facts.sm_count)
    _receive_kernel(config, place.facts.target)(
        topk_ids.view(-1), out, blocks, place.rank, place.base, place.stride, place.nanoseconds, place.report
    )


def warm_up(place: Place, *, step_tokens: tuple[int, ...]) -> None:
    """Compile, or load, what steps of up to so many tokens of a rank can need."""
    target = place.facts.target
    for most in step_tokens:
        total = most * place.shape.group_size
        _send_kernel(choose_send(total_rows=total, shape=place.shape, sm_count=place.facts.sm_count)[0], target)
        for num_tokens in (1, most):
            config, _ = choose_receive(num_tokens=num_tokens, shape=place.shape, sm_count=place.facts.sm_count)
            _receive_kernel(config, target)


@functools.cache
def _send_kernel(config: SendConfig, target: str) -> Callable:
    from vllm_rose_plugin.kernels.dp_combine.kernel import build_send  # imports cutlass

    return compile(family="dp_combine", config=config, build=build_send, target=target)


@functools.cache
def _receive_kernel(config: ReceiveConfig, target: str) -> Callable:
    from vllm_rose_plugin.kernels.dp_combine.kernel import build_receive  # imports cutlass

    return compile(family="dp_combine", config=config, build=build_receive, target=target)
