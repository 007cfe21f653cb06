"""What pydantic finds in a file of ours, as the findings that everything else is told in."""

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vllm_rose_plugin.recipes.finding import Finding, Keys
from vllm_rose_plugin.recipes.lines import Lines

_TYPES = {"string_type": "text", "int_type": "a whole number", "float_type": "a number", "list_type": "a list"}


class Form(NamedTuple):
    """How a text must be written, for pydantic and for the reader."""

    pattern: str
    legal: str


class Fault(ValueError):
    """What a validator of a model finds; the message is what is wrong."""

    def __init__(self, problem: str, *, legal: str, cure: str, keys: Keys = ()) -> None:
        super().__init__(problem)
        self.legal, self.cure, self.keys = legal, cure, keys


def line_of(lines: Lines, keys: Keys) -> int:
    """The line of a key, or of the nearest key above it."""
    while keys and keys not in lines:
        keys = keys[:-1]
    return lines.get(keys, 1)


def write_near(given: str, known: Iterable[str]) -> str:
    """The cure of a misspelled word."""
    near = difflib.get_close_matches(given, known, n=1)
    return f"write {near[0]}" if near else "write one of these"


def finding_of(path: Path, lines: Lines, fault: Any, *, model: type[BaseModel], forms: Sequence[Form] = ()) -> Finding:
    """One entry of ``ValidationError.errors()``.

    Args:
        path: the file.
        lines: of its keys.
        fault: the entry.
        model: what the whole file was validated by.
        forms: of the texts in it, where they have patterns.
    """
    keys: Keys = tuple(part for part in fault["loc"] if part != "[key]")
    named_twice = fault["loc"][-1:] == ("[key]",)  # the value is the key itself
    value = None if fault["type"] == "missing" or named_twice or isinstance(fault["input"], dict) else fault["input"]
    problem, legal, cure = _in_words(fault, keys, model, forms)
    if fault["type"] == "value_error":
        keys += fault["ctx"]["error"].keys
    return Finding(path, line_of(lines, keys), keys, value, problem, legal, cure)


def _in_words(fault: Any, keys: Keys, model: type[BaseModel], forms: Sequence[Form]) -> tuple[str, str, str]:
    """What is wrong, what is legal, what mends it."""
    kind, given, context = fault["type"], fault["input"], fault.get("ctx", {})
    if kind == "value_error":
        return str(context["error"]), context["error"].legal, context["error"].cure
    if kind == "missing":
        return "is not given", "the key must be there", "add it"
    if kind == "extra_forbidden":
        known = list(_inside(model, keys[:-1])[0].model_fields)
        return "is no key in this place", ", ".join(known), write_near(str(keys[-1]), known)
    if kind == "literal_error":
        words = [text or number for text, number in re.findall(r"'([^']*)'|(\d+)", context["expected"])]
        problem = "is no key in this place" if fault["loc"][-1] == "[key]" else "is not among the values of this key"
        return problem, ", ".join(words), write_near(str(given), words)
    if kind == "string_pattern_mismatch":
        form = next(form for form in forms if form.pattern == context["pattern"])
        mended = str(given).lstrip("-").replace("_", "-")
        mends = fault["loc"][-1] == "[key]" and re.fullmatch(form.pattern, mended)
        return "isn't written as it must be", form.legal, f"write {mended}" if mends else "write it so"
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "finite_number"):
        return "is out of range", _range(_inside(model, keys)[1]), "write a number of this range"
    if kind in ("too_short", "string_too_short"):
        return "is empty", "one value or more", "write one"
    legal = _TYPES.get(kind, "a mapping")
    cure = f'write "{given}"' if kind == "string_type" and isinstance(given, bool | int | float) else f"write {legal}"
    return "has no value" if given is None else f"is not {legal}", legal, cure


def _inside(kind: Any, keys: Keys) -> tuple[Any, list[Any]]:
    """The type of what stands under ``keys`` of a type, and its constraints."""
    constraints: list[Any] = []
    for key in keys:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields[str(key)]
            kind, constraints = field.annotation, list(field.metadata)
        else:  # list[entry] or dict[key, entry]
            kind, constraints = get_args(kind)[-1], []
        while get_origin(kind) in (Annotated, Union, UnionType):
            if get_origin(kind) is Annotated:
                kind, *more = get_args(kind)
                for entry in more:
                    constraints += entry.metadata if isinstance(entry, FieldInfo) else [entry]
            else:
                kind = next(one for one in get_args(kind) if one is not NoneType)
    return kind, constraints


def _range(constraints: Sequence[Any]) -> str:
    least = next((entry.ge for entry in constraints if isinstance(entry, Ge)), None)
    above = next((entry.gt for entry in constraints if isinstance(entry, Gt)), None)
    most = next((entry.le for entry in constraints if isinstance(entry, Le)), None)
    low = f"above {above}" if least is None else f"{least}"
    return f"{low} to {most}" if most is not None else low if least is None else f"{low} or more"
