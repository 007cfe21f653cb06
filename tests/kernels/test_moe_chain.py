"""The whole layer through torch.ops.rose: route, dispatch, GEMM, SwiGLU, GEMM, combine."""

import kernel_oracle as oracle
import numpy as np
import pytest
import torch
from moe_chain import moe_chain, random_moe

NAN = float("nan")


def stacked_rows(w13, rows):
    return tuple(part[:, rows].contiguous() for part in w13)


def assert_tokens_close(out, expected, tolerance) -> None:
    """Each token's error, as a share of the token's own norm."""
    out = oracle.to64(out)
    for t, (row, reference) in enumerate(zip(out, expected, strict=True)):
        error, norm = np.linalg.norm(row - reference), np.linalg.norm(reference)
        assert error <= tolerance * norm, f"token {t}: {error} of {norm}"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("alignment", [1, 32])
@pytest.mark.parametrize("weight_on_input", [False, True])
# W8A8 differs from the oracle where fp32 and float64 fall on two sides of a tie in the second quantization.
@pytest.mark.parametrize(("activation", "tolerance"), [("bf16", 2e-6), ("mxfp8", 5e-3)])
def test_layer_against_float64(seed, alignment, weight_on_input, activation, tolerance, poisoned_memory):
    x, ids, weights, w13, w2 = random_moe(seed, tokens=11, top_k=3, experts=5)
    ids[2, 1] = -1
    ids[5] = -1
    ids[7, 0] = 99
    options = {"weight_on_input": weight_on_input}
    out = moe_chain(x, ids, weights, w13, w2, alignment=alignment, activation=activation, **options)
    expected = oracle.moe(x, ids, weights, w13, w2, quantized=activation == "mxfp8", **options)
    assert_tokens_close(out, expected, tolerance)
    assert (out[5] == 0).all()


@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
@pytest.mark.parametrize("alignment", [1, 32, 128])
def test_alignment_changes_no_bit(activation, alignment):
    arguments = random_moe(10, tokens=40, top_k=2, experts=6, dtype=torch.bfloat16)
    out = moe_chain(*arguments, activation=activation, alignment=alignment)
    assert torch.equal(out, moe_chain(*arguments, activation=activation, alignment=1))


@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
def test_runs_of_many_lengths(activation):
    lengths = [0, 1, 31, 32, 33, 127, 128, 129]
    total = sum(lengths)
    x, _, weights, w13, w2 = random_moe(11, tokens=total, top_k=1, experts=8, hidden=32, intermediate=32)
    ids = torch.repeat_interleave(torch.arange(8), torch.tensor(lengths))
    ids = ids[torch.randperm(total, generator=torch.Generator().manual_seed(12))].view(-1, 1)
    out = moe_chain(x, ids, weights, w13, w2, alignment=32, activation=activation)
    expected = oracle.moe(x, ids, weights, w13, w2, quantized=activation == "mxfp8")
    # A flipped code is worth up to a sixteenth of one element of a token; few tokens have one.
    assert_tokens_close(out, expected, 2e-2 if activation == "mxfp8" else 3e-6)
    errors = np.linalg.norm(oracle.to64(out) - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert np.median(errors) < 1e-6


@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("routed", [True, False])
def test_rows_of_nan_change_no_bit_of_the_others(activation, bad, routed):
    x, ids, weights, w13, w2 = random_moe(20, tokens=16, top_k=2, experts=4, dtype=torch.bfloat16)
    rows = torch.tensor([0, 5, 15])
    if not routed:
        ids[rows] = -1  # as vLLM pads a batch
    clean = moe_chain(x, ids, weights, w13, w2, alignment=32, activation=activation)
    x[rows] = bad
    weights[rows] = bad
    out = moe_chain(x, ids, weights, w13, w2, alignment=32, activation=activation)
    others = torch.ones(16, dtype=torch.bool)
    others[rows] = False
    assert torch.equal(out[others], clean[others])
    assert out[rows].isnan().all() if routed else (out[rows] == 0).all()


def test_padded_rows_change_no_bit_of_the_valid_ones():
    x, ids, weights, w13, w2 = random_moe(21, tokens=9, dtype=torch.bfloat16)
    padded = (
        torch.cat([x, torch.full((7, 64), NAN, dtype=x.dtype)]),
        torch.cat([ids, torch.full((7, 2), -1)]),
        torch.cat([weights, torch.full((7, 2), NAN)]),
    )
    out = moe_chain(*padded, w13, w2, alignment=32)
    assert torch.equal(out[:9], moe_chain(x, ids, weights, w13, w2, alignment=32))
    assert (out[9:] == 0).all()


@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
def test_few_tokens_and_no_experts(activation):
    x, ids, weights, w13, w2 = random_moe(22, tokens=1)
    out = moe_chain(x, ids, weights, w13, w2, alignment=32, activation=activation)
    expected = oracle.moe(x, ids, weights, w13, w2, quantized=activation == "mxfp8")
    assert_tokens_close(out, expected, 5e-3)
    none = moe_chain(x[:0], ids[:0], weights[:0], w13, w2, alignment=32, activation=activation)
    assert none.shape == (0, 64)
    ids.fill_(-1)
    assert (moe_chain(x, ids, weights, w13, w2, alignment=32, activation=activation) == 0).all()


def test_everything_to_one_expert_and_twice():
    x, ids, weights, w13, w2 = random_moe(23, tokens=40, experts=4)
    ids.fill_(2)
    out = moe_chain(x, ids, weights, w13, w2, alignment=32, activation="bf16")
    assert_tokens_close(out, oracle.moe(x, ids, weights, w13, w2, quantized=False), 2e-6)
    once = moe_chain(x, ids[:, :1], weights.sum(-1, keepdim=True), w13, w2, activation="bf16")
    assert_tokens_close(out, oracle.to64(once), 2e-6)


@pytest.mark.parametrize("code", [0, 1])
def test_dead_experts(code):
    x, ids, weights, w13, w2 = random_moe(24, tokens=20, experts=4)
    for codes, scales in (w13, w2):
        codes.view(torch.uint8)[1] = 0
        scales[1] = code
    out = moe_chain(x, ids, weights, w13, w2, alignment=32)
    masked = torch.where(ids == 1, -1, ids)
    assert (masked != ids).any()
    assert torch.equal(out, moe_chain(x, masked, weights, w13, w2, alignment=32))


@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
def test_all_scale_codes(activation):
    """Expert e has scale code e in every block of w2; gate and up are such that the result stays in fp32."""
    experts, hidden = 256, 32
    g = torch.Generator().manual_seed(25)
    x = torch.ones(experts, hidden)
    eye = torch.cat([torch.eye(32) * 100, torch.eye(32) * 2.0**-20]).expand(experts, -1, -1)
    w13 = torch.ops.rose.mxfp8_quantize(eye.contiguous())
    w2 = torch.randint(1, 5, (experts, hidden, 32), generator=g) / 4
    scales = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1).repeat(1, hidden, 1)
    w2 = (w2.to(torch.float8_e4m3fn), scales)
    ids = torch.randperm(256, generator=g).view(-1, 1)
    out = moe_chain(x, ids, torch.ones(256, 1), w13, w2, alignment=4, activation=activation)
    # silu(96 or 104) is its argument in fp32; all factors are short, so the sums are exact.
    first = oracle.dequantize(*w13)[0]
    h = oracle.swiglu(first @ np.ones(32)).astype(np.float32).astype(np.float64)
    expected = np.stack([oracle.dequantize(w2[0][e], w2[1][e]) @ h for e in ids.flatten().tolist()])
    np.testing.assert_array_equal(oracle.to64(out), expected.astype(np.float32))
    assert not out.isinf().any()
    assert torch.equal(out.isnan().all(-1), ids.flatten() == 255)
    assert (out[ids.flatten() == 0] > 0).all()


