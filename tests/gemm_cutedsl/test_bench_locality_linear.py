"""The benchmark of linear layers in parts, as far as it needs no GPU."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import bench_locality_linear
    finally:
        sys.path.remove(str(BENCHMARKS))
    return bench_locality_linear


def test_kernels_of_whole_weights_and_of_parts(bench, monkeypatch):
    compiled = []
    monkeypatch.setattr(bench, "compile_ahead", compiled.extend)
    count = bench.compile_all(["qkv", "o_proj_tp4"], [1, 64], target="sm_90a", sm_count=132, parts=2)
    configs = [wanted.config for wanted in compiled]
    assert count == len(configs) == len(set(configs)) and {config.domains for config in configs} == {1, 2}
    assert {(config.n, config.k) for config in configs} == {(9216, 4096), (4096, 2048)}
    assert all(config.cluster == 1 and not config.stream_k for config in configs if config.domains == 2)


def test_without_a_gpu_it_compiles_or_says_why_not(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench, "compile_ahead", lambda kernels: None)
    monkeypatch.setattr(sys, "argv", ["bench", "--no-timing", "--layers", "qkv", "--tokens", "1"])
    bench.main()
    assert capsys.readouterr().out == "2 kernels\n"
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(SystemExit, match="no GPU: --no-timing compiles for an H200"):
        bench.main()
    monkeypatch.setattr(sys, "argv", ["bench", "--layers", "gate"])
    with pytest.raises(SystemExit):
        bench.main()
