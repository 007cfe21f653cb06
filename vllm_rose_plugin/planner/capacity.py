"""What one replica of each role can do: the capacity file, checked, and interpolated between its points."""

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from vllm_rose_plugin.recipes.fault_words import finding_of
from vllm_rose_plugin.recipes.finding import Finding, Keys, RecipeError
from vllm_rose_plugin.recipes.lines import Lines, read_yaml

FORMAT = 1
"""Version of the file's format, ``capacity:`` in it."""

NOISE = 0.05
"""Share by which a longer prompt, a larger batch or a longer context may seem faster; such points are lifted."""

Floats = np.ndarray[Any, np.dtype[np.float64]]


def _exponent(value: Any) -> Any:
    """The number that JSON writes as 1e-05 and YAML 1.1, which wants a dot in it, takes for text."""
    number = isinstance(value, str) and re.fullmatch(r"-?[0-9]+[eE][-+]?[0-9]+", value)
    return float(value) if number else value


_Positive = Annotated[float, BeforeValidator(_exponent), Field(gt=0, allow_inf_nan=False)]
_NotNegative = Annotated[float, BeforeValidator(_exponent), Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, le=10**12)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PrefillPoint(_Strict):
    """One prompt alone on one replica."""

    prompt_tokens: _Count
    tokens_per_second: _Positive

    @property
    def seconds(self) -> float:
        """Time that the prompt takes."""
        return self.prompt_tokens / self.tokens_per_second


class DecodePoint(_Strict):
    """One decode step of one replica, all its ranks together."""

    batch: Annotated[int, Field(ge=1, le=10**6)]
    """Running requests on the replica."""
    context: _Count
    """Their mean length in tokens."""
    step_ms: _Positive


class Prefill(_Strict):
    """The role that turns prompts into KV cache."""

    gpus: _Count
    """Of one replica."""
    points: Annotated[list[PrefillPoint], Field(min_length=1)]


class Decode(_Strict):
    """The role that makes the tokens."""

    gpus: _Count
    """Of one replica."""
    kv_cache_tokens: _Count
    """Tokens that the KV cache of one replica holds, over all its ranks: the sum of what vLLM logs as "GPU KV cache
    size"."""
    speculative_tokens: Annotated[int, Field(ge=0)] = 0
    """Drafted per step while ``points`` were measured."""
    points: Annotated[list[DecodePoint], Field(min_length=1)]
    """A full grid of batch x context. Its largest batch is also the most that a replica may run."""


class KvTransfer(_Strict):
    """How a prompt's KV cache reaches its decoder."""

    seconds: _NotNegative = 0.0
    """That every transfer takes, however short."""
    bytes_per_token: _NotNegative = 0.0
    gb_per_s: _Positive = 1.0


class CapacityFile(_Strict):
    """The file as it is written."""

    capacity: Literal[1]
    source: Literal["measured", "assumed"]
    description: Annotated[str, Field(min_length=1)]
    """What was measured, on what; or why the figures are assumed. Every report repeats it."""
    prefill: Prefill
    decode: Decode
    kv_transfer: KvTransfer = KvTransfer()


