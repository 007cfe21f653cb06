"""``--as srt-slurm``: a job for NVIDIA's srt-slurm, and a plain batch job that needs neither it nor Dynamo.

The job file follows srt-slurm 0.3.0 (https://github.com/NVIDIA/srt-slurm, ``docs/config-reference.md``). Its only
frontend for prefill with decode, or for several vLLM workers, is NVIDIA Dynamo, which starts the workers as
``python3 -m dynamo.vllm`` in place of ``vllm serve``; one aggregated worker is started as ``vllm serve`` itself. The
plain job runs the files of ``--as vllm`` in containers (Slurm with pyxis and enroot) behind the recipe's own router.
"""

import json
from typing import Any

from vllm_rose_plugin.recipes.hardware import GPUS
from vllm_rose_plugin.recipes.render.common import (
    CACHE_FOLDER,
    CACHES,
    AtStart,
    Deployment,
    Options,
    RenderError,
    comment,
    config_text,
    file_entries,
    models_folder,
    place,
    router_image,
    server_image,
    split_flags,
    to_yaml,
)
from vllm_rose_plugin.recipes.render.router import static_router
from vllm_rose_plugin.recipes.render.vllm import script, start_script
from vllm_rose_plugin.recipes.schema import Recipe

DYNAMO = "1.6.1"
"""ai-dynamo on PyPI; its own vLLM extra asks for vLLM 0.31, so with 0.32 and 0.33 it has not been run."""
TIME_LIMIT = "04:00:00"
CONFIG_FOLDER = "/etc/rose"
_MODES = {"prefill": "prefill", "decode": "decode", "serve": "aggregated"}
_ALLOCATED = ("port", "data-parallel-hybrid-lb", "api-server-count")
"""Flags that srt-slurm and Dynamo choose themselves."""


def render_srt_slurm(recipe: Recipe, options: Options) -> dict[str, str]:
    """``NAME.srt-slurm.yaml``, ``NAME.sbatch``, and in ``NAME/`` what the batch job starts.

    Raises:
        RenderError: a digest is missing, or single roles are asked for.
    """
    if options.roles:
        raise RenderError(f"--role {options.roles[0]}: a Slurm job holds all roles; leave it out, or use --as vllm")
    first = recipe.hardware.first_node

    def address(node: int) -> str:
        return AtStart(f"${{NODE_{node - first}}}")

    deployment = place(recipe, options, leader=address, own=address)
    image = server_image(deployment)
    name = recipe.name
    files = {
        f"{name}.srt-slurm.yaml": _srt_job(deployment, image),
        f"{name}.sbatch": _batch_job(deployment, image),
    }
    for process in deployment.processes:
        flags = split_flags(process)[0]
        files[f"{name}/{process.name}.yaml"] = config_text(process, flags, deployment.header)
        node = f"node {process.node - first} of the job"
        files[f"{name}/{process.name}.sh"] = start_script(deployment, process, node, CACHES)
    if deployment.has_router:
        urls: dict[str, list[str]] = {role: deployment.urls(role, address) for role in recipe.roles}
        words = [AtStart(word) if "${" in word else word for word in static_router(deployment, urls)]
        files[f"{name}/router.sh"] = script(deployment.header, {}, words)
    return files


def _srt_job(deployment: Deployment, image: str) -> str:
    recipe = deployment.recipe
    hardware, checkpoint = recipe.hardware, recipe.model.checkpoint
    models = models_folder(recipe)
    direct = recipe.kv_transfer is None and recipe.roles["serve"].replicas == 1
    resources: dict[str, Any] = {"gpu_type": hardware.gpu.lower(), "gpus_per_node": hardware.gpus_per_node}
    backend: dict[str, Any] = {"type": "vllm", "connector": None, "vllm_config": {}}
    seen: set[int] = set()
    for role, settings in recipe.roles.items():
        short = "agg" if role == "serve" else role
        nodes = {process.node for process in deployment.of_role(role)}
        resources[f"{short}_nodes"] = len(nodes - seen)  # 0: on the nodes of the role before
        resources[f"{short}_workers"] = settings.replicas
        resources[f"gpus_per_{short}"] = settings.gpus
        seen |= nodes
        leader = deployment.of_role(role)[0]
        environment = {key: value for key, value in leader.environment.items() if not _allocated(key)}
        backend[f"{_MODES[role]}_environment"] = {**CACHES, **environment}
        backend["vllm_config"][_MODES[role]] = _srt_flags(settings.args | _kv(leader.flags))
    if len(seen) < sum(len({p.node for p in deployment.of_role(role)}) for role in recipe.roles):
        backend["allow_prefill_decode_colocation"] = True
    job: dict[str, Any] = {
        "name": recipe.name,
        "model": {
            # srt-slurm mounts a folder of the host at /model, and expands variables of whoever submits the job.
            "path": f"hf:{checkpoint}" if models is None else f"$ROSE_MODELS{checkpoint.removeprefix(models)}",
            "container": _pyxis(image),
            "precision": recipe.model.weights,
        },
        "resources": resources,
        "slurm": {"time_limit": TIME_LIMIT},
    }
    if direct:
        job["frontend"] = {"type": "vllm", "enable_multiple_frontends": False}
    else:
        job["dynamo"] = {"install": True, "version": DYNAMO}
        job["frontend"] = {"type": "dynamo", "enable_multiple_frontends": False}
    job["backend"] = backend
    # The checkpoint is at /model; a drafting model is where the flags say.
    job["container_mounts"] = {"$ROSE_CACHE": CACHE_FOLDER} | ({"$ROSE_MODELS": models} if models else {})
    job["health_check"] = {"max_attempts": 360, "interval_seconds": 10}
    benchmark = recipe.benchmark
    job["benchmark"] = {
        "type": "sa-bench",
        "isl": benchmark.input_tokens,
        "osl": benchmark.output_tokens,
        "concurrencies": benchmark.concurrency,
        "req_rate": "inf",
    }
    notes = ["srt-slurm chooses ports and node ranks, and mounts the checkpoint at /model."]
    if not direct:
        notes.append(f"Its frontend is Dynamo; ai-dynamo {DYNAMO} is made for vLLM 0.31 and was not run with this one.")
    return comment([*deployment.header, *notes]) + to_yaml(job)


