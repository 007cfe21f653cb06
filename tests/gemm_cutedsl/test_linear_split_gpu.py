"""A linear layer in forced parts on a GPU of one domain: bits, graphs, what start-up compares, memory that comes back.

Results are compared bit for bit with the whole weight's kernel that shares K among no blocks, which is what parts do.
"""

import gc
import weakref
from dataclasses import replace

import gemm_calls as calls
import gemm_oracle as oracle
import pytest
import torch
from gemm_calls import POISON, poisoned_allocations
from gemm_oracle import Runs
from test_domains_gpu import assert_counters_are_back, halves, in_parts, same
from test_gemm_family import SHAPE

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor
from vllm_rose_plugin.kernels.gemm import launch, reference
from vllm_rose_plugin.kernels.gemm.column_split import plan_split
from vllm_rose_plugin.kernels.gemm.domains import linear_domains, prepare_domains
from vllm_rose_plugin.kernels.gemm.family import LinearShape, compare, make_inputs
from vllm_rose_plugin.kernels.gemm.one_run import prepare_device
from vllm_rose_plugin.kernels.linear_split import ops  # noqa: F401  registers torch.ops.rose
from vllm_rose_plugin.kernels.linear_split.compare import Place, compare_split
from vllm_rose_plugin.kernels.moe_experts.compare_ways import WHOLE
from vllm_rose_plugin.kernels.moe_experts.make_ways import SINGLE_LAUNCH, Domains
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8
from vllm_rose_plugin.memory.driver import Driver

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LAYERS = {"qkv": (9216, 4096), "qkv of TP4": (2304, 4096), "o_proj of TP4": (4096, 2048)}
ROWS = (1, 7, 32, 33, 64, 200, 513)


def target() -> str:
    return device_facts(torch.cuda.current_device()).target


def forced(count: int) -> Domains:
    torch.zeros(1, device="cuda")  # the primary context
    return Domains(Driver(device=torch.cuda.current_device()), count, forced=True)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("name", LAYERS)
def test_every_row_is_the_reference_s(name, activation):
    """And the same bits at every call, with memory full of NaN; with a bias at every other number of rows."""
    if activation is Activation.BF16 and not calls.on_hopper():
        pytest.skip("activation=bf16 is served on sm_90 only")
    n, k = LAYERS[name]
    shape = LinearShape(1, n, k, "bfloat16", False, activation, SHAPE.rounding, False)
    for i, rows in enumerate(ROWS):
        x, weight, packed, bias = make_inputs(replace(shape, num_tokens=rows, bias=bool(i % 2)), seed=rows)
        parts = in_parts(packed, 2)
        how = dict(sm_domains=halves(), bias=bias, activation=activation)
        expected = reference.mxfp8_linear(x, weight, bias=bias, activation=activation)
        with poisoned_allocations():
            found = linear_domains(x, parts, **how)
            again = [linear_domains(x, parts, **how) for _ in range(3)]
        assert compare(found, expected) == "" and all(same(each, found) for each in again)
    assert_counters_are_back()


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_bits_of_the_kernel_that_shares_no_k(parts):
    if not calls.on_hopper():
        pytest.skip("forces configs of sm_90")
    n, k = 768 * parts, 2048
    weight = calls.pack(oracle.random_operand(1, n, k, seed=5, device="cuda"))
    split = in_parts(weight, parts)
    for m in (1, 17, 130):
        x = torch.randn(m, k, device="cuda").bfloat16()
        runs = Runs.of([m], spare=0)
        name = "w8a8" if m <= 32 else "w8a16"
        change = dict(cluster=1, split_k=False, stream_k=False, early_counts=True)
        with calls.forced(name, runs, n=n, k=k, change=change):
            expected = launch.linear(x, weight)
        assert same(linear_domains(x, split, sm_domains=halves(parts)), expected)
    assert_counters_are_back()


