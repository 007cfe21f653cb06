"""E8M0 scales, quantize and dequantize against the float64 oracle."""

import kernel_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rose_plugin.kernels.mxfp8_quantize.reference import (
    dequantize_mxfp8,
    e8m0_from_amax,
    e8m0_to_float,
    quantize_mxfp8,
)

ROUNDINGS = ["rceil", "floor"]
ALL_CODES = torch.arange(256, dtype=torch.uint8)


def block_with_amax(amax: np.float32, seed: int = 0) -> torch.Tensor:
    """fp32 [32]: amax somewhere, negated or not, the rest smaller."""
    rng = np.random.default_rng([seed, int(np.float32(amax).view(np.uint32))])
    block = rng.uniform(-1, 1, 32).astype(np.float32) * (amax if np.isfinite(amax) else np.float32(1))
    block[rng.integers(32)] = amax * rng.choice([-1, 1])
    return torch.from_numpy(block.astype(np.float32))


def assert_matches_oracle(x: torch.Tensor, rounding: str) -> None:
    codes, scales = quantize_mxfp8(x, rounding=rounding)
    expected_codes, expected_scales = oracle.quantize(x, rounding)
    np.testing.assert_array_equal(scales.numpy(), expected_scales)
    np.testing.assert_array_equal(oracle.canonical(codes), expected_codes)


def test_all_scale_codes_have_their_value():
    values = e8m0_to_float(ALL_CODES)
    assert values.dtype == torch.float32
    np.testing.assert_array_equal(oracle.to64(values), oracle.E8M0)
    assert values[0].item() == 2.0**-127
    assert values[255].isnan()


def test_every_product_of_scale_and_element():
    codes = ALL_CODES.view(torch.float8_e4m3fn).repeat(256, 1)  # every element under every scale
    scales = ALL_CODES.unsqueeze(1).repeat(1, 8)
    expected = oracle.dequantize(codes, scales)
    expected = np.where(np.abs(expected) >= 2.0**128, np.copysign(np.inf, expected), expected)
    values = oracle.to64(dequantize_mxfp8(codes, scales))
    np.testing.assert_array_equal(values, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(values[number]), np.signbit(expected[number]))
    assert np.isnan(values[255]).all()


def test_every_product_survives_flushed_subnormals(flush_denormal):
    codes = ALL_CODES.view(torch.float8_e4m3fn).repeat(256, 1)
    scales = ALL_CODES.unsqueeze(1).repeat(1, 8)
    expected = dequantize_mxfp8(codes, scales).view(torch.int32)
    flush_denormal()
    assert torch.equal(dequantize_mxfp8(codes, scales).view(torch.int32), expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_amax_around_448_times_a_power_of_two(rounding):
    blocks = []
    for k in range(-140, 121):  # below -118 the scale is at its floor; 448 * 2**120 is inf in fp32
        with np.errstate(over="ignore"):
            middle = np.float32(np.ldexp(448.0, k))
        blocks += [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
    assert_matches_oracle(torch.stack([block_with_amax(amax) for amax in blocks]), rounding)


def test_the_neighbours_of_448_differ_by_one_code_under_rceil():
    for k in range(-119, 120):
        middle = torch.tensor(448.0 * 2.0**k)
        codes = [
            e8m0_from_amax(amax).item()
            for amax in (torch.nextafter(middle, torch.tensor(0.0)), middle, torch.nextafter(middle, middle * 2))
        ]
        assert codes == [k + 127, k + 127, k + 128]


def test_amax_500_saturates_under_floor_only():
    for e in range(-118, 119):
        block = torch.full((1, 32), 500.0 * 2.0**e)
        codes, scales = quantize_mxfp8(block, rounding="rceil")
        assert scales.item() == e + 128 and codes.float()[0, 0] == 256.0  # 250 lies midway, the even one is 256
        codes, scales = quantize_mxfp8(block, rounding="floor")
        assert scales.item() == e + 127 and codes.float()[0, 0] == 448.0


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_zero_and_subnormal_blocks(rounding):
    rng = np.random.default_rng(7)
    zero = np.zeros((1, 32), np.float32)
    zero[0, ::2] = -0.0
    subnormal = rng.integers(0, 2**23, (40, 32)).astype(np.uint32)
    subnormal[:20] >>= rng.integers(0, 23, (20, 1)).astype(np.uint32)
    subnormal |= (rng.integers(0, 2, subnormal.shape) << 31).astype(np.uint32)
    mixed = subnormal.view(np.float32).copy()
    mixed[:, 0] = np.ldexp(1.0, rng.integers(-126, -100, 40)).astype(np.float32)
    x = torch.from_numpy(np.concatenate([zero, subnormal.view(np.float32), mixed]))
    assert_matches_oracle(x, rounding)
    codes, scales = quantize_mxfp8(x[:1], rounding=rounding)
    assert scales.item() == 0 and (codes.float() == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_quantize_survives_flushed_subnormals(rounding, dtype, flush_denormal):
    g = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (64, 64), generator=g).to(torch.int32)
    bits[:32] &= ~0x7F000000  # exponent fields 0 and 1: subnormals beside the smallest normal numbers
    bits[16:24] &= ~0x7F800000
    x = torch.where(bits.view(torch.float32).isfinite(), bits, 0)
    if dtype is torch.bfloat16:
        x = (x >> 16).to(torch.int16)
    x = x.view(dtype)
    codes, scales = quantize_mxfp8(x, rounding=rounding)
    assert (codes[16:24].float() != 0).any()
    flush_denormal()
    flushed_codes, flushed_scales = quantize_mxfp8(x, rounding=rounding)
    assert torch.equal(flushed_scales, scales)
    assert torch.equal(flushed_codes.view(torch.uint8), codes.view(torch.uint8))


@settings(deadline=None, max_examples=150)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32), rounding=st.sampled_from(ROUNDINGS))
def test_any_bit_patterns(bits, rounding):
    assert_matches_oracle(torch.from_numpy(np.array([bits], np.uint32).view(np.float32)), rounding)


