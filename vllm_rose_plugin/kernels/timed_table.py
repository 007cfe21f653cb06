"""What is fastest at which size: measured on the ranks themselves, kept on disk.

Every rank times everything that is tried, the slowest rank's time counts, and all ranks see all times: so all choose
alike. Imports neither torch nor cutlass, but where it times.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from vllm_rose_plugin.kernels.jit.store import cache_folder, warn_once
from vllm_rose_plugin.memory.rendezvous import Group

Tuning = TypeVar("Tuning")


@dataclass(frozen=True)
class TimedTable(Generic[Tuning]):
    """Sizes, ascending, and what was fastest at each."""

    rows: tuple[tuple[int, Tuning], ...]

    def lookup(self, size: int) -> Tuning | None:
        """What serves a size: the row of the next larger one; None above the largest."""
        return next((tuning for measured, tuning in self.rows if size <= measured), None)


@dataclass(frozen=True)
class TableKind(Generic[Tuning]):
    """How the tables of one family are named and written."""

    folder: str
    """Under the cache folder."""
    unit: str
    """Of sizes, for messages."""
    what: str
    """That is measured, for messages."""
    fields: Callable[[Tuning], tuple]
    """Of a row, behind its size, as JSON has them."""
    tuning: Callable[..., Tuning]
    """Of these fields; ValueError or TypeError for what no launch may have, whoever wrote it."""

    def measured(
        self,
        *,
        group: Group,
        name: str,
        situation: str,
        sizes: Sequence[int],
        tunings: Sequence[Tuning],
        time_us: Callable[[Tuning, int], float],
        prepare: Callable[[], None] = lambda: None,
    ) -> TimedTable[Tuning]:
        """The table from disk if all ranks have the same one, otherwise a new measurement; collective.

        Args:
            group: the ranks.
            name: of the phases in which they agree.
            situation: everything the times depend on, as text, the same on all ranks.
            sizes: that are measured, ascending.
            tunings: what is tried at each.
            time_us: microseconds of a call of a size; called in the same order on all ranks.
            prepare: what may fail, or take longer on one rank than on another, before the first is timed: peers would
                wait for it in a kernel, up to their deadline.

        Raises:
            GroupError, MissingRankError: the ranks can't agree.
        """
        path = self._path(situation)
        found = group.agree(f"{name}: table", lambda: self._read(path, situation, sizes))
        if found[0] is not None and all(rows == found[0] for rows in found):
            return self._table(found[0])
        group.agree(f"{name}: compile what is timed", prepare)
        rows = []
        for size in sizes:
            times = group.agree(f"{name}: time {size} {self.unit}", partial(_time_all, time_us, tunings, size))
            slowest = [max(of_ranks) for of_ranks in zip(*times, strict=True)]
            rows.append((size, tunings[slowest.index(min(slowest))]))
        self._write(path, situation, [[size, *self.fields(best)] for size, best in rows])
        return TimedTable(tuple(rows))

    def _table(self, rows: list) -> TimedTable[Tuning]:
        return TimedTable(tuple((size, self.tuning(*fields)) for size, *fields in rows))

    def _path(self, situation: str) -> Path | None:
        folder = cache_folder()
        return folder / self.folder / f"{hashlib.sha256(situation.encode()).hexdigest()[:32]}.json" if folder else None

    def _read(self, path: Path | None, situation: str, sizes: Sequence[int]) -> list | None:
        """Rows that are whole, one for each size; anything else is measured again."""
        if path is None:
            return None
        try:
            found = json.loads(path.read_text())
            whole = [size for size, _ in self._table(found["rows"]).rows] == list(sizes)
            return found["rows"] if whole and found["situation"] == situation else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write(self, path: Path | None, situation: str, rows: list) -> None:
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".new-", delete=False) as file:
                json.dump({"situation": situation, "rows": rows}, file, indent=1)
            os.replace(file.name, path)
        except OSError as error:
            warn_once(f"can't write to {path.parent} ({error.strerror}): every start measures {self.what} again")


def replay_us(call: Callable[[], Any], *, calls: int, turns: int) -> float:
    """Microseconds of a call, as the replay of a graph: the best of some turns, since ranks don't start together.

    Args:
        call: on torch's current stream; collective.
        calls: in the graph.
        turns: replays.
    """
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(turns):
        call()  # the ranks meet
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3 / calls)
    return best


def _time_all(time_us: Callable[[Tuning, int], float], tunings: Sequence[Tuning], size: int) -> list[float]:
    return [time_us(tuning, size) for tuning in tunings]
