"""The kernel cache between processes, with the real compiler."""

import signal
import time

import pytest


def wait_for(path, process):
    deadline = time.monotonic() + 200
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_second_start_compiles_nothing_and_loads_fast(workers):
    factors = [1.0, 2.0, 3.0]
    cold = workers.run(factors=factors)
    assert (cold["compiled"], cold["loaded"], cold["warnings"]) == (3, 0, [])
    warm = workers.run(factors=factors)
    assert (warm["compiled"], warm["loaded"], warm["warnings"]) == (0, 3, [])
    assert warm["load_seconds"] / 3 < 0.02
    assert not warm["cutlass_at_import"]


@pytest.mark.slow
def test_eight_cold_processes_compile_once(workers, tmp_path):
    go = tmp_path / "go"
    ready = [tmp_path / f"ready{index}" for index in range(8)]
    processes = [workers.start(ready=str(path), go=str(go)) for path in ready]
    for path, process in zip(ready, processes, strict=True):
        wait_for(path, process)
    go.touch()
    results = [workers.finish(process) for process in processes]
    assert sum(result["compiled"] for result in results) == 1
    assert sum(result["loaded"] for result in results) == 7
    assert not any(result["warnings"] for result in results)


SLOW_BUILD = """

import os, time
from pathlib import Path
plain_build = build

def build(config):
    Path(os.environ["BUILDING"]).touch()
    time.sleep(float(os.environ["BUILD_SECONDS"]))
    return plain_build(config)
"""


def test_killed_compiler_blocks_nobody(workers, tmp_path):
    source = workers.source_folder / "tiny_kernel.py"
    source.write_text(source.read_text() + SLOW_BUILD)
    first_builds, second_builds, ready, go = (tmp_path / name for name in ("first", "second", "ready", "go"))
    go.touch()
    first = workers.start(environment={"BUILDING": str(first_builds), "BUILD_SECONDS": "600"})
    wait_for(first_builds, first)
    second = workers.start(
        environment={"BUILDING": str(second_builds), "BUILD_SECONDS": "0"}, ready=str(ready), go=str(go)
    )
    wait_for(ready, second)
    time.sleep(1.0)
    assert not second_builds.exists()  # it waits for the first
    first.send_signal(signal.SIGKILL)
    result = workers.finish(second)
    assert (result["compiled"], result["warnings"]) == (1, [])
    assert second_builds.exists() and len(workers.objects()) == 1


def test_home_that_cannot_be_written_costs_one_warning(workers):
    nowhere = {"ROSE_CACHE_DIR": "", "VLLM_CACHE_ROOT": "", "XDG_CACHE_HOME": "", "HOME": "/dev/null/home"}
    result = workers.run(environment=nowhere, factors=[1.0, 2.0])
    assert (result["compiled"], result["loaded"], len(result["warnings"])) == (2, 0, 1)
    assert "/dev/null/home/.cache/vllm/rose" in result["warnings"][0] and "ROSE_CACHE_DIR" in result["warnings"][0]


def test_edited_source_is_compiled_again(workers):
    source = workers.source_folder / "tiny_kernel.py"
    assert workers.run()["compiled"] == 1
    source.write_text(source.read_text().replace("x[row, thread] * factor", "x[row, thread] + factor"))
    assert workers.run()["compiled"] == 1
    assert len(workers.objects()) == 2
