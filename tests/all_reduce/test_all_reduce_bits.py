"""The kernels' PTX, run for all ranks of a group on the CPU, against the reference, bit by bit."""

from dataclasses import replace

import pytest
import torch
from ranks_machine import RankBlock, Ranks

from vllm_rose_plugin.kernels.all_reduce.config import ITEM_BYTES, Access, Algorithm, Plan, Tuning, choose_plan
from vllm_rose_plugin.kernels.all_reduce.reference import all_reduce

pytestmark = pytest.mark.slow
ONE, TWO = Algorithm.ONE_SHOT, Algorithm.TWO_SHOT


def plan_for(
    count,
    *,
    dtype="bfloat16",
    size=2,
    algorithm=ONE,
    access=Access.PEERS,
    blocks=1,
    zero_in=False,
    zero_out=False,
    target="sm_90a",
    **changes,
) -> Plan:
    """A launch; alignment 16 unless `changes` say otherwise."""
    plan = choose_plan(
        num_bytes=count * ITEM_BYTES[dtype],
        dtype=dtype,
        group_size=size,
        access=access,
        zero_copy_in=zero_in,
        zero_copy_out=zero_out,
        alignment=changes.pop("alignment", 16),
        target=target,
        sm_count=132,
        tuning=Tuning(algorithm, blocks),
    )
    config = plan.config
    if zero_in:  # the heuristic would copy something so small
        config = replace(config, algorithm=TWO, copy_in=False, copy_out=not zero_out)
    return Plan(replace(config, **{"threads": 128, **changes}), blocks)


