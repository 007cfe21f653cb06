"""The kernels' PTX, run for all ranks of a group on the CPU, against the oracle, bit by bit."""

import itertools

import pytest
import torch
from exchange_cases import difference, expected_out, expected_received, inputs_of, same_bits, shape_of
from exchange_machine import KINDS, Ranks
from rank_streams import RankBlock

from vllm_rose_plugin.kernels.dp_exchange.layout import PHASES, Payload

pytestmark = pytest.mark.slow


def check(ranks, inputs, step_tokens=None, pace=None):
    """Runs one step of every rank."""
    for rank in range(ranks.size):
        ranks.add(rank, inputs[rank], step_tokens=step_tokens)
    check_steps(ranks, [(inputs, step_tokens)], pace)


def check_steps(ranks, steps, pace=None):
    ranks.run_steps(pace=pace)
    for number, (inputs, most) in enumerate(steps):
        for rank in range(ranks.size):
            step = ranks.steps[rank][number]
            where = f"rank {rank}, step {number}"
            fault = difference(step.received, expected_received(inputs, ranks.shape, rank, most))
            assert not fault, f"{where}: {fault}"
            assert same_bits(step.out, expected_out(inputs, ranks.shape, rank, most)), where
    assert not ranks.report.any()


def step_of(shape, counts, seed, **how):
    return [inputs_of(shape, count, 100 * seed + rank, **how) for rank, count in enumerate(counts)]


@pytest.mark.parametrize("counts", [*itertools.product((0, 1, 5), repeat=2)], ids=str)
def test_every_subset_of_none_one_and_most(counts):
    shape = shape_of(2, hidden_size=32, max_tokens=5)
    check(Ranks(shape, seed=sum(counts), team=32 if counts[0] == 1 else None), step_of(shape, counts, 1))


@pytest.mark.parametrize("counts", [(0, 0, 0), (5, 0, 1), (1, 5, 5)], ids=str)
def test_three_ranks(counts):
    shape = shape_of(3, hidden_size=32, max_tokens=5)
    check(Ranks(shape, seed=sum(counts)), step_of(shape, counts, 2))


@pytest.mark.parametrize("team", [None, 32])
@pytest.mark.parametrize(
    ("payload", "codes"), [(Payload.MXFP8, False), (Payload.MXFP8, True), (Payload.BF16, False)], ids=str
)
@pytest.mark.parametrize("hidden_size", [96, 2592])
def test_payloads_and_hidden_sizes(hidden_size, payload, codes, team):
    shape = shape_of(2, hidden_size=hidden_size, payload=payload, max_tokens=4)
    check(Ranks(shape, seed=hidden_size, team=team), step_of(shape, (2, 4), 1, codes=codes))


@pytest.mark.parametrize("top_k", [1, 2, 8, 16])
def test_numbers_of_experts_of_a_token(top_k):
    shape = shape_of(3, top_k=top_k, experts_each=7)
    check(Ranks(shape, seed=top_k), step_of(shape, (3, 0, 4), top_k))


@pytest.mark.parametrize("size", [5, 12])
def test_more_ranks(size):
    shape = shape_of(size, hidden_size=32, top_k=8, experts_each=5, max_tokens=4)
    ranks = Ranks(shape, team=32)
    ranks.blocks = 1
    check(ranks, step_of(shape, [rank % 5 for rank in range(size)], size), pace=[1.0] * size)


def test_steps_of_fewer_tokens_than_there_is_room_for():
    shape = shape_of(2, hidden_size=32, max_tokens=300)
    ranks = Ranks(shape, seed=3, team=32)
    steps = []
    for seed, (counts, most) in enumerate([((3, 1), 4), ((34, 1), None), ((0, 2), 64)]):
        inputs = step_of(shape, counts, seed)
        for rank in range(2):
            ranks.add(rank, inputs[rank], step_tokens=most)
        steps.append((inputs, most))
    check_steps(ranks, steps)


def test_256_bits_are_not_needed_and_blackwell_gives_the_same_bits():
    shape = shape_of(2, hidden_size=256, max_tokens=4)
    check(Ranks(shape, target="sm_100a"), step_of(shape, (4, 3), 1))


@pytest.mark.parametrize("counts", [(5, 3), (0, 5), (1, 0), (0, 0)], ids=str)
@pytest.mark.parametrize(("payload", "codes"), [(Payload.MXFP8, False), (Payload.MXFP8, True), (Payload.BF16, False)])
def test_halves_in_one_launch(counts, payload, codes):
    shape = shape_of(2, hidden_size=96, max_tokens=5, payload=payload)
    ranks, inputs = Ranks(shape, seed=sum(counts)), step_of(shape, counts, 4, codes=codes)
    for rank in range(2):
        ranks.add(rank, inputs[rank], fused=True)
    check_steps(ranks, [(inputs, None)])


def test_halves_in_one_launch_between_more_ranks():
    shape = shape_of(7, hidden_size=32, top_k=8, experts_each=5, max_tokens=4)
    ranks, inputs = Ranks(shape, team=32), step_of(shape, [rank % 5 for rank in range(7)], 7)
    ranks.blocks = 1
    for rank in range(7):
        ranks.add(rank, inputs[rank], fused=True)
    check_steps(ranks, [(inputs, None)], pace=[1.0] * 7)


