"""What the self-check of a layer of experts lets through and what it finds."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from experts_emulation import SM_COUNT, aligned_bytes, emulated
from test_experts_launch import SHAPE, TARGETS

from vllm_rose_plugin.kernels.contracts import Activation, Rounding
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.jit import providers
from vllm_rose_plugin.kernels.moe_dispatch.config import DispatchConfig
from vllm_rose_plugin.kernels.moe_experts import config
from vllm_rose_plugin.kernels.moe_experts import reference as experts_reference
from vllm_rose_plugin.kernels.moe_experts.family import FAMILY, make_inputs
from vllm_rose_plugin.kernels.moe_route.config import RouteConfig
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8

MODEL = replace(SHAPE, num_tokens=33, hidden_size=256, intermediate_size=128, num_local_experts=8, num_experts=16)


def new_memory(empty, *size, **how):
    """As aligned as a GPU's."""
    return aligned_bytes(*size) if how.get("dtype") is torch.uint8 and len(size) == 1 else empty(*size, **how)


def reference(shape, inputs=None):
    return FAMILY.reference.make(shape)(*(inputs or FAMILY.make_inputs(shape, 3)))


@pytest.mark.parametrize("shape", [SHAPE, MODEL, replace(MODEL, activation=Activation.BF16, dtype="float16")])
def test_the_reference_agrees_with_itself_and_inputs_with_their_seed(shape):
    expected = reference(shape)
    assert FAMILY.compare(expected.clone(), expected) == ""
    first, again, other = (FAMILY.make_inputs(shape, seed) for seed in (1, 1, 2))
    for a, b, c in zip(first[:3], again[:3], other[:3], strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num()) and not torch.equal(a.nan_to_num(), c.nan_to_num())
    assert torch.equal(first.w13.scales, again.w13.scales) and not torch.equal(first.w2.scales, other.w2.scales)


def test_inputs_hold_what_is_hard():
    inputs = make_inputs(MODEL, 4)
    assert (inputs.topk_ids[-1] == -1).all() and inputs.topk_ids[-2, 0] == 19
    assert inputs.x[-3].isnan().any() and (inputs.x[-4] == 0).all()
    assert (inputs.topk_ids[:11] == 0).any(-1).all()
    assert all(len(set(row)) == 2 for row in inputs.topk_ids[:-2].tolist())
    assert sorted(inputs.expert_map[inputs.expert_map >= 0].tolist()) == list(range(8))
    for weight in (inputs.w13, inputs.w2):
        norms = dequantize_mxfp8(weight.codes, weight.scales).norm(dim=-1)
        assert not norms.isnan().any() and 0.2 < norms.mean() < 5
    expected = reference(MODEL, inputs)
    assert expected[-3].isnan().all() and (expected[-1] == 0).all()
    assert expected.isfinite().all(-1).sum() == 32 and expected.nan_to_num().abs().max() < 1e4


@pytest.mark.parametrize(
    "fault",
    ["weight", "weights", "expert", "scale", "row", "element", "elements", "nan", "no_nan", "shape", "rounding", "map"],
)
def test_one_wrong_piece_is_found(fault):
    inputs = make_inputs(MODEL, 4)
    expected = reference(MODEL, inputs)
    wrong = expected.clone()
    busy = [row for row in range(28) if (inputs.expert_map[inputs.topk_ids[row]] >= 0).all()]
    if fault == "weight":
        inputs.topk_weights[busy[0]] *= 1.15
        wrong = reference(MODEL, inputs)
    elif fault == "weights":  # little, but of more than one row
        inputs.topk_weights[busy[:2]] *= 1.05
        wrong = reference(MODEL, inputs)
    elif fault == "expert":
        elsewhere = inputs.expert_map[inputs.topk_ids[busy[0], 1]]
        inputs.topk_ids[busy[0], 1] = (inputs.expert_map == (elsewhere + 1) % 8).nonzero()[0, 0]
        wrong = reference(MODEL, inputs)
    elif fault == "scale":
        expert = inputs.expert_map[inputs.topk_ids[busy[0], 0]]
        inputs.w2.scales[expert, 5] += 1
        wrong = reference(MODEL, inputs)
    elif fault == "map":
        inputs.expert_map[inputs.topk_ids[busy[0], 0]] = -1
        wrong = reference(MODEL, inputs)
    elif fault == "row":
        wrong[busy[0]] = wrong[busy[1]]
    elif fault == "element":
        wrong[busy[0], 9] += 0.7 * expected[busy[0]].float().square().mean().sqrt()
        assert FAMILY.compare(wrong, expected).startswith("1 elements are far off")
    elif fault == "elements":
        for row in busy[:2]:
            wrong[row, 9] += 0.3 * expected[row].float().square().mean().sqrt()
        assert FAMILY.compare(wrong, expected).startswith("2 elements are far off")
    elif fault == "nan":
        wrong[busy[0], 3] = float("nan")
    elif fault == "no_nan":
        wrong[-3] = 0
    elif fault == "rounding":
        wrong = reference(replace(MODEL, rounding=Rounding.FLOOR), inputs)
    else:
        wrong = wrong[:-1]
    assert FAMILY.compare(wrong, expected)


