"""The ``rose render`` lines of the guides, run as they stand, with digests of nothing."""

import os
import re
import shlex

import pytest
from render_cases import OPTIONS, ROOT

from vllm_rose_plugin.cli import main


def _lines(page):
    return re.findall(r"^ {4,}(rose render .*)$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("page", ["kubernetes.md", "slurm.md"])
def test_rendering_as_the_guide_says(page, tmp_path, monkeypatch, capsys):
    lines = _lines(page)
    assert len(lines) == 2
    monkeypatch.setenv("IMAGE", OPTIONS.image)
    monkeypatch.setenv("ROUTER_IMAGE", OPTIONS.router_image)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    for line in lines:
        assert main(shlex.split(os.path.expandvars(line))[1:]) == 0
    written = capsys.readouterr().out.split()
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = set(re.findall(r"(?:rendered|by-hand)/\S+\.(?:yaml|sbatch|sh)", text))
    named |= {f"rendered/{name}" for name in re.findall(r"\S+\.sbatch(?=\n)", text) if "NAME" not in name}
    assert named and named <= set(written)
