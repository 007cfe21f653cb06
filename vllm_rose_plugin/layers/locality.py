"""Where the weights of a layer of experts go, by the setting ``locality``: decided when vLLM creates them.

``linear_locality.py`` decides for linear layers, with the domains and the words of this one.

Deciding takes the device's domains, what of the layer can be split, and, for ``auto``, times on the device; so it
can't wait for the self-check behind the load. Layers that are alike share a decision, and its line in the log.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_rose_plugin.config import BACKEND, Locality, RoseConfig
from vllm_rose_plugin.kernels.gemm.column_split import ColumnSplit, plan_split
from vllm_rose_plugin.kernels.jit.providers import NoProviderError
from vllm_rose_plugin.kernels.moe_experts.compare_ways import (
    GAIN,
    TOKENS,
    WHOLE,
    Comparison,
    compare_ways,
    family_of,
    ways_of,
)
from vllm_rose_plugin.kernels.moe_experts.family import ExpertsShape
from vllm_rose_plugin.kernels.moe_experts.make_ways import WAYS, Domains
from vllm_rose_plugin.kernels.moe_experts.ways import Way, register
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts
from vllm_rose_plugin.layers import expert_agreement, gpu, settings
from vllm_rose_plugin.layers.experts import experts_shape, gets_codes, measure_kernels, senders_of
from vllm_rose_plugin.layers.experts_base import captures_cuda_graphs
from vllm_rose_plugin.layers.locality_obstacles import obstacle_of
from vllm_rose_plugin.layers.log import logger
from vllm_rose_plugin.layers.self_check import token_counts, torch_defaults
from vllm_rose_plugin.memory.driver import Driver
from vllm_rose_plugin.memory.locality import LocalityUnavailableError, look_at_locality, reached_by_rdma

REFERENCE_TARGET = "sm_90a"
"""Whose tiles the reference kernels are split by."""


@dataclass(frozen=True)
class Decision:
    """For layers that are alike."""

    splits: tuple[tuple[str, ColumnSplit], ...]
    """Weights that are split: "w13", "w2", or both."""
    domains: Domains | None
    """None: a machine without a GPU, where parts lie in torch's memory."""
    ways: str
    """Name under which the ways are registered; empty for the reference kernels."""


_said: dict[str, dict[str, Any]] = {}
"""Kind of layer to what was decided, for :func:`snapshot`."""


def snapshot() -> dict[str, dict[str, Any]]:
    """What was decided in this process, ready for JSON: kind of layer to ways, times, and the reason."""
    return dict(_said)


def decide(moe_config: Any, experts_cls: type, *, method: str) -> Decision | None:
    """How a layer's experts are split.

    Args:
        moe_config: the layer's ``FusedMoEConfig``.
        experts_cls: what will compute it.
        method: key of the layer's quantization method in ``seams/mxfp8_moe.py``.

    Returns:
        None: weights stay whole.

    Raises:
        ValueError: the setting names a way that can't be had here; the message says what is missing and what mends it.
        GroupError: so on some rank, with EPLB, which needs all ranks alike.
    """
    config = settings.current()
    if config.locality == Locality.OFF:
        return None
    obstacle = obstacle_of(experts_cls, method)
    shape_of = functools.partial(
        experts_shape,
        moe_config,
        config,
        captured=captures_cuda_graphs(),
        senders=senders_of(moe_config),
        quantized=gets_codes(moe_config, config),
    )
    eplb = moe_config.moe_parallel_config.enable_eplb
    own = functools.partial(_decide, config, obstacle, shape_of, eplb=eplb)
    if not eplb:
        return own()
    return expert_agreement.settle(
        (
            experts_cls,
            method,
            config.locality,
            config.locality_force_domains,
            shape_of(1),
            tokens_of_a_step(),
            obstacle,
        ),
        own,
        describe=_layout,
        differ=functools.partial(_ranks_differ, config, shape_of(1)),
    )


def _decide(
    config: RoseConfig, obstacle: str, shape_of: Callable[[int], ExpertsShape], *, eplb: bool
) -> Decision | None:
    """What this rank would do alone."""
    automatic = config.locality == Locality.AUTO
    try:
        domains = None if obstacle else domains_of(config)
        if domains is not None and eplb:
            _require_reach(domains)
    except LocalityUnavailableError as error:
        obstacle = str(error)
    if obstacle:
        if not automatic:
            raise ValueError(refusal(config, obstacle))
        logger.debug_once("Locality domains aren't used: %s", obstacle)
        return None
    shape = shape_of(1)
    target = gpu.target() or REFERENCE_TARGET
    count = config.locality_force_domains if domains is None else domains.count
    splits = (
        plan_split(n=2 * shape.intermediate_size, parts=count, target=target, gate_up=True, name="w13 of the experts"),
        plan_split(n=shape.hidden_size, parts=count, target=target, name="w2 of the experts"),
    )
    for split in splits:
        if split.reason:
            logger.info_once("Locality domains: %s.", split.reason)
    split_weights = tuple((stem, s) for stem, s in zip(("w13", "w2"), splits, strict=True) if s.parts > 1)
    if not split_weights:
        return None
    if domains is None:
        logger.info_once("Locality domains: %d forced parts, computed by the reference kernels.", count)
        return Decision(split_weights, None, "")
    kind = _Kind(config.locality, domains, shape, tokens_of_a_step())
    if kind not in _by_kind:
        _by_kind[kind] = _chosen(kind, splits, shape_of)
    ways = _by_kind[kind]
    return Decision(split_weights, domains, ways) if ways else None


