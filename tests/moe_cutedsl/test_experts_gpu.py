"""A layer of experts on a GPU against the reference: hard routings, replayed graphs, launches, neighbours in memory."""

from dataclasses import replace

import pytest
import torch

from vllm_rose_plugin.kernels.contracts import Activation, Rounding
from vllm_rose_plugin.kernels.jit import providers
from vllm_rose_plugin.kernels.moe_experts import config, launch, memory
from vllm_rose_plugin.kernels.moe_experts.family import FAMILY, ExpertsShape, compare, make_inputs
from vllm_rose_plugin.kernels.moe_experts.reference import moe_experts
from vllm_rose_plugin.kernels.moe_route.launch import route_workspace
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts

pytestmark = pytest.mark.gpu
SHAPE = ExpertsShape(
    num_tokens=64,
    hidden_size=1024,
    intermediate_size=512,
    num_local_experts=16,
    num_experts=16,
    top_k=8,
    dtype="bfloat16",
    activation=Activation.MXFP8,
    rounding=Rounding.RCEIL,
    captured=True,
)
_FENCE = 4096


class Layer:
    """A layer's weights and memory, all of it poisoned; calls of up to `shape.num_tokens` tokens."""

    def __init__(self, shape, seed=1):
        self.shape, self.inputs = shape, make_inputs(shape, seed)
        target = device_facts(torch.cuda.current_device()).target
        self.size = memory.workspace_bytes(
            num_tokens=shape.num_tokens,
            top_k=shape.top_k,
            num_local_experts=shape.num_local_experts,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            token_formats=config.token_formats_of(target, shape.activation),
        )
        self.around = torch.full((self.size + 2 * _FENCE,), 0xFF, dtype=torch.uint8, device="cuda")
        self.route = route_workspace(num_local_experts=shape.num_local_experts, device=self.around.device)
        self.warm()

    def warm(self):
        shape = self.shape
        launch.warm_up(
            device=self.around.device,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_local_experts=shape.num_local_experts,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            max_tokens=shape.num_tokens,
            dtype=getattr(torch, shape.dtype),
            has_map=self.inputs.expert_map is not None,
            activation=shape.activation,
            rounding=shape.rounding,
            quantized=shape.quantized,
            batch_invariant=shape.batch_invariant,
        )

    def __call__(self, x, topk_ids, topk_weights, out, **how):
        w13, w2 = self.inputs.packed
        launch.moe_experts(
            x,
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            w13=w13,
            w2=w2,
            out=out,
            workspace=self.around[_FENCE : _FENCE + self.size],
            route_workspace=self.route,
            num_experts=self.shape.num_experts,
            expert_map=self.inputs.expert_map,
            activation=self.shape.activation,
            rounding=self.shape.rounding,
            batch_invariant=self.shape.batch_invariant,
            **how,
        )

    def expected(self, x, topk_ids, topk_weights, **how):
        return moe_experts(
            x,
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            w13=self.inputs.w13,
            w2=self.inputs.w2,
            expert_map=self.inputs.expert_map,
            activation=self.shape.activation,
            rounding=self.shape.rounding,
            **how,
        )

    def check(self, x, topk_ids, topk_weights, **how):
        dtype = getattr(torch, self.shape.dtype) if self.shape.quantized else x.dtype
        out = torch.full((len(topk_ids), self.shape.hidden_size), 7.0, dtype=dtype, device=topk_ids.device)
        self(x, topk_ids, topk_weights, out, **how)
        assert compare(out, self.expected(x, topk_ids, topk_weights, out_dtype=dtype, **how)) == ""
        assert (self.around[:_FENCE] == 0xFF).all() and (self.around[_FENCE + self.size :] == 0xFF).all()
        return out


def random_routing(shape, tokens, seed):
    g = torch.Generator("cuda").manual_seed(seed)
    ids = torch.rand(tokens, shape.num_experts, generator=g, device="cuda").argsort(-1)[:, : shape.top_k]
    return ids.to(torch.int32).contiguous(), torch.rand(tokens, shape.top_k, generator=g, device="cuda") / 2 + 0.5


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 129, 1000, 9000])
def test_numbers_of_tokens(tokens, activation):
    if activation is Activation.BF16 and not device_facts(0).target.startswith("sm_90"):
        activation = Activation.MXFP8
    shape = replace(SHAPE, num_tokens=tokens, activation=activation)
    layer = Layer(shape)
    layer.check(layer.inputs.x, layer.inputs.topk_ids, layer.inputs.topk_weights)


@pytest.mark.parametrize("tokens", [1, 64, 129, 1000, 9000])
def test_tokens_that_arrive_quantized(tokens):
    """As the all-to-all brings them, in each format that a GEMM reads; most are for experts of other ranks."""
    layer = Layer(replace(SHAPE, num_tokens=tokens, num_experts=64, quantized=True))
    layer.check(layer.inputs.x, layer.inputs.topk_ids, layer.inputs.topk_weights)


