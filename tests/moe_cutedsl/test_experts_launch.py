"""The host half of a layer of experts, with emulated kernels: buffers, formats, chunks, refusals."""

from dataclasses import replace

import pytest
import torch
from experts_emulation import aligned_bytes, emulated

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.moe_experts import config, launch, memory
from vllm_rose_plugin.kernels.moe_experts.family import ExpertsShape, compare, layer_of, make_inputs
from vllm_rose_plugin.kernels.moe_experts.reference import moe_experts
from vllm_rose_plugin.kernels.moe_experts.ways import OneLaunch
from vllm_rose_plugin.kernels.moe_route.launch import route_workspace
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8

TARGETS = ("sm_90a", "sm_100a")
SHAPE = ExpertsShape(
    num_tokens=9,
    hidden_size=96,
    intermediate_size=64,
    num_local_experts=4,
    num_experts=4,
    top_k=2,
    dtype="bfloat16",
    activation=Activation.MXFP8,
    rounding=Rounding.RCEIL,
    captured=True,
)


def run(shape, target, inputs, *, workspace=None, **how):
    """Ours, in a workspace full of NaN that is exactly large enough, between fences."""
    weights = pack_weight(inputs.w13, target=target, gate_up=True), pack_weight(inputs.w2, target=target)
    size = memory.workspace_bytes(
        num_tokens=shape.num_tokens,
        top_k=shape.top_k,
        num_local_experts=shape.num_local_experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        token_formats=config.token_formats_of(target, shape.activation),
    )
    around = aligned_bytes(size + 512)
    out = torch.full((shape.num_tokens + 2, shape.hidden_size), 7.0, dtype=getattr(torch, shape.dtype))
    given = {"topk_ids": inputs.topk_ids, "topk_weights": inputs.topk_weights, "expert_map": inputs.expert_map, **how}
    launch.moe_experts(
        inputs.x,
        w13=weights[0],
        w2=weights[1],
        out=out[: shape.num_tokens],
        workspace=around[:size] if workspace is None else workspace,
        route_workspace=route_workspace(num_local_experts=shape.num_local_experts, device=torch.device("cpu")),
        num_experts=shape.num_experts,
        activation=shape.activation,
        rounding=shape.rounding,
        **given,
    )
    assert (around[size:] == 0xFF).all() and (out[shape.num_tokens :] == 7).all(), "memory beside was written"
    return out[: shape.num_tokens]


def check(shape, target, inputs, *, batch_invariant=False, **how):
    given = {"topk_ids": inputs.topk_ids, "topk_weights": inputs.topk_weights, "expert_map": inputs.expert_map, **how}
    numerics = {"activation": shape.activation, "rounding": shape.rounding, "out_dtype": getattr(torch, shape.dtype)}
    expected = moe_experts(inputs.x, w13=inputs.w13, w2=inputs.w2, **numerics, **given)
    assert compare(run(shape, target, inputs, batch_invariant=batch_invariant, **how), expected) == ""


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("num_tokens", [1, 5, 9, 64, 130])
def test_layer(monkeypatch, target, num_tokens):
    shape = replace(SHAPE, num_tokens=num_tokens)
    with emulated(monkeypatch, target) as seen:
        check(shape, target, make_inputs(shape, num_tokens))
    assert seen.names() == ["route_and_dispatch", "w13", "w2", "combine"]
    assert {rows for _, _, rows in seen.launches} == {2 * num_tokens}, "runs aren't padded"
    first, second = seen.launches[1][1], seen.launches[2][1]
    if target == "sm_90a":
        assert not first.early_counts and second.early_counts
        few = num_tokens <= 48  # 24 for each expert
        wanted = TokenFormat.MXFP8_FP32_SCALES if few else TokenFormat.BF16_PERMUTED
        assert seen.launches[0][1] is first.token_format is first.out_format is second.token_format is wanted


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("change", [{"rounding": Rounding.FLOOR}, {"dtype": "float16"}, {"top_k": 4}, {"top_k": 1}])
def test_variants(monkeypatch, target, change):
    shape = replace(SHAPE, **change)
    with emulated(monkeypatch, target):
        check(shape, target, make_inputs(shape, 3))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("num_tokens", [9, 130])
