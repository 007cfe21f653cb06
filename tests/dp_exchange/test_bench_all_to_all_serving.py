"""bench_all_to_all_serving.py beside its ranks: what becomes of times, of a rank that fails, at the deadline."""

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import bench_all_to_all_serving
    finally:
        sys.path.remove(str(BENCHMARKS))
    return bench_all_to_all_serving


@pytest.fixture
def run(bench, monkeypatch, tmp_path):
    """main() with ranks that print microseconds by batch, then do what a line of Python says."""

    def call(*arguments, us, then=("pass", "pass")):
        def start(plan, directory, rank, port):
            times = us[directory.name][rank].items()
            results = [json.dumps({"batch": batch, "us": [some + rank, some, some + 5]}) for batch, some in times]
            program = [
                "import sys, time",
                *(f"print('RESULT ' + {line!r}, flush=True)" for line in results),
                then[rank],
            ]
            with (directory / f"{rank}.out").open("w") as out:
                command = [sys.executable, "-c", "\n".join(program)]
                return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

        monkeypatch.setattr(bench, "start", start)
        monkeypatch.setattr(bench, "GRACE_S", 0.5)
        monkeypatch.setattr(bench.signal, "signal", lambda *_: None)
        monkeypatch.setattr(sys, "argv", ["bench", "--layers", "2", "--out", str(tmp_path), *arguments])
        bench.main()

    return call


def rows(folder, bench):
    with (folder / f"{bench.AREA}.csv").open() as file:
        return {(row["provider"], row["shape"]): row["us"] for row in csv.DictReader(file)}


def test_the_slower_rank_counts_and_engines_are_compared(run, bench, tmp_path, capsys):
    run("--engines", "default", "rose", us={"default": [{1: 100}, {1: 120}], "rose": [{1: 100}, {1: 90}]})
    assert rows(tmp_path, bench) == {("default", "batch=1;ranks=2"): "121.0", ("rose", "batch=1;ranks=2"): "100.0"}
    assert "qwen3_235b 2 layers decode batch=1;ranks=2: rose 1.21 times default, bar 1.1" in capsys.readouterr().out


def test_a_rank_that_fails_is_named_with_its_error_and_what_was_measured_stays(run, bench, tmp_path, capsys):
    begin = time.monotonic()
    with pytest.raises(SystemExit, match="failed: rose"):
        run(
            *("--engines", "rose"),
            us={"rose": [{1: 10, 8: 20}, {1: 10}]},
            then=("time.sleep(300)", "print('\\n' * 99); raise ValueError('no room')"),
        )
    assert time.monotonic() - begin < 60
    assert set(rows(tmp_path, bench)) == {("rose", "batch=1;ranks=2")}
    said = capsys.readouterr().err
    assert "rank 0 was stopped" in said and "rank 1 ended with 1" in said and "ValueError: no room" in said


def test_rows_are_written_while_an_engine_runs_and_the_deadline_stops_it(run, bench, monkeypatch, tmp_path, capsys):
    written, write = [], bench.write
    monkeypatch.setattr(bench, "write", lambda *a: (write(*a), written.append(time.monotonic())))
    begin = time.monotonic()
    both = [{1: 10}, {1: 10}]
    with pytest.raises(SystemExit, match="failed: default"):
        run(
            *("--engines", "default", "rose", "--deadline", "2"),
            us={"default": both, "rose": both},
            then=("time.sleep(300)", "time.sleep(300)"),
        )
    assert written and written[0] < begin + 2 < time.monotonic() < begin + 60
    assert "deadline: rose was not started" in capsys.readouterr().out
