"""Choosing a provider, with candidates that are right, wrong, slow or broken on purpose."""

import logging
import re
from dataclasses import dataclass, replace

import pytest
import torch

from vllm_rose_plugin.kernels.jit import providers
from vllm_rose_plugin.kernels.jit.providers import Family, Machine, NoProviderError, Provider, choose

HOPPER = Machine(device="NVIDIA H200", driver="580.1", target="sm_90a")
COST = {"reference": 100.0, "good": 10.0, "better": 5.0, "wrong": 1.0, "raises": 1.0}


@dataclass(frozen=True)
class Shape:
    tokens: int
    width: int


SHAPES = (Shape(4, 8), Shape(64, 8))


def anywhere(shape, target):
    return True


def nowhere(shape, target):
    return False


def double(x):
    return x * 2


def double_in_place(x):
    return x.mul_(2)


def nearly_double(x):
    result = x * 2
    if len(x) == 64:
        result[-1, -1] += 1  # one element of one shape
    return result


def refuse(x):
    raise RuntimeError("out of luck")


def make_reference(shape):
    return double


def make_good(shape):
    return double_in_place


def make_better(shape):
    return double


def make_wrong(shape):
    return nearly_double


def make_raises(shape):
    return refuse


def make_inputs(shape, seed):
    return (torch.randn(shape.tokens, shape.width, generator=torch.Generator().manual_seed(seed)),)


def compare(outputs, wanted):
    worst = (outputs - wanted).abs().max().item()
    return f"off by {worst:.1f}" if worst > 0 else ""


REFERENCE = Provider("reference", anywhere, make_reference)
GOOD = Provider("good", anywhere, make_good)
BETTER = Provider("better", anywhere, make_better)
WRONG = Provider("wrong", anywhere, make_wrong)
RAISES = Provider("raises", anywhere, make_raises)


def family(*candidates, reference=REFERENCE):
    return Family("scale", reference, candidates, make_inputs, compare)


class FakeTimer:
    """Times by name: the callable tells its provider by its function."""

    def __init__(self, costs=COST):
        self.calls = 0
        self._costs = {double: costs["reference"], double_in_place: costs["good"]}
        self._costs |= {nearly_double: costs["wrong"], refuse: costs["raises"]}

    def __call__(self, call):
        self.calls += 1
        call()
        return self._costs[call.func]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ROSE_PROVIDER_SCALE", raising=False)
    caplog.set_level(logging.INFO)
    return tmp_path / "cache"


def lines(caplog, level):
    found = lines_of(caplog, level)
    caplog.clear()
    return found


def lines_of(caplog, level):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_fastest_that_passes_wins_and_says_so_in_one_line(caplog):
    choice = choose(family=family(GOOD), shapes=SHAPES, machine=HOPPER, timer=FakeTimer())
    assert choice.provider == "good"
    x = torch.ones(4, 8)
    assert choice.kernels[SHAPES[0]](x) is x and x.eq(2).all()
    (line,) = lines(caplog, logging.INFO)
    assert re.fullmatch(
        r"scale: provider good, checked at 2 shapes in \d+\.\d\d s; 10\.0 us, against which reference 10\.00x", line
    )
    assert not lines(caplog, logging.WARNING)


def test_reference_wins_where_it_is_fastest():
    timer = FakeTimer({**COST, "good": 1000.0})
    assert choose(family=family(GOOD), shapes=SHAPES, machine=HOPPER, timer=timer).provider == "reference"


def test_every_shape_counts_alike():
    """A long prefill must not outvote decode: 1 and 100 us beat 10 and 20 us, though their sum is larger."""
    costs = iter([1.0, 100.0, 10.0, 20.0])
    choice = choose(family=family(GOOD), shapes=SHAPES, machine=HOPPER, timer=lambda call: next(costs))
    assert choice.verdict.microseconds == {"good": [1.0, 100.0], "reference": [10.0, 20.0]}
    assert choice.provider == "good"


def test_wrong_provider_is_named_and_never_used(caplog):
    choice = choose(family=family(WRONG, GOOD), shapes=SHAPES, machine=HOPPER, timer=FakeTimer())
    assert choice.provider == "good"
    assert "wrong" not in choice.verdict.microseconds
    (warning,) = lines(caplog, logging.WARNING)
    assert "provider wrong failed" in warning and "tokens=64" in warning and "off by 1.0" in warning
    # and so at every later start, which takes the verdict from disk
    timer = FakeTimer()
    assert choose(family=family(WRONG, GOOD), shapes=SHAPES, machine=HOPPER, timer=timer).provider == "good"
    assert timer.calls == 0
    assert "provider wrong failed" in lines(caplog, logging.WARNING)[0]


