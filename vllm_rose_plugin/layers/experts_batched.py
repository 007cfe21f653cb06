"""The experts class for all-to-all backends whose tokens come sorted by expert: DeepEP low-latency, NIXL EP."""

import dataclasses
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig, FusedMoEQuantDesc
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate

from vllm_rose_plugin.kernels.contracts import Activation
from vllm_rose_plugin.kernels.moe_batched import launch, ops  # ops registers torch.ops.rose.moe_batched
from vllm_rose_plugin.kernels.moe_batched.config import expected_rows_of
from vllm_rose_plugin.kernels.moe_batched.family import FAMILY as MOE_BATCHED
from vllm_rose_plugin.kernels.moe_batched.family import BatchedShape
from vllm_rose_plugin.layers import self_check
from vllm_rose_plugin.layers.experts_base import RoseExperts, numerics

_CHECKED_ROWS = 256
"""Of an expert, at least, in the self-check."""


class RoseCuteDslBatchedExperts(RoseExperts):
    """Tokens ``[E_local, M, H]`` of which the first ``expert_num_tokens[e]`` are valid: quantize, w13, SwiGLU, w2.

    Router weights and the sum over experts are the all-to-all's. It is told to send tokens unquantized, since vLLM's
    batched ones can't hand over MXFP8: they ask for swizzled scales of all rows, which they then view expert by expert,
    and refuse to leave the quantization to the experts. Tokens that do come as codes with row-major scales ``[E_local,
    M, H/32]`` are taken as they are.
    """

    def __init__(
        self,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig,
        max_num_tokens: int,
        num_dispatchers: int,
    ) -> None:
        unquantized = dataclasses.replace(quant_config, _a1=FusedMoEQuantDesc(), _a2=FusedMoEQuantDesc())
        super().__init__(moe_config, unquantized, max_num_tokens, num_dispatchers)
        self.dispatched_tokens = max_num_tokens * num_dispatchers
        """Most tokens of a step, over all ranks; as many may go to one expert."""
        self_check.need(MOE_BATCHED, self._shape)

    def _shape(self, num_tokens: int) -> BatchedShape:
        config = self.moe_config
        assert self.max_num_tokens is not None and self.num_dispatchers is not None
        step_tokens = min(num_tokens, self.max_num_tokens) * self.num_dispatchers
        expected_rows = self._expected_rows(step_tokens, self.dispatched_tokens)
        # With all rows that there may be, the check's copies of the tokens could fill a GPU; kernels stay the same.
        enough = max(_CHECKED_ROWS, 2 * -(-expected_rows // config.num_local_experts))
        return BatchedShape(
            max_tokens=min(self.dispatched_tokens, enough),
            expected_rows=expected_rows,
            hidden_size=config.hidden_dim,
            intermediate_size=config.intermediate_size_per_partition,
            num_local_experts=config.num_local_experts,
            dtype=str(config.in_dtype).removeprefix("torch."),
            captured=self.captured,
            served_tokens=self.dispatched_tokens,
            **numerics(self.settings),
        )

    def _expected_rows(self, num_tokens: int, max_tokens: int) -> int:
        config = self.moe_config
        return expected_rows_of(
            num_tokens=num_tokens,
            top_k=config.experts_per_token,
            num_local_experts=config.num_local_experts,
            num_experts=config.num_experts,
            num_rows=config.num_local_experts * max_tokens,
        )

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

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

        Args:
            M: rows of an expert, those of all dispatchers.
            (others): as vLLM names them: N is 2 * I, K is H.
        """
        output = (local_num_experts, M, K)
        if self.target is None:
            return (0,), (0,), output
        size = ops.workspace_bytes(
            target=self.target,
            activation=Activation(self.settings.activation),
            max_tokens=M,
            num_local_experts=local_num_experts,
            hidden_size=K,
            intermediate_size=N // 2,
        )
        return (0,), (size // self.moe_config.in_dtype.itemsize,), output

    def _prepare(self, layer: Any) -> None:
        experts, rows, hidden_size = layer.w13_weight.shape
        launch.warm_up(
            device=layer.w13_weight.device,
            hidden_size=hidden_size,
            intermediate_size=rows // 2,
            num_local_experts=experts,
            most_rows=self._expected_rows(self.dispatched_tokens, self.dispatched_tokens),
            dtype=self.moe_config.in_dtype,
            **numerics(self.settings),
        )

    def apply(
        self,
        output: torch.Tensor,  # (E_local, M, H)
        hidden_states: torch.Tensor,  # (E_local, M, H) bf16/fp16/fp32, or e4m3 codes
        w1: torch.Tensor,  # (E_local, 2I, H) e4m3
        w2: torch.Tensor,  # (E_local, H, I) e4m3
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,  # (E_local, M, H/32) uint8 with codes
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write each valid token's result into ``output``; what lies past the counts is undefined."""
        if expert_tokens_meta is None or expert_tokens_meta.expert_num_tokens is None:
            raise ValueError("batched experts need expert_num_tokens from the all-to-all")
        experts, max_tokens, _ = hidden_states.shape
        on_gpu: dict[str, Any] = {}
        if self._layer is not None:
            on_gpu = {"workspace": workspace2.view(torch.uint8), **self._packed()}
        torch.ops.rose.moe_batched(
            hidden_states,
            a1q_scale,
            expert_tokens_meta.expert_num_tokens[:experts].to(torch.int32),
            w1,
            self.w1_scale,
            w2,
            self.w2_scale,
            out=output,
            expected_rows=self._expected_rows(self._step_tokens(), max_tokens),
            activation=self.settings.activation,
            rounding=self.settings.rounding,
            **on_gpu,
        )

    def _step_tokens(self) -> int:
        """Tokens of this step over all ranks, as far as the host knows; else the most that there can be."""
        metadata = get_forward_context().dp_metadata if is_forward_context_available() else None
        if metadata is None:
            return self.dispatched_tokens
        return min(self.dispatched_tokens, int(metadata.num_tokens_across_dp_cpu.sum()))
