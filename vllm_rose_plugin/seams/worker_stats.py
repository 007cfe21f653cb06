"""``collective_rpc("rose_stats")``: what each worker runs, for ``GET /rose/stats``.

Adds: one method to ``WorkerBase``; replaces nothing. vLLM's contract for endpoint plugins asks for exactly this pair:
the route comes from ``vllm.endpoint_plugins``, the worker's side of it from ``vllm.general_plugins``.
Delete when: vLLM has a registration for worker methods (``--worker-extension-cls`` takes a single class of the user's).
"""

from typing import Any

from vllm_rose_plugin.seams.seam import Seam, SeamError
from vllm_rose_plugin.seams.targets import find

_MODULE = "vllm.v1.worker.worker_base"


def _rose_stats(worker: Any) -> dict[str, Any]:
    from vllm_rose_plugin.layers.report import snapshot

    return snapshot(rank=worker.rank)


def _apply() -> None:
    worker_base = find("worker_stats", _MODULE, "WorkerBase")
    present = getattr(worker_base, "rose_stats", _rose_stats)
    if present is not _rose_stats:
        raise SeamError("worker_stats", "WorkerBase has a rose_stats of its own")
    worker_base.rose_stats = _rose_stats


SEAMS = (
    Seam(
        name="worker_stats",
        module=_MODULE,
        target="WorkerBase",
        kind="patch",
        why="adds the method behind GET /rose/stats",
        upstream="none known",
        apply=_apply,
    ),
)
