import dataclasses
import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from render_cases import OPTIONS, RECIPES, ROOT, aggregated, split
from warm_python import WARM

from vllm_rose_plugin.recipes.deployment import processes
from vllm_rose_plugin.recipes.render.common import RenderError
from vllm_rose_plugin.recipes.render.kubernetes import render_kubernetes
from vllm_rose_plugin.recipes.render.slurm import render_srt_slurm
from vllm_rose_plugin.recipes.render.vllm import render_vllm
from vllm_rose_plugin.recipes.schema import load_recipe

PARSER = Path(__file__).parent / "parse_command_lines.py"
SOURCES_033 = Path(os.environ.get("ROSE_VLLM_033", ROOT / "build" / "vllm-0.33.0"))


def _differences(version, pairs):
    """Where the two command lines of each pair differ, for one vLLM's parser."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ROSE_", "VLLM_"))}
    environment = kept | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_TARGET_DEVICE": "cpu"}
    if version == "0.33":
        assert (SOURCES_033 / "vllm" / "__init__.py").is_file(), f"no vLLM 0.33 sources in {SOURCES_033}: `make test`"
        environment["PYTHONPATH"] = os.pathsep.join([str(SOURCES_033), str(ROOT)])
    done = WARM.run([str(PARSER)], stdin=json.dumps(pairs), env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def _started_by_files(folder):
    """For processes of every recipe and overlay: started with its file, and with its flags spelled out.

    Ranks after the second differ from it by one number, and an overlay often leaves a role as it was.
    """
    seen = set()
    for path in RECIPES:
        for overlays in [(), *((name,) for name in load_recipe(path).overlays)]:
            recipe = load_recipe(path, overlays=overlays)
            files = render_vllm(recipe, OPTIONS)
            for process in processes(recipe):
                config = yaml.safe_load(files[f"{process.name}.yaml"])
                if process.node_rank < 2 and process.replica == 0 and str(config) not in seen:
                    seen.add(str(config))
                    file = folder / f"{len(seen)}-{process.name}.yaml"
                    file.write_text(files[f"{process.name}.yaml"])
                    yield ["vllm", "serve", "--config", str(file)], process.argv


def _started_elsewhere(folder):
    """In Kubernetes and Slurm the meeting point is on the command line; in Kubernetes every port is 8000."""
    roles = {
        "prefill": {"gpus": 4, "args": {"tensor-parallel-size": 4}},
        "decode": {"gpus": 8, "args": {"port": 8200, "data-parallel-size": 8, "enable-expert-parallel": True}},
    }
    recipe = split(folder, hardware={"gpu": "GB200", "nodes": 3, "gpus_per_node": 4}, roles=roles)
    (text,) = render_kubernetes(recipe, OPTIONS).values()
    objects = list(yaml.safe_load_all(text))
    configs = {name: data for o in objects if o["kind"] == "ConfigMap" for name, data in o["data"].items()}
    slurm = render_srt_slurm(recipe, OPTIONS)
    for process in processes(recipe, leader_address=lambda node: "10.0.0.9", own_address=lambda node: "10.0.0.9"):
        late = ["--data-parallel-address", "10.0.0.9"] if process.nodes > 1 else []
        file = folder / f"slurm-{process.name}.yaml"
        file.write_text(slurm[f"{recipe.name}/{process.name}.yaml"])
        yield ["vllm", "serve", "--config", str(file), *late], process.argv
        file = folder / f"kubernetes-{process.name}.yaml"
        file.write_text(configs[f"{process.role}-{process.node_rank}.yaml"])
        ports = {"port": 8000} if process.serves else {}
        moved = dataclasses.replace(process, flags=process.flags | ports)
        yield ["vllm", "serve", "--config", str(file), *late], moved.argv


def _hard_values(folder):
    """Values of every kind that a flag can have, and then other flags than in the file."""
    args = {
        "port": 8100,
        "enable-prefix-caching": False,
        "enforce-eager": True,
        "gpu-memory-utilization": 0.85,
        "served-model-name": ["one", "two"],
        "compilation-config": {"cudagraph_mode": "FULL_DECODE_ONLY", "pass_config": {"fuse_norm_quant": True}},
        "additional-config": {"rose": {"qk_norm": "auto"}},
        "hf-overrides": {"max_position_embeddings": 4096, "text": 'it\'s "x"'},
        "max-model-len": 4096,
        "kv-cache-dtype": "fp8",
    }
    recipe = aggregated(folder, {"gpus": 1, "args": args})
    (process,) = processes(recipe)
    file = folder / "hard.yaml"
    file.write_text(render_vllm(recipe, OPTIONS)["serve-0-0.yaml"])
    other = dataclasses.replace(process, flags=process.flags | {"max-model-len": 8192, "enforce-eager": False})
    for argv in (process.argv, other.argv):
        yield ["vllm", "serve", "--config", str(file)], argv


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_config_files_are_the_flags_to_vllm(tmp_path, version):
    pairs = [*_started_by_files(tmp_path), *_started_elsewhere(tmp_path), *_hard_values(tmp_path)]
    *differences, changed = _differences(version, pairs)
    assert len(differences) == len(pairs) - 1
    assert [(pair, found) for pair, found in zip(pairs, differences, strict=False) if found] == []
    assert changed == {"max_model_len": ["4096", "8192"], "enforce_eager": ["True", "False"]}  # it does look


def _run_script(folder, files, name, **environment):
    """What a start script hands to ``vllm`` and in what environment; a stand-in for vllm writes it down."""
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    stand_in = folder / "bin" / name
    stand_in.parent.mkdir(exist_ok=True)
    stand_in.write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$SEEN.words"\nenv -0 > "$SEEN.env"\n')
    stand_in.chmod(0o755)
    seen = folder / "seen"

    def run(script):
        path = f"{stand_in.parent}:{os.environ['PATH']}"
        subprocess.run(["bash", script], env=environment | {"PATH": path, "SEEN": str(seen)}, check=True)
        words = (folder / "seen.words").read_text().split("\0")[:-1]
        lines = (folder / "seen.env").read_text().split("\0")[:-1]
        return words, dict(line.split("=", 1) for line in lines)

    return run


def test_start_scripts_hand_over_what_the_process_needs(tmp_path):
    odd = {"MARK": "it's $HOME", "VLLM_LOGGING_LEVEL": "INFO"}
    roles = {
        "prefill": {"gpus": 4, "args": {"tensor-parallel-size": 4}, "environment": odd},
        "decode": {"gpus": 4, "args": {"port": 8200, "data-parallel-size": 4}},
    }
    recipe = split(tmp_path, roles=roles)
    files = render_vllm(recipe, dataclasses.replace(OPTIONS, nodes=("10.0.0.1",)))
    run = _run_script(tmp_path, files, "vllm")
    words, environment = run(tmp_path / "prefill-0-0.sh")
    assert words == ["serve", "--config", str(tmp_path / "prefill-0-0.yaml")]
    assert odd.items() <= environment.items()
    assert environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.1"
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert run(tmp_path / "decode-0-0.sh")[1]["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_addresses_of_nodes(tmp_path):
    roles = {
        "prefill": {"gpus": 4, "args": {"tensor-parallel-size": 4}},
        "decode": {"gpus": 8, "args": {"port": 8200, "data-parallel-size": 8}},
    }
    rack = {"gpu": "GB200", "nodes": 3, "gpus_per_node": 4, "first_node": 5}
    recipe = split(tmp_path, hardware=rack, roles=roles)
    hosts = ("one.example", "two.example", "three.example")
    files = render_vllm(recipe, dataclasses.replace(OPTIONS, nodes=hosts))
    assert yaml.safe_load(files["decode-0-1.yaml"])["data-parallel-address"] == "two.example"
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST=three.example" in files["decode-0-1.sh"]
    words = shlex.split(files["router.sh"].partition("exec ")[2])
    assert words[words.index("--prefill") + 1] == "http://one.example:8100"
    assert words[words.index("--decode") + 1] == "http://two.example:8200"
    assert yaml.safe_load(render_vllm(recipe, OPTIONS)["decode-0-1.yaml"])["data-parallel-address"] == "node-6"
    with pytest.raises(RenderError, match="--nodes has 2 addresses; legal: 3"):
        render_vllm(recipe, dataclasses.replace(OPTIONS, nodes=hosts[:2]))


def test_only_the_files_of_a_role(tmp_path):
    recipe = split(tmp_path)
    whole = render_vllm(recipe, OPTIONS)
    parts = [
        render_vllm(recipe, dataclasses.replace(OPTIONS, roles=(role,))) for role in ("prefill", "decode", "router")
    ]
    assert [set(part) for part in parts] == [
        {"prefill-0-0.yaml", "prefill-0-0.sh", "prefill-1-0.yaml", "prefill-1-0.sh"},
        {"decode-0-0.yaml", "decode-0-0.sh"},
        {"router.sh"},
    ]
    assert {name: text for part in parts for name, text in part.items()} == whole


def test_slurm_scripts_take_addresses_from_the_job(tmp_path):
    roles = {
        "prefill": {"gpus": 4, "args": {"tensor-parallel-size": 4}},
        "decode": {"gpus": 8, "args": {"port": 8200, "data-parallel-size": 8}},
    }
    recipe = split(tmp_path, hardware={"gpu": "GB200", "nodes": 3, "gpus_per_node": 4}, roles=roles)
    run = _run_script(tmp_path, render_srt_slurm(recipe, OPTIONS), "vllm", NODE_1="10.0.0.2", NODE_2="10.0.0.3")
    words, environment = run(tmp_path / "split" / "decode-0-1.sh")
    config = str(tmp_path / "split" / "decode-0-1.yaml")
    assert words == ["serve", "--config", config, "--data-parallel-address", "10.0.0.2"]
    assert environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.3"
    assert environment["ROSE_CACHE_DIR"] == "/var/cache/vllm/rose"
