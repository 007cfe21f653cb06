"""The host half of batched experts, with emulated kernels: buffers, formats, the op, the self-check, refusals."""

import importlib
from dataclasses import replace
from functools import partial

import pytest
import torch
from experts_emulation import SM_COUNT, aligned_bytes, emulated
from test_experts_family import new_memory

from vllm_rose_plugin.kernels import call_counts
from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding, ScaleLayout, TokenFormat
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.jit.fingerprint import config_text
from vllm_rose_plugin.kernels.moe_batched import config, launch, ops
from vllm_rose_plugin.kernels.moe_batched.family import FAMILY, BatchedShape, compare, make_inputs
from vllm_rose_plugin.kernels.moe_batched.reference import moe_batched
from vllm_rose_plugin.kernels.moe_experts.config import token_formats_of
from vllm_rose_plugin.kernels.moe_experts.reference import moe_experts
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8

TARGETS = ("sm_90a", "sm_100a")
SHAPE = BatchedShape(
    max_tokens=24,
    expected_rows=40,
    hidden_size=96,
    intermediate_size=64,
    num_local_experts=5,
    dtype="bfloat16",
    activation=Activation.MXFP8,
    rounding=Rounding.RCEIL,
    captured=True,
)


def packed(inputs, target):
    return pack_weight(inputs.w13, target=target, gate_up=True), pack_weight(inputs.w2, target=target)


def size_of(shape, target):
    return launch.workspace_bytes(
        max_tokens=shape.max_tokens,
        num_local_experts=shape.num_local_experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        token_formats=token_formats_of(target, shape.activation),
    )


def valid_rows(shape, counts):
    return torch.arange(shape.max_tokens) < counts.unsqueeze(1)


def run(shape, target, inputs, *, workspace=None, **how):
    """Ours, in a workspace full of NaN that is exactly large enough, between fences; rows past the counts stay 7."""
    weights = packed(inputs, target)
    size = size_of(shape, target)
    around = aligned_bytes(size + 512)
    out = torch.full((shape.num_local_experts, shape.max_tokens, shape.hidden_size), 7.0)
    out = out.to(getattr(torch, shape.dtype))
    launch.moe_batched(
        how.pop("x", inputs.x),
        expert_counts=inputs.expert_counts,
        w13=weights[0],
        w2=weights[1],
        out=out,
        workspace=around[:size] if workspace is None else workspace,
        expected_rows=shape.expected_rows,
        activation=shape.activation,
        rounding=shape.rounding,
    )
    assert (around[size:] == 0xFF).all(), "memory beside was written"
    assert (out[~valid_rows(shape, inputs.expert_counts)] == 7).all(), "rows past the counts were written"
    return out


def reference(shape, inputs, **how):
    return moe_batched(
        how.pop("x", inputs.x),
        expert_counts=inputs.expert_counts,
        w13=inputs.w13,
        w2=inputs.w2,
        activation=shape.activation,
        rounding=shape.rounding,
        **how,
    )


def check(shape, target, inputs, **how):
    expected = reference(shape, inputs, out_dtype=getattr(torch, shape.dtype), **how)
    out = run(shape, target, inputs, **how)
    valid = valid_rows(shape, inputs.expert_counts)
    assert compare(torch.where(valid.unsqueeze(-1), out, 0), expected) == ""


def test_the_reference_is_the_standard_layers():
    """The same tokens through a layer whose router sends token (e, m) to expert e only."""
    inputs = make_inputs(SHAPE, 1)
    valid = valid_rows(SHAPE, inputs.expert_counts)
    ids = torch.where(valid, torch.arange(5).unsqueeze(1), -1).flatten().unsqueeze(1).to(torch.int32)
    for activation in Activation:
        shape = replace(SHAPE, activation=activation)
        expected = moe_experts(
            inputs.x.flatten(0, 1), topk_ids=ids, topk_weights=None, w13=inputs.w13, w2=inputs.w2, activation=activation
        )
        result = reference(shape, inputs)
        assert torch.equal(result.flatten(0, 1).nan_to_num(), expected.nan_to_num())
        assert (result[~valid] == 0).all() and result[1].isnan().any()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("max_tokens", "expected"), [(1, 1), (24, 3), (24, 40), (140, 500)])
