"""Helpers that look before they touch: find a target, check its signature, wrap it once."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from vllm_rose_plugin.seams.seam import SeamError

MARK = "__rose_wrapped__"
"""Attribute of what replaces something of vLLM's."""


def find(seam: str, module: str, name: str) -> Any:
    """The object called ``name`` (may be dotted) in ``module``.

    Raises:
        SeamError: it doesn't exist.
    """
    target: Any = importlib.import_module(module)
    for part in name.split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            raise SeamError(seam, f"{module}.{name} does not exist") from None
    return target


def wrap(seam: str, module: str, name: str, parameters: tuple[str, ...], make: Callable[[Any], Any]) -> None:
    """Replace a function or method by ``make(original)``, once.

    Args:
        seam: name of the seam, for the error.
        module: vLLM module.
        name: function, or ``Class.method``.
        parameters: the leading parameter names that the replacement relies on.
        make: takes the original, returns the replacement.

    Raises:
        SeamError: the target is missing or its parameters differ.
    """
    original = find(seam, module, name)
    if getattr(original, MARK, False):
        return
    actual = tuple(inspect.signature(original).parameters)
    if actual[: len(parameters)] != parameters:
        raise SeamError(seam, f"{module}.{name} takes {actual}, expected it to start with {parameters}")
    replacement = functools.wraps(original)(make(original))
    setattr(replacement, MARK, True)
    owner_name, _, attribute = name.rpartition(".")
    owner = find(seam, module, owner_name) if owner_name else importlib.import_module(module)
    setattr(owner, attribute, replacement)


def is_wrapped(target: Any) -> bool:
    """Whether :func:`wrap` made this object."""
    return bool(getattr(target, MARK, False))
