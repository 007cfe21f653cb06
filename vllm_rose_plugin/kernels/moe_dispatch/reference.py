"""Copying (and quantizing) tokens into their experts' runs, in plain torch."""

import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8


def max_rows(*, num_tokens: int, top_k: int, num_local_experts: int, alignment: int) -> int:
    """Rows S that hold the runs of any routing: known from shapes alone, so that buffers and graphs are static.

    At most min(E_local, T * top_k) experts have tokens, each wastes at most alignment - 1 rows, and the sum of the
    padded runs is a multiple of alignment. `num_tokens` may be symbolic.
    """
    pairs = num_tokens * top_k
    # sym_min and not min: comparing a symbolic size would specialize the traced graph.
    rows = pairs + torch.sym_min(num_local_experts, pairs) * (alignment - 1)
    return rows // alignment * alignment


def dispatch_tokens(
    x: torch.Tensor | Mxfp8Tensor,
    *,
    slots: torch.Tensor,
    num_local_experts: int,
    alignment: int = 1,
    activation: Activation | str = Activation.MXFP8,
    rounding: Rounding | str = Rounding.RCEIL,
    topk_weights: torch.Tensor | None = None,
) -> torch.Tensor | Mxfp8Tensor:
    """Copy each token to the rows that `slots` names.

    Args:
        x: ``[T, H]`` bf16, fp16 or fp32; or MXFP8 with row-major scales, which is copied as it is.
        slots: ``[T, top_k]`` int32 from :func:`~vllm_rose_plugin.kernels.moe_route.reference.route_tokens`, which was
            given the same num_local_experts and alignment.
        num_local_experts: E_local.
        alignment: rows, >= 1.
        activation: MXFP8 quantizes the tokens, BF16 copies them as they are.
        rounding: how tokens are quantized.
        topk_weights: ``[T, top_k]``; given when the router weight applies to the expert's input. The product is formed
            in float32 and quantized from there, or rounded to x's dtype.

    Returns:
        ``[S, H]`` with S from :func:`max_rows`. Rows without a token are zero; in MXFP8, codes and scale codes are.

    Raises:
        ValueError: MXFP8 with router weights, or with activation BF16.
    """
    num_tokens, top_k = slots.shape
    num_rows = max_rows(num_tokens=num_tokens, top_k=top_k, num_local_experts=num_local_experts, alignment=alignment)
    rows = slots.flatten().to(torch.int64)  # (T * top_k)
    rows = torch.where(rows < 0, num_rows, rows)  # one row too many takes what has no row

    if isinstance(x, Mxfp8Tensor):
        if topk_weights is not None or Activation(activation) is Activation.BF16:
            raise ValueError("tokens that arrive quantized take neither router weights nor activation='bf16'")
        codes, scales = (part.repeat_interleave(top_k, 0) for part in (x.codes.view(torch.uint8), x.scales))
    elif topk_weights is not None:
        weighted = x.float().unsqueeze(1) * topk_weights.float().unsqueeze(-1)  # (T, top_k, H)
        if Activation(activation) is Activation.BF16:
            return _scatter(weighted.to(x.dtype).flatten(0, 1), rows, num_rows)
        codes, scales = quantize_mxfp8(weighted.flatten(0, 1), rounding=rounding)
    elif Activation(activation) is Activation.BF16:
        return _scatter(x.repeat_interleave(top_k, 0), rows, num_rows)
    else:
        codes, scales = (part.repeat_interleave(top_k, 0) for part in _quantize_bytes(x, rounding))
    codes = _scatter(codes.view(torch.uint8), rows, num_rows).view(torch.float8_e4m3fn)
    return Mxfp8Tensor(codes, _scatter(scales, rows, num_rows))


def _quantize_bytes(x: torch.Tensor, rounding: Rounding | str) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = quantize_mxfp8(x, rounding=rounding)
    return codes.view(torch.uint8), scales  # torch copies bytes where it can't copy float8


def _scatter(source: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    out = torch.zeros(num_rows + 1, source.shape[-1], dtype=source.dtype, device=source.device)
    return out.index_copy_(0, rows, source)[:num_rows]
