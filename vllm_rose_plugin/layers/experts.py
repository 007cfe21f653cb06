"""The experts class that vLLM selects with ``--moe-backend rose_cutedsl`` for tokens in vLLM's standard format."""

from collections.abc import Sequence
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm import envs
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey

import vllm_rose_plugin.kernels.ops  # noqa: F401  registers torch.ops.rose
from vllm_rose_plugin.config import ALL2ALL, BATCHED_ALL2ALL, RoseConfig
from vllm_rose_plugin.kernels.contracts import Activation, Rounding
from vllm_rose_plugin.kernels.moe_combine.config import MAX_TOP_K
from vllm_rose_plugin.kernels.moe_experts import launch, memory
from vllm_rose_plugin.kernels.moe_experts.config import token_formats_of
from vllm_rose_plugin.kernels.moe_experts.family import FAMILY as MOE_EXPERTS
from vllm_rose_plugin.kernels.moe_experts.family import ExpertsShape
from vllm_rose_plugin.kernels.moe_experts.ops import WHOLE_SETTING  # which registers torch.ops.rose too
from vllm_rose_plugin.kernels.moe_experts.ways import registered
from vllm_rose_plugin.kernels.moe_route.launch import route_workspace
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8
from vllm_rose_plugin.kernels.swiglu_quantize.family import FAMILY as SWIGLU_QUANTIZE
from vllm_rose_plugin.kernels.swiglu_quantize.family import SwigluShape
from vllm_rose_plugin.layers import expert_weights, gpu, kept_buffers, self_check, tuning
from vllm_rose_plugin.layers.all_to_all_check import is_ours
from vllm_rose_plugin.layers.experts_base import RoseExperts, numerics

ROUTE = "rose_route_workspace"
"""A buffer that a layer gets on a GPU, in no state_dict."""


def senders_of(moe_config: FusedMoEConfig) -> int:
    """Ranks whose tokens come to this one's experts in a step."""
    parallel = moe_config.moe_parallel_config
    return parallel.ep_size if is_ours(parallel) else 1


def quantizes_as_senders_do(config: RoseConfig) -> bool:
    """Whether tokens could be quantized before they come here."""
    return (config.activation, config.rounding) == (Activation.MXFP8.value, Rounding.RCEIL.value)


def gets_codes(moe_config: FusedMoEConfig, config: RoseConfig) -> bool:
    """Whether tokens come as codes."""
    return quantizes_as_senders_do(config) and is_ours(moe_config.moe_parallel_config)


def experts_shape(
    moe_config: FusedMoEConfig, config: RoseConfig, num_tokens: int, *, captured: bool, senders: int, quantized: bool
) -> ExpertsShape:
    """A layer's call.

    Args:
        moe_config, config: of the layer.
        num_tokens: of a step of one rank.
        captured: whether calls are captured into CUDA graphs.
        senders: see :func:`senders_of`.
        quantized: see :func:`gets_codes`.
    """
    return ExpertsShape(
        num_tokens=num_tokens * senders,
        hidden_size=moe_config.hidden_dim,
        intermediate_size=moe_config.intermediate_size_per_partition,
        num_local_experts=moe_config.num_local_experts,
        num_experts=moe_config.num_experts,
        top_k=moe_config.experts_per_token,
        dtype=str(moe_config.in_dtype).removeprefix("torch."),
        captured=captured,
        quantized=quantized,
        batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        **numerics(config),
    )


def measure_kernels(shape: ExpertsShape, config: RoseConfig, *, most_tokens: int, device: torch.device) -> None:
    """What decides which kernels a layer's calls launch: before any are checked, and once for layers that are alike.

    Args:
        shape: of a call of the layer, with any number of tokens.
        config: the settings in force.
        most_tokens: of a step, those of all senders.
        device: that the layer is on.
    """
    if config.tune and not shape.batch_invariant:
        tuning.tune_experts(shape, most_tokens=most_tokens, device=device)
    self_check.ask_for_one_launch(shape, most_tokens=most_tokens, device=device)


