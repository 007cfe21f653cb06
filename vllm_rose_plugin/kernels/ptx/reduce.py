"""Reductions and exchanges within a warp, or within equal parts of one."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

WARP = 32


def warp_sum(value, *, lanes: int = WARP):
    """Sum over groups of `lanes` neighbouring lanes, in every lane of the group, in an order that never changes.

    All 32 lanes of the warp must take part.

    Args:
        value: a 32-bit number.
        lanes: 1, 2, 4, 8, 16 or 32.
    """
    _check(lanes)
    return cute.arch.warp_reduction_sum(value, threads_in_group=lanes)


def warp_sums(values, *, lanes: int = WARP):
    """`warp_sum` of several numbers, step by step together: their shuffles don't wait for each other."""
    _check(lanes)
    offset = lanes // 2
    while offset:
        values = [value + cute.arch.shuffle_sync_bfly(value, offset=offset) for value in values]
        offset //= 2
    return values


def warp_max(value, *, lanes: int = WARP):
    """Maximum over groups of `lanes` neighbouring lanes, as `warp_sum`. A NaN loses against a number."""
    _check(lanes)
    return cute.arch.warp_reduction_max(value, threads_in_group=lanes)


def lane_exchange(fragment, *, lane, source, lanes: int):
    """The fragment of another lane of the group.

    Args:
        fragment: register tensor of a multiple of 32 bits.
        lane: this lane's index in its group.
        source: index in the group of the lane to read; outside of [0, lanes) gives this lane's own fragment.
        lanes: size of a group.

    Returns:
        A register tensor like fragment.
    """
    _check(lanes)
    words = cute.recast_tensor(fragment, Int32)
    received = cute.make_rmem_tensor(fragment.layout, fragment.element_type)
    received_words = cute.recast_tensor(received, Int32)
    inside = (source >= 0) & (source < lanes)
    warp_lane = cute.arch.lane_idx() - lane + cutlass.select_(inside, source, lane)
    for i in range(cute.size(words)):
        received_words[i] = cute.arch.shuffle_sync(words[i], warp_lane)
    return received


def _check(lanes: int) -> None:
    if lanes not in (1, 2, 4, 8, 16, 32):
        raise ValueError(f"a group of {lanes} lanes; it must be a power of two up to {WARP}")
