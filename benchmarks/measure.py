"""Runs the GPU tests and the benchmarks of this tree in groups, within a time limit, on some GPUs of this machine.

    python benchmarks/measure.py --list
    python benchmarks/measure.py kernels grouped --gpus 0,1 --limit 540 --logs logs

Jobs begin in the order of the groups, as soon as enough GPUs are free; each sees only its own. What a job prints goes
into a file of the log folder. A job that still runs at the limit is ended, and what has not begun is left out: both are
named at the end, with every job's time and what its log says last. Benchmarks write their tables themselves, row by
row. Tests add a line to benchmarks/results/gpu_tests.csv, with the names of those that failed, also of a run that was
ended. The exit code is 1 if a job failed or was ended.
"""

import argparse
import contextlib
import csv
import datetime
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from columns import commit, versions
from gemm_timing import VERSIONS

ROOT = Path(__file__).parents[1]
GPU_TESTS = ROOT / "benchmarks/results/gpu_tests.csv"
COLUMNS = ("devices", "command", "passed", "failed", "note", "versions", "commit", "date")
GRACE_SECONDS = 8.0
"""Between asking a job to end and killing it."""
KERNEL_TESTS = "gemm_cutedsl moe_cutedsl kernels kernels_jit kernels_ptx memory mxfp8_quantize_cutedsl qk_norm"
PEER_TESTS = "dp_exchange all_reduce all_reduce_norm ep_combine memory"


@dataclass(frozen=True)
class Job:
    """A command, without the interpreter. ``{left}`` stands for the seconds until the limit, ``{workers}`` for -n."""

    name: str
    command: str
    gpus: int = 1

    @property
    def tests(self) -> bool:
        """Whether pytest runs it."""
        return self.command.startswith("-m pytest")


def _tests(name: str, marker: str, paths: str, *, gpus: int = 1, workers: bool = False) -> Job:
    spread = " -n {workers}" if workers else ""
    return Job(name, f"-m pytest -v -rf --tb=short -p no:cacheprovider{spread} -m {marker} {paths}", gpus)


def _folders(names: str) -> str:
    return " ".join(f"tests/{name}" for name in names.split())


def _bench(name: str, script: str, *, gpus: int = 1) -> Job:
    return Job(name, f"benchmarks/{script}", gpus)


GROUPS: dict[str, tuple[Job, ...]] = {
    "kernels": (_tests("kernels", "gpu", _folders(KERNEL_TESTS), workers=True),),
    "peers": (_tests("peers", "multi_gpu", _folders(PEER_TESTS), gpus=2, workers=True),),
    "vllm": (_tests("vllm", "gpu", "tests/gpu"),),
    "vllm_two": (_tests("vllm_two", "multi_gpu", "tests/gpu", gpus=2),),
    "disaggregated": (_tests("disaggregated", "multi_gpu", "tests/e2e/test_disaggregated.py", gpus=2),),
    "tiles": (_bench("tiles", "sweep_gemm_tiles.py"),),
    "grouped": tuple(
        _bench(f"grouped_{experts}", f"bench_gemm_grouped.py --check --experts {experts} --deadline {{left}}")
        for experts in (16, 8, 32, 128)
    ),
    "routing": (
        _bench(
            "routing",
            "bench_gemm_grouped.py --experts 16,128 --routing random,skewed --only rose,marlin,humming "
            "--deadline {left}",
        ),
    ),
    "dense": (_bench("dense", "bench_gemm_dense.py --check --deadline {left}"),),
    "layer": (
        _bench("layer", "bench_moe_layer.py --check --cases layer,move,bandwidth,launches --deadline {left}"),
        _bench("layer_30b", "bench_moe_layer.py --models qwen3-30b --check --deadline {left}"),
        _bench("layer_397b", "bench_moe_layer.py --models qwen3.5-397b --check --deadline {left}"),
    ),
    "serving": (_bench("serving", "bench_serving.py --engines auto rose --deadline {left}"),),
    "mtp": (_bench("mtp", "bench_mtp.py --deadline {left}"),),
    "locality": (_bench("locality", "bench_locality.py --deadline {left}"),),
    "all_reduce": (
        _bench("all_reduce", "bench_all_reduce.py --tune --deadline {left}", gpus=2),
        _bench("all_reduce_norm", "bench_all_reduce_norm.py --deadline {left}", gpus=2),
        _bench("ep_combine", "bench_ep_combine.py --tune --deadline {left}", gpus=2),
        _bench("all_reduce_serving", "bench_all_reduce_serving.py --deadline {left}", gpus=2),
    ),
    "all_to_all": (
        _bench("all_to_all", "bench_all_to_all.py --emulate 4 16 72 --deadline {left}", gpus=2),
        _bench("all_to_all_serving", "bench_all_to_all_serving.py --deadline {left}", gpus=2),
    ),
}


@dataclass
class Run:
    """A job that has begun."""

    job: Job
    gpus: list[str]
    log: Path
    process: subprocess.Popen
    begin: float
    ended: bool = False
    """By us, at the limit."""
    seconds: float = 0.0

    @property
    def outcome(self) -> str:
        """For people."""
        if self.ended:
            return "ended at the limit"
        return "ok" if self.process.returncode == 0 else f"exit code {self.process.returncode}"


@dataclass
class Outcomes:
    """What pytest's -v has said of each test so far; the last word counts."""

    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


# As "path::name PASSED", or of a worker "[gw3] [ 12%] PASSED path::name"; -rf repeats "FAILED path::name - why".
_PLAIN = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR)\b")
_WORKER = re.compile(r"^(?:\[gw\d+\] \[ *\d+%\] )?(PASSED|FAILED|ERROR) (tests/\S+?::.+?)(?: - .*)?$")


