"""Device functions that dispatch and combine share: counts of launches, destinations, waiting for a peer, teams.

A team is what moves one row: a warp, or a whole block. `own` is the address of this rank's part of the memory.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from vllm_rose_plugin.kernels.dp_exchange.layout import MAX_BLOCKS, WORD, ExchangeShape, Layout
from vllm_rose_plugin.kernels.peer_timeout import EPOCH_SHIFT, PHASE_SHIFT
from vllm_rose_plugin.kernels.ptx.deadline import wait_until_reached
from vllm_rose_plugin.kernels.ptx.memory_order import add_acq_rel, load_relaxed, store_release
from vllm_rose_plugin.kernels.ptx.wide import pointer_to

WARP = 32


class Memory(NamedTuple):
    """The memory of all ranks, as this one has it mapped."""

    rank: Int32
    """This one."""
    base: Int64
    """Address of rank 0's part."""
    stride: Int64
    """Bytes between the parts."""


class Patience(NamedTuple):
    """What a launch does about a peer that doesn't come."""

    nanoseconds: Int64
    """Of all waits."""
    report: Int64
    """Address of the word on the host."""


def launches(own, kind: int, block, layout: Layout):
    """How many launches of a kind this rank has ended, Int64.

    Past L1, since a launch that starts early may find an older value there.
    """
    return load_relaxed(pointer_to(Int64, own + Int64(layout.count_at(kind, block)), WORD), Int64, scope="gpu")


@cute.jit
def count_launch(own: Int64, kind: cutlass.Constexpr, epoch: Int64, layout: cutlass.Constexpr):
    """Sets this block's copies of the count; a block reads its own alone, so the next launch may have any number."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    threads, _, _ = cute.arch.block_dim()
    copy = block + thread * blocks
    while copy < MAX_BLOCKS:
        pointer_to(Int64, own + Int64(layout.count_at(kind, copy)), WORD).store(epoch)
        copy += blocks * threads


def has_abandoned(own, layout: Layout):
    """Whether a wait of this rank has come to its deadline: its launches then end at once."""
    return load_relaxed(_abandoned(own, layout), Int32, scope="gpu") != 0


@cute.jit
def block_has_abandoned(own: Int64, shared: cute.Pointer, layout: cutlass.Constexpr) -> Boolean:
    """The same, with one answer for all threads of a block, since a launch that waits may be running; a barrier.

    Args:
        shared: Int32 in shared memory.
    """
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        shared.store(load_relaxed(_abandoned(own, layout), Int32, scope="gpu"))
    cute.arch.sync_threads()
    return shared.load() != 0


@cute.jit
def wait_for(
    flag: Int64,
    epoch: Int64,
    deadline: Int64,
    peer: Int32,
    phase: cutlass.Constexpr,
    own: Int64,
    report: Int64,
    layout: cutlass.Constexpr,
) -> Boolean:
    """Waits until a flag has reached the epoch; where it doesn't, leaves word on the host and gives up for good.

    Args:
        flag: address of a word in this rank's part.
        deadline: of `deadline_after`.
        peer: who writes it.
        phase: number of layout.PHASES.
        report: address of the word on the host.
    """
    reached = wait_until_reached(pointer_to(Int64, flag, WORD), epoch, deadline)
    if not reached:  # noqa: SIM102  the second asks only where the first holds
        # Only the first: who is missed later may have given up because of the same peer.
        if add_acq_rel(_abandoned(own, layout), Int32(1), scope="gpu") == 0:
            word = (epoch << EPOCH_SHIFT) | (phase << PHASE_SHIFT) | Int64(peer + 1)
            store_release(pointer_to(Int64, report, WORD), word, scope="sys")
    return reached


def ranks_of(ids: list, shape: ExchangeShape) -> list:
    """The ranks that hold experts; group_size for an id that names none."""
    each = shape.num_local_experts
    found = []
    for expert in ids:
        # Unsigned: a negative id is larger than any that exists.
        known = Uint32(expert) < Uint32(shape.num_experts)
        found.append(Int32(cutlass.select_(known, Int32(Uint32(expert) // each), Int32(shape.group_size))))
    return found


def next_rank(ranks: list, after, shape: ExchangeShape):
    """The smallest of a token's ranks above `after`, group_size where there is none."""
    best = Int32(shape.group_size)
    for rank in ranks:
        best = Int32(cutlass.select_(rank > after, cutlass.min(best, rank), best))
    return best


def local_id(expert, rank, shape: ExchangeShape):
    """The number on `rank` of an expert, -1 where it is elsewhere or none."""
    each = shape.num_local_experts
    place = Uint32(expert) - Uint32(rank * each)
    return Int32(cutlass.select_(place < Uint32(each), Int32(place), Int32(-1)))


@cute.jit
def sync_team(team: cutlass.Constexpr):
    """A barrier of the threads that move one row."""
    if cutlass.const_expr(team == WARP):
        cute.arch.sync_warp()
    else:
        cute.arch.sync_threads()


def _abandoned(own, layout: Layout):
    return pointer_to(Int32, own + layout.abandoned, WORD)