@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
def test_tensor_parallel_halves_sum_to_the_whole(activation):
    arguments = random_moe(30, tokens=13, top_k=2, experts=4, hidden=64, intermediate=128)
    x, ids, weights, w13, w2 = arguments
    whole = moe_chain(*arguments, activation=activation, alignment=32)
    total = torch.zeros_like(whole)
    for rank in range(2):
        mine = torch.arange(64) + 64 * rank  # columns of I, whole blocks of 32
        first = stacked_rows((w13[0].view(torch.uint8), w13[1]), torch.cat([mine, mine + 128]))
        second = (w2[0].view(torch.uint8)[..., mine].contiguous(), w2[1][..., 2 * rank : 2 * rank + 2].contiguous())
        first, second = ((codes.view(torch.float8_e4m3fn), scales) for codes, scales in (first, second))
        part = moe_chain(x, ids, weights, first, second, activation=activation, alignment=32)
        assert not torch.allclose(part, whole, rtol=0.1)
        total += part
    # gate and up of a column don't depend on the other half, but a GEMM half as wide may round them otherwise
    assert_tokens_close(total, oracle.to64(whole), 5e-3 if activation == "mxfp8" else 2e-6)


@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_expert_parallel_ranks_sum_to_the_whole(activation, num_ranks):
    x, ids, weights, w13, w2 = random_moe(31, tokens=13, top_k=3, experts=6)
    ids[4] = -1
    whole = moe_chain(x, ids, weights, w13, w2, activation=activation, alignment=32)
    total = torch.zeros_like(whole)
    for rank in range(num_ranks):
        mine = torch.arange(rank, 6, num_ranks)  # every num_ranks-th expert: a map with holes
        expert_map = torch.full((6,), -1, dtype=torch.int32)
        expert_map[mine] = torch.arange(len(mine), dtype=torch.int32)
        local = [(c.view(torch.uint8)[mine].view(torch.float8_e4m3fn), s[mine]) for c, s in (w13, w2)]
        part = moe_chain(x, ids, weights, *local, expert_map=expert_map, activation=activation, alignment=32)
        expected = oracle.moe(x, ids, weights, *local, expert_map=expert_map, quantized=activation == "mxfp8")
        reachable = np.linalg.norm(expected, axis=-1) > 0
        assert_tokens_close(part[torch.from_numpy(reachable)], expected[reachable], 5e-3)
        assert (part[torch.from_numpy(~reachable)] == 0).all()
        total += part
    assert_tokens_close(total, oracle.to64(whole), 1e-6)


def test_same_input_same_bits():
    arguments = random_moe(32, tokens=50, top_k=4, experts=8, dtype=torch.bfloat16)
    first = moe_chain(*arguments, alignment=32)
    for _ in range(20):
        assert torch.equal(moe_chain(*arguments, alignment=32), first)
