"""What the renderings share: their options, addresses known only at start, caches, images, YAML that reads well."""

import json
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from vllm_rose_plugin.recipes.deployment import Process, processes
from vllm_rose_plugin.recipes.schema import Recipe

IMAGE = re.compile(r"[a-z0-9]([a-zA-Z0-9._:/-]*[a-zA-Z0-9])?@sha256:[0-9a-f]{64}")
LOAD_SECONDS = 3600
"""How long a server may load before it counts as dead: 240 GB of weights from a shared file system, and compiling."""
ROUTER_METRICS_PORT = 29_000
"""vllm-router's own default."""
CACHE_FOLDER = "/var/cache/vllm"
"""As in docker/Dockerfile: its user may write there, and a new Docker volume starts with the kernels of the image."""
CACHES = {
    "HF_HOME": f"{CACHE_FOLDER}/huggingface",
    "VLLM_CACHE_ROOT": f"{CACHE_FOLDER}/vllm",
    "ROSE_CACHE_DIR": f"{CACHE_FOLDER}/rose",
    "TRITON_CACHE_DIR": f"{CACHE_FOLDER}/triton",
    "FLASHINFER_WORKSPACE_BASE": f"{CACHE_FOLDER}/flashinfer",
    "CUDA_CACHE_PATH": f"{CACHE_FOLDER}/cuda",
    "XDG_CACHE_HOME": f"{CACHE_FOLDER}/xdg",
}
"""Everything that a server writes and wants to find again, all on the one cache volume of a deployment."""


class RenderError(ValueError):
    """A recipe that the asked-for form can't express, or an option that is missing."""


class AtStart(str):
    """A text that the shell or the kubelet replaces when the process starts, such as ``${NODE_1}``."""


@dataclass(frozen=True)
class Options:
    """What a recipe doesn't know about the place that it is rendered for."""

    image: str | None = None
    """``NAME@sha256:…`` of the servers."""
    router_image: str | None = None
    """``NAME@sha256:…`` of vllm-router."""
    roles: tuple[str, ...] = ()
    """Roles to render, ``router`` among them; empty for all."""
    nodes: tuple[str, ...] = ()
    """Addresses of the nodes, the first of the deployment first."""
    rdma_resource: str = "rdma/ib"
    """What the cluster's device plugin calls an InfiniBand port."""

    def wants(self, role: str) -> bool:
        """Whether this role is to be rendered."""
        return not self.roles or role in self.roles


@dataclass(frozen=True)
class Deployment:
    """A recipe with its processes placed."""

    recipe: Recipe
    options: Options
    processes: list[Process]

    @property
    def header(self) -> list[str]:
        """Where a rendered file comes from; comment lines without the comment sign."""
        overlays = "".join(f" --overlay {name}" for name in self.recipe.applied_overlays)
        return [
            f"{self.recipe.description}.",
            f"Status: {self.recipe.status}.",
            f"Rendered from {self.recipe.name}.yaml{overlays} by `rose render`: change the recipe, not this file.",
        ]

    def of_role(self, role: str) -> list[Process]:
        """The processes of one role."""
        return [process for process in self.processes if process.role == role]

    def urls(self, role: str, address: Callable[[int], str]) -> list[str]:
        """Where the role's servers answer."""
        return [f"http://{address(p.node)}:{p.ports['api']}" for p in self.of_role(role) if p.serves]

    @property
    def has_router(self) -> bool:
        """Whether a router stands in front."""
        return self.recipe.router.kind != "none"


def place(recipe: Recipe, options: Options, *, leader: Callable[[int], str], own: Callable[[int], str]) -> Deployment:
    """The recipe's processes, with these addresses."""
    return Deployment(recipe, options, processes(recipe, leader_address=leader, own_address=own))


def require_image(value: str | None, *, flag: str, what: str) -> str:
    """The image by digest, as given.

    Raises:
        RenderError: it is missing or has no digest.
    """
    if value is None:
        raise RenderError(f"{what} has no digest: give {flag} NAME@sha256:…, the image that you built or checked")
    if not IMAGE.fullmatch(value):
        raise RenderError(f"{flag} {value} is no image by digest; legal: NAME@sha256: and 64 hex digits")
    return value


def server_image(deployment: Deployment) -> str:
    """The digest of the servers' image."""
    container = deployment.recipe.container
    return require_image(deployment.options.image, flag="--image", what=f"{container.image}:{container.tag}")


def router_image(deployment: Deployment) -> str:
    """The digest of the router's image."""
    what = "the router (image vllm/vllm-router of the vLLM project, or any with vllm-router installed)"
    return require_image(deployment.options.router_image, flag="--router-image", what=what)


def split_flags(process: Process) -> tuple[dict[str, Any], dict[str, str]]:
    """The flags that can stand in a file, and those whose values are known only at start."""
    late: dict[str, str] = {flag: value for flag, value in process.flags.items() if isinstance(value, AtStart)}
    return {flag: value for flag, value in process.flags.items() if flag not in late}, late


def config_text(process: Process, flags: dict[str, Any], header: Iterable[str] = ()) -> str:
    """A file for ``vllm serve --config``: the model and every flag.

    vLLM turns each entry into words of a command line: ``true`` into ``--flag``, a mapping into JSON, a list into
    several words. ``false`` it drops without a word (``FlexibleArgumentParser.load_config_file`` looks for
    ``--no-flag`` among the flags of ``vllm``, not of ``vllm serve``), so that is written as ``no-flag: true``.
    """
    return comment(header) + to_yaml({"model": process.checkpoint} | file_entries(flags))


def file_entries(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags without ``false`` and without structures in lists, which readers of such files get wrong."""
    entries: dict[str, Any] = {}
    for flag, value in flags.items():
        if value is False:
            entries[f"no-{flag}"] = True
        elif isinstance(value, list):
            entries[flag] = [json.dumps(entry) if isinstance(entry, dict | list) else entry for entry in value]
        else:
            entries[flag] = value
    return entries


def models_folder(recipe: Recipe) -> str | None:
    """The folder to mount for the checkpoint; None where vLLM downloads it by its public name."""
    checkpoint = recipe.model.checkpoint
    return checkpoint.rsplit("/", 1)[0] if checkpoint.startswith("/") else None


def node_share(deployment: Deployment, process: Process) -> tuple[int, int]:
    """CPUs and MiB of memory of one process: its part of the node by GPUs."""
    resources, per_node = deployment.recipe.resources, deployment.recipe.hardware.gpus_per_node
    gpus = len(process.gpus)
    return max(1, resources.cpus * gpus // per_node), mebibytes(resources.memory) * gpus // per_node


def mebibytes(size: str) -> int:
    """``64Gi`` in MiB."""
    return int(size[:-2]) * {"Mi": 1, "Gi": 1 << 10, "Ti": 1 << 20}[size[-2:]]


def shell_word(value: str) -> str:
    """One word of a bash command line; variables are expanded only in :class:`AtStart`."""
    return f'"{value}"' if isinstance(value, AtStart) else shlex.quote(value)


def comment(lines: Iterable[str]) -> str:
    """Comment lines of YAML or bash."""
    return "".join(f"# {line}\n" for line in lines)


class _Dumper(yaml.SafeDumper):
    """No anchors, and texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, data: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(data), style="|" if "\n" in data else None)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(AtStart, _represent_text)


def to_yaml(*documents: Any) -> str:
    """YAML with the keys in the order given."""
    return "---\n".join(
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True) for document in documents
    )