@pytest.mark.parametrize(
    ("local", "everywhere", "top_k", "hidden", "intermediate"),
    [(1, 1, 1, 64, 32), (8, 128, 8, 4096, 1536), (3, 7, 2, 2688, 96), (512, 512, 10, 256, 64), (16, 16, 16, 96, 64)],
)
def test_shapes(local, everywhere, top_k, hidden, intermediate):
    for tokens in (1, 33, 300):
        shape = replace(
            SHAPE,
            num_tokens=tokens,
            num_local_experts=local,
            num_experts=everywhere,
            top_k=top_k,
            hidden_size=hidden,
            intermediate_size=intermediate,
        )
        layer = Layer(shape, seed=tokens)
        layer.check(layer.inputs.x, layer.inputs.topk_ids, layer.inputs.topk_weights)


@pytest.mark.parametrize("load", [0, 1, 31, 32, 33, 127, 128, 129, 400])
def test_loads_of_one_expert(load):
    """So many tokens go to expert 3 and no other; the rest go nowhere, or to the others."""
    shape = replace(SHAPE, num_tokens=400, top_k=2)
    layer = Layer(shape)
    x, weights = layer.inputs.x.nan_to_num(), layer.inputs.topk_weights
    for elsewhere in (-1, 16, 5):
        ids = torch.full((400, 2), elsewhere, dtype=torch.int32, device="cuda")
        ids[:load, 0] = 3
        layer.check(x, ids, weights)
        layer.check(x, ids.to(torch.int64), weights)


def test_an_expert_twice_in_a_row_and_nan_beside_numbers():
    layer = Layer(SHAPE)
    x = layer.inputs.x.clone()
    x[::3] = float("nan")
    x[1] = float("inf")
    ids = torch.zeros_like(layer.inputs.topk_ids)
    layer.check(x, ids, layer.inputs.topk_weights)
    ids = layer.inputs.topk_ids.clone()
    ids[:, 5], ids[::2, 7] = ids[:, 1], ids[::2, 0]  # twice, beside others
    layer.check(x, ids, layer.inputs.topk_weights)


def test_shared_expert_and_weight_on_input():
    layer = Layer(SHAPE)
    given = layer.inputs.x, layer.inputs.topk_ids, layer.inputs.topk_weights
    layer.check(*given, shared=torch.randn_like(layer.inputs.x) * 30)
    layer.check(*given, weight_on_input=True)


def test_a_batch_of_twenty_thousand_tokens_goes_in_chunks():
    shape = replace(SHAPE, num_tokens=20_000, hidden_size=512, intermediate_size=128)
    layer = Layer(shape)
    layer.check(layer.inputs.x, layer.inputs.topk_ids, layer.inputs.topk_weights)


@pytest.mark.parametrize("tokens", [1, 16, 64, 600])
def test_replays_follow_their_buffers_row_by_row(tokens):
    shape = replace(SHAPE, num_tokens=tokens, num_local_experts=8)
    layer = Layer(shape)
    x, out = layer.inputs.x.nan_to_num(), torch.empty_like(layer.inputs.x)
    ids, weights = layer.inputs.topk_ids, layer.inputs.topk_weights
    expert_map = layer.inputs.expert_map
    layer(x, ids, weights, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x, ids, weights, out)
    results = {}
    for replay in range(2000 if tokens == 64 else 200):
        seed = replay % 20
        new_ids, new_weights = random_routing(shape, tokens, seed)
        ids.copy_(new_ids)
        weights.copy_(new_weights)
        order = torch.randperm(16, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        expert_map.copy_(torch.where(order < 8, order, -1))  # experts move to other ranks
        out.fill_(float("nan"))
        graph.replay()
        if seed not in results:
            assert compare(out, layer.expected(x, ids, weights)) == ""
            results[seed] = out.clone()
        else:
            assert torch.equal(out, results[seed]), "a replay differs in its bits"


@pytest.mark.parametrize("tokens", [1, 64, 600])
def test_a_replay_without_tokens_gives_zeros_whatever_its_buffers_held(tokens):
    """As a rank's graph that is replayed for a step in which it has none: every row is padding."""
    shape = replace(SHAPE, num_tokens=tokens)
    layer = Layer(shape)
    x, ids, weights = layer.inputs.x, layer.inputs.topk_ids, layer.inputs.topk_weights
    tokens_of, shared, out = x.clone(), torch.randn_like(x), torch.empty_like(x)
    layer(x, ids, weights, out, shared=shared)
    torch.cuda.synchronize()
    graph, old = torch.cuda.CUDAGraph(), ids.clone()
    with torch.cuda.graph(graph):
        layer(x, ids, weights, out, shared=shared)
    for nowhere in (-1, shape.num_experts, 2**31 - 1):
        ids.copy_(old)
        graph.replay()
        assert compare(out, layer.expected(x, ids, weights, shared=shared)) == ""
        ids.fill_(nowhere)
        x.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, shared), "the shared expert's output alone"
        x.copy_(tokens_of)
    empty = layer.check(x[:0], ids[:0], weights[:0])
    assert empty.shape == (0, shape.hidden_size)


