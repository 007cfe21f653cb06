"""The pods of ``--as kubernetes``: one node of one replica of a role."""

from dataclasses import dataclass
from typing import Any

from vllm_rose_plugin.recipes.deployment import Process, flag_words
from vllm_rose_plugin.recipes.hardware import GPUS
from vllm_rose_plugin.recipes.render.common import (
    CACHE_FOLDER,
    CACHES,
    LOAD_SECONDS,
    AtStart,
    Deployment,
    models_folder,
    node_share,
    split_flags,
)

API_PORT = 8000
"""Every server's port: a pod has an address of its own, and the router looks for servers on one port."""
CONFIG_FOLDER = "/etc/rose"
CHANNEL_CLAIM = "channel"
MODELS_CLAIM = "rose-models"
"""The volume claim that the cluster's owner makes and fills with checkpoints."""
SERVES = "vllm-rose/serves"
DOMAIN = "vllm-rose/nvlink-domain"
PROBE_SECONDS = 10


@dataclass(frozen=True)
class Cluster:
    """A deployment with what its objects are called."""

    deployment: Deployment
    name: str
    image: str
    domain_roles: set[str]
    """Roles whose pods must share one NVLink domain."""

    def metadata(self, name: str, role: str | None = None) -> dict[str, Any]:
        """Name and labels of an object."""
        return {"name": name, "labels": self.labels(role)}

    def labels(self, role: str | None = None) -> dict[str, str]:
        """Labels of an object, and of pods."""
        labels = {"app.kubernetes.io/name": "vllm-rose", "app.kubernetes.io/instance": self.name}
        return labels | ({"app.kubernetes.io/component": role} if role else {})

    def service(self, name: str, role: str, port: int) -> dict[str, Any]:
        """A service in front of the pods of a role that answer HTTP."""
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self.metadata(name, role),
            "spec": {
                "selector": role_labels(self, role),
                "ports": [{"name": "http", "port": port, "targetPort": API_PORT}],
            },
        }


def role_labels(cluster: Cluster, role: str) -> dict[str, str]:
    """The labels that find a role's pods that answer HTTP."""
    return {"app.kubernetes.io/instance": cluster.name, "app.kubernetes.io/component": role, SERVES: "true"}


def server_pod(cluster: Cluster, process: Process, config_digest: str) -> dict[str, Any]:
    """The pod template of a process; ranks of one template differ by ``LWS_WORKER_INDEX`` alone."""
    recipe = cluster.deployment.recipe
    labels = cluster.labels(process.role)
    if process.serves:
        labels[SERVES] = "true"
    spec: dict[str, Any] = {
        # Kubernetes would set VLLM_PORT and the like for a service named vllm, and vLLM would read them.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 120,
        "nodeSelector": {"kubernetes.io/arch": GPUS[recipe.hardware.gpu].architecture},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    }
    if process.role in cluster.domain_roles:
        labels[DOMAIN] = cluster.name
        spec["affinity"] = _one_rack(cluster)
        template = f"{cluster.name}-{CHANNEL_CLAIM}"
        spec["resourceClaims"] = [{"name": CHANNEL_CLAIM, "resourceClaimTemplateName": template}]
    spec["securityContext"] = {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"}
    spec["containers"] = [_container(cluster, process)]
    spec["volumes"] = _volumes(cluster, process)
    annotations = {"vllm-rose/config": config_digest}  # a new config gives new pods
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}


def _one_rack(cluster: Cluster) -> dict[str, Any]:
    """All pods in one NVLink partition, each on a node of its own.

    NVIDIA's DRA driver gives a node's one IMEX channel to one pod (kubernetes-sigs/dra-driver-nvidia-gpu, issue 309).
    """
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    together = {"labelSelector": {"matchLabels": {DOMAIN: cluster.name}}, "topologyKey": "nvidia.com/gpu.clique"}
    apart = {
        "labelSelector": {"matchExpressions": [{"key": DOMAIN, "operator": "Exists"}]},
        "namespaceSelector": {},  # pods of every deployment, in any namespace
        "topologyKey": "kubernetes.io/hostname",
    }
    return {"podAffinity": {required: [together]}, "podAntiAffinity": {required: [apart]}}


