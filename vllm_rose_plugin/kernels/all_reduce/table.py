"""Which algorithm and how many blocks serve which size: measured on the ranks themselves, kept on disk.

Every rank times every candidate, the slowest rank's time counts, and all ranks see all times: so all choose alike, as
they must, since ranks with different numbers of blocks would wait for each other for ever.
"""

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from vllm_rose_plugin.kernels.all_reduce.config import Algorithm, Tuning
from vllm_rose_plugin.kernels.all_reduce.layout import MAX_BLOCKS
from vllm_rose_plugin.kernels.jit.store import cache_folder, warn_once
from vllm_rose_plugin.memory.rendezvous import Group

SIZES = tuple(2**i for i in range(13, 27))
"""Bytes that are measured: 8 KiB to 64 MiB."""
BLOCKS = (1, 2, 4, 8, 16, 24, 36, 48, 64)
FOLDER = "all_reduce"
"""Under the cache folder."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Sizes in bytes, ascending, and what was fastest at each."""

    rows: tuple[tuple[int, Tuning | None], ...]

    def lookup(self, num_bytes: int) -> Tuning | None:
        """What serves a size: the row of the next larger one, which may be None as well; None above the largest."""
        return next((tuning for size, tuning in self.rows if num_bytes <= size), None)


def candidates(*, sm_count: int) -> tuple[Tuning, ...]:
    """What is tried at every size; at most half of the SMs."""
    return tuple(Tuning(algorithm, blocks) for algorithm in Algorithm for blocks in BLOCKS if blocks <= sm_count // 2)


def measured_table(
    *,
    group: Group,
    situation: str,
    sizes: Sequence[int],
    tunings: Sequence[Tuning | None],
    time_us: Callable[[Tuning | None, int], float],
    name: str = "all-reduce",
) -> Table:
    """The table from disk if all ranks have the same one, otherwise a new measurement; collective.

    Args:
        group: the ranks.
        situation: everything the times depend on, as text, the same on all ranks: device, driver, ranks, access, dtype,
            fingerprint of the kernel's sources.
        sizes: bytes.
        tunings: what is tried; None: what the caller does without a launch of its own kind.
        time_us: microseconds of a call of so many bytes; called in the same order on all ranks.
        name: for messages.

    Raises:
        GroupError, MissingRankError: the ranks can't agree.
    """
    path = _path(situation)
    found = group.agree(f"{name}: table", lambda: _read(path, situation, sizes))
    if found[0] is not None and all(rows == found[0] for rows in found):
        return _table(found[0])
    rows = []
    for size in sizes:
        times = group.agree(f"{name}: time {size} bytes", partial(_time_all, time_us, tunings, size))
        slowest = [max(of_ranks) for of_ranks in zip(*times, strict=True)]
        best = tunings[slowest.index(min(slowest))]
        rows.append([size, *((best.algorithm.value, best.blocks) if best else (None, 0))])
    _write(path, situation, rows)
    return _table(rows)


def _time_all(
    time_us: Callable[[Tuning | None, int], float], tunings: Sequence[Tuning | None], size: int
) -> list[float]:
    return [time_us(tuning, size) for tuning in tunings]


def _table(rows: list) -> Table:
    return Table(tuple((size, Tuning(Algorithm(kind), blocks) if kind else None) for size, kind, blocks in rows))


def _path(situation: str) -> Path | None:
    folder = cache_folder()
    return folder / FOLDER / f"{hashlib.sha256(situation.encode()).hexdigest()[:32]}.json" if folder else None


def _read(path: Path | None, situation: str, sizes: Sequence[int]) -> list | None:
    """Rows that are whole, one for each size, with numbers of blocks that a launch may have; else it is measured again.

    A launch of more blocks than there are flags for would write past them, whoever wrote the file.
    """
    if path is None:
        return None
    try:
        found = json.loads(path.read_text())
        table = _table(found["rows"])
        whole = [size for size, _ in table.rows] == list(sizes)
        fit = all(tuning is None or tuning.blocks in range(1, MAX_BLOCKS + 1) for _, tuning in table.rows)
        return found["rows"] if whole and fit and found["situation"] == situation else None
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
        warn_once(f"can't write to {path.parent} ({error.strerror}): every start measures all-reduce again")
