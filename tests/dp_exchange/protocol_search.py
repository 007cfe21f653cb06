"""The protocol of an exchange as a small machine, and a search of everything it can do.

Ranks run launches, a launch is tasks that run side by side, a task is stores, waits and reads of one row or flag each;
reads take two steps, so that a store in between is seen. The search goes through every interleaving: what it checks
holds for all of them. `Faults` takes one rule of the protocol away, to show that it would be noticed.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Any

STORE, WAIT, READ = "store", "wait", "read"
Op = tuple[str, tuple, object]
Destinations = tuple[tuple[frozenset[int], ...], ...]
"""[epoch - 1][rank]: where the rank's token goes."""


class ProtocolError(AssertionError):
    """What the protocol is there to prevent."""


@dataclass(frozen=True)
class Faults:
    """Rules left out."""

    one_half: bool = False
    """Dispatch of all epochs uses the same rows and plans."""
    silent_when_empty: bool = False
    """No plan for a peer that gets no token."""
    token_flag_early: bool = False
    """The flag comes before the row."""
    no_token_wait: bool = False
    """Rows are read once the plan is there."""
    no_plan_wait: bool = False
    """Plans are read without looking at their flags."""
    row_flag_early: bool = False
    """The combined row's flag comes before the row."""


def program(
    rank: int, size: int, destinations: Destinations, faults: Faults, *, side_by_side: bool, blocks: int = 0
) -> list:
    """The launches of a rank, each a list of tasks.

    Args:
        side_by_side: every store, wait and read of a launch is a task, else all of it is one.
        blocks: of a step in one launch for dispatch and one for combine, a task each: a block sends its share, waits
            for all plans, then receives its share. 0: halves are launches of their own.
    """
    launches = []
    for epoch, of_ranks in enumerate(destinations, start=1):
        half = 0 if faults.one_half else epoch & 1
        sends = []
        for peer in range(size):
            sent = peer in of_ranks[rank]
            if sent or not faults.silent_when_empty:
                plan = (STORE, ("plan", peer, half, rank), (epoch, sent))
                sends.append([plan, (STORE, ("plan flag", peer, rank), epoch)])
        for peer in sorted(of_ranks[rank]):
            row = (STORE, ("row", peer, half, rank), (epoch, rank))
            flag = (STORE, ("token flag", peer, rank), epoch)
            sends.append([flag, row] if faults.token_flag_early else [row, flag])
        senders = [peer for peer in range(size) if rank in of_ranks[peer]]
        plans = [] if faults.no_plan_wait else [[(WAIT, ("plan flag", rank, peer), epoch)] for peer in range(size)]
        known = [[(READ, ("plan", rank, half, peer), (epoch, peer in senders))] for peer in range(size)]
        rows = []
        for peer in senders:
            wait = [] if faults.no_token_wait else [(WAIT, ("token flag", rank, peer), epoch)]
            rows.append([*wait, (READ, ("row", rank, half, peer), (epoch, peer))])
        back = []
        for peer in senders:
            row = (STORE, ("combined", peer, rank), (epoch, rank))
            flag = (STORE, ("row flag", peer, rank), epoch)
            back.append([flag, row] if faults.row_flag_early else [row, flag])
        sums = [
            [(WAIT, ("row flag", rank, peer), epoch), (READ, ("combined", rank, peer), (epoch, peer))]
            for peer in sorted(of_ranks[rank])
        ]
        halves = [sends, plans, known, rows, back, sums]
        if blocks:
            halves = [
                [[*chain(*sends[b::blocks], *plans, *known, *rows[b::blocks])] for b in range(blocks)],
                [[*chain(*back[b::blocks], *sums[b::blocks])] for b in range(blocks)],
            ]
        for tasks in halves:
            tasks = [[step for op in task for step in ([op, op] if op[0] == READ else [op])] for task in tasks if task]
            if tasks:
                apart = side_by_side or blocks
                launches.append(tasks if apart else [[step for task in tasks for step in task]])
    return launches


def search(size: int, destinations: Destinations, *, faults: Faults | None = None, **how: Any) -> int:
    """Goes through every state that can be reached; the number of them. `how` is for :func:`program`.

    Every word has one writer, so the places that ranks have come to say what is in memory.

    Raises:
        ProtocolError: a rank reads what isn't of its epoch, or what changes meanwhile, or all wait for each other.
    """
    how = {"side_by_side": False, **how}
    programs = [program(r, size, destinations, faults or Faults(), **how) for r in range(size)]
    start = tuple((0, tuple(0 for _ in launches[0])) for launches in programs)
    seen, stack = {start}, [(start, {})]
    while stack:
        state, memory = stack.pop()
        moved = False
        for rank, (launch, places) in enumerate(state):
            if launch == len(programs[rank]):
                continue
            for task, place in enumerate(places):
                steps = programs[rank][launch][task]
                if place == len(steps):
                    continue
                kind, cell, value = steps[place]
                if kind == WAIT and memory.get(cell, 0) < value:
                    continue
                if kind == READ and memory.get(cell) != value:
                    raise ProtocolError(f"rank {rank} finds {memory.get(cell)} in {cell} instead of {value}")
                moved = True
                after = _step(state, rank, task, programs[rank])
                if after not in seen:
                    seen.add(after)
                    stack.append((after, {**memory, cell: value} if kind == STORE else memory))
        if not moved and any(launch < len(programs[rank]) for rank, (launch, _) in enumerate(state)):
            raise ProtocolError(f"all ranks wait, at {state}")
    return len(seen)


def _step(state: tuple, rank: int, task: int, launches: list) -> tuple:
    launch, places = state[rank]
    places = (*places[:task], places[task] + 1, *places[task + 1 :])
    if all(place == len(steps) for place, steps in zip(places, launches[launch], strict=True)):
        launch += 1
        places = tuple(0 for _ in launches[launch]) if launch < len(launches) else ()
    return (*state[:rank], (launch, places), *state[rank + 1 :])
