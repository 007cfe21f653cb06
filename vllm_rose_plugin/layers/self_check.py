"""Between loading a model and its first forward pass: check, choose and compile the kernels that its layers need."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel

from vllm_rose_plugin.config import BACKEND
from vllm_rose_plugin.kernels.jit import chosen
from vllm_rose_plugin.kernels.jit.compile import counts
from vllm_rose_plugin.kernels.jit.providers import Family, choose
from vllm_rose_plugin.layers.log import logger

_FEW = (1, 64)
_MANY = 2048
"""Token counts that are checked and timed: decode steps of one and of many requests, and a prefill step."""

_needed: dict[str, tuple[Family, dict[Any, None]]] = {}
_checked: dict[str, tuple[Any, ...]] = {}
"""Family to the shapes of its last check."""


def token_counts() -> tuple[int, ...]:
    """The token counts to check at, none above the configuration's largest batch."""
    config = get_current_vllm_config_or_none()
    largest = config.scheduler_config.max_num_batched_tokens if config is not None else _MANY
    return tuple(sorted({min(tokens, largest) for tokens in (*_FEW, _MANY)}))


def need(family: Family, shapes: Iterable[Any]) -> None:
    """Note the calls that a layer will make; called while vLLM builds the layer."""
    shapes = tuple(shapes)
    _needed.setdefault(family.name, (family, {}))[1].update(dict.fromkeys(shapes))
    _Warmup.of(family).register_warmup(shapes)


def run() -> None:
    """Choose the provider of every family that layers asked for since the last time, and log what start-up cost.

    Raises:
        NoProviderError: a family that no provider passes.
    """
    due = {name: (family, tuple(shapes)) for name, (family, shapes) in _needed.items()}
    due = {name: (family, shapes) for name, (family, shapes) in due.items() if _checked.get(name) != shapes}
    if not due:
        return
    if not torch.cuda.is_available():
        logger.warning_once(
            "%s: no NVIDIA GPU here, so all of its kernels are the torch reference, which is slow", BACKEND
        )
    else:
        for family, shapes in due.values():
            chosen.use(family, choose(family=family, shapes=shapes))
        torch.cuda.empty_cache()  # vLLM measures what is free next
        logger.info("%s: %s", BACKEND, counts.line())
    _checked.update({name: shapes for name, (_, shapes) in due.items()})


class _Warmup(VllmJitKernel[Any]):
    """A family in vLLM's own warm-up, which runs before it captures CUDA graphs or takes a request."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self._family = family

    @staticmethod
    @cache
    def of(family: Family) -> "_Warmup":
        """The one for ``family``: vLLM compiles the keys of one object once."""
        return _Warmup(family)

    def get_warmup_keys(self, shapes: tuple[Any, ...]) -> list[Any]:
        """The shapes themselves, where a provider of ours serves them.

        A model that came from a loader with a ``load_model`` of its own is checked here at the latest.
        """
        run()
        return list(shapes) if chosen.snapshot().get(self._family.name, chosen.REFERENCE) != chosen.REFERENCE else []

    def compile(self, compile_key: Any) -> None:
        """Make the chosen provider's kernel of a shape; already there unless the self-check was long ago."""
        serving = chosen.snapshot()[self._family.name]
        provider = next(provider for provider in self._family.providers if provider.name == serving)
        provider.make(compile_key)
