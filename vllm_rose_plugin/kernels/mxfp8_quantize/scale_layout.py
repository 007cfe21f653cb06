"""Where E8M0 scales lie in memory, and the moves between row-major and tiled ones, in plain torch.

``TCGEN05_128X4`` is what tcgen05's block-scaled matrix instructions read. The ``[T, B]`` matrix of scales, B = K/32, is
cut into tiles of 128 rows x 4 blocks. Tiles follow each other along B first; within the 512 bytes of a tile the scale
of (row, block) is byte ``row % 32 * 16 + row // 32 * 4 + block``: 32 groups of 16 bytes, each holding four rows that
are 32 apart, four blocks of each. Rows and blocks that only fill up a tile are zero. Source: PTX ISA, "Scale factor
A/B layout" of tcgen05.mma with block scaling (scale_vec::1X), and cuBLAS' "1D block scaling factors layout".
"""

import torch

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Mxfp8Tensor, ScaleLayout

TILE_ROWS = 128
TILE_BLOCKS = 4
ROW_GROUP = 32
"""Rows that lie side by side in a tile, 16 bytes each."""
PERMUTED_K = 64
"""Elements along k within which bf16 tokens are permuted; see ``gemm/tokens.py``."""
FP32_COLUMNS = 4
"""Float32 scales have rows of a multiple of so many, 16 bytes, as the bulk tensor copy wants it."""


def padded_rows(num_rows: int) -> int:
    """Rows of the scale matrix with its last tile filled up."""
    return -(-num_rows // TILE_ROWS) * TILE_ROWS


def padded_blocks(num_blocks: int) -> int:
    """Blocks of a row with its last tile filled up."""
    return -(-num_blocks // TILE_BLOCKS) * TILE_BLOCKS


def permuted_size(hidden_size: int) -> int:
    """Elements of a row of permuted tokens."""
    return -(-hidden_size // PERMUTED_K) * PERMUTED_K


def fp32_pitch(num_rows: int) -> int:
    """Columns of float32 scales of num_rows tokens."""
    return -(-num_rows // FP32_COLUMNS) * FP32_COLUMNS


def scale_shape(*, num_rows: int, hidden_size: int, layout: ScaleLayout) -> tuple[int, ...]:
    """Shape of the scales of an MXFP8 ``[T, K]``: ``[T, K/32]``, flat if tiled, ``[K/32, ceil(T/4) * 4]`` in fp32."""
    num_blocks = hidden_size // MXFP8_BLOCK
    if layout is ScaleLayout.FP32_K_MAJOR:
        return (num_blocks, fp32_pitch(num_rows))
    if layout is ScaleLayout.ROW_MAJOR:
        return (num_rows, num_blocks)
    return (padded_rows(num_rows) * padded_blocks(num_blocks),)


def tile_scales(scales: torch.Tensor) -> torch.Tensor:
    """Row-major scales in the order of ``TCGEN05_128X4``.

    Args:
        scales: uint8 ``[T, B]``.

    Returns:
        uint8 ``[ceil(T/128) * 128 * ceil(B/4) * 4]``, zero where a tile holds no scale.
    """
    num_rows, num_blocks = scales.shape
    padded = scales.new_zeros(padded_rows(num_rows), padded_blocks(num_blocks))
    padded[:num_rows, :num_blocks] = scales
    rows, blocks = padded.shape
    tiles = padded.view(rows // TILE_ROWS, TILE_ROWS // ROW_GROUP, ROW_GROUP, blocks // TILE_BLOCKS, TILE_BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)  # (row tile, block tile, row % 32, row // 32, block)


def untile_scales(tiled: torch.Tensor, *, num_rows: int, num_blocks: int) -> torch.Tensor:
    """The inverse of :func:`tile_scales`; what fills up the tiles is dropped.

    Args:
        tiled: uint8, flat.
        num_rows, num_blocks: T and B.

    Returns:
        uint8 ``[T, B]``.

    Raises:
        ValueError: the size of ``tiled`` isn't that of T x B scales.
    """
    rows, blocks = padded_rows(num_rows), padded_blocks(num_blocks)
    if tiled.numel() != rows * blocks:
        raise ValueError(
            f"tiled scales of {num_rows} rows x {num_blocks} blocks are {rows * blocks} bytes, got {tiled.numel()}"
        )
    tiles = tiled.view(rows // TILE_ROWS, blocks // TILE_BLOCKS, ROW_GROUP, TILE_ROWS // ROW_GROUP, TILE_BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, blocks)[:num_rows, :num_blocks].contiguous()


def row_major(x: Mxfp8Tensor) -> Mxfp8Tensor:
    """x, an MXFP8 ``[T, K]``, with row-major scales.

    Raises:
        ValueError: scales that don't have the size of their layout.
    """
    if x.layout is ScaleLayout.ROW_MAJOR:
        return x
    num_rows, hidden_size = x.codes.shape
    if x.layout is ScaleLayout.TCGEN05_128X4:
        scales = untile_scales(x.scales, num_rows=num_rows, num_blocks=hidden_size // MXFP8_BLOCK)
        return Mxfp8Tensor(x.codes, scales)
    shape = scale_shape(num_rows=num_rows, hidden_size=hidden_size, layout=x.layout)
    if tuple(x.scales.shape) != shape:
        raise ValueError(f"float32 scales of codes {tuple(x.codes.shape)} are {shape}, got {tuple(x.scales.shape)}")
    bits = x.scales[:, :num_rows].t().contiguous().view(torch.int32)
    return Mxfp8Tensor(x.codes, (bits >> 23).to(torch.uint8))  # 2**-127 has exponent field 0, NaN has 255
