"""Stream-K: how the blocks of a launch share the work on one weight. Plain integers, of the host or of the device.

Work is counted in units, passes of the main loop: unit u is pass u % passes of tile u // passes. A block takes
neighbouring units, all blocks the same number of them; what is left for the last ones is less, or nothing. So a block
has the last passes of one tile, then whole tiles, then the first passes of another, and walks over them backwards:

- Where its units end inside a tile, that part comes first. It hands these sums over, to the block that has the tile's
  last pass. All its other parts end with their tile, so it hands over once in a launch, and waits for nobody before.
- The part its units begin with comes last. Where it begins inside a tile, the block adds what the blocks in front of it
  hand over: they did so first. It waits for lower blocks only, which start no later, and none of which is waiting
  itself before it has handed over: the launch ends however few blocks run at a time.

After the source: Osama, Merrill, Cecka, Garland, Owens, "Stream-K", PPoPP 2023; the order of the walk is ours.
"""

from typing import Any, NamedTuple

Number = Any
"""int, or an Int32 of the DSL."""
MOST_UNITS = 2**31 - 2**17
"""Products and sums of indices stay within 32 bits up to here, with any grid under 2**16 blocks."""


class Part(NamedTuple):
    """Passes of one tile, that one block has."""

    tile: Number
    first_pass: Number
    num_passes: Number
    others: Number
    """Of a part with its tile's last pass: so many blocks, right in front of this one, have the passes before."""

    def ends_early(self, passes: int) -> Any:
        """Whether another block has the tile's last pass."""
        return self.first_pass + self.num_passes < passes


def share_of(*, units: Number, blocks: Number) -> Number:
    """Units of a block."""
    return (units + blocks - 1) // blocks


def range_of(*, block: Number, share: Number, units: Number, minimum: Any = min) -> tuple[Number, Number]:
    """(first, end) of a block's units; equal where there are none."""
    return minimum(block * share, units), minimum((block + 1) * share, units)


def last_part(*, first: Number, end: Number, block: Number, share: Number, passes: int, minimum: Any = min) -> Part:
    """The part at the end of a block's units, of which there is one at least. The next one ends where it begins."""
    tile = (end - 1) // passes
    stop = end - tile * passes
    num_passes = minimum(stop, end - first)
    return Part(tile, stop - num_passes, num_passes, block - tile * passes // share)


def parts_of(*, block: int, blocks: int, tiles: int, passes: int) -> list[Part]:
    """All parts of a block in the order of its walk, on the host."""
    units = tiles * passes
    share = share_of(units=units, blocks=blocks)
    first, end = range_of(block=block, share=share, units=units)
    found = []
    while end > first:
        found.append(last_part(first=first, end=end, block=block, share=share, passes=passes))
        end -= found[-1].num_passes
    return found
