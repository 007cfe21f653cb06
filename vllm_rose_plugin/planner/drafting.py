"""How many decode steps a request takes whose drafted tokens are accepted by chance."""

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from vllm_rose_plugin.planner.capacity import Floats

_EXACT = 128
"""Output tokens up to which the steps' distribution is computed; that of longer outputs is close to normal."""
_SHARES = (np.arange(100) + 0.5) / 100
"""Of equally likely values that stand for the steps of one request."""
_RATIOS = 200
"""Equally likely values that stand for a load's steps per token."""
_REQUESTS = 2000
"""By which a load's output lengths are described here."""


class Drafting:
    """Steps by acceptance.

    A step makes one token and those accepted, so the steps of a request are a renewal process (W. Feller, "An
    Introduction to Probability Theory and Its Applications" II, 1971, ch. XI: mean and variance of the number of
    renewals).

    Args:
        acceptance: share of steps in which the draft's 1st, 2nd, … token was accepted; empty without drafting.
    """

    def __init__(self, acceptance: Sequence[float]) -> None:
        self.tokens_per_step = 1 + sum(acceptance)
        self._most = 1 + len(acceptance)
        """Tokens of one step."""
        chances = -np.diff([1.0, *acceptance, 0.0])  # of 1, 2, … tokens
        tokens = np.arange(1, self._most + 1)
        square = float(chances @ tokens**2)
        self._variance = square - self.tokens_per_step**2
        self._excess = (square / self.tokens_per_step - 1) / 2
        """Tokens that the last step makes beyond the answer's end, on average."""
        tails = _tails(np.concatenate([[0.0], chances]))
        self._mean_steps = (1 - tails).sum(axis=0)  # by output tokens, up to _EXACT
        self._steps = np.stack([(tails >= share).argmax(axis=0) for share in _SHARES], axis=1)  # the same, each share

    def mean_steps(self, answers: Floats) -> float:
        """Over requests with these output tokens."""
        if self._most == 1:
            return float(answers.mean())
        short = answers <= _EXACT
        means = (answers + self._excess) / self.tokens_per_step
        means[short] = self._mean_steps[answers[short].astype(int)]
        return float(means.mean())

    def steps_per_token(self, answers: Floats) -> Floats:
        """Steps for each token after the first: equally likely values, over requests with these output tokens.

        Requests of a single token have none; 1 where there are no others.
        """
        answers = answers[answers >= 2]
        if self._most == 1 or not len(answers):
            return np.array([1.0])
        if len(answers) > _REQUESTS:
            answers = _evenly(np.sort(answers), _REQUESTS)
        normal = np.array([NormalDist().inv_cdf(share) for share in _SHARES])
        mean = (answers + self._excess) / self.tokens_per_step
        spread = np.sqrt(answers * self._variance / self.tokens_per_step**3)
        steps = mean[:, None] + spread[:, None] * normal  # (requests, shares)
        short = answers <= _EXACT
        steps[short] = self._steps[answers[short].astype(int)]
        steps = np.clip(steps, np.ceil(answers / self._most)[:, None], answers[:, None])
        return _evenly(np.sort(((steps - 1) / (answers[:, None] - 1)).ravel()), _RATIOS)


def _evenly(values: Floats, count: int) -> Floats:
    """So many of sorted values, at equal distances."""
    return values[((np.arange(count) + 0.5) / count * len(values)).astype(int)]


def _tails(chances: Floats) -> Floats:
    """Chance that n steps make N tokens or more, [n, N], both up to _EXACT.

    Args:
        chances: of 0, 1, … tokens in a step.
    """
    tails = np.zeros((_EXACT + 1, _EXACT + 1))
    made = np.zeros(_EXACT + 1)  # the last: that many or more
    made[0] = tails[0, 0] = 1.0
    for step in range(1, _EXACT + 1):
        longer = np.asarray(np.convolve(made, chances), dtype=np.float64)
        made = longer[: _EXACT + 1].copy()
        made[-1] += longer[_EXACT + 1 :].sum()
        tails[step] = made[::-1].cumsum()[::-1]
    return np.minimum(tails, 1.0)
