"""Which tile is whose: found on the device from the counts of all groups, by each warp for itself.

Tiles are numbered group by group, in a group by token tile, in a token tile by weight tile. Cluster c of n takes tiles
c, c + n, c + 2n … Empty groups have no tile; a group larger than the token tile has several.

The same scan finds where a group's scales begin: each group's scale rows start a new tile of 128, so group g begins at
scale tile ``sum(ceil(count / 128))`` over the groups before it. Where runs are padded to 128 rows, that is the run's
offset / 128.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from vllm_rose_plugin.kernels.gemm.config_sm100 import SCALE_ROWS, Sm100Config
from vllm_rose_plugin.kernels.ptx.memory_order import load_relaxed

WARP = 32


class Tile(NamedTuple):
    """Where a tile lies; numbers are Int32 and the same in all lanes."""

    group: Int32
    row_tile: Int32
    """Of the group's weight rows, counted by cluster."""
    first: Int32
    """The tile's first token, counted in the group."""
    scale_tile: Int32
    """Where the group's scale rows begin, in tiles of 128."""


class Schedule(NamedTuple):
    """A warp's knowledge of all groups: lane l of list entry i holds what concerns group 32i + l."""

    token_starts: list
    """Token tiles before the group."""
    scale_starts: list
    """Scale tiles before the group."""
    tiles: Int32
    """All tiles of the call, of one part of the weight where there are several."""


def make_schedule(counts: cute.Tensor, lane: Int32, config: Sm100Config) -> Schedule:
    """Reads the counts of all groups, past L1; all lanes take part.

    Read before the previous kernel has ended, counts may be anything: then the schedule is a guess. Negative ones are
    taken for 0, so that even a guess names groups that exist.

    Args:
        counts: (G,) int32.
        lane: of the warp.
    """
    token_starts, scale_starts = [], []
    token_total, scale_total = Int32(0), Int32(0)
    for first in range(0, config.num_groups, WARP):
        group = first + lane
        inside = group < config.num_groups
        place = Int32(cutlass.select_(inside, group, 0))
        count = load_relaxed(counts.iterator + place, Int32, scope="gpu")
        count = Int32(cutlass.select_(inside, cutlass.max(count, 0), 0))
        start, token_total = _before(cute.ceil_div(count, config.token_tile), lane, token_total)
        token_starts.append(start)
        start, scale_total = _before(cute.ceil_div(count, SCALE_ROWS), lane, scale_total)
        scale_starts.append(start)
    return Schedule(token_starts, scale_starts, token_total * config.part_row_tiles)


def find_tile(schedule: Schedule, index: Int32, config: Sm100Config) -> Tile:
    """The tile of that number, which must be below `tiles`; all lanes take part."""
    token_tile, row_tile = index // config.part_row_tiles, index % config.part_row_tiles
    # Groups without tiles start where the next one does, so the last group that starts here or earlier has the tile.
    group = Int32(-1)
    for start in schedule.token_starts:
        group = group + cute.arch.popc(cute.arch.vote_ballot_sync(start <= token_tile))
    first = token_tile - _of_group(schedule.token_starts, group)
    return Tile(group, row_tile, first * config.token_tile, _of_group(schedule.scale_starts, group))


def _before(number: Int32, lane: Int32, total: Int32) -> tuple[Int32, Int32]:
    """(total and the numbers of the lanes before this one, total and the numbers of all lanes)."""
    running = number
    for distance in (1, 2, 4, 8, 16):
        other = cute.arch.shuffle_sync_up(running, distance)
        running = running + Int32(cutlass.select_(lane >= distance, other, 0))
    return total + running - number, total + cute.arch.shuffle_sync(running, WARP - 1)


def _of_group(values: list, group: Int32) -> Int32:
    """What the lane of that group holds."""
    result = cute.arch.shuffle_sync(values[0], group % WARP)
    for i in range(1, len(values)):
        result = Int32(cutlass.select_(group // WARP == i, cute.arch.shuffle_sync(values[i], group % WARP), result))
    return result
