"""The experts class that vLLM selects with ``--moe-backend rose_cutedsl``."""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey, kMxfp8Dynamic, kMxfp8Static
from vllm.platforms import current_platform

import vllm_rose_plugin.kernels.ops  # noqa: F401  registers torch.ops.rose
from vllm_rose_plugin.config import BACKEND
from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, Rounding
from vllm_rose_plugin.kernels.swiglu_quantize.family import FAMILY as SWIGLU_QUANTIZE
from vllm_rose_plugin.kernels.swiglu_quantize.family import SwigluShape
from vllm_rose_plugin.layers import checkpoint_check, report, self_check, settings
from vllm_rose_plugin.layers.log import logger


class RoseCuteDslExperts(mk.FusedMoEExpertsModular):
    """MXFP8 experts: route, dispatch, w13, SwiGLU, w2, weighted sum.

    Weights stay as the checkpoint has them: E4M3 ``[E_local, N, K]`` with row-major E8M0 scales ``[E_local, N, K/32]``,
    gate rows before up rows in w13.
    """

    def __init__(
        self,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
    ) -> None:
        super().__init__(moe_config, quant_config, max_num_tokens, num_dispatchers)
        self.settings = settings.current()
        report.add_layer("experts", self)
        self_check.need(SWIGLU_QUANTIZE, self._swiglu_shape)
        logger.warning_once(
            "%s: routing, dispatch, matrix products and combining of experts run in plain torch, which is slow", BACKEND
        )

    def _swiglu_shape(self, num_tokens: int) -> SwigluShape:
        return SwigluShape(
            num_tokens=num_tokens * self.moe_config.experts_per_token,
            intermediate_size=self.moe_config.intermediate_size_per_partition,
            dtype=str(self._gate_up_dtype(self.moe_config.in_dtype)).removeprefix("torch."),
            activation=Activation(self.settings.activation),
            rounding=Rounding(self.settings.rounding),
        )

    def _gate_up_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """As in a fused epilogue: SwiGLU sees fp32 where its result is quantized at once."""
        return torch.float32 if self.settings.activation == Activation.MXFP8.value else dtype

    # What is supported; vLLM turns the first False into the reason of its refusal.

    @staticmethod
    def is_supported_config(
        cls: type[mk.FusedMoEExperts],
        moe_config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        activation_format: mk.FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        """vLLM's checks, then those that it has no hook for."""
        supported, reason = mk.FusedMoEExpertsModular.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )
        if not supported:
            return supported, reason
        if _captures_cuda_graphs():
            return False, (
                "the torch reference kernels read expert counts on the host and can't be captured in CUDA graphs; "
                "add --enforce-eager"
            )
        parallel = moe_config.moe_parallel_config
        if parallel.enable_eplb:
            return False, "kernel does not support expert load balancing (--enable-eplb)"
        if parallel.use_all2all_kernels or parallel.dp_size > 1:
            return False, (
                f"kernel does not support data parallelism (data_parallel_size={parallel.dp_size}, --all2all-backend "
                f"{parallel.all2all_backend}); with data_parallel_size=1, tensor and expert parallelism work"
            )
        if moe_config.has_bias:
            return False, "kernel does not support biases on experts"
        for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta"):
            if getattr(moe_config, name, None) is not None:
                return False, f"kernel does not support {name}={getattr(moe_config, name)}"
        for name in ("hidden_dim", "intermediate_size_per_partition"):
            if getattr(moe_config, name) % MXFP8_BLOCK:
                return False, f"{name}={getattr(moe_config, name)} is not a multiple of {MXFP8_BLOCK}"
        return True, None

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True  # dispatch quantizes while it copies

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cpu() or current_platform.is_cuda()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        return (weight_key, activation_key) == (kMxfp8Static, kMxfp8Dynamic)

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SILU

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return True  # is_supported_config names what it refuses

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()  # moe_combine has done it

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No workspaces: the reference kernels allocate what they return."""
        return (0,), (0,), (M, K)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check what was loaded; called through the weights seam."""
        experts, rows, hidden_size = layer.w13_weight.shape
        intermediate_size = rows // 2
        prefix = getattr(layer, "layer_name", type(layer).__name__)
        for name, dtype, shape in (
            ("w13_weight", torch.float8_e4m3fn, (experts, rows, hidden_size)),
            ("w13_weight_scale", torch.uint8, (experts, rows, hidden_size // MXFP8_BLOCK)),
            ("w2_weight", torch.float8_e4m3fn, (experts, hidden_size, intermediate_size)),
            ("w2_weight_scale", torch.uint8, (experts, hidden_size, intermediate_size // MXFP8_BLOCK)),
        ):
            checkpoint_check.check_tensor(f"{prefix}.{name}", getattr(layer, name), dtype, shape)

    def apply(
        self,
        output: torch.Tensor,  # (T, H)
        hidden_states: torch.Tensor,  # (T, H) bf16/fp16/fp32
        w1: torch.Tensor,  # (E_local, 2I, H) e4m3
        w2: torch.Tensor,  # (E_local, H, I) e4m3
        topk_weights: torch.Tensor,  # (T, top_k)
        topk_ids: torch.Tensor,  # (T, top_k), global expert ids or -1
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,  # (E_global,) local id or -1
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the weighted, reduced result of this rank's experts into ``output``."""
        ops = torch.ops.rose
        how = {"activation": self.settings.activation, "rounding": self.settings.rounding}
        gate_up_dtype = self._gate_up_dtype(hidden_states.dtype)
        experts = w1.shape[0]
        counts, offsets, slots = ops.moe_route(topk_ids, num_local_experts=experts, expert_map=expert_map)
        tokens, scales = ops.moe_dispatch(hidden_states, slots, num_local_experts=experts, **how)
        gate_up = ops.grouped_gemm(tokens, scales, offsets, counts, w1, self.w1_scale, out_dtype=gate_up_dtype)
        tokens, scales = ops.swiglu_quantize(gate_up, **how)
        rows = ops.grouped_gemm(tokens, scales, offsets, counts, w2, self.w2_scale, out_dtype=hidden_states.dtype)
        weights = None if apply_router_weight_on_input else topk_weights  # then prepare has applied them
        output.copy_(ops.moe_combine(rows, slots, topk_weights=weights))


def _captures_cuda_graphs() -> bool:
    from vllm.config import CUDAGraphMode, get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None or not current_platform.is_cuda():
        return False
    return config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE)
