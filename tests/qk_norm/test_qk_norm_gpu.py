"""The kernel on a GPU against float64, with poison around its views."""

import pytest
import torch
from qk_norm_cases import assert_near_exact, random_cache, random_heads, random_weight

from vllm_rose_plugin.kernels.qk_norm.launch import qk_norm, qk_norm_rope
from vllm_rose_plugin.kernels.qk_norm.reference import normalize_heads

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
POISON = 0x7F51


def qkv_views(tokens, q_heads, kv_heads, head_dim, dtype, *, offset=0):
    """(whole memory, q, k) on the GPU: q and k hold random heads, all else is poison."""
    row = (q_heads + 2 * kv_heads) * head_dim + offset
    memory = torch.full((tokens * row + 512,), POISON, dtype=torch.int16, device="cuda").view(dtype)
    qkv = memory[128 + offset : 128 + offset + tokens * row].view(tokens, row)
    q = qkv[:, : q_heads * head_dim].unflatten(1, (q_heads, head_dim))
    k = qkv[:, q_heads * head_dim : (q_heads + kv_heads) * head_dim].unflatten(1, (kv_heads, head_dim))
    q.copy_(random_heads(tokens, q_heads, head_dim, dtype))
    k.copy_(random_heads(tokens, kv_heads, head_dim, dtype, seed=1))
    return memory, q, k


@pytest.mark.parametrize("tokens", [0, 1, 3, 130, 4099])
@pytest.mark.parametrize("head_dim, q_heads, kv_heads", [(64, 7, 1), (128, 64, 4), (256, 3, 5)])
@pytest.mark.parametrize(
    "dtype, weight_dtype, weight_offset", [(BF16, BF16, 0.0), (FP16, FP32, 0.0), (BF16, BF16, 1.0)]
)
@pytest.mark.parametrize("rope", [None, (1, False), (1, True), (2, False), (2, True)])
def test_near_float64_and_nothing_else_written(
    tokens, head_dim, q_heads, kv_heads, dtype, weight_dtype, weight_offset, rope
):
    memory, q, k = qkv_views(tokens, q_heads, kv_heads, head_dim, dtype)
    before, q_in, k_in = memory.clone(), q.clone(), k.clone()
    weights = [random_weight(head_dim, weight_dtype, seed=seed).cuda() for seed in (0, 1)]
    arguments = {
        "q_weight": weights[0],
        "k_weight": weights[1],
        "eps": 1e-6,
        "weight_offset": weight_offset,
    }
    spec = None
    if rope is None:
        qk_norm(q=q, k=k, **arguments)
    else:
        part, interleaved = rope
        cache, positions = (
            random_cache(8192, head_dim // part, FP32 if part == 1 else dtype).cuda(),
            torch.randint(8192, (tokens,)).cuda(),
        )
        spec = positions, cache, interleaved
        qk_norm_rope(q=q, k=k, positions=positions, cos_sin_cache=cache, interleaved=interleaved, **arguments)
    if tokens:
        for out, x, weight in ((q, q_in, weights[0]), (k, k_in, weights[1])):
            assert_near_exact(out, x, weight, eps=1e-6, weight_offset=weight_offset, rope=spec)
    q.copy_(q_in)
    k.copy_(k_in)
    assert torch.equal(memory.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
@pytest.mark.parametrize("tokens", [5, 4096])
def test_unaligned_heads_give_the_bits_of_aligned_ones(offset, tokens):
    _, q, k = qkv_views(tokens, 8, 2, 128, BF16)
    _, q_odd, k_odd = qkv_views(tokens, 8, 2, 128, BF16, offset=offset)
    odd_weight = torch.empty(128 + offset, dtype=BF16, device="cuda")[offset:].copy_(random_weight(128, BF16))
    for weight, q_, k_ in ((random_weight(128, BF16).cuda(), q, k), (odd_weight, q_odd, k_odd)):
        qk_norm(q=q_, k=k_, q_weight=weight, k_weight=weight, eps=1e-6)
    assert torch.equal(q, q_odd) and torch.equal(k, k_odd)


def test_nearly_always_the_bits_of_the_reference():
    _, q, k = qkv_views(700, 16, 2, 128, BF16)
    weight = random_weight(128, BF16).cuda()
    expected = normalize_heads(q, weight, eps=1e-6)
    qk_norm(q=q, k=k, q_weight=weight, k_weight=weight, eps=1e-6)
    assert (q != expected).float().mean() < 1e-3  # where float32 sums fall on either side of a tie


def test_a_token_does_not_depend_on_its_batch_and_nan_stays_in_its_head():
    _, q, k = qkv_views(4096, 64, 4, 128, BF16)
    q[77, 3, 5] = float("nan")
    weight = random_weight(128, BF16).cuda()
    results = []
    for first, last in ((77, 78), (0, 78), (0, 4096)):
        q_out = torch.zeros(last - first, 64, 128, dtype=BF16, device="cuda")
        k_out = torch.zeros(last - first, 4, 128, dtype=BF16, device="cuda")
        qk_norm(q=q[first:last], k=k[first:last], q_weight=weight, k_weight=weight, eps=1e-6, q_out=q_out, k_out=k_out)
        assert q_out.isnan().any(-1).nonzero().tolist() == [[77 - first, 3]] and not k_out.isnan().any()
        results.append((q_out[77 - first].view(torch.int16), k_out[77 - first].view(torch.int16)))
    for q_row, k_row in results[1:]:
        assert torch.equal(q_row, results[0][0]) and torch.equal(k_row, results[0][1])


def test_heads_beside_a_gate():
    """Qwen3-Next's q comes interleaved with a gate: heads are two head_dims apart."""
    q_gate = random_heads(9, 8, 512, BF16).cuda()
    gate, k = q_gate[..., 256:].clone(), random_heads(9, 2, 256, BF16, seed=1).cuda()
    q_in, weight = q_gate[..., :256].clone().cpu(), random_weight(256, BF16)
    w = weight.cuda()
    qk_norm(q=q_gate[..., :256], k=k, q_weight=w, k_weight=w, eps=1e-6, weight_offset=1.0)
    assert torch.equal(q_gate[..., 256:], gate)
    assert_near_exact(q_gate[..., :256].cpu(), q_in, weight, eps=1e-6, weight_offset=1.0)


@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_a_thousand_replays_give_the_same_bits(tokens):
    _, q, k = qkv_views(tokens, 64, 4, 128, BF16)
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    weight = random_weight(128, BF16).cuda()
    rope = {"positions": torch.randint(8192, (tokens,)).cuda(), "cos_sin_cache": random_cache(8192, 128, BF16).cuda()}

    def run():
        qk_norm_rope(q=q, k=k, q_weight=weight, k_weight=weight, eps=1e-6, q_out=q_out, k_out=k_out, **rope)

    run()
    expected = q_out.clone(), k_out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        q_out.fill_(float("nan"))
        k_out.fill_(float("nan"))
        graph.replay()
        wrong += (q_out != expected[0]).sum() + (k_out != expected[1]).sum()
    assert wrong.item() == 0
