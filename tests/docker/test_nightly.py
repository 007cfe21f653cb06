"""The nightly workflow: GitHub's schema, and its scripts run with a docker and a gh that only take notes."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

WORKFLOW = Path(__file__).resolve().parents[2] / ".github/workflows/nightly.yml"
DIGEST = f"sha256:{'a1' * 32}"


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    """The parsed file."""
    return yaml.safe_load(WORKFLOW.read_text())


def step(workflow: dict[str, Any], job: str, name: str) -> str:
    """The script of a step."""
    return next(step["run"] for step in workflow["jobs"][job]["steps"] if step.get("name") == name)


class Runner:
    """Runs a script as GitHub's `shell: bash` does, with stand-ins first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.summary, self.output, self.calls = folder / "summary", folder / "output", folder / "calls"
        (folder / "bin").mkdir()

    def stand_in(self, name: str, script: str) -> None:
        """A command that notes how it was called, then runs ``script``."""
        path = self.folder / "bin" / name
        path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> "{self.calls}"\n{script}\n')
        path.chmod(0o755)

    def run(self, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """The script's outcome; expressions of GitHub's are their own text without braces."""
        script = re.sub(r"\$\{\{ (.*?) \}\}", r"<\1>", script)
        own = {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "GITHUB_STEP_SUMMARY": str(self.summary)}
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
            cwd=self.folder,
            env=own | {"GITHUB_OUTPUT": str(self.output), **environment},
            capture_output=True,
            text=True,
            timeout=30,
        )


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    """In an empty folder."""
    return Runner(tmp_path)


def test_it_follows_githubs_schema(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    assert subprocess.run([*command, WORKFLOW], capture_output=True).returncode == 0
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOW.read_text().replace("timeout-minutes: 180", "timeout-minute: 180"))
    assert subprocess.run([*command, wrong], capture_output=True).returncode == 1


def test_it_runs_every_night_on_both_platforms_and_for_both_bases(workflow: dict[str, Any]) -> None:
    triggers = workflow[True]  # YAML 1.1 reads the key `on` so
    assert [set(entry) for entry in triggers["schedule"]] == [{"cron"}]
    assert workflow["jobs"]["build"]["strategy"]["matrix"] == {
        "base": ["release", "rubin"],
        "platform": ["amd64", "arm64"],
    }
    assert workflow["defaults"]["run"]["shell"] == "bash"  # else a failing build would hide behind `tee`
    for job in workflow["jobs"].values():
        for script in (step["run"] for step in job["steps"] if "run" in step):
            assert subprocess.run(["bash", "-n", "-c", re.sub(r"\$\{\{.*?\}\}", "x", script)]).returncode == 0


def test_bases_are_resolved_to_digests(workflow: dict[str, Any], runner: Runner) -> None:
    script = step(workflow, "bases", "Resolve the bases to digests")
    bases = {"RELEASE_BASE": "vllm/vllm-openai:v0.33.0", "RUBIN_BASE": "host:5000/vllm:nightly"}
    runner.stand_in("docker", f"echo {DIGEST}")
    assert runner.run(script, **bases).returncode == 0
    assert runner.output.read_text().splitlines() == [
        f"release=vllm/vllm-openai@{DIGEST}",
        f"rubin=host:5000/vllm@{DIGEST}",
    ]
    assert "vllm/vllm-openai:v0.33.0" in runner.summary.read_text()
    runner.stand_in("docker", "echo latest")
    assert runner.run(script, **bases).returncode != 0


def test_a_failing_build_fails_its_step(workflow: dict[str, Any], runner: Runner) -> None:
    runner.stand_in("docker", "echo '#9 12.1 error: seam: gone'; exit 1")
    (runner.folder / "vllm_rose_plugin").mkdir()
    (runner.folder / "vllm_rose_plugin/__init__.py").write_text('__version__ = "1.2.3"\n')
    done = runner.run(step(workflow, "build", "Build"), GITHUB_SHA="abc", BASE_IMAGE=f"vllm@{DIGEST}")
    assert done.returncode != 0
    called = runner.calls.read_text()
    assert f"--build-arg BASE_IMAGE=vllm@{DIGEST} --build-arg VERSION=1.2.3 --build-arg REVISION=abc" in called
    (log,) = (runner.folder / "report").glob("build-*.log")
    assert "seam: gone" in log.read_text()


@pytest.mark.parametrize("already_open", [False, True])
def test_a_broken_seam_opens_one_issue(workflow: dict[str, Any], runner: Runner, already_open: bool) -> None:
    script = step(workflow, "report", "Open an issue, or add to the open one")
    number = "echo 7" if already_open else "true"
    runner.stand_in("gh", f'[[ "$1 $2" != "issue list" ]] || {number}')
    (runner.folder / "report").mkdir()
    for platform in ("amd64", "arm64"):
        log = "#12 30.2 plugin 0.1.0\n#12 30.2 error: seam: seam moe_name: KernelConfig has no moe_backend\n"
        (runner.folder / f"report/build-rubin-{platform}.log").write_text(log)
    done = runner.run(script, RUN_URL="https://example.org/runs/1")
    assert done.returncode == 0, done.stderr
    body = (runner.folder / "body.md").read_text()
    assert body.count("error: seam: seam moe_name: KernelConfig has no moe_backend") == 1
    assert "https://example.org/runs/1" in body
    (last,) = runner.calls.read_text().splitlines()[1:]
    title = "gh issue create --title vLLM's nightly breaks a seam --body-file body.md"
    assert last == ("gh issue comment 7 --body-file body.md" if already_open else title)


def test_another_failure_is_not_called_a_seam(workflow: dict[str, Any], runner: Runner) -> None:
    runner.stand_in("gh", "true")
    done = runner.run(step(workflow, "report", "Open an issue, or add to the open one"), RUN_URL="u")
    assert done.returncode == 0, done.stderr
    assert "--title The nightly image could not be built" in runner.calls.read_text()
