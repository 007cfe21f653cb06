"""What the self-check of the linear layer lets through and what it finds."""

from dataclasses import replace

import pytest
import torch
from launch_emulation import emulated

from vllm_rose_plugin.kernels.contracts import Activation, Rounding, ScaleLayout
from vllm_rose_plugin.kernels.gemm import family
from vllm_rose_plugin.kernels.gemm.family import FAMILY, LinearShape
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DeviceFacts

SHAPE = LinearShape(
    num_tokens=9,
    n=64,
    k=96,
    dtype="bfloat16",
    bias=True,
    activation=Activation.MXFP8,
    rounding=Rounding.RCEIL,
    batch_invariant=False,
)
SHAPES = [SHAPE, replace(SHAPE, activation=Activation.BF16, bias=False, dtype="float16"), replace(SHAPE, num_tokens=1)]


def reference(shape):
    return FAMILY.reference.make(shape)(*FAMILY.make_inputs(shape, 3))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_agrees_with_itself_and_inputs_with_their_seed(shape):
    expected = reference(shape)
    assert expected.shape == (shape.num_tokens, 64) and expected.dtype == getattr(torch, shape.dtype)
    assert FAMILY.compare(expected.clone(), expected) == ""
    first, again, other = (FAMILY.make_inputs(shape, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first.nan_to_num(), again.nan_to_num()) and not torch.equal(
        first.nan_to_num(), other.nan_to_num()
    )


@pytest.mark.parametrize("fault", ["row", "column", "nan", "no_nan", "zero_row", "dtype"])
def test_one_wrong_piece_is_found(fault):
    expected = reference(SHAPE)
    wrong = expected.clone()
    if fault == "row":
        wrong[4] *= 1.01
    elif fault == "column":
        column = expected.float().nan_to_num().norm(dim=0).argmin()
        wrong[:, column] *= 1.05  # too little to be seen in the rows
        assert FAMILY.compare(wrong, expected).startswith("1 columns")
    elif fault == "nan":
        wrong[2, 3] = float("nan")
    elif fault == "no_nan":
        wrong[-2] = 0
    elif fault == "zero_row":
        wrong[1] = 0
    else:
        wrong = wrong.half()
    assert FAMILY.compare(wrong, expected)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_our_provider_passes(monkeypatch, target):
    monkeypatch.setattr(family, "device_facts", lambda index: DeviceFacts(target, 132))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    warmed = []
    monkeypatch.setattr(family.quantize, "warm_up", lambda **call: warmed.append((call["layout"], call["permuted"])))
    rose = FAMILY.providers[0]
    assert not rose.supports(SHAPE, None)
    with emulated(monkeypatch, target) as seen:
        for shape in (*SHAPES, replace(SHAPE, batch_invariant=True)):
            if not rose.supports(shape, target):
                assert shape.activation is Activation.BF16 and target != "sm_90a"
                continue
            x, weight, _, bias = FAMILY.make_inputs(shape, 3)
            made = rose.make(shape)
            result = made(x, weight, pack_weight(weight, target=target), bias)
            assert FAMILY.compare(result, reference(shape)) == ""
    assert len(seen.configs) >= 3
    fp32, tiled = (ScaleLayout.FP32_K_MAJOR, False), (ScaleLayout.TCGEN05_128X4, False)
    assert set(warmed) == ({fp32, (ScaleLayout.ROW_MAJOR, True)} if target == "sm_90a" else {tiled})


@pytest.mark.parametrize("device", [("sm_90a", 132), ("sm_100a", 148)])
def test_the_quantizer_in_front_counts_among_what_is_checked(device):
    """It changes at a number of tokens of its own: two sizes with the same GEMM may still run other code."""
    target, sm_count = device
    configs = [FAMILY.config_of(replace(SHAPE, k=4096, num_tokens=m), target, sm_count) for m in (300, 4096, 8192)]
    quantizers = {quantizer for _, quantizer in configs}
    assert len(quantizers) == 2 and all(quantizer.hidden_size == 4096 for quantizer in quantizers)
    assert configs[0] != configs[1]
