import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from render_cases import OPTIONS, RECIPES, aggregated, split

from vllm_rose_plugin.recipes.render.common import Options, RenderError
from vllm_rose_plugin.recipes.render.slurm import render_srt_slurm
from vllm_rose_plugin.recipes.render.vllm import render_vllm
from vllm_rose_plugin.recipes.schema import load_recipe

KEYS = json.loads((Path(__file__).parent / "schemas" / "srt_slurm.json").read_text())["keys"]


def _job(recipe):
    return yaml.safe_load(render_srt_slurm(recipe, OPTIONS)[f"{recipe.name}.srt-slurm.yaml"])


def _check_keys(job):
    assert set(job) <= set(KEYS["job"])
    for name in set(job) & set(KEYS):
        assert set(job[name]) <= set(KEYS[name]), name
    assert set(job["backend"]["vllm_config"]) <= set(KEYS["vllm_config"])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_bash_reads_every_script(path, tmp_path):
    recipe = load_recipe(path)
    files = render_srt_slurm(recipe, OPTIONS) | {f"vllm-{n}": t for n, t in render_vllm(recipe, OPTIONS).items()}
    scripts = {name: text for name, text in files.items() if name.endswith((".sh", ".sbatch"))}
    assert f"{recipe.name}.sbatch" in scripts
    for name, text in scripts.items():
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), name


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_job_has_keys_that_srt_slurm_knows(path):
    recipe = load_recipe(path)
    job = _job(recipe)
    _check_keys(job)
    resources = job["resources"]
    assert sum(v for k, v in resources.items() if k.endswith("_nodes")) == recipe.hardware.nodes
    for short, role in (("prefill", "prefill"), ("decode", "decode"), ("agg", "serve")):
        if role in recipe.roles:
            assert resources[f"{short}_workers"] == recipe.roles[role].replicas
            assert resources[f"gpus_per_{short}"] == recipe.roles[role].gpus


def test_flags_survive_srt_slurm(tmp_path):
    """It drops ``false`` and prints a mapping as Python does, so neither may reach it."""
    args = {
        "port": 8100,
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "additional-config": {"rose": {"qk_norm": "auto"}},
        "served-model-name": ["one", "two"],
    }
    flags = _job(aggregated(tmp_path, {"gpus": 1, "args": args}))["backend"]["vllm_config"]["aggregated"]
    assert flags == {
        "enforce-eager": True,
        "no-enable-prefix-caching": True,
        "additional-config": '{"rose": {"qk_norm": "auto"}}',
        "served-model-name": ["one", "two"],
    }


def test_one_aggregated_worker_needs_no_dynamo(tmp_path):
    role = {"gpus": 4, "args": {"tensor-parallel-size": 4}}
    one = _job(aggregated(tmp_path, role))
    _check_keys(one)
    assert one["frontend"]["type"] == "vllm"
    assert "dynamo" not in one
    router = {"kind": "vllm-router"}
    two = _job(aggregated(tmp_path, role | {"replicas": 2}, router=router))
    assert two["frontend"]["type"] == "dynamo"
    assert two["dynamo"]["version"]


def test_roles_that_share_a_node(tmp_path):
    job = _job(split(tmp_path))
    assert (job["resources"]["prefill_nodes"], job["resources"]["decode_nodes"]) == (1, 0)
    assert job["backend"]["allow_prefill_decode_colocation"] is True
    assert json.loads(job["backend"]["vllm_config"]["decode"]["kv-transfer-config"])["kv_role"] == "kv_consumer"


def test_where_the_checkpoint_is(tmp_path):
    role = {"gpus": 1, "args": {}}
    public, local = (
        _job(aggregated(tmp_path, role, model={"checkpoint": name})) for name in ("Qwen/Qwen3-30B-A3B", "/models/a/B")
    )
    assert public["model"]["path"] == "hf:Qwen/Qwen3-30B-A3B"
    assert public["container_mounts"] == {"$ROSE_CACHE": "/var/cache/vllm"}
    assert local["model"]["path"] == "$ROSE_MODELS/B"
    assert local["container_mounts"] == {"$ROSE_CACHE": "/var/cache/vllm", "$ROSE_MODELS": "/models/a"}