def test_tokens_that_arrive_quantized(monkeypatch, target, num_tokens):
    """The result is that of the tokens that they were made of, in chunks too, and in each format."""
    shape = replace(SHAPE, num_tokens=num_tokens, num_local_experts=3, num_experts=8, quantized=True)
    inputs, plain = make_inputs(shape, 4), make_inputs(replace(shape, quantized=False, dtype="float32"), 4)
    assert torch.equal(inputs.x.codes.view(torch.uint8), quantize_mxfp8(plain.x)[0].view(torch.uint8))
    with emulated(monkeypatch, target) as seen:
        check(shape, target, inputs)
        monkeypatch.setattr(config, "MOST_ROWS", 64)
        check(shape, target, inputs)
        with pytest.raises(ValueError, match="neither router weights"):
            check(shape, target, inputs, weight_on_input=True)
    assert len(seen.names()) == 4 * (1 + -(-num_tokens // 32))


def test_unquantized_activations(monkeypatch):
    shape = replace(SHAPE, activation=Activation.BF16)
    with emulated(monkeypatch) as seen:
        check(shape, "sm_90a", make_inputs(shape, 3))
    assert seen.launches[0][1] is TokenFormat.BF16_PERMUTED
    with emulated(monkeypatch, "sm_100a"), pytest.raises(ValueError, match="activation='bf16' is served on sm_90 only"):
        run(shape, "sm_100a", make_inputs(shape, 3))


@pytest.mark.parametrize("target", TARGETS)
def test_experts_of_other_ranks(monkeypatch, target):
    shape = replace(SHAPE, num_local_experts=3, num_experts=16, num_tokens=40)
    inputs = make_inputs(shape, 5)
    with emulated(monkeypatch, target) as seen:
        check(shape, target, inputs)
        nobody = inputs._replace(expert_map=torch.full_like(inputs.expert_map, -1))
        assert (run(shape, target, nobody) == 0).all()
    assert seen.launches[0][2] == 80, "any of them may be here"
    if target == "sm_90a":
        assert seen.launches[1][1].token_tile == 16, "15 of the 80 rows are expected: 5 for each expert, 9 at most"


@pytest.mark.parametrize("target", TARGETS)
def test_everything_to_one_expert_and_twice_to_the_same(monkeypatch, target):
    shape = replace(SHAPE, num_tokens=70)
    inputs = make_inputs(shape, 6)
    with emulated(monkeypatch, target):
        check(shape, target, inputs._replace(topk_ids=torch.full_like(inputs.topk_ids, 2)))
        check(shape, target, inputs._replace(topk_ids=inputs.topk_ids.to(torch.int64)))
        some = inputs.topk_ids.clone()
        some[::2, 1] = some[::2, 0]
        check(shape, target, inputs._replace(topk_ids=some))


@pytest.mark.parametrize("target", TARGETS)
def test_router_weight_on_input_no_weight_and_a_shared_expert(monkeypatch, target):
    inputs = make_inputs(SHAPE, 8)
    shared = torch.randn(9, 96, generator=torch.Generator().manual_seed(1)).bfloat16() * 50
    with emulated(monkeypatch, target) as seen:
        check(SHAPE, target, inputs, weight_on_input=True)
        assert not seen.launches[-1][1].weighted
        check(SHAPE, target, inputs, topk_weights=None)
        check(SHAPE, target, inputs, shared=shared)


@pytest.mark.parametrize("target", TARGETS)
def test_many_tokens_go_in_chunks(monkeypatch, target):
    monkeypatch.setattr(config, "MOST_ROWS", 64)
    shape = replace(SHAPE, num_tokens=75)
    with emulated(monkeypatch, target) as seen:
        inputs = make_inputs(shape, 9)
        check(shape, target, inputs)
        check(shape, target, inputs, shared=torch.randn(75, 96).bfloat16())
    chunk = ["route_and_dispatch", "w13", "w2", "combine"]
    assert seen.names() == 2 * 3 * chunk
    assert [rows for name, _, rows in seen.launches if name == "w13"] == 2 * [64, 64, 22]


def test_no_tokens(monkeypatch):
    shape = replace(SHAPE, num_tokens=0)
    with emulated(monkeypatch) as seen:
        inputs = make_inputs(shape, 1)
        assert run(shape, "sm_90a", inputs).shape == (0, 96)
        check(shape, "sm_90a", inputs)
    assert not seen.launches


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_left_of_the_call_before(monkeypatch, target):
    """A workspace that held more tokens, as in a graph replayed after a prefill."""
    formats = config.token_formats_of(target, Activation.MXFP8)
    many = replace(SHAPE, num_tokens=130)
    sizes = {"top_k": 2, "num_local_experts": 4, "hidden_size": 96, "intermediate_size": 64, "token_formats": formats}
    workspace = aligned_bytes(memory.workspace_bytes(num_tokens=130, **sizes))
    with emulated(monkeypatch, target):
        inputs = make_inputs(SHAPE, 2)
        alone = run(SHAPE, target, inputs)
        run(many, target, make_inputs(many, 3), workspace=workspace)
        again = run(SHAPE, target, inputs, workspace=workspace)
    assert torch.equal(alone.nan_to_num(), again.nan_to_num())


@pytest.mark.parametrize("target", TARGETS)
def test_padding_after_a_step_with_tokens_gives_zeros(monkeypatch, target):
    """A graph whose rank has no token in this step, with what the step before left in its buffers."""
    formats = config.token_formats_of(target, Activation.MXFP8)
    sizes = {"top_k": 2, "num_local_experts": 4, "hidden_size": 96, "intermediate_size": 64, "token_formats": formats}
    workspace = aligned_bytes(memory.workspace_bytes(num_tokens=9, **sizes))
    inputs = make_inputs(SHAPE, 2)
    shared = torch.randn(9, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    nan = inputs._replace(x=torch.full_like(inputs.x, float("nan")))
    with emulated(monkeypatch, target):
        assert run(SHAPE, target, inputs, workspace=workspace).nan_to_num().any()
        for nowhere in (-1, 4, 2**31 - 1):
            padding = nan._replace(topk_ids=torch.full_like(inputs.topk_ids, nowhere))
            assert (run(SHAPE, target, padding, workspace=workspace) == 0).all()
            assert torch.equal(run(SHAPE, target, padding, workspace=workspace, shared=shared), shared)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("load", [0, 1, 31, 32, 33, 127, 128, 129, 140])
def test_loads_of_one_expert(monkeypatch, target, load):
    """So many tokens go to expert 3 and no other, the rest nowhere or to another one."""
    shape = replace(SHAPE, num_tokens=140)
    inputs = make_inputs(shape, load)
    with emulated(monkeypatch, target):
        for elsewhere in (-1, 9, 1):
            ids = torch.full_like(inputs.topk_ids, elsewhere)
            ids[:load, 0] = 3
            check(shape, target, inputs._replace(topk_ids=ids))


@pytest.mark.parametrize("target", TARGETS)
def test_more_tokens_never_need_less(target):
    formats = config.token_formats_of(target, Activation.MXFP8)
    for top_k, experts in ((8, 128), (8, 8), (1, 1), (10, 512)):
        sizes = {"top_k": top_k, "num_local_experts": experts, "hidden_size": 4096, "intermediate_size": 1536}
        needed = [
            memory.workspace_bytes(num_tokens=tokens, token_formats=formats, **sizes)
            for tokens in (*range(0, 600), *range(600, 20000, 97))
        ]
        assert needed == sorted(needed) and needed[0] == 0
        rows = config.chunk_tokens(top_k) * top_k
        assert needed[-1] < rows * (4096 + 1536) * 2 * 1.02 + 2**20


def test_chunks_start_where_wide_accesses_may():
    for top_k in range(1, 17):
        tokens = config.chunk_tokens(top_k)
        assert tokens % 8 == 0 and tokens * top_k <= config.MOST_ROWS


REFUSALS = {
    "x_shape": (lambda i: {"x": i.x[:5]}, "x must be"),
    "out_dtype": (lambda i: {"out": torch.zeros(9, 96)}, "serve with --dtype bfloat16"),
    "out_shape": (lambda i: {"out": torch.zeros(8, 96, dtype=torch.bfloat16)}, "out must be"),
    "workspace": (lambda i: {"workspace": aligned_bytes(256)}, "workspace of 9 tokens must be flat torch.uint8"),
    "workspace_start": (lambda i: {"workspace": aligned_bytes(2**16 + 8)[8:]}, "multiple of 128 bytes"),
    "weights": (lambda i: {"weight_on_input": True, "topk_weights": None}, "weight_on_input needs topk_weights"),
    "experts": (lambda i: {"num_experts": 3}, "num_experts is 3"),
    "w2": (lambda i: {"w2": pack_weight(_cut(i.w2), target="sm_90a")}, r"w13 must be \[E, 2 \* I, H\]"),
    "gate_up": (lambda i: {"w13": pack_weight(i.w13, target="sm_90a")}, "packed with gate_up=True"),
}


def _cut(weight: Mxfp8Tensor) -> Mxfp8Tensor:
    return Mxfp8Tensor(weight.codes[:, :64].contiguous(), weight.scales[:, :64].contiguous())


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_named(monkeypatch, case):
    inputs = make_inputs(SHAPE, 1)
    given = {
        "x": inputs.x,
        "topk_ids": inputs.topk_ids,
        "topk_weights": inputs.topk_weights,
        "w13": pack_weight(inputs.w13, target="sm_90a", gate_up=True),
        "w2": pack_weight(inputs.w2, target="sm_90a"),
        "out": torch.zeros(9, 96, dtype=torch.bfloat16),
        "workspace": aligned_bytes(2**16),
    }
    change, message = REFUSALS[case]
    with emulated(monkeypatch):
        given["route_workspace"] = route_workspace(num_local_experts=4, device=torch.device("cpu"))
        launch.moe_experts(given.pop("x"), **given)
        given["x"] = inputs.x
        given |= change(inputs)
        with pytest.raises((ValueError, TypeError), match=message):
            launch.moe_experts(given.pop("x"), **given)


def test_tensors_elsewhere_are_named():
    inputs = make_inputs(SHAPE, 1)
    with pytest.raises(ValueError, match="x can't be on cpu"):
        launch.moe_experts(
            inputs.x,
            topk_ids=inputs.topk_ids,
            topk_weights=None,
            w13=pack_weight(inputs.w13, target="sm_90a", gate_up=True),
            w2=pack_weight(inputs.w2, target="sm_90a"),
            out=inputs.x,
            workspace=aligned_bytes(256),
            route_workspace=torch.zeros(1, dtype=torch.int32),
        )


@pytest.mark.parametrize("target", TARGETS)
def test_batch_invariant_layers_have_one_kernel_for_any_number_of_tokens(monkeypatch, target):
    """And warm up that one alone."""
    compiled, formats = set(), []
    with emulated(monkeypatch, target) as seen:
        emulate = launch.plan.compile_config
        monkeypatch.setattr(
            launch.plan,
            "compile_config",
            lambda config, *, target: compiled.add(config) or emulate(config, target=target),
        )
        monkeypatch.setattr(launch.dispatch, "warm_up", lambda **how: formats.append(how["token_formats"]))
        monkeypatch.setattr(launch.combine, "warm_up", lambda **how: None)
        launch.warm_up(
            device=torch.device("cpu"),
            hidden_size=96,
            intermediate_size=64,
            num_local_experts=4,
            num_experts=4,
            top_k=2,
            max_tokens=300,
            dtype=torch.bfloat16,
            has_map=False,
            activation=Activation.MXFP8,
            rounding=Rounding.RCEIL,
            batch_invariant=True,
        )
        warmed = set(compiled)
        for tokens in (1, 2, 9, 48, 64, 300):
            shape = replace(SHAPE, num_tokens=tokens)
            check(shape, target, make_inputs(shape, tokens), batch_invariant=True)
        used = {name: {made for each, made, _ in seen.launches if each == name} for name in ("w13", "w2")}
    assert [len(configs) for configs in used.values()] == [1, 1] and used["w13"] | used["w2"] == warmed
    assert formats == [(seen.launches[0][1],)]
    by_tokens = [
        config.step_configs(
            layer_of(replace(SHAPE, num_tokens=tokens, batch_invariant=True), target),
            tokens,
            sm_count=132,
            dtype="bfloat16",
            rounding=Rounding.RCEIL,
        )
        for tokens in (1, 300)
    ]
    assert all(used["w13"] | used["w2"] <= set(configs) for configs in by_tokens)


def test_batch_invariant_weights_are_whole(monkeypatch):
    inputs = make_inputs(SHAPE, 3)
    with emulated(monkeypatch), pytest.raises(ValueError, match="batch_invariant needs whole weights"):
        run(SHAPE, "sm_90a", inputs, way=OneLaunch(torch.zeros(132, dtype=torch.int32)), batch_invariant=True)


@pytest.mark.parametrize("target", TARGETS)
def test_warm_up_compiles_what_calls_choose(monkeypatch, target):
    warmed = {"gemm": set(), "dispatch": [], "combine": []}
    shape = replace(SHAPE, num_local_experts=3, num_experts=8)
    with emulated(monkeypatch, target) as seen:
        compiled = launch.plan.compile_config
        monkeypatch.setattr(
            launch.plan,
            "compile_config",
            lambda config, *, target: warmed["gemm"].add(config) or compiled(config, target=target),
        )
        monkeypatch.setattr(launch.dispatch, "warm_up", lambda **how: warmed["dispatch"].append(how))
        monkeypatch.setattr(launch.combine, "warm_up", lambda **how: warmed["combine"].append(how))
        launch.warm_up(
            device=torch.device("cpu"),
            hidden_size=96,
            intermediate_size=64,
            num_local_experts=3,
            num_experts=8,
            top_k=2,
            max_tokens=300,
            dtype=torch.bfloat16,
            has_map=True,
            activation=Activation.MXFP8,
            rounding=Rounding.RCEIL,
        )
        before = set(warmed["gemm"])
        for tokens in (1, 2, 3, 5, 9, 17, 30, 66, 129, 300):
            at = replace(shape, num_tokens=tokens)
            run(at, target, make_inputs(at, tokens))
        used = {made for name, made, _ in seen.launches if name in ("w13", "w2")}
        assert used <= before and len(used) >= 2
    (how,) = warmed["dispatch"]
    assert how["max_tokens"] == 300 and how["has_map"] and how["id_dtype"] == "int32"
    assert how["token_formats"] == config.token_formats_of(target, Activation.MXFP8)
    assert warmed["combine"] == [{"hidden_size": 96, "top_k": 2, "dtype": "bfloat16", "weighted": True}]
