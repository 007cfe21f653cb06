"""Routing and dispatch on a GPU: numbers, replays under changing routing, poisoned surroundings."""

from dataclasses import replace

import pytest
import torch

from vllm_rose_plugin.kernels.contracts import Activation, Rounding, TokenFormat
from vllm_rose_plugin.kernels.jit import providers
from vllm_rose_plugin.kernels.moe_dispatch import family, launch, threshold
from vllm_rose_plugin.kernels.moe_dispatch.config import needs_scale_rows
from vllm_rose_plugin.kernels.moe_dispatch.reference import max_rows
from vllm_rose_plugin.kernels.moe_experts.family import ExpertsShape
from vllm_rose_plugin.kernels.moe_experts.one_launch import check_one_launch
from vllm_rose_plugin.kernels.moe_route import family as route_family
from vllm_rose_plugin.kernels.moe_route import launch as route_launch
from vllm_rose_plugin.kernels.moe_route.family import RouteShape
from vllm_rose_plugin.kernels.moe_route.reference import route_tokens
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts

pytestmark = pytest.mark.gpu
REPLAYS = 2000


def formats() -> tuple[TokenFormat, ...]:
    """Those that the device's GEMM reads."""
    if device_facts(torch.cuda.current_device()).target == "sm_90a":
        return (TokenFormat.MXFP8_FP32_SCALES, TokenFormat.BF16_PERMUTED)
    return (TokenFormat.MXFP8_TCGEN05,)


def shape_of(num_tokens: int, token_format: TokenFormat, *, experts=128, here=32, top_k=8, hidden=4096, **how):
    how = {"dtype": "bfloat16", "activation": Activation.MXFP8, "rounding": Rounding.RCEIL, "weighted": False, **how}
    alignment = how.pop("alignment", 1)
    return family.DispatchShape(
        RouteShape(num_tokens, top_k, here, experts, alignment, "int64"), hidden, token_format=token_format, **how
    )


def check(shape, *, seed=0, two_launches=False) -> None:
    inputs = family.make_inputs(shape, seed)
    result = family.by_rose(shape, two_launches=two_launches)(*inputs)
    assert family.compare(result, family.by_reference(shape)(*inputs)) == ""


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 32, 128, 500, 513, 4096, 20000])
@pytest.mark.parametrize("alignment", [1, 128])
def test_models(num_tokens, alignment):
    for token_format in formats():
        for two_launches in (False, True):
            check(shape_of(num_tokens, token_format, alignment=alignment), two_launches=two_launches)
        check(shape_of(num_tokens, token_format, experts=512, here=512, top_k=10, alignment=alignment))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("hidden", [64, 96, 2688, 7168])
def test_dtypes_sizes_and_router_weights(dtype, hidden):
    for token_format in formats():
        for weighted in (False, True):
            for num_tokens in (33, 2000):
                check(shape_of(num_tokens, token_format, hidden=hidden, dtype=dtype, weighted=weighted))


@pytest.mark.parametrize("num_tokens", [1, 100, 8192, 60000])
@pytest.mark.parametrize("id_dtype", ["int32", "int64"])
def test_routing_alone(num_tokens, id_dtype):
    for here, experts in ((1, 1), (8, 128), (128, 128), (512, 512)):
        shape = RouteShape(num_tokens, 8, here, experts, 16, id_dtype)
        inputs = route_family.random_routing(shape, 3)
        result = route_family.by_rose(shape)(*inputs)
        assert route_family.compare(result, route_family.by_reference(shape)(*inputs)) == ""


