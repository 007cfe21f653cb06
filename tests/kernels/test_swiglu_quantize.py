"""SwiGLU against the float64 oracle."""

import kernel_oracle as oracle
import numpy as np
import pytest
import torch

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.swiglu_quantize.reference import swiglu_quantize


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_result(seed, limit, dtype):
    x = (torch.randn(9, 192, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
    expected = oracle.swiglu(oracle.to64(x), limit)
    y = swiglu_quantize(x, activation="bf16", limit=limit)
    assert isinstance(y, torch.Tensor) and y.dtype == dtype and y.shape == (9, 96)
    tolerance = torch.finfo(dtype).eps / 2 * 1.01 + 1e-6
    np.testing.assert_allclose(oracle.to64(y), expected, rtol=tolerance, atol=torch.finfo(dtype).smallest_normal)


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_quantized_result_is_that_of_the_fp32_product(rounding):
    x = torch.randn(9, 192, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16) * 3
    y = swiglu_quantize(x, rounding=rounding)
    assert isinstance(y, Mxfp8Tensor)
    product = swiglu_quantize(x.float(), activation="bf16")
    codes, scales = oracle.quantize(product, rounding)
    np.testing.assert_array_equal(oracle.canonical(y.codes), codes)
    np.testing.assert_array_equal(y.scales.numpy(), scales)
    expected = oracle.swiglu(oracle.to64(x))
    half_step = np.repeat(oracle.E8M0[scales], 32, -1) * 16 if rounding == "rceil" else np.inf
    assert (np.abs(oracle.dequantize(y.codes, y.scales) - expected) <= half_step * 1.001).all()


def test_gate_comes_first():
    x = torch.tensor([[20.0] * 32 + [-3.0] * 32])
    assert torch.allclose(swiglu_quantize(x, activation="bf16"), torch.tensor(-60.0))


def test_extreme_gates_and_zero_rows():
    x = torch.zeros(4, 64)
    x[1, :32], x[1, 32:] = -1e30, 1e30
    x[2, :32], x[2, 32:] = 200.0, 2.0
    x[3] = float("nan")
    y = swiglu_quantize(x, activation="bf16")
    assert (y[:2] == 0).all() and (y[2] == 400).all() and y[3].isnan().all()
    quantized = swiglu_quantize(x)
    assert (quantized.codes[0].view(torch.uint8) == 0).all() and quantized.scales.flatten().tolist()[0] == 0
    assert quantized.scales[3].item() == 255


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match="even last dimension, got 63"):
        swiglu_quantize(torch.zeros(1, 63))
    with pytest.raises(ValueError, match="multiple of 32, got 48"):
        swiglu_quantize(torch.zeros(1, 96))