def test_provider_that_raises_is_named_and_tried_again_at_the_next_start(caplog):
    for _ in range(2):
        timer = FakeTimer()
        assert choose(family=family(RAISES, GOOD), shapes=SHAPES, machine=HOPPER, timer=timer).provider == "good"
        assert timer.calls == 4
        (warning,) = lines(caplog, logging.WARNING)
        assert "provider raises failed" in warning and "RuntimeError: out of luck" in warning


def test_shapes_that_are_checked_and_not_timed():
    """They still decide whether a candidate may serve, and are part of what a verdict holds for."""
    timer = FakeTimer()
    few = {"shapes": SHAPES, "timed": SHAPES[:1], "machine": HOPPER}
    choice = choose(family=family(WRONG, GOOD), **few, timer=timer)
    assert choice.provider == "good" and "tokens=64" in choice.verdict.failed["wrong"]
    assert choice.verdict.microseconds == {"good": [10.0], "reference": [100.0]} and timer.calls == 2
    assert set(choice.kernels) == set(SHAPES)
    for again, calls in ((few, 2), (few | {"timed": SHAPES[1:]}, 4), (few | {"timed": None}, 8)):
        choose(family=family(WRONG, GOOD), **again, timer=timer)
        assert timer.calls == calls


class RaisingTimer(FakeTimer):
    """As where calls can't be captured, or inputs have no room."""

    def __init__(self, *broken):
        super().__init__()
        self._broken = broken

    def __call__(self, call):
        if call.func in self._broken:
            raise MemoryError("no room")
        return super().__call__(call)


@pytest.mark.parametrize(("broken", "left"), [(double_in_place, "reference"), (double, "good")])
def test_provider_that_raises_while_it_is_timed_is_left_out_and_tried_again(caplog, broken, left):
    for _ in range(2):
        choice = choose(family=family(GOOD), shapes=SHAPES, machine=HOPPER, timer=RaisingTimer(broken))
        assert choice.provider == left and list(choice.verdict.microseconds) == [left]
        assert re.search(r"scale: provider \w+, checked .* s; [\d.]+ us$", lines_of(caplog, logging.INFO)[0])
        (warning,) = lines(caplog, logging.WARNING)
        other = "good" if left == "reference" else "reference"
        assert f"provider {other} failed its self-check and is not used: while it was timed: MemoryError" in warning


def test_all_raise_while_they_are_timed():
    timer = RaisingTimer(double, double_in_place)
    with pytest.raises(NoProviderError, match=r"good: while it was timed: MemoryError: no room; reference: while"):
        choose(family=family(GOOD), shapes=SHAPES, machine=HOPPER, timer=timer)


def test_inputs_without_room_while_a_provider_is_timed(caplog):
    """Which are made anew for the timer."""
    made = []

    def scarce(shape, seed):
        made.append(seed)
        if len(made) == 2 * 2 * len(SHAPES) + 1:  # kernel and oracle, two seeds, each shape
            raise MemoryError("no room")
        return make_inputs(shape, seed)

    scarce.__module__ = make_inputs.__module__
    choice = choose(family=replace(family(GOOD), make_inputs=scarce), shapes=SHAPES, machine=HOPPER, timer=FakeTimer())
    assert choice.provider == "reference" and "MemoryError: no room" in choice.verdict.failed["good"]


def test_no_provider_passes():
    unable = replace(REFERENCE, supports=nowhere)  # an oracle that can't serve
    with pytest.raises(NoProviderError, match=r"wrong: at Shape\(tokens=64.*off by 1.0; raises: RuntimeError"):
        choose(family=family(WRONG, RAISES, reference=unable), shapes=SHAPES, machine=HOPPER, timer=FakeTimer())


def test_no_provider_supports_the_shapes():
    unable = replace(REFERENCE, supports=nowhere)
    with pytest.raises(NoProviderError, match=r"no provider serves Shape.*NVIDIA H200 \(target sm_90a\)"):
        choose(family=family(replace(GOOD, supports=nowhere), reference=unable), shapes=SHAPES, machine=HOPPER)


def only_short(shape, target):
    return shape.tokens < 10 and target == "sm_90a"


def test_a_candidate_must_support_every_shape_on_the_target():
    some = family(replace(GOOD, supports=only_short))
    assert choose(family=some, shapes=SHAPES, machine=HOPPER, timer=FakeTimer()).provider == "reference"
    assert choose(family=some, shapes=SHAPES[:1], machine=HOPPER, timer=FakeTimer()).provider == "good"
    elsewhere = replace(HOPPER, target="sm_100a")
    assert choose(family=some, shapes=SHAPES[:1], machine=elsewhere, timer=FakeTimer()).provider == "reference"


