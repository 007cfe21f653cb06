"""Does a role fit into its GPUs, and how many tokens of KV cache are left.

Weights, KV and states are the planner's exact counts (:mod:`vllm_rose_plugin.planner.model_memory`). The rest is an
upper estimate from the shapes, with the allowances below; vLLM measures it at start-up and may keep less or more.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from vllm_rose_plugin.config import ALL2ALL, BACKEND, BATCHED_ALL2ALL, RoseConfig
from vllm_rose_plugin.kernels.dp_exchange.layout import ExchangeShape, Layout, Payload
from vllm_rose_plugin.planner.model_memory import (
    Parallel,
    kv_bytes_per_token,
    state_bytes_per_sequence,
    weight_bytes,
)
from vllm_rose_plugin.planner.model_shapes import Kind, expert_intermediate_size, integer, num_experts, text_config
from vllm_rose_plugin.recipes.check.vllm_parser import draft_config
from vllm_rose_plugin.recipes.deployment import parallelism, redundant_experts
from vllm_rose_plugin.recipes.finding import Finding
from vllm_rose_plugin.recipes.hardware import GIB, GPUS
from vllm_rose_plugin.recipes.schema import Recipe, Role

CONTEXT_BYTES = 2 * GIB
"""CUDA context, NCCL and library workspaces of one process: what vLLM calls non-torch memory. Allowance."""
GRAPH_BYTES = 2 * GIB
"""Captured CUDA graphs, without --enforce-eager. Allowance."""
_ACTIVATION_COPIES = 8
"""Tensors of [tokens, hidden_size] that live at once in a layer besides the experts' workspaces: residual, normed
input, q/k/v, attention output, gate. Allowance."""
_FIXED = ("num-gpu-blocks-override", "kv-cache-memory-bytes")
"""Flags that say how large the KV cache is; with both vLLM takes the first."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the fullest rank of a role."""

    role: str
    budget: int
    """Visible memory x ``--gpu-memory-utilization``; all of it with ``--kv-cache-memory-bytes``, as vLLM has it."""
    weights: int
    context: int
    activations: int
    all_to_all: int
    all_reduce: int
    """Two buffers of our all-reduce; vLLM doesn't count them in the budget, so this is on the safe side."""
    graphs: int
    states: int
    """Linear attention state of ``--max-num-seqs`` sequences."""
    kv_per_token: float
    longest: int
    """Tokens of the longest request, ``--max-model-len``."""
    fixed_kv: int | None = None
    """Bytes of KV where the recipe says how many (``_FIXED``), not the memory that is left."""

    @property
    def left(self) -> int:
        """Bytes for KV blocks; negative where the rest alone doesn't fit."""
        used = self.weights + self.context + self.activations + self.all_to_all + self.all_reduce
        used += self.graphs + self.states
        return self.budget - used

    @property
    def tokens(self) -> int:
        """Tokens whose KV fits at once."""
        held = self.left if self.fixed_kv is None else self.fixed_kv
        return max(0, int(held // self.kv_per_token)) if self.kv_per_token else 0

    def __str__(self) -> str:
        parts = ", ".join(
            f"{part.name.replace('_', '-')} {getattr(self, part.name) / GIB:.1f}"
            for part in fields(self)[2:9]
            if getattr(self, part.name)
        )
        kv = "" if self.fixed_kv is None else f", of which KV gets {self.fixed_kv / GIB:.1f}"
        return (
            f"{self.role}: {self.budget / GIB:.1f} GiB per GPU; {parts}; left {self.left / GIB:.1f} GiB{kv} = "
            f"{self.tokens} tokens of KV"
        )


def memory_plan(recipe: Recipe, name: str, config: dict[str, Any], resolved: dict[str, Any]) -> MemoryPlan:
    """What a role's fullest rank holds.

    Args:
        recipe: the recipe.
        name: of the role.
        config: the model's config.json.
        resolved: the role's configuration as vLLM built it (``Answer.processes[i]["config"]``).
    """
    role: Role = recipe.roles[name]  # type: ignore[index]
    text, sizes = text_config(config), parallelism(role)
    parallel = Parallel(
        tensor=sizes.tensor,
        data=sizes.data,
        expert=sizes.experts,
        redundant_experts=redundant_experts(role),
        sequence_parallel_moe=sizes.experts and sizes.tensor > 1 and sizes.data > 1,
    )
    speculative = role.args.get("speculative-config")
    speculative = speculative if isinstance(speculative, dict) else {}
    draft_layers = 1 if speculative.get("method") == "mtp" else 0
    drafted = int(speculative.get("num_speculative_tokens", 0))
    counts = weight_bytes(
        config,
        weight_format=recipe.model.weights,
        parallel=parallel,
        ignore=recipe.model.ignore,
        draft_layers=draft_layers,
    )
    if recipe.model.expert_weights:
        counts[Kind.EXPERTS] = weight_bytes(
            config,
            weight_format=recipe.model.expert_weights,
            parallel=parallel,
            ignore=recipe.model.ignore,
            draft_layers=draft_layers,
        )[Kind.EXPERTS]
    kv_each = 1.0 if resolved["cache_dtype"].startswith("fp8") else 2.0
    kv = kv_bytes_per_token(config, tensor_parallel=sizes.tensor, bytes_each=kv_each, draft_layers=draft_layers)
    layers = integer(text, "num_hidden_layers")
    stage = -(-layers // sizes.pipeline) / layers  # of the fullest; embedding and head are on the first and the last
    ends = counts.pop(Kind.EMBEDDING) // min(2, sizes.pipeline)
    weights, kv = int(sum(counts.values()) * stage) + ends, kv * stage
    if str(speculative.get("method", "")).startswith("eagle"):
        head_weights, head_kv = _eagle(config, sizes.tensor, kv_each)
        weights, kv = weights + head_weights, kv + head_kv
    steps = resolved["max_num_batched_tokens"]
    hidden, vocabulary = integer(text, "hidden_size"), integer(text, "vocab_size")
    # Logits of every sequence (and drafted token) in fp32 beside their bf16 form, vocabulary cut over TP and gathered.
    logits = resolved["max_num_seqs"] * (1 + drafted) * vocabulary * 6
    activations = steps * hidden * 2 * _ACTIVATION_COPIES + logits
    everyone = steps * sizes.data if sizes.data > 1 else steps
    if num_experts(text):
        split = 1 if sizes.experts else sizes.tensor * sizes.data
        width = max(2 * expert_intermediate_size(text) // split, hidden) + hidden
        # Workspaces of vLLM's modular kernels, sized for every token's top_k experts on one rank.
        activations += everyone * integer(text, "num_experts_per_tok") * width * 2
    fixed_kv, blocks = resolved["kv_cache_memory_bytes"], resolved["num_gpu_blocks_override"]
    return MemoryPlan(
        role=name,
        budget=int(GPUS[recipe.hardware.gpu].memory_bytes * (1 if fixed_kv else resolved["gpu_memory_utilization"])),
        weights=weights,
        context=CONTEXT_BYTES,
        activations=activations,
        all_to_all=_all_to_all(
            role,
            tokens=steps,
            hidden=hidden,
            experts=num_experts(text) + redundant_experts(role),
            top_k=integer(text, "num_experts_per_tok"),
        )
        if sizes.data > 1 and num_experts(text)
        else 0,
        all_reduce=2 * steps * hidden * 2 if _our_all_reduce(role) else 0,
        graphs=0 if resolved["enforce_eager"] else GRAPH_BYTES,
        states=resolved["max_num_seqs"]
        * state_bytes_per_sequence(
            config,
            tensor_parallel=sizes.tensor,
            state_bytes={"bfloat16": 2, "float16": 2, "float32": 4}.get(resolved["mamba_ssm_cache_dtype"]),
            speculative_tokens=drafted,
        ),
        kv_per_token=kv,
        longest=resolved["max_model_len"],
        fixed_kv=fixed_kv if blocks is None else int(blocks * resolved["block_size"] * kv),
    )


def _our_all_reduce(role: Role) -> bool:
    asked = RoseConfig.asks_for("all_reduce", role.args.get("additional-config"), role.environment)
    return asked and parallelism(role).tensor > 1


def _all_to_all(role: Role, *, tokens: int, hidden: int, experts: int, top_k: int) -> int:
    """Bytes of the buffers between data parallel ranks.

    Args:
        role: whose ``all2all-backend`` counts.
        tokens: that one data parallel rank sends at most in a step.
        hidden: hidden_size.
        experts: redundant ones included.
        top_k: experts of a token.
    """
    backend, sizes = role.args.get("all2all-backend"), parallelism(role)
    if backend == ALL2ALL and sizes.experts:  # else it refuses to start
        layout = Layout(
            ExchangeShape(
                hidden_size=hidden,
                top_k=top_k,
                num_experts=experts,
                max_tokens=-(-tokens // sizes.tensor),  # dealt out over the tensor parallel ranks
                group_size=sizes.expert_ranks,
                payload=Payload.MXFP8 if role.args.get("moe-backend") == BACKEND else Payload.BF16,
            )
        )
        return layout.size + layout.shape.max_rows * layout.row_bytes  # the part that peers write, and what came
    # Gathered tokens and the partial results before they are reduced, in bf16. DeepEP has a buffer for NVLink and one
    # for InfiniBand beside them, of 1 GiB each (VLLM_DEEPEP_BUFFER_SIZE_MB), its low-latency form the first alone.
    gathered = 2 * tokens * sizes.data * hidden * 2
    if backend in BATCHED_ALL2ALL:
        # A place for every token of this rank at every expert, in bf16 with 16 bytes in front or minima and maxima of
        # 128 values behind, to send and to receive, twice (DeepEP's csrc/config.hpp, LowLatencyLayout; NIXL EP alike).
        message = 2 * hidden + max(16, hidden // 128 * 4)
        return 4 * experts * tokens * message + (GIB if backend == "deepep_low_latency" else 0)
    return gathered + (2 * GIB if backend == "deepep_high_throughput" else 0)


def _eagle(config: dict[str, Any], tensor: int, kv_each: float) -> tuple[int, float]:
    """Bytes of the weights and of one token's KV of an EAGLE3 head in bf16: one layer of the target's width, whose
    attention reads twice that width, a projection of three hidden states, and a vocabulary of its own."""
    head = draft_config(config)
    hidden, size = head["hidden_size"], head["head_dim"]
    attention = (head["num_attention_heads"] + head["num_key_value_heads"]) * 2 * size * 2 * hidden
    elements = (
        attention + 3 * head["intermediate_size"] * hidden + 3 * hidden * hidden + head["draft_vocab_size"] * hidden
    )
    kv_heads = max(1, head["num_key_value_heads"] // tensor)
    return elements * 2 // tensor, 2 * kv_heads * size * kv_each


def check_memory(recipe: Recipe, plan: MemoryPlan) -> Iterator[Finding]:
    """A role that doesn't fit, or has no room for one request of the full length (which vLLM refuses to start with)."""
    args = ("roles", plan.role, "args")
    if plan.left < 0:
        yield recipe.finding(
            ("roles", plan.role, "gpus"),
            recipe.roles[plan.role].gpus,  # type: ignore[index]
            f"is too few: {-plan.left / GIB:.1f} GiB per GPU are missing ({plan})",
            f"up to {plan.budget / GIB:.1f} GiB per GPU",
            "raise the parallel sizes or gpu-memory-utilization, or lower max-num-batched-tokens or max-num-seqs",
        )
    elif plan.fixed_kv is not None and (plan.fixed_kv > plan.left or plan.tokens < plan.longest):
        given = recipe.roles[plan.role].args  # type: ignore[index]
        flag = next(flag for flag in _FIXED if flag in given)
        needed = plan.longest * plan.kv_per_token
        yield recipe.finding(
            (*args, flag),
            given[flag],
            f"is {plan.fixed_kv / GIB:.1f} GiB of KV, and a request of {plan.longest} tokens needs {needed / GIB:.1f}, "
            f"while {plan.left / GIB:.1f} are there ({plan})",
            f"{needed / GIB:.1f} to {plan.left / GIB:.1f} GiB",
            "remove it, so that vLLM takes what is left",
        )
    elif plan.tokens < plan.longest:
        yield recipe.finding(
            (*args, "max-model-len"),
            plan.longest,
            f"is more than the KV cache holds ({plan})",
            f"up to {plan.tokens}",
            f"write {plan.tokens // 1024 * 1024}, or make room for weights by larger parallel sizes",
        )