class RoseCuteDslExperts(RoseExperts):
    """Tokens ``[T, H]`` with their experts' ids: route, dispatch, w13, SwiGLU, w2, weighted sum."""

    def __init__(self, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig, *batched: int | None) -> None:
        super().__init__(moe_config, quant_config, *batched)
        self.senders = senders_of(moe_config)
        """Ranks whose tokens come here, each with room for as many."""
        self.most_tokens *= self.senders
        self.gets_codes = gets_codes(moe_config, self.settings)
        if self.target is None:
            self_check.need(SWIGLU_QUANTIZE, self._swiglu_shape)
        else:
            self_check.need(MOE_EXPERTS, self._shape)

    @property
    def takes_codes(self) -> bool:
        return quantizes_as_senders_do(self.settings)

    def _shape(self, num_tokens: int) -> ExpertsShape:
        return experts_shape(
            self.moe_config,
            self.settings,
            num_tokens,
            captured=self.captured,
            senders=self.senders,
            quantized=self.gets_codes,
        )

    def _swiglu_shape(self, num_tokens: int) -> SwigluShape:
        return SwigluShape(
            num_tokens=num_tokens * self.senders * self.moe_config.experts_per_token,
            intermediate_size=self.moe_config.intermediate_size_per_partition,
            dtype=str(self._gate_up_dtype(self.moe_config.in_dtype)).removeprefix("torch."),
            **numerics(self.settings),
        )

    @staticmethod
    def is_supported_config(
        cls: type[mk.FusedMoEExperts],
        moe_config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        activation_format: mk.FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        """As all our experts, with TP and EP of one data-parallel rank, or of several with our all-to-all."""
        supported, reason = RoseExperts.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )
        if not supported:
            return supported, reason
        parallel = moe_config.moe_parallel_config
        if not is_ours(parallel) and (parallel.use_all2all_kernels or parallel.dp_size > 1):
            others = " or ".join((*BATCHED_ALL2ALL, ALL2ALL))
            return False, (
                f"kernel does not support data parallelism (data_parallel_size={parallel.dp_size}, --all2all-backend "
                f"{parallel.all2all_backend}) except with --all2all-backend {others}; with "
                "data_parallel_size=1, tensor and expert parallelism work"
            )
        if envs.VLLM_BATCH_INVARIANT and gpu.target() is None:
            return False, (
                "VLLM_BATCH_INVARIANT=1 can't be kept by the torch reference kernels, which add up one or two tokens "
                "in another order than more: unset it"
            )
        if envs.VLLM_BATCH_INVARIANT and is_ours(parallel):
            return False, f"VLLM_BATCH_INVARIANT=1 is not served with --all2all-backend {ALL2ALL}: unset it"
        if gpu.target() is not None and moe_config.experts_per_token > MAX_TOP_K:
            return False, f"the kernel takes top_k of 1 to {MAX_TOP_K}, the model has {moe_config.experts_per_token}"
        return True, None

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True  # is_supported_config names what it refuses

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True  # dispatch quantizes while it copies

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

    def _prepare(self, layer: Any) -> None:
        experts, rows, hidden_size = layer.w13_weight.shape
        device = layer.w13_weight_scale.device  # weights in parts have a parameter without memory
        route = kept_buffers.find(layer, ROUTE)
        if route is None:
            route = route_workspace(num_local_experts=experts, device=device)
        kept_buffers.put(layer, ROUTE, route)
        measure_kernels(self._shape(1), self.settings, most_tokens=self.most_tokens, device=device)
        self_check.need(MOE_EXPERTS, self._shape)
        if self._parts is not None:
            self_check.need_kernels(MOE_EXPERTS, f"experts in parts: {WHOLE_SETTING}")
        launch.warm_up(
            device=device,
            hidden_size=hidden_size,
            intermediate_size=rows // 2,
            num_local_experts=experts,
            num_experts=self.moe_config.num_experts,
            top_k=self.moe_config.experts_per_token,
            dtype=self.moe_config.in_dtype,
            max_tokens=self.most_tokens,
            has_map=getattr(layer, "expert_map", None) is not None,
            weighted=not getattr(layer, "apply_router_weight_on_input", False),
            quantized=self.gets_codes,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
            **self._ways(),
            **numerics(self.settings),
        )

    def _ways(self) -> dict[str, Any]:
        """Of weights in parts, what their kernels are compiled for."""
        parts = self._parts
        if parts is None:
            return {}
        counts = tuple(parts.splits[stem].parts if stem in parts.splits else 1 for stem in ("w13", "w2"))
        return {"ways": registered(parts.ways).ways, "parts": counts}

    def apply(
        self,
        output: torch.Tensor,  # (T, H)
        hidden_states: torch.Tensor,  # (T, H) bf16/fp16/fp32, or e4m3 codes where takes_codes
        w1: torch.Tensor,  # (E_local, 2I, H) e4m3
        w2: torch.Tensor,  # (E_local, H, I) e4m3
        topk_weights: torch.Tensor,  # (T, top_k)
        topk_ids: torch.Tensor,  # (T, top_k), global expert ids or -1
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,  # (E_global,) local id or -1
        a1q_scale: torch.Tensor | None,  # (T, H/32) uint8 with codes
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the weighted, reduced result of this rank's experts into ``output``."""
        ops = torch.ops.rose
        if self._layer is not None and self._parts is not None:
            weights = None if apply_router_weight_on_input else topk_weights.float()
            ops.moe_experts_split(
                hidden_states,
                topk_ids.to(torch.int32).contiguous(),
                None if weights is None else weights.contiguous(),
                *self._parts.operands("w13", w1, getattr(self._layer, expert_weights.PACKED_W13, None)),
                *self._parts.operands("w2", w2, getattr(self._layer, expert_weights.PACKED_W2, None)),
                ways=self._parts.ways,
                out=output,
                workspace=workspace2.view(torch.uint8),
                route_workspace=getattr(self._layer, ROUTE),
                expert_map=expert_map,
                num_experts=global_num_experts,
                activation=self.settings.activation,
                rounding=self.settings.rounding,
                x_scales=a1q_scale,
            )
            return
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
                workspace=workspace2.view(torch.uint8),
                route_workspace=getattr(self._layer, ROUTE),
                expert_map=expert_map,
                num_experts=global_num_experts,
                activation=self.settings.activation,
                rounding=self.settings.rounding,
                x_scales=a1q_scale,
                batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
                **self._packed(),
            )
            return
        if a1q_scale is not None:
            # Every value is one of bf16, and quantizing it again gives the same values.
            hidden_states = dequantize_mxfp8(hidden_states, a1q_scale).to(self.moe_config.in_dtype)
        how = {"activation": self.settings.activation, "rounding": self.settings.rounding}
        experts = w1.shape[0]
        counts, offsets, slots = ops.moe_route(topk_ids, num_local_experts=experts, expert_map=expert_map)
        tokens, scales = ops.moe_dispatch(hidden_states, slots, num_local_experts=experts, **how)
        out_dtype, gate_up_dtype = hidden_states.dtype, self._gate_up_dtype(hidden_states.dtype)
        products = []
        for weight in self._reference_weights("w13", w1, self.w1_scale):
            gate_up = ops.grouped_gemm(tokens, scales, offsets, counts, *weight, out_dtype=gate_up_dtype)
            products.append(ops.swiglu_quantize(gate_up, **how))
        tokens, scales = (_side_by_side(columns) for columns in zip(*products, strict=True))
        columns = [
            ops.grouped_gemm(tokens, scales, offsets, counts, *weight, out_dtype=out_dtype)
            for weight in self._reference_weights("w2", w2, self.w2_scale)
        ]
        rows = _side_by_side(columns)
        weights = None if apply_router_weight_on_input else topk_weights  # then prepare has applied them
        output.copy_(ops.moe_combine(rows, slots, topk_weights=weights))

    def _reference_weights(self, stem: str, codes: Any, scales: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(codes, row-major scales) of each part, or of the whole weight."""
        if self._parts is None or stem not in self._parts.splits:
            return [(codes, scales)]
        return list(zip(self._parts.codes[stem], self._parts.row_major[stem], strict=True))


def _side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