def test_layer(monkeypatch, target, max_tokens, expected):
    shape = replace(SHAPE, max_tokens=max_tokens, expected_rows=expected)
    with emulated(monkeypatch, target) as seen:
        check(shape, target, make_inputs(shape, max_tokens))
    assert seen.names() == ["tokens", "w13", "w2"]
    assert {rows for _, _, rows in seen.launches} == {5 * max_tokens}
    first, second = seen.launches[1][1], seen.launches[2][1]
    if target == "sm_90a":
        assert not first.early_counts and second.early_counts
        wanted = TokenFormat.BF16_PERMUTED if expected == 500 else TokenFormat.MXFP8_FP32_SCALES
        assert seen.launches[0][1] is first.token_format is first.out_format is second.token_format is wanted


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "change", [{"rounding": Rounding.FLOOR}, {"dtype": "float16"}, {"num_local_experts": 1, "max_tokens": 40}]
)
def test_variants(monkeypatch, target, change):
    shape = replace(SHAPE, **change)
    with emulated(monkeypatch, target):
        check(shape, target, make_inputs(shape, 3))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("counts", [[0, 0, 0, 0, 0], [24, 24, 24, 24, 24], [0, 0, 1, 0, 0], [24, 0, 0, 0, 0]])
def test_counts(monkeypatch, target, counts):
    inputs = make_inputs(SHAPE, 4)
    x = torch.randn(5, 24, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    lengths = torch.tensor(counts, dtype=torch.int32)
    x[~valid_rows(SHAPE, lengths)] = float("nan")
    with emulated(monkeypatch, target):
        check(SHAPE, target, inputs._replace(x=x, expert_counts=lengths))


def test_unquantized_activations(monkeypatch):
    shape = replace(SHAPE, activation=Activation.BF16)
    with emulated(monkeypatch) as seen:
        check(shape, "sm_90a", make_inputs(shape, 3))
    assert seen.launches[0][1] is TokenFormat.BF16_PERMUTED
    with emulated(monkeypatch, "sm_100a"), pytest.raises(ValueError, match="activation='bf16' is served on sm_90 only"):
        run(shape, "sm_100a", make_inputs(shape, 3))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("expected", [40, 120])
def test_tokens_that_arrive_quantized(monkeypatch, target, expected):
    shape = replace(SHAPE, expected_rows=expected)
    inputs = make_inputs(shape, 6)
    x = Mxfp8Tensor(*quantize_mxfp8(inputs.x))
    x.codes.view(torch.uint8)[~valid_rows(shape, inputs.expert_counts)] = 0x7F
    with emulated(monkeypatch, target) as seen:
        check(shape, target, inputs, x=x)
    if target == "sm_90a":
        assert seen.launches[0][1] is TokenFormat.MXFP8_FP32_SCALES
    assert torch.equal(
        reference(shape, inputs, x=x, out_dtype=torch.bfloat16).nan_to_num(), reference(shape, inputs).nan_to_num()
    )


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_left_of_the_call_before(monkeypatch, target):
    """A workspace that held other tokens, as in a replayed graph."""
    workspace = aligned_bytes(size_of(SHAPE, target))
    with emulated(monkeypatch, target):
        inputs = make_inputs(SHAPE, 2)
        alone = run(SHAPE, target, inputs)
        full = torch.full((5,), 24, dtype=torch.int32)
        run(
            SHAPE, target, inputs._replace(x=torch.randn(5, 24, 96).bfloat16(), expert_counts=full), workspace=workspace
        )
        again = run(SHAPE, target, inputs, workspace=workspace)
    assert torch.equal(alone.nan_to_num(), again.nan_to_num())


@pytest.mark.parametrize("target", TARGETS)
def test_more_tokens_never_need_less(target):
    needed = [size_of(replace(SHAPE, max_tokens=tokens), target) for tokens in range(300)]
    assert needed == sorted(needed) and needed[0] == 0


def test_expected_rows_are_the_mean_and_no_more_than_there_is_room():
    how = {"top_k": 8, "num_local_experts": 8, "num_experts": 128}
    assert config.expected_rows_of(num_tokens=256, num_rows=8 * 256, **how) == 128
    assert config.expected_rows_of(num_tokens=1, num_rows=8 * 256, **how) == 1
    assert config.expected_rows_of(num_tokens=0, num_rows=8 * 256, **how) == 1
    assert config.expected_rows_of(num_tokens=10**6, num_rows=8 * 256, **how) == 8 * 256


# The op


def arguments(inputs):
    weights = inputs.w13.codes, inputs.w13.scales, inputs.w2.codes, inputs.w2.scales
    return inputs.x, None, inputs.expert_counts, *weights


def test_the_op_is_the_reference_without_packed_scales_and_ours_with_them(monkeypatch):
    inputs = make_inputs(SHAPE, 1)
    expected = reference(SHAPE, inputs)
    before = dict(call_counts.snapshot().get("moe_batched", {}))
    out = torch.full_like(inputs.x, 7.0)
    assert torch.ops.rose.moe_batched(*arguments(inputs), out=out) is None
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())
    for target in TARGETS:
        weights, out = packed(inputs, target), torch.zeros_like(inputs.x)
        with emulated(monkeypatch, target) as seen:
            torch.ops.rose.moe_batched(
                *arguments(inputs),
                out=out,
                w13_packed=weights[0].scales,
                w2_packed=weights[1].scales,
                workspace=aligned_bytes(size_of(SHAPE, target)),
                expected_rows=40,
            )
        assert compare(out, expected) == "" and len(seen.launches) == 3
    after = call_counts.snapshot()["moe_batched"]
    assert after["reference"] == before.get("reference", 0) + 1 and after["rose"] == before.get("rose", 0) + 2


