"""Sizes of a model's layers on one rank, read off its config.json: those that our kernels serve.

Knows Qwen3-MoE, its MTP draft, and Qwen3.5's MoE models. Which linear layers are quantized is what ``rose quantize``
makes of a model. Shapes and splits are those of vLLM 0.33's model files (Apache-2.0, github.com/vllm-project/vllm,
vllm/model_executor/models/qwen3_moe.py, qwen3_next.py, qwen3_5.py, and layers/mamba/gdn), read and described here in
our own words.
"""

from dataclasses import dataclass
from typing import Any

QWEN3_MOE = ("qwen3_moe", "qwen3_moe_mtp")
QWEN3_5 = ("qwen3_5_moe", "qwen3_5_moe_text")
MODEL_TYPES = (*QWEN3_MOE, *QWEN3_5)
"""`model_type` of the config.json that this module knows the layers of: a model, an MTP draft in MXFP8 for one, a model
with a vision tower (which isn't quantized) around its language model, and the language model alone."""

Linear = tuple[int, int, bool]
"""(N, K, bias)."""


@dataclass(frozen=True)
class RankShapes:
    """Sizes of a model on one rank."""

    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    expert_size: int
    """Of an expert's intermediate vector on this rank."""
    num_experts: int
    """On all ranks."""
    num_local_experts: int
    """The most that a rank has."""
    top_k: int
    eps: float
    dtype: str
    linears: tuple[Linear, ...]
    """The quantized linear layers, each kind once."""
    qk_norm: bool
    """Whether our QK-norm can serve its attention."""

    @classmethod
    def of(
        cls, config: dict[str, Any], *, tensor_parallel_size: int = 1, enable_expert_parallel: bool = False
    ) -> "RankShapes":
        """From a checkpoint's config.json.

        Args:
            config: the parsed file.
            tensor_parallel_size: ranks that share attention, and shared experts.
            enable_expert_parallel: whole experts are dealt out to ranks, where otherwise each is cut.

        Raises:
            ValueError: another kind of model, a key that is missing, or sizes that the ranks don't divide.
        """
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(f"model_type is {model_type!r}; known: {', '.join(MODEL_TYPES)}")
        config = {**config, **(config.get("text_config") or {})}
        ranks = tensor_parallel_size
        try:
            q_heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
            hidden_size, num_experts = config["hidden_size"], config["num_experts"]
            if ranks < 1 or q_heads % ranks or (kv_heads % ranks and ranks % kv_heads):
                raise ValueError(f"tensor_parallel_size={ranks} doesn't divide {q_heads} heads and {kv_heads} KV heads")
            head_dim = config.get("head_dim") or hidden_size // q_heads
            q, kv = q_heads // ranks * head_dim, max(1, kv_heads // ranks) * head_dim
            if model_type in QWEN3_MOE:
                qkv = q + 2 * kv, hidden_size, bool(config.get("attention_bias", False))
                linears = [qkv, (hidden_size, q, False)]
            else:
                linears = _qwen3_5_linears(config, q=q, kv=kv, ranks=ranks)
            return cls(
                hidden_size=hidden_size,
                num_q_heads=q_heads // ranks,
                num_kv_heads=max(1, kv_heads // ranks),
                head_dim=head_dim,
                expert_size=_share(config, "moe_intermediate_size", 1 if enable_expert_parallel else ranks),
                num_experts=num_experts,
                num_local_experts=-(-num_experts // ranks) if enable_expert_parallel else num_experts,
                top_k=config["num_experts_per_tok"],
                eps=float(config.get("rms_norm_eps", 1e-6)),
                dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
                linears=tuple(dict.fromkeys(linears)),
                qk_norm=model_type in QWEN3_MOE,
            )
        except KeyError as error:
            raise ValueError(f"the config has no {error.args[0]}") from error


def _share(config: dict[str, Any], key: str, ranks: int) -> int:
    """A rank's part of a size that must divide."""
    if config[key] % ranks:
        raise ValueError(f"tensor_parallel_size={ranks} doesn't divide {key}={config[key]}")
    return config[key] // ranks


def _qwen3_5_linears(config: dict[str, Any], *, q: int, kv: int, ranks: int) -> list[Linear]:
    """Both kinds of attention, and the shared expert; what has a row for each head isn't quantized.

    Softmax attention has a gate for each element of its output, which the rows of q bring along.

    Args:
        config: with the language model's keys on top.
        q, kv: features of this rank's heads.
        ranks: that share them.
    """
    hidden_size = config["hidden_size"]
    key = _share(config, "linear_num_key_heads", ranks) * config["linear_key_head_dim"]
    value = _share(config, "linear_num_value_heads", ranks) * config["linear_value_head_dim"]
    gated = 2 if config.get("attn_output_gate", True) else 1
    linears = [
        (gated * q + 2 * kv, hidden_size, bool(config.get("qkv_bias", False))),
        (hidden_size, q, False),
        (2 * key + 2 * value, hidden_size, False),  # q, k, v and the gate z
        (hidden_size, value, False),
    ]
    if config.get("shared_expert_intermediate_size"):
        shared = _share(config, "shared_expert_intermediate_size", ranks)
        linears += [(2 * shared, hidden_size, False), (hidden_size, shared, False)]
    return linears
