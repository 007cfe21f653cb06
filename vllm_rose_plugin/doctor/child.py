"""Run a module in a fresh Python and read the line of JSON that it prints: crashes and CUDA stay out of the doctor."""

import json
import signal
import subprocess
import sys
from typing import Any


class ChildError(RuntimeError):
    """The child gave no answer; the message says how it ended."""


def run_module(module: str, *arguments: str, timeout: float) -> dict[str, Any]:
    """The JSON object that ``python -m module`` printed last.

    Raises:
        ChildError: it crashed, took longer than ``timeout`` seconds or printed no JSON.
    """
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout)
    except subprocess.TimeoutExpired:
        raise ChildError(f"{module} gave no answer in {timeout:.0f} s") from None
    if done.returncode == 0:
        for line in reversed(done.stdout.splitlines()):  # vLLM and its imports print lines of their own
            if line.startswith("{"):
                return json.loads(line)
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
    how = f"exit code {done.returncode}"
    if done.returncode < 0:
        how = f"killed by {signal.Signals(-done.returncode).name}"
    raise ChildError(f"{module}: {how}: {last.strip()}")
