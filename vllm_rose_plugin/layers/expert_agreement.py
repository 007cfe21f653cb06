"""With expert load balancing (EPLB), all ranks of the expert-parallel group have a layer in parts, or none has.

EPLB pairs what two ranks list for a layer by its place in their lists. A layer in parts lists other tensors than a
whole one, so where ranks decided each for itself, a move would wait for ever or bring wrong bytes.
"""

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from vllm.utils.network_utils import get_ip

from vllm_rose_plugin.layers.group_exchange import STARTUP_SECONDS
from vllm_rose_plugin.memory.rendezvous import Group, group_from_process_group

T = TypeVar("T")

PHASE = "experts in locality domains"

_live: "weakref.WeakKeyDictionary[Any, _Agreements]" = weakref.WeakKeyDictionary()
"""By vLLM's coordinator of the group. Rank 0's store must outlive a question: others may still read the answer."""


class _Agreements:
    def __init__(self, coordinator: Any) -> None:
        self.group: Group = group_from_process_group(
            coordinator.cpu_group, address=get_ip(), name="locality", timeout=STARTUP_SECONDS
        )
        self.settled: dict[Hashable, Any] = {}


def settle(
    key: Hashable, own: Callable[[], T], *, describe: Callable[[T], str], differ: Callable[[T, list[str]], T]
) -> T:
    """What holds on this rank for layers that are alike, asked once for each kind of them; collective then.

    Args:
        key: kind of layer, the same on all ranks, which create their layers in the same order.
        own: what this rank would do.
        describe: that in words, the same on ranks that may go on with it.
        differ: what holds where ranks would do different things, out of this rank's wish and the words of all by rank;
            must end alike on all ranks.

    Raises:
        GroupError: ``own`` raised on some rank; the same text everywhere.
        MissingRankError: some rank didn't arrive.
    """
    from vllm.distributed.parallel_state import get_ep_group

    coordinator = get_ep_group()
    if coordinator.world_size == 1:
        return own()
    if coordinator not in _live:
        _live[coordinator] = _Agreements(coordinator)
    agreements = _live[coordinator]
    if key not in agreements.settled:
        wish: list[T] = []

        def ask() -> str:
            wish.append(own())
            return describe(wish[0])

        answers = agreements.group.agree(PHASE, ask)
        agreements.settled[key] = wish[0] if len(set(answers)) == 1 else differ(wish[0], answers)
    return agreements.settled[key]
