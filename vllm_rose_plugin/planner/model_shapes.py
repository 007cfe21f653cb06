"""The weights of a model, read off its config.json: names, shapes, and how vLLM splits them over ranks.

Covers Qwen3 and Qwen3-MoE, Qwen3-Next and Qwen3.5 (linear attention), DeepSeek V2/V3/V3.2 and Kimi K2 (MLA), MiniMax M2
and M3. Shapes and splits are those of vLLM 0.33's model files (Apache-2.0, github.com/vllm-project/vllm,
vllm/model_executor/models and vllm/models), read and described here in our own words. Vision towers are left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Config = Mapping[str, Any]


class Kind(StrEnum):
    """What a weight is for."""

    EXPERTS = "experts"
    """Routed experts; spread over all ranks of a replica (TP x DP)."""
    DENSE = "dense"
    """MLPs of dense layers and shared experts."""
    ATTENTION = "attention"
    """Projections of softmax, latent and linear attention, indexers too."""
    EMBEDDING = "embedding"
    """Token embedding and output head."""
    OTHER = "other"
    """Norms, routers, biases, small states of linear attention: never quantized."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One weight matrix, or equal ones of all experts of a layer."""

    name: str
    """As a checkpoint spells it, without ``.weight``; that of expert 0 where ``copies`` > 1."""
    kind: Kind
    shape: tuple[int, int]
    """(output features, input features)."""
    parts: int = 1
    """Units that a TP group can deal out: heads, intermediate columns, vocabulary rows. 1: every rank holds it all."""
    split_axis: int = 0
    """Axis of ``shape`` that is cut: 0 in column-parallel layers, 1 in row-parallel ones."""
    copies: int = 1
    quantizable: bool = True
    bytes_each: int = 2
    """Of one element where it isn't quantized."""
    derived: bool = False
    """Not in a checkpoint: made at load and kept beside its source."""

    @property
    def elements(self) -> int:
        """Elements of all copies."""
        return self.shape[0] * self.shape[1] * self.copies


class ModelConfigError(ValueError):
    """A config.json that these rules can't read."""


_FAMILIES = {
    "qwen2": "qwen", "qwen3": "qwen", "qwen2_moe": "qwen", "qwen3_moe": "qwen",
    "qwen3_next": "qwen_hybrid", "qwen3_5": "qwen_hybrid", "qwen3_5_moe": "qwen_hybrid",
    "deepseek_v2": "deepseek", "deepseek_v3": "deepseek", "deepseek_v32": "deepseek", "kimi_k2": "deepseek",
    "minimax_m2": "minimax", "minimax_m3": "minimax",
}  # fmt: skip
_VOCABULARY_PADDING = 64  # vLLM's embedding is padded to a multiple of this before it is split


