"""Batched experts on a GPU against the reference: poisoned padding, replayed graphs, launches, neighbours in memory."""

from dataclasses import replace

import pytest
import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding
from vllm_rose_plugin.kernels.jit import providers
from vllm_rose_plugin.kernels.moe_batched import launch
from vllm_rose_plugin.kernels.moe_batched.family import FAMILY, BatchedShape, compare, make_inputs
from vllm_rose_plugin.kernels.moe_batched.reference import moe_batched
from vllm_rose_plugin.kernels.moe_experts.config import token_formats_of
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8

pytestmark = pytest.mark.gpu
SHAPE = BatchedShape(
    max_tokens=128,
    expected_rows=256,
    hidden_size=1024,
    intermediate_size=512,
    num_local_experts=16,
    dtype="bfloat16",
    activation=Activation.MXFP8,
    rounding=Rounding.RCEIL,
    captured=True,
)
_FENCE = 4096


class Layer:
    """A layer's weights and memory, all of it poisoned."""

    def __init__(self, shape, seed=1):
        self.shape, self.inputs = shape, make_inputs(shape, seed)
        self.size = launch.workspace_bytes(
            max_tokens=shape.max_tokens,
            num_local_experts=shape.num_local_experts,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            token_formats=token_formats_of(device_facts(torch.cuda.current_device()).target, shape.activation),
        )
        self.around = torch.full((self.size + 2 * _FENCE,), 0xFF, dtype=torch.uint8, device="cuda")
        launch.warm_up(
            device=self.around.device,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_local_experts=shape.num_local_experts,
            most_rows=shape.expected_rows,
            dtype=getattr(torch, shape.dtype),
            activation=shape.activation,
            rounding=shape.rounding,
        )

    def __call__(self, x, counts, out):
        launch.moe_batched(
            x,
            expert_counts=counts,
            w13=self.inputs.packed[0],
            w2=self.inputs.packed[1],
            out=out,
            workspace=self.around[_FENCE : _FENCE + self.size],
            expected_rows=self.shape.expected_rows,
            activation=self.shape.activation,
            rounding=self.shape.rounding,
        )

    def wrong(self, x, counts, out):
        """What is wrong with a result that lay on sevens; empty: nothing."""
        past = torch.arange(self.shape.max_tokens, device="cuda") >= counts.unsqueeze(1)
        if not (out[past] == 7).all():
            return "rows past the counts were written"
        expected = moe_batched(
            x,
            expert_counts=counts,
            w13=self.inputs.w13,
            w2=self.inputs.w2,
            activation=self.shape.activation,
            rounding=self.shape.rounding,
            out_dtype=out.dtype,
        )
        return compare(out.masked_fill(past.unsqueeze(-1), 0), expected)

    def check(self, x, counts):
        out = torch.full_like(self.inputs.x, 7.0)
        self(x, counts, out)
        assert self.wrong(x, counts, out) == ""
        assert (self.around[:_FENCE] == 0xFF).all() and (self.around[_FENCE + self.size :] == 0xFF).all()


def tokens_of(shape, counts, seed):
    """Random where a token is, NaN past the counts."""
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape.num_local_experts, shape.max_tokens, shape.hidden_size, device="cuda", generator=g)
    past = torch.arange(shape.max_tokens, device="cuda") >= counts.unsqueeze(1)
    return x.masked_fill_(past.unsqueeze(-1), float("nan")).to(getattr(torch, shape.dtype))


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize(("max_tokens", "expected"), [(1, 1), (7, 30), (128, 16), (128, 1000), (1000, 9000)])
def test_numbers_of_tokens(max_tokens, expected, activation):
    if activation is Activation.BF16 and not device_facts(0).target.startswith("sm_90"):
        activation = Activation.MXFP8
    layer = Layer(replace(SHAPE, max_tokens=max_tokens, expected_rows=expected, activation=activation))
    layer.check(layer.inputs.x, layer.inputs.expert_counts)


@pytest.mark.parametrize(
    ("experts", "hidden", "intermediate", "dtype"),
    [(1, 64, 32, "bfloat16"), (8, 4096, 1536, "bfloat16"), (3, 2688, 96, "float16"), (512, 256, 64, "bfloat16")],
)
def test_shapes(experts, hidden, intermediate, dtype):
    shape = replace(SHAPE, num_local_experts=experts, hidden_size=hidden, intermediate_size=intermediate, dtype=dtype)
    for expected in (1, 100):
        layer = Layer(replace(shape, expected_rows=expected), seed=expected)
        layer.check(layer.inputs.x, layer.inputs.expert_counts)


@pytest.mark.parametrize("load", [0, 1, 31, 32, 33, 127, 128])
def test_loads(load):
    """So many tokens for every expert, for one, and for all but one; expected are few, whatever comes."""
    layer = Layer(replace(SHAPE, expected_rows=20))
    every = torch.full((16,), load, dtype=torch.int32, device="cuda")
    one = torch.zeros_like(every)
    one[5] = load
    for counts in (every, one, every - one):
        layer.check(tokens_of(SHAPE, counts, load), counts)


@pytest.mark.parametrize("expected", [64, 1000])
def test_tokens_that_arrive_quantized(expected):
    layer = Layer(replace(SHAPE, expected_rows=expected))
    codes, scales = quantize_mxfp8(layer.inputs.x)
    past = torch.arange(SHAPE.max_tokens, device="cuda") >= layer.inputs.expert_counts.unsqueeze(1)
    codes.view(torch.uint8)[past] = 0x7F
    scales[past] = 0xFF
    layer.check(Mxfp8Tensor(codes, scales), layer.inputs.expert_counts)


@pytest.mark.parametrize("expected", [16, 256, 1500])
def test_replays_follow_their_buffers(expected):
    """Tokens, counts and what the padding holds change between replays; a result's bits depend on none of the rest."""
    shape = replace(SHAPE, expected_rows=expected)
    layer = Layer(shape)
    x, counts = layer.inputs.x, layer.inputs.expert_counts
    out = torch.empty_like(x)
    layer(x, counts, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x, counts, out)
    results = {}
    for replay in range(200):
        seed = replay % 10
        g = torch.Generator("cuda").manual_seed(seed)
        counts.copy_(torch.randint(0, 129, (16,), device="cuda", generator=g, dtype=torch.int32))
        if seed == 3:
            counts.zero_()
        x.copy_(tokens_of(shape, counts, seed))
        out.fill_(7.0)
        graph.replay()
        if seed not in results:
            assert layer.wrong(x, counts, out) == ""
            results[seed] = out.clone()
        else:
            assert torch.equal(out.nan_to_num(), results[seed].nan_to_num()), "a replay differs in its bits"


def test_capture_allocates_nothing_and_there_are_three_launches():
    layer = Layer(SHAPE)
    x, counts, out = layer.inputs.x, layer.inputs.expert_counts, torch.empty_like(layer.inputs.x)
    layer(x, counts, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        layer(x, counts, out)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        layer(x, counts, out)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 0 < len(kernels) <= 3, kernels


def test_the_self_check_chooses_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path))
    shapes = [replace(SHAPE, expected_rows=rows) for rows in (1, 64, 2048)]
    choice = providers.choose(family=FAMILY, shapes=shapes)
    assert choice.verdict.failed == {} and choice.provider == "rose"
