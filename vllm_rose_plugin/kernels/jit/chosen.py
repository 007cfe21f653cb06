"""Which provider serves each family in this process.

A provider comes here only from a self-check (:func:`~vllm_rose_plugin.kernels.jit.providers.choose`) at the shapes of
the model that was loaded. A family that was never checked is computed by the torch reference.
"""

from typing import Any

from vllm_rose_plugin.kernels.jit.providers import Choice, Family

REFERENCE = "reference"

_providers: dict[str, str] = {}


def use(family: Family, choice: Choice) -> None:
    """From now on ``choice`` serves ``family``."""
    _providers[family.name] = choice.provider


def provider(family: str, x: Any) -> str:
    """The provider of ``family`` for a tensor: the chosen one on CUDA, the reference elsewhere and before a check."""
    return _providers.get(family, REFERENCE) if x.is_cuda else REFERENCE


def snapshot() -> dict[str, str]:
    """Family to provider; a family that was never checked is absent."""
    return dict(_providers)
