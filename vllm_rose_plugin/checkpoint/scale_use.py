"""Whether the elements of MXFP8 blocks are what their scales make of a weight."""

import torch

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Rounding

_LEAST_CODE = {Rounding.RCEIL: 0x76, Rounding.FLOOR: 0x78}  # E4M3 224 and 256
_LEAST_CODE_OF_OTHERS = 0x70  # 128
_SHARE_OF_OTHERS = 0.1
_LOW_SCALE, _HIGH_SCALE = 127 - 64, 127 + 24  # 2**-64: all elements below 3e-17; 2**24: the largest above 3e9
_TOP_BITS = -0x7F7F7F7F7F7F7F80  # 0x80 in each of eight bytes


class ScaleUse:
    """Adds up what the blocks of one weight show.

    A block's scale follows from its largest magnitude a. ``rceil`` takes the least 2**s with a <= 448 * 2**s, so that
    a / 2**s lies in (224, 448], and its E4M3 code in 0x76 (224, to which values up to 232 round) ... 0x7e (448).
    ``floor`` takes s = floor(log2 a) - 8, so that a / 2**s lies in [256, 512), saturated to 448: 0x78 ... 0x7e. Code 0
    (2**-127) also stands for smaller scales and for blocks of zeros, and allows any elements. So in a checkpoint that
    names our converter one block below its bound is a fault. Others have rules of their own for zeros and may leave a
    binade unused: there more than a tenth of the blocks must stay below 128.

    Which power of two a weight needs, the elements don't say. Only scales at which half of a weight's blocks would be
    nothing (below 2**-64) or enormous (above 2**24) are told from right ones, whoever wrote them.
    """

    def __init__(self, rounding: Rounding | None) -> None:
        """Args:
        rounding: the one that our converter recorded; None for checkpoints of others.
        """
        self._ours = rounding is not None
        self._least = _LEAST_CODE[rounding] if rounding is not None else _LEAST_CODE_OF_OTHERS
        self._low = self._blocks = 0
        self._histogram = torch.zeros(256, dtype=torch.int64)  # scale codes, without blocks of zeros

    def add(self, magnitude: torch.Tensor, scales: torch.Tensor) -> None:
        """Look at whole blocks.

        Args:
            magnitude: uint8 ``[n * 32]``, E4M3 codes without their sign, 0x7f excluded.
            scales: uint8 ``[n]``.
        """
        # Eight bytes at once: a byte gets its top bit when a code reaches the bound. No carry, since 0x7f + 0x10 < 256.
        words = magnitude.view(torch.int64) + (0x80 - self._least) * 0x0101010101010101
        reached = words.view(-1, MXFP8_BLOCK // 8)  # (n, 4)
        union = reached[:, 0] | reached[:, 1] | reached[:, 2] | reached[:, 3]
        low = (union & _TOP_BITS) == 0
        counted = scales.to(torch.int64)
        if bool(low.any()):
            places = low.nonzero().squeeze(1)
            empty = magnitude.view(-1, MXFP8_BLOCK)[places].amax(1) == 0
            violating = scales[places] != 0
            self._low += int((violating if self._ours else violating & ~empty).sum())
            kept = torch.ones_like(low)
            kept[places[empty]] = False
            counted = counted[kept]
        self._blocks += counted.numel()
        self._histogram += torch.bincount(counted, minlength=256)

    def fault(self) -> str | None:
        """What is wrong, or None."""
        if self._low and (self._ours or self._low > _SHARE_OF_OTHERS * self._blocks):
            bound = {0x76: 224, 0x78: 256, 0x70: 128}[self._least]
            return (
                f"{self._low} blocks don't fit their scales: their largest element is below {bound}, "
                "so elements or scales are not the ones that belong there"
            )
        if self._blocks:
            half = int((self._histogram.cumsum(0) * 2 < self._blocks).sum())  # the median code
            if not _LOW_SCALE <= half <= _HIGH_SCALE:
                side = "below" if half < _LOW_SCALE else "above"
                return f"its scales are far off: half of them are 2**{half - 127} or {side}, implausible for a weight"
        return None