def outcomes(log: str) -> Outcomes:
    """Of a log of pytest -v, whole or cut off."""
    found = Outcomes()
    for line in log.splitlines():
        if match := _PLAIN.match(line):
            name, word = match.groups()
        elif match := _WORKER.match(line):
            word, name = match.groups()
        else:
            continue
        if word == "PASSED":
            found.passed.add(name.strip())
        else:
            found.failed.add(name.strip())
    found.passed -= found.failed
    return found


def begin(job: Job, *, gpus: list[str], logs: Path, left: float, workers: int) -> Run:
    """Starts a job in a process group of its own."""
    command = job.command.format(left=max(1, int(left) - 20), workers=workers)
    log = logs / f"{job.name}.log"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "PYTHONUNBUFFERED": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *shlex.split(command)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Run(job, gpus, log, process, time.monotonic())


def end(runs: list[Run]) -> None:
    """Asks them to end, then kills what is left of them, processes in sessions of their own included."""
    children = [child for run in runs for child in _children(run)]
    for run in runs:
        run.ended = True
        _signal(run, signal.SIGTERM)
    until = time.monotonic() + GRACE_SECONDS
    for run in runs:
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(timeout=max(0.0, until - time.monotonic()))
        _signal(run, signal.SIGKILL)
        run.process.wait()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _children(run: Run) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(run.process.pid).children(recursive=True)
    return []


def _signal(run: Run, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.process.pid, number)


def run_all(jobs: list[Job], *, gpus: list[str], limit: float, logs: Path, workers: int) -> tuple[list[Run], list[Job]]:
    """All of them, or as many as the time allows.

    Returns:
        What ran, in the order in which it ended, and what didn't begin.
    """
    logs.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + limit
    waiting, running, done, free = list(jobs), list[Run](), list[Run](), list(gpus)
    while waiting or running:
        while waiting and waiting[0].gpus <= len(free) and time.monotonic() < until:
            job = waiting.pop(0)
            taken, free = free[: job.gpus], free[job.gpus :]
            left = until - time.monotonic()
            running.append(begin(job, gpus=taken, logs=logs, left=left, workers=workers))
        over = time.monotonic() >= until
        if over:
            end(running)
        for run in [run for run in running if run.process.poll() is not None]:
            running.remove(run)
            done.append(run)
            free += run.gpus
            run.seconds = time.monotonic() - run.begin
            _signal(run, signal.SIGKILL)  # what the job left behind
            print(f"{run.job.name:<20} {run.seconds:6.0f} s  {run.outcome:<20} {last_line(run.log)}", flush=True)
        if over:
            break
        time.sleep(0.2)
    return done, waiting


def last_line(log: Path) -> str:
    """What it says last, cut."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:150] if lines else "(nothing printed)"


def record(run: Run, *, path: Path, device: str) -> Outcomes:
    """Adds a line of a run of tests to the file.

    Args:
        device: the kind of GPU.
    """
    found = outcomes(run.log.read_text(errors="replace"))
    notes = [f"ended after {run.seconds:.0f} s"] if run.ended else []
    if found.failed:
        notes.append("failed: " + ", ".join(sorted(found.failed)))
    elif not run.ended and run.process.returncode:
        notes.append(f"exit code {run.process.returncode}: {last_line(run.log)}")
    command = re.sub(r"^-m | -v -rf --tb=short -p no:cacheprovider", "", run.job.command).replace(" -n {workers}", "")
    devices = f"{run.job.gpus}x {device}" if run.job.gpus > 1 else device
    row = (devices, command, len(found.passed), len(found.failed), "; ".join(notes), versions(*VERSIONS), commit())
    exists = path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not exists:
            writer.writerow(COLUMNS)
        writer.writerow((*row, datetime.date.today().isoformat()))
    return found


def chosen(names: list[str]) -> list[Job]:
    """The jobs of groups.

    Raises:
        ValueError: a group that isn't there; the message names those that are.
    """
    if unknown := [name for name in names if name not in GROUPS]:
        raise ValueError(f"no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    return [job for name in names for job in GROUPS[name]]


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--list", action="store_true", help="print the groups' commands and stop")
    parser.add_argument("--gpus", help="numbers, separated by commas (default: all)")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="processes of kernel tests (default: %(default)s)")
    parser.add_argument("--logs", type=Path, default=ROOT / "build/measure", help="folder (default: %(default)s)")
    args = parser.parse_args()
    if args.list:
        for name, group in GROUPS.items():
            for job in group:
                print(f"{name:<14} {job.gpus} GPU{'s' * (job.gpus > 1)}  python {job.command}")
        return
    try:
        jobs = chosen(args.groups)
    except ValueError as error:
        parser.error(str(error))
    if not jobs:
        parser.error("name a group: see --list")
    gpus = args.gpus.split(",") if args.gpus else [str(i) for i in range(torch.cuda.device_count())]
    if short := [job.name for job in jobs if job.gpus > len(gpus)]:
        parser.error(f"{', '.join(short)} want more GPUs than {','.join(gpus) or 'none'}: see --gpus")
    done, left = run_all(jobs, gpus=gpus, limit=args.limit, logs=args.logs, workers=args.workers)
    for run in done:
        if run.job.tests:
            for name in sorted(record(run, path=GPU_TESTS, device=torch.cuda.get_device_name()).failed):
                print(f"failed: {name}")
    if left:
        print(f"not begun within {args.limit:.0f} s: {', '.join(job.name for job in left)}")
    sys.exit(bool(left) or any(run.ended or run.process.returncode for run in done))


if __name__ == "__main__":
    main()
