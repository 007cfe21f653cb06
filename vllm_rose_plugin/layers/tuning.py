"""Tuning at start-up, where the setting ``tune`` asks for it: before a layer's kernels are compiled and checked."""

import functools
from collections.abc import Callable

import torch

from vllm_rose_plugin.kernels.gemm.family import LinearShape, call_of
from vllm_rose_plugin.kernels.gemm.tune import TOKENS, Job, tune_and_log
from vllm_rose_plugin.kernels.moe_experts.config import LayerShape
from vllm_rose_plugin.kernels.moe_experts.family import ExpertsShape
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts
from vllm_rose_plugin.kernels.warm import expert_jobs


def tune_linear(shape_of: Callable[[int], LinearShape], *, most_tokens: int, device: torch.device) -> None:
    """Measure what the table lacks for a linear layer.

    Args:
        shape_of: token count to call.
        most_tokens: of a step.
        device: that the layer is on.
    """
    facts = device_facts(device.index)
    _tune(tuple(Job(call_of(shape_of(each), *facts), each) for each in _tokens(most_tokens)), device)


def tune_experts(shape: ExpertsShape, *, most_tokens: int, device: torch.device) -> None:
    """Measure what the table lacks for a layer of experts.

    Args:
        shape: of a call of the layer, with any number of tokens.
        most_tokens, device: as in :func:`tune_linear`.
    """
    facts = device_facts(device.index)
    layer = LayerShape(
        target=facts.target,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_local_experts=shape.num_local_experts,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        activation=shape.activation,
    )
    jobs = expert_jobs(
        layer, sm_count=facts.sm_count, tokens=_tokens(most_tokens), dtype=shape.dtype, rounding=shape.rounding
    )
    _tune(tuple(jobs), device)


def _tokens(most: int) -> list[int]:
    return [each for each in TOKENS if each < most] + [most]


@functools.cache
def _tune(jobs: tuple[Job, ...], device: torch.device) -> None:
    """Once for layers that are alike."""
    with torch.cuda.device(device):
        tune_and_log(jobs)
        torch.cuda.empty_cache()  # vLLM measures what is free