@pytest.mark.parametrize("num_tokens", [16, 128, 2048])
def test_replays_under_changing_routing(num_tokens):
    """A graph of a call, replayed with other ids, another map and other tokens each time."""
    for token_format in formats():
        shape = shape_of(num_tokens, token_format, hidden=256)
        x, ids, expert_map, _ = family.make_inputs(shape, 0)
        run, reference = family.by_rose(shape), family.by_reference(shape)
        run(x, ids, expert_map, None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            routed, tokens = run(x, ids, expert_map, None)
        many = [family.make_inputs(shape, seed) for seed in range(20)]
        wanted = [reference(*inputs) for inputs in many]
        for i in range(REPLAYS):
            inputs = many[i % len(many)]
            for place, value in zip((x, ids, expert_map), inputs, strict=False):
                place.copy_(value)
            tokens.data.view(torch.uint8).fill_(0xAB)
            graph.replay()
            if i % 20 < 2 or i > REPLAYS - 40:
                assert family.compare((routed, tokens), wanted[i % len(many)]) == "", i
            else:
                assert torch.equal(routed.slots, wanted[i % len(many)][0].slots), i


def test_two_streams_with_a_workspace_each():
    shape = shape_of(64, formats()[0])
    inputs = family.make_inputs(shape, 1)
    runs = [family.by_rose(shape) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    torch.cuda.synchronize()
    for _ in range(200):
        for run, stream in zip(runs, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(run(*inputs))
    torch.cuda.synchronize()
    wanted = family.by_reference(shape)(*inputs)
    assert all(family.compare(result, wanted) == "" for result in results[-8:])
    assert all(torch.equal(routed.slots, wanted[0].slots) for routed, _ in results)


def test_nothing_around_the_results_is_touched():
    for token_format in formats():
        shape = shape_of(100, token_format, hidden=96, alignment=8)
        x, ids, expert_map, _ = family.make_inputs(shape, 2)
        expected = route_tokens(ids, num_local_experts=32, expert_map=expert_map, alignment=8)
        rows = max_rows(num_tokens=100, top_k=8, num_local_experts=32, alignment=8)
        size = {"num_rows": rows, "hidden_size": 96, "num_local_experts": 32, "token_format": token_format}
        buffer = torch.full((launch.tokens_bytes(**size) + 8192,), 0xAB, dtype=torch.uint8, device="cuda")
        out = launch.tokens_views(buffer[4096:-4096], **size)
        words = route_launch.routed_size(num_tokens=100, top_k=8, num_local_experts=32)
        around = torch.full((words + 2048,), -77, dtype=torch.int32, device="cuda")
        with_scale_rows = needs_scale_rows(token_format=token_format, alignment=8)
        routed = route_launch.routed_views(
            around[1024:-1024], num_tokens=100, top_k=8, num_local_experts=32, with_scale_rows=with_scale_rows
        )
        workspace = route_launch.route_workspace(num_local_experts=32, device=x.device)
        for two_launches in (False, True):
            launch.route_and_dispatch(
                x,
                ids,
                num_local_experts=32,
                workspace=workspace,
                token_format=token_format,
                expert_map=expert_map,
                alignment=8,
                routed=routed,
                out=out,
                two_launches=two_launches,
            )
            assert (buffer[:4096] == 0xAB).all() and (buffer[-4096:] == 0xAB).all()
            assert (around[:1024] == -77).all() and (around[-1024:] == -77).all()
            assert (out.data.view(torch.uint8)[int(expected.expert_offsets[-1]) :] == 0xAB).all()
            assert torch.equal(routed.slots, expected.slots)


def test_all_to_one_expert_and_none_here():
    for token_format in formats():
        shape = replace(shape_of(300, token_format), routing=RouteShape(300, 8, 128, 128, 1, "int64"))
        run, reference = family.by_rose(shape), family.by_reference(shape)
        x, ids, _, _ = family.make_inputs(shape, 5)
        for value in (0, 127, -1, 128):
            inputs = (x, torch.full_like(ids, value), None, None)
            assert family.compare(run(*inputs), reference(*inputs)) == ""


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("experts", "everywhere", "top_k"), [(16, 128, 8), (128, 128, 8), (512, 512, 10)])
def test_one_launch_and_two_agree_where_start_up_compares_them(
    tmp_path, monkeypatch, experts, everywhere, top_k, quantized
):
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path))
    found, choose = [], providers.choose
    monkeypatch.setattr(
        "vllm_rose_plugin.kernels.moe_experts.one_launch.choose", lambda **how: found.append(choose(**how)) or found[-1]
    )
    shape = ExpertsShape(
        1, 4096, 1536, experts, everywhere, top_k, "bfloat16", Activation.MXFP8, Rounding.RCEIL, True, quantized
    )
    threshold.clear()
    try:
        check_one_launch(shape, most_tokens=8192, **device_facts(0)._asdict())
        lowered = threshold.digest()
    finally:
        threshold.clear()
    assert found and all(choice.verdict.failed == {} for choice in found)
    for choice in found:
        (call,), times = choice.kernels, choice.verdict.microseconds
        print(f"{call.routing.num_tokens} tokens in {call.token_format}: {times}")
        assert set(times) == {"rose", family.TWO_LAUNCHES}
    assert bool(lowered) == any(choice.provider == family.TWO_LAUNCHES for choice in found)
