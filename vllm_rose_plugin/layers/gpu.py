"""What layers ask about the GPU they will run on."""

import functools
from importlib import metadata

from vllm.platforms import current_platform

from vllm_rose_plugin.config import BACKEND
from vllm_rose_plugin.kernels.jit.install import DSL, install_problems
from vllm_rose_plugin.kernels.jit.targets import TargetChoice, choose_target
from vllm_rose_plugin.layers.log import logger

_MOST_TOKENS = 8192
"""Warmed up to where no configuration says how many a step can have."""


@functools.cache
def _choice() -> TargetChoice:
    """The target, or None and why. Creates no CUDA context."""
    if not current_platform.is_cuda():
        return TargetChoice(None, f"the kernels run on NVIDIA GPUs and this is {current_platform.device_name}")
    problems = install_problems()
    if problems:
        return TargetChoice(None, f"the kernels can't be compiled: {'; '.join(problems)}")
    capability = current_platform.get_device_capability()
    if capability is None:
        return TargetChoice(None, "the GPU's compute capability is unknown")
    return choose_target(capability=(capability.major, capability.minor), dsl_version=metadata.version(DSL))


def obstacle() -> str:
    """Why no kernel of ours runs on this machine, in words; empty: they do."""
    choice = _choice()
    return "" if choice.target else choice.note


def target() -> str | None:
    """Compile target of the GPU that serves; None where the torch reference does, which is said once."""
    if obstacle():
        logger.warning_once("%s runs on its torch reference kernels, which are slow: %s", BACKEND, obstacle())
    return _choice().target


def target_or_reason() -> str:
    """The compile target, or why there is none; says nothing."""
    return _choice().target or obstacle()


def most_tokens() -> int:
    """Most tokens of a step under the configuration that is being built."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config.scheduler_config.max_num_batched_tokens if config is not None else _MOST_TOKENS
