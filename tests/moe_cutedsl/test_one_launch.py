"""The threshold between one launch and two: asked at start-up, lowered where two are faster, followed by every call."""

from dataclasses import replace

import pytest
import torch

from vllm_rose_plugin.kernels.contracts import Activation, Rounding, TokenFormat
from vllm_rose_plugin.kernels.jit.providers import Machine
from vllm_rose_plugin.kernels.moe_dispatch import family as dispatch_family
from vllm_rose_plugin.kernels.moe_dispatch import threshold
from vllm_rose_plugin.kernels.moe_experts import family, one_launch
from vllm_rose_plugin.kernels.moe_route.config import RouteConfig

SHAPE = family.ExpertsShape(
    num_tokens=1,
    hidden_size=4096,
    intermediate_size=1536,
    num_local_experts=16,
    num_experts=16,
    top_k=8,
    dtype="bfloat16",
    activation=Activation.MXFP8,
    rounding=Rounding.RCEIL,
    captured=True,
)
FACTS = {"target": "sm_90a", "sm_count": 132}


@pytest.fixture(autouse=True)
def forgotten():
    threshold.clear()
    one_launch._ranges.cache_clear()
    yield
    threshold.clear()
    one_launch._ranges.cache_clear()


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Runs the check, self-check and verdicts included; one launch takes 1 us for every 16 tokens, two take 8 us, or
    what `two_us` says. Returns the sizes that were timed."""
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path))
    asked, now = [], []

    def make(shape, *, two_launches=False):
        def call(*inputs):
            now[:] = [shape, two_launches]
            return dispatch_family.by_reference(shape)(*inputs)

        return call

    def check(shape=SHAPE, *, two_us=8.0, most_tokens=8192, one=make):
        def timer(call):
            call()
            asked.append(now[0].routing.num_tokens) if now[1] else None
            return two_us if now[1] else now[0].routing.num_tokens / 16

        providers = replace(dispatch_family.LAUNCHES.providers[0], make=one)
        two = replace(dispatch_family.LAUNCHES.reference, make=lambda shape: make(shape, two_launches=True))
        launches = replace(dispatch_family.LAUNCHES, reference=two, providers=(providers,))
        monkeypatch.setattr(one_launch, "LAUNCHES", launches)
        machine = Machine("a device", "a driver", "sm_90a")
        one_launch.check_one_launch(shape, most_tokens=most_tokens, **FACTS, machine=machine, timer=timer)
        result = list(asked)
        asked.clear()
        return result

    return check


def launches(tokens, shape=SHAPE):
    """The kernels of route and dispatch of a call."""
    configs = family.config_of(replace(shape, num_tokens=tokens), **FACTS)
    return 2 if isinstance(configs[0], RouteConfig) else 1


def heuristic_most(shape=SHAPE):
    return max(tokens for tokens in range(1, 1025) if launches(tokens, shape) == 1)


def test_where_one_launch_is_faster_the_heuristic_stays(ask):
    most = heuristic_most()
    assert ask(two_us=1000.0) == [48, most], "once for each format of the tokens"
    assert heuristic_most() == most and threshold.digest() == ""
    assert ask(two_us=1.0) == [], "layers that are alike are asked once"


def test_the_threshold_is_where_two_launches_begin_to_win(ask):
    before, state = [family.config_of(replace(SHAPE, num_tokens=n), **FACTS) for n in (64, 512)], family.FAMILY.state()
    asked = ask(two_us=8.0)  # 128 tokens of one launch
    assert heuristic_most() in asked and 112 <= heuristic_most() <= 128 and len(asked) <= 6
    after = [family.config_of(replace(SHAPE, num_tokens=n), **FACTS) for n in (64, 512)]
    assert after == before, "as before on both sides"
    assert [launches(n) for n in (1, 64, 112, 129, 200)] == [1, 1, 1, 2, 2]
    assert family.FAMILY.state() != state, "an earlier verdict holds no longer"


def test_two_launches_may_win_everywhere(ask):
    formats = {one_launch.step_of(family.layer_of(SHAPE, "sm_90a"), n).token_format for n in (1, 200)}
    ask(two_us=0.01)
    assert [launches(n) for n in (1, 2, 64, 200)] == [2] * 4
    assert formats == {TokenFormat.MXFP8_FP32_SCALES, TokenFormat.BF16_PERMUTED}


def test_a_launch_that_disagrees_is_not_used(ask, caplog):
    def wrong(shape):
        def call(*inputs):
            routed, tokens = dispatch_family.by_reference(shape)(*inputs)
            routed.slots[0, 0] += 1
            return routed, tokens

        return call

    ask(two_us=1000.0, one=wrong)
    assert launches(1) == 2 and "slots are others" in caplog.text


def test_other_layers_keep_theirs(ask):
    ask(two_us=0.01)
    other = replace(SHAPE, hidden_size=2048)
    assert launches(1, other) == 1
    few = replace(SHAPE, hidden_size=2048, quantized=True)
    assert max(ask(few, two_us=1000.0, most_tokens=8)) == 8
    assert launches(1, few) == 1 and threshold.digest() != ""


def test_calls_look_again(ask, monkeypatch):
    """The host function's own cache is emptied."""
    from vllm_rose_plugin.kernels.moe_dispatch import launch
    from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DeviceFacts

    def config():
        what = (("bfloat16", 4096), 16, (256, 8), 16, 1, one_launch.step_of(layer, 256).token_format)
        how = (Activation.MXFP8, Rounding.RCEIL, False, "int32", False)
        return launch._config_for(DeviceFacts(**FACTS), *what, *how)

    layer = family.layer_of(SHAPE, "sm_90a")
    assert config().route is not None
    ask(two_us=8.0)
    assert config().route is None


def test_inputs_that_arrive_quantized_are_made_and_compared():
    call = one_launch._call(replace(SHAPE, hidden_size=64, quantized=True), 9, TokenFormat.MXFP8_FP32_SCALES)
    inputs = dispatch_family.make_inputs(call, 3)
    run = dispatch_family.by_reference(call)
    result = run(*inputs)
    assert dispatch_family.compare(result, run(*inputs)) == ""
    assert inputs[0].codes.dtype == torch.float8_e4m3fn and result[1].k == 64
