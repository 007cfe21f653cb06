"""One thing that is missing or wrong."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """Something to know; an ``error`` means that serving through the plugin can't work."""

    level: Level
    code: str
    """Stable name, for scripts."""
    text: str
    cost: str
    cure: str
