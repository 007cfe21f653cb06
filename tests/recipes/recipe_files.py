"""Recipes for tests: a shipped one, changed at some keys, written where its findings can name a file."""

import shutil
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "recipes"
DISAGGREGATED = "qwen3-235b-a22b-mxfp8-gb200-nvl72"
AGGREGATED = "qwen3-235b-a22b-mxfp8-gb200-aggregated"
HOPPER = "qwen3-235b-a22b-mxfp8-h200"


def write_recipe(folder: Path, name: str, changes: dict[str, Any], base: str = DISAGGREGATED) -> Path:
    """The shipped recipe ``base`` under another name with other values; keys are dotted ways, None removes."""
    data = yaml.safe_load((SHIPPED / f"{base}.yaml").read_text())
    data["name"] = name
    for way, value in changes.items():
        *parents, last = way.split(".")
        inner = data
        for parent in parents:
            inner = inner.setdefault(parent, {})
        if value is None:
            inner.pop(last)
        else:
            inner[last] = value
    if not (folder / "models").is_dir():
        shutil.copytree(SHIPPED / "models", folder / "models")
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def line_of(path: Path, text: str, nth: int = 1) -> int:
    """The line of the nth occurrence of ``text``."""
    lines = [number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line]
    return lines[nth - 1]
