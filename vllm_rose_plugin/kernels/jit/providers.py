"""Choose who computes a family: every candidate is checked against the reference, the fastest that passes is used."""

import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_rose_plugin.kernels.jit.compile import compiler_settings, compiler_versions, counts
from vllm_rose_plugin.kernels.jit.fingerprint import sources_of, stable_text
from vllm_rose_plugin.kernels.jit.install import DSL
from vllm_rose_plugin.kernels.jit.targets import choose_target
from vllm_rose_plugin.kernels.jit.verdicts import Verdict, VerdictFile

logger = logging.getLogger(__name__)

_SEEDS = (20_251, 7)
"""Of the inputs that a candidate is checked on."""

_PIN = "ROSE_PROVIDER_"
_ROUND_SECONDS = 0.02
"""A slow candidate, such as the reference at a prefill's size, is called fewer times in a round."""

Timer = Callable[[Callable[[], Any]], float]
"""Microseconds of one call."""


@dataclass(frozen=True)
class Provider:
    """One way to compute a family."""

    name: str
    supports: Callable[[Any, str | None], bool]
    """(shape, target) to whether it can serve there; target None: no NVIDIA GPU."""
    make: Callable[[Any], Callable[..., Any]]
    """Shape to a callable, which takes the family's inputs and returns its outputs (in place: what it wrote)."""
    version: str = ""
    """Of the package behind it, where that isn't this one."""


@dataclass(frozen=True)
class Family:
    """What is computed, and how to tell whether it was."""

    name: str
    reference: Provider
    """The oracle. It is a candidate too, where it supports the shape."""
    providers: tuple[Provider, ...]
    """The other candidates."""
    make_inputs: Callable[[Any, int], tuple]
    """(shape, seed) to random inputs on the current device, the same for the same seed."""
    compare: Callable[[Any, Any], str]
    """(outputs, the reference's outputs) to what is wrong, in words; empty: nothing."""
    config_of: Callable[[Any, str, int], Any] | None = None
    """(shape, target, SM count) to the config of our kernel for it: which shapes run the same code."""
    state: Callable[[], str] | None = None
    """Whatever else on this machine decides which code runs, as text: where it changes, a verdict no longer holds."""


@dataclass(frozen=True)
class Machine:
    """What a verdict holds for, besides sources and shapes."""

    device: str
    driver: str
    target: str | None


@dataclass(frozen=True)
class Choice:
    """Who computes a family."""

    provider: str
    kernels: dict[Any, Callable[..., Any]]
    """Shape to the callable."""
    verdict: Verdict


class NoProviderError(RuntimeError):
    """No candidate can serve: start-up must fail."""


def choose(
    *,
    family: Family,
    shapes: Sequence[Any],
    timed: Sequence[Any] | None = None,
    machine: Machine | None = None,
    timer: Timer | None = None,
) -> Choice:
    """The provider of a family for a model.

    A candidate must support every shape and agree with the reference on each. Among those that do, the smallest
    geometric mean of the times wins, so that a long prefill doesn't outvote decode. ``ROSE_PROVIDER_<FAMILY>`` pins
    one, which must pass the same check. The verdict is kept on disk; a candidate that raised, be it while it was
    timed, is left out and tried again at the next start, since that may have been the machine's state and not the
    candidate.

    Args:
        family: the candidates.
        shapes: the model's shapes: frozen dataclasses or tuples of plain values.
        timed: those of them to time; None: all.
        machine: None: this one, with torch's current device.
        timer: None: :func:`time_on_gpu`, or the wall clock where there is no GPU.

    Raises:
        NoProviderError: no candidate supports the shapes and passes, or the pinned one doesn't.
        ValueError: the pinned name is no provider of this family, or ``shapes`` is empty.
    """
    if not shapes:
        raise ValueError(f"{family.name}: no shapes to check")
    machine = machine or this_machine()
    begin = time.perf_counter()
    candidates = _candidates(family, shapes, machine)
    situation = _situation(family, candidates, shapes, machine)
    if timed is not None:
        situation += "".join(f"\ntimed: {stable_text(shape, where=f'a shape of {family.name}')}" for shape in timed)
    file = VerdictFile(family=family.name, situation=situation)
    verdict = _usable(file.read(), candidates)
    how = "by an earlier verdict"
    if verdict is None:
        with file.locked():
            verdict = _usable(file.read(), candidates)
            if verdict is None:
                how = f"checked at {len(shapes)} shapes"
                to_time = shapes if timed is None else timed
                verdict = _check_and_time(family, candidates, shapes, to_time, timer or _default_timer(machine), file)
    for name, reason in verdict.failed.items():
        logger.warning("%s: provider %s failed its self-check and is not used: %s", family.name, name, reason)
    chosen = next(provider for provider in candidates if provider.name == verdict.provider)
    try:
        kernels = {shape: chosen.make(shape) for shape in shapes}
    except Exception as error:
        raise NoProviderError(
            f"{family.name}: provider {chosen.name}, chosen {how}, can't be made: {type(error).__name__}: {error}. "
            f"Set {_variable(family)} to one of {', '.join(p.name for p in candidates)}, or remove the "
            "verdicts with `rose cache clear`"
        ) from error
    seconds = time.perf_counter() - begin
    counts.self_check_seconds += seconds
    logger.info("%s: provider %s, %s in %.2f s%s", family.name, chosen.name, how, seconds, _ratios(verdict))
    return Choice(chosen.name, kernels, verdict)


