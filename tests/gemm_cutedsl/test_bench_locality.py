"""The parts of the locality benchmark that need no GPU: shapes, routing, kernels, rows without a measurement."""

import csv
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launch_emulation import emulated
from test_gemm_launch import random_weight

from vllm_rose_plugin.kernels.gemm import launch
from vllm_rose_plugin.kernels.gemm.config import Epilogue
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.moe_experts.ways import OneLaunch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    """(bench_locality, gemm_timing)."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import bench_locality
        import gemm_timing
    finally:
        sys.path.remove(str(BENCHMARKS))
    return bench_locality, gemm_timing


def test_shapes_and_their_tokens(bench):
    made = list(bench[0].shapes([1, 64], []))
    assert len(made) == 16 and len({shape.name for shape in made}) == 16
    assert {shape.text for shape in made if shape.tokens == 1 and "EP4" in shape.name} == {
        "T=1;E=32;H=4096;I=1536",
        "T=1;E=64;H=3072;I=1536",
    }
    for shape in made:
        counts = bench[0].counts_of(shape, seed=3)
        assert len(counts) == shape.groups and int(counts.sum()) == shape.rows and int(counts.max()) <= shape.tokens
    assert [shape.name for shape in bench[0].shapes([1, 64], ["TP4 T=64"])] == [
        "Qwen3-235B TP4 T=64",
        "MiniMax-like TP4 T=64",
    ]


def test_kernels_of_all_ways(bench):
    shape = next(bench[0].shapes([64], ["Qwen3-235B TP2"]))
    configs = [
        each.config for each in bench[0].wanted_kernels(shape, target="sm_90a", sm_count=132, parts=2, partition=64)
    ]
    assert [config.domains for config in configs] == [1, 2, 1] * 2
    assert [config.n for config in configs] == [1536, 1536, 768, 4096, 4096, 2048]
    assert [config.epilogue for config in configs] == [Epilogue.SWIGLU] * 3 + [Epilogue.PLAIN] * 3
    assert [config.out_columns for config in configs] == [0, 0, 768, 0, 0, 4096]


def test_rows_that_were_not_measured(bench, tmp_path):
    locality, timing = bench
    path = tmp_path / "locality.csv"
    table = timing.Table("locality", timing.Limits(1.0, 1.0, 1.0, 1.0), path=path)
    locality.not_measured(table, list(locality.shapes([1], ["TP2"])), "the GPU has one locality domain")
    rows = [row for row in csv.DictReader(path.open()) if row["case"] != "limit"]
    assert len(rows) == 6 and not any(row["us"] for row in rows)
    assert {row["provider"] for row in rows} == {"rose_default", "rose_backfill", "rose_single_launch"}
    assert {row["device"] for row in rows} == {"not measured: the GPU has one locality domain"}


def test_summary(bench):
    lines = list(bench[0].summary({"a": {"x": 1.0, "y": 2.0}, "b": {"x": 1.02}, "c": {}}))
    assert lines == [
        "x: mean 1.0100 of plain over 2 shapes, best 1.0000 (a), worst 1.0200 (b)",
        "y: mean 2.0000 of plain over 1 shapes, best 2.0000 (a), worst 2.0000 (a)",
    ]


def test_a_layer_in_one_launch(bench, monkeypatch):
    """The benchmark's calls and its check, with kernels that torch emulates."""
    locality = bench[0]
    shape = locality.Shape(locality.Model("tiny", 256, 256, 8, 2), "TP1", 1, 1, 5)
    w13 = pack_weight(random_weight(8, 512, 256, seed=1), target="sm_90a", gate_up=True)
    w2 = pack_weight(random_weight(8, 256, 256, seed=2), target="sm_90a")

    def on_cpu(make):
        return lambda *sizes, device=None, **how: make(*sizes, **how)

    for name in ("empty", "randn"):
        monkeypatch.setattr(locality.torch, name, on_cpu(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(locality, "device_facts", lambda index: launch.device_facts(index))
    monkeypatch.setattr(locality.timing, "attempt", lambda name, build: build())
    domains = SimpleNamespace(count=2, forced=True)
    with emulated(monkeypatch) as seen:
        parts = [locality.parts_of(weight, domains, []) for weight in (w13, w2)]
        weights = locality.Weights(w13, w2, *parts, kept=[])
        assert weights.is_split
        ways = {locality.SINGLE: OneLaunch(torch.zeros(132, dtype=torch.int32))}
        layer = locality.Layer(shape, weights, ways, sets=3)
        assert layer.faults() == [] and {config.domains for config in seen.configs} == {1, 2}
        weights.w2_parts.reverse()
        assert layer.faults() == [f"{shape.name}: {locality.SINGLE} has other bits than the plain kernels"] * 2


def test_pictures_of_a_gpu_of_one_domain_and_of_one_with_domains(tmp_path):
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import plot_locality
    finally:
        sys.path.remove(str(BENCHMARKS))
    table = tmp_path / "locality.csv"

    def pictures(*lines: str) -> list[Path]:
        table.write_text("\n".join(("case,provider,shape,us,device,commit", *lines)))
        return plot_locality.draw(table)

    costs, page = pictures(
        "moe Some TP2,rose,T=1;E=8,10,H200,abc",
        "moe Some TP2,rose_forked,T=1;E=8,20,H200,abc",
        "fc1_fc2 Some TP2,rose_default,T=1;E=8,,not measured: <old> driver,abc",
        "fc1_fc2 Some TP2,rose_backfill,T=1;E=8,,not measured: <old> driver,abc",
        "fc1_fc2 Some TP2,rose_single_launch,T=1;E=8,,not measured: <old> driver,abc",
    )
    assert costs.name == "locality.png" and costs.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert text.count("<p>not measured: &lt;old&gt; driver</p>") == 3 and "<svg" not in text
    measured = [
        f"fc1_fc2 {model} {strategy},{way},T={count};E=8,{count + 10},Rubin,abc"
        for model in ("Some", "Other")
        for strategy in ("TP2", "EP4")
        for way in ("rose", "rose_default", "rose_backfill", "rose_single_launch")
        for count in (1, 16)
    ]
    (page,) = pictures(*measured)
    text = page.read_text()
    assert text.count("<svg") == 2 * 3 and "not measured" not in text
    assert [text.count(f">{name}</label>") for name in ("TP2", "EP4", "default mode", "backfill mode")] == [1] * 4
    assert text.count("#s1:checked~#w2:checked~.s1w2{display:block}") == 1
