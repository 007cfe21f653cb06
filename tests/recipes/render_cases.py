"""Recipes and renderings that the tests of ``rose render`` share."""

import copy
from pathlib import Path
from typing import Any

import yaml

from vllm_rose_plugin.cli.render import FORMS
from vllm_rose_plugin.recipes.render.common import Options
from vllm_rose_plugin.recipes.render.compose import render_compose
from vllm_rose_plugin.recipes.render.kubernetes import render_kubernetes
from vllm_rose_plugin.recipes.render.slurm import render_srt_slurm
from vllm_rose_plugin.recipes.render.vllm import render_vllm
from vllm_rose_plugin.recipes.schema import Recipe, load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
GOLDEN = Path(__file__).parent / "golden"
RENDER = dict(zip(FORMS, (render_vllm, render_srt_slurm, render_kubernetes, render_compose), strict=True))
# No image has been published: these digests are of nothing.
OPTIONS = Options(
    image=f"example/vllm-rose@sha256:{'1' * 64}",
    router_image=f"vllm/vllm-router@sha256:{'2' * 64}",
)
_SPLIT: dict[str, Any] = {
    "recipe": 1,
    "name": "split",
    "description": "Prefill and decode of a small model",
    "status": "not measured",
    "hardware": {"gpu": "H200", "nodes": 1, "gpus_per_node": 8},
    "model": {
        "id": "Qwen/Qwen3-30B-A3B",
        "checkpoint": "/models/Qwen3-30B-A3B-MXFP8",
        "config": "qwen3-30b-a3b.json",
        "weights": "mxfp8",
    },
    "container": {"image": "vllm-rose", "tag": "0.1.0"},
    "resources": {"cpus": 96, "memory": "800Gi", "shared_memory": "64Gi", "cache_volume": "1Ti"},
    "kv_transfer": {"connector": "NixlConnector", "transport": "ucx/ib", "environment": {"UCX_TLS": "rc,cuda_copy"}},
    "roles": {
        "prefill": {"replicas": 2, "gpus": 2, "args": {"port": 8100, "tensor-parallel-size": 2}},
        "decode": {"replicas": 1, "gpus": 4, "args": {"port": 8200, "data-parallel-size": 4}},
    },
    "router": {"kind": "vllm-router", "port": 8000, "policy": "consistent_hash"},
    "benchmark": {"input_tokens": 128, "output_tokens": 16, "concurrency": [1]},
}


def split(folder: Path, **changes: Any) -> Recipe:
    """Two prefill servers and a decoder on one H200 node, with some top-level keys changed; None removes one."""
    data = copy.deepcopy(_SPLIT)
    for key, value in changes.items():
        if value is None:
            data.pop(key)
        elif isinstance(value, dict) and isinstance(data.get(key), dict) and key != "roles":
            data[key] |= value
        else:
            data[key] = value
    path = folder / f"{data['name']}.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return load_recipe(path)


def aggregated(folder: Path, role: dict[str, Any], **changes: Any) -> Recipe:
    """One role ``serve``, by default with no router in front."""
    router = changes.pop("router", {"kind": "none", "policy": None})
    data = {"name": "whole", "kv_transfer": None, "roles": {"serve": role}, "router": router}
    return split(folder, **(data | changes))


def renderings() -> list[tuple[Path, str, tuple[str, ...]]]:
    """Recipe, form and overlays of every golden file: all forms that apply, and each overlay as vLLM's config."""
    result: list[tuple[Path, str, tuple[str, ...]]] = []
    for path in RECIPES:
        recipe = load_recipe(path)
        forms = [form for form in FORMS if form != "docker-compose" or recipe.hardware.nodes == 1]
        result += [(path, form, ()) for form in forms]
        result += [(path, "vllm", (overlay,)) for overlay in recipe.overlays]
    return result


def golden_path(path: Path, form: str, overlays: tuple[str, ...]) -> Path:
    """Where a rendering's golden file lies."""
    return GOLDEN / f"{'+'.join([path.stem, *overlays])}.{form}.txt"


def golden_text(path: Path, form: str, overlays: tuple[str, ...]) -> str:
    """All files of a rendering in one text."""
    files = RENDER[form](load_recipe(path, overlays=overlays), OPTIONS)
    return "".join(f"##### {name}\n{text}" for name, text in files.items())
