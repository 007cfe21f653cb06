"""Acceptance by context length on ``/metrics``.

Adds: a count after ``OutputProcessor._update_stats_from_finished``; replaces nothing. The method runs once for each
request that ends, where its prompt length and its drafting steps are both known.
Why: vLLM's stat loggers (``vllm.stat_logger_plugins``) are handed neither.
Delete when: ``FinishedRequestStats`` holds the request's drafting steps (no issue known).
"""

from collections.abc import Callable
from typing import Any

from vllm_rose_plugin.seams.seam import Seam
from vllm_rose_plugin.seams.targets import wrap

_MODULE = "vllm.v1.engine.output_processor"
_TARGET = "OutputProcessor._update_stats_from_finished"


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    def _update_stats_from_finished(self: Any, req_state: Any, finish_reason: Any, iteration_stats: Any) -> Any:
        result = original(self, req_state, finish_reason, iteration_stats)
        if iteration_stats is not None and req_state.spec_decode_metrics is not None:
            from vllm_rose_plugin.layers.draft_metrics import observe_request

            observe_request(req_state)
        return result

    return _update_stats_from_finished


SEAMS = (
    Seam(
        name="draft_metrics",
        module=_MODULE,
        target=_TARGET,
        kind="patch",
        why="acceptance of drafts by context length on /metrics",
        upstream="none known",
        apply=lambda: wrap(
            "draft_metrics", _MODULE, _TARGET, ("self", "req_state", "finish_reason", "iteration_stats"), _wrap
        ),
    ),
)
