"""The experts class that vLLM selects with ``--moe-backend rose_cutedsl``."""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey, kMxfp8Dynamic, kMxfp8Static
from vllm.platforms import current_platform

import vllm_rose_plugin.kernels.moe_experts.ops
import vllm_rose_plugin.kernels.ops  # noqa: F401  both register torch.ops.rose
from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, Mxfp8Tensor, Rounding
from vllm_rose_plugin.kernels.gemm.checks import OUT_DTYPES
from vllm_rose_plugin.kernels.gemm.config import MAX_GROUPS
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.moe_combine.config import MAX_TOP_K
from vllm_rose_plugin.kernels.moe_experts import launch, memory
from vllm_rose_plugin.kernels.moe_experts.config import token_formats_of
from vllm_rose_plugin.kernels.moe_experts.family import FAMILY as MOE_EXPERTS
from vllm_rose_plugin.kernels.moe_experts.family import ExpertsShape
from vllm_rose_plugin.kernels.moe_route.launch import route_workspace
from vllm_rose_plugin.kernels.swiglu_quantize.family import FAMILY as SWIGLU_QUANTIZE
from vllm_rose_plugin.kernels.swiglu_quantize.family import SwigluShape
from vllm_rose_plugin.layers import checkpoint_check, gpu, report, self_check, settings, tuning

PACKED_W13, PACKED_W2, ROUTE = "rose_w13_scale", "rose_w2_scale", "rose_route_workspace"
"""Buffers that a layer gets on a GPU. They are in no state_dict."""


class RoseCuteDslExperts(mk.FusedMoEExpertsModular):
    """MXFP8 experts: route, dispatch, w13, SwiGLU, w2, weighted sum.

    Weights stay as the checkpoint has them: E4M3 ``[E_local, N, K]`` with row-major E8M0 scales ``[E_local, N, K/32]``,
    gate rows before up rows in w13. On a GPU that our kernels are compiled for, a layer also holds its scales in the
    order that its kernels read them in, 3 % of the weights more. Parameters, and with them state_dict, stay as loaded.
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
        self.target = gpu.target()
        self.most_tokens = gpu.most_tokens()
        self.captured = _captures_cuda_graphs()
        self._layer: Any = None  # buffers are looked up there at every call: vLLM may put others in their place
        report.add_layer("experts", self)
        if self.target is None:
            self_check.need(SWIGLU_QUANTIZE, self._swiglu_shape)
        else:
            self_check.need(MOE_EXPERTS, self._shape)

    def _shape(self, num_tokens: int) -> ExpertsShape:
        config = self.moe_config
        return ExpertsShape(
            num_tokens=num_tokens,
            hidden_size=config.hidden_dim,
            intermediate_size=config.intermediate_size_per_partition,
            num_local_experts=config.num_local_experts,
            num_experts=config.num_experts,
            top_k=config.experts_per_token,
            dtype=str(config.in_dtype).removeprefix("torch."),
            activation=Activation(self.settings.activation),
            rounding=Rounding(self.settings.rounding),
            captured=self.captured,
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
        target = gpu.target()
        if target is None and _captures_cuda_graphs():
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
        return (True, None) if target is None else _served_by_kernels(moe_config, target)

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
        """One workspace, for the kernels of a GPU; the reference kernels allocate what they return.

        vLLM lets `output` share memory with the first workspace, where a chunk's tokens would overwrite the results of
        the chunk before, so that one stays empty.
        """
        if self.target is None:
            return (0,), (0,), (M, K)
        size = memory.workspace_bytes(
            num_tokens=M,
            top_k=topk,
            num_local_experts=local_num_experts,
            hidden_size=K,
            intermediate_size=N // 2,
            token_formats=token_formats_of(self.target, Activation(self.settings.activation)),
        )
        return (0,), (size // self.moe_config.in_dtype.itemsize,), (M, K)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check what was loaded; on a GPU, also pack the scales and warm up. Called through the weights seam.

        A second call packs into the memory of the first: captured graphs go on reading it.
        """
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
        if self.target is None:
            return
        self._layer = layer
        for name, weight, scales in (
            (PACKED_W13, layer.w13_weight, layer.w13_weight_scale),
            (PACKED_W2, layer.w2_weight, layer.w2_weight_scale),
        ):
            before = getattr(layer, name, None)
            packed = pack_weight(
                Mxfp8Tensor(weight.data, scales.data.contiguous()),
                target=self.target,
                gate_up=name == PACKED_W13,
                out=before,
            )
            if before is None:
                layer.register_buffer(name, packed.scales, persistent=False)
        device = layer.w13_weight.device
        if getattr(layer, ROUTE, None) is None:
            layer.register_buffer(ROUTE, route_workspace(num_local_experts=experts, device=device), persistent=False)
        if self.settings.tune:
            tuning.tune_experts(self._shape(1), most_tokens=self.most_tokens, device=device)
            self_check.need(MOE_EXPERTS, self._shape)
        on_input = bool(getattr(layer, "apply_router_weight_on_input", False))
        launch.warm_up(
            device=device,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_local_experts=experts,
            num_experts=self.moe_config.num_experts,
            top_k=self.moe_config.experts_per_token,
            dtype=self.moe_config.in_dtype,
            max_tokens=self.most_tokens,
            has_map=getattr(layer, "expert_map", None) is not None,
            weighted=not on_input,
            activation=Activation(self.settings.activation),
            rounding=Rounding(self.settings.rounding),
        )

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
        if self._layer is not None:
            weights = None if apply_router_weight_on_input else topk_weights.float()  # else prepare has applied them
            ops.moe_experts(
                hidden_states,
                topk_ids.to(torch.int32).contiguous(),
                None if weights is None else weights.contiguous(),
                w1,
                self.w1_scale,
                w2,
                self.w2_scale,
                out=output,
                w13_packed=getattr(self._layer, PACKED_W13),
                w2_packed=getattr(self._layer, PACKED_W2),
                workspace=workspace2.view(torch.uint8),
                route_workspace=getattr(self._layer, ROUTE),
                expert_map=expert_map,
                num_experts=global_num_experts,
                activation=self.settings.activation,
                rounding=self.settings.rounding,
            )
            return
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


def _served_by_kernels(moe_config: FusedMoEConfig, target: str) -> tuple[bool, str | None]:
    """What the kernels of a GPU take, beyond what the reference does."""
    if settings.current().activation == Activation.BF16.value and not target.startswith("sm_90"):
        return False, (
            f"activation=bf16 is served on sm_90 only, this is {target}: set ROSE_ACTIVATION=mxfp8 or "
            '--additional-config \'{"rose": {"activation": "mxfp8"}}\''
        )
    if moe_config.in_dtype not in OUT_DTYPES:
        return False, f"the kernel writes bf16 or fp16, not {moe_config.in_dtype}: serve with --dtype bfloat16"
    if moe_config.experts_per_token > MAX_TOP_K:
        return False, f"the kernel takes top_k of 1 to {MAX_TOP_K}, the model has {moe_config.experts_per_token}"
    if moe_config.num_local_experts > MAX_GROUPS:
        return False, (
            f"the kernel takes up to {MAX_GROUPS} experts on a rank, here are {moe_config.num_local_experts}: "
            "add --enable-expert-parallel"
        )
    return True, None


def _captures_cuda_graphs() -> bool:
    from vllm.config import CUDAGraphMode, get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None or not current_platform.is_cuda():
        return False
    return config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE)
