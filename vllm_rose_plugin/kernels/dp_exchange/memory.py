"""What a launch of an exchange is told about its memory, and the tensors that it fills."""

from dataclasses import dataclass

import torch

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Mxfp8Tensor
from vllm_rose_plugin.kernels.dp_exchange.interface import ReceivedTokens
from vllm_rose_plugin.kernels.dp_exchange.layout import ExchangeShape, Payload
from vllm_rose_plugin.kernels.dp_exchange.table import Tuning
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DeviceFacts


@dataclass(frozen=True)
class Place:
    """One rank's view of the memory of all ranks."""

    shape: ExchangeShape
    rank: int
    base: int
    """Address of rank 0's part."""
    stride: int
    """Bytes between the parts."""
    nanoseconds: int
    """Of all waits of a launch."""
    report: int
    """Address of the word on the host."""
    device: torch.device
    facts: DeviceFacts
    nothing: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Of :func:`no_tokens`, what a rank without any sends."""
    tuning: Tuning | None = None
    """Of the step under way."""


def no_tokens(shape: ExchangeShape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, topk_ids, topk_weights) of one token that goes nowhere: no kernel is given memory that doesn't exist."""
    return (
        torch.zeros(1, shape.hidden_size, dtype=torch.bfloat16, device=device),
        torch.full((1, shape.top_k), -1, dtype=torch.int32, device=device),
        torch.zeros(1, shape.top_k, dtype=torch.float32, device=device),
    )


def new_received(shape: ExchangeShape, step_tokens: int, device: torch.device) -> ReceivedTokens:
    """Tensors for what comes in one step, not cleared."""
    total = shape.group_size * step_tokens
    hidden_size = shape.hidden_size
    tokens: torch.Tensor | Mxfp8Tensor
    if shape.payload is Payload.BF16:
        tokens = torch.empty(total, hidden_size, dtype=torch.bfloat16, device=device)
    else:
        tokens = Mxfp8Tensor(
            torch.empty(total, hidden_size, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(total, hidden_size // MXFP8_BLOCK, dtype=torch.uint8, device=device),
        )
    return ReceivedTokens(
        tokens=tokens,
        topk_ids=torch.empty(total, shape.top_k, dtype=torch.int32, device=device),
        topk_weights=torch.empty(total, shape.top_k, dtype=torch.float32, device=device),
        row_sources=torch.empty(total, dtype=torch.int32, device=device),
        num_rows=torch.empty(1, dtype=torch.int32, device=device),
    )
