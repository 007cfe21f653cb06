"""The weighted sum of the experts' results."""

import kernel_oracle as oracle
import numpy as np
import pytest
import torch

from vllm_rose_plugin.kernels.moe_combine.reference import combine_tokens

NAN = float("nan")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weighted_sum(seed, weighted, dtype):
    g = torch.Generator().manual_seed(seed)
    y = torch.randn(40, 24, generator=g)
    slots = torch.randperm(40, generator=g)[:27].view(9, 3).to(torch.int32)
    slots[torch.rand(9, 3, generator=g) < 0.3] = -1
    weights = torch.rand(9, 3, generator=g)
    out = combine_tokens(y, slots=slots, topk_weights=weights if weighted else None, out_dtype=dtype)
    assert out.dtype == dtype
    for t in range(9):
        terms = [
            (oracle.to64(weights[t, k]) if weighted else 1.0) * oracle.to64(y[s])
            for k, s in enumerate(slots[t].tolist())
            if s >= 0
        ]
        total, magnitude = sum(terms, np.zeros(24)), sum(map(np.abs, terms), np.zeros(24))
        bound = torch.finfo(dtype).eps / 2 * np.abs(total) * 1.01 + 5e-7 * magnitude
        assert (np.abs(oracle.to64(out[t]) - total) <= bound).all(), f"token {t}"


def test_the_sum_is_in_fp32():
    y = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    out = combine_tokens(y, slots=torch.tensor([[0, 1, 2]], dtype=torch.int32))
    assert out.dtype == torch.bfloat16 and out.item() == 258.0  # in bf16, 256 + 1 stays 256


def test_skipped_slots_leak_nothing():
    y = torch.full((5, 8), NAN)
    y[3] = 2.0
    slots = torch.tensor([[3, -1], [-1, -1], [-1, 3]], dtype=torch.int32)
    weights = torch.tensor([[0.5, NAN], [NAN, float("inf")], [NAN, 0.25]])
    out = combine_tokens(y, slots=slots, topk_weights=weights)
    assert out.tolist() == [[1.0] * 8, [0.0] * 8, [0.5] * 8]
    assert combine_tokens(y, slots=slots).tolist() == [[2.0] * 8, [0.0] * 8, [2.0] * 8]


def test_no_rows_and_no_tokens():
    nowhere = torch.full((3, 2), -1, dtype=torch.int32)
    assert (combine_tokens(torch.zeros(0, 8), slots=nowhere, topk_weights=torch.ones(3, 2)) == 0).all()
    assert combine_tokens(torch.zeros(4, 8), slots=nowhere[:0]).shape == (0, 8)


def test_a_nan_result_stays_in_its_token():
    y = torch.ones(4, 8)
    y[1] = NAN
    out = combine_tokens(y, slots=torch.tensor([[0, 2], [1, 3]], dtype=torch.int32), topk_weights=torch.ones(2, 2))
    assert (out[0] == 2).all() and out[1].isnan().all()