def test_a_row_s_bits_depend_on_that_row_alone():
    weight = calls.pack(oracle.random_operand(1, 2304, 4096, seed=5, device="cuda"))
    split, x = in_parts(weight, 2), torch.randn(300, 4096, device="cuda").bfloat16()
    all_rows = linear_domains(x, split, sm_domains=halves(), batch_invariant=True)
    for rows in (1, 16, 33, 128):
        found = linear_domains(x[:rows], split, sm_domains=halves(), batch_invariant=True)
        assert same(found, all_rows[:rows])


def test_graph_replayed_a_thousand_times():
    """Three layers one behind the other, results poisoned before each replay."""
    prepare_device(torch.device("cuda", 0), max_rows=512)
    prepare_domains(torch.device("cuda", 0))
    weights = [calls.pack(oracle.random_operand(1, 2304, 2304, seed=s, device="cuda")) for s in range(3)]
    parts = [in_parts(weight, 2) for weight in weights]
    table = halves()
    for rows in (4, 100):
        x = torch.randn(rows, 2304, device="cuda").bfloat16() / 48

        def layers(x=x):
            outs = [x]
            for split in parts:
                outs.append(linear_domains(outs[-1], split, sm_domains=table))
            return outs[1:]

        expected = [out.clone() for out in layers()]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = layers()
        differing = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            for out in outs:
                out.view(torch.int16).fill_(POISON)
            graph.replay()
            for out, each in zip(outs, expected, strict=True):
                differing += (out.view(torch.int16) != each.view(torch.int16)).sum()
        assert int(differing) == 0
    assert_counters_are_back()


@pytest.mark.parametrize("captured", [True, False])
def test_start_up_compares_and_gives_the_memory_back(tmp_path, monkeypatch, captured):
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path))
    domains = forced(2)
    shape = LinearShape(1, 2304, 4096, "bfloat16", True, Activation.MXFP8, SHAPE.rounding, False)
    split = plan_split(n=shape.n, parts=2, target=target())
    place = Place(split, domains.allocate, domains.way(SINGLE_LAUNCH).sm_domains, True)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    found = compare_split(
        shape_of=lambda tokens: replace(shape, num_tokens=tokens),
        tokens=(1, 64),
        place=place,
        captured=captured,
        checked=(17, 520),
    )
    assert found.failed == {} and set(found.microseconds) == {WHOLE, SINGLE_LAUNCH}
    assert all(time > 1 for times in found.microseconds.values() for time in times)
    print({name: [round(time, 2) for time in times] for name, times in found.microseconds.items()})
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > before - 256 * 2**20


def test_layers_move_into_parts_and_their_memory_comes_back():
    """As vLLM loads them: the weight's own memory goes, its parts' go with the layer."""
    from vllm_rose_plugin.layers import linear_parts

    domains, n, k = forced(2), 9216, 4096
    split = plan_split(n=n, parts=2, target=target())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    layers = []
    for seed in range(4):
        layer = torch.nn.Module()
        codes, scales = quantize_mxfp8(torch.randn(n, k, device="cuda"))
        layer.weight = torch.nn.Parameter(codes, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
        weight = Mxfp8Tensor(codes.clone(), scales.clone())
        linear_parts.attach(layer, split, domains.allocate).fill(layer)
        assert layer.weight.is_meta
        x = torch.randn(5, k, device="cuda").bfloat16()
        found = torch.ops.rose.mxfp8_linear_split(x, *linear_parts.operands(layer), sm_domains=halves())
        assert compare(found, reference.mxfp8_linear(x, weight)) == "", seed
        assert torch.equal(layer.state_dict()["weight"].view(torch.uint8), weight.codes.view(torch.uint8).cpu())
        layers.append(layer)
        del codes, scales, weight, layer
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = before - torch.cuda.mem_get_info()[0]
    assert held < 4 * n * k * 1.3, f"{held} bytes for four layers of {n * k}"
    gone = [weakref.ref(layer) for layer in layers]
    layers.clear()
    gc.collect()
    assert all(each() is None for each in gone)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert before - torch.cuda.mem_get_info()[0] < 32 * 2**20
