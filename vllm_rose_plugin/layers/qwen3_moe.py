"""What vLLM's registry holds for ``Qwen3MoeForCausalLM``: its own model, whose attention we may adopt.

The class is called as vLLM's is, so that nothing vLLM derives from the name changes.
"""

from vllm.config import VllmConfig
from vllm.model_executor.models import qwen3_moe

from vllm_rose_plugin.layers.qk_norm import QkNormAttention, adopt


class RoseQwen3MoeAttention(QkNormAttention, qwen3_moe.Qwen3MoeAttention):
    """vLLM's, with our forward."""


class Qwen3MoeForCausalLM(qwen3_moe.Qwen3MoeForCausalLM):
    """vLLM's, and exactly that unless the settings name us."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        adopt(self, vllm_config, stock=qwen3_moe.Qwen3MoeAttention, ours=RoseQwen3MoeAttention)
