"""bf16 tokens for sm_90's W8A16 GEMM of a linear layer as they lie in memory: no launch brings them into an order.

See ``tokens.py`` for the order that this saves, and ``sm90_mainloop.W8A16Rows`` for what does without it.
"""

import torch

from vllm_rose_plugin.kernels.contracts import TokenFormat
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import with_plain_stride

NAME = "rose_rows"
"""Of the provider that does so."""
ALIGNMENT = 16
"""TMA reads rows that start at multiples of so many bytes."""
_MOST_PITCH = 2**24
"""Elements. Nobody's rows lie further apart, and a launch counts their distance in 32 bits."""


def as_rows(x: torch.Tensor) -> PackedTokens:
    """x as ``TokenFormat.BF16_ROWS``: itself where the kernel can read it, else a copy of it, one launch of torch.

    Args:
        x: bf16, fp16 or fp32 ``[S, K]``. bf16 rows that start at multiples of 16 bytes and don't overlap aren't copied.
    """
    if x.dtype == torch.bfloat16 and x.stride(1) == 1:
        plain = with_plain_stride(x)
        if readable(plain):
            return PackedTokens(TokenFormat.BF16_ROWS, plain, None, x.shape[1])
    copied = x.to(torch.bfloat16, copy=True, memory_format=torch.contiguous_format)
    return PackedTokens(TokenFormat.BF16_ROWS, copied, None, x.shape[1])


def readable(x: torch.Tensor) -> bool:
    """Whether the kernel can read bf16 ``[S, K]`` with contiguous rows where they lie."""
    pitch = x.stride(0)
    aligned = (x.data_ptr() | pitch * x.element_size()) % ALIGNMENT == 0
    return aligned and x.shape[1] <= pitch < _MOST_PITCH
