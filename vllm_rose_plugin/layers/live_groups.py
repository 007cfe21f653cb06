"""The all-reduce groups that are alive in this process: what the worker asks about them.

Imports no kernel, since the worker asks at every step, whether there are any or not.
"""

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_rose_plugin.layers.group_all_reduce import GroupAllReduce

_live: "weakref.WeakValueDictionary[str, GroupAllReduce]" = weakref.WeakValueDictionary()


def add(name: str, group: "GroupAllReduce") -> None:
    """Note that `group` serves the group that vLLM calls `name`; forgotten when it dies."""
    _live[name] = group


def discard(name: str) -> None:
    """Forget a group that is destroyed."""
    _live.pop(name, None)


def any_alive() -> bool:
    """Whether there is any."""
    return bool(_live)


def begin_step() -> None:
    """Before a step with requests.

    Raises:
        PeerTimeoutError: see :func:`check`.
    """
    for group in list(_live.values()):
        group.begin_step()


def check() -> None:
    """Raise if a kernel of any group gave up waiting for a peer. Touches no stream.

    Raises:
        PeerTimeoutError: names the group, the peer and the setting of the deadline.
    """
    for group in list(_live.values()):
        group.check()


def snapshot() -> dict[str, str]:
    """vLLM's name of a group to what serves it and why."""
    return {name: group.why for name, group in sorted(_live.items())}
