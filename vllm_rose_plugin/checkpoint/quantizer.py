"""The converter's quantizer: the reference's `quantize_mxfp8`, bit for bit, in reused buffers and with its error."""

import math
from dataclasses import dataclass

import torch

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Rounding
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import E4M3_MAX, e8m0_from_amax, e8m0_to_float

CHUNK = 1 << 19
"""Elements quantized at once: the float32 buffers stay in the last-level cache."""
_NAN_CODE = 255


@dataclass
class QuantizationError:
    """Sums from which a layer's error follows; add them up over chunks with :meth:`add`."""

    error_squares: float = 0.0
    weight_squares: float = 0.0
    max_error: float = 0.0
    elements: int = 0

    def add(self, other: "QuantizationError") -> None:
        self.error_squares += other.error_squares
        self.weight_squares += other.weight_squares
        self.max_error = max(self.max_error, other.max_error)
        self.elements += other.elements

    @property
    def relative_rms(self) -> float:
        """RMS of the error over RMS of the weights; 0 where all weights are zero."""
        return math.sqrt(self.error_squares / self.weight_squares) if self.weight_squares else 0.0


class NonFiniteError(ValueError):
    """NaN or inf among the values."""


class BlockQuantizer:
    """Quantizes runs of whole blocks; owns about 8 MB of buffers, so each thread has its own."""

    def __init__(self, *, rounding: Rounding) -> None:
        self._rounding = rounding
        self._values = torch.empty(CHUNK)  # float32
        self._scaled = torch.empty(CHUNK)
        self._decoded = torch.empty(CHUNK)
        self._bits = torch.empty(CHUNK, dtype=torch.int16)
        self._amax = torch.empty(CHUNK // MXFP8_BLOCK)
        self._codes = torch.empty(CHUNK, dtype=torch.float8_e4m3fn)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, QuantizationError]:
        """Quantize and measure.

        Args:
            x: bf16, fp16 or fp32, ``[n]``, contiguous, n a multiple of 32 and at most :data:`CHUNK`.

        Returns:
            ``(codes, scales, error)``: float8_e4m3fn ``[n]`` in a buffer that the next call overwrites, uint8
            ``[n/32]``, and the error against x.

        Raises:
            NonFiniteError: x holds NaN or inf.
        """
        n = x.numel()
        blocks = n // MXFP8_BLOCK
        values = x if x.dtype == torch.float32 else self._values[:n].copy_(x)
        scaled = torch.abs(values, out=self._scaled[:n])
        amax = torch.amax(scaled.view(blocks, MXFP8_BLOCK), 1, out=self._amax[:blocks])
        scales = e8m0_from_amax(amax, rounding=self._rounding)  # (n/32,) uint8
        if blocks and int(scales.max()) == _NAN_CODE:
            raise NonFiniteError
        # 2**(127 - code) is a normal float32 for every code below 255, and the product is exact or far below E4M3's
        # smallest value, so one multiplication gives what the reference gets with two.
        inverse = ((254 - scales.to(torch.int32)) << 23).view(torch.float32)
        torch.mul(values.view(blocks, MXFP8_BLOCK), inverse.unsqueeze(1), out=scaled.view(blocks, MXFP8_BLOCK))
        if self._rounding is Rounding.FLOOR:  # rceil never exceeds 448
            unclamped = scaled.clone()
            scaled.clamp_(-E4M3_MAX, E4M3_MAX)
        else:
            unclamped = scaled
        codes = self._codes[:n].copy_(scaled)
        return codes, scales, self._measure(values, unclamped, codes, scales)

    def _measure(
        self, values: torch.Tensor, scaled: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
    ) -> QuantizationError:
        n, blocks = codes.numel(), scales.numel()
        if n == 0:
            return QuantizationError()
        # E4M3 bits shifted into a half float read as value / 256, subnormals included; five times faster than
        # torch's own conversion.
        bits = self._bits[:n].copy_(codes.view(torch.int8))
        bits.bitwise_left_shift_(7).bitwise_and_(~0x4000)
        decoded = self._decoded[:n].copy_(bits.view(torch.float16))
        error = torch.add(scaled, decoded, alpha=-256.0, out=scaled)
        error.view(blocks, MXFP8_BLOCK).mul_(e8m0_to_float(scales).unsqueeze(1))
        low, high = torch.aminmax(error)
        error_squares = float(torch.dot(error, error))
        weight_squares = float(torch.dot(values, values))
        if not math.isfinite(error_squares + weight_squares):  # squares beyond float32
            error_squares = float(error.double().square().sum())
            weight_squares = float(values.double().square().sum())
        return QuantizationError(error_squares, weight_squares, max(-float(low), float(high)), n)


def require_finite(x: torch.Tensor) -> None:
    """Refuse NaN and inf in a contiguous float tensor of any dtype.

    Raises:
        NonFiniteError: one is there.
    """
    if x.numel() == 0:
        return
    if x.dtype in (torch.bfloat16, torch.float16):
        # The exponent field all ones, seen as integers: faster than isfinite, which makes a mask first.
        limit = 0x7F80 if x.dtype == torch.bfloat16 else 0x7C00
        if int((x.view(torch.int16) & 0x7FFF).max()) >= limit:
            raise NonFiniteError
    elif not bool(torch.isfinite(x).all()):
        raise NonFiniteError
