"""What a model's weights, KV cache and linear-attention state weigh on one rank, from its config.json alone."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_rose_plugin.checkpoint.rules import aliases, matches
from vllm_rose_plugin.planner.model_shapes import (
    Config,
    Kind,
    ModelConfigError,
    Weight,
    has_index_branch,
    head_dim,
    integer,
    is_linear_layer,
    is_moe_layer,
    linear_dims,
    num_experts,
    text_config,
    weights,
)
from vllm_rose_plugin.planner.model_shapes import family as model_family

BLOCKS = {"bf16": (16, 0, 1), "fp8": (8, 0, 1), "mxfp8": (8, 8, 32), "nvfp4": (4, 8, 16)}
"""Format of quantized weights -> (bits of an element, bits of a scale, elements along the input axis per scale)."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How one replica is spread over its GPUs, in vLLM's words.

    Attention, dense MLPs and embeddings are split over ``tensor`` ranks and repeated over ``data`` ones. Routed experts
    are split over all ``tensor * data`` ranks: whole experts with ``expert``, slices of each without.
    """

    tensor: int = 1
    data: int = 1
    expert: bool = False
    redundant_experts: int = 0
    """EPLB's extra copies, over all ranks together."""
    sequence_parallel_moe: bool = False
    """vLLM's `use_sequence_parallel_moe` (expert parallel with both TP and DP above 1 and most all-to-all backends):
    DeepSeek's and Qwen's shared experts are then whole on every rank."""

    def __post_init__(self) -> None:
        for name in ("tensor", "data"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}; give 1 or more")


def parameters(config: Config, *, draft_layers: int = 0) -> dict[Kind, int]:
    """Parameters of a checkpoint by kind, each counted once.

    Raises:
        ModelConfigError: see :func:`model_shapes.weights`.
    """
    counts = dict.fromkeys(Kind, 0)
    for weight in weights(config, draft_layers=draft_layers):
        if not weight.derived:
            counts[weight.kind] += weight.elements
    return counts


def active_parameters(config: Config) -> int:
    """Parameters that one token meets: `num_experts_per_tok` of the routed experts, and all others."""
    counts = parameters(config)
    experts = num_experts(text_config(config))
    routed = counts[Kind.EXPERTS]
    chosen = routed * integer(text_config(config), "num_experts_per_tok") // experts if experts else 0
    return sum(counts.values()) - routed + chosen


def weight_bytes(
    config: Config,
    *,
    weight_format: str = "bf16",
    parallel: Parallel = Parallel(),
    ignore: Iterable[str] | Callable[[Weight], bool] = (),
    draft_layers: int = 0,
    draft_format: str | None = None,
) -> dict[Kind, int]:
    """Bytes of the weights on the fullest rank, by kind.

    Args:
        config: of config.json.
        weight_format: a key of BLOCKS, for the weights that are quantized. Embedding, output head, norms and routers
            never are.
        parallel: of one replica.
        ignore: shell patterns over module or tensor names, as `rose quantize --ignore` takes them, or a function that
            says which weights stay in BF16.
        draft_layers: MTP layers that are loaded too.
        draft_format: theirs, where it is another.

    Raises:
        ModelConfigError: see :func:`model_shapes.weights`; an unknown format.
    """
    keep = ignore if callable(ignore) else _matcher(tuple(ignore))
    totals = dict.fromkeys(Kind, 0)
    for weight in weights(config, draft_layers=draft_layers):
        chosen = draft_format if draft_format and weight.name.startswith("mtp.") else weight_format
        if chosen not in BLOCKS:
            raise ModelConfigError(f"weight format {chosen!r} isn't known; known are {', '.join(BLOCKS)}")
        quantized = weight.quantizable and chosen != "bf16" and not keep(weight)
        totals[weight.kind] += rank_bytes(weight, weight_format=chosen if quantized else None, parallel=parallel)
    return totals


