"""What every exchange refuses, with messages that name the value and what is legal."""

import torch

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Mxfp8Tensor, ScaleLayout
from vllm_rose_plugin.kernels.dp_exchange.interface import ReceivedTokens
from vllm_rose_plugin.kernels.dp_exchange.layout import ExchangeShape, Payload

ALIGNMENT = 16
"""Bytes of which tokens and rows start at a multiple; other tensors at multiples of their elements."""


def check_x(x: torch.Tensor | Mxfp8Tensor, shape: ExchangeShape, device: torch.device) -> None:
    """Tokens to send: bf16, or codes where codes travel."""
    if isinstance(x, Mxfp8Tensor):
        if shape.payload is not Payload.MXFP8 or x.layout is not ScaleLayout.ROW_MAJOR:
            raise ValueError(f"codes with scales {x.layout} for an exchange of {shape.payload.value}")
        size = (len(x.codes), shape.hidden_size)
        _check("codes of x", x.codes, torch.float8_e4m3fn, size, device)
        _check("scales of x", x.scales, torch.uint8, (size[0], shape.hidden_size // MXFP8_BLOCK), device)
    else:
        _check("x", x, torch.bfloat16, (len(x), shape.hidden_size), device)


def check_routing(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    num_tokens: int,
    shape: ExchangeShape,
    device: torch.device,
) -> None:
    """The router's answer; None where weights aren't needed."""
    _check("topk_ids", topk_ids, torch.int32, (num_tokens, shape.top_k), device)
    if topk_weights is not None:
        _check("topk_weights", topk_weights, torch.float32, (num_tokens, shape.top_k), device)


def check_rows(what: str, rows: torch.Tensor, size: tuple[int, int], device: torch.device) -> None:
    """bf16 rows of the experts, or of the result."""
    _check(what, rows, torch.bfloat16, size, device)


def check_received(received: ReceivedTokens, shape: ExchangeShape, device: torch.device) -> None:
    """Results of dispatch, for a number of rows that all ranks have together."""
    total = len(received.topk_ids)
    if total % shape.group_size or not shape.group_size <= total <= shape.max_rows:
        raise ValueError(
            f"{total} rows; it must be a multiple of the {shape.group_size} ranks up to {shape.max_rows}: new_received "
            "makes them"
        )
    if isinstance(received.tokens, Mxfp8Tensor) != (shape.payload is Payload.MXFP8):
        raise TypeError(f"tokens are {type(received.tokens).__name__} in an exchange of {shape.payload.value}")
    if isinstance(received.tokens, Mxfp8Tensor):
        _check("codes", received.tokens.codes, torch.float8_e4m3fn, (total, shape.hidden_size), device)
        _check("scales", received.tokens.scales, torch.uint8, (total, shape.hidden_size // MXFP8_BLOCK), device)
    else:
        _check("tokens", received.tokens, torch.bfloat16, (total, shape.hidden_size), device)
    _check("topk_ids", received.topk_ids, torch.int32, (total, shape.top_k), device)
    _check("topk_weights", received.topk_weights, torch.float32, (total, shape.top_k), device)
    _check("row_sources", received.row_sources, torch.int32, (total,), device)
    _check("num_rows", received.num_rows, torch.int32, (1,), device)


def _check(what: str, tensor: torch.Tensor, dtype: torch.dtype, size: tuple[int, ...], device: torch.device) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{what} must be {dtype}, got {tensor.dtype}")
    if tuple(tensor.shape) != size or tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"{what} must be contiguous {list(size)} on {device}, got {list(tensor.shape)} with strides "
            f"{list(tensor.stride())} on {tensor.device}"
        )
    wide = dtype in (torch.bfloat16, torch.float8_e4m3fn)
    if wide and tensor.data_ptr() % ALIGNMENT and tensor.numel():
        raise ValueError(f"{what} must start at a multiple of {ALIGNMENT} bytes, got {tensor.data_ptr():#x}")
