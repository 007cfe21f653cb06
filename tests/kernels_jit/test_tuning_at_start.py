"""The setting ``tune``: off unless given, and what layers then measure, before kernels are compiled and checked."""

import contextlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_rose_plugin.config import RoseConfig
from vllm_rose_plugin.kernels.contracts import Activation, Rounding
from vllm_rose_plugin.kernels.gemm.family import LinearShape, call_of
from vllm_rose_plugin.kernels.gemm.tune import TOKENS, Job
from vllm_rose_plugin.kernels.moe_experts import config as experts_config
from vllm_rose_plugin.kernels.moe_experts.family import ExpertsShape, config_of
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DeviceFacts
from vllm_rose_plugin.layers import experts, linear, tuning

FACTS = DeviceFacts("sm_90a", 132)
CPU = torch.device("cpu")


@pytest.fixture
def tuned_jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """What is measured, on a device that isn't there."""
    jobs: list[Job] = []
    monkeypatch.setattr(tuning, "device_facts", lambda index: FACTS)
    monkeypatch.setattr(tuning, "tune_and_log", jobs.extend)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    tuning._tune.cache_clear()
    return jobs


def linear_shape(num_tokens: int) -> LinearShape:
    return LinearShape(num_tokens, 192, 96, "bfloat16", False, Activation.MXFP8, Rounding.RCEIL, False)


def experts_shape(num_tokens: int) -> ExpertsShape:
    return ExpertsShape(num_tokens, 128, 96, 16, 64, 8, "bfloat16", Activation.MXFP8, Rounding.RCEIL, True)


@pytest.mark.parametrize(
    ("given", "environ", "tune"),
    [
        ({}, {}, False),
        ({"tune": True}, {}, True),
        ({}, {"ROSE_TUNE": "1"}, True),
        ({}, {"ROSE_TUNE": "0"}, False),
        ({"tune": False}, {"ROSE_TUNE": "1"}, False),
    ],
)
def test_it_is_off_unless_given(given: dict[str, Any], environ: dict[str, str], tune: bool) -> None:
    assert RoseConfig.load({"rose": given}, environ).tune is tune


def test_a_value_that_is_no_switch_is_named() -> None:
    with pytest.raises(ValueError, match="ROSE_TUNE: 'often' is not allowed"):
        RoseConfig.load(None, {"ROSE_TUNE": "often"})


def test_a_linear_layers_calls_are_measured_once(tuned_jobs: list[Job]) -> None:
    for _ in range(3):
        tuning.tune_linear(linear_shape, most_tokens=3000, device=CPU)
    tokens = [each for each in TOKENS if each < 3000] + [3000]
    assert tuned_jobs == [Job(call_of(linear_shape(each), *FACTS), each) for each in tokens]


def test_the_experts_calls_are_those_of_a_step(tuned_jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.tune_experts(experts_shape(1), most_tokens=20_000, device=CPU)
    planned: list[Job] = []
    plan = experts_config.plan

    def watched(call: Any, *, expected_rows: int, num_rows: int) -> Any:
        planned.append(Job(call, expected_rows))
        return plan(call, expected_rows=expected_rows, num_rows=num_rows)

    monkeypatch.setattr(experts_config, "plan", watched)
    for tokens in (*TOKENS, experts_config.chunk_tokens(8)):
        config_of(experts_shape(tokens), *FACTS)
    assert set(tuned_jobs) == set(planned)


@pytest.mark.parametrize("tune", [False, True])
def test_a_linear_layer_is_tuned_before_it_asks_for_kernels(tune: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(linear, "prepare_device", lambda device, max_rows: None)
    monkeypatch.setattr(linear.tuning, "tune_linear", lambda shape_of, **how: done.append(f"tune {shape_of(5).n}"))
    monkeypatch.setattr(linear.self_check, "need", lambda family, shape_of: done.append(f"need {shape_of(5).n}"))
    kernel: Any = SimpleNamespace(
        config=SimpleNamespace(weight_shape=(64, 96)),
        target="sm_90a",
        settings=RoseConfig(tune=tune),
        dtype=torch.bfloat16,
        most_tokens=64,
        batch_invariant=False,
    )
    kernel._linear_shape = lambda tokens, bias: linear.RoseCuteDslMxfp8LinearKernel._linear_shape(
        kernel, tokens, bias=bias
    )
    kernel._put_into_parts = partial(linear.RoseCuteDslMxfp8LinearKernel._put_into_parts, kernel)
    layer = torch.nn.Module()
    for name, value in mxfp8(64, 96).items():
        layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    linear.RoseCuteDslMxfp8LinearKernel.process_weights_after_loading(kernel, layer)
    assert done == (["tune 64", "need 64"] if tune else ["need 64"])


@pytest.mark.parametrize("tune", [False, True])
def test_experts_are_tuned_before_they_are_warmed_up(tune: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(experts, "route_workspace", lambda **how: torch.empty(4))
    monkeypatch.setattr(experts.launch, "warm_up", lambda **how: done.append("warm up"))
    monkeypatch.setattr(experts.tuning, "tune_experts", lambda shape, **how: done.append("tune"))
    monkeypatch.setattr(experts.self_check, "need", lambda family, shape_of: done.append("need"))
    asks = lambda shape, **how: done.append("one launch or two")  # noqa: E731
    monkeypatch.setattr(experts.self_check, "ask_for_one_launch", asks)
    ours: Any = SimpleNamespace(
        target="sm_90a",
        settings=RoseConfig(tune=tune),
        most_tokens=64,
        gets_codes=False,
        moe_config=SimpleNamespace(num_experts=2, experts_per_token=1, in_dtype=torch.bfloat16),
        _shape=experts_shape,
        _how=dict,
        _ways=dict,
    )
    ours._prepare = lambda layer: experts.RoseCuteDslExperts._prepare(ours, layer)
    layer = torch.nn.Module()
    for name, shape in (("w13", (2, 128, 96)), ("w2", (2, 96, 64))):
        for part, value in mxfp8(*shape).items():
            layer.register_parameter(f"{name}_{part}", torch.nn.Parameter(value, requires_grad=False))
    experts.RoseCuteDslExperts.process_weights_after_loading(ours, layer)
    assert done == [*(["tune"] if tune else []), "one launch or two", "need", "warm up"]


def mxfp8(*shape: int) -> dict[str, torch.Tensor]:
    """A weight of zeros, as parameters are named."""
    codes = torch.zeros(*shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": torch.full((*shape[:-1], shape[-1] // 32), 127, dtype=torch.uint8)}
