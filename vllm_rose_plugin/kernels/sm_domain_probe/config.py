"""What the probe is compiled for. Imports neither torch nor cutlass."""

from dataclasses import dataclass

BLOCKS_PER_SM = 4
"""Of a launch, for every SM of the partition: blocks that find an SM taken go to another."""


@dataclass(frozen=True)
class ProbeConfig:
    """The only one: nothing of it depends on a call."""

    threads: int = 1024
    """As many as a block can have, so that few blocks share an SM."""
    nanoseconds: int = 20_000
    """That a block stays on its SM."""
