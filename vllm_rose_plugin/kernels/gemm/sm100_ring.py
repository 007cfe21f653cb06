"""A weight in several parts on tcgen05: the ring in shared memory through which a cluster's warps hear of their tiles.

A tile goes round as one word, its part above its ticket: from the first block's loading warp to that of a pair's other
block, and in each block from the loading warp to those that multiply and store. A place is used again only after
everybody has read it, which follows from the barriers that there are anyhow (``Sm100Config.ring``): none is needed to
say so.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from vllm_rose_plugin.kernels.gemm.config_sm100 import Sm100Config

PART_SHIFT = 28
_TICKET = (1 << PART_SHIFT) - 1
LAST = -1
"""The word behind the last tile."""


class Ring(NamedTuple):
    """Pointers to `config.ring` places each."""

    told: cute.Pointer
    """mbarriers: a word is there."""
    words: cute.Pointer
    """Int32."""
    mail: cute.Pointer
    """mbarriers of a pair's second block: a word has come from the first one."""
    letters: cute.Pointer
    """Int32."""


def init_ring(ring: Ring, config: Sm100Config) -> None:
    """One thread initializes the mbarriers."""
    for i in range(config.ring):
        cute.arch.mbarrier_init(ring.told + i, 1)
        if config.pair:
            cute.arch.mbarrier_init(ring.mail + i, 1)


@cute.jit
def next_place(place: Int32, phase: Int32, config: cutlass.Constexpr[Sm100Config]) -> tuple[Int32, Int32]:
    """The place after this one, and its phase."""
    place += 1
    if place == config.ring:
        place, phase = Int32(0), phase ^ 1
    return place, phase


@cute.jit
def read(ring: Ring, place: Int32, phase: Int32) -> Int32:
    """The word that the loading warp tells this block."""
    cute.arch.mbarrier_wait(ring.told + place, phase)
    return cute.arch.load(ring.words + place, Int32)


def part_of(word: Int32) -> Int32:
    """Of a tile's word."""
    return word >> PART_SHIFT


def ticket_of(word: Int32) -> Int32:
    """Of a tile's word: its number in the queue."""
    return word & _TICKET


@cute.jit
def tell(ring: Ring, place: Int32, word: Int32, rank: Int32, config: cutlass.Constexpr[Sm100Config]):
    """Says a word to the warps of this block, and from a pair's first block to the second."""
    with cute.arch.elect_one():
        if cutlass.const_expr(config.pair):  # noqa: SIM102  at compile time
            if rank == 0:
                send(ring.letters + place, word, ring.mail + place)
        cute.arch.store(ring.words + place, word)
        cute.arch.mbarrier_arrive(ring.told + place)


def send(place, word, barrier) -> None:
    """A word to where the second block has `place`; counts at its mbarrier."""
    cute.arch.inline_ptx(
        "{ .reg .b32 there, signal; mapa.shared::cluster.u32 there, {$r0}, 1; "
        "mapa.shared::cluster.u32 signal, {$r1}, 1; "
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], {$r2}, [signal]; }",
        read_only_args=[place, barrier, word],
    )


@cute.jit
def receive(ring: Ring, place: Int32, phase: Int32) -> Int32:
    """In a pair's second block: the word that the first one sends."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(ring.mail + place, 4)
    cute.arch.mbarrier_wait(ring.mail + place, phase)
    return cute.arch.load(ring.letters + place, Int32)
