"""Attach the plugin to vLLM: the version gate, then every seam of the table."""

import re

import vllm_rose_plugin
from vllm_rose_plugin.seams.on_import import when_imported
from vllm_rose_plugin.seams.seam import SUPPORTED_VLLM, Seam, SeamError
from vllm_rose_plugin.seams.table import seams

_applied: set[str] = set()
_scheduled: set[str] = set()


def vllm_minor(version: str) -> str:
    """``"0.32"`` of ``"0.32.0+cpu"``.

    Raises:
        PluginError: a version that the plugin doesn't know; the message names those it does.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    minor = f"{match[1]}.{match[2]}" if match else version
    if minor not in SUPPORTED_VLLM:
        raise vllm_rose_plugin.PluginError(
            f"vllm_rose_plugin {vllm_rose_plugin.__version__} supports vLLM {' and '.join(SUPPORTED_VLLM)}, found "
            f"{version}. Install one of those, or set VLLM_ROSE_DISABLE=1 to run vLLM without the plugin."
        )
    return minor


def install() -> None:
    """Schedule every seam; each is applied when vLLM imports the module that it attaches to. Idempotent.

    Raises:
        PluginError: unsupported vLLM, or a target that isn't what the seam expects.
    """
    import vllm

    for seam in seams(vllm_minor(vllm.__version__)):
        if seam.name not in _scheduled:
            _scheduled.add(seam.name)
            when_imported(seam.module, lambda seam=seam: _apply(seam))  # type: ignore[misc]


def _apply(seam: Seam) -> None:
    try:
        seam.apply()
    except SeamError:
        raise
    except Exception as error:  # a fault of ours must not look like a fault of vLLM's
        raise SeamError(seam.name, f"{type(error).__name__}: {error}") from error
    _applied.add(seam.name)


def state(seam: Seam) -> str:
    """``"applied"``, ``"scheduled"`` (its module isn't imported yet) or ``"not installed"``."""
    if seam.name in _applied:
        return "applied"
    return "scheduled" if seam.name in _scheduled else "not installed"
