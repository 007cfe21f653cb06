"""Replays a trace against a deployment, event by event, with simpy: the check of the plan's claims.

A request waits for a free prefill replica (first come, first served), is prefilled alone, its KV cache travels to the
decoder with the fewest requests, and waits there for a batch place and for KV room for all its tokens. A decoder runs
step after step; each running request gets one token per step, and with drafting those that were accepted. A decoder
that is lost takes its KV with it: its requests are sent again from the start, as clients do whose connection broke.
"""

import heapq
import random
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_rose_plugin.planner.capacity import Capacity
from vllm_rose_plugin.planner.load import Request
from vllm_rose_plugin.planner.plan import PERCENTILES, check_lengths

Process = Generator[Any, Any, None]


@dataclass
class Outcome:
    """What happened to one request. Times are seconds since the trace's start."""

    request: Request
    first_token: float | None = None
    """None where it never came: all decoders were lost."""
    last_token: float | None = None
    resent: int = 0

    @property
    def ttft(self) -> float | None:
        """Seconds; the last try's first token where it was sent again."""
        return None if self.first_token is None else self.first_token - self.request.arrival

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        if self.first_token is None or self.last_token is None or self.request.output_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.request.output_tokens - 1)


@dataclass
class Result:
    """Of one simulation."""

    outcomes: list[Outcome]
    seconds: float
    """When the last token came."""
    prefill_utilization: float
    """Until the last prompt was done."""
    mean_batch: float
    """Running requests per decoder over time, until the last request came."""
    max_batch: int
    lost_decoders: int = 0

    @property
    def unserved(self) -> int:
        """Requests without a last token."""
        return sum(outcome.last_token is None for outcome in self.outcomes)

    @property
    def resent(self) -> int:
        """Requests that were sent again."""
        return sum(outcome.resent > 0 for outcome in self.outcomes)

    def ttft(self) -> dict[int, float]:
        """Quantiles by percentile; empty without requests."""
        return _quantiles([outcome.ttft for outcome in self.outcomes])

    def tpot(self) -> dict[int, float]:
        """Quantiles by percentile; empty without requests of two or more tokens."""
        return _quantiles([outcome.tpot for outcome in self.outcomes])


def _quantiles(values: Sequence[float | None]) -> dict[int, float]:
    known = [value for value in values if value is not None]
    return {share: float(np.percentile(known, share)) for share in PERCENTILES} if known else {}


@dataclass(eq=False)
class _Decoder:
    """One replica: what it runs and what waits for it."""

    wake: Any
    waiting: deque[Outcome] = field(default_factory=deque)
    arriving: int = 0
    """Requests whose KV cache is on its way."""
    running: list[tuple[int, int, Outcome]] = field(default_factory=list)
    """(step number after which it is done, tie-breaker, request), a heap."""
    fresh: list[Outcome] = field(default_factory=list)
    """Waiting for the end of their first step."""
    tokens: float = 0.0
    """Context of the running requests, summed."""
    reserved: int = 0
    """KV tokens that the running requests will have at their end."""
    step: int = 0
    lost: bool = False

    @property
    def requests(self) -> int:
        return len(self.waiting) + len(self.running) + self.arriving


