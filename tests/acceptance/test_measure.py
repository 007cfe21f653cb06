"""benchmarks/measure.py: which jobs run when and on what, what a limit leaves, what a log of pytest says."""

import contextlib
import csv
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def measure():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import measure
    finally:
        sys.path.remove(str(BENCHMARKS))
    return measure


def python(code):
    return f'-c "{code}"'


def test_a_job_waits_for_its_gpus_and_sees_no_others(measure, tmp_path):
    show = python("import os, time; time.sleep(0.6); print(os.environ['CUDA_VISIBLE_DEVICES'])")
    jobs = [measure.Job("one", show), measure.Job("two", show, gpus=2), measure.Job("three", show)]
    done, left = measure.run_all(jobs, gpus=["4", "5"], limit=30, logs=tmp_path, workers=1)
    assert not left and [run.outcome for run in done] == ["ok"] * 3
    seen = {run.job.name: (tmp_path / f"{run.job.name}.log").read_text().strip() for run in done}
    assert seen["one"] in ("4", "5") and set(seen["two"].split(",")) == {"4", "5"} and seen["three"] in ("4", "5")
    begins = {run.job.name: (run.begin, run.begin + run.seconds) for run in done}
    assert begins["one"][1] <= begins["two"][0] + 0.1 and begins["two"][1] <= begins["three"][0] + 0.1


def test_the_limit_ends_what_runs_and_names_what_did_not_begin(measure, tmp_path, monkeypatch):
    """A process in a session of its own too, as servers of tests are."""
    monkeypatch.setattr(measure, "GRACE_SECONDS", 0.5)
    code = (
        "import subprocess, sys, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], start_new_session=True); "
        "print(p.pid, flush=True); time.sleep(300)"
    )
    jobs = [measure.Job("long", python(code)), measure.Job("never", python("print(1)"))]
    begin = time.monotonic()
    done, left = measure.run_all(jobs, gpus=["0"], limit=4, logs=tmp_path, workers=1)
    assert time.monotonic() - begin < 20
    assert [(run.job.name, run.outcome) for run in done] == [("long", "ended at the limit")]
    assert [job.name for job in left] == ["never"] and not (tmp_path / "never.log").exists()
    child = int((tmp_path / "long.log").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):  # else nobody has waited for it yet
        psutil.Process(child).wait(timeout=5)


def test_a_command_is_told_what_is_left(measure, tmp_path):
    job = measure.Job("told", python("print({left}, {workers})"))
    measure.run_all([job], gpus=["0"], limit=100, logs=tmp_path, workers=7)
    left, workers = (tmp_path / "told.log").read_text().split()
    assert 70 <= int(left) <= 80 and workers == "7"


def test_a_job_that_fails_is_told_with_its_last_line(measure, tmp_path, capsys):
    job = measure.Job("broken", python("raise SystemExit('no such kernel')"))
    done, _ = measure.run_all([job], gpus=["0"], limit=30, logs=tmp_path, workers=1)
    assert done[0].outcome == "exit code 1"
    assert "broken" in (line := capsys.readouterr().out) and "no such kernel" in line


LOGS = {
    "plain": "tests/a/test_b.py::test_c[x-1] PASSED [ 50%]\ntests/a/test_b.py::test_d FAILED [100%]\n",
    "workers": "[gw0] [ 50%] PASSED tests/a/test_b.py::test_c[x-1] \n[gw12] [100%] FAILED tests/a/test_b.py::test_d \n",
    "teardown": "tests/a/test_b.py::test_c[x-1] PASSED [ 50%]\ntests/a/test_b.py::test_d PASSED [ 99%]\n"
    "tests/a/test_b.py::test_d ERROR [100%]\n",
    "cut": "[gw1] [ 50%] PASSED tests/a/test_b.py::test_c[x-1] \ntests/a/test_b.py::test_e\n"
    "FAILED tests/a/test_b.py::test_d - AssertionError: 1 == 2\n",
}


@pytest.mark.parametrize("log", LOGS)
def test_outcomes_of_a_log(measure, log):
    found = measure.outcomes(LOGS[log])
    assert found.passed == {"tests/a/test_b.py::test_c[x-1]"} and found.failed == {"tests/a/test_b.py::test_d"}


def test_outcomes_are_those_of_this_pytest(measure, tmp_path):
    """With and without workers, a name with spaces in it too."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text(
        "import pytest\n@pytest.mark.parametrize('a', ['x y', 'z'])\ndef test_it(a):\n    assert a != 'z'\n"
    )
    for workers in ([], ["-n", "2"]):
        command = [sys.executable, "-m", "pytest", "-v", "-rf", "-p", "no:cacheprovider", *workers, "tests"]
        log = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
        found = measure.outcomes(log)
        assert found.passed == {"tests/test_it.py::test_it[x y]"}, log
        assert found.failed == {"tests/test_it.py::test_it[z]"}, log


def test_a_run_of_tests_is_a_line_of_the_file(measure, tmp_path):
    job = measure.Job("tests", "-m pytest --version -n {workers}", gpus=2)
    (run,), _ = measure.run_all([job], gpus=["0", "1"], limit=60, logs=tmp_path, workers=1)
    run.log.write_text(LOGS["workers"])
    run.ended, run.seconds = True, 12.3
    for _ in range(2):
        measure.record(run, path=tmp_path / "gpu_tests.csv", device="NVIDIA H200")
    with (tmp_path / "gpu_tests.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 and rows[0] == rows[1] and tuple(rows[0]) == measure.COLUMNS
    row = rows[0]
    assert (row["devices"], row["command"]) == ("2x NVIDIA H200", "pytest --version")
    assert (row["passed"], row["failed"]) == ("1", "1")
    assert row["note"] == "ended after 12 s; failed: tests/a/test_b.py::test_d"


def test_the_file_in_the_tree_has_these_columns(measure):
    with measure.GPU_TESTS.open() as file:
        assert tuple(next(csv.reader(file))) == measure.COLUMNS


def test_every_script_is_there_and_takes_its_options(measure):
    for group in measure.GROUPS.values():
        for job in group:
            words = job.command.format(left=100, workers=2).split()
            if job.tests:
                paths = [word for word in words if word.startswith("tests/")]
                assert paths and all((BENCHMARKS.parent / path).exists() for path in paths)
            else:
                source = (BENCHMARKS.parent / words[0]).read_text()
                if "add_common(" in source:  # options that benchmarks over several GPUs share
                    source += (BENCHMARKS / "bench_all_reduce.py").read_text()
                assert all(f'"{word}"' in source for word in words if word.startswith("--")), job


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (["kernel"], "no group kernel; there are kernels, peers"),
        ([], "name a group: see --list"),
        (["peers", "--gpus", "0"], "peers want more GPUs than 0: see --gpus"),
    ),
)
def test_what_cannot_run_is_refused(measure, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["measure.py", *arguments])
    with pytest.raises(SystemExit) as error:
        measure.main()
    assert error.value.code == 2 and message in capsys.readouterr().err
