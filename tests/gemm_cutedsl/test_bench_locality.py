"""The parts of the locality benchmark that need no GPU: shapes, routing, kernels, rows without a measurement."""

import csv
import sys
from pathlib import Path

import pytest

from vllm_rose_plugin.kernels.gemm.config import Epilogue

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