@settings(deadline=None, max_examples=150)
@given(
    exponent=st.integers(-149, 119),
    mantissas=st.lists(st.floats(-2, 2, width=32), min_size=32, max_size=32),
    rounding=st.sampled_from(ROUNDINGS),
)
def test_blocks_of_one_magnitude(exponent, mantissas, rounding):
    values = np.ldexp(np.array([mantissas], np.float64), exponent).astype(np.float32)
    assert_matches_oracle(torch.from_numpy(values), rounding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_value_spoils_its_block_alone(dtype, bad):
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(5)).to(dtype)
    clean_codes, clean_scales = quantize_mxfp8(x)
    x[1, 40] = bad
    codes, scales = quantize_mxfp8(x)
    assert scales[1, 1] == 255 and codes[1, 32:64].float().isnan().all()
    assert dequantize_mxfp8(codes, scales)[1, 32:64].isnan().all()
    keep = torch.ones(4, 96, dtype=torch.bool)
    keep[1, 32:64] = False
    assert torch.equal(codes.view(torch.uint8)[keep], clean_codes.view(torch.uint8)[keep])
    assert torch.equal(scales[keep[:, ::32]], clean_scales[keep[:, ::32]])


def test_inputs_that_are_not_contiguous():
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(6)).t()
    assert_matches_oracle(x, "rceil")
    codes, scales = quantize_mxfp8(x)
    strided = codes.t().contiguous().t()
    assert torch.equal(dequantize_mxfp8(strided, scales), dequantize_mxfp8(codes, scales))


def test_empty_input():
    codes, scales = quantize_mxfp8(torch.zeros(0, 64))
    assert codes.shape == (0, 64) and scales.shape == (0, 2)
    assert dequantize_mxfp8(codes, scales).shape == (0, 64)


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match="multiple of 32, got 33"):
        quantize_mxfp8(torch.zeros(2, 33))
    with pytest.raises(TypeError, match="float64"):
        quantize_mxfp8(torch.zeros(2, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match="nearest"):
        quantize_mxfp8(torch.zeros(2, 32), rounding="nearest")
    codes, scales = quantize_mxfp8(torch.zeros(2, 64))
    with pytest.raises(ValueError, match=r"need scales \(2, 2\), got \(2, 1\)"):
        dequantize_mxfp8(codes, scales[:, :1])
    with pytest.raises(TypeError, match="int8"):
        dequantize_mxfp8(codes, scales.view(torch.int8))
