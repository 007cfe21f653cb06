"""Prometheus counters of drafting by context length, on the server's ``/metrics``.

vLLM counts drafts by position, over all requests. With ``--per-request-spec-decode-metrics detailed`` it also keeps
each request's steps; of those, these counters are made when a request ends. Without that flag they stay empty.
"""

from typing import Any

from prometheus_client import Counter

from vllm_rose_plugin.acceptance.tally import Contexts, Tally, tally_steps

CONTEXTS = Contexts((0, 128, 512, 2048, 8192, 32768))
"""The same ranges that `rose bench mtp` begins with."""

# Made when the first request with drafts ends: by then vLLM has set up Prometheus for its processes.
_counters: dict[str, Counter] = {}


def observe_request(request: Any) -> None:
    """Count the drafts of a request that has ended.

    Args:
        request: vLLM's ``RequestState``; its ``spec_decode_metrics`` is None where nothing was drafted.
    """
    metrics = request.spec_decode_metrics
    steps = metrics.per_step_accepted if metrics is not None else ()
    if not steps:
        return
    if not _counters:
        _counters["drafts"] = Counter(
            "rose:spec_decode_drafts", "Drafts by context length, of requests that have ended.", ["context"]
        )
        _counters["accepted"] = Counter(
            "rose:spec_decode_accepted_tokens",
            "Accepted draft tokens by context length and position, of requests that have ended.",
            ["context", "position"],
        )
    tallies = [Tally([0] * metrics.num_spec_tokens) for _ in CONTEXTS.edges]
    tally_steps(prompt_tokens=request.prompt_len, accepted=steps, contexts=CONTEXTS, into=tallies)
    for index, tally in enumerate(tallies):
        if not tally.drafts:
            continue
        name = CONTEXTS.name(index)
        _counters["drafts"].labels(name).inc(tally.drafts)
        for position, count in enumerate(tally.accepted):
            _counters["accepted"].labels(name, str(position)).inc(count)
