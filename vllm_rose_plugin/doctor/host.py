"""The machine: environment variables, compiler, writable directories, NVIDIA driver and IMEX."""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from vllm_rose_plugin.doctor.facts import Environment, Host, Imex

_IMEX = "nvidia-caps-imex-channels"


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
    return Host(shutil.which(words[0]), words[0], found)


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


def look_at_imex(root: Path = Path("/")) -> Imex:
    """Channels and service.

    Args:
        root: where ``dev`` and ``proc`` lie.
    """
    channels = sorted((root / "dev" / _IMEX).glob("channel*"))
    try:
        registered = _IMEX in (root / "proc/devices").read_text()
    except OSError:
        registered = False
    return Imex(
        device_registered=registered,
        channels=[channel.name for channel in channels],
        accessible=[channel.name for channel in channels if os.access(channel, os.R_OK | os.W_OK)],
        service=_imex_service(root),
    )


def _imex_service(root: Path) -> str:
    tool = shutil.which("nvidia-imex-ctl")
    if tool:
        try:
            done = subprocess.run([tool, "-q"], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"nvidia-imex-ctl: {error}"
        words = (done.stdout.strip() or done.stderr.strip()).splitlines()
        return words[-1] if words else f"nvidia-imex-ctl ended with {done.returncode}"
    for comm in (root / "proc").glob("[0-9]*/comm"):
        try:
            if comm.read_text().strip() == "nvidia-imex":
                return "running"
        except OSError:  # the process ended meanwhile
            continue
    return "not visible"
