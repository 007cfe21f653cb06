"""docker/Dockerfile: linted, and carried out line by line in a scratch folder, with no Docker engine."""

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from scratch_build import VENV, Build

import vllm_rose_plugin

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker/Dockerfile"
WRITABLE = ("VLLM_CACHE_ROOT", "ROSE_CACHE_DIR", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HOME")
# The example's shapes, so that few small kernels are compiled; the lines are those that an image runs.
ARGUMENTS = {
    "VERSION": "1.2.3",
    "REVISION": "abc",
    "WARM_MODEL": "tiny.json",
    "WARM_TARGETS": "sm_90a",
    "WARM_TENSOR_PARALLEL": "1",
    "WARM_LARGEST_STEP": "16",
}


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--failure-threshold", "style", DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as a build context, with one more model."""
    folder = tmp_path_factory.mktemp("context")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "vllm_rose_plugin", "docker"):
        (folder / name).symlink_to(ROOT / name)
    models = folder / "recipes/models"
    models.mkdir(parents=True)
    for path in (ROOT / "recipes/models").glob("*.json"):
        (models / path.name).symlink_to(path)
    (models / "tiny.json").symlink_to(ROOT / "examples/tiny_moe/target/config.json")
    return folder


@pytest.fixture(scope="module")
def build(context: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The whole file, carried out."""
    return Build(
        dockerfile=DOCKERFILE,
        context=context,
        scratch=tmp_path_factory.mktemp("scratch"),
        build_arguments=ARGUMENTS,
    )


@pytest.mark.slow
def test_every_run_line_runs(build: Build) -> None:
    lines = DOCKERFILE.read_text().splitlines()
    assert len(build.commands) == sum(line.startswith("RUN ") for line in lines) >= 4


@pytest.mark.slow
def test_the_image_holds_the_wheel_and_its_kernels(build: Build) -> None:
    image = build.image
    where = build.run(["python3", "-c", "import vllm_rose_plugin as p; print(p.__version__, p.__file__)"]).split()
    assert where[0] == vllm_rose_plugin.__version__
    assert where[1].startswith(VENV)
    listed = build.run(["rose", "cache", "list", "--json"])
    kernels = [json.loads(line) for line in listed.splitlines()]
    assert {kernel["target"] for kernel in kernels} == {"sm_90a"}
    assert {kernel["family"] for kernel in kernels} == {
        "gemm",
        "moe_combine",
        "moe_dispatch",
        "moe_route",
        "mxfp8_quantize",
        "qk_norm",
    }
    assert not any(kernel["fault"] for kernel in kernels)
    assert image.inside("/opt/rose/kernels.tar.gz").stat().st_size > 0


@pytest.mark.slow
def test_it_runs_as_another_user_that_can_write_the_caches(build: Build) -> None:
    image = build.image
    assert image.user == "10001:0"
    assert "vllm:x:10001:0:" in image.inside("/etc/passwd").read_text()
    assert image.entrypoint == ["vllm", "serve"]
    for name in WRITABLE:
        assert image.environment[name].startswith("/var/cache/vllm")
    cache = image.inside("/var/cache/vllm")
    for folder in (cache, *(path for path in cache.rglob("*") if path.is_dir())):
        assert folder.stat().st_mode & stat.S_IRWXG == stat.S_IRWXG, folder
    assert cache.stat().st_mode & stat.S_ISGID  # what a user makes there stays group 0's


@pytest.mark.slow
def test_labels_say_what_was_built_from_what(build: Build) -> None:
    labels = build.image.labels
    assert labels["org.opencontainers.image.version"] == "1.2.3"
    assert labels["org.opencontainers.image.revision"] == "abc"
    assert labels["org.opencontainers.image.base.name"] == build.image.arguments["BASE_IMAGE"]


@pytest.mark.slow
def test_a_run_line_that_fails_ends_the_build(context: Path, tmp_path: Path) -> None:
    changed = tmp_path / "Dockerfile"
    text = DOCKERFILE.read_text()
    assert text.count("&& install -d -m 2775 /opt/rose /var/cache/vllm") == 1
    changed.write_text(text.replace("&& install -d -m 2775 /opt/rose /var/cache/vllm", "&& mkdir /usr/rose"))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with pytest.raises(AssertionError, match="Read-only file system"):
        Build(dockerfile=changed, context=context, scratch=scratch, build_arguments=ARGUMENTS)
