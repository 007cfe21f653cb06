import os

import pytest
import yaml
from render_cases import OPTIONS, split

from vllm_rose_plugin.cli import main


def _rose(capsys, *words):
    code = main(["render", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def recipe(tmp_path):
    split(tmp_path, overlays={"short": {"roles": {"decode": {"args": {"max-model-len": 512}}}}})
    return tmp_path / "split.yaml"


def test_files_into_a_folder(recipe, tmp_path, capsys):
    code, out, _ = _rose(capsys, recipe, "--as", "vllm", "--overlay", "short", "--out", tmp_path / "new" / "out")
    assert code == 0
    files = sorted(path.name for path in (tmp_path / "new" / "out").iterdir())
    assert sorted(line.rsplit("/", 1)[1] for line in out.splitlines()) == files
    assert "router.sh" in files
    assert os.access(tmp_path / "new" / "out" / "router.sh", os.X_OK)
    config = (tmp_path / "new" / "out" / "decode-0-0.yaml").read_text()
    assert yaml.safe_load(config)["max-model-len"] == 512
    assert "split.yaml --overlay short" in config


def test_one_file_to_the_screen_is_that_file(recipe, capsys):
    images = ("--image", OPTIONS.image, "--router-image", OPTIONS.router_image)
    code, out, _ = _rose(capsys, recipe, "--as", "docker-compose", *images)
    assert code == 0
    assert set(yaml.safe_load(out)["services"]) == {"prefill-0-0", "prefill-1-0", "decode-0-0", "router"}


def test_several_files_to_the_screen_are_told_apart(recipe, capsys):
    _, out, _ = _rose(capsys, recipe, "--as", "vllm", "--role", "decode")
    assert [line for line in out.splitlines() if line.startswith("##### ")] == [
        "##### decode-0-0.yaml",
        "##### decode-0-0.sh",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--as", "vllm", "--role", "serve"), "--role serve is no role of split; legal: prefill, decode, router"),
        (("--as", "vllm", "--overlay", "mtp"), "overlays = mtp: is no overlay of this recipe. Legal: short"),
        (("--as", "kubernetes"), "give --image NAME@sha256:"),
        (("--as", "docker-compose", "--image", OPTIONS.image), "give --router-image NAME@sha256:"),
        (("--as", "vllm", "--nodes", "a b"), "--nodes has 'a b'; legal: host names"),
        (("--as", "kubernetes", "--image", f"{OPTIONS.image}\n"), "is no image by digest"),
        (("--as", "kubernetes", "--image", OPTIONS.image, "--rdma-resource", "a b"), "--rdma-resource 'a b' is no"),
        (("--as", "vllm", "--nodes", "a,b"), "--nodes has 2 addresses; legal: 1"),
        (
            ("--as", "vllm", "--image", OPTIONS.image),
            "--image says nothing to --as vllm: remove it, or render srt-slurm",
        ),
        (("--as", "vllm", "--rdma-resource", "rdma/ib"), "--rdma-resource says nothing to --as vllm"),
        (("--as", "kubernetes", "--nodes", "a"), "--nodes says nothing to --as kubernetes: remove it, or render vllm"),
    ],
)
def test_wrong_usage_is_told_in_one_place(recipe, capsys, words, message):
    code, out, err = _rose(capsys, recipe, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("rose render: error: ")


def test_a_file_in_place_of_the_folder(recipe, capsys):
    code, _, err = _rose(capsys, recipe, "--as", "vllm", "--out", recipe)
    assert code == 2 and err.startswith(f"rose render: error: --out {recipe}: can't write ")


def test_a_file_that_is_no_recipe(tmp_path, capsys):
    (tmp_path / "no.yaml").write_text("recipe: 1\n")
    code, _, err = _rose(capsys, tmp_path / "no.yaml", "--as", "vllm")
    assert code == 2
    assert "no.yaml" in err
    assert "name" in err
