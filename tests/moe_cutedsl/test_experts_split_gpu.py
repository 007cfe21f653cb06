"""Experts in parts on a GPU of one domain, launched on equal shares of its SMs: bits of whole weights, in graphs too.

By area: ``-k bits``, ``graphs``, ``tokens``, ``compare``, ``memory``.
"""

import gc
from dataclasses import replace

import pytest
import torch
from test_experts_gpu import SHAPE

from vllm_rose_plugin.kernels.gemm.column_split import plan_split, split_packed
from vllm_rose_plugin.kernels.moe_experts import config, launch, memory
from vllm_rose_plugin.kernels.moe_experts.compare_ways import WHOLE, compare_ways
from vllm_rose_plugin.kernels.moe_experts.family import make_inputs, run_kernels
from vllm_rose_plugin.kernels.moe_experts.make_ways import BACKFILL, DEFAULT, SINGLE_LAUNCH, Domains
from vllm_rose_plugin.kernels.moe_route.launch import route_workspace
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts
from vllm_rose_plugin.memory.driver import Driver

pytestmark = pytest.mark.gpu
WAYS = (DEFAULT, BACKFILL, SINGLE_LAUNCH)


def target():
    return device_facts(torch.cuda.current_device()).target


def forced(count):
    torch.zeros(1, device="cuda")  # the primary context, which green contexts retain
    return Domains(Driver(device=torch.cuda.current_device()), count, forced=True)


def splits_of(shape, parts):
    return (
        plan_split(n=2 * shape.intermediate_size, parts=parts, target=target(), gate_up=True),
        plan_split(n=shape.hidden_size, parts=parts, target=target()),
    )


class Layer:
    """Whole weights, and their parts in memory of their own."""

    def __init__(self, shape, parts, seed=1):
        self.shape, self.inputs = shape, make_inputs(shape, seed)
        self.whole = self.inputs.packed[:1], self.inputs.packed[1:]
        self.parts = [
            split_packed(split, weight, lambda _, size, dtype: torch.empty(size, dtype=dtype, device="cuda"))
            for split, weight in zip(splits_of(shape, parts), self.inputs.packed, strict=True)
        ]

    def run(self, inputs=None, *, way=None, shape=None):
        weights = self.whole if way is None else self.parts
        return run_kernels(shape or self.shape, inputs or self.inputs, *weights, way=way)


def same(a, b):
    torch.cuda.synchronize()
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 513])
def test_bits_of_whole_weights(parts, name, num_tokens):
    """W8A8 with few tokens, W8A16 with many; one token is NaN, two go nowhere, a third of all to one expert."""
    layer = Layer(replace(SHAPE, num_tokens=num_tokens), parts)
    way = forced(parts).way(name)
    expected = layer.run()
    for _ in range(3):
        assert same(layer.run(way=way), expected)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("split", ["w13", "w2"])
def test_bits_where_one_weight_is_whole(name, split):
    layer = Layer(SHAPE, 2)
    way, expected = forced(2).way(name), layer.run()
    w13, w2 = (layer.parts[0], layer.whole[1]) if split == "w13" else (layer.whole[0], layer.parts[1])
    assert same(run_kernels(SHAPE, layer.inputs, w13, w2, way=way), expected)


@pytest.mark.parametrize("name", WAYS)
def test_bits_with_an_odd_number_of_tiles(name):
    """Three tiles of 64 columns, and five, to a part."""
    layer = Layer(replace(SHAPE, intermediate_size=384, hidden_size=640), 2)
    assert same(layer.run(way=forced(2).way(name)), layer.run())


@pytest.mark.parametrize("name", WAYS)
def test_groups_without_tokens(name):
    """All tokens to one expert, and none to any."""
    layer = Layer(SHAPE, 2)
    way = forced(2).way(name)
    one = layer.inputs._replace(topk_ids=torch.full_like(layer.inputs.topk_ids, 5))
    nobody = layer.inputs._replace(topk_ids=torch.full_like(layer.inputs.topk_ids, -1))
    assert same(layer.run(one, way=way), layer.run(one))
    assert (layer.run(nobody, way=way) == 0).all()


