"""Ports, NIXL's settings on both roles, and the transport of KV."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vllm_rose_plugin.recipes.deployment import Process
from vllm_rose_plugin.recipes.finding import Finding, Keys
from vllm_rose_plugin.recipes.hardware import GPUS
from vllm_rose_plugin.recipes.render.common import ROUTER_METRICS_PORT
from vllm_rose_plugin.recipes.schema import Recipe

_TCP = {"tcp"}
_INFINIBAND = {"rc", "rc_x", "rc_v", "rc_mlx5", "dc", "dc_x", "dc_mlx5", "ud", "ib"}


def check_ports(recipe: Recipe, processes: Sequence[Process]) -> Iterator[Finding]:
    """Two listeners of one node on one port, or a port out of range."""
    taken: dict[tuple[int, int], str] = {}
    if recipe.router.kind != "none":
        taken[recipe.hardware.first_node, ROUTER_METRICS_PORT] = "the router (metrics)"
        taken[recipe.hardware.first_node, recipe.router.port] = "the router"
        if recipe.router.port == ROUTER_METRICS_PORT:
            legal = f"a port but {ROUTER_METRICS_PORT}"
            problem = "is where the router's metrics are"
            yield recipe.finding(("router", "port"), recipe.router.port, problem, legal, "write another port")
    yield from _side_channel(recipe, processes)
    for process in processes:
        for what, port in process.listening():
            keys = _port_keys(process, what)
            if type(port) is not int or not 1024 <= port <= 65535:
                if what != "nixl":  # of which the last one tells for all
                    yield recipe.finding(keys, port, f"is no port for {process.name}", "1024 to 65535", "change it")
                continue
            other = taken.setdefault((process.node, port), f"{process.name} ({what})")
            if other != f"{process.name} ({what})":
                yield recipe.finding(
                    keys,
                    port,
                    f"{process.name} ({what}) and {other} listen on the same port of node {process.node}",
                    "one listener per port and node",
                    "move one of them",
                )


def _side_channel(recipe: Recipe, processes: Sequence[Process]) -> Iterator[Finding]:
    """NIXL's ports count up over the ranks of the deployment, from one that the recipe names."""
    ports = [port for process in processes for what, port in process.listening() if what == "nixl"]
    if ports and max(ports) > 65535:
        first, count = min(ports), max(ports) - min(ports) + 1
        problem = f"leaves no room for the {count} ports of this deployment, one for each data parallel rank"
        legal, cure = f"1024 to {65536 - count}", f"write side_channel_port: {65536 - count}, or less"
        yield recipe.finding(("kv_transfer", "side_channel_port"), first, problem, legal, cure)


def _port_keys(process: Process, what: str) -> Keys:
    if what == "nixl":
        return ("kv_transfer", "side_channel_port")
    return ("roles", process.role, "args", "port") if what == "api" else ("roles", process.role)


def check_kv_transfer(
    recipe: Recipe, processes: Sequence[Process], configs: dict[str, dict[str, Any]], *, hybrid: bool
) -> Iterator[Finding]:
    """Layout, block size and what NIXL compares in its handshake: equal on both roles; transport as the recipe says.

    Args:
        recipe: a disaggregated recipe.
        processes: all of its processes.
        configs: by role, the configuration as one vLLM built it; empty where it could not.
        hybrid: whether the model has linear attention beside its KV cache.
    """
    assert recipe.kv_transfer is not None
    for variable in ("VLLM_KV_CACHE_LAYOUT", *(("VLLM_SSM_CONV_STATE_LAYOUT",) if hybrid else ())):
        values = {process.role: process.environment.get(variable) for process in processes}
        wanted = recipe.kv_transfer.layout if variable == "VLLM_KV_CACHE_LAYOUT" else "DS"
        for role, value in values.items():
            if value != wanted:
                problem = f"{role} has {variable}, and KV transfer needs the same {wanted} on both roles"
                keys: Keys = ("roles", role, "environment", variable)
                yield recipe.finding(keys, value, problem, wanted, f'write {variable}: "{wanted}" for both roles')
    yield from _transport(recipe, processes)
    yield from _names(recipe)
    if set(configs) != {"prefill", "decode"}:
        return
    prefill, decode = configs["prefill"], configs["decode"]
    for key, flag in (("block_size", "block-size"), ("cache_dtype", "kv-cache-dtype")):
        if prefill[key] != decode[key]:
            yield recipe.finding(
                ("roles", "decode", "args", flag),
                decode[key],
                f"differs from prefill's {prefill[key]}, and KV blocks are copied as they are",
                f"{prefill[key]}, or the same value on both roles",
                f"write {flag} with one value on both roles",
            )
    if decode["max_model_len"] < prefill["max_model_len"]:
        yield recipe.finding(
            ("roles", "decode", "args", "max-model-len"),
            decode["max_model_len"],
            f"is less than prefill's {prefill['max_model_len']}: longer prompts would be computed and then refused",
            f"{prefill['max_model_len']} or more",
            "write max-model-len with one value on both roles",
        )
    if prefill["nixl"] != decode["nixl"] and prefill["cache_dtype"] == decode["cache_dtype"]:
        yield recipe.finding(
            ("roles", "decode", "args"),
            None,
            "NIXL's handshake would refuse this role: model, dtype or drafting differ from prefill's",
            "the same dtype and speculative-config on both roles",
            "write them on both roles",
        )


