"""Copying tokens into runs."""

import kernel_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.moe_dispatch.reference import dispatch_tokens, max_rows
from vllm_rose_plugin.kernels.moe_route.reference import route_tokens
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8


@settings(deadline=None, max_examples=200)
@given(
    tokens=st.integers(0, 20),
    top_k=st.integers(1, 4),
    experts=st.integers(1, 9),
    alignment=st.sampled_from([1, 2, 7, 32]),
    data=st.data(),
)
def test_max_rows_is_enough_and_tight(tokens, top_k, experts, alignment, data):
    rows = max_rows(num_tokens=tokens, top_k=top_k, num_local_experts=experts, alignment=alignment)
    ids = [[data.draw(st.integers(-1, experts - 1)) for _ in range(top_k)] for _ in range(tokens)]
    assert oracle.route(ids, experts, None, alignment)[1][-1] <= rows
    pairs = tokens * top_k
    used = min(experts, pairs)  # one pair to each of these experts, all others to the first
    worst = [[t * top_k + k for k in range(top_k)] for t in range(tokens)]
    worst = [[pair if pair < used else 0 for pair in row] for row in worst]
    assert oracle.route(worst, experts, None, alignment)[1][-1] <= rows
    assert rows % alignment == 0 and rows <= pairs + used * (alignment - 1)
    if pairs <= experts:
        assert oracle.route(worst, experts, None, alignment)[1][-1] == rows


@pytest.mark.parametrize("alignment", [1, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_hold_their_token_and_padding_is_zero(alignment, dtype, weighted, poisoned_memory):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(7, 64, generator=g).to(dtype)
    ids = torch.randint(-1, 4, (7, 3), generator=g)
    weights = torch.rand(7, 3, generator=g)
    slots = route_tokens(ids, num_local_experts=4, alignment=alignment).slots
    arguments = {"slots": slots, "num_local_experts": 4, "alignment": alignment}
    arguments["topk_weights"] = weights if weighted else None
    plain = dispatch_tokens(x, activation="bf16", **arguments)
    quantized = dispatch_tokens(x, activation="mxfp8", **arguments)
    assert isinstance(plain, torch.Tensor) and plain.dtype == dtype and isinstance(quantized, Mxfp8Tensor)
    num_rows = max_rows(num_tokens=7, top_k=3, num_local_experts=4, alignment=alignment)
    assert plain.shape == (num_rows, 64) and quantized.scales.shape == (num_rows, 2)

    owner = {slot: (t, k) for t, row in enumerate(slots.tolist()) for k, slot in enumerate(row) if slot >= 0}
    assert 0 < len(owner) < num_rows
    for row in range(num_rows):
        if row not in owner:
            assert (plain[row] == 0).all()
            assert (quantized.codes[row].view(torch.uint8) == 0).all() and (quantized.scales[row] == 0).all()
            continue
        t, k = owner[row]
        token = x[t].float() * weights[t, k] if weighted else x[t]
        assert torch.equal(plain[row], token.to(dtype))
        codes, scales = oracle.quantize(token)
        np.testing.assert_array_equal(oracle.canonical(quantized.codes[row]), codes)
        np.testing.assert_array_equal(quantized.scales[row].numpy(), scales)


def test_a_token_without_a_row_reaches_no_row():
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))
    x[1] = float("nan")
    ids = torch.tensor([[0, 1], [-1, -1], [1, -1], [0, 0]])
    slots = route_tokens(ids, num_local_experts=2, alignment=4).slots
    for activation in ("mxfp8", "bf16"):
        tokens = dispatch_tokens(x, slots=slots, num_local_experts=2, alignment=4, activation=activation)
        values = tokens if isinstance(tokens, torch.Tensor) else oracle.dequantize(tokens.codes, tokens.scales)
        assert np.isfinite(np.asarray(values)).all()


@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
def test_no_tokens(activation):
    slots = torch.zeros(0, 2, dtype=torch.int32)
    tokens = dispatch_tokens(torch.zeros(0, 64), slots=slots, num_local_experts=4, alignment=32, activation=activation)
    assert (tokens if isinstance(tokens, torch.Tensor) else tokens.codes).shape == (0, 64)


def test_subnormal_tokens_survive_flushed_subnormals(flush_denormal):
    bits = torch.randint(1, 2**23, (4, 64), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    x = bits.view(torch.float32)
    slots = torch.arange(4, dtype=torch.int32).view(4, 1)
    codes, scales = quantize_mxfp8(x)
    flush_denormal()
    tokens = dispatch_tokens(x, slots=slots, num_local_experts=4)
    assert torch.equal(tokens.codes.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(tokens.scales, scales)
    plain = dispatch_tokens(x, slots=slots, num_local_experts=4, activation="bf16")
    assert torch.equal(plain.view(torch.int32), bits)