def check_pins(families: Sequence[Family]) -> None:
    """Look at all ``ROSE_PROVIDER_<FAMILY>`` that are set.

    Raises:
        ValueError: one names no family, or no provider of its family; the message lists those there are.
    """
    by_variable = {_variable(family): family for family in families}
    for variable in sorted(name for name in os.environ if name.startswith(_PIN) and os.environ[name]):
        if variable not in by_variable:
            raise ValueError(f"{variable} names no family; legal: {', '.join(sorted(by_variable))}")
        _pinned(by_variable[variable])


def pin_of(family: Family) -> str:
    """The setting that pins the family's provider, as VARIABLE=NAME; empty: none does."""
    variable = _variable(family)
    return f"{variable}={os.environ[variable]}" if os.environ.get(variable) else ""


def _variable(family: Family) -> str:
    return f"{_PIN}{family.name.upper()}"


def _pinned(family: Family) -> list[Provider]:
    """The candidates that the environment leaves."""
    everyone = [*family.providers, family.reference]
    name = os.environ.get(_variable(family))
    pinned = [provider for provider in everyone if not name or provider.name == name]
    if not pinned:
        legal = ", ".join(provider.name for provider in everyone)
        raise ValueError(f"{_variable(family)}={name}: {family.name} has no such provider; legal: {legal}")
    return pinned


def _candidates(family: Family, shapes: Sequence[Any], machine: Machine) -> list[Provider]:
    everyone, variable = _pinned(family), _variable(family)
    pinned = bool(os.environ.get(variable))
    able = [p for p in everyone if all(p.supports(shape, machine.target) for shape in shapes)]
    if not able:
        names = ", ".join(provider.name for provider in everyone)
        raise NoProviderError(
            f"{family.name}: no provider serves {', '.join(map(str, shapes))} on {machine.device} "
            f"(target {machine.target}); asked: {names}" + (f", which {variable} pins" if pinned else "")
        )
    return able


def _check_and_time(
    family: Family,
    candidates: list[Provider],
    shapes: Sequence[Any],
    timed: Sequence[Any],
    timer: Timer,
    file: VerdictFile,
) -> Verdict:
    failed, raised = {}, False
    passed: list[Provider] = []
    for provider in candidates:
        try:
            fault = "" if provider is family.reference else _fault(family, provider, shapes)
        except Exception as error:
            fault, raised = f"{type(error).__name__}: {error}", True
        if fault:
            failed[provider.name] = fault
        else:
            passed.append(provider)
    if not passed:
        raise _nobody_passed(family, failed)
    times: dict[str, list[float]] = {}
    if len(passed) > 1:
        for provider in tuple(passed):
            try:
                times[provider.name] = [
                    timer(partial(provider.make(shape), *family.make_inputs(shape, _SEEDS[0]))) for shape in timed
                ]
            except Exception as error:
                failed[provider.name] = f"while it was timed: {type(error).__name__}: {error}"
                raised = True
                passed.remove(provider)
    if not passed:
        raise _nobody_passed(family, failed)
    fastest = min(passed, key=lambda provider: _mean(times.get(provider.name, [1.0])))
    verdict = Verdict(fastest.name, times, failed)
    if not raised:
        file.write(verdict)
    return verdict


