"""Do the model's heads, experts and quantized blocks divide over a role's ranks."""

from collections.abc import Iterator
from typing import Any

from vllm_rose_plugin.planner.model_memory import BLOCKS
from vllm_rose_plugin.planner.model_shapes import (
    Kind,
    ModelConfigError,
    Weight,
    family,
    integer,
    linear_dims,
    num_experts,
    text_config,
    weights,
)
from vllm_rose_plugin.recipes.deployment import Parallelism, parallelism, redundant_experts
from vllm_rose_plugin.recipes.finding import Finding, Keys
from vllm_rose_plugin.recipes.schema import Recipe, Role

_ROWS = 32
"""Output features of a shard come in whole runs of this: a shard of gate and up is the K of the down projection, and
kernels take scales in groups of 32 rows."""


def check_shapes(recipe: Recipe, config: dict[str, Any]) -> Iterator[Finding]:
    """Findings of every role."""
    try:
        family(config)
    except ModelConfigError as error:
        legal, cure = "a family that the planner knows", "take another model"
        yield recipe.finding(("model", "config"), recipe.model.config, str(error), legal, cure)
        return
    try:
        for name, role in recipe.roles.items():
            args: Keys = ("roles", name, "args")
            sizes = parallelism(role)
            heads = list(_heads(recipe, config, sizes.tensor, args))
            yield from heads
            yield from _experts(recipe, config, role, sizes, args)
            if not heads:
                yield from _shards(recipe, config, sizes, args)
    except ModelConfigError as error:
        legal = "what a config.json of this family has"
        yield recipe.finding(("model", "config"), recipe.model.config, str(error), legal, "mend the shape file")


def _divisors(number: int, most: int = 72) -> str:
    return ", ".join(str(value) for value in range(1, most + 1) if number % value == 0)


def _heads(recipe: Recipe, config: dict[str, Any], tensor: int, args: Keys) -> Iterator[Finding]:
    text = text_config(config)
    counts = {"attention heads": integer(text, "num_attention_heads")}
    if family(config) == "qwen_hybrid":
        counts["linear attention key heads"] = integer(text, "linear_num_key_heads")
        counts["linear attention value heads"] = linear_dims(text)[0]
    keys = (*args, "tensor-parallel-size")
    for what, count in counts.items():
        if count % tensor:
            yield recipe.finding(
                keys, tensor, f"doesn't divide the model's {count} {what}", _divisors(count), "take one of these sizes"
            )
    kv_heads = integer(text, "num_key_value_heads")
    if family(config) != "deepseek" and kv_heads % tensor and tensor % kv_heads:
        yield recipe.finding(
            keys,
            tensor,
            f"neither divides the model's {kv_heads} KV heads nor is a multiple of them, so a head would be on no rank",
            f"{_divisors(kv_heads)}, or a multiple of {kv_heads}",
            "take one of these sizes",
        )


def _experts(recipe: Recipe, config: dict[str, Any], role: Role, sizes: Parallelism, args: Keys) -> Iterator[Finding]:
    experts = num_experts(text_config(config))
    if sizes.experts and not experts:
        problem = "is set, but the model has no experts"
        yield recipe.finding((*args, "enable-expert-parallel"), True, problem, "false or absent", "remove it")
    if not (sizes.experts and experts):
        return
    redundant = redundant_experts(role)
    ranks = sizes.expert_ranks
    if (experts + redundant) % ranks:
        key = "data-parallel-size" if sizes.data > 1 else "tensor-parallel-size"
        missing = -(experts + redundant) % ranks + redundant
        held = f"{experts} experts" + (f" and {redundant} redundant ones" if redundant else "")
        yield recipe.finding(
            (*args, key),
            sizes.data if sizes.data > 1 else sizes.tensor,
            f"gives {ranks} expert parallel ranks, among which {held} don't divide",
            f"tensor x data parallel of {_divisors(experts)}",
            f"take one of these, or enable-eplb with eplb-config {{num_redundant_experts: {missing}}}",
        )


def _shards(recipe: Recipe, config: dict[str, Any], sizes: Parallelism, args: Keys) -> Iterator[Finding]:
    """Blocks of scales must not be cut: K of each shard in whole blocks, N in whole runs of rows."""
    seen: set[str] = set()
    for weight in weights(config):
        scheme = recipe.model.weights
        if weight.kind is Kind.EXPERTS and recipe.model.expert_weights:
            scheme = recipe.model.expert_weights
        if not weight.quantizable or weight.derived or scheme == "bf16":
            continue
        problem = _shard_problem(weight, sizes, BLOCKS[scheme][2])
        leaf = weight.name.rpartition(".")[2]
        if problem and leaf + problem not in seen:
            seen.add(leaf + problem)
            key = "tensor-parallel-size" if sizes.tensor > 1 else "data-parallel-size"
            yield recipe.finding(
                (*args, key if sizes.tensor * sizes.data > 1 else "enable-expert-parallel"),
                sizes.tensor if sizes.tensor > 1 else sizes.data,
                f"{problem} of {weight.name} {list(weight.shape)} in {scheme}",
                f"shards of a multiple of {BLOCKS[scheme][2]} inputs and of {_ROWS} outputs",
                "lower it, or set enable-expert-parallel so that experts stay whole"
                if weight.kind is Kind.EXPERTS
                else "lower it",
            )


def _shard_problem(weight: Weight, sizes: Parallelism, block: int) -> str | None:
    ranks = sizes.tensor
    if weight.kind is Kind.EXPERTS:
        ranks = 1 if sizes.experts else sizes.tensor * sizes.data
    shape = list(weight.shape)
    if weight.parts > 1:
        if weight.parts % ranks and ranks % weight.parts:
            return f"cuts the {weight.parts} units"
        shape[weight.split_axis] //= min(ranks, weight.parts) if weight.parts % ranks else ranks
    outputs, inputs = shape
    if inputs % max(block, 1):
        return f"leaves {inputs} inputs per shard, no multiple of {block},"
    if outputs % _ROWS and weight.parts > 1:
        return f"leaves {outputs} outputs per shard, no multiple of {_ROWS},"
    return None
