"""The types that kernel families pass to each other. Importing them does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MXFP8_BLOCK = 32
"""Elements along the last dimension that share one E8M0 scale."""


class ScaleLayout(Enum):
    """Where the scale of row r, block b lies."""

    ROW_MAJOR = "row_major"
    """``scales[r, b]``, shape ``[..., K/32]``."""
    TCGEN05_128X4 = "tcgen05_128x4"
    """Tiles of 128 rows x 4 blocks, in the order that tcgen05 reads."""
    FP32_K_MAJOR = "fp32_k_major"
    """``scales[b, r]`` in float32, shape ``[K/32, ceil(S/4) * 4]``: one row of tokens' scales for each block of k, as
    sm_90's kernel multiplies by them. Columns from S on hold anything."""


class TokenFormat(Enum):
    """How a GEMM kernel reads its tokens ``[S, K]``. Which one is the kernel's choice; see ``gemm/tokens.py``."""

    MXFP8_FP32_SCALES = "mxfp8_fp32_scales"
    """W8A8 on sm_90: codes ``[S, K]``, scales as ``ScaleLayout.FP32_K_MAJOR``."""
    BF16_PERMUTED = "bf16_permuted"
    """W8A16 on sm_90: bf16 ``[S, ceil(K/64) * 64]``, the k of each 64 in the order of the matrix instruction's
    registers, zero where K ends earlier."""
    MXFP8_TCGEN05 = "mxfp8_tcgen05"
    """sm_100 and later: codes ``[S, K]``, scales as ``ScaleLayout.TCGEN05_128X4``."""


class Rounding(StrEnum):
    """How a block's scale is chosen from its largest magnitude ``amax``."""

    RCEIL = "rceil"
    """Smallest power of two >= amax/448: no element saturates."""
    FLOOR = "floor"
    """``2**(floor(log2 amax) - 8)``, the OCP MX rule: elements above 448 scales saturate."""


class Activation(StrEnum):
    """What the tokens are when they meet MXFP8 weights."""

    MXFP8 = "mxfp8"
    """W8A8: quantized in blocks of 32."""
    BF16 = "bf16"
    """W8A16: kept in their own dtype (bf16, fp16 or fp32)."""


@dataclass(frozen=True)
class Mxfp8Tensor:
    """An MXFP8 tensor: E4M3 elements, one E8M0 scale for 32 of them along the last dimension."""

    codes: torch.Tensor  # [..., K] float8_e4m3fn
    scales: torch.Tensor  # uint8 (E8M0 codes; 0 is 2**-127, 255 is NaN), [..., K/32] when ROW_MAJOR; or as layout says
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR


@dataclass(frozen=True)
class RoutedTokens:
    """Tokens copied into one run per local expert."""

    tokens: Mxfp8Tensor | torch.Tensor  # [S, H]; MXFP8, or bf16/fp16/fp32 when activations stay unquantized
    expert_offsets: torch.Tensor  # [E_local + 1] int32, first row of each run; runs are padded to the GEMM tile
    expert_counts: torch.Tensor  # [E_local] int32, tokens in each run, without padding
    slots: torch.Tensor  # [T, top_k] int32, row of (token, k) in `tokens`; -1 where the expert is not here