class Call:
    """The layer's kernels alone, in memory that is kept: what a serving engine captures."""

    def __init__(self, layer, way):
        shape, self.layer, self.way = layer.shape, layer, way
        size = memory.workspace_bytes(
            num_tokens=shape.num_tokens,
            top_k=shape.top_k,
            num_local_experts=shape.num_local_experts,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            token_formats=config.token_formats_of(target(), shape.activation),
        )
        self.workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
        self.route = route_workspace(num_local_experts=shape.num_local_experts, device=self.workspace.device)
        self.out = torch.empty(shape.num_tokens, shape.hidden_size, dtype=torch.bfloat16, device="cuda")

    def __call__(self):
        inputs = self.layer.inputs
        launch.moe_experts(
            inputs.x,
            topk_ids=inputs.topk_ids,
            topk_weights=inputs.topk_weights,
            w13=self.layer.parts[0],
            w2=self.layer.parts[1],
            way=self.way,
            out=self.out,
            workspace=self.workspace,
            route_workspace=self.route,
            activation=self.layer.shape.activation,
            rounding=self.layer.shape.rounding,
        )

    def captured(self):
        self()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("num_tokens", [4, 256])
def test_graphs_replayed_a_thousand_times(name, num_tokens):
    """With new tokens and routes between; every result is that of whole weights."""
    layer = Layer(replace(SHAPE, num_tokens=num_tokens), 2)
    call = Call(layer, forced(2).way(name))
    graph = call.captured()
    inputs = layer.inputs
    for round_ in range(4):
        fresh = make_inputs(layer.shape, 10 + round_)
        inputs.x.copy_(fresh.x)
        inputs.topk_ids.copy_(fresh.topk_ids)
        inputs.topk_weights.copy_(fresh.topk_weights)
        expected = layer.run()
        for _ in range(250):
            graph.replay()
        assert same(call.out, expected), f"round {round_}"
    del graph


@pytest.mark.parametrize("name", WAYS)
def test_graphs_are_destroyed_and_captured_again(name):
    layer = Layer(SHAPE, 2)
    way, expected = forced(2).way(name), layer.run()
    for _ in range(20):
        call = Call(layer, way)
        graph = call.captured()
        call.out.zero_()
        graph.replay()
        assert same(call.out, expected)
        del graph
    gc.collect()
    assert same(layer.run(way=way), expected), "streams are as before"


def test_graphs_of_two_engines_share_the_partitions():
    """Two layers, captured on the same streams, replayed by turns and in two streams at once."""
    way = forced(2).way(DEFAULT)
    layers = [Layer(SHAPE, 2, seed=seed) for seed in (1, 2)]
    expected = [layer.run() for layer in layers]
    calls = [Call(layer, way) for layer in layers]
    graphs = [call.captured() for call in calls]
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(100):
        for call in calls:
            call.out.zero_()
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        assert all(same(call.out, each) for call, each in zip(calls, expected, strict=True))
    del graphs


def test_graphs_survive_a_launch_that_raises():
    """A capture in which a launch fails ends with its error; the streams can be captured again."""
    layer = Layer(SHAPE, 2)
    way = forced(2).way(DEFAULT)
    expected = layer.run()

    def fails():
        raise RuntimeError("on purpose")

    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="on purpose"), torch.cuda.graph(graph):
        way.streams.run([lambda: None, fails])
    del graph
    call = Call(layer, way)
    again = call.captured()
    again.replay()
    assert same(call.out, expected)
    del again


def test_compare_ways_of_a_forced_layer(tmp_path, monkeypatch):
    """All ways pass against whole weights, are timed, and give their memory back."""
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path))
    domains = forced(2)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    found = compare_ways(
        shape_of=lambda tokens: replace(SHAPE, num_tokens=tokens),
        tokens=(1, 64),
        ways={name: domains.way(name) for name in WAYS},
        splits=splits_of(SHAPE, 2),
        domains=domains,
        checked=(17, 129, 520),
    )
    assert found.failed == {} and set(found.microseconds) == {WHOLE, *WAYS}
    assert all(time > 0 for times in found.microseconds.values() for time in times) and len(found.best()) == 2
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > before - 256 * 2**20
    print({name: [round(time, 2) for time in times] for name, times in found.microseconds.items()})


def test_memory_of_many_layers_comes_back():
    from vllm_rose_plugin.layers.expert_parts import ExpertParts

    domains, splits = forced(2), splits_of(SHAPE, 2)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(20):
        parts = ExpertParts(
            splits={"w13": splits[0], "w2": splits[1]},
            num_experts=SHAPE.num_local_experts,
            widths={"w13": SHAPE.hidden_size, "w2": SHAPE.intermediate_size},
            ways="some",
            packed=True,
            allocate=domains.allocate,
            device=torch.device("cuda"),
        )
        assert torch.cuda.mem_get_info()[0] < before
        parts.close()
    assert torch.cuda.mem_get_info()[0] > before - 64 * 2**20
