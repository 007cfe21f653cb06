"""The formats of tokens, index by index."""

import math

import pytest
import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, ScaleLayout, TokenFormat
from vllm_rose_plugin.kernels.gemm.tokens import (
    PackedTokens,
    fp32_scales,
    pack_tokens,
    permute_k,
    slot_of,
    source_of,
    unpack_tokens,
    unpermute_k,
)
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8, quantize_mxfp8
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import row_major


def test_the_order_is_that_of_the_matrix_instructions_registers():
    """m64nNk16 with A in registers: lane q of a quad has k 2q, 2q+1 of the row in its first register, 2q+8, 2q+9 in
    its third. Lane q reads codes 16q .. 16q+15 of a row; word w of them serves instruction w: bytes 0 and 2 become the
    first register (one AND of the word's neighbours), bytes 1 and 3 the third."""
    for q in range(4):
        for word in range(4):
            registers = {0: (2 * q, 2 * q + 1), 2: (2 * q + 8, 2 * q + 9)}
            for register, places in registers.items():
                for place, byte in zip(places, (0, 2) if register == 0 else (1, 3), strict=True):
                    assert source_of(16 * word + place) == 16 * q + 4 * word + byte
    assert sorted(map(source_of, range(64))) == list(range(64))
    assert all(slot_of(source_of(slot)) == slot for slot in range(64))


@pytest.mark.parametrize("k", [32, 64, 96, 192, 2688])
def test_permuted_rows(k):
    x = torch.arange(1, 2 * k + 1, dtype=torch.float32).view(2, k)
    y = permute_k(x)
    width = math.ceil(k / 64) * 64
    assert y.shape == (2, width)
    for slot in range(width):
        source = slot // 64 * 64 + source_of(slot % 64)
        expected = x[:, source] if source < k else torch.zeros(2)
        assert torch.equal(y[:, slot], expected)
    assert torch.equal(unpermute_k(y, k=k), x)


@pytest.mark.parametrize("num_rows", [1, 3, 4, 6])
def test_float32_scales(num_rows):
    codes = torch.randint(0, 256, (num_rows, 5), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    codes[0, :4] = torch.tensor([0, 1, 254, 255])
    scales = fp32_scales(codes)
    assert scales.shape == (5, math.ceil(num_rows / 4) * 4) and scales.is_contiguous()
    for row in range(num_rows):
        for block in range(5):
            code, value = codes[row, block].item(), scales[block, row].item()
            assert math.isnan(value) if code == 255 else value == math.ldexp(1.0, code - 127)
    assert scales[:, num_rows:].isnan().all()
    tensor = Mxfp8Tensor(torch.zeros(num_rows, 160).to(torch.float8_e4m3fn), scales, ScaleLayout.FP32_K_MAJOR)
    assert torch.equal(row_major(tensor).scales, codes)


@pytest.mark.parametrize("token_format", TokenFormat)
@pytest.mark.parametrize("k", [32, 96, 192])
def test_what_a_kernel_reads_is_what_was_quantized(token_format, k):
    x = torch.randn(37, k, generator=torch.Generator().manual_seed(k)).to(torch.float16)
    x[3] *= 1e4
    quantized = Mxfp8Tensor(*quantize_mxfp8(x, rounding="floor"))
    expected = dequantize_mxfp8(quantized.codes, quantized.scales)
    for given in (x, quantized):
        packed = pack_tokens(given, token_format=token_format, rounding="floor")
        assert (packed.num_rows, packed.k) == (37, k)
        assert torch.equal(unpack_tokens(packed), expected)
    if token_format is TokenFormat.BF16_PERMUTED:
        plain = pack_tokens(x, token_format=token_format, activation="bf16")
        assert torch.equal(unpack_tokens(plain), x.to(torch.bfloat16).float())


def test_ends_of_the_range_in_bf16():
    """bf16 has fp32's exponents: codes are exact down to 2**-133; 2**128, which quantizing can make, is inf."""
    x = torch.zeros(3, 32)
    x[0, 0], x[1, 0], x[2, 0] = 3.38e38, 2.0**-130, 2.0**-136
    values = unpack_tokens(pack_tokens(x, token_format=TokenFormat.BF16_PERMUTED))
    codes, scales = quantize_mxfp8(x)
    assert values[0, 0] == math.inf and dequantize_mxfp8(codes, scales)[0, 0] == math.inf
    assert values[1, 0] == 2.0**-130 and values[2, 0] == 0


def test_what_does_not_fit_is_named():
    x = torch.zeros(4, 64)
    with pytest.raises(ValueError, match=r"K a multiple of 32, got \(4, 48\)"):
        pack_tokens(x[:, :48], token_format=TokenFormat.BF16_PERMUTED)
    with pytest.raises(ValueError, match="holds quantized tokens only, got activation='bf16'"):
        pack_tokens(x, token_format=TokenFormat.MXFP8_TCGEN05, activation=Activation.BF16)
    codes, scales = quantize_mxfp8(x)
    with pytest.raises(ValueError, match="kernels read"):
        PackedTokens.of(Mxfp8Tensor(codes, scales))
    with pytest.raises(ValueError, match=r"must have scales ScaleLayout.ROW_MAJOR"):
        pack_tokens(Mxfp8Tensor(codes, scales, ScaleLayout.TCGEN05_128X4), token_format=TokenFormat.MXFP8_FP32_SCALES)
    with pytest.raises(ValueError, match=r"float32 scales of codes \(4, 64\) are \(2, 4\), got \(4, 2\)"):
        row_major(Mxfp8Tensor(codes, scales.float(), ScaleLayout.FP32_K_MAJOR))
