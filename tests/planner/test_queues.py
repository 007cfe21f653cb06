"""The queueing models and the simulator, each against closed forms."""

import itertools
import math
import random

import numpy as np
import pytest
from planner_cases import example, flat

from vllm_rose_plugin.planner.load import Request
from vllm_rose_plugin.planner.queues import batch_distribution, erlang_c, mgc_wait
from vllm_rose_plugin.planner.simulate import simulate

SERVICE = 0.1
LENGTHS = {1: 1e-6, 10_000_000: 10.0}
"""Seconds go with the length: a prompt of N tokens takes N microseconds."""


def test_erlang_c():
    assert erlang_c(servers=1, work=0.7) == pytest.approx(0.7)
    # Two servers with one server's worth of work: 1/3 (a textbook value).
    assert erlang_c(servers=2, work=1.0) == pytest.approx(1 / 3)


@pytest.mark.parametrize(("variation", "mean"), [(0.0, 0.7 / 0.6), (1.0, 0.7 / 0.3)])
def test_one_server_is_pollaczek_and_khinchine(variation, mean):
    """M/D/1 waits rho / (2 (1 - rho)) services on average, M/M/1 rho / (1 - rho)."""
    exponential = -SERVICE * np.log1p(-(np.arange(200_000) + 0.5) / 200_000)
    service = exponential if variation else np.full(8, SERVICE)
    wait = mgc_wait(servers=1, rate=0.7 / SERVICE, service=service)
    assert wait.chance * wait.mean_if_any == pytest.approx(SERVICE * mean, rel=1e-3)


def test_a_queue_without_room():
    assert mgc_wait(servers=2, rate=20.0, service=np.full(3, SERVICE)) is None
    assert mgc_wait(servers=2, rate=0.0, service=np.full(3, SERVICE)).beyond(np.array([-1.0, 0.0])).tolist() == [1, 0]


@pytest.mark.parametrize(("random_lengths", "mean"), [(False, 0.6 / 0.8), (True, 0.6 / 0.4)])
def test_simulated_prefill_is_m_d_1_and_m_m_1(random_lengths, mean):
    # Shuffled quantiles: the load is exactly 0.6, only the order is left to chance.
    count = 20_000
    exponential = [-math.log1p(-(index + 0.5) / count) for index in range(count)]
    gaps, services = exponential.copy(), exponential.copy() if random_lengths else [1.0] * count
    random.Random(1).shuffle(gaps)
    random.Random(2).shuffle(services)
    requests, now = [], 0.0
    for gap, service in zip(gaps, services, strict=True):
        now += gap * SERVICE / 0.6
        requests.append(Request(now, max(1, round(1e6 * service * SERVICE)), 1))
    step = 1e-6
    result = simulate(
        requests=requests,
        capacity=flat(prefill_seconds=LENGTHS, step_ms=1e3 * step),
        prefill_replicas=1,
        decode_replicas=1,
    )
    waits = [one.ttft - one.request.input_tokens / 1e6 for one in result.outcomes]
    # Each wait is what Lindley's recursion says, up to the decoder's microseconds ...
    expected = [0.0]
    for before, after in itertools.pairwise(requests):
        expected.append(max(0.0, expected[-1] + before.input_tokens / 1e6 - (after.arrival - before.arrival)))
    assert waits == pytest.approx(expected, abs=3 * step)
    # ... and their mean that of M/D/1 and M/M/1; 20,000 requests leave a standard error of 4 %.
    assert np.mean(waits) == pytest.approx(SERVICE * mean, rel=0.09)
    assert np.mean([wait > 10 * step for wait in waits]) == pytest.approx(0.6, rel=0.03)
    assert result.prefill_utilization == pytest.approx(0.6, rel=0.01)


def test_constant_steps_make_a_poisson_batch():
    """With steps that don't depend on the batch, requests don't disturb each other: M/G/infinity."""
    distribution = batch_distribution(rate=5.0, mean_steps=200, step_seconds=np.full(400, 0.02))
    expected = [math.exp(-20) * 20**count / math.factorial(count) for count in range(60)]
    assert distribution.chances[:60] == pytest.approx(expected, abs=1e-9)
    assert distribution.mean == pytest.approx(20)


def test_a_decoder_without_room():
    assert batch_distribution(rate=5.0, mean_steps=200, step_seconds=np.full(19, 0.02)) is None
    crowded = batch_distribution(rate=5.0, mean_steps=200, step_seconds=np.full(24, 0.02))
    assert 0.05 < crowded.beyond(24) < 0.5 and crowded.chances.sum() == pytest.approx(1)
    idle = batch_distribution(rate=0.0, mean_steps=200, step_seconds=np.full(24, 0.02))
    assert idle.mean == 0 and idle.quantile(0.95) == 0


def test_simulated_decoder_has_that_batch_distribution():
    """Steps that grow with the batch, lengths of two kinds: only their mean may matter."""
    capacity = example()
    randomness = random.Random(2)
    requests, now = [], 0.0
    for _ in range(8000):
        now += randomness.expovariate(15.0)
        requests.append(Request(now, 1024, randomness.choice((50, 750))))
    result = simulate(requests=requests, capacity=capacity, prefill_replicas=8, decode_replicas=1)
    context = 1024 + (50**2 + 750**2) / (50 + 750) / 2
    steps = np.array([capacity.step_seconds(batch, context) for batch in range(1, 1025)])
    expected = batch_distribution(rate=15.0, mean_steps=400, step_seconds=steps)
    assert result.mean_batch == pytest.approx(expected.mean, rel=0.03)
    assert result.max_batch < expected.quantile(0.999999)


def test_no_wait_where_nothing_comes_at_once():
    requests = [Request(float(index), 200_000, 3) for index in range(5)]
    result = simulate(
        requests=requests,
        capacity=flat(prefill_seconds=LENGTHS, step_ms=50),
        prefill_replicas=1,
        decode_replicas=1,
    )
    assert result.ttft() == pytest.approx({50: 0.25, 95: 0.25, 99: 0.25})
    assert result.tpot() == pytest.approx({50: 0.05, 95: 0.05, 99: 0.05})
    assert result.max_batch == 1 and result.unserved == 0


def test_a_rate_too_small_for_a_float_is_none():
    batch = batch_distribution(rate=5e-324, mean_steps=300, step_seconds=np.full(1024, 0.01))
    assert batch is not None and batch.mean == 0