class _Simulation:
    def __init__(
        self,
        *,
        capacity: Capacity,
        prefill_replicas: int,
        decode_replicas: int,
        acceptance: Sequence[float],
        end: float,
        seed: int,
    ) -> None:
        import simpy  # of the extra "plan"

        self.capacity, self.acceptance, self.end = capacity, acceptance, end
        self.environment = simpy.Environment()
        self.prefill = simpy.Resource(self.environment, capacity=prefill_replicas)
        self.decoders = [_Decoder(self.environment.event()) for _ in range(decode_replicas)]
        self.randomness = random.Random(seed)
        self.prefill_seconds = self.last_prefill = self.last_token = self.batch_seconds = 0.0
        self.batch_max = self.serial = 0

    def arrivals(self, outcomes: Sequence[Outcome]) -> Process:
        for outcome in outcomes:
            yield self.environment.timeout(outcome.request.arrival - self.environment.now)
            self.environment.process(self.serve(outcome))

    def serve(self, outcome: Outcome) -> Process:
        prompt = np.array([float(outcome.request.input_tokens)])
        with self.prefill.request() as place:
            yield place
            seconds = float(self.capacity.prefill_seconds(prompt)[0])
            yield self.environment.timeout(seconds)
            self.prefill_seconds += seconds
            self.last_prefill = self.environment.now
        decoder = min((one for one in self.decoders if not one.lost), key=lambda one: one.requests, default=None)
        if decoder is None:
            return
        decoder.arriving += 1
        yield self.environment.timeout(float(self.capacity.transfer_seconds(prompt)[0]))
        decoder.arriving -= 1
        if decoder.lost:
            self.send_again(outcome)
            return
        decoder.waiting.append(outcome)
        if not decoder.wake.triggered:
            decoder.wake.succeed()

    def send_again(self, outcome: Outcome) -> None:
        outcome.first_token, outcome.resent = None, outcome.resent + 1
        self.environment.process(self.serve(outcome))

    def decode(self, decoder: _Decoder) -> Process:
        environment = self.environment
        while not decoder.lost:
            self.admit(decoder)
            batch = len(decoder.running)
            if not batch:
                decoder.wake = environment.event()
                if not decoder.waiting:
                    yield decoder.wake
                continue
            self.batch_max = max(self.batch_max, batch)
            seconds = self.capacity.step_seconds(batch, decoder.tokens / batch)
            if environment.now < self.end:
                self.batch_seconds += batch * seconds
            yield environment.timeout(seconds)
            if decoder.lost:
                return
            decoder.step += 1
            decoder.tokens += batch * (1 + sum(self.acceptance))
            for outcome in decoder.fresh:
                outcome.first_token = environment.now
            decoder.fresh.clear()
            while decoder.running and decoder.running[0][0] <= decoder.step:
                _, _, outcome = heapq.heappop(decoder.running)
                outcome.last_token = self.last_token = environment.now
                size = outcome.request.input_tokens + outcome.request.output_tokens
                decoder.reserved -= size
                decoder.tokens = max(0.0, decoder.tokens - size) if decoder.running else 0.0

    def admit(self, decoder: _Decoder) -> None:
        """Start what fits, in order."""
        room = self.capacity.file.decode.kv_cache_tokens
        while decoder.waiting and len(decoder.running) < self.capacity.max_batch:
            request = decoder.waiting[0].request
            size = request.input_tokens + request.output_tokens
            if decoder.reserved + size > room:
                break
            outcome = decoder.waiting.popleft()
            decoder.reserved += size
            decoder.tokens += request.input_tokens
            self.serial += 1
            end = decoder.step + self.steps_of(request.output_tokens)
            heapq.heappush(decoder.running, (end, self.serial, outcome))
            decoder.fresh.append(outcome)

    def steps_of(self, output_tokens: int) -> int:
        """Decode steps until that many tokens are there, drafted ones accepted at random."""
        if not self.acceptance:
            return output_tokens
        steps = tokens = 0
        while tokens < output_tokens:
            draw = self.randomness.random()
            tokens += 1 + sum(draw < share for share in self.acceptance)
            steps += 1
        return steps

    def lose(self, decoder: _Decoder, at: float) -> Process:
        yield self.environment.timeout(at)
        decoder.lost = True
        victims = [outcome for _, _, outcome in decoder.running] + list(decoder.waiting)
        decoder.running.clear()
        decoder.waiting.clear()
        for outcome in sorted(victims, key=lambda outcome: outcome.request.arrival):
            self.send_again(outcome)


def simulate(
    *,
    requests: Sequence[Request],
    capacity: Capacity,
    prefill_replicas: int,
    decode_replicas: int,
    acceptance: Sequence[float] = (),
    lose_decoder_at: Sequence[float] = (),
    seed: int = 0,
) -> Result:
    """Serve every request of a trace.

    Args:
        requests: sorted by arrival, at least one.
        capacity: of one replica of each role.
        prefill_replicas: at least 1.
        decode_replicas: at least 1.
        acceptance: see :func:`plan.make_plan`.
        lose_decoder_at: seconds at which decoders 0, 1, … are lost for good.
        seed: of the accepted drafts; nothing else is random.

    Raises:
        PlanError: see :func:`plan.check_lengths`.
    """
    check_lengths(
        inputs=np.array([float(request.input_tokens) for request in requests]),
        outputs=np.array([float(request.output_tokens) for request in requests]),
        capacity=capacity,
    )
    simulation = _Simulation(
        capacity=capacity,
        prefill_replicas=prefill_replicas,
        decode_replicas=decode_replicas,
        acceptance=acceptance,
        end=requests[-1].arrival,
        seed=seed,
    )
    outcomes = [Outcome(request) for request in requests]
    simulation.environment.process(simulation.arrivals(outcomes))
    for decoder in simulation.decoders:
        simulation.environment.process(simulation.decode(decoder))
    lost = min(len(lose_decoder_at), decode_replicas)
    for decoder, at in zip(simulation.decoders, lose_decoder_at, strict=False):
        simulation.environment.process(simulation.lose(decoder, at))
    simulation.environment.run()
    return Result(
        outcomes=outcomes,
        seconds=simulation.last_token,
        prefill_utilization=simulation.prefill_seconds / prefill_replicas / max(simulation.last_prefill, 1e-9),
        mean_batch=simulation.batch_seconds / decode_replicas / max(requests[-1].arrival, 1e-9),
        max_batch=simulation.batch_max,
        lost_decoders=lost,
    )
