"""The settings in force while vLLM builds and loads a model."""

from typing import Any

from vllm_rose_plugin.config import RoseConfig


def current() -> RoseConfig:
    """Settings of the vLLM configuration that is being built; defaults and ``ROSE_*`` outside of one."""
    from vllm.config import get_current_vllm_config_or_none

    vllm_config: Any = get_current_vllm_config_or_none()
    return RoseConfig.load(vllm_config.additional_config if vllm_config is not None else None)
