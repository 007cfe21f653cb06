"""The sum of a token's rows over ranks, in plain torch."""

from collections.abc import Sequence

import torch

from vllm_rose_plugin.kernels.dp_dispatch.reference import destinations
from vllm_rose_plugin.kernels.dp_exchange.interface import ReceivedTokens
from vllm_rose_plugin.kernels.dp_exchange.layout import ExchangeShape


def combine_rows(
    rows: Sequence[torch.Tensor],
    *,
    received: Sequence[ReceivedTokens],
    topk_ids: torch.Tensor,
    shape: ExchangeShape,
    rank: int,
) -> torch.Tensor:
    """``out[t]``: the sum of the rows that were made of token t, in the order of ranks, in float32, rounded once.

    Router weights are in the rows already; none is applied here.

    Args:
        rows: of every rank ``[R, H]`` bf16.
        received: of every rank, in the same step.
        topk_ids: of `rank`, ``[T, top_k]`` int32.

    Returns:
        bf16 ``[T, H]``; zero for a token that went nowhere.
    """
    returned = torch.zeros(
        shape.max_tokens * shape.slots, shape.hidden_size, dtype=torch.bfloat16, device=topk_ids.device
    )
    span = shape.max_tokens * shape.slots
    for part, tokens in zip(rows, received, strict=True):
        sources = tokens.row_sources[: int(tokens.num_rows)].long()
        mine = (sources // span) == rank
        returned[sources[mine] % span] = part[: len(sources)][mine]
    return sum_slots(returned, destinations(topk_ids, shape).sum(1), shape)


def sum_slots(returned: torch.Tensor, counts: torch.Tensor, shape: ExchangeShape) -> torch.Tensor:
    """The sums of the first ``counts[t]`` of each token's rows, one after another.

    Args:
        returned: bf16 ``[max_tokens * slots, H]``.
        counts: ``[T]``, how many destinations a token has.
    """
    rows = returned.view(shape.max_tokens, shape.slots, shape.hidden_size)
    total = torch.zeros(len(counts), shape.hidden_size, dtype=torch.float32, device=counts.device)
    for slot in range(shape.slots):
        part = rows[: len(counts), slot].float()
        total = torch.where((slot < counts).unsqueeze(1), total + part, total)
    return total.to(torch.bfloat16)
