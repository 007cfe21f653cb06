"""Counting drafts: what vLLM's counters count, for one range of context lengths."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Tally:
    """Drafts, and how far each was accepted. A draft is one verification step of one request.

    The figures follow vLLM's definitions (``vllm/v1/spec_decode/metrics.py``): a rate at a position is the share of all
    drafts whose token there was accepted, also where a draft was shorter, so it can't rise from one position to the
    next; the mean length counts the token that the target adds to each step itself.
    """

    accepted: list[int] = field(default_factory=list)  # by position
    drafts: int = 0

    def observe(self, accepted: int) -> None:
        """One draft whose first ``accepted`` tokens were taken."""
        self.drafts += 1
        for position in range(accepted):
            self.accepted[position] += 1

    def add(self, other: "Tally") -> None:
        """Another tally of as many positions."""
        self.drafts += other.drafts
        self.accepted = [one + two for one, two in zip(self.accepted, other.accepted, strict=True)]

    def minus(self, earlier: "Tally") -> "Tally":
        """What was counted since."""
        accepted = [one - two for one, two in zip(self.accepted, earlier.accepted, strict=True)]
        return Tally(accepted, self.drafts - earlier.drafts)

    @property
    def by_position(self) -> list[float]:
        """Acceptance rate of each position, 0 to 1."""
        return [count / self.drafts for count in self.accepted] if self.drafts else []

    @property
    def mean_accepted_length(self) -> float:
        """Tokens that a step brings, 1 to positions + 1."""
        return 1.0 + sum(self.accepted) / self.drafts if self.drafts else 1.0


@dataclass(frozen=True)
class Contexts:
    """Ranges of context lengths in tokens, each from its edge to below the next, the last one open."""

    edges: tuple[int, ...]  # ascending, the first one 0

    def index(self, context: int) -> int:
        """Of the range that a context lies in."""
        return bisect_right(self.edges, context) - 1

    def bounds(self, index: int) -> tuple[int, int | None]:
        """First length of a range, and the first one above it."""
        above = self.edges[index + 1] if index + 1 < len(self.edges) else None
        return self.edges[index], above

    def name(self, index: int) -> str:
        """Such as ``256-1023``, or ``4096-`` for the last."""
        low, above = self.bounds(index)
        return f"{low}-{'' if above is None else above - 1}"


def tally_steps(*, prompt_tokens: int, accepted: Sequence[int], contexts: Contexts, into: Sequence[Tally]) -> None:
    """Count one answer's drafts, each where its context lies.

    Args:
        prompt_tokens: length of the prompt.
        accepted: tokens accepted at each verification step, in order.
        contexts: the ranges.
        into: a tally for each range.
    """
    context = prompt_tokens + 1  # the prompt's own step gives the first token, without a draft
    for count in accepted:
        into[contexts.index(context)].observe(count)
        context += count + 1
