"""What this process runs: layers by class, kernel calls by provider."""

import os
import sys
import weakref
from collections import Counter
from typing import Any

import vllm_rose_plugin
from vllm_rose_plugin.kernels import call_counts
from vllm_rose_plugin.kernels.jit import chosen
from vllm_rose_plugin.layers import live_groups

# Weak, since vLLM may make a layer's kernel anew when weights are loaded again.
_layers: dict[str, weakref.WeakSet[Any]] = {kind: weakref.WeakSet() for kind in ("experts", "linear", "qk_norm")}


def add_layer(kind: str, kernel: Any) -> None:
    """Note that a layer of ``kind`` is served by ``kernel``."""
    _layers[kind].add(kernel)


def locality_choices() -> dict[str, Any]:
    """What was decided about locality domains; nothing where no layer was timed."""
    locality = sys.modules.get("vllm_rose_plugin.layers.locality")  # which an experts layer has imported
    return locality.snapshot() if locality is not None else {}


def live_layers() -> dict[str, int]:
    """How many layers of each kind we serve in this process."""
    return {kind: len(live) for kind, live in _layers.items()}


def snapshot(*, rank: int) -> dict[str, Any]:
    """The state of this worker, ready for JSON.

    ``layers`` counts layers, ``providers`` are the outcome of the self-check, ``all_reduce`` names what serves which
    group, ``locality`` says how experts in parts are launched, ``calls`` counts kernel launches, and all-reduces of
    those groups that went to vLLM's own.

    A CUDA graph replays kernels without passing through Python, so on a GPU ``calls`` counts captures, not replays.
    """
    return {
        "rank": rank,
        "pid": os.getpid(),
        "plugin_version": vllm_rose_plugin.__version__,
        "layers": {kind: dict(Counter(type(kernel).__name__ for kernel in live)) for kind, live in _layers.items()},
        "providers": chosen.snapshot(),
        "all_reduce": live_groups.snapshot(),
        "locality": locality_choices(),
        "calls": call_counts.snapshot(),
    }