def inputs(count, size, dtype, seed):
    """One for each rank; with NaN, inf and sums of nothing but -0."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, count, generator=generator) * torch.exp2(
        torch.randint(-10, 10, (size, count), generator=generator).float()
    )
    values[:, ::7] = -0.0
    if count > 9:
        values[0, 3], values[-1, 5] = float("nan"), float("inf")
    return list(values.to(getattr(torch, dtype)))


def assert_bits(result, expected):
    assert torch.equal(result.isnan(), expected.isnan())
    kind = torch.int16 if result.dtype.itemsize == 2 else torch.int32
    wrong = (result.view(kind) != expected.view(kind)) & ~expected.isnan()
    assert not wrong.any(), f"{int(wrong.sum())} elements differ, the first is {int(wrong.nonzero()[0])}"


def padded(tensor, gap=0):
    """(tensor, what lies around it) with a fence on both sides, `gap` elements past a multiple of 256 bytes."""
    around = torch.full((len(tensor) + 512 + gap + 128,), 7.0, dtype=tensor.dtype)
    start = (-around.data_ptr() // tensor.dtype.itemsize) % (256 // tensor.dtype.itemsize) + 128 + gap
    inside = around[start : start + len(tensor)]
    inside.copy_(tensor)
    return inside, around


def check(count, *, dtype="bfloat16", size=2, seed=0, in_place=False, gap=0, target="sm_90a", pace=None, **how):
    ranks = Ranks(size, max_bytes=count * 4, seed=seed, target=target)
    plan = plan_for(count, dtype=dtype, size=size, target=target, **how)
    xs = inputs(count, size, dtype, seed)
    expected = all_reduce(xs)
    results = []
    for rank, x in enumerate(xs):
        mine, around_x = padded(x, gap)
        out, around = (mine, around_x) if in_place else padded(torch.full_like(x, 9.0), gap)
        ranks.add(rank, plan, mine, out)
        results.append((out, around, mine, x))
    ranks.run(pace=pace)
    for out, around, mine, x in results:
        assert_bits(out, expected)
        start = (out.data_ptr() - around.data_ptr()) // out.dtype.itemsize
        assert (around[:start] == 7).all() and (around[start + count :] == 7).all(), "a store beside the result"
        assert in_place or torch.equal(mine.view(torch.uint8), x.view(torch.uint8)), "the input was written"
    assert not ranks.report.any()


@pytest.mark.parametrize("algorithm", [ONE, TWO])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 63, 64, 65, 1023, 1024, 4099])
def test_any_size(algorithm, count):
    check(count, algorithm=algorithm, blocks=2, seed=count)


@pytest.mark.parametrize("algorithm", [ONE, TWO])
@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 9])
def test_any_number_of_ranks(algorithm, size):
    check(777, algorithm=algorithm, size=size, seed=size)


def test_a_rack_of_72_ranks():
    check(72 * 16 + 5, algorithm=TWO, size=72, unroll=1, pace=[1.0] * 72)


@pytest.mark.parametrize("algorithm", [ONE, TWO])
@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("in_place", [False, True])
def test_dtypes_in_place_and_out_of_place(algorithm, dtype, in_place):
    for unroll in (1, 2):
        check(3001, algorithm=algorithm, dtype=dtype, size=3, blocks=2, in_place=in_place, unroll=unroll)


@pytest.mark.parametrize("algorithm", [ONE, TWO])
@pytest.mark.parametrize("gap", [1, 2, 4])
def test_unaligned_views(algorithm, gap):
    check(1003, algorithm=algorithm, gap=gap, alignment=2 * gap, seed=gap)


@pytest.mark.parametrize("algorithm", [ONE, TWO])
@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_256_bits_from_blackwell_on(algorithm, dtype):
    for count in (15, 16, 4097):
        check(count, dtype=dtype, algorithm=algorithm, size=3, target="sm_100a", alignment=32, blocks=2)
    check(319, dtype=dtype, algorithm=algorithm, size=2, target="sm_107a", alignment=16)


@pytest.mark.parametrize("algorithm", [ONE, TWO])
@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_multimem_as_the_manual_describes_it(algorithm, dtype):
    for count in (1, 9, 2053):
        check(count, algorithm=algorithm, dtype=dtype, size=3, access=Access.MULTIMEM, blocks=2, seed=count)


@pytest.mark.parametrize("access", Access)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_zero_copy(size, in_place, access):
    """Input, or input and output, where all ranks see them: only the sums travel."""
    count = 1000
    xs = inputs(count, size, "bfloat16", size)
    for zero_out in (True,) if in_place else (True, False):
        ranks = Ranks(size, max_bytes=4096, heap_bytes=3 * 4096, seed=size)
        plan = plan_for(count, size=size, access=access, blocks=2, zero_in=True, zero_out=zero_out)
        assert not plan.config.copy_in and plan.config.copy_out != zero_out
        outs = []
        for rank, x in enumerate(xs):
            mine = ranks.heap(rank, 0, count, torch.bfloat16)
            mine.copy_(x)
            out = ranks.heap(rank, 4096, count, torch.bfloat16) if zero_out else padded(torch.zeros_like(x))[0]
            outs.append(mine if in_place else out)
            ranks.add(rank, plan, mine, outs[-1])
        ranks.run()
        for out in outs:
            assert_bits(out, all_reduce(xs))


@pytest.mark.parametrize(("seed", "access"), [*((seed, Access.PEERS) for seed in range(4)), (4, Access.MULTIMEM)])
def test_launch_after_launch_of_any_kind(seed, access):
    """Mixed algorithms, sizes and blocks, replays among them, ranks at paces of their own, inputs written anew.

    Over NVLS with one-shot launches that loop over peers, as in vLLM.
    """
    size, count, rounds = 3, 900, 12
    ranks = Ranks(size, max_bytes=count * 2, heap_bytes=4096, seed=seed)
    plans = [
        plan_for(count, size=size, algorithm=ONE, blocks=3),
        plan_for(count, size=size, algorithm=TWO, access=access, blocks=1),
        plan_for(count, size=size, algorithm=TWO, access=access, blocks=2),
        plan_for(100, size=size, algorithm=ONE, blocks=1),
        plan_for(896, size=size, access=access, blocks=2, zero_in=True, zero_out=True),
    ]
    counts = [count, count, count, 100, 896]
    order = [ranks.random.randrange(5) for _ in range(rounds)]
    xs = [
        [inputs(counts[kind], size, "bfloat16", 100 * seed + i)[r] for r in range(size)] for i, kind in enumerate(order)
    ]
    buffers = [[padded(torch.zeros(n).bfloat16())[0] for n in counts] for _ in range(size)]
    outs = [[padded(torch.zeros(n).bfloat16())[0] for n in counts] for _ in range(size)]
    for rank in range(size):
        buffers[rank][4] = outs[rank][4] = ranks.heap(rank, 0, 896, torch.bfloat16)
        made = {}
        for kind in order:
            if kind in made:
                ranks.queues[rank].append(made[kind])  # as a graph would
            else:
                made[kind] = ranks.add(rank, plans[kind], buffers[rank][kind], outs[rank][kind])
    kept: list[list[torch.Tensor]] = [[] for _ in range(size)]

    def before(rank, number):
        if number:
            kept[rank].append(outs[rank][order[number - 1]].clone())
        buffers[rank][order[number]].copy_(xs[number][rank])

    ranks.run(before=before)
    for rank in range(size):
        kept[rank].append(outs[rank][order[-1]].clone())
        for number in range(rounds):
            assert_bits(kept[rank][number], all_reduce(xs[number]))
    assert ranks.ended == [rounds] * size


@pytest.mark.parametrize("algorithm", [ONE, TWO])
@pytest.mark.parametrize("size", [2, 3])
def test_a_dead_rank_is_reported_and_nobody_hangs(size, algorithm):
    count, dead = 600, size - 1
    ranks = Ranks(size, max_bytes=count * 2)
    plan = plan_for(count, size=size, algorithm=algorithm, blocks=2)
    xs = inputs(count, size, "bfloat16", 0)
    for number in range(3):
        for rank in range(size):
            if number == 0 or rank != dead:
                ranks.add(rank, plan, padded(xs[rank])[0], padded(xs[rank])[0], nanoseconds=20_000)
    ranks.run(pace=[1.0] * size)
    for rank in range(size):
        word = int(ranks.report[rank])
        if rank == dead:
            assert word == 0
        else:
            assert (word & 0xFF) - 1 == dead and word >> 8 & 0xFF == 0 and word >> 16 == 2, "peer, phase, epoch"
    looks = RankBlock.clock
    for rank in range(size - 1):
        ranks.add(rank, plan, padded(xs[rank])[0], padded(xs[rank])[0], nanoseconds=20_000)
    ranks.run(pace=[1.0] * size)
    assert RankBlock.clock == looks, "a rank that has given up waits again"


class MortalRanks(Ranks):
    """A group of which one rank is killed in its second launch, once it has told that its input is in place."""

    def __init__(self, size, *, dead, **how):
        super().__init__(size, **how)
        self.dead = dead

    def _start(self, rank, memory, **how):
        blocks = super()._start(rank, memory, **how)
        if rank == self.dead and self.ended[rank] == 1:
            for block in blocks:
                block.__class__ = DyingBlock
        return blocks


class DyingBlock(RankBlock):
    def execute(self, opcode, parts, operands, active):
        super().execute(opcode, parts, operands, active)
        if parts[0] == "st" and "release" in parts:
            self.left[:] = True


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_killed_in_the_middle_of_a_launch_is_reported(size):
    """Two-shot: its input was there, its sums never come. The others' next launches don't wait for it again."""
    count, dead = 600, size - 1
    ranks = MortalRanks(size, dead=dead, max_bytes=count * 2)
    plan = plan_for(count, size=size, algorithm=TWO, blocks=2)
    xs = inputs(count, size, "bfloat16", 0)
    for number in range(3):
        for rank in range(size):
            if number < 2 or rank != dead:
                ranks.add(rank, plan, padded(xs[rank])[0], padded(xs[rank])[0], nanoseconds=20_000)
    ranks.run(pace=[1.0] * size)
    for rank in range(size - 1):
        word = int(ranks.report[rank])
        assert ((word & 0xFF) - 1, word >> 8 & 0xFF, word >> 16) == (dead, 1, 2), "peer, phase, epoch"
    assert int(ranks.report[dead]) == 0 and ranks.ended[:-1] == [3] * (size - 1)