def _names(recipe: Recipe) -> Iterator[Finding]:
    """The router hands one request, with one name of the model, to a server of each role."""
    prefill, decode = (recipe.roles[role].args.get("served-model-name") for role in ("prefill", "decode"))  # type: ignore[index]
    if prefill != decode:
        yield recipe.finding(
            ("roles", "decode", "args", "served-model-name"),
            decode,
            f"differs from prefill's {prefill}, and a request that names the one is refused by the other",
            "the same on both roles",
            "write served-model-name with one value on both roles",
        )


def _transport(recipe: Recipe, processes: Iterable[Process]) -> Iterator[Finding]:
    assert recipe.kv_transfer is not None
    transport = recipe.kv_transfer.transport
    by_role: dict[str, Process] = {process.role: process for process in processes}
    for role, process in by_role.items():
        given = process.environment.get("UCX_TLS", "all")
        names = {name.strip() for name in given.removeprefix("^").split(",")}
        keys: Keys = ("kv_transfer", "environment", "UCX_TLS")
        if "UCX_TLS" in recipe.roles[role].environment:  # type: ignore[index]
            keys = ("roles", role, "environment", "UCX_TLS")
        if given.startswith("^") or "all" in names:
            legal, cure = "the transports by name", "name them, so that KV can't fall back to TCP or leave its network"
            yield recipe.finding(keys, given, f"lets UCX choose, while transport is {transport}", legal, cure)
        elif transport == "ucx/ib":
            if not names & _INFINIBAND:
                legal = "one of " + ", ".join(sorted(_INFINIBAND))
                yield recipe.finding(keys, given, "has no InfiniBand transport", legal, "add rc")
            for bad in sorted(names & ({"cuda_ipc"} | _TCP)):
                reason = "takes KV onto NVLink" if bad == "cuda_ipc" else "lets KV fall back to TCP"
                yield recipe.finding(keys, given, f"{bad} {reason}", f"a list without {bad}", f"remove {bad}")
        else:
            yield from _fabric(recipe, role, process, names, keys, given)


def _fabric(recipe: Recipe, role: str, process: Process, names: set[str], keys: Keys, given: str) -> Iterator[Finding]:
    if "cuda_ipc" not in names:
        yield recipe.finding(keys, given, "has no NVLink transport", "a list with cuda_ipc", "add cuda_ipc")
    variable = "UCX_CUDA_IPC_ENABLE_MNNVL"
    if process.environment.get(variable, "").lower() not in ("y", "yes", "1", "on"):
        problem = "NVLink between nodes must be switched on in UCX, or KV goes over TCP"
        environment: Keys = ("kv_transfer", "environment", variable)
        yield recipe.finding(environment, process.environment.get(variable), problem, "y", f'write {variable}: "y"')
    if process.flags.get("enable-cumem-allocator") is not True:
        yield recipe.finding(
            ("roles", role, "args", "enable-cumem-allocator"),
            process.flags.get("enable-cumem-allocator"),
            "plain CUDA memory has no fabric handle, so KV would go over TCP (vLLM PR 33540)",
            "true",
            "write enable-cumem-allocator: true",
        )


def check_together(deployments: Sequence[tuple[Recipe, Sequence[Process]]]) -> Iterator[Finding]:
    """Recipes that share one rack: another kind of GPU, GPUs taken twice, one port of one node taken twice."""
    gpus: dict[tuple[int, int], tuple[Recipe, Process]] = {}
    ports: dict[tuple[int, int], tuple[Recipe, str]] = {}
    for recipe, processes in deployments:
        reported: defaultdict[str, set[str]] = defaultdict(set)
        first, _ = deployments[0]
        if recipe.hardware.gpu != first.hardware.gpu:
            yield recipe.finding(
                ("hardware", "gpu"),
                recipe.hardware.gpu,
                f"is another rack than that of {first.path}, which has {first.hardware.gpu}",
                "one kind of GPU on one rack",
                "check recipes of one kind of rack together",
            )
            continue
        for process in processes:
            for gpu in process.gpus:
                other, _ = gpus.setdefault((process.node, gpu), (recipe, process))
                if other is not recipe and other.name not in reported["gpus"]:
                    reported["gpus"].add(other.name)
                    free = max(1 + max(node for node, _ in gpus), other.hardware.first_node + other.hardware.nodes)
                    rack = GPUS[recipe.hardware.gpu].nodes_per_rack
                    room = rack == 1 or free + recipe.hardware.nodes <= rack  # H200 nodes stand alone
                    yield recipe.finding(
                        ("hardware", "first_node"),
                        recipe.hardware.first_node,
                        f"takes GPU {gpu} of node {process.node}, which {other.path} uses",
                        "nodes that no other recipe of this rack uses",
                        f"write first_node: {free}" if room else f"take fewer nodes: the rack has {rack}",
                    )
        listeners = [(process.node, port, process.name) for process in processes for _, port in process.listening()]
        if recipe.router.kind != "none":
            listeners.append((recipe.hardware.first_node, recipe.router.port, "the router"))
        for node, port, name in listeners:
            owner, theirs = ports.setdefault((node, port), (recipe, name))
            if owner is not recipe and str(port) not in reported["ports"]:
                reported["ports"].add(str(port))
                yield recipe.finding(
                    ("router", "port") if name == "the router" else ("roles",),
                    port,
                    f"{name} listens on port {port} of node {node}, as {theirs} of {owner.path} does",
                    "one listener per port and node",
                    "move one of them, or take other nodes",
                )