def test_pinned_provider_is_checked_but_not_compared(monkeypatch, caplog):
    monkeypatch.setenv("ROSE_PROVIDER_SCALE", "reference")
    timer = FakeTimer()
    assert choose(family=family(GOOD), shapes=SHAPES, machine=HOPPER, timer=timer).provider == "reference"
    assert timer.calls == 0
    monkeypatch.setenv("ROSE_PROVIDER_SCALE", "wrong")
    with pytest.raises(NoProviderError, match="wrong: at Shape"):
        choose(family=family(WRONG, GOOD), shapes=SHAPES, machine=HOPPER, timer=timer)
    monkeypatch.setenv("ROSE_PROVIDER_SCALE", "gold")
    with pytest.raises(ValueError, match=r"ROSE_PROVIDER_SCALE=gold: .*legal: wrong, good, reference"):
        choose(family=family(WRONG, GOOD), shapes=SHAPES, machine=HOPPER, timer=timer)
    monkeypatch.setenv("ROSE_PROVIDER_SCALE", "good")
    with pytest.raises(NoProviderError, match="which ROSE_PROVIDER_SCALE pins"):
        choose(family=family(replace(GOOD, supports=nowhere)), shapes=SHAPES, machine=HOPPER)


@pytest.mark.parametrize(
    "change",
    [
        {"machine": replace(HOPPER, device="NVIDIA H100")},
        {"machine": replace(HOPPER, driver="590.2")},
        {"shapes": SHAPES[:1]},
        {"family": family(replace(GOOD, version="2.0"))},
        {"family": family(GOOD, BETTER)},
        {"family": replace(family(GOOD), state=lambda: "another table of tuned choices")},
    ],
)
def test_verdict_holds_for_one_situation(change):
    first = {"family": family(GOOD), "shapes": SHAPES, "machine": HOPPER}
    choose(**first, timer=FakeTimer())
    again = FakeTimer()
    assert choose(**first, timer=again).provider == "good" and again.calls == 0
    other = FakeTimer()
    choose(**{**first, **change}, timer=other)
    assert other.calls > 0


def test_verdict_depends_on_the_sources(monkeypatch):
    choose(family=family(GOOD), shapes=SHAPES, machine=HOPPER, timer=FakeTimer())
    edited = providers.sources_of(make_good)
    monkeypatch.setattr(providers, "sources_of", lambda function: replace(edited, digest="edited"))
    timer = FakeTimer()
    choose(family=family(GOOD), shapes=SHAPES, machine=HOPPER, timer=timer)
    assert timer.calls == 4


@pytest.mark.parametrize("old_and_new", [("", "{"), ('"provider": "good"', '"provider": "reference"')])
def test_damaged_verdict_is_not_trusted(own_cache, old_and_new):
    choose(family=family(GOOD), shapes=SHAPES, machine=HOPPER, timer=FakeTimer())
    (path,) = (own_cache / "verdicts").glob("*.json")
    old, new = old_and_new
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    timer = FakeTimer()
    assert choose(family=family(GOOD), shapes=SHAPES, machine=HOPPER, timer=timer).provider == "good"
    assert timer.calls == 4


def test_cpu_has_no_target_and_a_wall_clock():
    choice = choose(family=family(GOOD), shapes=SHAPES, machine=Machine("cpu", "none", None))
    assert set(choice.verdict.microseconds) == {"good", "reference"}
    assert all(time > 0 for times in choice.verdict.microseconds.values() for time in times)


def test_no_shapes():
    with pytest.raises(ValueError, match="no shapes"):
        choose(family=family(GOOD), shapes=(), machine=HOPPER)


def test_a_verdict_holds_for_the_compilers_settings_alone(monkeypatch):
    timer = FakeTimer()
    choose(family=family(GOOD), shapes=SHAPES, machine=HOPPER, timer=timer)
    before = timer.calls
    monkeypatch.setenv("CUTE_DSL_OPT_LEVEL", "0")
    choose(family=family(GOOD), shapes=SHAPES, machine=HOPPER, timer=timer)
    assert timer.calls > before, "other code, so another check"


def test_a_chosen_provider_that_can_not_be_made_later_is_named_with_the_ways_out():
    choose(family=family(GOOD), shapes=SHAPES, machine=HOPPER, timer=FakeTimer())

    def broken(shape):
        raise RuntimeError("no compiler")

    broken.__module__ = make_good.__module__
    later = family(replace(GOOD, make=broken))
    with pytest.raises(NoProviderError, match=r"scale: provider good, .*no compiler.*ROSE_PROVIDER_SCALE.*reference"):
        choose(family=later, shapes=SHAPES, machine=HOPPER, timer=FakeTimer())


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ROSE_PROVIDER_SCALES", "good", r"ROSE_PROVIDER_SCALES names no family; legal: ROSE_PROVIDER_SCALE$"),
        (
            "ROSE_PROVIDER_SCALE",
            "goood",
            r"ROSE_PROVIDER_SCALE=goood: scale has no such provider; legal: good, reference",
        ),
    ],
)
def test_a_pin_that_names_nothing_is_an_error_before_any_check(monkeypatch, variable, value, message):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        providers.check_pins([family(GOOD)])
    monkeypatch.setenv(variable, "")
    providers.check_pins([family(GOOD)])
