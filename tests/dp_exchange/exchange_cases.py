"""Steps of an exchange: what every rank sends, what stands in for its experts, and what must come of it."""

import torch

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.dp_combine.reference import combine_rows
from vllm_rose_plugin.kernels.dp_dispatch.reference import dispatch_tokens
from vllm_rose_plugin.kernels.dp_exchange.layout import ExchangeShape, Payload
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8, quantize_mxfp8

WRONG_IDS = (-1, -(2**31), 2**31 - 1)


def shape_of(group_size=2, *, hidden_size=64, top_k=3, experts_each=4, max_tokens=40, payload=Payload.MXFP8):
    return ExchangeShape(
        hidden_size=hidden_size,
        top_k=top_k,
        num_experts=experts_each * group_size,
        max_tokens=max_tokens,
        group_size=group_size,
        payload=payload,
    )


def inputs_of(shape: ExchangeShape, num_tokens: int, seed: int, *, device="cpu", wrong=0.2, codes=False):
    """(x, topk_ids, topk_weights) of one rank: distinct experts, some ids that name none, some tokens without any."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, shape.hidden_size, generator=generator)
    x = (x * torch.exp2(torch.randint(-6, 6, (num_tokens, 1), generator=generator).float())).bfloat16()
    ids = torch.rand(num_tokens, shape.num_experts, generator=generator).argsort(1)[:, : shape.top_k].to(torch.int32)
    bad = torch.rand(ids.shape, generator=generator) < wrong
    bad |= torch.rand(num_tokens, 1, generator=generator) < wrong / 2
    kinds = torch.tensor([*WRONG_IDS, shape.num_experts], dtype=torch.int32)
    ids = torch.where(bad, kinds[torch.randint(0, 4, ids.shape, generator=generator)], ids)
    weights = torch.rand(ids.shape, generator=generator)
    weights[bad] = float("nan")
    sent = Mxfp8Tensor(*quantize_mxfp8(x)) if codes else x
    if codes:
        sent = Mxfp8Tensor(sent.codes.to(device), sent.scales.to(device))
    return sent if codes else x.to(device), ids.to(device), weights.to(device)


def expert_rows(received) -> torch.Tensor:
    """Stands in for the experts of one rank: any function of a row and its routing, in bf16."""
    if isinstance(received.tokens, Mxfp8Tensor):
        x = dequantize_mxfp8(received.tokens.codes, received.tokens.scales)
    else:
        x = received.tokens.float()
    factor = torch.where(received.topk_ids < 0, 0.0, received.topk_weights * (1 + received.topk_ids)).sum(1)
    rows = torch.where((received.row_sources < 0).unsqueeze(1), float("nan"), x * factor.unsqueeze(1))
    return rows.bfloat16()


def expected_received(inputs, shape, rank, step_tokens=None):
    xs, ids, weights = zip(*inputs, strict=True)
    return dispatch_tokens(xs, topk_ids=ids, topk_weights=weights, shape=shape, rank=rank, step_tokens=step_tokens)


def expected_out(inputs, shape, rank, step_tokens=None):
    received = [expected_received(inputs, shape, r, step_tokens) for r in range(shape.group_size)]
    return combine_rows(
        [expert_rows(r) for r in received], received=received, topk_ids=inputs[rank][1], shape=shape, rank=rank
    )


def difference(got, expected) -> str:
    """What is wrong with what a rank received, codes of unused rows left out; empty if nothing."""
    count = int(expected.num_rows)
    if int(got.num_rows) != count:
        return f"{int(got.num_rows)} rows instead of {count}"
    for name in ("topk_ids", "topk_weights", "row_sources"):
        if not torch.equal(getattr(got, name), getattr(expected, name)):
            return f"{name} differ"
    pairs = [(got.tokens, expected.tokens)]
    if isinstance(got.tokens, Mxfp8Tensor):
        pairs = [(got.tokens.codes, expected.tokens.codes), (got.tokens.scales, expected.tokens.scales)]
    for mine, right in pairs:
        if not torch.equal(mine[:count].contiguous().view(torch.uint8), right[:count].contiguous().view(torch.uint8)):
            return "tokens differ"
    return ""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))
