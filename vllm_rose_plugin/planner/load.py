"""What comes in: a rate with length distributions, or a trace of requests."""

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from vllm_rose_plugin.planner.capacity import Floats

_SAMPLES = 2000
"""Requests by which a length distribution is described to the plan."""
_FEWEST_PER_PART = 25
"""Requests below which a part of a window is too short to tell a burst from chance."""
_MOST = 1e15
"""Of a trace's numbers: more than a year in microseconds, and each still exact in a float."""
_LOGNORMAL_P95 = NormalDist().inv_cdf(0.95)
_KEYS = ("arrival_s", "input_tokens", "output_tokens")
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")
"""Of the trace files of the Mooncake project (github.com/kvcache-ai/Mooncake), with milliseconds."""


class LoadError(ValueError):
    """A load that can't be read or makes no sense."""


@dataclass(frozen=True)
class Request:
    """One request of a trace."""

    arrival: float
    """Seconds since the trace's start."""
    input_tokens: int
    output_tokens: int
    """At least 1."""


@dataclass(frozen=True)
class Window:
    """A stretch of time in which requests come at random at a constant rate."""

    rate: float
    """Requests per second."""
    input_tokens: Floats  # (samples,)
    output_tokens: Floats  # (samples,)
    weight: float
    """Share of all requests."""


@dataclass(frozen=True)
class Load:
    """Windows of one load; a distribution is one window."""

    windows: tuple[Window, ...]
    description: str
    burst: str | None = None
    """A burst that the windows are too long to see."""

    @property
    def rate(self) -> float:
        """Requests per second of the busiest window."""
        return max(window.rate for window in self.windows)

    def scaled(self, factor: float) -> "Load":
        """The same requests, ``factor`` times as often."""
        windows = [
            Window(window.rate * factor, window.input_tokens, window.output_tokens, window.weight)
            for window in self.windows
        ]
        return Load(tuple(windows), self.description, self.burst)


@dataclass(frozen=True)
class Lengths:
    """Quantile function of a number of tokens."""

    text: str
    low: float
    high: float
    sigma: float | None = None
    """Of the logarithm where it is lognormal, with ``low`` as the median and ``high`` as the most; else uniform."""

    @classmethod
    def parse(cls, text: str, *, flag: str) -> "Lengths":
        """``N``, ``uniform:LOW:HIGH`` or ``lognormal:MEDIAN:P95:MOST``.

        Raises:
            LoadError: anything else; numbers below 1 or falling.
        """
        kind, *numbers = text.split(":")
        try:
            values = [int(number) for number in (numbers or [kind])]
        except ValueError:
            values = []
        shape = "constant" if not numbers else kind
        expected = {"constant": 1, "uniform": 2, "lognormal": 3}.get(shape)
        if expected != len(values) or min(values) < 1 or values != sorted(values):
            raise LoadError(
                f"{flag} {text!r} is no length; give N, uniform:LOW:HIGH or lognormal:MEDIAN:P95:MOST with whole "
                "numbers from 1 up that don't fall"
            )
        if shape == "lognormal":
            sigma = math.log(values[1] / values[0]) / _LOGNORMAL_P95
            return cls(text=text, low=values[0], high=values[2], sigma=sigma)
        return cls(text=text, low=values[0], high=values[-1])

    def quantile(self, share: float) -> int:
        """Tokens below which ``share`` (0..1, both out) of the requests lie, at least 1."""
        if self.sigma is None:
            value = self.low + (self.high - self.low) * share
        else:
            value = min(self.low * math.exp(self.sigma * NormalDist().inv_cdf(share)), self.high)
        return max(1, round(value))


def distribution(*, rate: float, inputs: Lengths, outputs: Lengths) -> Load:
    """A steady load of independent requests (Poisson)."""
    shares = [(index + 0.5) / _SAMPLES for index in range(_SAMPLES)]
    prompts = [inputs.quantile(share) for share in shares]
    answers = [outputs.quantile(share) for share in shares]
    random.Random(0).shuffle(answers)  # the two lengths are taken as independent
    window = Window(rate, np.array(prompts, dtype=np.float64), np.array(answers, dtype=np.float64), 1.0)
    return Load((window,), f"{rate:g} requests/s, input {inputs.text}, output {outputs.text} tokens")