def rank_bytes(weight: Weight, *, weight_format: str | None, parallel: Parallel) -> int:
    """Bytes of one weight on the fullest rank; ``weight_format`` None: as it is, not quantized."""
    shape, copies = rank_shape(weight, parallel=parallel)
    elements = shape[0] * shape[1] * copies
    if weight_format is None:
        return elements * weight.bytes_each
    bits, scale_bits, block = BLOCKS[weight_format]
    scales = shape[0] * -(-shape[1] // block) * copies if scale_bits else 0
    return -(-(elements * bits + scales * scale_bits) // 8)


def rank_shape(weight: Weight, *, parallel: Parallel) -> tuple[tuple[int, int], int]:
    """Shape and copies on the fullest rank. Units that don't divide are rounded up; KV heads are repeated."""
    copies, ranks = weight.copies, parallel.tensor
    if weight.kind is Kind.EXPERTS:
        ranks = parallel.tensor * parallel.data
        if parallel.expert:
            return weight.shape, -(-(copies + parallel.redundant_experts) // ranks)
    elif ".shared_expert" in weight.name and parallel.sequence_parallel_moe:
        ranks = 1
    units = -(-weight.parts // ranks)
    shape = list(weight.shape)
    shape[weight.split_axis] = -(-shape[weight.split_axis] * units // weight.parts)
    return (shape[0], shape[1]), copies


def kv_bytes_per_token(
    config: Config, *, tensor_parallel: int = 1, bytes_each: float = 2, draft_layers: int = 0
) -> float:
    """Bytes of KV cache that one token takes on one rank, over all layers.

    A rank holds ``max(1, num_key_value_heads / tensor_parallel)`` heads, so above as many ranks as KV heads the cache
    stops shrinking. MLA keeps one latent vector per token, whole on every rank. Linear attention keeps none. Index keys
    of sparse attention are counted: DeepSeek V3.2's in FP8 with a float scale per 128, MiniMax M3's in BF16.

    Args:
        config: of config.json.
        tensor_parallel: TP of the role; data parallel ranks hold caches of different requests.
        bytes_each: 2 for BF16, 1 for FP8.
        draft_layers: MTP layers, which have a cache too.
    """
    config = text_config(config)
    layers = integer(config, "num_hidden_layers")
    total = 0.0
    for layer in [*range(layers), *[layers - 1] * draft_layers]:
        if is_linear_layer(config, layer):
            continue
        if model_family(config) == "deepseek":
            total += (integer(config, "kv_lora_rank") + integer(config, "qk_rope_head_dim")) * bytes_each
            if has_index_branch(config, layer):
                index_dim = integer(config, "index_head_dim")
                total += index_dim + index_dim // 128 * 4
            continue
        kv_heads = max(1, -(-integer(config, "num_key_value_heads") // tensor_parallel))
        total += 2 * kv_heads * head_dim(config) * bytes_each
        if has_index_branch(config, layer):
            total += integer(config["sparse_attention_config"], "sparse_index_dim") * 2
    return total


def state_bytes_per_sequence(
    config: Config,
    *,
    tensor_parallel: int = 1,
    convolution_bytes: int = 2,
    state_bytes: int | None = None,
    speculative_tokens: int = 0,
) -> int:
    """Bytes of linear-attention state that one running sequence takes on one rank; 0 where no layer has any.

    Per layer a convolution tail of ``(kernel - 1 + speculative_tokens)`` positions and one matrix per value head.

    Args:
        config: of config.json.
        tensor_parallel: TP of the role.
        convolution_bytes: of one element of the tail (vLLM's ``--mamba-cache-dtype``).
        state_bytes: of one element of the matrices (``--mamba-ssm-cache-dtype``); None takes config.json's
            ``mamba_ssm_dtype``, as vLLM does, and the tail's where that is absent.
        speculative_tokens: drafted per step; each keeps a state of its own until it is accepted.
    """
    config = text_config(config)
    layers = sum(is_linear_layer(config, layer) for layer in range(integer(config, "num_hidden_layers")))
    if not layers:
        return 0
    if state_bytes is None:
        state_bytes = {"float32": 4, "bfloat16": 2, "float16": 2}.get(
            str(config.get("mamba_ssm_dtype")), convolution_bytes
        )
    heads, key, value = linear_dims(config)
    positions = integer(config, "linear_conv_kernel_dim") - 1 + speculative_tokens
    tail = math.ceil((2 * key + value) / tensor_parallel) * positions * convolution_bytes
    matrices = math.ceil(heads / tensor_parallel) * integer(config, "linear_value_head_dim")
    matrices *= integer(config, "linear_key_head_dim") * state_bytes
    return layers * (tail + matrices) * (1 + speculative_tokens)


def moe_layers(config: Config) -> int:
    """Layers with routed experts."""
    config = text_config(config)
    return sum(is_moe_layer(config, layer) for layer in range(integer(config, "num_hidden_layers")))


def _matcher(patterns: tuple[str, ...]) -> Callable[[Weight], bool]:
    def keep(weight: Weight) -> bool:
        names = aliases(f"{weight.name}.weight", weight.shape)
        return any(matches(pattern, names) for pattern in patterns)

    return keep
