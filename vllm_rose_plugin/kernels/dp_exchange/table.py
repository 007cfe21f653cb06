"""How a step's launches move rows, by its size: measured on the ranks themselves, kept on disk.

Every rank times every way, the slowest rank's time counts, and all ranks see all times, so all choose alike. They need
not: a launch works whatever the others' do. Imports neither torch nor cutlass.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from vllm_rose_plugin.kernels.jit.store import cache_folder, warn_once
from vllm_rose_plugin.memory.rendezvous import Group

FOLDER = "dp_exchange"
"""Under the cache folder."""
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


@dataclass(frozen=True)
class Table:
    """Numbers of tokens of a step, ascending, and what was fastest at each."""

    rows: tuple[tuple[int, Tuning], ...]

    def lookup(self, step_tokens: int) -> Tuning | None:
        """What serves a step: the row of the next larger size; None above the largest."""
        return next((tuning for size, tuning in self.rows if step_tokens <= size), None)


def sizes(max_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens that are measured."""
    return (*(2**i for i in range(max_tokens.bit_length()) if 2**i < max_tokens), max_tokens)


def candidates() -> Iterator[Tuning]:
    """What is tried at every size; a step that is too large for one launch has two of the same blocks."""
    for way in Way:
        for share in SHARES:
            yield Tuning(way, share)


def measured_table(
    *,
    group: Group,
    situation: str,
    sizes: Sequence[int],
    tunings: Sequence[Tuning],
    time_us: Callable[[Tuning, int], float],
) -> Table:
    """The table from disk if all ranks have the same one, otherwise a new measurement; collective.

    Args:
        group: the ranks.
        situation: everything the times depend on, as text, the same on all ranks.
        sizes: tokens of a step.
        tunings: what is tried.
        time_us: microseconds of a step with so many tokens of each rank; called in the same order on all ranks.

    Raises:
        GroupError, MissingRankError: the ranks can't agree.
    """
    path = _path(situation)
    found = group.agree("dp exchange: table", lambda: _read(path, situation))
    if found[0] is not None and all(rows == found[0] for rows in found):
        return _table(found[0])
    rows = []
    for size in sizes:
        times = group.agree(f"dp exchange: time {size} tokens", partial(_time_all, time_us, tunings, size))
        slowest = [max(of_ranks) for of_ranks in zip(*times, strict=True)]
        best = tunings[slowest.index(min(slowest))]
        rows.append([size, best.way.value, best.share])
    _write(path, situation, rows)
    return _table(rows)


def _time_all(time_us: Callable[[Tuning, int], float], tunings: Sequence[Tuning], size: int) -> list[float]:
    return [time_us(tuning, size) for tuning in tunings]


def _table(rows: list) -> Table:
    for _, _, share in rows:
        if share not in SHARES:
            raise ValueError(f"share={share} must be one of {SHARES}")
    return Table(tuple((int(size), Tuning(Way(way), share)) for size, way, share in rows))


def _path(situation: str) -> Path | None:
    folder = cache_folder()
    return folder / FOLDER / f"{hashlib.sha256(situation.encode()).hexdigest()[:32]}.json" if folder else None


def _read(path: Path | None, situation: str) -> list | None:
    """Rows that are whole; anything else is measured again."""
    if path is None:
        return None
    try:
        found = json.loads(path.read_text())
        _table(found["rows"])
        return found["rows"] if found["situation"] == situation else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path | None, situation: str, rows: list) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".new-", delete=False) as file:
            json.dump({"situation": situation, "rows": rows}, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        warn_once(f"can't write to {path.parent} ({error.strerror}): every start measures dispatch and combine again")
