"""What ``--all2all-backend rose_nvlink`` can't serve, said before any weight is loaded."""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, QuantKey

from vllm_rose_plugin.config import ALL2ALL
from vllm_rose_plugin.kernels.dp_exchange.layout import MAX_RANKS, ExchangeShape, Payload

FLAG = f"--all2all-backend {ALL2ALL}"
TOKENS_FLAG = "--max-num-batched-tokens"
"""What a user changes to have other buffers."""


def is_ours(parallel: FusedMoEParallelConfig) -> bool:
    """Whether the tokens of a layer travel through our exchange."""
    return parallel.use_all2all_kernels and parallel.all2all_backend == ALL2ALL


def rank_tokens(moe_config: FusedMoEConfig) -> int:
    """Most tokens that one rank of the expert-parallel group sends in a step: those of a data-parallel rank, dealt out
    over its tensor-parallel ranks."""
    return -(-moe_config.max_num_tokens // max(1, moe_config.moe_parallel_config.sp_size))


def shape_of(moe_config: FusedMoEConfig, payload: Payload) -> ExchangeShape:
    """The exchange of a layer."""
    return ExchangeShape(
        hidden_size=moe_config.hidden_dim,
        top_k=moe_config.experts_per_token,
        num_experts=moe_config.num_experts,
        max_tokens=rank_tokens(moe_config),
        group_size=moe_config.moe_parallel_config.ep_size,
        payload=payload,
    )


def experts_refusal(
    cls: type[mk.FusedMoEExperts], moe_config: FusedMoEConfig, activation_key: QuantKey | None
) -> str | None:
    """Why a class of experts can't get its tokens through our exchange; None: it can.

    What a class itself says of expert parallelism, devices and quantization is not repeated here.

    Args:
        cls: of vLLM's or of ours.
        moe_config: of the layer.
        activation_key: how the class wants its tokens quantized; None: not.
    """
    if cls.is_monolithic():
        return f"it routes in the kernel that computes, and {ALL2ALL} needs the routing before it sends"
    if cls.activation_format() != mk.FusedMoEActivationFormat.Standard:
        return f"it takes tokens sorted by expert, and {ALL2ALL} hands them over as they come"
    if moe_config.in_dtype != torch.bfloat16:
        return f"{ALL2ALL} carries bfloat16 results, not {moe_config.in_dtype}: serve with --dtype bfloat16"
    if activation_key is not None and _amax_over_all_rows(activation_key):
        return f"it quantizes with one scale for all tokens of a step, which {ALL2ALL} leaves partly unused"
    if moe_config.is_lora_enabled:
        return f"{ALL2ALL} doesn't carry the tokens' LoRA adapters"
    shape = shape_of(moe_config, Payload.BF16)
    try:
        shape.check(setting=TOKENS_FLAG)
    except ValueError as error:
        return f"{ALL2ALL}: {error}{_ranks_cure(shape)}"
    return None


def _ranks_cure(shape: ExchangeShape) -> str:
    """The flags, where another number of ranks is what mends it."""
    if 2 <= shape.group_size <= MAX_RANKS and shape.num_experts % shape.group_size == 0:
        return ""
    return ": the ranks are --data-parallel-size times --tensor-parallel-size"


def _amax_over_all_rows(key: QuantKey) -> bool:
    return not key.scale.static and key.scale.group_shape == GroupShape.PER_TENSOR


def check_config(vllm_config: Any) -> None:
    """Refuse a configuration that names our backend and can't have it.

    Raises:
        ValueError: names the flag that mends it.
    """
    from vllm.platforms import current_platform

    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size <= 1 or not parallel.enable_expert_parallel:
        raise ValueError(
            f"{FLAG} is for data parallelism with expert parallelism: add --data-parallel-size N (it is "
            f"{parallel.data_parallel_size}, and must be above 1) and --enable-expert-parallel (it is "
            f"{'on' if parallel.enable_expert_parallel else 'off'}), or leave {FLAG} out."
        )
    if parallel.prefill_context_parallel_size > 1:
        raise ValueError(f"{FLAG} can't be combined with --prefill-context-parallel-size above 1.")
    if parallel.enable_elastic_ep:
        raise ValueError(f"{FLAG} can't be combined with --enable-elastic-ep: its buffers are for a fixed group.")
    if vllm_config.lora_config is not None:
        raise ValueError(f"{FLAG} can't be combined with --enable-lora.")
    model_config = vllm_config.model_config
    if model_config is not None and model_config.dtype != torch.bfloat16:
        raise ValueError(f"{FLAG} serves bfloat16 models, this is {model_config.dtype}: add --dtype bfloat16.")
    if not current_platform.is_cuda():
        _check_without_gpu(vllm_config, current_platform)
        return
    from vllm_rose_plugin.layers import gpu

    if gpu.obstacle():
        raise ValueError(f"{FLAG} can't serve here: {gpu.obstacle()}.")


def _check_without_gpu(vllm_config: Any, platform: Any) -> None:
    """What stands in for GPUs is meant for trying things out: CPU processes of one host, eager."""
    if not platform.is_cpu():
        raise ValueError(f"{FLAG} needs NVIDIA GPUs, or CPU processes of one host; this is {platform.device_name}.")
    if vllm_config.model_config is not None and not vllm_config.model_config.enforce_eager:
        raise ValueError(f"{FLAG} without a GPU: torch.compile can't look into the exchange; add --enforce-eager.")
