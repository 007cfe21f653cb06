"""The weighted sum of all ranks' experts, in plain torch."""

from collections.abc import Sequence

import torch

from vllm_rose_plugin.kernels.all_reduce.reference import all_reduce
from vllm_rose_plugin.kernels.moe_combine.reference import combine_tokens


def ep_combine(
    ys: Sequence[torch.Tensor],
    *,
    slots: Sequence[torch.Tensor],
    topk_weights: torch.Tensor | None = None,
    shared: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``sum over ranks r of round(sum over k of topk_weights[t, k] * ys[r][slots[r][t, k]] + shared[r][t])``.

    What a rank contributes is rounded to the result's dtype before it is sent, as the sequence of moe_combine and
    all-reduce does; so both have the same bits, and half of the bytes of fp32 travel.

    Args:
        ys: of all ranks, ``[S_r, H]``, the results of a rank's experts.
        slots: of all ranks, int32 ``[T, top_k]``; -1 where the expert is another rank's.
        topk_weights: ``[T, top_k]``, the same on all ranks; None sums without weights.
        shared: of all ranks, ``[T, H]``, a rank's part of the shared expert's output.
        out_dtype: y's dtype by default.

    Returns:
        ``[T, H]``, what every rank gets.
    """
    parts: Sequence[torch.Tensor | None] = shared or [None] * len(ys)
    return all_reduce(
        [
            combine_tokens(y, slots=own, topk_weights=topk_weights, shared=part, out_dtype=out_dtype)
            for y, own, part in zip(ys, slots, parts, strict=True)
        ]
    )
