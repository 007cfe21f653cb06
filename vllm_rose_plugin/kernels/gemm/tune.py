"""Measure the candidates of a call on this device, and keep the fastest that computes the same as the heuristic's.

Choosing is here, in plain Python; running and timing kernels is in ``tune_bench``.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_rose_plugin.kernels.gemm import tuned
from vllm_rose_plugin.kernels.gemm.call import Call, heuristic
from vllm_rose_plugin.kernels.gemm.candidates import Config, candidates, free_fields
from vllm_rose_plugin.kernels.gemm.tuned import GAIN, Choice
from vllm_rose_plugin.kernels.jit.compile import counts

logger = logging.getLogger(__name__)

TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Of a step, where nothing else is asked for."""


@dataclass(frozen=True)
class Job:
    """A call and how many rows to expect, over all groups."""

    call: Call
    expected_rows: int

    @property
    def rows(self) -> tuple[int, int]:
        """The least and the most rows of the bucket that it stands for."""
        return tuned.bucket(self.call.num_groups, self.expected_rows)


@dataclass(frozen=True)
class Result:
    """What became of a job."""

    call: Call
    rows: int
    """The most of its bucket, where it was measured."""
    choice: Choice
    from_table: bool
    """Whether it was measured before."""


class Bench(Protocol):
    """A call with random operands on a device."""

    def fault(self, config: Config) -> str:
        """What is wrong with a config's result, by itself or beside one without stream-K; empty: nothing."""

    def times(self, configs: Sequence[Config], rows: int) -> list[float]:
        """Microseconds of each with that many rows."""


def choose(call: Call, expected_rows: int, *, bench: Bench) -> Choice:
    """The fastest config of a call for the bucket of expected_rows.

    It is faster than the heuristic's by GAIN with the most rows of the bucket, and not slower with the least.

    Args:
        call, expected_rows: what is computed.
        bench: runs and times kernels. A candidate that raises or computes something else is left out, and named.

    Raises:
        RuntimeError: the heuristic's own result is wrong.
    """
    least, most = tuned.bucket(call.num_groups, expected_rows)
    first, *others = candidates(call, most)
    if fault := bench.fault(first):
        raise RuntimeError(f"the heuristic's config gives a wrong result: {fault}: {first}")
    right = [first, *(config for config in others if _is_right(config, bench))]
    times = dict(zip(right, bench.times(right, most), strict=True))
    for config in sorted(right, key=times.__getitem__):
        if times[config] * GAIN >= times[first]:
            break
        if least < most:
            before, now = bench.times([heuristic(call, least), config], least)
            if now > before:
                continue
        return Choice(free_fields(config), times[first], times[config])
    return Choice(free_fields(first), times[first], times[first])


def _is_right(config: Config, bench: Bench) -> bool:
    try:
        fault = bench.fault(config)
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    if fault:
        logger.warning("tuning leaves a candidate out, %s: %s", fault, config)
    return not fault


def tune(
    jobs: Iterable[Job],
    *,
    again: bool = False,
    bench_of: Callable[[Call, int], Bench] | None = None,
    compile_all: Callable[[Sequence[tuple[Call, Config]]], None] | None = None,
) -> Iterator[Result]:
    """Measure what the table of this device lacks, and put it there, one result after another.

    Jobs of the same bucket are one. What runs out of memory, or whose kernels don't work, is named in a warning and has
    no result. The processes of a machine take turns.

    Args:
        jobs: in the order in which results come.
        again: measure also what the table has.
        bench_of: (call, most rows) to what measures it; None: on torch's current device.
        compile_all: compiles configs ahead; None: in worker processes.
    """
    if bench_of is None or compile_all is None:
        from vllm_rose_plugin.kernels.gemm import tune_bench

        bench_of = bench_of or tune_bench.DeviceBench
        compile_all = compile_all or tune_bench.compile_all
    wanted = list(dict.fromkeys(Job(job.call, job.rows[1]) for job in jobs if not job.call.batch_invariant))
    if all(_known(job, again) for job in wanted):
        yield from filter(None, map(_from_table, wanted))
        return
    with tuned.locked():
        due = {job for job in wanted if not _known(job, again)}
        compile_all([(job.call, config) for job in due for config in _needed(job)])
        for job in wanted:
            result = _measure(job, bench_of) if job in due else _from_table(job)
            if result is not None:
                yield result


def summary(results: Sequence[Result], *, seconds: float) -> str:
    """For a log: what tuning found and cost."""
    better = [result.choice for result in results if result.choice.counts]
    best = max((choice.heuristic_us / choice.choice_us for choice in better), default=1.0)
    return (
        f"tuned {len(results)} GEMM sizes in {seconds:.1f} s ({sum(r.from_table for r in results)} from the table): "
        f"{len(better)} take another config than the heuristic's, at best {best:.2f} times as fast"
    )


def tune_and_log(jobs: Iterable[Job]) -> None:
    """As :func:`tune`, for a start-up."""
    begin, compiled = time.perf_counter(), counts.compiled
    results = list(tune(jobs))
    if not all(result.from_table for result in results):
        logger.info(
            "%s, %d compiled", summary(results, seconds=time.perf_counter() - begin), counts.compiled - compiled
        )


def _known(job: Job, again: bool) -> bool:
    return not again and tuned.measured(job.call, job.expected_rows) is not None


def _from_table(job: Job) -> Result | None:
    choice = tuned.measured(job.call, job.expected_rows)
    return None if choice is None else Result(job.call, job.expected_rows, choice, from_table=True)


def _needed(job: Job) -> Iterator[Config]:
    yield from candidates(job.call, job.rows[1])
    yield heuristic(job.call, job.rows[0])


def _measure(job: Job, bench_of: Callable[[Call, int], Bench]) -> Result | None:
    try:
        choice = choose(job.call, job.expected_rows, bench=bench_of(job.call, job.expected_rows))
    except Exception as error:  # torch's out-of-memory error is a RuntimeError, as the device's errors are
        logger.warning(
            "%s with %d rows can't be tuned: %s: %s", job.call, job.expected_rows, type(error).__name__, error
        )
        return None
    tuned.record(job.call, job.expected_rows, choice)
    return Result(job.call, job.expected_rows, choice, from_table=False)
