"""The two queueing models behind the plan.

Prefill: replicas take one prompt at a time from the head of one line (the router sends a prompt to the replica that is
free first), an M/G/c queue. The chance to wait is Erlang's C formula, the mean wait Allen and Cunneen's approximation
(exact for one replica: Pollaczek and Khinchine), and a wait, once there is one, is taken as exponential.

Decode: continuous batching gives each of n running requests one token per step, and a step takes longer the more
requests there are: a processor-sharing queue whose speed depends on n. Its stationary distribution depends on the
requests' lengths through their mean alone (insensitivity; see F. P. Kelly, "Reversibility and Stochastic Networks",
1979, ch. 3).
"""

import math
from dataclasses import dataclass

import numpy as np

from vllm_rose_plugin.planner.capacity import Floats


@dataclass(frozen=True)
class Wait:
    """Waiting time of a stable M/G/c queue."""

    chance: float
    """To wait at all."""
    mean_if_any: float
    """Seconds."""

    def beyond(self, seconds: Floats) -> Floats:
        """Chance to wait longer than each of ``seconds``; 1 for negative ones."""
        if self.mean_if_any == 0:
            return (seconds < 0).astype(np.float64)
        tail = self.chance * np.exp(-np.maximum(seconds, 0) / self.mean_if_any)
        return np.where(seconds < 0, 1.0, tail)


def erlang_c(*, servers: int, work: float) -> float:
    """Chance that a request finds all servers busy, for ``work`` servers' worth of load below ``servers``."""
    blocked = 1.0  # Erlang B, by its recursion over the number of servers
    for count in range(1, servers + 1):
        blocked = work * blocked / (count + work * blocked)
    return blocked / (1 - work / servers * (1 - blocked))


def mgc_wait(*, servers: int, rate: float, service: Floats) -> Wait | None:
    """Waiting time for Poisson arrivals; None where the servers can't keep up.

    Args:
        servers: replicas.
        rate: requests per second.
        service: seconds of sample requests, shape (samples,).
    """
    mean = float(service.mean())
    work = rate * mean
    if work >= servers:
        return None
    if work == 0:
        return Wait(0.0, 0.0)
    variation = float(service.var()) / mean**2
    mean_if_any = mean * (1 + variation) / 2 / (servers - work)
    return Wait(erlang_c(servers=servers, work=work), mean_if_any)


@dataclass(frozen=True)
class BatchDistribution:
    """Requests in one decode replica, running or waiting, at a random moment."""

    chances: Floats
    """Of 0, 1, 2, … requests; they sum to 1."""

    @property
    def mean(self) -> float:
        """Requests on average."""
        return float(np.arange(len(self.chances)) @ self.chances)

    def quantile(self, share: float) -> int:
        """Requests that aren't exceeded in ``share`` of the time."""
        return int(np.searchsorted(np.cumsum(self.chances), share))

    def beyond(self, count: int) -> float:
        """Chance of more than ``count`` requests."""
        return float(self.chances[count + 1 :].sum())


def batch_distribution(*, rate: float, mean_steps: float, step_seconds: Floats) -> BatchDistribution | None:
    """Stationary distribution of a continuous-batching decoder; None where it can't keep up.

    Args:
        rate: requests per second that reach the replica.
        mean_steps: decode steps of a request.
        step_seconds: of one step with 1, 2, … running requests, shape (max_batch,). Above max_batch new ones wait.
    """
    growths = rate * mean_steps * step_seconds / np.arange(1, len(step_seconds) + 1)
    if growths[-1] == 0:  # no rate, or one too small for a float
        return BatchDistribution(np.array([1.0]))
    if growths[-1] >= 1:
        return None
    # Beyond max_batch the chances fall by the last growth from one count to the next; those below 1e-12 are left out.
    beyond = min(1_000_000, max(1, math.ceil(math.log(1e-12) / math.log(growths[-1]))))
    logs = np.concatenate([[0.0], np.cumsum(np.log(growths))])
    logs = np.concatenate([logs, logs[-1] + np.arange(1, beyond + 1) * math.log(growths[-1])])
    chances = np.exp(logs - logs.max())
    return BatchDistribution(chances / chances.sum())
