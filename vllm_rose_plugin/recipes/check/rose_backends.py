"""What this version of the plugin can't serve: the rules of ``layers/``'s experts, told before start-up."""

from collections.abc import Iterator

from vllm_rose_plugin.config import ALL2ALL, BACKEND, BATCHED_ALL2ALL
from vllm_rose_plugin.recipes.deployment import parallelism
from vllm_rose_plugin.recipes.finding import Finding, Keys
from vllm_rose_plugin.recipes.schema import Recipe

_ALL2ALL = (*BATCHED_ALL2ALL, ALL2ALL)


def check_rose_backends(recipe: Recipe) -> Iterator[Finding]:
    """Roles that name our experts where these refuse to start."""
    for name, role in recipe.roles.items():
        if role.args.get("moe-backend") != BACKEND:
            continue
        args: Keys = ("roles", name, "args")
        if parallelism(role).data > 1 and role.args.get("all2all-backend") not in _ALL2ALL:
            yield recipe.finding(
                (*args, "moe-backend"),
                BACKEND,
                f"supports data parallelism with all2all-backend {' or '.join(_ALL2ALL)} only, in this version",
                "one of these, data-parallel-size 1, or a backend of vLLM's own",
                "remove moe-backend, so that vLLM takes its own",
            )
        scheme = recipe.model.expert_weights or recipe.model.weights
        if scheme != "mxfp8":
            yield recipe.finding(
                (*args, "moe-backend"), BACKEND, f"serves MXFP8 experts, and these are {scheme}", "mxfp8", "remove it"
            )
