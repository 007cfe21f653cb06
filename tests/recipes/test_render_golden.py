import os
import subprocess
import sys

import pytest
from render_cases import GOLDEN, RECIPES, ROOT, golden_path, golden_text, renderings

from vllm_rose_plugin.recipes.schema import load_recipe

UPDATE = "python tests/recipes/update_golden.py"


def _name(rendering):
    return golden_path(*rendering).stem


@pytest.mark.parametrize("rendering", renderings(), ids=_name)
def test_rendering_is_as_it_was(rendering):
    path = golden_path(*rendering)
    assert path.is_file(), f"{path.name} is missing: {UPDATE}"
    assert golden_text(*rendering) == path.read_text(encoding="utf-8"), f"after a wanted change: {UPDATE}"


def test_no_golden_file_of_a_rendering_that_is_gone():
    assert {path.name for path in GOLDEN.iterdir()} == {golden_path(*rendering).name for rendering in renderings()}


def test_every_recipe_has_its_forms():
    for path in RECIPES:
        forms = {form for recipe, form, overlays in renderings() if recipe == path and not overlays}
        one_node = load_recipe(path).hardware.nodes == 1
        assert forms == {"vllm", "srt-slurm", "kubernetes"} | ({"docker-compose"} if one_node else set())


@pytest.mark.parametrize("seed", ["1", "2"])
def test_same_text_in_another_process(seed):
    """Nothing depends on hashing, the time or the folder."""
    rendering = next(r for r in renderings() if r[1] == "kubernetes")
    code = (
        "import sys; from pathlib import Path; from render_cases import golden_text;"
        f"sys.stdout.write(golden_text(Path({str(rendering[0])!r}), 'kubernetes', ()))"
    )
    path = os.pathsep.join([str(ROOT / "tests" / "recipes"), str(ROOT)])
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path, "TZ": "Asia/Tokyo"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert done.stdout == golden_path(*rendering).read_text(encoding="utf-8")
