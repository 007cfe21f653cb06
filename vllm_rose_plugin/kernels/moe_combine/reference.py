"""The weighted sum of the experts' results, in plain torch."""

import torch


def combine_tokens(
    y: torch.Tensor,
    *,
    slots: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``out[t] = sum over k of topk_weights[t, k] * y[slots[t, k]] + shared[t]``, in float32 and in this order.

    Args:
        y: ``[S, H]`` bf16, fp16 or fp32, the experts' results.
        slots: ``[T, top_k]`` int32; -1 is skipped, and neither `y` nor the weight there reaches the result.
        topk_weights: ``[T, top_k]``; None sums without weights (the router weight was applied to the input).
        shared: ``[T, H]``, the shared expert's output, added last and before the only rounding.
        out_dtype: y's dtype by default.

    Returns:
        ``[T, H]``; without `shared`, zero for a token all of whose slots are -1.
    """
    num_tokens, top_k = slots.shape
    total = torch.zeros(num_tokens, y.shape[-1], dtype=torch.float32, device=y.device)
    if y.shape[0] > 0:  # without rows, every slot is -1
        for k in range(top_k):
            rows = slots[:, k].to(torch.int64)  # (T)
            part = y[rows.clamp(min=0)].float()  # (T, H)
            if topk_weights is not None:
                part = part * topk_weights[:, k].float().unsqueeze(-1)
            total += torch.where(rows.unsqueeze(-1) < 0, 0.0, part)
    if shared is not None:
        total += shared.float()
    return total.to(out_dtype or y.dtype)
