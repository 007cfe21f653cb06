"""``Qwen3MoeMTP``: one multi-token-prediction layer for Qwen3-MoE.

Structure of vLLM's Qwen3-Next MTP (``vllm/model_executor/models/qwen3_next_mtp.py``), with Qwen3-MoE's decoder layer
and its plain RMSNorm (``weight * x``). With h_t the target's hidden state after its final norm::

    x_t = fc(cat[pre_fc_norm_embedding(embed(token_t+1)), pre_fc_norm_hidden(h_t)])
    y_t = norm(layer(x_t))                        # attends to x_0 ... x_t
    token_t+2 = argmax(lm_head(y_t))              # embedding and output head are the target's

For further speculative tokens the same layer runs again, on its own y.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models import qwen3_moe
from vllm.model_executor.models.interfaces import MixtureOfExperts
from vllm.model_executor.models.utils import AutoWeightsLoader

from vllm_rose_plugin.checkpoint.draft import PREFIX, is_draft_tensor
from vllm_rose_plugin.layers import mtp_check
from vllm_rose_plugin.layers.mtp_config import draft_vllm_config, note_built
from vllm_rose_plugin.layers.qk_norm import adopt
from vllm_rose_plugin.layers.qwen3_moe import RoseQwen3MoeAttention


@support_torch_compile
class Qwen3MoeMultiTokenPredictor(nn.Module):
    """Everything between the target's hidden states and the draft's; vLLM compiles it."""

    hf_to_vllm_mapper = qwen3_moe.Qwen3MoeModel.hf_to_vllm_mapper
    embed_tokens: nn.Module
    """The target's: vLLM sets it when both models are loaded."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.pre_fc_norm_embedding = RMSNorm(hidden_size, eps=eps)
        self.pre_fc_norm_hidden = RMSNorm(hidden_size, eps=eps)
        # Never quantized: it is small beside the experts, and every draft token goes through it.
        self.fc = ColumnParallelLinear(
            2 * hidden_size,
            hidden_size,
            bias=False,
            gather_output=True,
            return_bias=False,
            quant_config=None,
            prefix=f"{prefix}.fc",
        )
        self.layers = nn.ModuleList([qwen3_moe.Qwen3MoeDecoderLayer(vllm_config, prefix=f"{prefix}.layers.0")])
        self.norm = RMSNorm(hidden_size, eps=eps)

    def forward(
        self,
        input_ids: torch.Tensor,  # (T,) the tokens after those of hidden_states
        positions: torch.Tensor,  # (T,)
        hidden_states: torch.Tensor,  # (T, H)
        inputs_embeds: torch.Tensor | None = None,  # (T, H) in place of input_ids
    ) -> torch.Tensor:
        """``[T, H]``, for the output head and for the next speculative step."""
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        pair = self.pre_fc_norm_embedding(inputs_embeds), self.pre_fc_norm_hidden(hidden_states)
        hidden_states = self.fc(torch.cat(pair, dim=-1))
        hidden_states, residual = self.layers[0](positions, hidden_states, None)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the parameters; q, k and v, and the experts, go to their shares of the fused ones."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


class Qwen3MoeMTP(nn.Module, MixtureOfExperts):
    """The draft model that vLLM's registry holds under this name.

    It has neither embedding nor output head of its own: vLLM gives it the target's.
    """

    packed_modules_mapping = {  # noqa: RUF012  vLLM reads it from the class
        "qkv_proj": ["q_proj", "k_proj", "v_proj"]
    }
    lm_head: ParallelLMHead
    update_physical_experts_metadata = qwen3_moe.Qwen3MoeForCausalLM.update_physical_experts_metadata

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        mtp_check.check_config(vllm_config)
        note_built()
        own = draft_vllm_config(vllm_config, model_class=type(self))
        self.vllm_config = own
        self.config = own.model_config.hf_config
        with set_current_vllm_config(own, prefix=prefix):  # experts look their backend up there
            self.model = Qwen3MoeMultiTokenPredictor(vllm_config=own, prefix=PREFIX.removesuffix("."))
        adopt(self, own, stock=qwen3_moe.Qwen3MoeAttention, ours=RoseQwen3MoeAttention)
        self.logits_processor = LogitsProcessor(self.config.vocab_size)
        self._describe_experts()

    def _describe_experts(self) -> None:
        """What vLLM's expert load balancing asks a model for."""
        layer: Any = self.model.layers[0]
        moe: qwen3_moe.Qwen3MoeSparseMoeBlock = layer.mlp
        self.moe_layers = [moe.experts]
        self.num_moe_layers = 1
        self.num_expert_groups = 1
        self.num_shared_experts = 0
        self.num_logical_experts = moe.n_logical_experts
        self.num_physical_experts = moe.n_physical_experts
        self.num_local_physical_experts = moe.n_local_physical_experts
        self.num_routed_experts = moe.n_routed_experts
        self.num_redundant_experts = moe.n_redundant_experts

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[T, H]``, the target's embeddings."""
        embeddings: torch.Tensor = self.model.embed_tokens(input_ids)
        return embeddings

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """``[T, H]``; see :class:`Qwen3MoeMultiTokenPredictor`."""
        drafted: torch.Tensor = self.model(input_ids, positions, hidden_states, inputs_embeds)
        return drafted

    def compute_logits(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor | None:
        """``[T, V]``, by the target's output head."""
        return self.logits_processor(self.lm_head, hidden_states)

    def get_top_tokens(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor:
        """``[T]`` most likely tokens, for vLLM's ``use_local_argmax_reduction``."""
        return self.logits_processor.get_top_tokens(self.lm_head, hidden_states)

    def is_unused_checkpoint_weight(self, name: str) -> bool:
        """vLLM skips files of the target's checkpoint that hold nothing else."""
        return not is_draft_tensor(name)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load ``mtp.*`` from a draft directory, or from the target's checkpoint beside everything else."""
        mtp_check.check_files(self.vllm_config)

        def renamed() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                if is_draft_tensor(name):
                    yield "model." + name.removeprefix(PREFIX), weight

        return AutoWeightsLoader(self).load_weights(renamed())
