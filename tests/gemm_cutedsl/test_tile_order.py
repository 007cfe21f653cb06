"""The order of a group's tiles: each once, bands of tokens after each other, rows in a band together."""

import pytest

from vllm_rose_plugin.kernels.gemm.tile_order import BAND, place_of


@pytest.mark.parametrize("row_tiles", [1, 2, 7, 72])
@pytest.mark.parametrize("token_tiles", [1, 2, BAND - 1, BAND, BAND + 1, 2 * BAND, 3 * BAND + 5])
def test_every_tile_has_its_place(row_tiles, token_tiles):
    where = [
        place_of(tile, row_tiles=row_tiles, token_tiles=token_tiles, minimum=min)
        for tile in range(row_tiles * token_tiles)
    ]
    expected = [
        (row, token)
        for first in range(0, token_tiles, BAND)
        for row in range(row_tiles)
        for token in range(first, min(first + BAND, token_tiles))
    ]
    assert where == expected
