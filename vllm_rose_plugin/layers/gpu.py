"""What layers ask about the GPU they will run on, and the compiling of their kernels before the first request."""

import functools
from importlib import metadata

import torch
from vllm.platforms import current_platform

from vllm_rose_plugin.config import BACKEND
from vllm_rose_plugin.kernels.contracts import Activation
from vllm_rose_plugin.kernels.gemm import launch, plan
from vllm_rose_plugin.kernels.gemm.checks import OUT_DTYPES
from vllm_rose_plugin.kernels.jit.install import DSL, install_problems
from vllm_rose_plugin.kernels.jit.targets import choose_target
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DeviceFacts, device_facts
from vllm_rose_plugin.layers.log import logger

_MOST_TOKENS = 8192
"""Warmed up to where no configuration says how many a step can have."""


@functools.cache
def target() -> str | None:
    """Compile target of the GPU that serves; None where the torch reference does, with a warning if a GPU is there."""
    if not current_platform.is_cuda():
        return None
    capability = current_platform.get_device_capability()
    problems = install_problems()
    if not problems and capability is not None:
        choice = choose_target(capability=(capability.major, capability.minor), dsl_version=metadata.version(DSL))
        if choice.target is not None:
            return choice.target
        problems = [choice.note]
    logger.warning_once("%s runs on its torch reference kernels, which are slow: %s", BACKEND, "; ".join(problems))
    return None


def most_tokens() -> int:
    """Most tokens of a step under the configuration that is being built."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config.scheduler_config.max_num_batched_tokens if config is not None else _MOST_TOKENS


def warm_linear(
    *,
    device: torch.device,
    n: int,
    k: int,
    bias: bool,
    dtype: torch.dtype,
    max_rows: int,
    activation: Activation,
    batch_invariant: bool,
) -> None:
    """Compile, or load, every GEMM that a linear layer ``[N, K]`` can need; all layers of a shape share them.

    Args:
        device: the GPU.
        bias: whether the layer has one; a row-parallel layer adds it on one rank only.
        dtype: of x and of the result.
        max_rows: most tokens.
        activation, batch_invariant: of the calls.
    """
    launch.prepare_device(device, max_rows=max_rows)
    _warm_linear(device_facts(device.index), n, k, bias, dtype, max_rows, activation, batch_invariant)


@functools.cache
def _warm_linear(
    facts: DeviceFacts,
    n: int,
    k: int,
    bias: bool,
    dtype: torch.dtype,
    max_rows: int,
    activation: Activation,
    batch_invariant: bool,
) -> None:
    for with_bias in {False, bias}:
        for config in plan.warm_configs(
            **facts._asdict(),
            num_groups=1,
            n=n,
            k=k,
            max_rows=max_rows,
            activation=activation,
            out_dtype=OUT_DTYPES[dtype],
            bias=with_bias,
            early_counts=True,
            batch_invariant=batch_invariant,
        ):
            plan.compile_config(config, target=facts.target)
