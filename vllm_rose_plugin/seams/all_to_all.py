"""``--all2all-backend rose_nvlink``: our manager, and our prepare and finalize, where vLLM has lists of names.

Replaces: the manager that the communicator of the expert-parallel group gets; what ``maybe_make_prepare_finalize``
makes; ``ParallelConfig.use_sequence_parallel_moe``; the backends that ``VllmConfig`` lets micro-batches have. All for
our name only. Classes of experts are asked whether our
exchange can feed them, where vLLM asks them everything else. Nothing is replaced in ``compile_or_warm_up_model``: after
it the deadline of the settings holds instead of that of start-up.
Why: managers, prepare/finalize classes and what goes with them are chosen by chains of names.
Delete when: vllm-project/vllm#50556 (a registry of prepare/finalize factories) lands, with one for managers.

The communicators of every platform call their base class first, which is where the name is read: with the manager made
there, and use_all2all off, none looks for the name in its own list.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

from vllm_rose_plugin.config import ALL2ALL
from vllm_rose_plugin.seams.seam import Seam, SeamError
from vllm_rose_plugin.seams.targets import MARK, find, is_wrapped, wrap

_UPSTREAM = "https://github.com/vllm-project/vllm/pull/50556"
_COMMUNICATOR = "vllm.distributed.device_communicators.base_device_communicator"
_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_FACTORY = f"{_FUSED_MOE}.all2all_utils"
_KERNEL = f"{_FUSED_MOE}.modular_kernel"
_MANAGER, _PREPARE, _EXPERTS, _SEQUENCE, _MICRO_BATCHES = (
    "all2all_manager",
    "all2all_prepare_finalize",
    "all2all_experts",
    "all2all_sequence_parallel",
    "all2all_micro_batches",
)
_OVERLAPPING = {"deepep_low_latency", "deepep_high_throughput", "nixl_ep"}
"""Backends that vLLM lets micro-batches have; the list stands in the middle of a function, as a constant."""


def _wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **keywords: Any) -> None:
        original(self, *args, **keywords)
        if self.use_all2all and self.all2all_backend == ALL2ALL:
            from vllm_rose_plugin.layers.all_to_all import RoseAll2AllManager

            self.all2all_manager = RoseAll2AllManager(self.cpu_group)
            self.use_all2all = False

    return __init__


def _wrap_factory(original: Callable[..., Any]) -> Callable[..., Any]:
    def maybe_make_prepare_finalize(moe: Any, quant_config: Any, *args: Any, **keywords: Any) -> Any:
        from vllm_rose_plugin.layers.all_to_all_check import is_ours

        if not is_ours(moe.moe_parallel_config):
            return original(moe, quant_config, *args, **keywords)
        from vllm_rose_plugin.layers.prepare_finalize import RosePrepareAndFinalize

        manager = keywords.get("all2all_manager") or find(_PREPARE, _FACTORY, "get_ep_all2all_manager")()
        return RosePrepareAndFinalize(manager=manager, moe_config=moe)

    return maybe_make_prepare_finalize


def _apply_factory() -> None:
    name = "maybe_make_prepare_finalize"
    original = find(_PREPARE, _FACTORY, name)
    wrap(_PREPARE, _FACTORY, name, ("moe", "quant_config"), _wrap_factory)
    wrapped = find(_PREPARE, _FACTORY, name)
    for loaded in [module for key, module in list(sys.modules.items()) if key.startswith("vllm.")]:
        if loaded.__dict__.get(name) is original:
            setattr(loaded, name, wrapped)


def _apply_experts() -> None:
    cls = find(_EXPERTS, _KERNEL, "FusedMoEExperts")
    method = cls.__dict__.get("is_supported_config")
    if not isinstance(method, staticmethod):
        raise SeamError(_EXPERTS, f"{_KERNEL}.FusedMoEExperts.is_supported_config is no static method")
    original = method.__func__
    if is_wrapped(original):
        return

    @functools.wraps(original)
    def is_supported_config(
        cls: Any, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
    ) -> tuple[bool, str | None]:
        supported, reason = original(cls, moe_config, weight_key, activation_key, activation_format)
        if not supported:
            return supported, reason
        from vllm_rose_plugin.layers.all_to_all_check import experts_refusal, is_ours

        if is_ours(moe_config.moe_parallel_config):
            reason = experts_refusal(cls, moe_config, activation_key)
        return reason is None, reason

    setattr(is_supported_config, MARK, True)
    cls.is_supported_config = staticmethod(is_supported_config)


def _apply_sequence() -> None:
    config = find(_SEQUENCE, "vllm.config", "ParallelConfig")
    inherited = config.__dict__.get("use_sequence_parallel_moe")
    if not isinstance(inherited, property) or inherited.fget is None:
        raise SeamError(_SEQUENCE, "ParallelConfig.use_sequence_parallel_moe is no property")
    original = inherited.fget
    if is_wrapped(original):
        return

    @functools.wraps(original)
    def use_sequence_parallel_moe(self: Any) -> bool:
        if self.all2all_backend != ALL2ALL:
            return bool(original(self))
        return self.enable_expert_parallel and self.tensor_parallel_size > 1 and self.data_parallel_size > 1

    setattr(use_sequence_parallel_moe, MARK, True)
    config.use_sequence_parallel_moe = property(use_sequence_parallel_moe)


def _apply_micro_batches() -> None:
    check = find(_MICRO_BATCHES, "vllm.config", "VllmConfig.__post_init__")
    code: Any = getattr(check, "__code__", None)
    consts = getattr(code, "co_consts", ())
    lists = [const for const in consts if isinstance(const, tuple) and set(const) >= _OVERLAPPING]
    if not lists:
        raise SeamError(_MICRO_BATCHES, f"VllmConfig.__post_init__ has no list with {', '.join(sorted(_OVERLAPPING))}")
    if any(ALL2ALL in known for known in lists):
        return
    widened = tuple((*const, ALL2ALL) if any(const is known for known in lists) else const for const in consts)
    check.__code__ = code.replace(co_consts=widened)


def _wrap_warm_up(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_warm_up_model(self: Any) -> Any:
        result = original(self)
        if self.vllm_config.parallel_config.all2all_backend == ALL2ALL:
            from vllm_rose_plugin.layers import all_to_all

            all_to_all.end_startup()
        return result

    return compile_or_warm_up_model


def _worker_seam(device: str, cls: str) -> Seam:
    name, module = f"all2all_warm_{device}", f"vllm.v1.worker.{device}_worker"
    target = f"{cls}.compile_or_warm_up_model"
    return Seam(
        name=name,
        module=module,
        target=target,
        kind="patch",
        why="while ranks load and compile they wait for each other longer than while they serve",
        upstream="none known",
        apply=lambda: wrap(name, module, target, ("self",), _wrap_warm_up),
    )


SEAMS = (
    Seam(
        name=_MANAGER,
        module=_COMMUNICATOR,
        target="DeviceCommunicatorBase.__init__",
        kind="patch",
        why="communicators choose their all-to-all manager from a list of names, and raise or fall back for others",
        upstream=_UPSTREAM,
        apply=lambda: wrap(
            _MANAGER, _COMMUNICATOR, "DeviceCommunicatorBase.__init__", ("self", "cpu_group", "device"), _wrap_init
        ),
    ),
    Seam(
        name=_PREPARE,
        module=_FACTORY,
        target="maybe_make_prepare_finalize",
        kind="patch",
        why="a prepare/finalize class from outside vLLM can't be selected by name",
        upstream=_UPSTREAM,
        apply=_apply_factory,
    ),
    Seam(
        name=_EXPERTS,
        module=_KERNEL,
        target="FusedMoEExperts.is_supported_config",
        kind="patch",
        why="experts that our exchange can't feed are refused before weights load, or passed over where vLLM chooses",
        upstream=_UPSTREAM,
        apply=_apply_experts,
    ),
    Seam(
        name=_SEQUENCE,
        module="vllm.config",
        target="ParallelConfig.use_sequence_parallel_moe",
        kind="patch",
        why="with tensor parallelism each rank is to send its share of the tokens, which goes by a list of names",
        upstream=_UPSTREAM,
        apply=_apply_sequence,
    ),
    Seam(
        name=_MICRO_BATCHES,
        module="vllm.config",
        target="VllmConfig.__post_init__",
        kind="patch",
        why="--enable-dbo is refused for backends that are not in a list, which is a constant of this function",
        upstream="none known",
        apply=_apply_micro_batches,
    ),
    _worker_seam("gpu", "Worker"),
    _worker_seam("cpu", "CPUWorker"),
)
