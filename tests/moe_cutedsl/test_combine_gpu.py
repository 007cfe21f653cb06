"""The weighted sum on a GPU against the reference, and what only a device shows: replays, fences, empty calls."""

import pytest
import torch

from vllm_rose_plugin.kernels.moe_combine.family import compare
from vllm_rose_plugin.kernels.moe_combine.launch import combine_tokens
from vllm_rose_plugin.kernels.moe_combine.reference import combine_tokens as reference

pytestmark = pytest.mark.gpu


def operands(seed, *, num_tokens, top_k, hidden_size, rows=None, dtype=torch.bfloat16):
    """(y, slots, weights, shared); a third of the slots is -1, some rows are NaN and inf."""
    g = torch.Generator("cuda").manual_seed(seed)
    rows = rows or max(1, num_tokens * top_k)
    y = torch.randn(rows, hidden_size, generator=g, device="cuda")
    y *= torch.exp2(torch.randint(-12, 6, (rows, 1), generator=g, device="cuda").float())
    y[0, 3], y[-1, ::7] = float("nan"), float("inf")
    slots = torch.randint(0, rows, (num_tokens, top_k), generator=g, device="cuda", dtype=torch.int32)
    gone = torch.rand(num_tokens, top_k, generator=g, device="cuda") < 1 / 3
    weights = torch.rand(num_tokens, top_k, generator=g, device="cuda")
    weights[gone & (weights > 0.5)] = float("nan")
    shared = torch.randn(num_tokens, hidden_size + 8, generator=g, device="cuda")[:, :hidden_size]
    return y.to(dtype), torch.where(gone, -1, slots), weights, shared.to(dtype)


@pytest.mark.parametrize("hidden_size", [32, 96, 2688, 4096, 7168])
@pytest.mark.parametrize("top_k", [1, 2, 3, 8, 10, 16])
def test_every_bit(hidden_size, top_k):
    for num_tokens in (0, 1, 3, 127, 2049):
        for dtype, out_dtype in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.bfloat16)):
            y, slots, weights, shared = operands(
                num_tokens, num_tokens=num_tokens, top_k=top_k, hidden_size=hidden_size, dtype=dtype
            )
            for given in ({}, {"topk_weights": weights}, {"topk_weights": weights, "shared": shared}):
                memory = torch.full((num_tokens * hidden_size + 4096,), 7.0, dtype=out_dtype, device="cuda")
                out = memory[2048 : 2048 + num_tokens * hidden_size].view(num_tokens, hidden_size)
                combine_tokens(y, slots=slots, out=out, **given)
                assert compare(out, reference(y, slots=slots, out_dtype=out_dtype, **given)) == ""
                assert (memory[:2048] == 7).all() and (memory[2048 + out.numel() :] == 7).all()


def test_a_long_prefill():
    y, slots, weights, _ = operands(1, num_tokens=20_001, top_k=8, hidden_size=4096, rows=50_000)
    out = combine_tokens(y, slots=slots, topk_weights=weights)
    for begin in range(0, 20_001, 4096):
        rows = slice(begin, begin + 4096)
        assert compare(out[rows], reference(y, slots=slots[rows], topk_weights=weights[rows])) == ""


def test_replays_follow_their_buffers():
    y, slots, weights, _ = operands(2, num_tokens=64, top_k=8, hidden_size=4096)
    out = combine_tokens(y, slots=slots, topk_weights=weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        combine_tokens(y, slots=slots, topk_weights=weights, out=out)
    for seed in range(200):
        new = operands(seed, num_tokens=64, top_k=8, hidden_size=4096)
        for old, value in zip((y, slots, weights), new, strict=False):
            old.copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        assert compare(out, reference(y, slots=slots, topk_weights=weights)) == ""