def text_config(config: Config) -> dict[str, Any]:
    """The language model's part of config.json, its keys on top of the outer ones."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else dict(config)


def family(config: Config) -> str:
    """``qwen``, ``qwen_hybrid``, ``deepseek`` or ``minimax``.

    Raises:
        ModelConfigError: ``model_type`` is none of those known.
    """
    model_type = str(text_config(config).get("model_type"))
    for suffix in ("_text", "_vl"):
        model_type = model_type.removesuffix(suffix)
    if model_type not in _FAMILIES:
        raise ModelConfigError(
            f"model_type {model_type!r} of config.json isn't known here; known are {', '.join(sorted(_FAMILIES))}"
        )
    return _FAMILIES[model_type]


def integer(config: Config, key: str, default: int | None = None) -> int:
    """A whole number >= 0 of config.json; ``default`` where the key is absent or null.

    Raises:
        ModelConfigError: absent without a default, or no such number.
    """
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ModelConfigError(f"config.json has {key} = {value!r}; give a whole number >= 0")
    return value


def head_dim(config: Config) -> int:
    """Of softmax attention."""
    return integer(config, "head_dim", integer(config, "hidden_size") // max(1, integer(config, "num_attention_heads")))


def is_linear_layer(config: Config, layer: int) -> bool:
    """Whether a layer has linear attention (a state per sequence) in place of a KV cache."""
    if family(config) != "qwen_hybrid":
        return False
    kinds = config.get("layer_types")
    if kinds is not None:
        return kinds[layer] == "linear_attention"
    return (layer + 1) % integer(config, "full_attention_interval", 4) != 0


def has_index_branch(config: Config, layer: int) -> bool:
    """Whether a layer keeps index keys for sparse attention beside its KV cache (DeepSeek V3.2, MiniMax M3)."""
    if config.get("index_topk"):
        return True
    frequency = (config.get("sparse_attention_config") or {}).get("sparse_attention_freq")
    return bool(frequency and frequency[layer])


def is_moe_layer(config: Config, layer: int) -> bool:
    """Whether a layer's MLP is a mixture of experts."""
    if not num_experts(config):
        return False
    match family(config):
        case "deepseek":
            past_dense = layer >= integer(config, "first_k_dense_replace", 0)
            return past_dense and layer % integer(config, "moe_layer_freq", 1) == 0
        case "minimax":
            frequency = config.get("moe_layer_freq")
            return frequency is None or bool(frequency[layer])
    sparse_step = integer(config, "decoder_sparse_step", 1)
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % sparse_step == 0


def num_experts(config: Config) -> int:
    """Routed experts per MoE layer; 0 in a dense model."""
    key = {"deepseek": "n_routed_experts", "minimax": "num_local_experts"}.get(family(config), "num_experts")
    return integer(config, key, 0)


def expert_intermediate_size(config: Config) -> int:
    """Of one routed expert."""
    return integer(config, "intermediate_size" if family(config) == "minimax" else "moe_intermediate_size")


