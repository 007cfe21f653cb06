"""What a seam is."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from vllm_rose_plugin import PluginError, __version__

SUPPORTED_VLLM = ("0.32", "0.33")


@dataclass(frozen=True)
class Seam:
    """One place in vLLM that the plugin attaches to."""

    name: str
    module: str
    """vLLM module that holds the target; the seam is applied when vLLM imports it, not before."""
    target: str
    """What is registered with, widened or wrapped, by its name in ``module``."""
    kind: Literal["official", "patch"]
    why: str
    upstream: str
    """Issue or pull request that would let us delete a patch; for an official seam, its documentation."""
    apply: Callable[[], None]
    """Checks the target, then attaches. Idempotent."""
    versions: tuple[str, ...] = SUPPORTED_VLLM


class SeamError(PluginError):
    """The installed vLLM doesn't look the way a seam needs it."""

    def __init__(self, seam: str, problem: str):
        super().__init__(
            f"vllm_rose_plugin can't attach to this vLLM at seam {seam!r}: {problem}. "
            f"Install vLLM {' or '.join(SUPPORTED_VLLM)}, or set VLLM_ROSE_DISABLE=1 to run vLLM without the plugin."
        )


def vllm_minor(version: str) -> str:
    """``"0.32"`` of ``"0.32.0+cpu"``.

    Raises:
        PluginError: a version that the plugin doesn't know; the message names those it does.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    minor = f"{match[1]}.{match[2]}" if match else version
    if minor not in SUPPORTED_VLLM:
        raise PluginError(
            f"vllm_rose_plugin {__version__} supports vLLM {' and '.join(SUPPORTED_VLLM)}, found "
            f"{version}. Install one of those, or set VLLM_ROSE_DISABLE=1 to run vLLM without the plugin."
        )
    return minor
