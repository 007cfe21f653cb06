"""Steps of requests whose drafts are accepted by chance, against counting; plan and simulation with drafting."""

import random

import numpy as np
import pytest
from planner_cases import CHAT, example, example_data

from vllm_rose_plugin.planner.capacity import Capacity, CapacityFile
from vllm_rose_plugin.planner.drafting import Drafting
from vllm_rose_plugin.planner.load import Lengths, distribution, poisson_trace
from vllm_rose_plugin.planner.plan import PERCENTILES, PlanError, Targets, make_plan
from vllm_rose_plugin.planner.report import missed_targets
from vllm_rose_plugin.planner.simulate import simulate


def with_drafts(tokens: int) -> Capacity:
    data = example_data()
    data["decode"]["speculative_tokens"] = tokens
    return Capacity(CapacityFile.model_validate(data))


def counted(acceptance, answer: int, requests: int = 4000) -> np.ndarray:
    randomness = random.Random(answer)
    found = []
    for _ in range(requests):
        steps = tokens = 0
        while tokens < answer:
            draw = randomness.random()
            tokens, steps = tokens + 1 + sum(draw < share for share in acceptance), steps + 1
        found.append(steps)
    return np.array(found)


@pytest.mark.parametrize("acceptance", [[0.9], [0.8, 0.5, 0.3], [0.98, 0.84, 0.71]])
@pytest.mark.parametrize("answer", [2, 7, 128, 129, 600])
def test_steps_are_those_that_are_counted(acceptance, answer):
    drafting, answers = Drafting(acceptance), np.full(3, float(answer))
    steps = counted(acceptance, answer)
    assert drafting.mean_steps(answers) == pytest.approx(steps.mean(), rel=0.01, abs=0.02)
    ratios = drafting.steps_per_token(answers) * (answer - 1) + 1
    assert np.all(np.diff(ratios) >= 0)
    for share in (0.5, 0.95):  # to a step, or 1 %
        assert np.quantile(ratios, share) == pytest.approx(np.quantile(steps, share), abs=max(1.0, 0.01 * answer))
    assert ratios.mean() == pytest.approx(steps.mean(), rel=0.01, abs=0.02)


def test_certain_drafts_and_none():
    assert Drafting([]).mean_steps(np.array([5.0, 7.0])) == 6 and Drafting([]).tokens_per_step == 1
    assert list(Drafting([]).steps_per_token(np.array([5.0, 7.0]))) == [1.0]
    always = Drafting([1.0, 1.0])
    assert always.mean_steps(np.array([1.0, 3.0, 4.0])) == pytest.approx(4 / 3)
    assert set(always.steps_per_token(np.array([4.0]))) == {1 / 3}
    never = Drafting([0.0])
    assert never.mean_steps(np.array([9.0])) == pytest.approx(9) and set(never.steps_per_token(np.array([9.0]))) == {1}
    assert list(never.steps_per_token(np.array([1.0]))) == [1.0]  # a single token has no TPOT


def test_many_requests_are_described_by_few():
    answers = np.arange(1.0, 300_001.0)
    assert len(Drafting([0.5]).steps_per_token(answers)) == 200


@pytest.mark.parametrize("outputs", ["lognormal:300:1000:4000", "lognormal:60:300:2000", "uniform:2:64"])
def test_plan_and_simulation_agree_with_drafting(outputs):
    """The bounds of docs/planner.md."""
    acceptance, capacity = [0.8, 0.5, 0.3], with_drafts(3)
    lengths = {"inputs": CHAT["inputs"], "outputs": Lengths.parse(outputs, flag="--output")}
    targets = Targets(ttft=1.0, tpot=0.01)
    plan = make_plan(load=distribution(rate=30, **lengths), capacity=capacity, targets=targets, acceptance=acceptance)
    result = simulate(
        requests=poisson_trace(rate=30, seconds=300, seed=0, **lengths),
        capacity=capacity,
        prefill_replicas=plan.prefill_replicas,
        decode_replicas=plan.decode_replicas,
        acceptance=acceptance,
    )
    for share in PERCENTILES:
        assert 0.95 <= result.tpot()[share] / plan.claims.tpot[share] <= 1.05, share
    assert plan.claims.tpot[99] > 1.1 * plan.claims.tpot[50]  # the spread of acceptance is in the claims
    assert not missed_targets(plan, result)


def test_drafting_saves_decoders_and_the_simulation_sees_it():
    drafting = with_drafts(2)
    load, targets = distribution(rate=60, **CHAT), Targets(ttft=1.0, tpot=0.0125)
    plain = make_plan(load=load, capacity=example(), targets=targets)
    plan = make_plan(load=load, capacity=drafting, targets=targets, acceptance=[0.7, 0.4])
    assert plan.tokens_per_step == pytest.approx(2.1) and plan.decode_replicas < plain.decode_replicas
    result = simulate(
        requests=poisson_trace(rate=60, seconds=60, seed=0, **CHAT),
        capacity=drafting,
        prefill_replicas=plan.prefill_replicas,
        decode_replicas=plan.decode_replicas,
        acceptance=[0.7, 0.4],
    )
    assert result.tpot()[50] == pytest.approx(plan.claims.tpot[50], rel=0.05)
    with pytest.raises(PlanError, match=r"come with 2 drafted tokens .*--acceptance has 0 positions"):
        make_plan(load=load, capacity=drafting, targets=targets)