def weights(config: Config, *, draft_layers: int = 0) -> Iterator[Weight]:
    """Every weight of the language model.

    Args:
        config: of config.json; ``text_config`` is looked into.
        draft_layers: MTP layers on top, each shaped like the last layer plus a ``[hidden_size, 2 * hidden_size]``
            projection; they share the embedding and the head.

    Raises:
        ModelConfigError: an unknown family or a key that is missing.
    """
    config = text_config(config)
    family(config)  # refuses an unknown one by name, before its keys are looked for
    hidden, layers = integer(config, "hidden_size"), integer(config, "num_hidden_layers")
    vocabulary = -(-integer(config, "vocab_size") // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
    vocabulary_shape = (integer(config, "vocab_size"), hidden)
    for name in ("model.embed_tokens",) if config.get("tie_word_embeddings") else ("model.embed_tokens", "lm_head"):
        yield Weight(name=name, kind=Kind.EMBEDDING, shape=vocabulary_shape, parts=vocabulary, quantizable=False)
    yield _norm("model.norm", hidden)
    for layer in range(layers):
        yield from _layer(config, f"model.layers.{layer}", layer)
    for draft in range(draft_layers):
        yield Weight(name="mtp.fc", kind=Kind.DENSE, shape=(hidden, 2 * hidden), quantizable=False)
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            yield _norm(f"mtp.{norm}", hidden)
        # In hybrid models the last layer has softmax attention, and so has the MTP layer.
        yield from _layer(config, f"mtp.layers.{draft}", layers - 1)


def _layer(config: Config, prefix: str, layer: int) -> Iterator[Weight]:
    hidden = integer(config, "hidden_size")
    yield _norm(f"{prefix}.input_layernorm", hidden)
    yield _norm(f"{prefix}.post_attention_layernorm", hidden)
    if is_linear_layer(config, layer):
        yield from _linear_attention(config, f"{prefix}.linear_attn")
    elif family(config) == "deepseek":
        yield from _latent_attention(config, f"{prefix}.self_attn")
    else:
        yield from _softmax_attention(config, f"{prefix}.self_attn", indexed=has_index_branch(config, layer))
    if is_moe_layer(config, layer):
        yield from _moe(config, f"{prefix}.{'block_sparse_moe' if family(config) == 'minimax' else 'mlp'}")
    else:
        size = integer(config, "dense_intermediate_size", integer(config, "intermediate_size"))
        yield from _mlp(f"{prefix}.mlp", hidden, size, kind=Kind.DENSE)


def _norm(name: str, size: int) -> Weight:
    return Weight(name=name, kind=Kind.OTHER, shape=(1, size), quantizable=False)


def _mlp(prefix: str, hidden: int, size: int, *, kind: Kind, copies: int = 1) -> Iterator[Weight]:
    for leaf in ("gate_proj", "up_proj"):
        yield Weight(name=f"{prefix}.{leaf}", kind=kind, shape=(size, hidden), parts=size, copies=copies)
    down = f"{prefix}.down_proj"
    yield Weight(name=down, kind=kind, shape=(hidden, size), parts=size, split_axis=1, copies=copies)


def _moe(config: Config, prefix: str) -> Iterator[Weight]:
    hidden, experts = integer(config, "hidden_size"), num_experts(config)
    size = expert_intermediate_size(config)
    gate_bytes = 4 if family(config) == "minimax" else 2  # vLLM keeps MiniMax's router in fp32
    yield Weight(
        name=f"{prefix}.gate", kind=Kind.OTHER, shape=(experts, hidden), quantizable=False, bytes_each=gate_bytes
    )
    if family(config) in ("deepseek", "minimax"):
        yield Weight(
            name=f"{prefix}.gate.e_score_correction_bias",
            kind=Kind.OTHER, shape=(1, experts), quantizable=False, bytes_each=4,
        )  # fmt: skip
    yield from _mlp(f"{prefix}.experts.0", hidden, size, kind=Kind.EXPERTS, copies=experts)
    if shared := integer(config, "shared_expert_intermediate_size", 0):
        yield from _mlp(f"{prefix}.shared_expert", hidden, shared, kind=Kind.DENSE)
        yield Weight(name=f"{prefix}.shared_expert_gate", kind=Kind.OTHER, shape=(1, hidden), quantizable=False)
    elif shared := integer(config, "n_shared_experts", 0) * size:
        yield from _mlp(f"{prefix}.shared_experts", hidden, shared, kind=Kind.DENSE)


def _softmax_attention(config: Config, prefix: str, *, indexed: bool) -> Iterator[Weight]:
    hidden, size = integer(config, "hidden_size"), head_dim(config)
    heads, kv_heads = integer(config, "num_attention_heads"), integer(config, "num_key_value_heads")
    gated = 1 + (family(config) == "qwen_hybrid" and bool(config.get("attn_output_gate", True)))
    for leaf, rows, parts in (
        ("q", heads * size * gated, heads),
        *((leaf, kv_heads * size, kv_heads) for leaf in "kv"),
    ):
        yield Weight(name=f"{prefix}.{leaf}_proj", kind=Kind.ATTENTION, shape=(rows, hidden), parts=parts)
        if config.get("attention_bias") or str(config.get("model_type")).startswith("qwen2"):
            yield Weight(
                name=f"{prefix}.{leaf}_proj.bias", kind=Kind.OTHER, shape=(rows, 1), parts=parts, quantizable=False
            )
    output_shape = (hidden, heads * size)
    yield Weight(name=f"{prefix}.o_proj", kind=Kind.ATTENTION, shape=output_shape, parts=heads, split_axis=1)
    if not str(config.get("model_type")).startswith("qwen2"):
        over_all_heads = family(config) == "minimax" and config.get("qk_norm_type") != "per_head"  # MiniMax M2
        for leaf, count in (("q", heads), ("k", kv_heads)):
            yield _norm(f"{prefix}.{leaf}_norm", size * count if over_all_heads else size)
    if indexed:
        sparse = config["sparse_attention_config"]
        index_heads, index_dim = integer(sparse, "sparse_num_index_heads"), integer(sparse, "sparse_index_dim")
        index_shape = (index_heads * index_dim, hidden)
        yield Weight(name=f"{prefix}.index_q_proj", kind=Kind.ATTENTION, shape=index_shape, parts=index_heads)
        yield Weight(name=f"{prefix}.index_k_proj", kind=Kind.ATTENTION, shape=(index_dim, hidden))


def _latent_attention(config: Config, prefix: str) -> Iterator[Weight]:
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    nope, rope = integer(config, "qk_nope_head_dim"), integer(config, "qk_rope_head_dim")
    value, rank = integer(config, "v_head_dim"), integer(config, "kv_lora_rank")
    q_rank = integer(config, "q_lora_rank", 0)

    def attention(leaf: str, shape: tuple[int, int], parts: int, split_axis: int = 0) -> Weight:
        return Weight(
            name=f"{prefix}.{leaf}", kind=Kind.ATTENTION, shape=shape, parts=parts, split_axis=split_axis
        )  # fmt: skip

    if q_rank:
        yield attention("q_a_proj", (q_rank, hidden), 1)
        yield _norm(f"{prefix}.q_a_layernorm", q_rank)
        yield attention("q_b_proj", (heads * (nope + rope), q_rank), heads)
    else:
        yield attention("q_proj", (heads * (nope + rope), hidden), heads)
    yield attention("kv_a_proj_with_mqa", (rank + rope, hidden), 1)
    yield _norm(f"{prefix}.kv_a_layernorm", rank)
    yield attention("kv_b_proj", (heads * (nope + value), rank), heads)
    yield Weight(  # decode multiplies by BF16 copies of its two halves
        name=f"{prefix}.kv_b_proj (absorbed)", kind=Kind.ATTENTION, shape=(heads * (nope + value), rank), parts=heads,
        quantizable=False, derived=True,
    )  # fmt: skip
    yield attention("o_proj", (hidden, heads * value), heads, 1)
    if config.get("index_topk"):
        index_heads, index_dim = integer(config, "index_n_heads"), integer(config, "index_head_dim")
        yield attention("indexer.wq_b", (index_heads * index_dim, q_rank), 1)
        for leaf, rows in (("wk", index_dim), ("weights_proj", index_heads)):
            yield Weight(name=f"{prefix}.indexer.{leaf}", kind=Kind.ATTENTION, shape=(rows, hidden), quantizable=False)


def _linear_attention(config: Config, prefix: str) -> Iterator[Weight]:
    hidden = integer(config, "hidden_size")
    heads, key, value = linear_dims(config)
    for leaf, rows in (("in_proj_qkv", 2 * key + value), ("in_proj_z", value)):
        yield Weight(name=f"{prefix}.{leaf}", kind=Kind.ATTENTION, shape=(rows, hidden), parts=heads)
    for leaf in ("in_proj_b", "in_proj_a"):  # one row per head: too thin for blocks of scales
        yield Weight(
            name=f"{prefix}.{leaf}", kind=Kind.ATTENTION, shape=(heads, hidden), parts=heads, quantizable=False
        )
    yield Weight(name=f"{prefix}.out_proj", kind=Kind.ATTENTION, shape=(hidden, value), parts=heads, split_axis=1)
    convolution = (2 * key + value, integer(config, "linear_conv_kernel_dim"))
    yield Weight(name=f"{prefix}.conv1d", kind=Kind.OTHER, shape=convolution, parts=heads, quantizable=False)
    for leaf in ("A_log", "dt_bias"):
        yield Weight(
            name=f"{prefix}.{leaf}", kind=Kind.OTHER, shape=(heads, 1), parts=heads, quantizable=False, bytes_each=4
        )
    yield _norm(f"{prefix}.norm", integer(config, "linear_value_head_dim"))


def linear_dims(config: Config) -> tuple[int, int, int]:
    """Value heads, key features and value features of a linear attention layer."""
    heads = integer(config, "linear_num_value_heads")
    key = integer(config, "linear_num_key_heads") * integer(config, "linear_key_head_dim")
    return heads, key, heads * integer(config, "linear_value_head_dim")
