import pytest
import torch

from vllm_rose_plugin.checkpoint.quantizer import CHUNK, BlockQuantizer, NonFiniteError, require_finite
from vllm_rose_plugin.kernels.contracts import Rounding
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8, quantize_mxfp8

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def awkward_values(dtype: torch.dtype) -> torch.Tensor:
    """Blocks around every power of two, at 448 and 500 times it with neighbours, subnormals, zeros, huge values."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for exponent in range(-149, 128):
        for factor in (1.0, 1.75, 1.953125):
            amax = torch.tensor(factor, dtype=torch.float64) * 2.0**exponent
            for value in (amax.float(), *(torch.nextafter(amax.float(), torch.tensor(end)) for end in (0.0, 3e38))):
                row = (torch.rand(32, generator=generator, dtype=torch.float64) * 2 - 1).float() * value
                row[5] = -value
                rows.append(row)
    rows += [torch.zeros(32), -torch.zeros(32), torch.full((32,), 1e-45)]
    values = torch.stack(rows).to(dtype)
    return values[torch.isfinite(values).all(1)].flatten()


@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_reference_bit_for_bit(dtype: torch.dtype, rounding: Rounding) -> None:
    quantizer = BlockQuantizer(rounding=rounding)
    noise = (torch.randn(1 << 16, generator=torch.Generator().manual_seed(1)) * 0.02).to(dtype)
    for values in (awkward_values(dtype), noise, noise[:32], noise[:0]):
        codes, scales, _ = quantizer(values)
        expected_codes, expected_scales = quantize_mxfp8(values, rounding=rounding)
        assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
        assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("rounding", list(Rounding))
def test_error_is_that_of_the_dequantized_weights(rounding: Rounding) -> None:
    values = (torch.randn(CHUNK, generator=torch.Generator().manual_seed(2)) * 0.3).bfloat16()
    codes, scales, error = BlockQuantizer(rounding=rounding)(values)
    difference = dequantize_mxfp8(codes, scales).double() - values.double()
    assert error.relative_rms == pytest.approx((difference.norm() / values.double().norm()).item(), rel=1e-4)
    assert error.max_error == pytest.approx(difference.abs().max().item(), rel=1e-6)
    assert error.elements == CHUNK


def test_error_of_huge_values_does_not_overflow() -> None:
    values = torch.linspace(1e37, 3e38, 64)
    error = BlockQuantizer(rounding=Rounding.RCEIL)(values)[2]
    assert 0 < error.relative_rms < 0.05


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64))
def test_non_finite_values_are_refused(dtype: torch.dtype, bad: float) -> None:
    values = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)
    require_finite(values)
    values[33] = bad
    with pytest.raises(NonFiniteError):
        require_finite(values)
    if dtype != torch.float64:
        with pytest.raises(NonFiniteError):
            BlockQuantizer(rounding=Rounding.RCEIL)(values)