class Capacity:
    """A checked capacity file with its tables ready for look-up. Times between points are interpolated linearly."""

    def __init__(self, file: CapacityFile) -> None:
        self.file = file
        prefill = sorted(file.prefill.points, key=lambda point: point.prompt_tokens)
        self._prompt_tokens = np.array([point.prompt_tokens for point in prefill], dtype=np.float64)
        self._prompt_seconds = np.maximum.accumulate([point.seconds for point in prefill])
        self._batches = sorted({point.batch for point in file.decode.points})
        self._contexts = sorted({point.context for point in file.decode.points})
        table = {(point.batch, point.context): point.step_ms / 1e3 for point in file.decode.points}
        steps = [[table[batch, context] for context in self._contexts] for batch in self._batches]
        self._steps = np.maximum.accumulate(np.maximum.accumulate(steps, axis=0), axis=1).tolist()

    @property
    def max_batch(self) -> int:
        """Most requests that one decode replica runs: the largest batch that the file knows."""
        return self._batches[-1]

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that the file knows."""
        return int(self._prompt_tokens[-1])

    @property
    def max_context(self) -> int:
        """Longest decode context that the file knows."""
        return self._contexts[-1]

    def prefill_seconds(self, prompt_tokens: Floats) -> Floats:
        """Seconds that prompts take alone; those below the first point take as long as that."""
        return np.interp(prompt_tokens, self._prompt_tokens, self._prompt_seconds)

    def transfer_seconds(self, prompt_tokens: Floats) -> Floats:
        """Seconds from the end of a prefill to the KV cache lying in the decoder."""
        transfer = self.file.kv_transfer
        return transfer.seconds + prompt_tokens * transfer.bytes_per_token / (transfer.gb_per_s * 1e9)

    def step_seconds(self, batch: float, context: float) -> float:
        """Seconds of one decode step. Below the grid the nearest point counts, above it too (the plan stays inside)."""
        row, share = _place(self._batches, batch)
        column, across = _place(self._contexts, context)
        low, high = self._steps[row], self._steps[min(row + 1, len(self._steps) - 1)]
        after = min(column + 1, len(low) - 1)
        near = low[column] + (low[after] - low[column]) * across
        far = high[column] + (high[after] - high[column]) * across
        return near + (far - near) * share


def _place(axis: Sequence[int], value: float) -> tuple[int, float]:
    """The cell that holds a value, and how far into it (0..1) the value lies."""
    index = bisect_right(axis, value) - 1
    if index < 0:
        return 0, 0.0
    if index >= len(axis) - 1:
        return len(axis) - 1, 0.0
    return index, (value - axis[index]) / (axis[index + 1] - axis[index])


def load_capacity(path: Path) -> Capacity:
    """Read and check a capacity file (YAML or JSON).

    Raises:
        RecipeError: with the line, for a key or value that the format doesn't have; for tables in which a longer
            prompt, a larger batch or a longer context takes less time by more than NOISE; for a decode grid with holes.
    """
    data, lines = read_yaml(path)
    try:
        file = CapacityFile.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise RecipeError([finding_of(path, lines, fault, model=CapacityFile) for fault in error.errors()]) from error
    findings = [*_prefill_faults(file, path, lines), *_decode_faults(file, path, lines)]
    if findings:
        raise RecipeError(findings)
    return Capacity(file)


def _prefill_faults(file: CapacityFile, path: Path, lines: Lines) -> list[Finding]:
    faults = []
    order = sorted(range(len(file.prefill.points)), key=lambda index: file.prefill.points[index].prompt_tokens)
    for before, after in pairwise(order):
        short, long = file.prefill.points[before], file.prefill.points[after]
        keys: Keys = ("prefill", "points", after)
        if short.prompt_tokens == long.prompt_tokens:
            faults.append(_finding(path, lines, keys, long.prompt_tokens, "is there twice", "one point per length"))
        elif long.seconds < short.seconds * (1 - NOISE):
            problem = (
                f"{long.prompt_tokens:,} tokens take {long.seconds:.4g} s, less than the {short.seconds:.4g} s of "
                f"{short.prompt_tokens:,} tokens"
            )
            faults.append(_finding(path, lines, keys, long.tokens_per_second, problem, "times that rise with length"))
    return faults


def _decode_faults(file: CapacityFile, path: Path, lines: Lines) -> list[Finding]:
    faults: list[Finding] = []
    places: dict[tuple[int, int], int] = {}
    for index, point in enumerate(file.decode.points):
        if (point.batch, point.context) in places:
            value = f"batch {point.batch}, context {point.context}"
            faults.append(_finding(path, lines, ("decode", "points", index), value, "is there twice", "one point each"))
        places[point.batch, point.context] = index
    batches, contexts = sorted({batch for batch, _ in places}), sorted({context for _, context in places})
    holes = [(batch, context) for batch in batches for context in contexts if (batch, context) not in places]
    if holes:
        problem = f"has no point for batch {holes[0][0]} at context {holes[0][1]} ({len(holes)} missing in all)"
        return [*faults, _finding(path, lines, ("decode", "points"), None, problem, "every batch at every context")]
    points = file.decode.points
    for batch, context in places:
        larger = [(batch_after, context) for batch_after in batches if batch_after > batch][:1]
        larger += [(batch, context_after) for context_after in contexts if context_after > context][:1]
        for other in larger:
            here, there = points[places[batch, context]], points[places[other]]
            if there.step_ms < here.step_ms * (1 - NOISE):
                problem = (
                    f"batch {there.batch} at context {there.context} takes {there.step_ms:g} ms, less than the "
                    f"{here.step_ms:g} ms of batch {here.batch} at context {here.context}"
                )
                legal = "steps that rise with batch and context"
                faults.append(_finding(path, lines, ("decode", "points", places[other]), there.step_ms, problem, legal))
    return faults


def _finding(path: Path, lines: Lines, keys: Keys, value: object, problem: str, legal: str) -> Finding:
    cure = "measure the point again, or take the smoother of the two figures"
    return Finding(
        file=path, line=lines.get(keys, 1), keys=keys, value=value, problem=problem, legal=legal, cure=cure
    )  # fmt: skip
