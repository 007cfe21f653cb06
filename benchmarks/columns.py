"""The columns of every benchmarks/results/<area>.csv, and what some of them hold."""

import os
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import vllm_rose_plugin

COLUMNS = [
    "area",
    "case",
    "provider",
    "shape",
    "us",
    "gb_per_s",
    "tflop_per_s",
    "share_of_limit",
    "device",
    "versions",
    "commit",
    "date",
]


def versions(*packages: str) -> str:
    """Of torch, of those of the packages that are installed, and of this one."""
    found = [f"torch {torch.__version__}"]
    for package in packages:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return "; ".join([*found, f"vllm_rose_plugin {vllm_rose_plugin.__version__}"])


def commit() -> str:
    """Of this tree, or what ROSE_COMMIT says where it is no checkout."""
    given = os.environ.get("ROSE_COMMIT")
    if given:
        return given
    folder = Path(__file__).parent
    result = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=folder, check=False)
    return result.stdout.strip() if result.returncode == 0 else "uncommitted"
