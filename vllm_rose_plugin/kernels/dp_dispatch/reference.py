"""What each rank receives, in plain torch, from all ranks' tokens."""

from collections.abc import Sequence

import torch

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.dp_exchange.interface import ReceivedTokens
from vllm_rose_plugin.kernels.dp_exchange.layout import ExchangeShape, Payload
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8


def destinations(topk_ids: torch.Tensor, shape: ExchangeShape) -> torch.Tensor:
    """Whether a token goes to a rank.

    Args:
        topk_ids: ``[T, top_k]`` int32; what names no expert is skipped.

    Returns:
        ``[T, group_size]`` bool.
    """
    valid = (topk_ids >= 0) & (topk_ids < shape.num_experts)
    rank = torch.where(valid, topk_ids.long() // shape.num_local_experts, shape.group_size)
    hits = torch.zeros(topk_ids.shape[0], shape.group_size + 1, dtype=torch.bool, device=topk_ids.device)
    return hits.scatter_(1, rank, True)[:, : shape.group_size]


def slots_of(hits: torch.Tensor) -> torch.Tensor:
    """``[T, group_size]`` int32: the how many-th of a token's destinations a rank is; of `destinations`."""
    return (hits.cumsum(1) - 1).to(torch.int32)


def local_routing(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, *, shape: ExchangeShape, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids as numbers of this rank's experts, -1 for all others, and weights, 0 for those."""
    local = topk_ids - rank * shape.num_local_experts
    # Compared before the subtraction: it may wrap around where an id is as negative as can be.
    here = (topk_ids >= rank * shape.num_local_experts) & (topk_ids < (rank + 1) * shape.num_local_experts)
    return torch.where(here, local, -1), torch.where(here, topk_weights, 0.0)


def as_payload(x: torch.Tensor | Mxfp8Tensor, shape: ExchangeShape) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What travels: (uint8 codes, scales), or (bf16, None)."""
    if isinstance(x, Mxfp8Tensor):
        return x.codes.view(torch.uint8), x.scales
    if shape.payload is Payload.BF16:
        return x, None
    codes, scales = quantize_mxfp8(x)
    return codes.view(torch.uint8), scales


def dispatch_tokens(
    xs: Sequence[torch.Tensor | Mxfp8Tensor],
    *,
    topk_ids: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    shape: ExchangeShape,
    rank: int,
    step_tokens: int | None = None,
) -> ReceivedTokens:
    """What `rank` receives; codes, scales or elements of unused rows are zero here, anything with a kernel.

    Args:
        xs, topk_ids, topk_weights: of every rank, as :class:`Exchange.dispatch_send` takes them.
        shape: of the exchange.
        step_tokens: most tokens of a rank; None: `shape.max_tokens`.
    """
    total = shape.group_size * (step_tokens or shape.max_tokens)
    elements, scales, ids, weights, sources = [], [], [], [], []
    for source in range(shape.group_size):
        hits = destinations(topk_ids[source], shape)
        tokens = hits[:, rank].nonzero().flatten()
        values, codes = as_payload(xs[source], shape)
        elements.append(values[tokens])
        if codes is not None:
            scales.append(codes[tokens])
        mine = local_routing(topk_ids[source][tokens], topk_weights[source][tokens], shape=shape, rank=rank)
        ids.append(mine[0])
        weights.append(mine[1])
        slot = slots_of(hits)[tokens, rank]
        sources.append(((source * shape.max_tokens + tokens) * shape.slots + slot).to(torch.int32))
    count = sum(len(part) for part in ids)
    device = topk_ids[0].device
    filled = _filled(elements, total, 0)
    return ReceivedTokens(
        tokens=filled
        if shape.payload is Payload.BF16
        else Mxfp8Tensor(filled.view(torch.float8_e4m3fn), _filled(scales, total, 0)),
        topk_ids=_filled(ids, total, -1),
        topk_weights=_filled(weights, total, 0),
        row_sources=_filled(sources, total, -1),
        num_rows=torch.tensor([count], dtype=torch.int32, device=device),
    )


def _filled(parts: list[torch.Tensor], total: int, value: int) -> torch.Tensor:
    """The parts behind each other, and `value` behind them."""
    used = torch.cat(parts)
    out = used.new_full((total, *used.shape[1:]), value)
    out[: len(used)] = used
    return out
