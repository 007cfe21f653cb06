"""The machine: environment variables, compiler, writable directories, NVIDIA driver."""

import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from vllm_rose_plugin.doctor.facts import Environment, Host, KvTransport
from vllm_rose_plugin.kernels.jit.store import cache_folder


def look_at_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """The variables that concern the plugin."""
    rose = {key: value for key, value in sorted(environ.items()) if key.startswith(("ROSE_", "VLLM_ROSE_"))}
    # The same reading of the switch as in vllm_rose_plugin.register.
    disabled = environ.get("VLLM_ROSE_DISABLE", "0").strip().lower() in ("1", "true", "yes", "on")
    return Environment(disabled, environ.get("VLLM_PLUGINS"), rose)


def look_at_host(environ: Mapping[str, str] = os.environ) -> Host:
    """Compiler and directories."""
    words = shlex.split(environ.get("CXX") or "g++")  # CXX may hold a wrapper or flags: "ccache g++"
    caches = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    directories = (
        environ.get("VLLM_CACHE_ROOT") or os.path.join(caches, "vllm"),
        environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir(),
    )
    found = {name: _write_problem(Path(name).expanduser()) for name in directories}
    kernels = cache_folder()
    kernel_cache = {str(kernels): _write_problem(kernels)} if kernels else {}
    return Host(shutil.which(words[0]), words[0], found, kernel_cache)


def look_at_kv_transport(
    nixl: str | None, environ: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> KvTransport:
    """Devices and settings of UCX.

    Args:
        nixl: installed version.
        environ: variables of the process.
        root: where ``sys`` and ``dev`` lie.
    """
    verbs = sorted((root / "dev/infiniband").glob("uverbs*"))
    return KvTransport(
        nixl=nixl,
        rdma_devices=sorted(path.name for path in (root / "sys/class/infiniband").glob("*")),
        usable=[path.name for path in verbs if os.access(path, os.R_OK | os.W_OK)],
        ucx={name: environ[name] for name in ("UCX_TLS", "UCX_NET_DEVICES") if environ.get(name)},
    )


def _write_problem(directory: Path) -> str:
    """Why files can't be made in a directory that may not exist yet; ``""`` if they can."""
    nearest = directory
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        return f"{nearest} is no directory"
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return ""
    except OSError as error:
        return f"{nearest}: {error.strerror}"


def driver_module(root: Path = Path("/")) -> str | None:
    """Version of the loaded NVIDIA kernel module."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match[1] if match else None
