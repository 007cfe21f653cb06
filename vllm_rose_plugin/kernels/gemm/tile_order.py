"""The order of a group's tiles in the sm_90 kernel: plain arithmetic, for the device and for tests alike."""

from collections.abc import Callable
from typing import Any

BAND = 16
"""Token tiles. All rows' tiles of one band come before the next band's: what its tokens hold is read for every few row
tiles, and more of them than that are gone from L2 by then."""


def place_of(tile: Any, *, row_tiles: int, token_tiles: Any, minimum: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Where a tile of a group lies.

    Tiles are numbered band by band; in a band row tile by row tile, and there token tile by token tile, so that blocks
    that run at the same time read the same weights.

    Args:
        tile: its number in the group, from 0 to row_tiles * token_tiles - 1.
        row_tiles, token_tiles: of the group.
        minimum: of two numbers.

    Returns:
        (row tile, token tile).
    """
    band = tile // (row_tiles * BAND)
    width = minimum(token_tiles - band * BAND, BAND)
    in_band = tile - band * (row_tiles * BAND)
    row_tile = in_band // width
    return row_tile, band * BAND + in_band - row_tile * width
