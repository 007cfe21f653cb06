"""The parts of the GEMM benchmarks that need no GPU: their check, their limit, their file."""

import csv
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launch_emulation import emulated

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor, TokenFormat
from vllm_rose_plugin.kernels.gemm.reference import grouped_gemm
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8, quantize_mxfp8
from vllm_rose_plugin.kernels.swiglu_quantize.reference import swiglu_quantize

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    """(bench_gemm_grouped, bench_gemm_dense, gemm_peers, gemm_timing)."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import bench_gemm_dense
        import bench_gemm_grouped
        import gemm_ours  # noqa: F401  for the tests
        import gemm_peers
        import gemm_timing
    finally:
        sys.path.remove(str(BENCHMARKS))
    return bench_gemm_grouped, bench_gemm_dense, gemm_peers, gemm_timing


@pytest.fixture
def layer(bench):
    """(weights, routing) of a small expert layer on the CPU."""
    peers = bench[2]
    g = torch.Generator().manual_seed(1)
    w13 = quantize_mxfp8(torch.randn(16, 192, 128, generator=g) * 0.02)
    w2 = quantize_mxfp8(torch.randn(16, 128, 96, generator=g) * 0.02)
    ids = torch.stack([torch.randperm(16, generator=g)[:8] for _ in range(12)]).int()
    weights = torch.rand(12, 8, generator=g)
    x = torch.randn(12, 128, generator=g).to(torch.bfloat16)
    return peers.MoeWeights(*w13, *w2), peers.Routing(x, ids, weights)


def our_chain(weights, r, change=lambda h: h):
    """What our two launches compute, in plain torch, through the bench's own sorting of tokens."""
    h = grouped_gemm(
        Mxfp8Tensor(*quantize_mxfp8(r.rows)),
        Mxfp8Tensor(weights.w13, weights.w13_scales),
        expert_offsets=r.offsets,
        expert_counts=r.counts,
        out_dtype=torch.float32,
    )
    return grouped_gemm(
        swiglu_quantize(change(h)),
        Mxfp8Tensor(weights.w2, weights.w2_scales),
        expert_offsets=r.offsets,
        expert_counts=r.counts,
        out_dtype=torch.bfloat16,
    )


def test_the_check_passes_the_reference_and_fails_faulty_layers(bench, layer):
    grouped = bench[0]
    weights, routing = layer
    r = grouped.routed(routing, 16)
    exact = grouped.exact_layer(weights, routing, quantized=True)
    out = our_chain(weights, r)
    assert grouped.check_outputs("rose", grouped.combined(out, r, routing), exact) is None
    swapped = our_chain(weights, r, lambda h: torch.cat(h.chunk(2, -1)[::-1], -1))
    lost = out.clone()
    lost[5] = 0
    unknown = out.clone()
    unknown[0, 0] = float("nan")
    for faulty in (swapped, lost, unknown, out.roll(1, 0), out * 1.02):
        assert "from float64" in grouped.check_outputs("rose", grouped.combined(faulty, r, routing), exact)
    plain = grouped.exact_layer(weights, routing, quantized=False)
    assert grouped.check_outputs("marlin", plain.to(torch.bfloat16), plain) is None
    assert grouped.check_outputs("marlin", exact, plain)  # quantized activations are no W8A16
    assert grouped.check_outputs("fp8_block_triton", exact, plain) is None


def test_routed_rows_belong_to_their_experts(bench, layer):
    _, routing = layer
    r = bench[0].routed(routing, 16)
    assert r.counts.sum() == 96 and r.offsets[0] == 0 and r.offsets[-1] == 96
    for token, experts in enumerate(routing.topk_ids.tolist()):
        for k, expert in enumerate(experts):
            row = r.place[token, k].item()
            assert r.offsets[expert] <= row < r.offsets[expert + 1]
            assert torch.equal(r.rows[row], routing.x[token])