def _container(cluster: Cluster, process: Process) -> dict[str, Any]:
    arguments = ["--config", f"{CONFIG_FOLDER}/{process.role}-$(LWS_WORKER_INDEX).yaml"]
    for flag, value in split_flags(process)[1].items():
        arguments += flag_words({flag: value})
    container: dict[str, Any] = {
        "name": "vllm",
        "image": cluster.image,
        "command": ["vllm", "serve"],
        "args": arguments,
        "env": _environment(process),
    }
    if process.serves:
        container["ports"] = [{"name": "http", "containerPort": API_PORT}]
        container |= _probes()
    container["resources"] = _resources(cluster, process)
    container["securityContext"] = _security(cluster)
    mounts = [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "cache", "mountPath": CACHE_FOLDER},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    models = models_folder(cluster.deployment.recipe)
    if models is not None:
        mounts.append({"name": "models", "mountPath": models, "readOnly": True})
    container["volumeMounts"] = mounts
    return container


def _environment(process: Process) -> list[dict[str, Any]]:
    """``POD_IP`` first, since a variable can only name those before it."""
    entries: list[dict[str, Any]] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "VLLM_HOST_IP", "value": "$(POD_IP)"},
    ]
    for name, value in (CACHES | process.environment).items():
        plain = value if isinstance(value, AtStart) else value.replace("$(", "$$(")
        entries.append({"name": name, "value": str(plain)})
    return entries


def _probes() -> dict[str, Any]:
    """vLLM answers ``/health`` once the model is loaded, and with 503 when an engine has died."""
    ask = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": PROBE_SECONDS, "timeoutSeconds": 5}
    return {
        "startupProbe": ask | {"failureThreshold": LOAD_SECONDS // PROBE_SECONDS},
        "readinessProbe": ask | {"failureThreshold": 3},
        "livenessProbe": ask | {"failureThreshold": 6},  # a minute, so that a long prefill isn't taken for death
    }


def _needs_rdma(cluster: Cluster) -> bool:
    recipe = cluster.deployment.recipe
    if recipe.kv_transfer is not None and recipe.kv_transfer.transport == "ucx/ib":
        return True
    spans = any(process.nodes > 1 for process in cluster.deployment.processes)
    return spans and GPUS[recipe.hardware.gpu].nodes_per_rack == 1


def _resources(cluster: Cluster, process: Process) -> dict[str, Any]:
    cpus, memory = node_share(cluster.deployment, process)
    amounts: dict[str, Any] = {"cpu": str(cpus), "memory": f"{memory}Mi", "nvidia.com/gpu": len(process.gpus)}
    if _needs_rdma(cluster):
        amounts[cluster.deployment.options.rdma_resource] = 1
    result: dict[str, Any] = {"limits": amounts}  # requests are the same where none are given
    if process.role in cluster.domain_roles:
        result["claims"] = [{"name": CHANNEL_CLAIM}]
    return result


def _security(cluster: Cluster) -> dict[str, Any]:
    context: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    if _needs_rdma(cluster):
        # Registering memory with the network card pins it. Kubernetes gives added capabilities to root only.
        context["runAsUser"] = 0
        context["capabilities"]["add"] = ["IPC_LOCK"]
    return context


def _volumes(cluster: Cluster, process: Process) -> list[dict[str, Any]]:
    recipe = cluster.deployment.recipe
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": f"{cluster.name}-{process.role}"}},
        {"name": "cache", "persistentVolumeClaim": {"claimName": f"{cluster.name}-cache"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": recipe.resources.shared_memory}},
    ]
    if models_folder(recipe) is not None:
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": MODELS_CLAIM, "readOnly": True}})
    return volumes
