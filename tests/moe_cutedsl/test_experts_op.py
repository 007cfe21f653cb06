"""``torch.ops.rose.moe_experts``: what it mutates, under torch.compile's rules, and which provider serves."""

import importlib

import torch
from experts_emulation import aligned_bytes, emulated
from test_experts_launch import SHAPE

from vllm_rose_plugin.kernels import call_counts
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.moe_experts import memory, ops
from vllm_rose_plugin.kernels.moe_experts.config import token_formats_of
from vllm_rose_plugin.kernels.moe_experts.family import compare, make_inputs
from vllm_rose_plugin.kernels.moe_experts.reference import moe_experts
from vllm_rose_plugin.kernels.moe_route.launch import route_workspace


def arguments(inputs):
    weights = inputs.w13.codes, inputs.w13.scales, inputs.w2.codes, inputs.w2.scales
    return (inputs.x, inputs.topk_ids, inputs.topk_weights, *weights)


def calls():
    return dict(call_counts.snapshot().get("moe_experts", {}))


def expected(inputs):
    return moe_experts(
        inputs.x, topk_ids=inputs.topk_ids, topk_weights=inputs.topk_weights, w13=inputs.w13, w2=inputs.w2
    )


def test_without_packed_scales_it_is_the_reference():
    inputs = make_inputs(SHAPE, 1)
    out = torch.full((9, 96), 7.0, dtype=torch.bfloat16)
    before = calls()
    assert torch.ops.rose.moe_experts(*arguments(inputs), out=out) is None
    assert torch.equal(out.nan_to_num(), expected(inputs).nan_to_num())
    assert calls().get("reference", 0) == before.get("reference", 0) + 1


def test_with_them_it_is_ours(monkeypatch):
    inputs = make_inputs(SHAPE, 1)
    for target in ("sm_90a", "sm_100a"):
        out = torch.full((9, 96), 7.0, dtype=torch.bfloat16)
        size = memory.workspace_bytes(
            num_tokens=9,
            top_k=2,
            num_local_experts=4,
            hidden_size=96,
            intermediate_size=64,
            token_formats=token_formats_of(target, SHAPE.activation),
        )
        before = calls()
        with emulated(monkeypatch, target) as seen:
            torch.ops.rose.moe_experts(
                *arguments(inputs),
                out=out,
                w13_packed=pack_weight(inputs.w13, target=target, gate_up=True).scales,
                w2_packed=pack_weight(inputs.w2, target=target).scales,
                workspace=aligned_bytes(size),
                route_workspace=route_workspace(num_local_experts=4, device=torch.device("cpu")),
            )
        assert compare(out, expected(inputs)) == ""
        assert len(seen.launches) == 4 and calls()["rose"] == before.get("rose", 0) + 1


def test_schema_says_what_is_written_and_graphs_may_hold_it():
    schema = torch.ops.rose.moe_experts.default._schema
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == {"out", "workspace", "route_workspace"} and not schema.returns
    assert torch.Tag.cudagraph_unsafe not in torch.ops.rose.moe_experts.default.tags


def test_torch_compile_passes_it_by():
    inputs = make_inputs(SHAPE, 2)
    args = arguments(inputs)
    before = [a.view(torch.uint8).clone() for a in args]

    def layer(x):
        out = torch.empty_like(x)
        torch.ops.rose.moe_experts(x, *args[1:], out=out)
        return out * 2

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(args[0]).nan_to_num(), (2 * expected(inputs)).nan_to_num())
    assert all(torch.equal(a.view(torch.uint8), b) for a, b in zip(args, before, strict=True)), "an input was written"


def test_registering_again_changes_nothing():
    before = torch.ops.rose.moe_experts.default
    importlib.reload(ops)
    assert torch.ops.rose.moe_experts.default is before
