"""How a layer's tokens get to its experts and back with ``--all2all-backend rose_nvlink``.

vLLM calls prepare before the experts and finalize after them. Each is cut in two: the first half sends, the second, a
hook, waits; between them run the shared experts, or another micro-batch. Where neither does, the hook does both, which
a small step has in one launch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import get_current_vllm_config_or_none
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.v1.worker.ubatching import dbo_current_ubatch_id, dbo_enabled, dbo_maybe_run_recv_hook

from vllm_rose_plugin.config import ALL2ALL
from vllm_rose_plugin.kernels.call_counts import count
from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.dp_exchange.interface import Exchange, ReceivedTokens
from vllm_rose_plugin.kernels.dp_exchange.layout import Payload
from vllm_rose_plugin.layers.all_to_all import RoseAll2AllManager
from vllm_rose_plugin.layers.all_to_all_check import experts_refusal, shape_of
from vllm_rose_plugin.layers.experts_base import RoseExperts
from vllm_rose_plugin.layers.group_exchange import GroupExchange

_SHARED_EXPERTS = (
    "n_shared_experts",
    "num_shared_experts",
    "moe_num_shared_experts",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
)
"""Numbers and sizes by which models' configurations have shared experts."""


@dataclass
class _Step:
    """What finalize must know of prepare."""

    exchange: Exchange
    topk_ids: torch.Tensor  # [T, top_k] int32, of this rank's tokens
    received: ReceivedTokens | None = None


class RosePrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):
    """Tokens travel as MXFP8 to experts of ours that quantize them so anyway, else as bf16, and are quantized there.

    Experts get ``[R, H]`` rows of which the first ones are used; ids of the others, and of a used row's experts that
    are elsewhere, name none or an expert of another rank, which the expert map leaves out. Router weights are applied
    by the experts or, where they leave it to vLLM, on their rank before rows go back.
    """

    def __init__(self, *, manager: RoseAll2AllManager, moe_config: FusedMoEConfig) -> None:
        """Nothing is shared yet: that needs the experts.

        Args:
            manager: of the expert-parallel group.
            moe_config: of the layer.
        """
        super().__init__()
        self._manager, self._moe_config = manager, moe_config
        vllm_config = get_current_vllm_config_or_none()
        # With EPLB vLLM runs shared experts before it routes, but for all-to-alls of a list (shared_experts.py).
        balanced = moe_config.moe_parallel_config.enable_eplb
        self._shared_experts = vllm_config is not None and not balanced and has_shared_experts(vllm_config.model_config)
        self._group: GroupExchange | None = None
        self._steps: dict[int, _Step] = {}
        self._ours = False

    def post_init_setup(self, fused_experts: mk.FusedMoEExperts) -> None:
        """Get buffers that suit the experts; collective.

        Raises:
            ValueError: these experts can't be served.
        """
        refusal = experts_refusal(type(fused_experts), self._moe_config, None)
        if refusal:
            raise ValueError(f"--all2all-backend {ALL2ALL} can't serve {type(fused_experts).__name__}: {refusal}.")
        self._ours = isinstance(fused_experts, RoseExperts)
        codes = isinstance(fused_experts, RoseExperts) and fused_experts.takes_codes
        shape = shape_of(self._moe_config, Payload.MXFP8 if codes else Payload.BF16)
        self._group = self._manager.get_handle({"shape": shape})

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        return None  # of a standard format

    def num_dispatchers(self) -> int:
        return self._manager.world_size

    def output_is_reduced(self) -> bool:
        return True

    def supports_async(self) -> bool:
        return True

    # ---- to the experts ----

    def prepare_async(
        self,
        a1: torch.Tensor,  # (T, H)
        topk_weights: torch.Tensor,  # (T, top_k)
        topk_ids: torch.Tensor,  # (T, top_k), experts over all ranks
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool,
    ) -> tuple[Callable, mk.ReceiverType]:
        """Send; the hook waits for what the other ranks send. Without another micro-batch the hook does both."""
        assert self._group is not None, "post_init_setup comes first"
        if apply_router_weight_on_input:
            if topk_ids.size(1) != 1:
                raise ValueError(f"router weights on the experts' input need top_k 1, the model has {topk_ids.size(1)}")
            a1 = a1 * topk_weights.to(a1.dtype)
        micro_batch = dbo_current_ubatch_id()
        step = _Step(self._group.of(micro_batch), topk_ids.to(torch.int32).contiguous())
        self._steps[micro_batch] = step
        step_tokens = _step_tokens()
        count("dp_dispatch", "rose" if a1.is_cuda else "reference")
        a1, topk_weights = a1.contiguous(), topk_weights.float().contiguous()
        send: dict[str, Any] = {"topk_ids": step.topk_ids, "topk_weights": topk_weights, "step_tokens": step_tokens}
        overlaps = dbo_enabled()
        if overlaps:
            step.exchange.dispatch_send(a1, **send)

        def wait() -> None:
            if overlaps:
                step.received = step.exchange.dispatch_receive(step_tokens=step_tokens)
            else:
                step.received = step.exchange.dispatch(a1, **send)

        def receiver() -> mk.PrepareResultType:
            received = step.received
            assert received is not None, "the hook comes first"
            ids = _over_all_ranks(received.topk_ids, exchange=step.exchange, skips_none=self._ours)
            tokens, scales = _as_experts_want(received.tokens, quant_config, defer_input_quant)
            return tokens, scales, None, ids, received.topk_weights

        return wait, receiver

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool,
    ) -> mk.PrepareResultType:
        hook, receiver = self.prepare_async(
            a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config,
            defer_input_quant,
        )  # fmt: skip
        hook()
        return receiver()

    # ---- and back ----

    def finalize_async(
        self,
        output: torch.Tensor,  # (T, H)
        fused_expert_output: torch.Tensor,  # (R, H), or (R, top_k, H) where the experts leave the sum to us
        topk_weights: torch.Tensor,  # (R, top_k)
        topk_ids: torch.Tensor,  # (R, top_k)
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> tuple[Callable, Callable]:
        """Send the rows back; the hook waits for those of this rank's tokens and adds them into `output`.

        Where nothing runs before the hook, it does both.
        """
        micro_batch = dbo_current_ubatch_id()
        step = self._steps.pop(micro_batch)
        assert step.received is not None
        if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            weight_and_reduce_impl = TopKWeightAndReduceContiguous()
        rows = weight_and_reduce_impl.apply(
            output=None,
            fused_expert_output=fused_expert_output,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )
        dbo_maybe_run_recv_hook()
        count("dp_combine", "rose" if rows.is_cuda else "reference")
        received, overlaps = step.received, dbo_enabled() or self._shared_experts
        if overlaps:
            step.exchange.combine_send(rows, received=received)

        def wait() -> None:
            if overlaps:
                step.exchange.combine_receive(topk_ids=step.topk_ids, out=output)
            else:
                step.exchange.combine(rows, received=received, topk_ids=step.topk_ids, out=output)

        return wait, lambda: None

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> None:
        hook, _ = self.finalize_async(
            output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
        )
        hook()


def has_shared_experts(model_config: Any) -> bool:
    """Whether a model's layers have experts that all tokens go to, which run while results travel back.

    Where a model has them under a name that isn't known here, they run before its results are sent.

    Args:
        model_config: of vLLM; None: no model.
    """
    config = getattr(model_config, "hf_text_config", None)
    return any(bool(getattr(config, name, 0)) for name in _SHARED_EXPERTS)


def _step_tokens() -> int | None:
    """Most tokens of a rank in this step, which all ranks know on the host; None: outside of one."""
    metadata = get_forward_context().dp_metadata if is_forward_context_available() else None
    sizes = metadata.local_sizes if metadata is not None else None
    return max(1, *sizes) if sizes else None


def _over_all_ranks(topk_ids: torch.Tensor, *, exchange: Exchange, skips_none: bool) -> torch.Tensor:
    """Numbers of experts over all ranks, for numbers on this one; -1 becomes an expert of another rank.

    Not every class of experts skips an id of -1, but all skip an expert that isn't here.

    Args:
        topk_ids: int32, -1 where the expert is elsewhere.
        exchange: that they came through.
        skips_none: -1 may stay.
    """
    local = exchange.shape.num_local_experts
    if exchange.rank:
        return topk_ids + exchange.rank * local  # -1 becomes the last expert of the rank before
    return topk_ids if skips_none else topk_ids.where(topk_ids >= 0, local)


def _as_experts_want(
    tokens: torch.Tensor | Mxfp8Tensor, quant_config: FusedMoEQuantConfig, defer_input_quant: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(tokens, scales): codes as they came; bf16 quantized as the experts ask, unless they do it themselves."""
    if isinstance(tokens, Mxfp8Tensor):
        return tokens.codes, tokens.scales
    if defer_input_quant:
        return tokens, None
    scale = quant_config.a1_gscale if quant_config.use_nvfp4_w4a4 else quant_config.a1_scale
    return moe_kernel_quantize_input(
        tokens,
        scale,
        quant_dtype=quant_config.quant_dtype,
        per_act_token_quant=quant_config.per_act_token_quant,
        block_shape=quant_config.block_shape,
        is_scale_swizzled=quant_config.is_scale_swizzled,
        mx_alignment=quant_config.mx_alignment,
    )
