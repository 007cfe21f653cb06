"""The reference against float64, against a head computed by hand, and the order of its roundings."""

import math

import pytest
import torch
from qk_norm_cases import assert_near_exact, random_cache, random_heads, random_weight

from vllm_rose_plugin.kernels.qk_norm.reference import normalize_heads, rotate_heads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_near_float64(dtype, head_dim, offset):
    x = random_heads(33, 5, head_dim, dtype)
    for weight in (random_weight(head_dim, dtype), random_weight(head_dim, torch.float32)):
        out = normalize_heads(x, weight, eps=1e-6, weight_offset=offset)
        assert out.dtype == dtype
        assert_near_exact(out, x, weight, eps=1e-6, weight_offset=offset)
        for interleaved in (False, True):
            rope = torch.arange(33) * 7, random_cache(256, head_dim // 2, torch.float32), interleaved
            turned = rotate_heads(out, rope[0], rope[1], interleaved=interleaved)
            assert_near_exact(turned, x, weight, eps=1e-6, weight_offset=offset, rope=rope)


def test_one_head_by_hand():
    x = torch.zeros(1, 1, 64)
    x[0, 0, 0], x[0, 0, 1] = 3.0, 4.0
    out = normalize_heads(x.bfloat16(), torch.full((64,), 2.0), eps=0.0)
    assert out[0, 0, 0] == torch.tensor(3.0 * 2 * 8 / 5).bfloat16()  # sqrt(mean) = sqrt(25 / 64)
    assert out[0, 0, 1] == torch.tensor(4.0 * 2 * 8 / 5).bfloat16() and not out[0, 0, 2:].any()


def test_rounds_before_a_weight_of_the_models_dtype_only():
    x = random_heads(64, 4, 128, torch.bfloat16)
    weight = random_weight(128, torch.bfloat16)
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    twice, once = scaled.bfloat16() * weight, (scaled * weight.float()).bfloat16()
    assert not torch.equal(twice, once)
    assert torch.equal(normalize_heads(x, weight, eps=1e-6), twice)
    assert torch.equal(normalize_heads(x, weight.float(), eps=1e-6), once)
    assert torch.equal(
        normalize_heads(x, weight - 1, eps=1e-6, weight_offset=1.0),
        normalize_heads(x, (weight - 1).float() + 1, eps=1e-6),
    )


def test_a_quarter_turn():
    x = torch.arange(1.0, 65.0).view(1, 1, 64).bfloat16()
    cache = torch.cat([torch.zeros(1, 16), torch.ones(1, 16)], 1)  # cos 0, sin 1: (a, b) -> (-b, a)
    position = torch.zeros(1, dtype=torch.int64)
    neox = rotate_heads(x, position, cache, interleaved=False)[0, 0]
    assert neox[0] == -17 and neox[16] == 1 and torch.equal(neox[32:], x[0, 0, 32:])
    paired = rotate_heads(x, position, cache, interleaved=True)[0, 0]
    assert paired[0] == -2 and paired[1] == 1 and torch.equal(paired[32:], x[0, 0, 32:])


def test_position_picks_the_row():
    x = random_heads(2, 1, 64, torch.float16).fill_(1.0)
    cache = random_cache(9, 64, torch.float32)
    out = rotate_heads(x, torch.tensor([8, 0]), cache, interleaved=True)
    assert torch.equal(out[1], x[1])  # position 0 turns nothing
    assert math.isclose(out[0, 0, 0].item(), math.cos(8) - math.sin(8), abs_tol=2e-3)
    assert math.isclose(out[0, 0, 1].item(), math.cos(8) + math.sin(8), abs_tol=2e-3)