def test_schema_says_what_is_written_and_torch_compile_passes_it_by():
    schema = torch.ops.rose.moe_batched.default._schema
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == {"out", "workspace"} and not schema.returns
    assert torch.Tag.cudagraph_unsafe not in torch.ops.rose.moe_batched.default.tags
    inputs = make_inputs(SHAPE, 2)
    rest = arguments(inputs)[1:]

    def layer(x):
        out = torch.empty_like(x)
        torch.ops.rose.moe_batched(x, *rest, out=out)
        return out * 2

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(inputs.x).nan_to_num(), (2 * reference(SHAPE, inputs)).nan_to_num())
    before = torch.ops.rose.moe_batched.default
    importlib.reload(ops)
    assert torch.ops.rose.moe_batched.default is before


# The self-check


@pytest.mark.parametrize("target", TARGETS)
def test_our_provider_passes_and_config_of_names_what_it_launches(monkeypatch, target):
    rose = FAMILY.providers[0]
    for shape in (SHAPE, replace(SHAPE, max_tokens=200, expected_rows=700), replace(SHAPE, activation=Activation.BF16)):
        assert not rose.supports(shape, None)
        if not rose.supports(shape, target):
            assert shape.activation is Activation.BF16 and target != "sm_90a"
            continue
        inputs = make_inputs(shape, 3)
        inputs = inputs._replace(packed=packed(inputs, target))
        with emulated(monkeypatch, target) as seen, monkeypatch.context() as patch:
            patch.setattr(torch, "empty", partial(new_memory, torch.empty))
            result = rose.make(shape)(*inputs)
        assert FAMILY.compare(result, FAMILY.reference.make(shape)(*inputs)) == ""
        named = FAMILY.config_of(shape, target, SM_COUNT)
        assert [entry[1] for entry in seen.launches[1:]] == list(named[1:])
        assert named[0].token_format is seen.launches[0][1]
        assert all(config_text(part) for part in named)


@pytest.mark.parametrize("fault", ["swap", "scale", "count", "nan", "past"])
def test_one_wrong_piece_is_found(fault):
    inputs = make_inputs(SHAPE, 5)
    expected = reference(SHAPE, inputs)
    wrong = expected.clone()
    assert inputs.expert_counts[0] == 0 and inputs.expert_counts[1] == 24 and inputs.x[0].isnan().all()
    if fault == "swap":
        wrong[1, [0, 1]] = wrong[1, [1, 0]]
    elif fault == "scale":
        inputs.w2.scales[1, 5] += 1
        wrong = reference(SHAPE, inputs)
    elif fault == "count":
        wrong[1, -1] = 0
    elif fault == "nan":
        wrong[1, 2] = 0
    else:
        wrong[0, 0] = 1
    assert FAMILY.compare(expected.clone(), expected) == "" and FAMILY.compare(wrong, expected)