@pytest.mark.parametrize(("num_tokens", "other"), [(9, "rose_w8a16"), (70, "rose_w8a8")])
def test_all_of_ours_pass_the_check_of_linear_layers(bench, monkeypatch, num_tokens, other):
    """With tokens that are quantized first, and with tokens that stay bf16."""
    grouped, dense = bench[:2]
    ours = sys.modules["gemm_ours"]
    g = torch.Generator().manual_seed(2)
    layer = SimpleNamespace(weights=[quantize_mxfp8(torch.randn(64, 96, generator=g)) for _ in range(2)])
    inputs = [torch.randn(num_tokens, 96, generator=g).to(torch.bfloat16) for _ in range(2)]
    offsets = torch.tensor([0, num_tokens], dtype=torch.int32)
    monkeypatch.setattr(ours, "target", lambda: "sm_90a")
    monkeypatch.setattr(ours, "one_run", lambda num_rows: (offsets, offsets[1:]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    weight = dequantize_mxfp8(*layer.weights[0]).double()
    quantized = dequantize_mxfp8(*quantize_mxfp8(inputs[0])).double()
    with emulated(monkeypatch) as seen:
        calls = dense.our_calls(layer, inputs, [])
        assert list(calls) == [name for name in dense.ROSE if name not in {"rose_w8a8", "rose_w8a16"} - {other}]
        exact = {True: quantized @ weight.T, False: inputs[0].double() @ weight.T}
        assert grouped.check_results(calls, exact) == []
        assert len(grouped.check_results(calls, {True: exact[False], False: exact[True]})) == len(calls)
        seen.configs.clear()
        calls["rose_bf16"](0), calls["rose_bf16_gemm"](1)
    assert [config.token_format for config in seen.configs] == [TokenFormat.BF16_PERMUTED] * 2


def limits(bench):
    return bench[3].Limits(read=4400.0, copy=4200.0, bf16=790.0, fp8=1400.0)


def test_the_floor_is_the_larger_of_bytes_and_operations(bench):
    found = limits(bench)
    weights = 16 * 3 * 4096 * 1536 * 33 / 32
    few = found.floor_us(read=weights, flops=2 * 128 * 3 * 4096 * 1536, fp8=True)
    assert few == pytest.approx(weights / 4400 / 1e3) and 70 < few < 71.5
    many = 2 * 4096 * 8 * 3 * 4096 * 1536
    assert found.floor_us(read=weights, flops=many, fp8=True) == pytest.approx(many / 1400e6)
    assert found.floor_us(read=weights, flops=many, fp8=False) == pytest.approx(many / 790e6)


def test_weights_rotate_beyond_l2(bench):
    timing = bench[3]
    assert timing.sets_beyond_l2(151e6) == 2 and timing.sets_beyond_l2(311e6) == 1
    assert timing.sets_beyond_l2(311e6, least=2) == 2 and timing.sets_beyond_l2(2304 * 4096) == 32


def test_rows_of_earlier_runs_stay_and_measured_ones_are_replaced(bench, tmp_path):
    timing = bench[3]
    path = tmp_path / "gemm_dense.csv"

    def record(provider: str, us: float) -> None:
        table = timing.Table("gemm_dense", limits(bench), path=path)
        table.add(case="qkv", provider=provider, shape="M=1", us=us, moved=1e6, flops=1e9, floor_us=us / 2)
        table.write()

    record("marlin", 20.0)
    record("bf16_cublas", 8.0)
    record("rose", 12.0)
    record("rose", 10.0)
    table = timing.Table("gemm_dense", limits(bench), path=path)
    (line,) = timing.verdicts(table)
    assert line.endswith("rose 10.0 | MXFP8: marlin 20.0, ratio 0.50 | any: bf16_cublas 8.0, ratio 1.25 SLOWER")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [r["provider"] for r in rows] == [
        "read",
        "copy",
        "bf16_matmul",
        "fp8_matmul",
        "marlin",
        "bf16_cublas",
        "rose",
    ]
    assert rows[-1]["us"] == "10.000" and rows[-1]["share_of_limit"] == "0.500" and rows[0]["gb_per_s"] == "4400.0"
    assert rows[-1]["area"] == "gemm_dense" and rows[-1]["tflop_per_s"] == "100.0"


def test_a_peer_that_fails_is_named_and_left_out(bench, capsys, monkeypatch):
    timing = bench[3]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def build():
        raise RuntimeError("no such kernel\nsecond line")

    assert timing.attempt("marlin", build) is None
    assert "left out: marlin: RuntimeError: no such kernel" in capsys.readouterr().out