@pytest.mark.parametrize("experts", [16, 8], ids=["all_experts", "half_of_them"])
@pytest.mark.parametrize("intermediate_size", [64, 128])
def test_rounding_that_falls_to_the_other_side_is_no_fault(monkeypatch, experts, intermediate_size):
    """FP8 accumulation leaves sums off by some 2**-12; in a small model single rows then move by more than 3 %."""
    sizes = {"intermediate_size": intermediate_size, "num_local_experts": experts, "num_experts": 16, "top_k": 4}
    shape, plain = replace(MODEL, num_tokens=1024, **sizes), experts_reference.grouped_gemm

    def off(*args, out_dtype, **how):
        y = plain(*args, out_dtype=out_dtype, **how)
        if out_dtype != torch.float32:  # w2, which nothing is quantized after
            return y
        noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        return y + 2.0**-12 * noise * y.nan_to_num().square().mean(-1, keepdim=True).sqrt()

    most = 0.0
    for seed in (1, 2, 3):
        inputs = make_inputs(shape, seed)
        expected = reference(shape, inputs)
        with monkeypatch.context() as patch:
            patch.setattr(experts_reference, "grouped_gemm", off)
            result = reference(shape, inputs)
        assert FAMILY.compare(result, expected) == ""
        a, b = result.double().nan_to_num(), expected.double().nan_to_num()
        most = max(most, float(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-9)).max()))
    assert most > 0.03, "one row that may be off by more would not have been needed"


@pytest.mark.parametrize("target", TARGETS)
def test_our_provider_passes(monkeypatch, target):
    (rose,) = FAMILY.providers
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for shape in (SHAPE, MODEL, replace(MODEL, num_tokens=1), replace(MODEL, activation=Activation.BF16)):
        assert not rose.supports(shape, None)
        if not rose.supports(shape, target):
            assert shape.activation is Activation.BF16 and target != "sm_90a"
            continue
        inputs = make_inputs(shape, 3)
        packed = pack_weight(inputs.w13, target=target, gate_up=True), pack_weight(inputs.w2, target=target)
        with emulated(monkeypatch, target) as seen, monkeypatch.context() as patch:
            patch.setattr(torch, "empty", partial(new_memory, torch.empty))
            result = rose.make(shape)(*inputs._replace(packed=packed))
        assert FAMILY.compare(result, reference(shape)) == "" and len(seen.launches) == 4


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("tokens", [1, 33, 200])
def test_config_of_names_what_a_call_launches(monkeypatch, target, tokens):
    monkeypatch.setattr(config, "MOST_ROWS", 256)  # 128 tokens a chunk: 200 make two, of different size
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    shape = replace(MODEL, num_tokens=tokens)
    named = FAMILY.config_of(shape, target, SM_COUNT)
    inputs = make_inputs(shape, 3)
    packed = pack_weight(inputs.w13, target=target, gate_up=True), pack_weight(inputs.w2, target=target)
    with emulated(monkeypatch, target) as seen, monkeypatch.context() as patch:
        patch.setattr(torch, "empty", partial(new_memory, torch.empty))
        FAMILY.providers[0].make(shape)(*inputs._replace(packed=packed))
    launched = {made for name, made, _ in seen.launches if name != "route_and_dispatch"}
    assert launched == {c for c in named if not isinstance(c, RouteConfig | DispatchConfig)}
    formats = {made for name, made, _ in seen.launches if name == "route_and_dispatch"}
    assert formats == {c.token_format for c in named if isinstance(c, DispatchConfig)}
    assert all(c.num_experts == 8 and c.top_k == 2 and c.route.has_map for c in named if isinstance(c, DispatchConfig))


def test_prefill_has_a_launch_that_routes():
    shape = replace(MODEL, num_tokens=4096)
    named = FAMILY.config_of(shape, "sm_90a", SM_COUNT)
    assert [type(c) for c in named[:2]] == [RouteConfig, DispatchConfig] and named[1].route is None
    assert named != FAMILY.config_of(replace(shape, num_tokens=1), "sm_90a", SM_COUNT)


def test_the_reference_is_no_candidate_under_cuda_graphs(monkeypatch, tmp_path):
    """Captured, it would fail in the middle of start-up: if ours fails its check, start-up says so."""
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path))
    assert FAMILY.reference.supports(SHAPE, None)
    assert FAMILY.reference.supports(replace(SHAPE, captured=False), "sm_90a")
    assert not FAMILY.reference.supports(SHAPE, "sm_90a")
    assert not FAMILY.reference.supports(replace(SHAPE, captured=False, batch_invariant=True), "sm_90a")
    broken = providers.Provider("rose", lambda shape, target: True, lambda shape: lambda *inputs: inputs[0] * 2)
    machine = providers.Machine(device="H200", driver="1", target="sm_90a")
    with pytest.raises(providers.NoProviderError, match=r"rows are off by more than|NaN"):
        providers.choose(
            family=replace(FAMILY, providers=(broken,)), shapes=[SHAPE], machine=machine, timer=lambda call: 1.0
        )
