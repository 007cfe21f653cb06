"""End requests in vLLM's output processor, one of them with drafts; prints what /metrics has of them as JSON."""

import json
from types import SimpleNamespace

import prometheus_client
import vllm
from vllm.plugins import load_general_plugins

load_general_plugins()

from vllm.v1.engine import FinishReason  # noqa: E402
from vllm.v1.engine.output_processor import OutputProcessor  # noqa: E402
from vllm.v1.metrics.stats import IterationStats, RequestSpecDecodeMetrics, RequestStateStats  # noqa: E402


def end_request(prompt_len, accepted, *, log_stats=True):
    """One request, whose drafts were accepted so."""
    metrics = None
    if accepted is not None:
        metrics = RequestSpecDecodeMetrics.new(3)
        for count in accepted:
            metrics.observe(num_draft_tokens=3, num_accepted=count, detailed=True)
    request = SimpleNamespace(
        request_id="a",
        external_req_id="a",
        prompt_len=prompt_len,
        max_tokens_param=None,
        stats=RequestStateStats(),
        num_cached_tokens=0,
        lora_name=None,
        parent_req=None,
        spec_decode_metrics=metrics,
    )
    processor = SimpleNamespace(lora_states=SimpleNamespace(request_finished=lambda *args: None))
    stats = IterationStats() if log_stats else None
    OutputProcessor._update_stats_from_finished(processor, request, FinishReason.STOP, stats)
    return 0 if stats is None else len(stats.finished_requests)


finished = [
    end_request(5, None),
    end_request(126, [3, 1, 0]),  # at contexts 127, 131 and 133
    end_request(600, [2, 2]),
    end_request(600, [1], log_stats=False),
    end_request(600, []),
]
samples = {}
for line in prometheus_client.generate_latest().decode().splitlines():
    if line.startswith("rose:") and "_created" not in line:
        name, _, value = line.rpartition(" ")
        samples[name] = float(value)
print(json.dumps({"version": vllm.__version__, "finished": finished, "samples": samples}))