def _layout(decision: Decision | None) -> str:
    """The tensors that a layer lists for EPLB, in words; which way launches them is each rank's own affair."""
    if decision is None:
        return "whole"
    splits = ", ".join(f"{stem} in {split.parts} parts for {split.target}" for stem, split in decision.splits)
    return f"{splits}, {'packed' if decision.ways else 'row-major'} scales"


def _ranks_differ(config: RoseConfig, shape: ExpertsShape, own: Decision | None, answers: list[str]) -> None:
    """Nobody splits; says so.

    Raises:
        ValueError: a way is asked for by name.
    """
    ranks = "; ".join(
        f"{answer} on rank {', '.join(str(rank) for rank, each in enumerate(answers) if each == answer)}"
        for answer in dict.fromkeys(answers)
    )
    why = f"EPLB moves experts between ranks, whose layers must lie alike, and they would be {ranks}"
    if config.locality != Locality.AUTO:
        raise ValueError(refusal(config, why))
    label = _label(shape)
    logger.warning("Locality domains: experts (%s) lie whole on all ranks: %s.", label, why)
    if label in _said:
        _said[label] |= {"split": False, "ways": {}, "ranks": answers}


def _label(shape: ExpertsShape) -> str:
    """For the log and as a key."""
    return f"E={shape.num_local_experts};H={shape.hidden_size};I={shape.intermediate_size};top_k={shape.top_k}"


@dataclass(frozen=True)
class _Kind:
    """Layers that are alike, in the eyes of a decision."""

    setting: str
    domains: Domains
    shape: ExpertsShape
    """Of a call with one token."""
    tokens: tuple[int, ...]
    """Numbers of tokens of a step to measure."""

    @property
    def label(self) -> str:
        """For the log and as a key."""
        return _label(self.shape)


_by_kind: dict[_Kind, str] = {}
"""Name of the ways; empty: whole."""


def _chosen(kind: _Kind, splits: tuple[ColumnSplit, ColumnSplit], shape_of: Any) -> str:
    """Times the ways, registers what is chosen, and says so in one line; empty: whole weights."""
    domains, automatic = kind.domains, kind.setting == Locality.AUTO
    ways, missing = _available(domains, WAYS if automatic else (kind.setting,))
    if missing and not automatic:
        raise ValueError(refusal(settings.current(), "; ".join(missing)))
    compared: Comparison | None = None
    if ways:
        try:
            how: dict[str, Any] = {"ways": ways, "splits": splits, "domains": domains}
            device = torch.device("cuda", domains.driver.device)
            facts = device_facts(device.index) if torch.cuda.is_available() else None
            with torch_defaults():
                most_tokens = shape_of(kind.tokens[-1]).num_tokens
                measure_kernels(kind.shape, settings.current(), most_tokens=most_tokens, device=device)
                counts = token_counts(family_of(**how), shape_of, largest=kind.tokens[-1], facts=facts)
                compared = compare_ways(shape_of=shape_of, tokens=kind.tokens, checked=counts, **how)
            missing += [f"{name} failed its check: {reason}" for name, reason in compared.failed.items()]
        except NoProviderError as error:  # whole weights raised too; they are checked again behind the load
            missing.append(str(error))
    best = compared.best() if compared is not None else ()
    if not best:
        if not automatic:
            raise ValueError(refusal(settings.current(), "; ".join(missing) or "no way passed its check"))
        logger.warning("Locality domains aren't used: %s.", "; ".join(missing))
        return ""
    assert compared is not None
    gain = compared.gain(best)
    used = not automatic or gain >= GAIN
    chosen = ways_of(best, [shape_of(tokens).num_tokens for tokens in kind.tokens], ways)  # as they come to the layer
    _say(kind, compared, best, gain, used=used)
    if not used:
        return ""
    steps = [f"{name} up to {most}" for name, most in zip(chosen.names, (*chosen.up_to, "any"), strict=True)]
    forced = "forced " if domains.forced else ""
    name = f"{kind.label}: {', '.join(steps)} tokens, {domains.count} {forced}domains of GPU {domains.driver.device}"
    register(name, chosen)
    return name