@pytest.mark.parametrize("fused", [False, True, None])
@pytest.mark.parametrize("seed", range(3))
def test_step_after_step_at_any_pace(seed, fused):
    """Ranks that lag, replays among the steps, one rank busy and others idle.

    fused: halves in one launch; None: as each rank happens to have it in each step.
    """
    size = 2 + seed % 2
    shape = shape_of(size, hidden_size=32, max_tokens=6)
    ranks = Ranks(shape, seed=seed, team=32 if seed == 1 else None)
    steps = []
    for number in range(6):
        counts = [0] * size if number == 3 else [6 if rank == number % size else rank for rank in range(size)]
        inputs = step_of(shape, counts, 10 * seed + number)
        for rank in range(size):
            ranks.add(rank, inputs[rank], fused=(rank + number) % 2 == 0 if fused is None else fused)
        steps.append((inputs, None))
    check_steps(ranks, steps, pace=[1.0, 0.1, 0.5][:size])


def test_a_replayed_step_finds_no_trace_of_the_last():
    """The same launches on other values, as a graph's replays."""
    shape = shape_of(2, hidden_size=32, max_tokens=5)
    ranks = Ranks(shape, seed=5)
    for rank in range(2):
        ranks.add(rank, tuple(torch.zeros_like(t) for t in inputs_of(shape, 4, rank)))
    for seed in range(5):
        inputs = step_of(shape, (4, 4), seed)
        for rank in range(2):
            step = ranks.steps[rank][0]
            for tensor, value in zip(step.inputs, inputs[rank], strict=True):
                tensor.copy_(value)
            if seed:
                ranks.queues[rank].extend(step.launches)
        ranks.ended = [0, 0]
        check_steps(ranks, [(inputs, None)])


def test_constant_experts_give_the_weights_sum_once():
    shape = shape_of(2, hidden_size=32, top_k=4, max_tokens=6)
    inputs = step_of(shape, (6, 3), 1, wrong=0)
    ranks = Ranks(shape)
    for rank in range(2):
        ranks.add(rank, inputs[rank])

    def before(rank, number):
        if number == 2:
            step = ranks.steps[rank][0]
            sums = step.received.topk_weights.sum(1, keepdim=True) * 2.0
            step.rows.copy_(sums.bfloat16().expand_as(step.rows))

    ranks.run(before=before)
    for rank in range(2):
        _, _, weights = inputs[rank]
        exact = 2.0 * weights.sum(1, keepdim=True).expand(-1, shape.hidden_size)
        assert torch.allclose(ranks.steps[rank][0].out.float(), exact, rtol=2**-7)


@pytest.mark.parametrize("stage", ["dispatch", "combine"])
@pytest.mark.parametrize(("team", "fused"), [(None, False), (32, False), (None, True)])
def test_a_dead_rank_is_reported_and_nobody_hangs(stage, team, fused):
    shape = shape_of(3, hidden_size=32, top_k=8, max_tokens=4)
    ranks = Ranks(shape, team=team)
    dead = 1
    for number in range(3):
        inputs = step_of(shape, (2, 3, 4), number, wrong=0)
        for rank in range(3):
            if rank != dead or number == 0:
                ranks.add(rank, inputs[rank], nanoseconds=60_000, fused=fused)
            elif number == 1 and stage == "combine":
                step = ranks.add(rank, inputs[rank], nanoseconds=60_000, fused=fused)
                for _ in range(1 if fused else 2):  # it dies before it sends rows back
                    ranks.queues[rank].pop()
                    step.launches.pop()
    ranks.run_steps(pace=[1.0] * 3)
    phase = "dispatch plan" if stage == "dispatch" else "combine row"
    for rank in range(3):
        word = int(ranks.report[rank])
        if rank == dead:
            assert word == 0
        else:
            assert (word & 0xFF) - 1 == dead and PHASES[word >> 8 & 0xFF] == phase and word >> 16 == 2
            last = ranks.steps[rank][2].received
            assert int(last.num_rows) == 0 and (last.topk_ids == -1).all() and not last.topk_weights.any()
    looks = RankBlock.clock
    for rank in (0, 2):
        ranks.queues[rank].extend(ranks.steps[rank][0].launches)
    ranks.run(pace=[1.0] * 3)
    assert RankBlock.clock - looks < 100 * 7, "a rank that has given up waits again"


@pytest.mark.parametrize("kind", ["dispatch_send", "combine_send"])
def test_a_flag_without_release_is_noticed(kind):
    shape = shape_of(2, hidden_size=96, max_tokens=8)
    for seed in range(8):  # it takes a read within the few turns between a flag and its row, so every look counts
        ranks = Ranks(shape, seed=seed, team=32, skip_polls=False)
        ranks.blocks = 1  # so that it stores for a while
        inputs = step_of(shape, (8, 8), seed, wrong=0)
        for rank in range(2):
            step = ranks.add(rank, inputs[rank], nanoseconds=200_000)
            number = KINDS.index(kind)
            launch = step.launches[number]
            assert "st.release.sys.global" in launch.ptx
            relaxed = launch._replace(ptx=launch.ptx.replace("st.release.sys.global", "st.relaxed.sys.global"))
            ranks.queues[rank][number] = relaxed
        try:
            check_steps(ranks, [(inputs, None)], pace=[1.0, 1.0])
        except AssertionError:
            if not ranks.report.any():  # nobody waited in vain: something was read too early
                return
    raise AssertionError("eight runs, and no row was read too early")
