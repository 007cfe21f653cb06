"""What lets GPU memory travel between hosts: NVIDIA's IMEX channel and service, as far as this host shows them."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CHANNELS = "/dev/nvidia-caps-imex-channels"


@dataclass(frozen=True)
class Imex:
    """What lets GPU memory be shared between hosts."""

    device_registered: bool
    """``nvidia-caps-imex-channels`` in ``/proc/devices``: the driver has the feature."""
    channels: list[str]
    accessible: list[str]
    """Those of ``channels`` that this user may open."""
    service: str
    """What ``nvidia-imex-ctl -q`` says, ``running`` where only the process is visible, ``not visible`` otherwise."""


def look_at_imex(root: Path = Path("/")) -> Imex:
    """Channels and service.

    Args:
        root: where ``dev`` and ``proc`` lie.
    """
    channels = sorted((root / CHANNELS[1:]).glob("channel*"))
    try:
        registered = "nvidia-caps-imex-channels" in (root / "proc/devices").read_text()
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


def fabric_cure(imex: Imex, *, error: str | None) -> str:
    """What to do where the driver refuses a fabric handle.

    Args:
        error: the driver's answer, such as ``CUDA_ERROR_NOT_PERMITTED (800)``.
    """
    if not error or "NOT_PERMITTED" not in error:
        return "check the fabric state with `nvidia-smi -q` and that the IMEX service (nvidia-imex) is READY"
    if not imex.channels:
        registered = "" if imex.device_registered else " (the driver must list the device in /proc/devices first)"
        return (
            "no IMEX channel is here. Kubernetes: give the pod a ComputeDomain's resource claim. Elsewhere: make "
            f"{CHANNELS}/channel0{registered}, start the nvidia-imex service, and pass the channel "
            f"into the container (`--device {CHANNELS}/channel0`)"
        )
    if not imex.accessible:
        return f"allow this user to read and write {CHANNELS}/{imex.channels[0]}"
    return f"a channel is here; the IMEX service must be READY on every host of the domain (now: {imex.service})"