@pytest.mark.parametrize("tokens", [1, 48, 600])
def test_experts_move_between_replays(tokens):
    """As vLLM's load balancer does it: six of eight physical experts are here, two of the logical ones twice; weights,
    packed scales and ids change in place, addresses don't."""
    shape = replace(SHAPE, num_tokens=tokens, num_local_experts=6, num_experts=8, top_k=3)
    layer = Layer(shape)
    x, out = layer.inputs.x.nan_to_num(), torch.empty_like(layer.inputs.x)
    weights, ids = layer.inputs.topk_weights, torch.empty_like(layer.inputs.topk_ids)
    layer.inputs.expert_map.copy_(torch.tensor([0, 1, 2, 3, 4, 5, -1, -1]))
    packed = [part.scales.view(6, -1) for part in layer.inputs.packed]
    moved = [layer.inputs.w13.codes.view(torch.uint8), layer.inputs.w13.scales]
    moved += [layer.inputs.w2.codes.view(torch.uint8), layer.inputs.w2.scales, *packed]
    logical = [part[:4].clone() for part in moved]
    addresses = [part.data_ptr() for part in moved]
    layer(x, ids.fill_(0), weights, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x, ids, weights, out)
    first = None
    for turn in range(20):
        g = torch.Generator("cuda").manual_seed(turn)
        placement = torch.cat([torch.arange(4), torch.tensor([turn % 4, (turn + 1) % 4])]).cuda()
        placement = placement[torch.randperm(6, device="cuda", generator=g)]
        for part, source in zip(moved, logical, strict=True):
            part.copy_(source[placement])
        routed = random_routing(replace(shape, num_experts=4), tokens, 5)[0].long()  # to logical experts
        where = torch.full((4, 2), -1, device="cuda")
        for physical, expert in enumerate(placement.tolist()):
            where[expert, int(where[expert, 0] >= 0)] = physical
        where[:, 1] = torch.where(where[:, 1] < 0, where[:, 0], where[:, 1])
        replica = torch.randint(0, 2, routed.shape, device="cuda", generator=g)
        ids.copy_(where[routed, replica])
        out.fill_(float("nan"))
        graph.replay()
        assert compare(out, layer.expected(x, ids, weights)) == ""
        first = out.clone() if first is None else first
        assert compare(out, first) == "", "the result depends on where experts are"
    assert addresses == [part.data_ptr() for part in moved]


def test_capture_allocates_nothing():
    layer = Layer(SHAPE)
    x, out = layer.inputs.x, torch.empty_like(layer.inputs.x)
    arguments = (x, layer.inputs.topk_ids, layer.inputs.topk_weights, out)
    layer(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # which makes two small tensors of its own before
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        layer(*arguments)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize(("tokens", "most"), [(1, 4), (32, 4), (4096, 5)])
def test_launches(tokens, most):
    layer = Layer(replace(SHAPE, num_tokens=tokens))
    out = torch.empty_like(layer.inputs.x)
    arguments = (layer.inputs.x, layer.inputs.topk_ids, layer.inputs.topk_weights, out)
    layer(*arguments)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        layer(*arguments)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 0 < len(kernels) <= most, kernels


def test_the_self_check_chooses_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path))
    shapes = [replace(SHAPE, num_tokens=tokens, num_local_experts=8) for tokens in (1, 64, 2048)]
    choice = providers.choose(family=FAMILY, shapes=shapes)
    assert choice.verdict.failed == {} and choice.provider == "rose"
    eager = providers.choose(family=FAMILY, shapes=[replace(shape, captured=False) for shape in shapes])
    assert eager.verdict.failed == {} and set(eager.verdict.microseconds) == {"rose", "reference"}
    assert eager.provider == "rose"


@pytest.mark.parametrize("activation", list(Activation))
def test_batch_invariant_tokens_have_the_same_bits_in_any_batch(activation):
    """However many tokens there are, wherever a token stands, and whoever else its experts got."""
    target = device_facts(torch.cuda.current_device()).target
    if activation is Activation.BF16 and not target.startswith("sm_90"):
        pytest.skip("activation=bf16 is served on sm_90 only")
    shape = replace(SHAPE, num_tokens=700, activation=activation, batch_invariant=True)
    layer = Layer(shape)
    x, ids, weights = layer.inputs.x.nan_to_num(1.0), layer.inputs.topk_ids, layer.inputs.topk_weights

    def some(first, count):
        rows = slice(first, first + count)
        out = torch.empty(count, shape.hidden_size, dtype=x.dtype, device="cuda")
        layer(x[rows].contiguous(), ids[rows].contiguous(), weights[rows].contiguous(), out)
        return out.view(torch.int16)

    whole = some(0, 700)
    assert compare(whole.view(x.dtype), layer.expected(x, ids, weights)) == ""
    for count in (1, 2, 7, 16, 33, 64, 65, 128, 257, 512):
        for first in (0, 5, 100):
            assert torch.equal(some(first, count), whole[first : first + count]), f"{count} tokens from {first} on"
