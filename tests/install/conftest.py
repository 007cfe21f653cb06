"""A checkout of its own for every test, and a Python that records what it is asked to install and installs nothing."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = ["Makefile", "pyproject.toml", "requirements", "packaging", "scripts", "vllm_rose_plugin/__init__.py"]

# Stands where a Python is expected. Questions (-c, scripts) go to the real one; `-m venv` makes a folder with this same
# script in it; `-m pip` writes a line to $FAKE_LOG and then does what $FAKE_PIP says: succeed, fail or hang.
FAKE_PYTHON = f"""#!/usr/bin/env bash
set -euo pipefail
if [[ "${{1:-}} ${{2:-}}" == "-m venv" ]]; then
    echo venv >> "$FAKE_LOG"
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
elif [[ "${{1:-}} ${{2:-}}" == "-m pip" ]]; then
    echo "${{*:3}}" >> "$FAKE_LOG"
    eval "${{FAKE_PIP:-true}}"
else
    exec {sys.executable} "$@"
fi
"""


class Checkout:
    """The files that installing needs, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            source, copy = ROOT / name, folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, copy) if source.is_dir() else shutil.copy2(source, copy)
        self.python = folder / "fake-python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        self.log = folder / "fake.log"

    def environment(self, **variables: str) -> dict[str, str]:
        own = {"PYTHON": str(self.python), "FAKE_LOG": str(self.log), **variables}
        # `make test` runs this: its make must not look like the parent of ours, which would then announce its folder.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        return {**inherited, **own}

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = self.environment(**variables)
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=60)

    def install(self, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run("scripts/install.sh", **variables)

    def start_install(self, **variables: str) -> subprocess.Popen[str]:
        """In a process group of its own, as a terminal would start it."""
        return subprocess.Popen(
            ["scripts/install.sh"],
            cwd=self.folder,
            env=self.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # A background job of a script, as CI starts one, ignores SIGINT; a terminal's doesn't.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def calls(self) -> list[str]:
        """What the fake was asked for since the last look."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines

    def wait_for_call(self, text: str) -> None:
        deadline = time.monotonic() + 30
        while text not in (self.log.read_text() if self.log.exists() else ""):
            assert time.monotonic() < deadline, f"never asked for {text}"
            time.sleep(0.05)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout")
