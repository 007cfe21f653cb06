"""Where E8M0 scales lie in memory, and the moves between the two layouts, in plain torch.

``TCGEN05_128X4`` is what tcgen05's block-scaled matrix instructions read. The ``[T, B]`` matrix of scales, B = K/32, is
cut into tiles of 128 rows x 4 blocks. Tiles follow each other along B first; within the 512 bytes of a tile the scale
of (row, block) is byte ``row % 32 * 16 + row // 32 * 4 + block``: 32 groups of 16 bytes, each holding four rows that
are 32 apart, four blocks of each. Rows and blocks that only fill up a tile are zero. Source: PTX ISA, "Scale factor
A/B layout" of tcgen05.mma with block scaling (scale_vec::1X), and cuBLAS' "1D block scaling factors layout".
"""

import torch

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, ScaleLayout

TILE_ROWS = 128
TILE_BLOCKS = 4
ROW_GROUP = 32
"""Rows that lie side by side in a tile, 16 bytes each."""


def padded_rows(num_rows: int) -> int:
    """Rows of the scale matrix with its last tile filled up."""
    return -(-num_rows // TILE_ROWS) * TILE_ROWS


def padded_blocks(num_blocks: int) -> int:
    """Blocks of a row with its last tile filled up."""
    return -(-num_blocks // TILE_BLOCKS) * TILE_BLOCKS


def scale_shape(*, num_rows: int, hidden_size: int, layout: ScaleLayout) -> tuple[int, ...]:
    """Shape of the scales of an MXFP8 ``[num_rows, hidden_size]``: ``[T, K/32]``, or flat where tiled."""
    num_blocks = hidden_size // MXFP8_BLOCK
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
