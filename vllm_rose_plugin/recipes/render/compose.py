"""``--as docker-compose``: a deployment on one node, for ``docker compose up``."""

from typing import Any

from vllm_rose_plugin.recipes.deployment import Process
from vllm_rose_plugin.recipes.render.common import (
    CACHE_FOLDER,
    CACHES,
    LOAD_SECONDS,
    Deployment,
    Options,
    RenderError,
    comment,
    config_text,
    mebibytes,
    models_folder,
    node_share,
    place,
    router_image,
    server_image,
    to_yaml,
)
from vllm_rose_plugin.recipes.render.router import static_router
from vllm_rose_plugin.recipes.schema import Recipe

CONFIG_FOLDER = "/etc/rose"


def render_compose(recipe: Recipe, options: Options) -> dict[str, str]:
    """``NAME.compose.yaml``.

    Raises:
        RenderError: more than one node, a digest is missing, or single roles are asked for.
    """
    nodes = recipe.hardware.nodes
    if nodes != 1:
        raise RenderError(
            f"docker-compose runs on one node, {recipe.name} takes {nodes}; legal: hardware.nodes 1; "
            "use --as kubernetes or --as srt-slurm"
        )
    if options.roles:
        raise RenderError(
            f"--role {options.roles[0]}: a compose file holds all roles; leave it out and name the services to "
            "`docker compose up`"
        )
    deployment = place(recipe, options, leader=_address, own=_address)
    image = server_image(deployment)
    first = deployment.processes[0]
    services: dict[str, Any] = {p.name: _server(deployment, p, first, image) for p in deployment.processes}
    if deployment.has_router:
        services["router"] = _router(deployment)
    file = {
        "name": recipe.name.replace(".", "-"),
        "services": services,
        "configs": {
            process.name: {"content": _literal(config_text(process, process.flags))} for process in deployment.processes
        },
        "volumes": {"cache": {}},
    }
    notes = ["Needs Docker Compose 2.23.1 or newer and the NVIDIA Container Toolkit."]
    return {f"{recipe.name}.compose.yaml": comment([*deployment.header, *notes]) + to_yaml(file)}


def _address(node: int) -> str:
    return "127.0.0.1"  # the services share the host's network


def _server(deployment: Deployment, process: Process, first: Process, image: str) -> dict[str, Any]:
    recipe = deployment.recipe
    cpus, memory = node_share(deployment, process)
    config = f"{CONFIG_FOLDER}/{process.name}.yaml"
    environment = CACHES | process.environment
    volumes = [f"cache:{CACHE_FOLDER}"]
    models = models_folder(recipe)
    if models is not None:
        volumes.append(f"${{ROSE_MODELS:?the folder that is {models} in the container}}:{models}:ro")
    service: dict[str, Any] = {
        "image": image,
        "entrypoint": ["vllm", "serve"],
        "command": ["--config", config],
        "network_mode": "host",
    }
    if process is first:
        service |= {"init": True, "ipc": "shareable", "shm_size": f"{mebibytes(recipe.resources.shared_memory)}m"}
    else:  # CUDA opens another process's memory only within one IPC and one PID namespace
        service |= {"ipc": f"service:{first.name}", "pid": f"service:{first.name}"}
    service |= {
        "cap_add": ["IPC_LOCK"],
        "ulimits": {"memlock": -1, "stack": 67_108_864},
        "environment": {key: _literal(value) for key, value in environment.items()},
        "volumes": volumes,
        "configs": [{"source": process.name, "target": config}],
        "deploy": {
            "resources": {
                "limits": {"cpus": str(cpus), "memory": f"{memory}m"},
                "reservations": {
                    "devices": [
                        {
                            "driver": "nvidia",
                            "device_ids": [str(gpu) for gpu in process.gpus],
                            "capabilities": ["gpu"],
                        }
                    ]
                },
            }
        },
        "restart": "unless-stopped",
    }
    if process.serves:
        service["healthcheck"] = _healthcheck(process.ports["api"], LOAD_SECONDS)
    if process is not first:
        service["depends_on"] = {first.name: {"condition": "service_started"}}
    return service


def _router(deployment: Deployment) -> dict[str, Any]:
    urls: dict[str, list[str]] = {role: deployment.urls(role, _address) for role in deployment.recipe.roles}
    words = static_router(deployment, urls)
    return {
        "image": router_image(deployment),
        "entrypoint": words[:1],
        "command": words[1:],
        "network_mode": "host",
        "depends_on": {p.name: {"condition": "service_healthy"} for p in deployment.processes if p.serves},
        "healthcheck": _healthcheck(deployment.recipe.router.port, 60),
        "restart": "unless-stopped",
    }


def _healthcheck(port: int, start_seconds: int) -> dict[str, Any]:
    """Asks ``/health`` with Python, which both images have."""
    ask = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/health', timeout=5)"
    times = {"interval": "10s", "timeout": "10s", "retries": 6, "start_period": f"{start_seconds}s"}
    return {"test": ["CMD", "python3", "-c", ask], **times}


def _literal(text: str) -> str:
    """Keeps compose from replacing variables."""
    return text.replace("$", "$$")
