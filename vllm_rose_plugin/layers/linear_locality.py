"""Whether the weight of a linear layer goes into parts, by the settings ``locality`` and ``locality_linear``.

Decided when vLLM has loaded the layer; layers that are alike share a decision, and its line in the log. Whichever way
``locality`` names, one launch reads the parts (see ``kernels/linear_split/compare.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_rose_plugin.config import Locality
from vllm_rose_plugin.kernels.gemm.column_split import ColumnSplit, plan_split
from vllm_rose_plugin.kernels.gemm.domains import prepare_domains
from vllm_rose_plugin.kernels.gemm.family import LinearShape
from vllm_rose_plugin.kernels.jit.providers import NoProviderError
from vllm_rose_plugin.kernels.linear_split.compare import Place, compare_split, compile_kernels, family_of
from vllm_rose_plugin.kernels.moe_experts.compare_ways import GAIN, WHOLE, Comparison
from vllm_rose_plugin.kernels.moe_experts.make_ways import SINGLE_LAUNCH, Domains
from vllm_rose_plugin.kernels.moe_experts.ways import OneLaunch
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts
from vllm_rose_plugin.layers import gpu, locality, settings
from vllm_rose_plugin.layers.experts_base import captures_cuda_graphs
from vllm_rose_plugin.layers.linear_parts import Allocate
from vllm_rose_plugin.layers.locality_obstacles import obstacle_of_linear
from vllm_rose_plugin.layers.log import logger
from vllm_rose_plugin.layers.self_check import token_counts, torch_defaults
from vllm_rose_plugin.memory.locality import LocalityUnavailableError


@dataclass(frozen=True)
class LinearDecision:
    """For layers that are alike."""

    split: ColumnSplit
    allocate: Allocate | None
    """Of memory in domains; None: a machine without a GPU, where parts lie in torch's memory."""
    sm_domains: torch.Tensor | None  # (SMs) int32
    """None: the reference computes."""


@dataclass(frozen=True)
class _Kind:
    setting: str
    domains: Domains
    shapes: tuple[LinearShape, ...]
    """Of a call with one token: without bias, and with where the layer has one."""
    tokens: tuple[int, ...]


_by_kind: dict[_Kind, LinearDecision | None] = {}


def decide(shapes_of: tuple[Callable[[int], LinearShape], ...], quant_method: Any) -> LinearDecision | None:
    """How a linear layer's weight is split, where ``locality_linear`` asks for it.

    Args:
        shapes_of: number of tokens to the layer's call: without bias, and with where it has one.
        quant_method: vLLM's, of the layer.

    Returns:
        None: it stays whole.

    Raises:
        ValueError: the settings name parts that can't be had here; the message says what is missing and what mends it.
    """
    config = settings.current()
    domains: Domains | None = None
    obstacle = obstacle_of_linear(quant_method)
    try:
        domains = None if obstacle else locality.domains_of(config)
    except LocalityUnavailableError as error:
        obstacle = str(error)
    if obstacle:
        if config.locality != Locality.AUTO:
            raise ValueError(locality.refusal(config, obstacle, linear=True))
        logger.debug_once("Locality domains aren't used for linear layers: %s", obstacle)
        return None
    shape = shapes_of[-1](1)
    target = gpu.target() or locality.REFERENCE_TARGET
    count = config.locality_force_domains if domains is None else domains.count
    split = plan_split(n=shape.n, parts=count, target=target, name=f"the linear layer {_label(shape)}")
    if split.parts == 1:
        logger.info_once("Locality domains: %s.", split.reason)
        return None
    if domains is None:
        return LinearDecision(split, None, None)
    kind = _Kind(config.locality, domains, tuple(shape_of(1) for shape_of in shapes_of), locality.tokens_of_a_step())
    if kind not in _by_kind:
        _by_kind[kind] = _chosen(kind, split, shapes_of)
    return _by_kind[kind]


def _label(shape: LinearShape) -> str:
    return f"N={shape.n};K={shape.k}"


def _chosen(
    kind: _Kind, split: ColumnSplit, shapes_of: tuple[Callable[[int], LinearShape], ...]
) -> LinearDecision | None:
    """Checks and times the layer in parts, and says what came out in one line."""
    domains, automatic = kind.domains, kind.setting == Locality.AUTO
    label = _label(kind.shapes[0])
    try:
        way = domains.way(SINGLE_LAUNCH)
        assert isinstance(way, OneLaunch)
        device = torch.device("cuda", domains.driver.device)
        place = Place(split, domains.allocate, way.sm_domains, domains.forced)
        compared = None
        with torch_defaults():
            if torch.cuda.is_available():
                prepare_domains(device)
            for shape_of in shapes_of:
                compared = _compared(kind, place, shape_of)
                if failed := compared.failed.get(SINGLE_LAUNCH) or compared.failed.get(WHOLE):
                    raise LocalityUnavailableError(f"{SINGLE_LAUNCH} failed its check for {label}: {failed}")
        assert compared is not None
    except (LocalityUnavailableError, NoProviderError, RuntimeError) as error:
        if not automatic:
            raise ValueError(locality.refusal(settings.current(), str(error), linear=True)) from error
        logger.warning("Locality domains aren't used for the linear layer %s: %s", label, error)
        return None
    best = (SINGLE_LAUNCH,) * len(compared.tokens)
    gain = compared.gain(best)
    used = not automatic or gain >= GAIN
    times = ", ".join(
        f"{tokens} tokens {compared.microseconds[SINGLE_LAUNCH][i]:.1f} us, whole {compared.microseconds[WHOLE][i]:.1f}"
        for i, tokens in enumerate(compared.tokens)
    )
    where = f"{domains.count} {'forced parts' if domains.forced else 'domains'}"
    verdict = "in parts" if used else f"whole (parts must be {GAIN}x as fast)"
    logger.info(
        "Locality domains: the linear layer %s lies %s, %s, setting %s: %.3fx as fast in parts (%s).",
        *(label, verdict, where, kind.setting, gain, times),
    )
    locality.note(label, kind.setting, domains, compared, best, gain, used=used)
    return LinearDecision(split, domains.allocate, way.sm_domains) if used else None


def _compared(kind: _Kind, place: Place, shape_of: Callable[[int], LinearShape]) -> Comparison:
    """With every kernel of the layer in parts compiled, also where the verdict was on disk."""
    facts = device_facts(kind.domains.driver.device) if torch.cuda.is_available() else None
    counts = token_counts(family_of(place), shape_of, largest=kind.tokens[-1], facts=facts)
    compared = compare_split(
        shape_of=shape_of, tokens=kind.tokens, place=place, captured=captures_cuda_graphs(), checked=counts
    )
    if facts is not None:
        compile_kernels([shape_of(count) for count in sorted({*counts, *kind.tokens})], place)
    return compared
