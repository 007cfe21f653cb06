"""How a step's launches move rows, by its size: measured on the ranks themselves, kept on disk.

Every rank times every way, the slowest rank's time counts, and all ranks see all times, so all choose alike. They need
not: a launch works whatever the others' do. Imports neither torch nor cutlass.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from vllm_rose_plugin.kernels.timed_table import TableKind, TimedTable

SHARES = (1, 2, 4)
"""A launch has all blocks that it may have, or one of so many."""


class Way(StrEnum):
    """What moves a row."""

    ONE_LAUNCH = "one launch"
    """A block, with sending and receiving in one launch where the caller lets both be together."""
    BLOCKS = "blocks"
    """A block."""
    WARPS = "warps"
    """A warp."""


@dataclass(frozen=True)
class Tuning:
    """How the launches of a step are made."""

    way: Way
    share: int = 1
    """One of SHARES: with the vectors that a thread has under way, it sets how many bytes are."""


Table = TimedTable[Tuning]
"""Numbers of tokens of a step, and what was fastest at each."""


def sizes(max_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens that are measured."""
    return (*(2**i for i in range(max_tokens.bit_length()) if 2**i < max_tokens), max_tokens)


def candidates() -> Iterator[Tuning]:
    """What is tried at every size; a step that is too large for one launch has two of the same blocks."""
    for way in Way:
        for share in SHARES:
            yield Tuning(way, share)


def _tuning(way: str, share: int) -> Tuning:
    if share not in SHARES:
        raise ValueError(f"share={share} must be one of {SHARES}")
    return Tuning(Way(way), share)


KIND = TableKind(
    folder="dp_exchange",
    unit="tokens",
    what="dispatch and combine",
    fields=lambda tuning: (tuning.way.value, tuning.share),
    tuning=_tuning,
)
