"""``--as kubernetes``: one file of objects for ``kubectl apply``.

Needs in the cluster: LeaderWorkerSet (https://lws.sigs.k8s.io, 0.8 or newer), NVIDIA's GPU operator, on a rack its DRA
driver (https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu, once NVIDIA/k8s-dra-driver-gpu; ``ComputeDomain`` of
``resource.nvidia.com/v1beta1``), and for InfiniBand a device plugin that offers ``--rdma-resource``.
``docs/kubernetes.md`` leads through it.

One LeaderWorkerSet per role; a group is a replica, a pod one node of it. Each pod reads the config file of its rank
(``LWS_WORKER_INDEX``); the first pod's address is the only thing on the command line.
"""

import hashlib
import re
from typing import Any

from vllm_rose_plugin.recipes.deployment import Process
from vllm_rose_plugin.recipes.hardware import GPUS
from vllm_rose_plugin.recipes.render.common import (
    AtStart,
    Deployment,
    Options,
    RenderError,
    comment,
    config_text,
    place,
    server_image,
    split_flags,
    to_yaml,
)
from vllm_rose_plugin.recipes.render.kubernetes_pods import (
    API_PORT,
    CHANNEL_CLAIM,
    Cluster,
    server_pod,
)
from vllm_rose_plugin.recipes.render.kubernetes_router import router_objects
from vllm_rose_plugin.recipes.schema import Recipe

NAME_LIMIT = 40
"""Characters of a deployment's name; with ``-prefill-12-1`` and a hash behind it, labels end at 63."""


def render_kubernetes(recipe: Recipe, options: Options) -> dict[str, str]:
    """``NAME.kubernetes.yaml``. With roles, the objects of those and the shared ones.

    Raises:
        RenderError: a digest is missing, or the RDMA resource has no name of Kubernetes.
    """
    if not re.fullmatch(
        r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", options.rdma_resource
    ):
        raise RenderError(f"--rdma-resource {options.rdma_resource!r} is no resource; legal: DOMAIN/NAME, as rdma/ib")
    deployment = place(
        recipe,
        options,
        leader=lambda node: AtStart("$(LWS_LEADER_ADDRESS)"),
        own=lambda node: AtStart("$(POD_IP)"),
    )
    cluster = Cluster(deployment, object_name(recipe.name), server_image(deployment), _in_one_domain(deployment))
    objects = _shared(cluster)
    for role in recipe.roles:
        if options.wants(role):
            objects += _role_objects(cluster, role)
    if deployment.has_router and options.wants("router"):
        objects += router_objects(cluster)
    elif not deployment.has_router and options.wants("serve"):
        objects.append(cluster.service(cluster.name, "serve", recipe.router.port))
    return {f"{recipe.name}.kubernetes.yaml": comment(deployment.header) + to_yaml(*objects)}


def object_name(name: str) -> str:
    """A recipe's name as Kubernetes wants it: a letter first, no dots, at most 40 characters, unique."""
    plain = re.sub(r"[^a-z0-9-]", "-", name)
    plain = plain if plain[0].isalpha() else f"rose-{plain}"
    if len(plain) <= NAME_LIMIT:
        return plain
    return f"{plain[: NAME_LIMIT - 7].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def _in_one_domain(deployment: Deployment) -> set[str]:
    """Roles whose pods open memory of other nodes over NVLink, and so need a channel of one IMEX domain."""
    recipe = deployment.recipe
    if GPUS[recipe.hardware.gpu].nodes_per_rack == 1:
        return set()
    if recipe.kv_transfer is not None and recipe.kv_transfer.transport == "ucx/nvlink-fabric":
        return set(recipe.roles)
    return {process.role for process in deployment.processes if process.nodes > 1}


def _shared(cluster: Cluster) -> list[dict[str, Any]]:
    recipe = cluster.deployment.recipe
    objects: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": cluster.metadata(f"{cluster.name}-cache"),
            "spec": {
                "accessModes": ["ReadWriteMany"],  # one volume for the pods of all nodes
                "resources": {"requests": {"storage": recipe.resources.cache_volume}},
            },
        }
    ]
    if cluster.domain_roles:
        # One pod to a node, also where the recipe has two roles on one.
        nodes = sum(1 for process in cluster.deployment.processes if process.role in cluster.domain_roles)
        objects.append(
            {
                "apiVersion": "resource.nvidia.com/v1beta1",
                "kind": "ComputeDomain",
                "metadata": cluster.metadata(f"{cluster.name}-domain"),
                "spec": {
                    "numNodes": nodes,
                    "channel": {"resourceClaimTemplate": {"name": f"{cluster.name}-{CHANNEL_CLAIM}"}},
                },
            }
        )
    return objects


def _role_objects(cluster: Cluster, role: str) -> list[dict[str, Any]]:
    recipe = cluster.deployment.recipe
    ranks = [process for process in cluster.deployment.of_role(role) if process.replica == 0]
    files = {f"{role}-{process.node_rank}.yaml": _config(process) for process in ranks}
    digest = hashlib.sha256("".join(files.values()).encode()).hexdigest()[:16]
    leader = server_pod(cluster, ranks[0], digest)
    workers = server_pod(cluster, ranks[-1], digest)
    template: dict[str, Any] = {"size": len(ranks), "restartPolicy": "RecreateGroupOnPodRestart"}
    if len(ranks) > 1:
        template["leaderTemplate"] = leader
    template["workerTemplate"] = workers
    name = f"{cluster.name}-{role}"
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": cluster.metadata(name, role),
            "data": files,
        },
        {
            "apiVersion": "leaderworkerset.x-k8s.io/v1",
            "kind": "LeaderWorkerSet",
            "metadata": cluster.metadata(name, role),
            "spec": {
                "replicas": recipe.roles[role].replicas,  # type: ignore[index]
                "startupPolicy": "LeaderCreated",
                "rolloutStrategy": {
                    "type": "RollingUpdate",
                    # A rack has no room for a second decoder beside the first.
                    "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
                },
                "leaderWorkerTemplate": template,
            },
        },
        # LeaderWorkerSet makes a headless service of its own under the set's name.
        cluster.service(f"{name}-api", role, API_PORT),
    ]


def _config(process: Process) -> str:
    flags = split_flags(process)[0]
    if "port" in flags:
        flags = flags | {"port": API_PORT}
    return config_text(process, flags)
