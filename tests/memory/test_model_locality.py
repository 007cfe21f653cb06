"""The bandwidth model of locality domains: it gains what reading near gains, no more, and says that it is a model."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def model():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import model_locality
    finally:
        sys.path.remove(str(BENCHMARKS))
    return model_locality


@pytest.mark.parametrize("domains", [2, 4])
def test_no_shape_gains_more_than_reading_near_does(model, domains):
    machine = model.Machine(domains=domains)
    assert machine.bound == pytest.approx(model.PUBLISHED_MEAN)
    rows = list(model.predictions(machine))
    assert len(rows) == 2 * 4 * len(model.TOKENS)
    assert all(1 <= row.gain < machine.bound for row in rows)
    assert max(row.gain for row in rows) > 1.1


def test_nothing_is_gained_where_nothing_is_far(model):
    for machine in (model.Machine(domains=1), model.Machine(far=22.0)):
        assert machine.even_rate == pytest.approx(machine.near)
        assert [row.gain for row in model.predictions(machine)] == pytest.approx([1] * 48)


@pytest.mark.parametrize("domains", [2, 3, 4])
@pytest.mark.parametrize("gain", [1.0, 1.16, 1.2])
def test_the_ratio_for_a_gain_gains_it(model, domains, gain):
    machine = model.Machine(near=20.0, far=20.0 / model.ratio_for(gain, domains), domains=domains)
    assert machine.bound == pytest.approx(gain)


def test_weights_alone_gain_the_bound(model):
    layer = model.Model("", 4096, 1536, 128, 8)
    machine = model.Machine(launch=0.0, matrix=1e9)
    row = model.predict(layer, tp=1, ep=1, tokens=1, machine=machine, strategy="")
    assert row.split == "w13 + w2" and row.gain == pytest.approx(machine.bound, rel=2e-3)
    bytes_read = 8 * 3 * 4096 * 1536 * 33 / 32
    assert row.plain_us == pytest.approx(bytes_read / machine.even_rate / 1e6, rel=0.02)


def test_what_is_not_split_gains_nothing(model):
    qwen, machine = model.MODELS[0], model.Machine(launch=0.0)

    def row(tp):
        return model.predict(qwen, tp=tp, ep=1, tokens=64, machine=machine, strategy="")

    assert [row(tp).split for tp in (1, 2, 4)] == ["w13 + w2", "w13 + w2", "w2"]
    assert 1 < row(4).gain < row(2).gain


def test_forking_and_fewer_sms_cost(model):
    qwen = model.MODELS[0]

    def us(tokens, **machine):
        return model.predict(qwen, tp=2, ep=1, tokens=tokens, machine=model.Machine(**machine), strategy="").split_us

    assert us(64, fork_join=2.0) == pytest.approx(us(64) + 4)
    assert us(64, used_sms=200) == us(64), "few tokens are bound by reading"
    slow = {"matrix": 1.0, "launch": 0.0}
    assert us(16384, used_sms=200, **slow) == pytest.approx(us(16384, **slow) * 212 / 200), "many by the matrix rate"


def test_its_output_says_that_it_is_a_model():
    command = [sys.executable, str(BENCHMARKS / "model_locality.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("MODEL, not measured.") and done.stdout.count("\n| ") == 49
    assert "(published 1.16)" in done.stdout and "(published 1.2)" in done.stdout
    brief = subprocess.run([*command, "--brief", "--sms", "200,212"], capture_output=True, text=True, check=True)
    assert brief.stdout.startswith("MODEL, not measured.") and "200 of 212 SMs" in brief.stdout
    wrong = subprocess.run([*command, "--sms", "212,200"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "--sms" in wrong.stderr
