"""MXFP8 quantization in plain torch: the oracle of every kernel that reads or writes E8M0 scales.

Scale maths work on the bits of the IEEE-754 binary32 number, never on exp2/log2, which are inexact in floating point
for some of the 256 codes. Source of the format: OCP Microscaling Formats (MX) v1.0.

Nothing here computes with a subnormal operand, so that a process which flushes them (``torch.set_flush_denormal``, a
library that sets the bit behind one's back, a worker thread that inherited it) gets the same bits as one which doesn't.
"""

import functools

import torch

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Rounding

E4M3_MAX = 448.0
E8M0_NAN = 255
_MANTISSA_OF_448 = 0x600000  # 448 = 1.75 * 2**8
_E4M3_EXPONENT = 8
_MAGNITUDE = 0x7FFFFFFF
_MANTISSA = 0x7FFFFF
_INF = 0x7F800000
_NAN = 0x7FC00000


def e8m0_to_float(codes: torch.Tensor) -> torch.Tensor:
    """Values of E8M0 codes.

    Args:
        codes: uint8, any shape.

    Returns:
        float32, same shape: ``2**(code - 127)``, exactly; NaN for 255. Code 0 is the subnormal 2**-127.

    Raises:
        TypeError: codes are not uint8.
    """
    if codes.dtype != torch.uint8:
        raise TypeError(f"E8M0 codes must be uint8, got {codes.dtype}")
    code = codes.to(torch.int32)
    bits = code << 23
    bits = torch.where(code == 0, 0x00400000, bits)
    bits = torch.where(code == E8M0_NAN, _NAN, bits)
    return bits.view(torch.float32)


def e8m0_from_amax(amax: torch.Tensor, *, rounding: Rounding | str = Rounding.RCEIL) -> torch.Tensor:
    """Scale codes of blocks whose largest magnitude is ``amax``.

    Args:
        amax: float32 >= 0, any shape; NaN and inf are allowed.
        rounding: see :class:`Rounding`.

    Returns:
        uint8, same shape. Zero and everything whose scale would lie below 2**-127 give 0; NaN and inf give 255.

    Raises:
        TypeError: amax is not float32.
    """
    rounding = Rounding(rounding)
    if amax.dtype != torch.float32:
        raise TypeError(f"amax must be float32, got {amax.dtype}")
    bits = amax.contiguous().view(torch.int32) & _MAGNITUDE
    exponent = bits >> 23
    code = exponent - _E4M3_EXPONENT
    if rounding is Rounding.RCEIL:
        code = code + ((bits & _MANTISSA) > _MANTISSA_OF_448).to(torch.int32)
    code = code.clamp(min=0)  # subnormal amax has exponent field 0: its scale is far below 2**-127
    return torch.where(exponent == 255, E8M0_NAN, code).to(torch.uint8)


