"""What a recipe's reader is told: where, what stands there, what is legal, what mends it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Keys = tuple[str | int, ...]
"""The way to a value from the top of the recipe, such as ``("roles", "prefill", "args", "block-size")``."""


@dataclass(frozen=True)
class Finding:
    """One fault of one recipe."""

    file: Path
    line: int
    """1-based; 0 where the fault is of the whole file."""
    keys: Keys
    value: object
    """What stands there; None where something is missing."""
    problem: str
    legal: str
    """The legal range, in words."""
    cure: str
    """What to write instead."""

    def __str__(self) -> str:
        key = ".".join(str(part) for part in self.keys) or "recipe"
        value = "" if self.value is None else f" = {_shortened(self.value)}"
        legal = self.legal.rstrip(".")
        return f"{self.file}:{self.line}: {key}{value}: {self.problem}. Legal: {legal}. Cure: {self.cure}."


class RecipeError(ValueError):
    """A file that is no recipe; ``findings`` holds every fault, the message all of them, one a line."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = list(findings)


def _shortened(value: object, limit: int = 80) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
