"""Attach the plugin to vLLM: the version gate, then every seam of the table."""

from vllm_rose_plugin.seams.on_import import when_imported
from vllm_rose_plugin.seams.seam import Seam, SeamError, vllm_minor
from vllm_rose_plugin.seams.table import seams

_applied: set[str] = set()
_scheduled: set[str] = set()


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
