"""Autoscaling rules for a plan: Prometheus recording rules on vLLM's own metrics, for KEDA or an HPA.

Metric names are those that vLLM 0.32 and 0.33 export (vllm/v1/metrics/loggers.py); Prometheus' client adds ``_total``
to counters. KEDA's object is its ScaledObject with the Prometheus scaler (keda.sh/docs, "Prometheus"); the HPA reads
the same figures as external metrics through prometheus-adapter (kubernetes-sigs/prometheus-adapter, "externalRules").
"""

from typing import Any

from vllm_rose_plugin.planner.plan import Plan
from vllm_rose_plugin.planner.report import source_line

WINDOW = "2m"
"""Over which rates are taken: several scrapes, and short against the minutes in which a replica loads its weights."""
_WAITING_PER_REPLICA = 1
"""Prompts in line per prefill replica above which more replicas are wanted; a busy replica alone isn't a reason."""
_KV_USAGE = 0.85
_ROOM = 2
"""Most replicas, as a multiple of the plan's: a load above the planned one scales on, a runaway metric doesn't."""
_SCALE_DOWN_SECONDS = 600
"""How long the load must stay low; a replica that goes takes its running requests along, so this is not short."""


def metrics_documents(plan: Plan, *, name: str, namespace: str, kind: str, prometheus: str) -> list[dict[str, Any]]:
    """Recording rules, adapter rules, then one ScaledObject and one HPA per role (use the one or the other).

    Args:
        plan: thresholds are per replica at the plan's own load.
        name: the workloads are called ``NAME-prefill`` and ``NAME-decode``, and so begin the names of their pods.
        namespace: of the workloads.
        kind: ``LeaderWorkerSet``, as `rose render` makes, or ``Deployment``.
        prometheus: address of the server that KEDA asks.
    """
    signals = _signals(plan, name, namespace)
    rules = [{"record": record, "expr": expression} for role in signals.values() for record, expression, _ in role]
    documents: list[dict[str, Any]] = [
        {"groups": [{"name": f"{name}-rose-plan", "interval": "15s", "rules": rules}]},
        {
            "externalRules": [
                {
                    "seriesQuery": rule["record"],
                    "metricsQuery": f"max({rule['record']})",
                    "name": {"as": rule["record"].replace(":", "_")},
                    "resources": {"namespaced": False},
                }
                for rule in rules
            ]
        },
    ]
    replicas = {"prefill": plan.prefill_replicas, "decode": plan.decode_replicas}
    version = {"LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1", "Deployment": "apps/v1"}[kind]
    for role, entries in signals.items():
        target = {"apiVersion": version, "kind": kind, "name": f"{name}-{role}"}
        bounds = (1, _ROOM * replicas[role])
        documents.append(
            _scaled_object(f"{name}-{role}", namespace, target, bounds, entries, source_line(plan), prometheus)
        )
        documents.append(_autoscaler(f"{name}-{role}", namespace, target, bounds, entries, source_line(plan)))
    return documents


def _signals(plan: Plan, name: str, namespace: str) -> dict[str, list[tuple[str, str, float]]]:
    """By role: name of the recorded series, its query, and its value per replica at which the plan is exactly right."""

    def pods(role: str) -> str:
        return f'namespace="{namespace}",pod=~"{name}-{role}-.*"'

    prefix = name.replace("-", "_").replace(".", "_")
    prefill, decode = pods("prefill"), pods("decode")
    # Requests on a decoder, waiting ones too; without load a plan has none, then its threshold counts.
    per_decoder = max(1.0, plan.batch_mean or float(plan.batch_threshold))
    return {
        "prefill": [
            (
                f"{prefix}:prefill_prompt_tokens:rate",
                # computed here: prompts found in the prefix cache cost next to nothing
                f'sum(rate(vllm:prompt_tokens_by_source_total{{{prefill},source="local_compute"}}[{WINDOW}]))',
                max(1.0, plan.prompt_tokens_per_second),
            ),
            (
                f"{prefix}:prefill_waiting",
                f"sum(avg_over_time(vllm:num_requests_waiting{{{prefill}}}[{WINDOW}]))",
                _WAITING_PER_REPLICA,
            ),
        ],
        "decode": [
            (
                f"{prefix}:decode_requests",
                f"sum(avg_over_time(vllm:num_requests_running{{{decode}}}[{WINDOW}])) + "
                f"sum(avg_over_time(vllm:num_requests_waiting{{{decode}}}[{WINDOW}]))",
                per_decoder,
            ),
            (
                f"{prefix}:decode_kv_usage",
                f"sum by (namespace) (max by (namespace, pod) (vllm:kv_cache_usage_perc{{{decode}}}))",
                _KV_USAGE,
            ),
        ],
    }


def _scaled_object(
    name: str,
    namespace: str,
    target: dict[str, str],
    bounds: tuple[int, int],
    entries: list[tuple[str, str, float]],
    source: str,
    prometheus: str,
) -> dict[str, Any]:
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": _metadata(name, namespace, source),
        "spec": {
            "scaleTargetRef": target,
            "minReplicaCount": bounds[0],
            "maxReplicaCount": bounds[1],
            "pollingInterval": 15,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _behavior()}},
            "triggers": [
                {
                    "type": "prometheus",
                    "metricType": "AverageValue",
                    "metadata": {
                        "serverAddress": prometheus,
                        "query": record,
                        "threshold": f"{threshold:.6g}",
                    },
                }
                for record, _, threshold in entries
            ],
        },
    }


def _autoscaler(
    name: str,
    namespace: str,
    target: dict[str, str],
    bounds: tuple[int, int],
    entries: list[tuple[str, str, float]],
    source: str,
) -> dict[str, Any]:
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": _metadata(name, namespace, source),
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": bounds[0],
            "maxReplicas": bounds[1],
            "behavior": _behavior(),
            "metrics": [
                {
                    "type": "External",
                    "external": {
                        "metric": {"name": record.replace(":", "_")},
                        "target": {"type": "AverageValue", "averageValue": _quantity(threshold)},
                    },
                }
                for record, _, threshold in entries
            ],
        },
    }


def _quantity(value: float) -> str:
    """A Kubernetes quantity in thousandths, whole from 100 up."""
    return str(round(value)) if value >= 100 else f"{max(1, round(value * 1000))}m"


def _metadata(name: str, namespace: str, source: str) -> dict[str, Any]:
    return {"name": name, "namespace": namespace, "annotations": {"rose/plan": source}}


def _behavior() -> dict[str, Any]:
    return {
        "scaleUp": {
            "stabilizationWindowSeconds": 0,
            "policies": [{"type": "Percent", "value": 100, "periodSeconds": 60}],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": _SCALE_DOWN_SECONDS,
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 120}],
        },
    }
