"""`rose tune`: what it refuses, and its table, with a device that isn't there."""

import json
from pathlib import Path

import pytest
import torch

from vllm_rose_plugin.cli import main
from vllm_rose_plugin.cli import tune as command
from vllm_rose_plugin.kernels.gemm import tune_bench, tuned
from vllm_rose_plugin.kernels.gemm.candidates import candidates
from vllm_rose_plugin.kernels.gemm.tuned import bucket

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/tiny_moe/target"
LAYERS = 4
"""QKV, output projection, w13, w2."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "_recorded", {})
    tuned.forget()
    yield tmp_path / "cache"
    tuned.forget()


class Bench:
    """The second candidate of every call takes half of the time."""

    def __init__(self, call, rows):
        if rows == 3:
            raise RuntimeError("CUDA out of memory")
        self.us = dict.fromkeys(candidates(call, rows)[1:2], 10.0)

    def fault(self, config):
        return ""

    def times(self, configs, rows):
        return [self.us.get(config, 20.0) for config in configs]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper that answers without being there."""
    monkeypatch.setattr(command, "_device", lambda: ("sm_90a", 132))
    monkeypatch.setattr(tuned, "device_name", lambda: "NVIDIA Test 1")
    monkeypatch.setattr(tune_bench, "DeviceBench", Bench)
    monkeypatch.setattr(tune_bench, "compile_all", lambda needed: None)


def tune(*arguments: str) -> int:
    return main(["tune", "--model", str(EXAMPLE), *arguments])


def test_the_table_and_the_file(device, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("--tokens", "1,64") == 0
    header, *rows, last = capsys.readouterr().out.splitlines()
    assert header.split() == ["shape", "rows", "heuristic", "us", "best", "us", "chosen"]
    assert len(rows) == 2 * LAYERS and sum("swiglu" in row for row in rows) == 2
    assert sum("20.00     10.00  row_groups=" in row for row in rows) >= LAYERS
    assert "take another config than the heuristic's, at best 2.00 times as fast" in last
    (file,) = (cache / "tuned").glob("*.json")
    assert len(json.loads(file.read_text())["choices"]) == len(rows) and last.endswith(str(file.parent))
    assert tune("--tokens", "1,64") == 0
    assert capsys.readouterr().out.count("(measured before)") == len(rows)
    assert tune("--tokens", "64", "--again") == 0
    assert "(measured before)" not in capsys.readouterr().out


def test_all_sizes_of_a_step_are_measured(device, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune() == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:-1]]
    linear = sorted({int(row[4]) for row in rows if row[0] == "G=1"})
    assert linear == [bucket(1, tokens)[1] for tokens in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)]


def test_what_could_not_be_measured_is_counted(device, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("--tokens", "1,3") == 1
    assert "2 sizes could not be measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "1,x"], "--tokens is '1,x'; it must be numbers from 1 on"),
        (["--tokens", "0"], "--tokens is '0'"),
        (["--tensor-parallel-size", "3"], "tensor_parallel_size=3 doesn't divide 8 heads"),
        (["--model", "/nowhere/config.json"], "/nowhere/config.json: No such file"),
    ],
)
def test_wrong_values_are_named(device, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert tune(*arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("--tokens", "1") == 2
    assert "rose tune: error: times are measured on an NVIDIA GPU, and torch finds none here" in capsys.readouterr().err
    assert not cache.exists()
