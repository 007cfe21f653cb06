"""Waiting that ends: a poll on a peer's flag gives up at a time of the GPU's global timer.

The timer counts nanoseconds and steps by up to a microsecond, so it is for deadlines, not for measuring kernels.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int64

from vllm_rose_plugin.kernels.ptx.memory_order import load_acquire


def deadline_after(nanoseconds):
    """The timer's value `nanoseconds` from now, Int64."""
    return Int64(cute.arch.globaltimer()) + Int64(nanoseconds)


def is_past(deadline):
    """Whether the timer has reached a deadline."""
    return Int64(cute.arch.globaltimer()) >= deadline


@cute.jit
def wait_until_reached(flag: cute.Pointer, epoch, deadline: Int64, scope: cutlass.Constexpr = "sys") -> Boolean:
    """Polls a flag with acquire order until it has reached an epoch or the deadline is past.

    Epochs are compared by their distance, so they may wrap around.

    Args:
        flag: word of epoch's type in memory this GPU can read, written with release order.
        epoch: the value to wait for, Int32 or Int64.
        deadline: from `deadline_after`.
        scope: "gpu" or "sys".

    Returns:
        Whether the flag was reached. Where not, nothing that the peer wrote may be read.
    """
    reached = load_acquire(flag, type(epoch), scope=scope) - epoch >= 0
    waiting = not reached
    while waiting:
        reached = load_acquire(flag, type(epoch), scope=scope) - epoch >= 0
        waiting = (not reached) and (not is_past(deadline))
    return reached
