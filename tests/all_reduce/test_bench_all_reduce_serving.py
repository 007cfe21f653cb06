"""The half of bench_all_reduce_serving.py that needs no GPU: what engines are started with, what becomes of times."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import bench_all_reduce_serving
    finally:
        sys.path.remove(str(BENCHMARKS))
    return bench_all_reduce_serving


@pytest.fixture
def run(bench, monkeypatch, tmp_path):
    """main() with engines that print a decode and a prefill time and end with a code; the plans they were given."""

    def call(*arguments, us, code=0):
        plans = {}

        def start(plan, directory, name):
            plans[name] = plan
            assert json.loads((Path(plan["engine"]["model"]) / "config.json").read_text())["num_hidden_layers"] == 2
            results = [{"kind": "decode", "batch": 1, "us": us[name]}, {"kind": "prefill", "batch": 1, "us": 9.0}]
            program = [f"print('RESULT ' + {json.dumps(json.dumps(each))})" for each in results]
            program += ["print('All-reduce of group tp:0: p2p')", f"raise SystemExit({code})"]
            with (directory / f"{name}.out").open("w") as out:
                return subprocess.Popen([sys.executable, "-c", "\n".join(program)], stdout=out, env={**os.environ})

        monkeypatch.setattr(bench.bench_serving, "start", start)
        monkeypatch.setattr(bench.bench_serving, "LOOK_EVERY_S", 0.05)
        monkeypatch.setattr(bench.os, "environ", dict(os.environ))
        monkeypatch.setattr(sys, "argv", ["bench", "--layers", "2", "--out", str(tmp_path), *arguments])
        bench.main()
        return plans

    return call


def rows(folder, bench):
    with (folder / bench.FILE).open() as file:
        return {(row["provider"], row["case"].split()[-1], row["shape"]): row["us"] for row in csv.DictReader(file)}


def test_engines_differ_in_their_all_reduce_alone(run, bench, tmp_path, capsys):
    plans = run(us={"nccl": 200, "vllm": 100, "rose": 90, "rose_norm": 80})
    assert [*plans] == ["nccl", "vllm", "rose", "rose_norm"]
    different = {"disable_custom_all_reduce", "additional_config"}
    common = [{key: v for key, v in plan["engine"].items() if key not in different} for plan in plans.values()]
    assert all(each == common[0] for each in common) and common[0]["tensor_parallel_size"] == 2
    assert not common[0]["compilation_config"]["pass_config"]["fuse_allreduce_rms"]
    assert plans["rose_norm"]["engine"]["additional_config"] == {
        "rose": {"all_reduce": "p2p", "all_reduce_norm": "auto"}
    }
    assert rows(tmp_path, bench)["rose", "decode", "batch=1"] == "90.0" and len(rows(tmp_path, bench)) == 8
    lines = capsys.readouterr().out.splitlines()
    assert (
        "qwen3_235b 2 layers tp2 decode batch=1: vllm 100 us; beside it nccl 2.000, rose 0.900, rose_norm 0.800"
        in lines
    )


def test_what_a_failed_engine_has_measured_stays(run, bench, tmp_path):
    with pytest.raises(SystemExit, match="failed: rose"):
        run("--engines", "rose", us={"rose": 90}, code=3)
    run("--engines", "vllm", us={"vllm": 100})
    assert {name for name, *_ in rows(tmp_path, bench)} == {"rose", "vllm"}


def test_nothing_begins_behind_the_deadline(run, bench, tmp_path, capsys):
    assert run("--engines", "vllm", "--deadline", "-1", us={"vllm": 1}) == {}
    assert "deadline: vllm was not started" in capsys.readouterr().out and not (tmp_path / bench.FILE).exists()


def test_one_rank_is_refused(bench, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "--ranks", "1"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "--ranks is 1; it must be 2 or more" in capsys.readouterr().err
