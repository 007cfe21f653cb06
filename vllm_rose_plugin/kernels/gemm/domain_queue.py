"""Queues of tiles, one for each part of a weight that lies in parts (see column_split.py): one launch for all of them.

Every part has as many tiles as any other, and a counter in global memory. A block looks up which locality domain its
SM lies in and draws tickets, numbers of tiles, from that domain's counter; once its own queue has given out its last
tile it goes on to the next domain's, and so round. Which block computes a tile is left to chance, what it computes is
not: K stays whole, so results are bit for bit those of any other order.

Blocks never wait for each other, so any number of them may run at a time. A domain without SMs, and SMs of which the
table doesn't know the domain, only shift work: the others' blocks come round to every queue. Unknown SMs are spread by
their number.

Counters are zero before a launch and zero after it, with no help from the host: a block that has drawn its last ticket
says so at one more counter, and the last one to say so puts all of them back. A launch draws its first tickets before
`griddepcontrol.wait`. So a launch must not have the counters of the one right in front of it, which may still draw;
it may have those of the one before that (``workspace.py`` takes two sets by turns in every stream). For a launch L3
starts once all blocks of the launch L2 in front of it have said `launch_dependents` (ours do after their own wait), or
have ended; by then L2's wait is over, so L1, and all its stores, was complete. With other kernels between them it
starts no earlier: kernel by kernel, one starts only after all blocks of the one in front have. Replays of a graph
follow each other without programmatic launch, so where a graph ends and begins again needs no turn.
"""

from typing import Any

LINE = 32
"""int32 from one counter to the next: a cache line of its own each."""


def counter_words(domains: int) -> int:
    """int32 of a launch: a counter for each queue, then that of the blocks that are done."""
    return (domains + 1) * LINE


def counter_of(domain: Any) -> Any:
    """Where a queue's counter lies; that of `domains` counts blocks."""
    return domain * LINE


def domain_of(*, known: Any, sm: Any, domains: int, select: Any) -> Any:
    """The queue that a block begins with.

    Args:
        known: the table's entry of its SM; -1, or a domain that has no part: it's as good as unknown.
        sm: its number.
        domains: parts.
        select: of (condition, value if so, value if not).
    """
    spread = sm % domains
    return select(known < 0, spread, select(known >= domains, spread, known))


def next_of(domain: Any, *, domains: int, select: Any) -> Any:
    """The queue to go on to."""
    return select(domain == domains - 1, 0, domain + 1)
