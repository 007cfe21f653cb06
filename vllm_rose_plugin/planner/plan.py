"""How many prefill and decode replicas hold the latency targets of a load.

Each window of the load is taken as steady, and the claims are quantiles over all requests of all windows (the pointwise
stationary approximation of L. Green and P. Kolesar, Management Science 37, 1991).
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_rose_plugin.planner.capacity import Capacity, Floats
from vllm_rose_plugin.planner.drafting import Drafting
from vllm_rose_plugin.planner.load import Load, Window
from vllm_rose_plugin.planner.queues import BatchDistribution, batch_distribution, mgc_wait

PERCENTILES = (50, 95, 99)
STEPS_TO_FIRST_TOKEN = 1.5
"""A request that reaches a decoder waits for the running step, half of it on average, and then for its own."""
_MAY_WAIT = 0.01
"""Share of the time in which a decoder may hold more requests than fit, so that new ones wait."""
_MOST_REPLICAS = 1 << 16


class PlanError(ValueError):
    """Inputs that don't go together."""


class Unreachable(Exception):
    """A target that this hardware can't hold, with what it reaches."""


@dataclass(frozen=True)
class Targets:
    """Latency that ``percentile`` % of the requests must stay under."""

    ttft: float
    """Seconds from a request's arrival to its first token."""
    tpot: float
    """Seconds per output token after the first, averaged over a request."""
    percentile: int = 95


