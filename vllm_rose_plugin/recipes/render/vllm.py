"""``--as vllm``: per process a ``vllm serve --config`` file and a script that starts it, and one for the router."""

import re

from vllm_rose_plugin.recipes.deployment import Process, flag_words
from vllm_rose_plugin.recipes.render.common import (
    AtStart,
    Deployment,
    Options,
    RenderError,
    comment,
    config_text,
    place,
    shell_word,
    split_flags,
)
from vllm_rose_plugin.recipes.render.router import static_router
from vllm_rose_plugin.recipes.schema import Recipe


def render_vllm(recipe: Recipe, options: Options) -> dict[str, str]:
    """Files by name. A process runs on the node that its script's comment names.

    Raises:
        RenderError: ``options.nodes`` has not one address per node, or what is none.
    """
    hardware = recipe.hardware
    if options.nodes and len(options.nodes) != hardware.nodes:
        raise RenderError(f"--nodes has {len(options.nodes)} addresses; legal: {hardware.nodes}, one per node")
    for node in options.nodes:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", node) or options.nodes.count(node) > 1:
            raise RenderError(f"--nodes has {node!r}; legal: host names or IPv4 addresses, each once, with commas only")

    def address(node: int) -> str:
        return options.nodes[node - hardware.first_node] if options.nodes else f"node-{node}"

    deployment = place(recipe, options, leader=address, own=address)
    files: dict[str, str] = {}
    for process in deployment.processes:
        if options.wants(process.role):
            files[f"{process.name}.yaml"] = config_text(process, process.flags, deployment.header)
            files[f"{process.name}.sh"] = start_script(deployment, process, address(process.node))
    if deployment.has_router and options.wants("router"):
        urls: dict[str, list[str]] = {role: deployment.urls(role, address) for role in recipe.roles}
        words = static_router(deployment, urls)
        files["router.sh"] = script(deployment.header, {}, words)
    return files


def start_script(deployment: Deployment, process: Process, node: str, caches: dict[str, str] | None = None) -> str:
    """Bash that becomes the server; the config file lies beside it."""
    header = [*deployment.header, f"{process.name} on {node}."]
    environment = (caches or {}) | process.environment
    if len(process.gpus) < deployment.recipe.hardware.gpus_per_node:
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, process.gpus))} | environment
    config = AtStart(f'$(dirname -- "${{BASH_SOURCE[0]}}")/{process.name}.yaml')
    late = split_flags(process)[1]
    words = ["vllm", "serve", "--config", config]
    for flag, value in late.items():
        words += [*flag_words({flag: value})[:1], value]
    return script(header, environment, words)


def script(header: list[str], environment: dict[str, str], words: list[str]) -> str:
    """A bash script that sets the environment and becomes the command."""
    lines = [f"export {name}={shell_word(value)}" for name, value in environment.items()]
    lines.append("exec " + command(words))
    return f"#!/bin/bash\n{comment(header)}set -euo pipefail\n" + "\n".join(lines) + "\n"


def command(words: list[str]) -> str:
    """A command line over several lines, a flag and its values on each."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--"):
            lines.append(shell_word(word))
        else:
            lines[-1:] = [f"{lines[-1]} {shell_word(word)}" if lines else shell_word(word)]
    return " \\\n  ".join(lines)