def test_an_image_with_a_host_as_pyxis_wants_it(tmp_path):
    digest = f"@sha256:{'1' * 64}"
    options = Options(image=f"registry.example:5000/team/vllm-rose{digest}")
    files = render_srt_slurm(aggregated(tmp_path, {"gpus": 1, "args": {}}), options)
    assert f"IMAGE='registry.example:5000#team/vllm-rose{digest}'" in files["whole.sbatch"]
    assert yaml.safe_load(files["whole.srt-slurm.yaml"])["model"]["container"].startswith("registry.example:5000#")


def test_roles_alone_are_refused(tmp_path):
    with pytest.raises(RenderError, match="--role decode: a Slurm job holds all roles"):
        render_srt_slurm(split(tmp_path), Options(OPTIONS.image, OPTIONS.router_image, roles=("decode",)))


_SRUN = """#!/bin/bash
printf '%s\\n' "$*" "NODES $NODE_0 $NODE_1 $NODE_2" > "$SEEN/${!###*/}.txt"
case "${!#}" in *decode-0-0.sh) sleep 1; exit 3;; esac
exec sleep 60
"""


def _run_job(folder, **changes):
    """The batch job with stand-ins for Slurm; the decoder's first process ends after a second."""
    roles = {
        "prefill": {"gpus": 4, "args": {"tensor-parallel-size": 4}},
        "decode": {"gpus": 8, "args": {"port": 8200, "data-parallel-size": 8}},
    }
    rack = {"gpu": "GB200", "nodes": 3, "gpus_per_node": 4, "first_node": 5}  # the job counts its own nodes from 0
    recipe = split(folder, hardware=rack, roles=roles)
    for name, text in render_srt_slurm(recipe, OPTIONS).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    commands = {
        "srun": _SRUN,
        "scontrol": "#!/bin/bash\nprintf 'tray%s\\n' ${SLURM_JOB_NODELIST//,/ }\n",
        "getent": '#!/bin/bash\necho "10.0.0.${2#tray} STREAM $2"\n',
    }
    (folder / "bin").mkdir()
    (folder / "seen").mkdir()
    for name, text in commands.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    environment = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "SEEN": str(folder / "seen"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "4,5,6",
        "ROSE_CACHE": "/shared/cache",
        "ROSE_MODELS": "/shared/models",
    }
    environment = {key: value for key, value in (environment | changes).items() if value is not None}
    with subprocess.Popen(
        ["bash", "split.sbatch"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as job:
        code = job.wait(timeout=30)
        os.killpg(job.pid, 15) if code == 3 else None  # Slurm ends the other steps
        return code, job.stdout.read()


def test_the_batch_job_starts_every_process_and_ends_with_the_first(tmp_path):
    code, output = _run_job(tmp_path)
    assert code == 3, output
    assert "http://10.0.0.4:8000" in output
    seen = {path.stem: path.read_text().splitlines() for path in (tmp_path / "seen").iterdir()}
    places = {"prefill-0-0.sh": "tray4", "decode-0-0.sh": "tray5", "decode-0-1.sh": "tray6", "router.sh": "tray4"}
    assert set(seen) == set(places)
    assert '"${NODE_1}"' in (tmp_path / "split" / "decode-0-1.sh").read_text()
    mounts = f"{tmp_path}/split:/etc/rose:ro,/shared/cache:/var/cache/vllm,/shared/models:/models:ro"
    for name, (words, addresses) in seen.items():
        assert f"--nodelist={places[name]} " in words
        image = OPTIONS.router_image if name == "router.sh" else OPTIONS.image
        assert f"--container-image={image} --container-mounts={mounts} " in words
        assert words.endswith(f"bash /etc/rose/{name}")
        assert addresses == "NODES 10.0.0.4 10.0.0.5 10.0.0.6"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_JOB_NODELIST": "4,5"}, "split: 2 nodes, 3 are needed"),
        ({"ROSE_MODELS": None}, "ROSE_MODELS: the folder on a shared file system that is /models in the container"),
        ({"ROSE_CACHE": None}, "ROSE_CACHE: a folder on a shared file system"),
    ],
)
def test_the_batch_job_says_what_is_missing(tmp_path, changes, message):
    code, output = _run_job(tmp_path, **changes)
    assert code in (1, 2, 127)
    assert message in output
    assert not list((tmp_path / "seen").iterdir())