@pytest.mark.parametrize("target", TARGETS)
def test_warm_up_compiles_what_calls_choose(monkeypatch, target):
    warmed, tokens = set(), set()
    with emulated(monkeypatch, target) as seen:
        compiled, prepared = launch.plan.compile_config, launch.compile_config
        monkeypatch.setattr(
            launch.plan, "compile_config", lambda c, *, target: warmed.add(c) or compiled(c, target=target)
        )
        monkeypatch.setattr(launch, "compile_config", lambda c, *, target: tokens.add(c) or prepared(c, target=target))
        launch.warm_up(
            device=torch.device("cpu"),
            hidden_size=96,
            intermediate_size=64,
            num_local_experts=5,
            most_rows=700,
            dtype=torch.bfloat16,
            activation=Activation.MXFP8,
            rounding=Rounding.RCEIL,
        )
        before = set(warmed)
        formats = token_formats_of(target, Activation.MXFP8)
        assert {c.token_format for c in tokens} == set(formats)
        for expected in (1, 2, 5, 6, 17, 40, 130, 333, 700):
            shape = replace(SHAPE, max_tokens=140, expected_rows=expected)
            run(shape, target, make_inputs(shape, 1))
        assert len(tokens) == len(formats)
        assert {made for name, made, _ in seen.launches if name != "tokens"} <= before


# What doesn't fit

REFUSALS = {
    "x_shape": (lambda i: {"x": i.x[:3]}, r"x must be \[5, M, 96\]"),
    "x_flat": (lambda i: {"x": i.x[0]}, r"x must be \[5, M, 96\]"),
    "x_dtype": (lambda i: {"x": i.x.double()}, "x must be bf16, fp16 or fp32, or MXFP8"),
    "x_strides": (lambda i: {"x": i.x.transpose(0, 1).contiguous().transpose(0, 1)}, "x must be contiguous"),
    "x_layout": (
        lambda i: {"x": Mxfp8Tensor(*quantize_mxfp8(i.x), layout=ScaleLayout.TCGEN05_128X4)},
        "must have scales ScaleLayout.ROW_MAJOR",
    ),
    "x_scales": (
        lambda i: {"x": Mxfp8Tensor(quantize_mxfp8(i.x)[0], torch.zeros(5, 24, 4, dtype=torch.uint8))},
        "x's scales must be contiguous torch.uint8",
    ),
    "x_bf16": (
        lambda i: {"x": Mxfp8Tensor(*quantize_mxfp8(i.x)), "activation": "bf16"},
        "arrive quantized can't be served with activation='bf16'",
    ),
    "counts": (lambda i: {"expert_counts": i.expert_counts.long()}, "expert_counts must be contiguous torch.int32"),
    "out_dtype": (lambda i: {"out": torch.zeros(5, 24, 96)}, "serve with --dtype bfloat16"),
    "out_shape": (lambda i: {"out": torch.zeros(5, 23, 96, dtype=torch.bfloat16)}, "out must be contiguous"),
    "workspace": (lambda i: {"workspace": aligned_bytes(256)}, "24 tokens an expert must be flat torch.uint8"),
    "workspace_start": (lambda i: {"workspace": aligned_bytes(2**17 + 8)[8:]}, "multiple of 128 bytes"),
    "expected": (lambda i: {"expected_rows": 121}, "expected_rows is 121"),
    "gate_up": (lambda i: {"w13": pack_weight(i.w13, target="sm_90a")}, "packed with gate_up=True"),
    "w2": (lambda i: {"w2": pack_weight(i.w13, target="sm_90a")}, r"w13 must be \[E, 2 \* I, H\]"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_named(monkeypatch, case):
    inputs = make_inputs(SHAPE, 1)
    weights = packed(inputs, "sm_90a")
    given = {
        "x": inputs.x,
        "expert_counts": inputs.expert_counts,
        "w13": weights[0],
        "w2": weights[1],
        "out": torch.zeros(5, 24, 96, dtype=torch.bfloat16),
        "workspace": aligned_bytes(2**17),
        "expected_rows": 40,
    }
    change, message = REFUSALS[case]
    with emulated(monkeypatch):
        launch.moe_batched(given["x"], **{k: v for k, v in given.items() if k != "x"})
        given |= change(inputs)
        with pytest.raises((ValueError, TypeError), match=message):
            launch.moe_batched(given.pop("x"), **given)


def test_tensors_elsewhere_are_named():
    inputs = make_inputs(SHAPE, 1)
    weights = packed(inputs, "sm_90a")
    with pytest.raises(ValueError, match="x can't be on cpu"):
        launch.moe_batched(
            inputs.x,
            expert_counts=inputs.expert_counts,
            w13=weights[0],
            w2=weights[1],
            out=inputs.x,
            workspace=aligned_bytes(256),
        )
