"""The matrix instruction of the tcgen05 GEMM, and how its operands lie in shared, tensor and global memory."""

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float8E8M0FNU, Uint16
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers, blockscaled_layout, rubin_helpers

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK
from vllm_rose_plugin.kernels.gemm.config_sm100 import K_TILE, ROWS, SCALE_TILE_BYTES, Sm100Config

SCALE_WORDS = SCALE_TILE_BYTES // 2
"""A tile of scales as 16-bit elements: a TMA box has at most 256 elements along a dimension."""


def make_tiled_mma(config: Sm100Config) -> cute.TiledMma:
    """The matrix instruction, E4M3 x E4M3 with E8M0 scales of 32 k, both operands K-major in shared memory."""
    group = tcgen05.CtaGroup.TWO if config.pair else tcgen05.CtaGroup.ONE
    operands = (Float8E4M3FN, Float8E4M3FN, OperandMajorMode.K, OperandMajorMode.K, Float8E8M0FNU, MXFP8_BLOCK, group)
    shape = (ROWS * config.row_blocks, config.token_tile)
    if config.wide_k:
        return rubin_helpers.make_blockscaled_trivial_tiled_mma(*operands, (*shape, 2 * MXFP8_BLOCK))
    return blackwell_helpers.make_blockscaled_trivial_tiled_mma(*operands, shape)


def operand_layouts(tiled_mma: cute.TiledMma, config: Sm100Config):
    """(weights, tokens, a tile of scales) in shared memory as the matrix unit sees them, a tile of scales in TMEM."""
    tile = (ROWS * config.row_blocks, config.token_tile, K_TILE)
    scale_layout = blockscaled_layout.make_smem_layout_sfa(tiled_mma, tile, MXFP8_BLOCK, 1)
    return (
        blackwell_helpers.make_smem_layout_a(tiled_mma, tile, Float8E4M3FN, config.stages * config.halves),
        blackwell_helpers.make_smem_layout_b(tiled_mma, tile, Float8E4M3FN, config.stages),
        scale_layout,
        blockscaled_layout.make_tmem_layout_sfa(
            tiled_mma, tile, MXFP8_BLOCK, cute.slice_(scale_layout, (None, None, None, 0))
        ),
    )


def tma_layout(rows: int, stages: int = 1):
    """The same memory as TMA fills it: rows of 128 bytes, their 16-byte pieces swizzled."""
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
    shape = (rows, K_TILE) if stages == 1 else (rows, K_TILE, stages)
    return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))


def scale_tiles(scales: cute.Tensor) -> cute.Tensor:
    """Flat bytes as (256 words of a tile, tiles)."""
    words = cute.recast_ptr(scales.iterator, dtype=Uint16)
    return cute.make_tensor(
        words, cute.make_layout((SCALE_WORDS, scales.shape[0] // SCALE_TILE_BYTES), stride=(1, SCALE_WORDS))
    )
