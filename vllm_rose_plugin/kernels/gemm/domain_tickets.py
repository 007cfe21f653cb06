"""Tickets on the device: what one warp of a block, or of a cluster, draws from the counters of :mod:`domain_queue`."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from vllm_rose_plugin.kernels.gemm.domain_queue import counter_of, domain_of, next_of
from vllm_rose_plugin.kernels.ptx.memory_order import add_acq_rel


def _select(condition, yes, no) -> Int32:
    return Int32(cutlass.select_(condition, Int32(yes), Int32(no)))


@cute.jit
def first_domain(sm_domains: cute.Tensor, domains: cutlass.Constexpr[int]) -> Int32:
    """The domain of this block's SM.

    Args:
        sm_domains: (SMs) int32.
        domains: parts of the weight.
    """
    sm = cute.arch.smid()
    known = Int32(-1)
    if sm < sm_domains.shape[0]:
        known = Int32(sm_domains[sm])
    return domain_of(known=known, sm=sm, domains=domains, select=_select)


def draw(counters: cute.Tensor, domain: Int32) -> Int32:
    """The next ticket of a queue, in the first lane; 0 in the others. Nothing waits for it before its first use."""
    return cute.arch.inline_ptx(
        "{ .reg .pred first; setp.eq.s32 first, {$r1}, 0; mov.b32 {$w0}, 0; "
        "@first atom.relaxed.gpu.global.add.u32 {$w0}, [{$r0}], 1; }",
        write_only_types=[Int32],
        read_only_args=[counters.iterator + counter_of(domain), cute.arch.lane_idx()],
    )


@cute.jit
def settle(
    counters: cute.Tensor,
    ticket: Int32,
    domain: Int32,
    left: Int32,
    length: Int32,
    domains: cutlass.Constexpr[int],
) -> tuple[Int32, Int32, Int32]:
    """What was drawn, or a ticket of the next queue that has one.

    Args:
        counters: of the launch.
        ticket: of :func:`draw`, from the queue of `domain`.
        left: queues behind that one.
        length: tiles of a queue.
        domains: parts.

    Returns:
        (ticket, its domain, queues behind it); the ticket is `length` or more where no queue has any.
    """
    ticket = cute.arch.shuffle_sync(ticket, 0)
    while ticket >= length and left > 0:
        domain = next_of(domain, domains=domains, select=_select)
        left -= 1
        ticket = cute.arch.shuffle_sync(draw(counters, domain), 0)
    return ticket, domain, left


@cute.jit
def leave(counters: cute.Tensor, drawers: Int32, domains: cutlass.Constexpr[int]):
    """Says that this warp draws no more; the last of `drawers` warps puts all counters back to zero."""
    if cute.arch.lane_idx() == 0:
        gone = add_acq_rel(counters.iterator + counter_of(domains), Int32(1), scope="gpu")
        if gone == drawers - 1:
            for domain in cutlass.range_constexpr(domains + 1):
                counters[counter_of(domain)] = Int32(0)
