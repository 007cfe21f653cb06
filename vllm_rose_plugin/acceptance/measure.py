"""Measuring: prompts of the wanted lengths, answered by an engine or a server, counted by vLLM."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm_rose_plugin.acceptance.tally import Contexts, Tally, tally_steps

SHORTEST_PROMPT = 16
"""Tokens of a prompt for the range that begins at 0."""


class AcceptanceError(Exception):
    """It can't be measured; one line that says why and what to change."""


@dataclass(frozen=True)
class Answer:
    """What a request brought."""

    generated: int  # tokens
    accepted: tuple[int, ...] | None  # at each verification step, in order; None where vLLM doesn't tell


@dataclass(frozen=True)
class Counters:
    """vLLM's counters since its start."""

    drafts: Tally
    generated: int  # tokens of all requests


class Source(Protocol):
    """An engine or a server that drafts."""

    name: str
    model: str
    draft: str | None
    speculative_tokens: int
    max_model_len: int
    versions: str

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""

    def tokenize_question(self, question: str) -> list[int]:
        """Token ids of a question in the model's chat template."""

    def answer(self, prompts: Sequence[list[int]], *, max_tokens: int, temperature: float) -> list[Answer]:
        """Answer prompts at the same time."""

    def counters(self, *, generated: int) -> Counters | None:
        """vLLM's counters, once they hold at least ``generated`` tokens; None where answers tell all."""


@dataclass
class Measurement:
    """What was found."""

    source: Source
    contexts: Contexts
    tallies: list[Tally]  # one for each range
    prompts: int
    exact: bool  # every draft is counted where its context lies, not where its prompt does
    notes: list[str] = field(default_factory=list)

    @property
    def total(self) -> Tally:
        total = Tally([0] * self.source.speculative_tokens)
        for tally in self.tallies:
            total.add(tally)
        return total


def cut_prompts(
    tokens: Sequence[int], *, contexts: Contexts, each: int, max_tokens: int, max_model_len: int
) -> tuple[list[list[int]], list[str]]:
    """Prompts from one long text, ``each`` for every range of contexts, as long as the range's lower edge.

    Args:
        tokens: of the text.
        contexts: the ranges.
        each: prompts of a range.
        max_tokens: longest answer.
        max_model_len: what the model takes.

    Returns:
        The prompts, spread evenly over the text, and a note for each range that can't be reached.
    """
    prompts: list[list[int]] = []
    notes = []
    for index, low in enumerate(contexts.edges):
        length = max(low, SHORTEST_PROMPT)
        if length + max_tokens > max_model_len:
            notes.append(
                f"contexts {contexts.name(index)} are left out: {length} + {max_tokens} tokens are more than the "
                f"model's {max_model_len}"
            )
            continue
        if length > len(tokens):
            notes.append(f"contexts {contexts.name(index)} are left out: the text has {len(tokens)} tokens")
            continue
        step = (len(tokens) - length) // max(1, each - 1) if each > 1 else 0
        prompts += [list(tokens[number * step : number * step + length]) for number in range(each)]
    return prompts, notes


def measure(
    *,
    source: Source,
    prompts: Sequence[list[int]],
    contexts: Contexts,
    max_tokens: int,
    temperature: float,
    progress: Callable[[str], None],
) -> Measurement:
    """Answer the prompts, range by range, and count.

    Where answers tell their own steps, each draft is counted at its own context. Else vLLM's counters are read before
    and after the prompts of a range, and all that they say is put there.

    Raises:
        AcceptanceError: nothing was drafted, or other requests ran meanwhile, whose drafts would be counted too.
    """
    tallies = [Tally([0] * source.speculative_tokens) for _ in contexts.edges]
    groups: dict[int, list[list[int]]] = {}
    for prompt in prompts:
        groups.setdefault(contexts.index(len(prompt)), []).append(prompt)
    exact = True
    for index, group in sorted(groups.items()):
        before = source.counters(generated=0)
        answers = source.answer(group, max_tokens=max_tokens, temperature=temperature)
        own = sum(answer.generated for answer in answers)
        if before is None or all(answer.accepted is not None for answer in answers):
            for prompt, answer in zip(group, answers, strict=True):
                tally_steps(prompt_tokens=len(prompt), accepted=answer.accepted or (), contexts=contexts, into=tallies)
        else:
            exact = False
            after = source.counters(generated=before.generated + own)
            assert after is not None
            if after.generated - before.generated != own:
                raise AcceptanceError(
                    f"{source.name} generated {after.generated - before.generated} tokens while the {own} of this "
                    "measurement were answered: other requests run there, and their drafts are in the same counters. "
                    "Measure a server of your own, or start it with --per-request-spec-decode-metrics detailed"
                )
            tallies[index].add(after.drafts.minus(before.drafts))
        progress(f"contexts {contexts.name(index)}: {len(group)} prompts, {own} tokens")
    measurement = Measurement(source, contexts, tallies, len(prompts), exact)
    if not measurement.total.drafts:
        raise AcceptanceError(
            f"{source.name} drafted nothing for {len(prompts)} prompts and answers of up to {max_tokens} tokens: give "
            "longer ones (--tokens), or look whether its --speculative-config turns drafting off at this batch size"
        )
    return measurement