def from_trace(requests: Sequence[Request], *, window_seconds: float, name: str) -> Load:
    """Cut a trace into windows, each then taken as steady.

    Args:
        requests: sorted by arrival, at least one.
        window_seconds: length of a window. Bursts shorter than this are averaged away.
        name: for the description.
    """
    end = requests[-1].arrival
    count = max(1, math.ceil((end - requests[0].arrival) / window_seconds + 1e-9))
    parts: dict[int, list[Request]] = {}  # a trace may have more empty windows than memory has room for
    for request in requests:
        part = min(count - 1, int((request.arrival - requests[0].arrival) / window_seconds))
        parts.setdefault(part, []).append(request)
    last = max(end - requests[0].arrival - (count - 1) * window_seconds, window_seconds / 2)
    windows = []
    for index, inside in parts.items():
        seconds = window_seconds if index < count - 1 else last
        prompts = np.array([request.input_tokens for request in inside], dtype=np.float64)
        answers = np.array([request.output_tokens for request in inside], dtype=np.float64)
        windows.append(Window(len(inside) / seconds, prompts, answers, len(inside) / len(requests)))
    span = max(end - requests[0].arrival, window_seconds)
    peak = max(window.rate for window in windows)
    description = (
        f"{name}: {len(requests):,} requests in {span:,.0f} s, {len(requests) / span:.2f} requests/s, "
        f"{peak:.2f} in the busiest {window_seconds:g} s"
    )
    return Load(tuple(windows), description, _hidden_burst(requests, peak, window_seconds))


def _hidden_burst(requests: Sequence[Request], peak: float, window_seconds: float) -> str | None:
    """Whether some part of a window, a quarter or less, is clearly busier than the busiest window."""
    seconds = window_seconds / 4
    while (expected := peak * seconds) >= _FEWEST_PER_PART:
        counts = Counter(int((request.arrival - requests[0].arrival) / seconds) for request in requests)
        most = max(counts.values())
        if most > max(1.2 * expected, expected + 5 * math.sqrt(expected)):
            return (
                f"{most / seconds:.2f} requests/s come in the busiest {seconds:g} s, the plan takes {peak:.2f} for "
                f"steady over {window_seconds:g} s; give a shorter --window"
            )
        seconds /= 2
    return None


def poisson_trace(*, rate: float, inputs: Lengths, outputs: Lengths, seconds: float, seed: int) -> list[Request]:
    """A random trace of a steady load; the same seed gives the same trace."""
    randomness = random.Random(seed)
    requests, now = [], 0.0
    while rate > 0 and (now := now + randomness.expovariate(rate)) < seconds:
        lengths = (inputs.quantile(_inside(randomness)), outputs.quantile(_inside(randomness)))
        requests.append(Request(now, *lengths))
    return requests


def _inside(randomness: random.Random) -> float:
    return min(max(randomness.random(), 1e-9), 1 - 1e-9)


def read_trace(path: Path) -> list[Request]:
    """Read a JSONL trace: one request a line, ``{"arrival_s": …, "input_tokens": …, "output_tokens": …}``.

    Mooncake's keys are read too (``timestamp`` in milliseconds, ``input_length``, ``output_length``); other keys are
    left alone.

    Returns:
        Requests by arrival, the first at 0.

    Raises:
        LoadError: with the line, for what is no request; a file without any.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON may hold what splitlines() also takes for an end
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path}: can't be read as text: {error}") from error
    requests = [_request(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise LoadError(f"{path}: holds no request; for a plan without load give --rate 0 and length distributions")
    requests.sort(key=lambda request: request.arrival)
    start = requests[0].arrival
    return [Request(request.arrival - start, request.input_tokens, request.output_tokens) for request in requests]


def _request(path: Path, number: int, line: str) -> Request:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        item = None
    if not isinstance(item, dict):
        raise LoadError(f"{path}:{number}: is no JSON object: {line[:60]!r}")
    keys = _MOONCAKE_KEYS if _MOONCAKE_KEYS[0] in item else _KEYS
    arrival, prompt, answer = (_number(path, number, item, key) for key in keys)
    for key, value in zip(keys[1:], (prompt, answer), strict=True):
        if value < 1 or value != int(value):
            raise LoadError(f"{path}:{number}: {key} = {value:g}; give a whole number from 1 up")
    return Request(arrival / 1000 if keys is _MOONCAKE_KEYS else arrival, int(prompt), int(answer))


def _number(path: Path, number: int, item: dict[str, Any], key: str) -> float:
    value = item.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise LoadError(f"{path}:{number}: {key} = {value!r:.40}; give a number >= 0, at most {_MOST:g}")
    return float(value)
