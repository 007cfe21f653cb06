"""The router of ``--as kubernetes``: it finds servers by their labels, so a scaled role needs no new config."""

from typing import Any

from vllm_rose_plugin.recipes.render.common import ROUTER_METRICS_PORT, router_image
from vllm_rose_plugin.recipes.render.kubernetes_pods import API_PORT, Cluster, role_labels
from vllm_rose_plugin.recipes.render.router import discovering_router


def router_objects(cluster: Cluster) -> list[dict[str, Any]]:
    """The right to watch pods, the deployment, and the service under the deployment's name."""
    name = f"{cluster.name}-router"
    labels = cluster.labels("router")
    port = cluster.deployment.recipe.router.port
    rights = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": cluster.metadata(name, "router")},
        {
            "apiVersion": f"{rights}/v1",
            "kind": "Role",
            "metadata": cluster.metadata(name, "router"),
            "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}],
        },
        {
            "apiVersion": f"{rights}/v1",
            "kind": "RoleBinding",
            "metadata": cluster.metadata(name, "router"),
            "roleRef": {"apiGroup": rights, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name}],
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": cluster.metadata(name, "router"),
            "spec": {
                "replicas": 1,  # which session is where is known to one router alone
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": _pod(cluster, name, port)},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": cluster.metadata(cluster.name, "router"),
            "spec": {
                "selector": labels,
                "ports": [
                    {"name": "http", "port": port, "targetPort": "http"},
                    {"name": "metrics", "port": ROUTER_METRICS_PORT, "targetPort": "metrics"},
                ],
            },
        },
    ]


def _pod(cluster: Cluster, account: str, port: int) -> dict[str, Any]:
    selectors: dict[str, dict[str, str]] = {
        role: role_labels(cluster, role) for role in cluster.deployment.recipe.roles
    }
    words = discovering_router(cluster.deployment, selectors, API_PORT)
    ask = {"httpGet": {"path": "/liveness", "port": "http"}, "periodSeconds": 10, "timeoutSeconds": 5}
    container = {
        "name": "router",
        "image": router_image(cluster.deployment),
        "command": words[:1],
        "args": words[1:],
        "env": [{"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}],
        "ports": [
            {"name": "http", "containerPort": port},
            {"name": "metrics", "containerPort": ROUTER_METRICS_PORT},
        ],
        "readinessProbe": ask | {"failureThreshold": 3},
        "livenessProbe": ask | {"failureThreshold": 6},
        "resources": {"limits": {"cpu": "4", "memory": "8Gi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return {"serviceAccountName": account, "enableServiceLinks": False, "containers": [container]}
