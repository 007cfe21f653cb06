"""The half of bench_serving.py that needs no GPU: engines that come one call at a time, fail, or meet the deadline."""

import csv
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DECODE = [{"kind": "decode", "batch": batch, "us": 1000.0 * batch} for batch in (1, 32)]
PREFILL = {"kind": "prefill", "batch": 1, "us": 5000.0}
MEMORY = {"kind": "memory", "start_s": 3.0, "load_peak_gib": 1.5, "held_gib": 1.25}


@pytest.fixture(scope="module")
def modules():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import bench_serving
        import plot_serving
    finally:
        sys.path.remove(str(BENCHMARKS))
    return bench_serving, plot_serving


@pytest.fixture
def run(modules, monkeypatch, tmp_path):
    """Runs main() with engines that print these results, then `then`: a line of Python."""
    bench, _ = modules

    def call(*arguments, prints, then="pass"):
        def start(plan, directory, name, *, waits):
            program = [f"print('RESULT ' + {json.dumps(json.dumps(each))}, flush=True)" for each in prints[name]]
            if program:
                program.insert(1, "sys.stdin.readline()")
            with (directory / f"{name}.out").open("w") as out:
                return subprocess.Popen(
                    [sys.executable, "-c", "\n".join([f"import sys, time; name = {name!r}", *program, then])],
                    stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
                    stdout=out,
                )

        monkeypatch.setattr(bench, "start", start)
        monkeypatch.setattr(bench, "LOOK_EVERY_S", 0.05)
        monkeypatch.setattr(sys, "argv", ["bench_serving.py", "--out", str(tmp_path), *arguments])
        bench.main()

    return call


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def speeds(folder):
    return {(row["provider"], row["case"].split()[-1], row["shape"]): row["us"] for row in rows(folder / "serving.csv")}


def test_engines_of_two_calls_share_the_table_and_are_compared(run, modules, tmp_path, capsys):
    run("--engines", "auto", prints={"auto": [MEMORY, *DECODE, PREFILL]})
    faster = [{**each, "us": each["us"] / 1.2} for each in (*DECODE, PREFILL)]
    run("--engines", "rose", prints={"rose": [MEMORY, *faster]})
    found = speeds(tmp_path)
    assert len(found) == 6
    assert found["auto", "decode", "batch=32"] == "32000.0" and found["rose", "decode", "batch=32"] == "26666.7"
    assert found["rose", "prefill", "tokens=8192"] == "4166.7"
    lines = capsys.readouterr().out.splitlines()
    assert "qwen3_235b 16 layers decode batch=1: rose 1.20 times auto, bar 1.0" in lines
    assert "qwen3_235b 16 layers decode batch=32: rose 1.20 times auto, bar 1.25 MISSED" in lines
    assert not (tmp_path / "serving_agreement.csv").exists(), "it may hold agreement of an earlier run"
    picture = modules[1].draw(tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_engines_that_start_together_are_measured_one_after_the_other(run, tmp_path):
    log = tmp_path / "turns"
    say = f"open({str(log)!r}, 'a').write(str(time.time()) + ' ')"
    run(
        *("--engines", "auto", "rose", "--together"),
        prints={"auto": [MEMORY, DECODE[0]], "rose": [MEMORY, DECODE[0]]},
        then=f"{say}; time.sleep(1)",
    )
    first, second = map(float, log.read_text().split())
    assert second - first >= 1
    assert set(speeds(tmp_path)) == {("auto", "decode", "batch=1"), ("rose", "decode", "batch=1")}


def test_an_engine_that_fails_before_its_turn_leaves_the_others(run, tmp_path):
    with pytest.raises(SystemExit, match="failed: auto"):
        run(
            *("--engines", "auto", "rose", "--together"),
            prints={"auto": [], "rose": [MEMORY, DECODE[0]]},
            then="sys.exit(3 * (name == 'auto'))",
        )
    assert set(speeds(tmp_path)) == {("rose", "decode", "batch=1")}


def test_what_a_failed_engine_has_measured_stays(run, tmp_path):
    with pytest.raises(SystemExit, match="failed: auto"):
        run("--engines", "auto", "rose", prints={"auto": [MEMORY, DECODE[0]], "rose": [MEMORY]}, then="sys.exit(3)")
    assert speeds(tmp_path) == {("auto", "decode", "batch=1"): "1000.0"}


def test_results_are_written_while_an_engine_runs(run, modules, monkeypatch, tmp_path):
    """So that a run that is killed leaves them."""
    written, tables = [], modules[0].tables
    monkeypatch.setattr(modules[0], "tables", lambda *a: (tables(*a), written.append(time.time())))
    begin = time.time()
    run("--engines", "auto", prints={"auto": [MEMORY, *DECODE]}, then="time.sleep(3)")
    assert written[0] < time.time() - 2 and time.time() - begin >= 3


def test_the_deadline_stops_engines_and_starts_no_other(run, modules, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(modules[0], "GRACE_S", 0.5)
    begin = time.time()
    with pytest.raises(SystemExit, match="failed: auto"):
        run(
            *("--engines", "auto", "rose", "--deadline", "1"),
            prints={"auto": [MEMORY, *DECODE]},
            then="time.sleep(300)",
        )
    assert time.time() - begin < 60
    assert len(speeds(tmp_path)) == 2
    assert "deadline: rose was not started" in capsys.readouterr().out


def test_agreement_with_the_bf16_model_has_rows_of_its_own(run, modules, monkeypatch, tmp_path):
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 512}')
    monkeypatch.setattr(modules[0], "token_rows", lambda *args, **how: [[1, 2, 3]])
    logprobs = {"bf16": [[0.5, 0.25, 0.25]], "rose": [[0.25, 0.5, 0.25]], "marlin": [[0.25, 0.5, 0.25]]}
    for name, rows_of in logprobs.items():
        torch.save(torch.tensor([rows_of]).log(), tmp_path / f"{name}.pt")
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda path: load(tmp_path / path.name))
    done = [MEMORY, {"kind": "agreement"}]
    prints = dict.fromkeys(logprobs, done)
    for engines in (("bf16", "rose", "--bf16", str(tmp_path)), ("marlin", "rose")):
        run("--model", str(model), "--cases", "agreement", "--engines", *engines, prints=prints)
    found = {(row["case"], row["engine"]): row for row in rows(tmp_path / "serving_agreement.csv")}
    assert set(found) == {("tiny from bf16", e) for e in ("bf16", "rose")} | {("tiny", e) for e in ("marlin", "rose")}
    ours = found["tiny from bf16", "rose"]
    assert float(ours["mean_kl"]) == pytest.approx(0.25 * math.log(2), rel=1e-3)
    assert ours["same_first_token"] == "0.0000" and found["tiny", "rose"]["same_first_token"] == "1.0000"
    with pytest.raises(SystemExit):
        run("--model", str(model), "--engines", "bf16", prints=prints)


def test_memory_alone_is_written(run, tmp_path):
    run("--engines", "rose", "--cases", "memory", prints={"rose": [MEMORY]})
    (row,) = rows(tmp_path / "serving_agreement.csv")
    assert (row["engine"], row["load_peak_gib"], row["held_gib"], row["mean_kl"]) == ("rose", "1.500", "1.250", "")


def test_batches_and_prefill_are_those_of_the_issue(modules):
    bench, _ = modules
    assert bench.BATCHES == (1, 8, 32, 64, 128, 256) and bench.PREFILL_TOKENS == 8192
    assert {"auto", "rose"} <= set(bench.ENGINES) and bench.ENGINES["auto"] == {}
