"""What this version of the plugin can't serve: the rules of ``layers/``'s experts, told before start-up."""

from collections.abc import Iterator

from vllm_rose_plugin.config import ALL2ALL, BACKEND, BATCHED_ALL2ALL
from vllm_rose_plugin.doctor.host import look_at_environment
from vllm_rose_plugin.recipes.deployment import parallelism
from vllm_rose_plugin.recipes.finding import Finding, Keys
from vllm_rose_plugin.recipes.schema import Recipe, Role

_ALL2ALL = (*BATCHED_ALL2ALL, ALL2ALL)


def check_rose_backends(recipe: Recipe) -> Iterator[Finding]:
    """Roles that name our experts where these refuse to start."""
    for name, role in recipe.roles.items():
        yield from _switched_off(recipe, name)
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
        if scheme != "mxfp8" and not (scheme == "bf16" and role.args.get("quantization") == "mxfp8"):
            yield recipe.finding(
                (*args, "moe-backend"), BACKEND, f"serves MXFP8 experts, and these are {scheme}", "mxfp8", "remove it"
            )


def what_needs_us(role: Role) -> str | None:
    """The first flag of a role that means nothing, or is refused, without this plugin."""
    ours = {"moe-backend": BACKEND, "linear-backend": BACKEND, "all2all-backend": ALL2ALL}
    named = [f"{flag} is {value}" for flag, value in ours.items() if role.args.get(flag) == value]
    settings = role.args.get("additional-config")
    if isinstance(settings, dict) and "rose" in settings:
        named.append("additional-config has settings of rose")
    return named[0] if named else None


def _switched_off(recipe: Recipe, name: str) -> Iterator[Finding]:
    """A role that names us in an environment where vLLM doesn't load us, so that it refuses the name."""
    role = recipe.roles[name]  # type: ignore[index]
    named = what_needs_us(role)
    if named is None:
        return
    environment = (recipe.kv_transfer.environment if recipe.kv_transfer else {}) | role.environment
    plugins = environment.get("VLLM_PLUGINS")
    for variable, bad, cure in (
        ("VLLM_ROSE_DISABLE", look_at_environment(environment).disabled, "remove it"),
        ("VLLM_PLUGINS", plugins is not None and "rose" not in plugins.split(","), f"write rose,{plugins}"),
    ):
        if bad:
            problem = f"keeps vLLM from loading the plugin, and {named}"
            keys: Keys = ("roles", name, "environment", variable)
            yield recipe.finding(keys, environment[variable], problem, "an environment that loads rose", cure)