@dataclass(frozen=True)
class Claims:
    """Quantiles over all requests, in seconds, by percentile."""

    ttft: dict[int, float]
    tpot: dict[int, float]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Replicas, and what they are claimed to do."""

    load: Load
    capacity: Capacity
    targets: Targets
    tokens_per_step: float
    """Of one request: 1, and what is accepted of the drafted tokens."""
    prefill_replicas: int
    decode_replicas: int
    claims: Claims
    prefill_utilization: float
    """In the busiest window."""
    batch_mean: float
    """Requests per decoder in the busiest window."""
    batch_high: int
    """Not exceeded in ``percentile`` % of that window."""
    batch_threshold: int
    """Requests per decoder up to which a step keeps the TPOT target and the KV cache holds them, in that window."""
    prompt_tokens_per_second: float
    """Of one prefill replica in the busiest window."""

    @property
    def gpus(self) -> int:
        """Of all replicas together."""
        roles = self.capacity.file
        return self.prefill_replicas * roles.prefill.gpus + self.decode_replicas * roles.decode.gpus


class _Stage:
    """One window with its service times looked up."""

    def __init__(self, window: Window, capacity: Capacity, drafting: Drafting) -> None:
        prompts, answers = window.input_tokens, window.output_tokens
        self.rate, self.weight = window.rate, window.weight
        self.prefill = capacity.prefill_seconds(prompts)
        self.before_decode = self.prefill + capacity.transfer_seconds(prompts)
        self.mean_steps = drafting.mean_steps(answers)
        self.steps_per_token = drafting.steps_per_token(answers)
        # Weighted by how long each request stays, which goes with its output.
        self.context = float((answers * (prompts + answers / 2)).sum() / answers.sum())
        held = float((answers * (prompts + answers)).sum() / answers.sum())
        self.max_batch = min(capacity.max_batch, max(1, int(capacity.file.decode.kv_cache_tokens / held)))
        batches = range(1, self.max_batch + 1)
        self.steps = np.array([capacity.step_seconds(batch, self.context) for batch in batches])
        self.mean_prompt = float(prompts.mean())

    def batch(self, replicas: int) -> BatchDistribution | None:
        return batch_distribution(rate=self.rate / replicas, mean_steps=self.mean_steps, step_seconds=self.steps)

    def step_times(self, batch: BatchDistribution) -> Floats:
        """Step time that a request meets beside n others, for each n of the distribution."""
        return self.steps[np.minimum(np.arange(len(batch.chances)), self.max_batch - 1)]

    def token_times(self, times: Floats, chances: Floats) -> tuple[Floats, Floats]:
        """TPOT and its weight, for step times (n,) with their chances (n,) and each number of steps per token."""
        values = (times[:, None] * self.steps_per_token).ravel()
        weights = np.repeat(chances * (self.weight / len(self.steps_per_token)), len(self.steps_per_token))
        return values, weights


def make_plan(
    *, load: Load, capacity: Capacity, targets: Targets, acceptance: Sequence[float] = (), gpus: int | None = None
) -> Plan:
    """The fewest decoders, and with them the fewest prefill replicas, that hold the targets.

    Args:
        load: windows; a rate of 0 gives one replica of each role.
        capacity: of one replica of each role.
        targets: TTFT and TPOT at one percentile.
        acceptance: share of steps in which the draft's 1st, 2nd, … token was accepted, as vLLM counts it.
        gpus: most that there are.

    Raises:
        PlanError: requests longer than the capacity file knows or the KV cache holds; an acceptance that doesn't go
            with it.
        Unreachable: no number of replicas holds a target, or more GPUs than ``gpus`` would be needed.
    """
    _check(load, capacity, acceptance)
    drafting = Drafting(acceptance)
    stages = [_Stage(window, capacity, drafting) for window in load.windows]
    busiest = max(stages, key=lambda stage: stage.rate)

    alone = [stage.token_times(stage.steps[:1], np.ones(1)) for stage in stages]
    if (reached := _quantile(alone, targets.percentile)) > targets.tpot:
        raise Unreachable(
            f"TPOT target {targets.tpot * 1e3:g} ms (p{targets.percentile}) can't be held: a request alone on a "
            f"decoder takes {reached * 1e3:.4g} ms per token at a context of {busiest.context:,.0f} tokens"
        )
    decoders = _fewest(lambda count: _decode_holds(stages, count, targets))
    tpot, first_token = _decode_claims(stages, decoders)

    bases = [stage.before_decode + first for stage, first in zip(stages, first_token, strict=True)]
    weights = [np.full(len(base), stage.weight / len(base)) for stage, base in zip(stages, bases, strict=True)]
    if (reached := _quantile(list(zip(bases, weights, strict=True)), targets.percentile)) > targets.ttft:
        raise Unreachable(
            f"TTFT target {targets.ttft:g} s (p{targets.percentile}) can't be held: without any queue it is "
            f"{reached:.4g} s on this hardware (prefill of the prompt alone, KV transfer, and "
            f"{np.average(first_token, weights=[stage.weight for stage in stages]):.3g} s to the decoder's first token)"
        )
    prefills = _fewest(lambda count: _ttft_beyond(stages, bases, count, targets.ttft) <= 1 - targets.percentile / 100)
    busy = busiest.batch(decoders)
    assert busy is not None  # _decode_holds saw to it
    slow = float(np.quantile(busiest.steps_per_token, targets.percentile / 100, method="inverted_cdf"))
    plan = Plan(
        load=load,
        capacity=capacity,
        targets=targets,
        tokens_per_step=drafting.tokens_per_step,
        prefill_replicas=prefills,
        decode_replicas=decoders,
        claims=Claims({share: _ttft_quantile(stages, bases, prefills, share) for share in PERCENTILES}, tpot),
        prefill_utilization=max(stage.rate * float(stage.prefill.mean()) for stage in stages) / prefills,
        batch_mean=busy.mean,
        batch_high=busy.quantile(targets.percentile / 100),
        batch_threshold=int((busiest.steps * slow <= targets.tpot).sum()),
        prompt_tokens_per_second=busiest.rate * busiest.mean_prompt / prefills,
    )
    if gpus is not None and plan.gpus > gpus:
        raise Unreachable(_too_few_gpus(plan, gpus, acceptance))
    return plan


def read_acceptance(path: Path) -> list[float]:
    """``acceptance_by_position`` of a JSON file: for each drafted position, the share of steps that accepted it.

    Raises:
        PlanError: no such list; shares out of 0..1, or rising: a position is only accepted when those before it are.
    """
    try:
        shares = json.loads(path.read_text(encoding="utf-8"))["acceptance_by_position"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"--acceptance {path}: has no list acceptance_by_position: {error}") from None
    numbers = isinstance(shares, list) and all(isinstance(share, int | float) for share in shares)
    if not numbers or not all(0 <= share <= 1 for share in shares) or shares != sorted(shares, reverse=True):
        raise PlanError(
            f"--acceptance {path}: acceptance_by_position = {shares!r}; give shares from 0 to 1 that don't rise (a "
            "position is only accepted when those before it are)"
        )
    return [float(share) for share in shares]


def _check(load: Load, capacity: Capacity, acceptance: Sequence[float]) -> None:
    decode = capacity.file.decode
    if len(acceptance) != decode.speculative_tokens:
        raise PlanError(
            f"the capacity file's decode steps come with {decode.speculative_tokens} drafted tokens "
            f"(decode.speculative_tokens), --acceptance has {len(acceptance)} positions; both must be the same, since "
            "a step that checks drafted tokens takes longer"
        )
    for window in load.windows:
        check_lengths(inputs=window.input_tokens, outputs=window.output_tokens, capacity=capacity)


def check_lengths(*, inputs: Floats, outputs: Floats, capacity: Capacity) -> None:
    """Whether the capacity file knows requests of these lengths.

    Args:
        inputs: prompt tokens of each request, shape (requests,).
        outputs: their output tokens.

    Raises:
        PlanError: a request longer than its points, or than a decoder's KV cache.
    """
    decode = capacity.file.decode
    prompt, total = int(inputs.max()), int((inputs + outputs).max())
    if prompt > capacity.max_prompt_tokens:
        raise PlanError(
            f"the load has a prompt of {prompt:,} tokens, prefill.points end at {capacity.max_prompt_tokens:,}; add a "
            "point, nothing is guessed beyond them"
        )
    if total > capacity.max_context:
        raise PlanError(
            f"the load has a request of {total:,} tokens with its output, decode.points end at a context of "
            f"{capacity.max_context:,}; add points, nothing is guessed beyond them"
        )
    if total > decode.kv_cache_tokens:
        raise PlanError(
            f"the load has a request of {total:,} tokens with its output, a decoder's KV cache holds "
            f"{decode.kv_cache_tokens:,} (decode.kv_cache_tokens)"
        )


def _decode_holds(stages: Sequence[_Stage], replicas: int, targets: Targets) -> bool:
    for stage in stages:
        batch = stage.batch(replicas)
        if batch is None or batch.beyond(stage.max_batch) > _MAY_WAIT:
            return False
    tpot, _ = _decode_claims(stages, replicas, (targets.percentile,))
    return tpot[targets.percentile] <= targets.tpot


def _decode_claims(
    stages: Sequence[_Stage], replicas: int, percentiles: Sequence[int] = PERCENTILES
) -> tuple[dict[int, float], list[float]]:
    """TPOT by percentile, and for each window the seconds from KV in place to the first token.

    A request finds the stationary number of others. Over its life that number changes and averages out, so the upper
    quantiles are a little too high rather than too low.
    """
    parts, first_token = [], []
    for stage in stages:
        batch = stage.batch(replicas)
        assert batch is not None  # for as many replicas as were found to hold
        times = stage.step_times(batch)
        parts.append(stage.token_times(times, batch.chances))
        first_token.append(STEPS_TO_FIRST_TOKEN * float(times @ batch.chances))
    return {share: _quantile(parts, share) for share in percentiles}, first_token


def _ttft_beyond(stages: Sequence[_Stage], bases: Sequence[Floats], replicas: int, seconds: float) -> float:
    """Share of all requests whose TTFT is longer; infinite where a window has more work than replicas."""
    total = 0.0
    for stage, base in zip(stages, bases, strict=True):
        wait = mgc_wait(servers=replicas, rate=stage.rate, service=stage.prefill)
        if wait is None:
            return math.inf
        total += stage.weight * float(wait.beyond(seconds - base).mean())
    return total


def _ttft_quantile(stages: Sequence[_Stage], bases: Sequence[Floats], replicas: int, percentile: int) -> float:
    low, high = 0.0, max(float(base.max()) for base in bases)
    while _ttft_beyond(stages, bases, replicas, high) > 1 - percentile / 100:
        low, high = high, 2 * high
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        if _ttft_beyond(stages, bases, replicas, middle) > 1 - percentile / 100:
            low = middle
        else:
            high = middle
    return high


def _quantile(parts: Sequence[tuple[Floats, Floats]], percentile: int) -> float:
    """Of values with weights that sum to 1 over all parts."""
    values = np.concatenate([values for values, _ in parts])
    weights = np.concatenate([weights for _, weights in parts])
    order = np.argsort(values)
    place = int(np.searchsorted(np.cumsum(weights[order]), percentile / 100 * (1 - 1e-12)))
    return float(values[order[min(place, len(values) - 1)]])


def _fewest(holds: Callable[[int], bool]) -> int:
    """The smallest count that holds; every larger one holds too."""
    high = 1
    while not holds(high):
        high *= 2
        if high > _MOST_REPLICAS:
            raise PlanError(
                f"more than {_MOST_REPLICAS:,} replicas of a role would be needed; give a smaller --rate, or the "
                "capacity of larger replicas"
            )
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _too_few_gpus(plan: Plan, gpus: int, acceptance: Sequence[float]) -> str:
    roles = plan.capacity.file
    text = (
        f"--gpus {gpus} is too few: the targets need {plan.gpus} ({plan.prefill_replicas} x {roles.prefill.gpus} for "
        f"prefill, {plan.decode_replicas} x {roles.decode.gpus} for decode)"
    )
    if gpus < roles.prefill.gpus + roles.decode.gpus:
        return f"{text}; one replica of each role takes {roles.prefill.gpus + roles.decode.gpus}"
    low, high = 0.0, 1.0  # shares of the load: the last that fits, the first that doesn't
    while high - low > 0.01:
        middle = (low + high) / 2
        part = make_plan(
            load=plan.load.scaled(middle), capacity=plan.capacity, targets=plan.targets, acceptance=acceptance
        )
        low, high = (middle, high) if part.gpus <= gpus else (low, middle)
    return f"{text}; {gpus} reach {low:.0%} of this load"