def _available(domains: Domains, names: tuple[str, ...]) -> tuple[dict[str, Way], list[str]]:
    """(name to way, what is wrong with the others)."""
    ways, missing = {}, []
    for name in names:
        try:
            ways[name] = domains.way(name)
        except (RuntimeError, ValueError) as error:
            missing.append(f"{name}: {error}")
    return ways, missing


def _say(kind: _Kind, compared: Comparison, best: tuple[str, ...], gain: float, *, used: bool) -> None:
    domains = kind.domains
    times = ", ".join(
        f"{tokens} tokens {name} {compared.microseconds[name][i]:.1f} us, whole {compared.microseconds[WHOLE][i]:.1f}"
        for i, (tokens, name) in enumerate(zip(compared.tokens, best, strict=True))
    )
    where = f"{domains.count} {'forced parts' if domains.forced else 'domains'}"
    verdict = "in parts" if used else f"whole (parts must be {GAIN}x as fast)"
    logger.info(
        "Locality domains: experts (%s) lie %s, %s, setting %s: %.3fx as fast in parts (%s)%s.",
        kind.label,
        verdict,
        where,
        kind.setting,
        gain,
        times,
        "".join(f"; {name} failed: {reason}" for name, reason in compared.failed.items()),
    )
    note(kind.label, kind.setting, domains, compared, best, gain, used=used)


def note(
    label: str, setting: str, domains: Domains, compared: Comparison, best: tuple[str, ...], gain: float, *, used: bool
) -> None:
    """Keep what was decided for :func:`snapshot`.

    Args:
        label: of layers that are alike.
        setting: in force.
        domains, compared: what was measured, and where.
        best: way at each number of tokens that was timed.
        gain: of these ways over whole weights.
        used: whether the weights lie in parts.
    """
    _said[label] = {
        "setting": setting,
        "domains": domains.count,
        "forced": domains.forced,
        "split": used,
        "ways": {str(tokens): name for tokens, name in zip(compared.tokens, best, strict=True)} if used else {},
        "gain": round(gain, 4),
        "microseconds": compared.microseconds,
        "failed": compared.failed,
    }


def tokens_of_a_step() -> tuple[int, ...]:
    """Numbers of tokens to time at."""
    most = gpu.most_tokens()
    return (*(each for each in TOKENS if each < most), most)


def domains_of(config: RoseConfig) -> Domains | None:
    """The GPU's domains, or those that are forced; None: forced ones, without a GPU.

    Raises:
        LocalityUnavailableError: there are none.
    """
    forced = config.locality_force_domains
    if gpu.target() is None:
        if forced and not torch.cuda.is_available():
            return None
        raise LocalityUnavailableError(gpu.obstacle())
    try:
        driver = _driver()
        if forced:
            return Domains(driver, forced, forced=True)
        locality = look_at_locality(driver)
    except RuntimeError as error:  # the driver's own; the bindings' too, where its library is missing
        raise LocalityUnavailableError(str(error)) from error
    if locality.reason:
        raise LocalityUnavailableError(locality.reason)
    return Domains(driver, locality.domains, forced=False)


def _require_reach(domains: Domains) -> None:
    """EPLB over NIXL registers the weights of all experts, and ranks read them where they lie.

    Raises:
        LocalityUnavailableError: they couldn't be registered.
    """
    from vllm.config import get_current_vllm_config_or_none

    vllm_config: Any = get_current_vllm_config_or_none()
    if vllm_config is None or vllm_config.parallel_config.eplb_config.communicator != "nixl":
        return
    if not reached_by_rdma(domains.driver, in_domains=not domains.forced):
        raise LocalityUnavailableError(
            "EPLB moves experts by nixl, which can't reach memory in domains of this GPU: set "
            '--eplb-config \'{"communicator": "torch_gloo"}\''
        )


def _driver() -> Driver:
    """Of torch's current GPU."""
    return _driver_of(torch.cuda.current_device())


@functools.cache
def _driver_of(device: int) -> Driver:
    return Driver(device=device)


def refusal(config: RoseConfig, why: str, *, linear: bool = False) -> str:
    """Text of an error: the setting, why it can't be had, and what mends it.

    Args:
        config: the settings in force.
        why: what is missing.
        linear: whether it is about linear layers, so about ``locality_linear``.
    """
    setting, cure = f"locality={config.locality}", 'Set it to "auto" or "off"'
    if linear:
        setting, cure = f"locality_linear=true with {setting}", 'Set locality_linear to false, or locality to "auto"'
    if not config.locality_force_domains:
        cure += '; to run the same code on a GPU of one domain, for measurement, add "locality_force_domains": 2'
    return f"the rose setting {setting} of {BACKEND} can't be had here: {why}. {cure}."
