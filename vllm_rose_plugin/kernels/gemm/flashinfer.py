"""FlashInfer's dense MXFP8 GEMM as a provider beside ours, from sm_100 on.

It reads what our kernel reads there: the checkpoint's codes, and scales of tokens and weight as ``TCGEN05_128X4``. So a
layer holds the same tensors whoever serves it. Its CUTLASS backend is used, one module for all sizes; the CuTeDSL one
compiles more kernels as token counts come, which could fall into a request.
"""

import importlib.util
from functools import cache
from importlib import metadata

import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm.checks import check_k, check_on_gpu, check_packed, checked_out_dtype
from vllm_rose_plugin.kernels.gemm.launch import from_quantized, quantize_tokens
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight, is_sm90

NAME = "flashinfer"
LEAST = 128
"""N and K below this are refused by FlashInfer."""


@cache
def installed_version() -> str:
    """Of flashinfer-python; empty where it is not installed."""
    try:
        return metadata.version("flashinfer-python") if importlib.util.find_spec("flashinfer") else ""
    except metadata.PackageNotFoundError:
        return ""


def serves(*, target: str | None, n: int, k: int, activation: Activation, batch_invariant: bool) -> bool:
    """Whether a layer can be given to it: W8A8 from sm_100 on; it promises no batch invariance."""
    return bool(
        target is not None
        and not is_sm90(target)
        and activation is Activation.MXFP8
        and not batch_invariant
        and min(n, k) >= LEAST
        and installed_version()
    )


def linear(
    x: torch.Tensor | Mxfp8Tensor,
    weight: PackedWeight,
    *,
    bias: torch.Tensor | None = None,
    rounding: Rounding | str = Rounding.RCEIL,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``x @ weight.T + bias``: tokens quantized by our kernel, one FlashInfer GEMM, the bias added to its result.

    Args:
        x: bf16, fp16 or fp32 ``[M, K]``, or MXFP8.
        weight: of one group, packed for a target from sm_100 on; N and K at least 128.
        bias: floating point ``[N]``; added in fp32, after the product was rounded.
        rounding: how a plain x is quantized.
        out_dtype: bf16 or fp16; x's own by default.

    Returns:
        ``[M, N]``.

    Raises:
        TypeError, ValueError: what doesn't fit.
    """
    from flashinfer import mm_mxfp8

    if weight.num_groups != 1 or is_sm90(weight.target):
        raise ValueError(f"needs one group packed from sm_100 on, got {weight.num_groups} for {weight.target}")
    check_on_gpu("the weight", weight.codes)
    if isinstance(x, torch.Tensor):
        check_k(x.shape[1], weight)
        out_dtype = checked_out_dtype(x.dtype, out_dtype)
        tokens = quantize_tokens(x, token_format=TokenFormat.MXFP8_TCGEN05, rounding=rounding)
    else:
        check_k(x.codes.shape[1], weight)
        out_dtype = checked_out_dtype(None, out_dtype)
        tokens = from_quantized(x, target=weight.target)
    if not tokens.num_rows:
        return torch.empty((0, weight.n), dtype=out_dtype, device=weight.codes.device)
    check_packed(tokens, weight)
    out = mm_mxfp8(
        tokens.data.view(torch.float8_e4m3fn),
        weight.codes[0].view(torch.float8_e4m3fn).T,
        tokens.scales,
        weight.scales,
        out_dtype=out_dtype,
        backend="cutlass",
    )
    return out if bias is None else (out.float() + bias.float()).to(out_dtype)