def _one_rack(deployment: Deployment) -> bool:
    """Whether Slurm must take nodes of one NVLink domain (``--segment``, topology/block)."""
    hardware = deployment.recipe.hardware
    return hardware.nodes > 1 and GPUS[hardware.gpu].nodes_per_rack > 1


def _allocated(variable: str) -> bool:
    return variable.startswith("VLLM_NIXL_SIDE_CHANNEL_")


def _kv(flags: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flags.items() if key == "kv-transfer-config"}


def _srt_flags(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags as srt-slurm turns them into words: it drops ``false``, and prints a mapping as Python does."""
    entries = file_entries({flag: value for flag, value in flags.items() if flag not in _ALLOCATED})
    return {flag: json.dumps(value) if isinstance(value, dict) else value for flag, value in entries.items()}


def _batch_job(deployment: Deployment, image: str) -> str:
    recipe, hardware = deployment.recipe, deployment.recipe.hardware
    name = recipe.name
    directives = {
        "job-name": name,
        "nodes": hardware.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": hardware.gpus_per_node,
        "time": TIME_LIMIT,
        "output": "%x-%j.log",
    }
    if _one_rack(deployment):
        directives["segment"] = hardware.nodes
    models = models_folder(recipe)
    mounts = f"$PWD/{name}:{CONFIG_FOLDER}:ro,$ROSE_CACHE:{CACHE_FOLDER}"
    checks = [': "${ROSE_CACHE:?a folder on a shared file system, for caches}"']
    if models is not None:
        checks.append(f': "${{ROSE_MODELS:?the folder on a shared file system that is {models} in the container}}"')
        mounts += f",$ROSE_MODELS:{models}:ro"
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{key}={value}" for key, value in directives.items()),
        "#SBATCH --exclusive",
        comment([*deployment.header, f"Submit it from the folder that holds {name}/."]).rstrip(),
        "set -euo pipefail",
        *checks,
        f"IMAGE='{_pyxis(image)}'",
        f'MOUNTS="{mounts}"',
        'mkdir -p "logs-$SLURM_JOB_ID"',
        "",
        "# vLLM and NIXL bind to these, so they are addresses, not names.",
        'mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        f'[ "${{#names[@]}}" -eq {hardware.nodes} ] '
        f'|| {{ echo "{name}: ${{#names[@]}} nodes, {hardware.nodes} are needed" >&2; exit 2; }}',
        'for node in "${!names[@]}"; do',
        "  address=$(getent ahostsv4 \"${names[node]}\" | awk 'NR == 1 { print $1 }')",
        '  [ -n "$address" ] || { echo "no address for ${names[node]}" >&2; exit 2; }',
        '  export "NODE_$node=$address"',
        "done",
        "",
        "start() { # name, node, image",
        '  srun --overlap --nodes=1 --ntasks=1 --nodelist="${names[$2]}" --container-image="$3" \\',
        '    --container-mounts="$MOUNTS" --no-container-mount-home --output="logs-$SLURM_JOB_ID/$1.log" \\',
        f'    bash "{CONFIG_FOLDER}/$1.sh" &',
        "}",
    ]
    for process in deployment.processes:
        lines.append(f'start {process.name} {process.node - hardware.first_node} "$IMAGE"')
    if deployment.has_router:
        lines.append(f"start router 0 '{_pyxis(router_image(deployment))}'")
    front = recipe.router.port if deployment.has_router else deployment.processes[0].ports["api"]
    lines += [f'echo "asks go to http://$NODE_0:{front}; logs are in logs-$SLURM_JOB_ID"', ""]
    lines += ["# One that ends takes the job with it: a decoder without its peers waits for ever.", "wait -n", "exit 1"]
    return "\n".join(lines) + "\n"


def _pyxis(image: str) -> str:
    """pyxis wants ``HOST#PATH`` where the first part of a name is a host."""
    host, _, path = image.partition("/")
    return f"{host}#{path}" if path and ("." in host or ":" in host) else image
