import functools
import json
import re
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from render_cases import OPTIONS, RECIPES, aggregated, split

from vllm_rose_plugin.recipes.deployment import processes
from vllm_rose_plugin.recipes.render.common import Options, RenderError
from vllm_rose_plugin.recipes.render.kubernetes import NAME_LIMIT, object_name, render_kubernetes
from vllm_rose_plugin.recipes.schema import load_recipe

# It reads 5 MB of JSON at every call otherwise.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)
VERSIONS = ("1.34", "1.37")
"""Resource claims left beta in 1.34; 1.37 is the newest with published schemas."""
SCHEMAS = {
    kind: json.loads((Path(__file__).parent / "schemas" / f"{kind.lower()}.json").read_text())
    for kind in ("LeaderWorkerSet", "ComputeDomain")
}


def _objects(recipe, options=OPTIONS):
    (text,) = render_kubernetes(recipe, options).values()
    return list(yaml.safe_load_all(text))


def _of(objects, kind, name=None):
    found = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    assert len(found) == 1 or name is None, (kind, name, len(found))
    return found if name is None else found[0]


def _templates(objects):
    """Every pod template with its set."""
    for item in _of(objects, "LeaderWorkerSet"):
        for key in ("leaderTemplate", "workerTemplate"):
            if key in item["spec"]["leaderWorkerTemplate"]:
                yield item, key, item["spec"]["leaderWorkerTemplate"][key]


def _validate(item, version):
    if item["kind"] in SCHEMAS:
        jsonschema.validate(item, SCHEMAS[item["kind"]])
    else:
        kubernetes_validate.validate(item, version, strict=True)


def _check_schemas(objects):
    for version in VERSIONS:
        for item in objects:
            _validate(item, version)
        for _, _, template in _templates(objects):
            metadata = template["metadata"] | {"name": "pod"}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
            kubernetes_validate.validate(pod, version, strict=True)