def _nobody_passed(family: Family, failed: dict[str, str]) -> NoProviderError:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
    return NoProviderError(f"{family.name}: no provider passed its self-check. {reasons}")


def _fault(family: Family, provider: Provider, shapes: Sequence[Any]) -> str:
    for shape in shapes:
        kernel, oracle = provider.make(shape), family.reference.make(shape)
        for seed in _SEEDS:
            outputs = kernel(*family.make_inputs(shape, seed))
            _synchronize()  # an error of the device belongs to this candidate
            fault = family.compare(outputs, oracle(*family.make_inputs(shape, seed)))
            if fault:
                return f"at {shape}: {fault}"
    return ""


def _usable(verdict: Verdict | None, candidates: list[Provider]) -> Verdict | None:
    return verdict if verdict and verdict.provider in {provider.name for provider in candidates} else None


def _situation(family: Family, candidates: list[Provider], shapes: Sequence[Any], machine: Machine) -> str:
    functions: list[Any] = [family.make_inputs, family.compare, family.reference.make]
    functions += [function for provider in candidates for function in (provider.make, provider.supports)]
    lines = [
        family.name,
        *(stable_text(shape, where=f"a shape of {family.name}") for shape in shapes),
        *(f"{provider.name} {provider.version}" for provider in candidates),
        stable_text(machine, where="machine"),
        family.state() if family.state is not None else "",
        f"torch {_version('torch')}",
        compiler_versions(),
        compiler_settings(),
        *sorted({sources_of(getattr(function, "func", function)).digest for function in functions}),
    ]
    return "\n".join(lines)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _mean(times: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(time) for time in times))


def _ratios(verdict: Verdict) -> str:
    best = verdict.microseconds.get(verdict.provider)
    if not best:
        return ""
    others = ", ".join(
        f"{name} {_mean(times) / _mean(best):.2f}x"
        for name, times in verdict.microseconds.items()
        if name != verdict.provider
    )
    return f"; {_mean(best):.1f} us{', against which ' if others else ''}{others}"


def this_machine() -> Machine:
    """The current device of torch, or the CPU where there is no NVIDIA GPU."""
    import torch

    if not torch.cuda.is_available():
        return Machine(device="cpu", driver="none", target=None)
    version = _version(DSL)
    choice = choose_target(
        capability=torch.cuda.get_device_capability(), dsl_version=None if version == "none" else version
    )
    try:
        driver = Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        driver = "unknown"
    return Machine(device=torch.cuda.get_device_name(), driver=driver, target=choice.target)


def _default_timer(machine: Machine) -> Timer:
    return time_on_gpu if machine.target else time_on_cpu


def time_on_gpu(call: Callable[[], Any], *, calls: int = 20, rounds: int = 5) -> float:
    """Microseconds per call on the device: the median over rounds of calls that stand in a queue behind a pause.

    The pause lets the host run ahead, so that launch overhead counts only where it exceeds the kernel's time. Every
    call reads the same inputs: sizes that fit the L2 cache are timed from there, for all candidates alike.
    """
    import torch

    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    calls = max(1, min(calls, int(_ROUND_SECONDS / (time.perf_counter() - begin))))
    results = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # about a millisecond
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        results.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(results)


def time_in_graph(call: Callable[[], Any], *, calls: int = 16, rounds: int = 5) -> float:
    """Microseconds per call in a CUDA graph of several: the median over replays."""
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    results = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        results.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(results)


def time_on_cpu(call: Callable[[], Any], *, rounds: int = 5) -> float:
    """Microseconds per call by the wall clock: the median over rounds."""
    call()
    results = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        results.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(results)


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
