"""The parts of the MoE layer's benchmark that need no GPU: its layer, its mover, what it makes of a profile."""

import sys
from pathlib import Path

import pytest
import torch
from experts_emulation import SM_COUNT, aligned_bytes, emulated

from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DeviceFacts
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import bench_moe_layer
    finally:
        sys.path.remove(str(BENCHMARKS))
    return bench_moe_layer


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("top_k", [8, 10])
def test_our_layer_passes_the_benchs_own_check(bench, monkeypatch, target, top_k):
    g = torch.Generator().manual_seed(1)
    w13 = quantize_mxfp8(torch.randn(16, 192, 128, generator=g) * 0.02)
    w2 = quantize_mxfp8(torch.randn(16, 128, 96, generator=g) * 0.02)
    weights = bench.peers.MoeWeights(*w13, *w2, top_k)
    ids = torch.stack([torch.randperm(16, generator=g)[:top_k] for _ in range(12)]).int()
    routing = bench.peers.Routing(torch.randn(12, 128, generator=g).bfloat16(), ids, torch.rand(12, top_k, generator=g))
    monkeypatch.setattr(bench, "device_facts", lambda index: DeviceFacts(target, SM_COUNT))
    with emulated(monkeypatch, target) as seen:
        layer = bench.Layer(weights, most_tokens=12)
        layer.workspace = aligned_bytes(layer.workspace.numel())
        out = layer(routing, torch.empty_like(routing.x))
    exact = bench.grouped.exact_layer(weights, routing, quantized=True)
    assert bench.grouped.check_outputs("rose", out, exact) is None
    assert bench.grouped.check_outputs("rose", out * 1.03, exact) is not None
    assert len(seen.launches) == bench.DECODE_LAUNCHES


def test_kernels_and_gaps_of_a_profile(bench):
    """Two kernels a call: 3 us and 5 us, the second begins 1 us before the first ends, calls are 2 us apart."""
    calls = []
    for i in range(4):
        at = 100.0 + 9 * i
        calls.append([("kernel_cutlass_moe_dispatchkernel", at, at + 3), ("xgemmx", at + 2, at + 7)])
    names, times, gaps = bench.describe_kernels(calls)
    assert names == ["moe_dispatch", "gemm"] and times == [3, 5] and gaps == [2, -1]
    assert bench.short_name("vllm::topk") == "vllm::topk"


def test_the_deadline_is_looked_at_before_every_shape(bench, monkeypatch, capsys):
    """What was measured before is in the file already."""
    now, measured = [0.0], []
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(bench, "build", lambda *args, **how: bench.grouped.Built([None], {}))
    monkeypatch.setattr(bench, "Layer", lambda weights, most_tokens: None)
    monkeypatch.setattr(bench, "warm", lambda *args, **how: None)

    def layer_case(session, name, model, layers, built, num_tokens):
        measured.append(num_tokens)
        now[0] += 30

    monkeypatch.setattr(bench, "layer_case", layer_case)
    arguments = bench.argparse.Namespace(tokens=[1, 8, 64], quick=False, cases="layer", experts=[16, 8], deadline=40)
    session = bench.Session(None, [], with_vllm=False, check=False, timed=True, faults=[])
    bench.run(session, arguments, "qwen3-235b", 0.0)
    assert measured == [1, 8]
    said = capsys.readouterr().out
    assert "E=16 M=64 and what follows was not measured" in said and "E=8 was not measured" in said


def test_models_are_those_of_the_issue(bench):
    assert bench.MODELS["qwen3-235b"].local_experts == (128, 32, 16, 8)
    assert bench.MODELS["qwen3.5-397b"].top_k == 10 and bench.MODELS["qwen3.5-397b"].local_experts == (512,)
