"""What vLLM's registry holds for ``Qwen3MoeForCausalLM``: its own model, whose attention we may adopt.

The class is called as vLLM's is, so that nothing vLLM derives from the name changes.
"""

from collections.abc import Iterable

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models import qwen3_moe

from vllm_rose_plugin.checkpoint.draft import is_draft_tensor
from vllm_rose_plugin.layers.qk_norm import QkNormAttention, adopt


class RoseQwen3MoeAttention(QkNormAttention, qwen3_moe.Qwen3MoeAttention):
    """vLLM's, with our forward."""


class Qwen3MoeForCausalLM(qwen3_moe.Qwen3MoeForCausalLM):
    """vLLM's, and exactly that unless the settings name us."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        adopt(self, vllm_config, stock=qwen3_moe.Qwen3MoeAttention, ours=RoseQwen3MoeAttention)

    def is_unused_checkpoint_weight(self, name: str) -> bool:
        """vLLM skips files that hold nothing but an attached MTP draft, whose tensors the draft model loads."""
        return is_draft_tensor(name)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As vLLM's, past an attached MTP draft, which vLLM's would refuse as unknown tensors."""
        return super().load_weights((name, weight) for name, weight in weights if not is_draft_tensor(name))