def _check_references(objects):
    """What one object names in another is there, and means it."""
    names = {(o["kind"], o["metadata"]["name"]) for o in objects}
    assert len(names) == len(objects)
    for domain in _of(objects, "ComputeDomain"):
        names.add(("ResourceClaimTemplate", domain["spec"]["channel"]["resourceClaimTemplate"]["name"]))
    labels_of_pods = []
    for item, _, template in _templates(objects):
        spec = template["spec"]
        labels_of_pods.append(template["metadata"]["labels"])
        (container,) = spec["containers"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        assert ("ConfigMap", volumes["config"]["configMap"]["name"]) in names
        assert ("PersistentVolumeClaim", volumes["cache"]["persistentVolumeClaim"]["claimName"]) in names
        claims = {claim["name"] for claim in container["resources"].get("claims", [])}
        assert claims == {claim["name"] for claim in spec.get("resourceClaims", [])}
        for claim in spec.get("resourceClaims", []):
            assert ("ResourceClaimTemplate", claim["resourceClaimTemplateName"]) in names
            (term,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            # The first pod is let through only because it matches its own term.
            assert term["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
            (term,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            assert term["topologyKey"] == "kubernetes.io/hostname"  # a node has one channel
            assert term["labelSelector"]["matchExpressions"][0]["key"] in template["metadata"]["labels"]
        data = _of(objects, "ConfigMap", volumes["config"]["configMap"]["name"])["data"]
        size = item["spec"]["leaderWorkerTemplate"]["size"]
        pattern = container["args"][container["args"].index("--config") + 1]
        folder = container["volumeMounts"][0]["mountPath"]
        files = {f"{folder}/{name}" for name in data}
        assert files == {pattern.replace("$(LWS_WORKER_INDEX)", str(index)) for index in range(size)}
        known = {entry["name"] for entry in container["env"]} | {"LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX"}
        used = re.findall(r"\$\((\w+)\)", " ".join(container["args"]))
        assert set(used) <= known
        before = {"LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX"}
        for entry in container["env"]:  # the kubelet expands only what stands before
            assert set(re.findall(r"(?<!\$)\$\((\w+)\)", entry.get("value", ""))) <= before
            before.add(entry["name"])
        assert len(before) == len(container["env"]) + 2, "a variable is given twice"
    for service in _of(objects, "Service"):
        selector = service["spec"]["selector"]
        if selector["app.kubernetes.io/component"] == "router":
            (pods,) = [o["spec"]["template"]["metadata"]["labels"] for o in _of(objects, "Deployment")]
            assert selector.items() <= pods.items()
        else:
            chosen = [labels for labels in labels_of_pods if selector.items() <= labels.items()]
            assert chosen, service["metadata"]["name"]
    for text in re.findall(r"^\s+(?:name|vllm-rose/\S+|app\.\S+): (\S+)$", yaml.safe_dump_all(objects), re.M):
        assert len(text.strip("'")) <= 63, text


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_what_the_published_schemas_take(path):
    objects = _objects(load_recipe(path))
    _check_schemas(objects)
    _check_references(objects)
    overlays = load_recipe(path).overlays
    for overlay in overlays:
        objects = _objects(load_recipe(path, overlays=[overlay]))
        _check_schemas(objects)
        _check_references(objects)


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        (("LeaderWorkerSet",), "spec.leaderWorkerTemplate.sizes", 4),
        (("LeaderWorkerSet",), "spec.leaderWorkerTemplate.restartPolicy", "Always"),
        (("LeaderWorkerSet",), "spec.leaderWorkerTemplate.workerTemplate.spec.containers.0.command", "vllm"),
        (("LeaderWorkerSet",), "spec.leaderWorkerTemplate.workerTemplate.spec.hostnames", "x"),
        (("ComputeDomain",), "spec.numNodes", "four"),
        (("Service",), "spec.ports.0.port", "http"),
        (("Deployment",), "spec.template.spec.containers.0.livenessProbe.periodSecond", 3),
    ],
    ids=lambda value: str(value),
)
def test_the_schemas_refuse_a_wrong_object(path, key, value):
    objects = _objects(load_recipe(RECIPES[[p.stem for p in RECIPES].index("qwen3-235b-a22b-mxfp8-gb200-nvl72")]))
    place = _of(objects, path[0])[0]
    *way, last = key.split(".")
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    place[last] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        _check_schemas(objects)


def test_ranks_of_a_decoder_over_four_trays(tmp_path):
    roles = {
        "prefill": {"gpus": 4, "args": {"tensor-parallel-size": 4}},
        "decode": {"gpus": 16, "replicas": 2, "args": {"port": 8200, "data-parallel-size": 16}},
    }
    recipe = split(tmp_path, hardware={"gpu": "GB200", "nodes": 9, "gpus_per_node": 4}, roles=roles)
    objects = _objects(recipe)
    _check_schemas(objects)
    _check_references(objects)
    decode = _of(objects, "LeaderWorkerSet", "split-decode")["spec"]
    assert (decode["replicas"], decode["leaderWorkerTemplate"]["size"]) == (2, 4)
    leader, worker = (decode["leaderWorkerTemplate"][f"{who}Template"]["spec"] for who in ("leader", "worker"))
    assert leader["containers"][0]["args"][2:] == ["--data-parallel-address", "$(LWS_LEADER_ADDRESS)"]
    assert worker["containers"][0]["args"] == leader["containers"][0]["args"]
    assert "startupProbe" in leader["containers"][0]
    assert not {"startupProbe", "readinessProbe", "livenessProbe", "ports"} & set(worker["containers"][0])
    labels = [decode["leaderWorkerTemplate"][f"{who}Template"]["metadata"]["labels"] for who in ("leader", "worker")]
    assert ["vllm-rose/serves" in label for label in labels] == [True, False]
    data = _of(objects, "ConfigMap", "split-decode")["data"]
    ranks = [yaml.safe_load(data[f"decode-{index}.yaml"]) for index in range(4)]
    assert [rank.get("data-parallel-start-rank") for rank in ranks] == [None, 4, 8, 12]
    assert [rank.get("headless") for rank in ranks] == [None, True, True, True]
    assert [rank.get("port") for rank in ranks] == [8000, None, None, None]
    # InfiniBand for KV: only the decoders, of both replicas, share memory over NVLink.
    assert _of(objects, "ComputeDomain", "split-domain")["spec"]["numNodes"] == 8
    assert "resourceClaims" in worker
    assert (
        "resourceClaims"
        not in _of(objects, "LeaderWorkerSet", "split-prefill")["spec"]["leaderWorkerTemplate"]["workerTemplate"][
            "spec"
        ]
    )


def test_kv_over_nvlink_puts_both_roles_into_the_domain(tmp_path):
    roles = {role: {"gpus": 4, "args": {"tensor-parallel-size": 4}} for role in ("prefill", "decode")}
    rack = {"gpu": "GB200", "nodes": 2, "gpus_per_node": 4}
    fabric = {"transport": "ucx/nvlink-fabric"}
    objects = _objects(split(tmp_path, hardware=rack, roles=roles, kv_transfer=fabric))
    _check_schemas(objects)
    _check_references(objects)
    assert _of(objects, "ComputeDomain", "split-domain")["spec"]["numNodes"] == 2
    for _, _, template in _templates(objects):
        (container,) = template["spec"]["containers"]
        assert container["resources"]["claims"] == [{"name": "channel"}]
        assert "rdma/ib" not in container["resources"]["limits"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "runAsUser" not in container["securityContext"]


def test_two_roles_of_one_tray_get_a_node_each_for_their_channel(tmp_path):
    roles = {role: {"gpus": 2, "args": {"tensor-parallel-size": 2}} for role in ("prefill", "decode")}
    rack = {"gpu": "GB200", "nodes": 1, "gpus_per_node": 4}
    recipe = split(tmp_path, hardware=rack, roles=roles, kv_transfer={"transport": "ucx/nvlink-fabric"})
    assert {process.node for process in processes(recipe)} == {0}
    objects = _objects(recipe)
    _check_schemas(objects)
    _check_references(objects)
    assert _of(objects, "ComputeDomain", "split-domain")["spec"]["numNodes"] == 2


def test_infiniband_needs_the_port_and_the_right_to_pin_memory(tmp_path):
    objects = _objects(split(tmp_path), Options(OPTIONS.image, OPTIONS.router_image, rdma_resource="nvidia.com/mlnx"))
    _check_schemas(objects)
    assert not _of(objects, "ComputeDomain")  # NVLink ends at an HGX node
    for _, _, template in _templates(objects):
        (container,) = template["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/mlnx"] == 1
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


def test_a_pod_gets_its_share_of_the_node(tmp_path):
    objects = _objects(split(tmp_path))
    limits = {}
    for item, _, template in _templates(objects):
        (container,) = template["spec"]["containers"]
        limits[item["metadata"]["name"]] = container["resources"]["limits"]
        (shm,) = [v for v in template["spec"]["volumes"] if v["name"] == "shm"]
        assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert limits["split-prefill"] == {"cpu": "24", "memory": "204800Mi", "nvidia.com/gpu": 2, "rdma/ib": 1}
    assert limits["split-decode"] == {"cpu": "48", "memory": "409600Mi", "nvidia.com/gpu": 4, "rdma/ib": 1}


def test_a_long_load_is_not_taken_for_death(tmp_path):
    for _, _, template in _templates(_objects(split(tmp_path))):
        probe = template["spec"]["containers"][0]["startupProbe"]
        assert probe["httpGet"]["path"] == "/health"
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 3600


def test_one_rank_over_two_nodes_meets_at_the_leader(tmp_path):
    args = {"tensor-parallel-size": 4, "pipeline-parallel-size": 2}
    rack = {"gpu": "GB200", "nodes": 2, "gpus_per_node": 4}
    objects = _objects(aggregated(tmp_path, {"gpus": 8, "args": args}, hardware=rack))
    _check_schemas(objects)
    _check_references(objects)
    for _, _, template in _templates(objects):
        assert template["spec"]["containers"][0]["args"][2:] == ["--master-addr", "$(LWS_LEADER_ADDRESS)"]
    data = _of(objects, "ConfigMap", "whole-serve")["data"]
    assert [yaml.safe_load(data[f"serve-{rank}.yaml"])["node-rank"] for rank in range(2)] == [0, 1]


def test_with_hybrid_balancing_every_pod_serves(tmp_path):
    args = {"data-parallel-size": 16, "data-parallel-hybrid-lb": True}
    two = {"gpu": "H200", "nodes": 2, "gpus_per_node": 8}
    router = {"kind": "vllm-router"}
    objects = _objects(aggregated(tmp_path, {"gpus": 16, "args": args}, hardware=two, router=router))
    _check_schemas(objects)
    _check_references(objects)
    for _, _, template in _templates(objects):
        assert template["metadata"]["labels"]["vllm-rose/serves"] == "true"
        assert "readinessProbe" in template["spec"]["containers"][0]
    (deployment,) = _of(objects, "Deployment")
    words = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert words[words.index("--selector") + 2] == "app.kubernetes.io/component=serve"


def test_without_a_router_the_service_asks_the_server(tmp_path):
    objects = _objects(aggregated(tmp_path, {"gpus": 1, "args": {"max-model-len": 4096}}))
    _check_schemas(objects)
    _check_references(objects)
    assert not _of(objects, "Deployment")
    service = _of(objects, "Service", "whole")["spec"]
    assert service["ports"] == [{"name": "http", "port": 8000, "targetPort": 8000}]
    assert service["selector"]["app.kubernetes.io/component"] == "serve"


def test_a_public_checkpoint_needs_no_volume_of_models(tmp_path):
    role = {"gpus": 1, "args": {}}
    for checkpoint, expected in (("Qwen/Qwen3-30B-A3B", False), ("/models/Qwen3-30B-A3B", True)):
        objects = _objects(aggregated(tmp_path, role, model={"checkpoint": checkpoint}))
        for _, _, template in _templates(objects):
            assert ("models" in {volume["name"] for volume in template["spec"]["volumes"]}) == expected


def test_new_config_gives_new_pods(tmp_path):
    def digest(length):
        objects = _objects(aggregated(tmp_path, {"gpus": 1, "args": {"max-model-len": length}}))
        return [template["metadata"]["annotations"] for _, _, template in _templates(objects)]

    assert digest(4096) == digest(4096) != digest(8192)


def test_a_dollar_in_the_environment_stays_one(tmp_path):
    role = {"gpus": 1, "args": {}, "environment": {"MARK": "$(HOME)-$X"}}
    for _, _, template in _templates(_objects(aggregated(tmp_path, role))):
        assert {"name": "MARK", "value": "$$(HOME)-$X"} in template["spec"]["containers"][0]["env"]


def test_only_the_objects_of_a_role(tmp_path):
    recipe = split(tmp_path)
    whole = _objects(recipe)
    parts = []
    for role in ("prefill", "decode", "router"):
        part = _objects(recipe, Options(OPTIONS.image, OPTIONS.router_image, roles=(role,)))
        components = {o["metadata"]["labels"].get("app.kubernetes.io/component") for o in part}
        assert components == {None, role}
        parts += [item for item in part if item not in parts]
    assert sorted(map(str, parts)) == sorted(map(str, whole))


def test_replicas_share_their_template(tmp_path):
    """Pods have addresses of their own, so the ports that count up per replica on one node don't matter."""
    recipe = split(tmp_path)
    assert {p.ports["api"] for p in processes(recipe) if p.role == "prefill"} == {8100, 8101}
    (item,) = [o for o in _of(_objects(recipe), "LeaderWorkerSet") if o["metadata"]["name"] == "split-prefill"]
    assert item["spec"]["replicas"] == 2


@pytest.mark.parametrize(
    "name", ["qwen3.5-397b", "4-experts", "a" * 41, "qwen3.5-397b-a17b-mxfp8-vera-rubin-nvl72-x-y"]
)
def test_names_that_kubernetes_takes(name):
    result = object_name(name)
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", result)
    assert len(result) <= NAME_LIMIT


def test_long_names_stay_apart():
    assert object_name("a" * 50 + "-x") != object_name("a" * 50 + "-y")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(), "vllm-rose:0.1.0 has no digest: give --image"),
        (Options(image="example/vllm-rose:0.1.0"), "--image example/vllm-rose:0.1.0 is no image by digest"),
        (Options(image=f"example/vllm-rose@sha256:{'1' * 63}"), "is no image by digest"),
        (Options(image=OPTIONS.image), "give --router-image"),
    ],
)
def test_images_without_a_digest_are_refused(tmp_path, options, message):
    with pytest.raises(RenderError, match=re.escape(message)):
        render_kubernetes(split(tmp_path), options)
