"""What the host function refuses, and the alignment it finds. No GPU: the checks come before the launch."""

import pytest
import torch

from vllm_rose_plugin.kernels.qk_norm.launch import _alignment, _heads, qk_norm, qk_norm_rope


def arguments(**changes):
    qkv = torch.zeros(5, 12 * 128, dtype=torch.bfloat16)
    weight = torch.ones(128, dtype=torch.bfloat16)
    given = {"q": qkv[:, :1024], "k": qkv[:, 1024:1280], "q_weight": weight, "k_weight": weight, "eps": 1e-6}
    return {**given, **changes}


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, "q is on cpu"),
        ({"q": zeros(5, 1000)}, r"q is \(5, 1000\); with weights of 128"),
        ({"q": zeros(5, 8, 64)}, r"q is \(5, 8, 64\)"),
        ({"k": zeros(4, 256)}, "q has 5 tokens and k 4"),
        ({"k": zeros(5, 256, dtype=torch.float16)}, "k is torch.float16"),
        ({"q_out": zeros(5, 1152)}, r"q_out is \(5, 9, 128\), it must be \(5, 8, 128\)"),
        ({"q": zeros(5, 8, 256)[..., ::2]}, "2 apart"),
        ({"k_weight": zeros(128, dtype=torch.float32)}, "k_weight is .* torch.float32"),
    ],
)
def test_refusals_name_the_tensor(changes, message):
    with pytest.raises(ValueError, match=message):
        qk_norm(**arguments(**changes))


def test_two_dimensions_become_heads_without_a_copy():
    qkv = zeros(5, 1536)
    heads = _heads("k", qkv[:, 1024:1280], 128)
    assert heads.shape == (5, 2, 128) and heads.stride() == (1536, 128, 1)
    assert heads.data_ptr() == qkv.data_ptr() + 2048


@pytest.mark.parametrize(
    "offset, row, expected", [(0, 1536, 32), (8, 1536, 16), (4, 1536, 8), (1, 1536, 2), (0, 1540, 8), (16, 1544, 16)]
)
def test_alignment_is_that_of_every_head(offset, row, expected):
    memory = torch.zeros(5 * row + 64, dtype=torch.bfloat16)
    start = (-memory.data_ptr() % 64) // 2 + offset
    x = memory[start : start + 4 * row].view(4, row)[:, :1024].unflatten(1, (8, 128))
    assert _alignment(x) == expected


def test_rope_needs_its_tensors_as_vllm_has_them():
    # meta tensors pass for no GPU either, so these checks are called on their own.
    from vllm_rose_plugin.kernels.qk_norm.launch import _check_rope

    q = zeros(5, 8, 128)
    cache = zeros(64, 128)
    with pytest.raises(ValueError, match=r"positions are \(5,\) torch.int32"):
        _check_rope(q, torch.zeros(5, dtype=torch.int32), cache)
    with pytest.raises(ValueError, match=r"positions are \(4,\)"):
        _check_rope(q, torch.zeros(4, dtype=torch.int64), cache)
    with pytest.raises(ValueError, match="cos_sin_cache"):
        _check_rope(q, torch.zeros(5, dtype=torch.int64), zeros(64, 256)[:, ::2])
    with pytest.raises(ValueError, match="q is on cpu"):
        qk_norm_rope(**arguments(), positions=torch.zeros(5, dtype=torch.int64), cos_sin_cache=cache)
