"""Nothing is overwritten that somebody still reads, nobody hangs: the protocol in a model, over many launches."""

import pytest
from protocol_model import (
    MOST_BLOCKS,
    ONE_SHOT,
    TWO_SHOT,
    ZERO_COPY,
    Call,
    Faults,
    Model,
    ProtocolError,
    all_sums,
    random_calls,
)


def finished(model, calls):
    for rank in range(model.size):
        assert model.epochs[rank] == [len(calls)] * MOST_BLOCKS, "copies of the epoch differ"
        assert model.results[rank] == [all_sums(model, number) for number in range(len(calls))]
        assert model.reports[rank] is None


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("seed", range(5))
def test_every_launch_adds_its_own_inputs(size, seed):
    calls = random_calls(40, seed=seed)
    model = Model(size, calls, seed=seed)
    model.run()
    finished(model, calls)


@pytest.mark.parametrize("kind", [ONE_SHOT, TWO_SHOT, ZERO_COPY])
def test_a_graph_replayed_many_times_by_ranks_at_any_pace(kind):
    graph = [Call(kind, blocks) for blocks in (1, MOST_BLOCKS, 2)]
    model = Model(3, graph * 100, seed=7)
    model.run(pace=[1.0, 0.3, 0.05])
    finished(model, graph * 100)


@pytest.mark.parametrize("seed", range(4))
def test_no_rank_gets_more_than_one_launch_ahead(seed):
    """Which is why two buffers are enough: a rank that lags is waited for in the next launch."""
    calls = random_calls(60, seed=seed)
    model = Model(3, calls, seed=seed)
    ahead = 0
    watch = model.signal

    def signal(rank, block, phase, epoch):
        nonlocal ahead
        ahead = max(ahead, epoch - min(model.launched))
        return watch(rank, block, phase, epoch)

    model.signal = signal
    model.run(pace=[1.0, 1.0, 0.02])
    finished(model, calls)
    assert ahead == 1


def test_a_rack_of_72_ranks():
    calls = [Call(ONE_SHOT, 1), Call(TWO_SHOT, 1), Call(TWO_SHOT, 1)]
    model = Model(72, calls, seed=1, units=72)
    model.run(pace=[1.0] * 72)
    finished(model, calls)


@pytest.mark.parametrize(
    ("faults", "kinds"),
    [
        (Faults(one_buffer=True), (ONE_SHOT,)),
        (Faults(no_result_wait=True), (ZERO_COPY, TWO_SHOT)),
        (Faults(epoch_of_block=True), (ONE_SHOT,)),
        (Faults(flag_early=True), (ONE_SHOT, TWO_SHOT)),
    ],
    ids=["one_buffer", "no_result_wait", "epoch_of_block", "flag_early"],
)
def test_the_model_notices_a_missing_rule(faults, kinds):
    noticed = 0
    for seed in range(20):
        calls = random_calls(40, seed=seed, kinds=kinds)
        model = Model(3, calls, seed=seed, units=12, faults=faults, patience=10**6)
        try:
            model.run()
            noticed += model.results != [[all_sums(model, n) for n in range(len(calls))]] * 3
        except ProtocolError:
            noticed += 1
    assert noticed > 10


@pytest.mark.parametrize("seed", range(12))
def test_a_rank_that_dies_anywhere_is_reported_and_the_others_end(seed):
    calls = random_calls(30, seed=seed)
    model = Model(4, calls, seed=seed, patience=3000)
    dead = seed % 4
    model.run(pace=[1.0] * 4, dies=(dead, 100 + 331 * seed))
    survivors = {rank for rank in range(4) if rank != dead}
    reported = {rank for rank in survivors if model.reports[rank]}
    assert reported == survivors, "somebody never noticed"
    for rank in survivors:
        peer, _, epoch = model.reports[rank]
        # A survivor may have waited for one that had given up before; that one's report leads on.
        assert peer == dead or peer in reported
        assert epoch <= model.launched[dead] + 1
        # What had ended before is right, and later launches end at once.
        for number in range(epoch - 1):
            assert model.results[rank][number] == all_sums(model, number)
        assert len(model.results[rank]) == len(calls)
    assert any(model.reports[rank][0] == dead for rank in survivors)


def test_a_late_rank_is_no_dead_rank():
    calls = random_calls(10, seed=3)
    model = Model(3, calls, seed=3, patience=10**5)
    model.run(pace=[1.0, 1.0, 0.01])
    finished(model, calls)


@pytest.mark.parametrize("kinds", [(ONE_SHOT,), (TWO_SHOT,), (ONE_SHOT, TWO_SHOT)])
def test_a_rank_that_comes_after_the_deadline_never_gets_a_wrong_sum(kinds):
    """The others have given up and run on; it either finds what they left for it, or gives up in its turn."""
    wrong = {False: 0, True: 0}
    for copies in wrong:
        for seed in range(10):
            calls = random_calls(30, seed=seed, kinds=kinds)
            faults = Faults(copies_when_gone=copies)
            model = Model(3, calls, seed=seed, patience=500, faults=faults)
            try:
                model.run(pace=[1.0, 1.0, 0.002])
            except ProtocolError:
                wrong[copies] += 1
                continue
            assert all(model.reports)
            assert min(report[2] for report in model.reports) == 1
    assert wrong[False] == 0
    assert wrong[True] or kinds == (TWO_SHOT,)