def quantize_mxfp8(x: torch.Tensor, *, rounding: Rounding | str = Rounding.RCEIL) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize along the last dimension in blocks of 32.

    Args:
        x: bf16, fp16 or fp32, ``[..., K]``, K a multiple of 32.
        rounding: see :class:`Rounding`.

    Returns:
        ``(codes, scales)``: float8_e4m3fn ``[..., K]`` rounded to nearest even, and uint8 E8M0 ``[..., K/32]``.
        A block that holds NaN or inf gets scale 255 and NaN elements; the other blocks are unaffected.

    Raises:
        ValueError: K is not a multiple of 32.
        TypeError: x is not floating point of at most 32 bits.
    """
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"MXFP8 quantization takes bf16, fp16 or fp32, got {x.dtype}")
    if x.shape[-1] % MXFP8_BLOCK:
        raise ValueError(f"MXFP8 needs a last dimension that is a multiple of {MXFP8_BLOCK}, got {x.shape[-1]}")
    blocks = x.float().contiguous().unflatten(-1, (x.shape[-1] // MXFP8_BLOCK, MXFP8_BLOCK))
    # Magnitudes order like their bits, NaN above inf: an integer maximum is exact and sees every NaN.
    amax = (blocks.view(torch.int32) & _MAGNITUDE).amax(-1).view(torch.float32)
    scales = e8m0_from_amax(amax, rounding=rounding)
    scaled = _divide_by_scale(blocks, scales.unsqueeze(-1))
    # Casts saturate in some versions of torch and give NaN in others; clamp does the former and keeps NaN.
    codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2), scales


def _divide_by_scale(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x / 2**(scale - 127), exact or below E4M3's range; no operand is a subnormal."""
    bits = x.view(torch.int32)
    power = 127 - scales.to(torch.int32)  # -127 .. 127
    # A subnormal is mantissa * 2**-149. Written as a normal number it is 2**127 too large, so the power is 127 less.
    lifted = (bits & _MANTISSA).float() * 2.0**-22
    lifted = torch.where(bits < 0, -lifted, lifted)
    subnormal = (bits & _INF) == 0
    x = torch.where(subnormal, lifted, x)
    power = torch.where(subnormal, power - 127, power)
    half = power >> 1  # two factors, since 2**power itself can be a subnormal
    first, second = ((p + 127) << 23 for p in (half, power - half))
    result = x * first.view(torch.float32) * second.view(torch.float32)
    return torch.where(scales == E8M0_NAN, float("nan"), result)


def dequantize_mxfp8(codes: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of an MXFP8 tensor with row-major scales.

    Args:
        codes: float8_e4m3fn ``[..., K]``.
        scales: uint8 ``[..., K/32]``.
        dtype: of the result; the product is formed in float32, where it is exact unless its magnitude is at least
            2**128 (then inf).

    Raises:
        TypeError: wrong dtypes.
        ValueError: shapes that don't belong together.
    """
    if codes.dtype != torch.float8_e4m3fn:
        raise TypeError(f"MXFP8 codes must be float8_e4m3fn, got {codes.dtype}")
    if scales.dtype != torch.uint8:
        raise TypeError(f"E8M0 codes must be uint8, got {scales.dtype}")
    expected = (*codes.shape[:-1], codes.shape[-1] // MXFP8_BLOCK)
    if codes.shape[-1] % MXFP8_BLOCK or tuple(scales.shape) != expected:
        raise ValueError(f"MXFP8 codes {tuple(codes.shape)} need scales {expected}, got {tuple(scales.shape)}")
    elements = codes.contiguous().view(torch.uint8).to(torch.int32).unflatten(-1, (expected[-1], MXFP8_BLOCK))
    index = elements | (scales.to(torch.int32) << 8).unsqueeze(-1)
    return _products(codes.device).index_select(0, index.flatten()).view(codes.shape).to(dtype)


@functools.cache
def _products(device: torch.device) -> torch.Tensor:
    """float32 [65536]: the product of every scale code (high byte) with every element code (low byte).

    One table lookup is exact for all of them, subnormal products included, and faster on a CPU than converting the
    elements and multiplying.
    """
    with torch.inference_mode(False):
        elements = (
            torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float().view(torch.int32)
        )
        scales = torch.arange(256, dtype=torch.int32, device="cpu").unsqueeze(1)
        sign, magnitude = elements & ~_MAGNITUDE, elements & _MAGNITUDE
        exponent = (magnitude >> 23) + scales - 127
        mantissa = magnitude & _MANTISSA
        normal = (exponent << 23) | mantissa
        # No bit is lost: elements are multiples of 2**-9, so products are multiples of 2**-136.
        subnormal = (mantissa | 0x800000) >> (1 - exponent).clamp(0, 24)
        product = torch.where(exponent > 0, normal, subnormal)
        product = torch.where(exponent >= 255, _INF, product)
        product = torch.where(magnitude == 0, 0, product) | sign
        product = torch.where((magnitude > _INF) | (scales == E8M0_NAN), _NAN, product)
        return product.flatten().view(torch.float32).to(device)
