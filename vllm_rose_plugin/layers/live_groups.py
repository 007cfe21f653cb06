"""What waits for other ranks in this process, all-reduce groups and managers of our all-to-all: asked by the worker.

Imports no kernel, since the worker asks at every step, whether there are any or not.
"""

import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vllm_rose_plugin.layers.group_all_reduce import GroupAllReduce


class Watched(Protocol):
    """What is only looked at."""

    def check(self) -> None:
        """Raise PeerTimeoutError if a kernel gave up waiting for a peer; touches no stream."""


_live: "weakref.WeakValueDictionary[str, GroupAllReduce]" = weakref.WeakValueDictionary()
_watched: "weakref.WeakSet[Watched]" = weakref.WeakSet()


def add(name: str, group: "GroupAllReduce") -> None:
    """Note that `group` serves the group that vLLM calls `name`; forgotten when it dies."""
    _live[name] = group


def watch(thing: Watched) -> None:
    """Look at `thing` too, around every step, until it dies."""
    _watched.add(thing)


def discard(name: str) -> None:
    """Forget a group that is destroyed."""
    _live.pop(name, None)


def find(name: str) -> "GroupAllReduce | None":
    """What serves the all-reduce group that vLLM calls `name`; None: vLLM's own."""
    return _live.get(name)


def any_alive() -> bool:
    """Whether there is any."""
    return bool(_live) or bool(_watched)


def begin_step() -> None:
    """Before a step with requests.

    Raises:
        PeerTimeoutError: see :func:`check`.
    """
    for group in list(_live.values()):
        group.begin_step()
    for thing in list(_watched):
        thing.check()


def check() -> None:
    """Raise if a kernel of anything here gave up waiting for a peer. Touches no stream.

    Raises:
        PeerTimeoutError: names the group, the peer and the setting of the deadline.
    """
    for thing in [*_live.values(), *_watched]:
        thing.check()


def snapshot() -> dict[str, str]:
    """vLLM's name of an all-reduce group to what serves it and why."""
    return {name: group.why for name, group in sorted(_live.items())}
