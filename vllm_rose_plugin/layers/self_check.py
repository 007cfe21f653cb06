"""Between loading a model and its first forward pass: check, choose and compile the kernels that its layers need."""

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel

from vllm_rose_plugin.config import BACKEND
from vllm_rose_plugin.kernels.families import FAMILIES
from vllm_rose_plugin.kernels.gemm import tuned
from vllm_rose_plugin.kernels.jit import chosen
from vllm_rose_plugin.kernels.jit.compile import counts
from vllm_rose_plugin.kernels.jit.providers import Family, NoProviderError, check_pins, choose
from vllm_rose_plugin.kernels.moe_dispatch import threshold
from vllm_rose_plugin.kernels.moe_experts.family import ExpertsShape
from vllm_rose_plugin.kernels.moe_experts.one_launch import check_one_launch
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DeviceFacts, device_facts
from vllm_rose_plugin.layers import gpu
from vllm_rose_plugin.layers.log import logger

_ALWAYS = (1, 64, 2048)
"""Token counts that are checked and timed in any case: decode steps of one and of many requests, and a prefill step."""
_EVERY = 512
_STRIDE = 8
"""Configs are looked up for every token count up to _EVERY, then for multiples of _STRIDE."""

_needed: dict[str, tuple[Family, dict[Any, None]]] = {}
_counts: dict[tuple, tuple[int, ...]] = {}
tuned.on_change(_counts.clear)
threshold.on_change(_counts.clear)
_checked: dict[str, tuple[Any, ...]] = {}
"""Family to the shapes of its last check."""
_without_reference: dict[str, str] = {}
"""Family to why some layer can't be computed by the reference, until :func:`run` has looked."""


def need(family: Family, shape_of: Callable[[int], Any]) -> None:
    """Note the calls that a layer will make; called while vLLM builds the layer, and again when it was tuned since.

    Args:
        family: whose calls.
        shape_of: token count to shape.
    """
    largest = gpu.most_tokens()
    facts = device_facts(torch.cuda.current_device()) if torch.cuda.is_available() else None
    key = (family.name, shape_of(1), largest, facts)  # layers are many and alike
    if key not in _counts:
        _counts[key] = token_counts(family, shape_of, largest=largest, facts=facts)
    shapes = tuple(map(shape_of, _counts[key]))
    _needed.setdefault(family.name, (family, {}))[1].update(dict.fromkeys(shapes))
    _Warmup.of(family).register_warmup(shapes)


def need_kernels(family: Family, why: str) -> None:
    """Note that a layer has no fallback to the reference: start-up must end where that was chosen, not a request.

    Args:
        family: as for :func:`need`.
        why: what of the layer it is about, and the setting that mends it.
    """
    _without_reference[family.name] = why


def token_counts(
    family: Family, shape_of: Callable[[int], Any], *, largest: int, facts: DeviceFacts | None
) -> tuple[int, ...]:
    """The token counts to check at, so that every kernel that a step can launch is among those that were checked.

    Args:
        family, shape_of: as in :func:`need`.
        largest: most tokens of a step.
        facts: of the device; None: no GPU, where there is nothing to find out.
    """
    counts = {min(tokens, largest) for tokens in _ALWAYS}
    if family.config_of is None or facts is None:
        return tuple(sorted(counts))
    seen = {family.config_of(shape_of(tokens), *facts) for tokens in counts}
    for tokens in (*range(1, min(largest, _EVERY) + 1), *range(_EVERY, largest, _STRIDE), largest):
        config = family.config_of(shape_of(tokens), *facts)
        if config not in seen:
            seen.add(config)
            counts.add(tokens)
    return tuple(sorted(counts))


def ask_for_one_launch(shape: ExpertsShape, *, most_tokens: int, device: torch.device) -> None:
    """Time route and dispatch as one launch and as two; before a layer's kernels are compiled. Nothing without a GPU.

    Args:
        shape: of a call of the layer, with any number of tokens.
        most_tokens: of a step.
        device: that the layer is on.
    """
    if not torch.cuda.is_available():
        return
    with torch_defaults(), torch.cuda.device(device):
        check_one_launch(shape, most_tokens=most_tokens, **device_facts(device.index)._asdict())


@contextlib.contextmanager
def torch_defaults() -> Iterator[None]:
    """For what is measured while vLLM loads, when torch's defaults are the model's dtype and its device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def run() -> None:
    """Choose the provider of every family that layers asked for since the last time, and log what start-up cost.

    Raises:
        NoProviderError: a family that no provider passes, or none but the reference, which can't compute some layer.
        ValueError: a ``ROSE_PROVIDER_<FAMILY>`` that names nothing.
    """
    needed_kernels = dict(_without_reference)
    _without_reference.clear()
    due = {name: (family, tuple(shapes)) for name, (family, shapes) in _needed.items()}
    due = {name: (family, shapes) for name, (family, shapes) in due.items() if _checked.get(name) != shapes}
    if due:
        check_pins(FAMILIES)
        if torch.cuda.is_available():
            for family, shapes in due.values():
                chosen.use(family, choose(family=family, shapes=shapes))
            torch.cuda.empty_cache()  # vLLM measures what is free next
            logger.info("%s: %s", BACKEND, counts.line())
        _checked.update({name: shapes for name, (_, shapes) in due.items()})
    for name, why in needed_kernels.items():
        if torch.cuda.is_available() and chosen.snapshot().get(name, chosen.REFERENCE) == chosen.REFERENCE:
            raise NoProviderError(f"{name}: the self-check chose {chosen.REFERENCE}, which can't compute {why}")


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
        """Make the chosen provider's kernel of a shape; there already, unless the disk had to be asked."""
        serving = chosen.snapshot()[self._family.name]
        provider = next(provider for provider in self._family.providers if provider.name == serving)
        provider.make(compile_key)
