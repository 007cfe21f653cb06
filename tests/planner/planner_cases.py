"""Capacities and traces that several tests use."""

from pathlib import Path
from typing import Any

import yaml

from vllm_rose_plugin.planner.capacity import Capacity, CapacityFile, load_capacity
from vllm_rose_plugin.planner.load import Lengths, Request, poisson_trace

EXAMPLE = Path(__file__).parents[2] / "examples/planner/capacity.yaml"
CHAT = {
    "inputs": Lengths.parse("lognormal:2000:8000:32000", flag="--input"),
    "outputs": Lengths.parse("lognormal:300:1000:4000", flag="--output"),
}
LONG_TAIL = {
    "inputs": Lengths.parse("lognormal:1000:16000:128000", flag="--input"),
    "outputs": Lengths.parse("lognormal:200:2000:3000", flag="--output"),
}


def example() -> Capacity:
    """The example file's capacity."""
    return load_capacity(EXAMPLE)


def example_data() -> dict[str, Any]:
    """The example file's data, to be changed."""
    return yaml.safe_load(EXAMPLE.read_text())


def flat(*, prefill_seconds: dict[int, float], step_ms: float, max_batch: int = 4096) -> Capacity:
    """Decode steps that always take the same; prompts by a table of length and seconds."""
    points = [{"prompt_tokens": tokens, "tokens_per_second": tokens / took} for tokens, took in prefill_seconds.items()]
    steps = [{"batch": batch, "context": 100_000_000, "step_ms": step_ms} for batch in (1, max_batch)]
    file = CapacityFile.model_validate(
        {
            "capacity": 1,
            "source": "assumed",
            "description": "flat",
            "prefill": {"gpus": 1, "points": points},
            "decode": {"gpus": 1, "kv_cache_tokens": 100_000_000, "points": steps},
        }
    )
    return Capacity(file)


def bursty(*, seed: int) -> list[Request]:
    """A minute at 15 requests/s and 40 s at four times as many, three times."""
    requests: list[Request] = []
    start = 0.0
    for turn in range(3):
        for rate, seconds in ((15, 60), (60, 40)):
            part = poisson_trace(rate=rate, seconds=seconds, seed=100 * seed + 7 * turn + rate, **CHAT)
            requests += [Request(start + one.arrival, one.input_tokens, one.output_tokens) for one in part]
            start += seconds
    return requests


TRACES = {
    "steady": lambda seed: poisson_trace(rate=20, seconds=300, seed=seed, **CHAT),
    "bursty": lambda seed: bursty(seed=seed),
    "long-tailed": lambda seed: poisson_trace(rate=15, seconds=600, seed=seed, **LONG_TAIL),
}
"""By name, from a seed."""
