"""Which tile comes next, from counts that only the device knows.

Tiles are numbered group by group, in a group as tile_order.py says. Empty groups have no tiles.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from vllm_rose_plugin.kernels.gemm.tile_order import place_of

_WARP = 32
_LAST = _WARP - 1
_LOADS = 4
"""Of counts, and of offsets, under way at a time: the producer has few registers."""


class Tile(NamedTuple):
    """Coordinates of a tile."""

    group: Int32
    """Negative past the last tile; the others have no meaning then."""
    row_tile: Int32
    first_token: Int32
    """Row of the token operand."""
    num_tokens: Int32
    """That belong to the group, from there on; may exceed the tile."""


class Schedule:
    """The table of one block, built and read by a single warp, all of whose lanes take part in every call."""

    def __init__(self, *, num_groups: int, row_tiles: int, token_tile: int):
        self.num_groups = num_groups
        self.row_tiles = row_tiles
        self.token_tile = token_tile
        self.chunks = -(-num_groups // _WARP)
        """Of 32 groups: one for each lane."""

    @property
    def words(self) -> int:
        """Int32 of shared memory."""
        return 3 * self.chunks * _WARP

    @cute.jit
    def build(self, table: cute.Tensor, expert_counts: cute.Tensor, expert_offsets: cute.Tensor):
        """Fills the table: (3, groups) of tiles up to and with a group, its tokens, its first row."""
        lane = cute.arch.lane_idx()
        loaded: list = []
        before = Int32(0)
        for c in cutlass.range_constexpr(self.chunks):
            if cutlass.const_expr(c % _LOADS == 0):
                loaded = []
                for ahead in cutlass.range_constexpr(min(_LOADS, self.chunks - c)):
                    group = (c + ahead) * _WARP + lane
                    count, offset = Int32(0), Int32(0)
                    if group < self.num_groups:
                        count, offset = expert_counts[group], expert_offsets[group]
                    loaded.append((count, offset))
            count, offset = loaded[c % _LOADS]
            tiles = cute.ceil_div(count, self.token_tile) * self.row_tiles
            for step in cutlass.range_constexpr(5):
                distance = cutlass.const_expr(1 << step)
                left = cute.arch.shuffle_sync_up(tiles, distance, mask_and_clamp=0)
                if lane >= distance:
                    tiles += left
            tiles += before
            group = c * _WARP + lane
            table[0, group] = tiles
            table[1, group] = count
            table[2, group] = offset
            before = cute.arch.shuffle_sync(tiles, _LAST)
        cute.arch.sync_warp()

    def total(self, table: cute.Tensor) -> Int32:
        """All tiles."""
        return table[0, self.chunks * _WARP - 1]

    @cute.jit
    def find(self, table: cute.Tensor, tile: Int32, chunk: Int32) -> tuple[Tile, Int32]:
        """The coordinates of a tile.

        Args:
            chunk: what the call for an earlier tile gave, 0 at first.
        """
        while chunk < self.chunks - 1 and table[0, chunk * _WARP + _LAST] <= tile:
            chunk += 1
        passed = cute.arch.vote_ballot_sync(table[0, chunk * _WARP + cute.arch.lane_idx()] <= tile)
        group = chunk * _WARP + cute.arch.popc(passed)
        result = Tile(Int32(-1), Int32(0), Int32(0), Int32(0))
        if group < self.num_groups:
            first = Int32(0)
            if group > 0:
                first = table[0, group - 1]
            count = table[1, group]
            token_tiles = cute.ceil_div(count, self.token_tile)
            row_tile, token = place_of(
                tile - first, row_tiles=self.row_tiles, token_tiles=token_tiles, minimum=cutlass.min
            )
            done = token * self.token_tile
            result = Tile(group, row_tile, table[2, group] + done, count - done)
        return result, chunk
