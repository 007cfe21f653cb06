"""From roles to processes: which node runs which ``vllm serve``, on which GPUs, with which ports and flags.

This is the only place that knows how vLLM wants to be started over several nodes:

* data parallel over nodes: one process per node. The first one takes the requests and is the others' meeting point
  (``--data-parallel-address``, ``--data-parallel-rpc-port``); each holds ``--data-parallel-size-local`` ranks, the
  others from ``--data-parallel-start-rank`` on and ``--headless``. With ``data-parallel-hybrid-lb: true`` in the role's
  args every node takes requests for its own ranks and none is headless.
* one rank over several nodes (tensor x pipeline larger than a node): ``--nnodes``, ``--node-rank``, ``--master-addr``,
  ``--master-port``; the processes after the first are ``--headless``.

Source: vLLM's "Data Parallel Deployment" and "Parallelism and Scaling" pages, its ``create_engine_config`` and
``run_headless`` (0.32 and 0.33 alike).
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm_rose_plugin.recipes.finding import Keys, RecipeError
from vllm_rose_plugin.recipes.schema import Recipe, Role

API_PORT = 8100
"""A role's first ``--port`` where its args name none. Further replicas count up."""
RPC_PORT = 13_345
"""First ``--data-parallel-rpc-port``; one per replica of the deployment."""
MASTER_PORT = 29_501
"""First ``--master-port``, for ranks that span nodes; one per replica of the deployment."""
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
PLACED = (
    "headless",
    "data-parallel-size-local",
    "data-parallel-start-rank",
    "data-parallel-rank",
    "data-parallel-address",
    "data-parallel-rpc-port",
    "nnodes",
    "node-rank",
    "master-addr",
    "master-port",
    "kv-transfer-config",
    "model",
    "host",
    "config",
)
"""Flags that follow from the placement, or that renderings use, and so may not stand under ``args``."""

SIZES = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")

Address = Callable[[int], str]
"""From a node's index in the rack to its host name or IP, or to what a job system puts in its place."""


def node_name(node: int) -> str:
    """The placeholder for a node's address where the caller has none: ``node-3``."""
    return f"node-{node}"


@dataclass(frozen=True)
class Parallelism:
    """How a role's replica is cut."""

    tensor: int
    pipeline: int
    data: int
    experts: bool
    """``--enable-expert-parallel``: experts are spread over tensor x data ranks."""

    @property
    def gpus(self) -> int:
        """GPUs that one replica needs."""
        return self.tensor * self.pipeline * self.data

    @property
    def expert_ranks(self) -> int:
        """Ranks among which the experts are spread; 1 without expert parallelism."""
        return self.tensor * self.data if self.experts else 1


def parallelism(role: Role) -> Parallelism:
    """The sizes that a role's args ask for; vLLM's default is 1. What is no size counts as 1: :func:`processes` names
    it."""
    tensor, pipeline, data = (value if _is_size(value) else 1 for value in (role.args.get(flag, 1) for flag in SIZES))
    return Parallelism(tensor, pipeline, data, experts=role.args.get("enable-expert-parallel") is True)


def redundant_experts(role: Role) -> int:
    """Of ``eplb-config``; 0 where it is absent or no number, which vLLM's parser names."""
    eplb = role.args.get("eplb-config")
    number = eplb.get("num_redundant_experts", 0) if isinstance(eplb, dict) else 0
    return number if type(number) is int else 0


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 1


@dataclass(frozen=True)
class Process:
    """One ``vllm serve`` on one node."""

    role: str
    replica: int
    """Index among the role's replicas."""
    node: int
    """Index in the rack, from ``hardware.first_node`` on."""
    node_rank: int
    """Index among the nodes of this replica; 0 is the one that others connect to."""
    nodes: int
    """Nodes of this replica."""
    gpus: tuple[int, ...]
    """Device indices on the node."""
    serves: bool
    """Whether it answers HTTP on ``ports["api"]``."""
    data_parallel_ranks: range
    """Global ranks of the replica that live here; of a rank that spans nodes, that rank."""
    ports: dict[str, int]
    """What it listens on: ``api``, ``data_parallel_rpc``, ``master`` (on node rank 0 only), ``nixl`` (the first of one
    per local rank)."""
    checkpoint: str
    flags: dict[str, Any]
    """All long flags without dashes, those of the placement included; values as in a recipe's ``args``."""
    environment: dict[str, str]
    flag_source: dict[str, Keys] = field(compare=False)
    """The place in the recipe that each flag comes from."""

    @property
    def name(self) -> str:
        """``decode-0-2``: role, replica, node rank."""
        return f"{self.role}-{self.replica}-{self.node_rank}"

    @property
    def argv(self) -> list[str]:
        """The command line, ``vllm`` first."""
        return ["vllm", "serve", self.checkpoint, *flag_words(self.flags)]

    def listening(self) -> Iterator[tuple[str, int]]:
        """Every port this process opens on its node, with what it is for."""
        for what, port in self.ports.items():
            yield what, port
            if what == "nixl":
                yield from ((what, port + index) for index in range(1, len(self.data_parallel_ranks)))


def flag_words(flags: dict[str, Any]) -> list[str]:
    """The words that a shell would get for these flags."""
    words: list[str] = []
    for flag, value in flags.items():
        if value is True:
            words.append(f"--{flag}")
        elif value is False:
            words.append(f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *(_text(entry) for entry in value)]
        else:
            words += [f"--{flag}", _text(value)]
    return words


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def processes(
    recipe: Recipe, *, leader_address: Address = node_name, own_address: Address = node_name
) -> list[Process]:
    """Every process of a deployment, in the order of roles, replicas and nodes.

    Replicas are placed one after the other: one of fewer GPUs than a node has goes onto the first node with enough GPUs
    left, a larger one takes whole nodes.

    Args:
        recipe: a loaded recipe.
        leader_address: what the other nodes of a replica call its first node by, such as ``$(LWS_LEADER_ADDRESS)``.
        own_address: what a node calls itself, for NIXL's side channel, such as ``$(POD_IP)``.

    Raises:
        RecipeError: a size is no whole number, a flag can't stand in a recipe, the roles don't fit on the nodes, GPUs
            don't match the parallel sizes, or a rank would span nodes in a way that vLLM has no launch for.
    """
    placed = [
        (name, replica, placement) for (name, replica), placement in zip(_replicas(recipe), _place(recipe), strict=True)
    ]
    result: list[Process] = []
    first_nixl = recipe.kv_transfer.side_channel_port if recipe.kv_transfer else 0
    for index, (name, replica, placement) in enumerate(placed):
        role = recipe.roles[name]  # type: ignore[index]
        result += _replica(recipe, name, replica, placement, index, first_nixl, leader_address, own_address)
        first_nixl += parallelism(role).data
    return result


def _replicas(recipe: Recipe) -> list[tuple[str, int]]:
    return [(name, replica) for name, role in recipe.roles.items() for replica in range(role.replicas)]


def _place(recipe: Recipe) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
    """For each replica its nodes and their GPUs."""
    hardware = recipe.hardware
    per_node = hardware.gpus_per_node
    used = [0] * hardware.nodes
    for name, replica in _replicas(recipe):
        role: Role = recipe.roles[name]  # type: ignore[index]
        sizes = parallelism(role)
        keys: Keys = ("roles", name, "gpus")
        for flag in SIZES:
            if not _is_size(role.args.get(flag, 1)):
                size_keys, cure = ("roles", name, "args", flag), "write a number without quotes"
                raise _error(recipe, size_keys, role.args[flag], "is no size", "a whole number from 1 up", cure)
        if sizes.gpus != role.gpus:
            sum_text = f"tensor {sizes.tensor} x pipeline {sizes.pipeline} x data {sizes.data} = {sizes.gpus}"
            raise _error(recipe, keys, role.gpus, "is not what the parallel sizes ask for", sum_text, "make them agree")
        if role.gpus > per_node and role.gpus % per_node:
            legal = f"up to {per_node}, or a multiple of {per_node}"
            raise _error(recipe, keys, role.gpus, "doesn't fill whole nodes", legal, "change the parallel sizes")
        rank = sizes.tensor * sizes.pipeline
        if rank > per_node and sizes.data > 1:
            legal = f"tensor x pipeline up to {per_node} with data parallel, or data parallel 1"
            raise _error(recipe, keys, role.gpus, f"has data parallel ranks of {rank} GPUs", legal, "lower one of them")
        if rank <= per_node < role.gpus and per_node % rank:
            legal = f"tensor x pipeline that divides {per_node}"
            raise _error(recipe, keys, role.gpus, f"cuts a rank of {rank} GPUs at a node's end", legal, "change it")
        count, take = max(1, role.gpus // per_node), min(role.gpus, per_node)
        nodes = [node for node in range(hardware.nodes) if used[node] + take <= per_node][:count]
        if len(nodes) < count:
            total = sum(role.gpus * role.replicas for role in recipe.roles.values())
            legal = f"enough nodes of {per_node} GPUs for {total} GPUs"
            problem = f"leave no room for replica {replica} of {name} ({role.gpus} GPUs)"
            cure = f"raise hardware.nodes to at least {-(-total // per_node)}, or lower replicas"
            raise _error(recipe, ("hardware", "nodes"), hardware.nodes, problem, legal, cure)
        yield [(hardware.first_node + node, tuple(range(used[node], used[node] + take))) for node in nodes]
        for node in nodes:
            used[node] += take


def _replica(
    recipe: Recipe,
    name: str,
    replica: int,
    placement: list[tuple[int, tuple[int, ...]]],
    index: int,
    first_nixl: int,
    leader_address: Address,
    own_address: Address,
) -> Iterator[Process]:
    role: Role = recipe.roles[name]  # type: ignore[index]
    sizes = parallelism(role)
    args_keys: Keys = ("roles", name, "args")
    for flag, value in role.args.items():
        if flag.startswith("no-"):  # beside the plain form, the last one would win without a word
            problem, cure = "is a negative form", f"write {flag.removeprefix('no-')}: false"
            raise _error(recipe, (*args_keys, flag), value, problem, "flags without no-", cure)
    for flag in PLACED:
        if flag in role.args:
            legal = "any flag but " + ", ".join(PLACED)
            problem = "follows from the placement"
            raise _error(recipe, (*args_keys, flag), role.args[flag], problem, legal, "remove it")
    leader, several = placement[0][0], len(placement) > 1
    api = role.args.get("port", API_PORT)
    for node_rank, (node, gpus) in enumerate(placement):
        flags = dict(role.args)
        source: dict[str, Keys] = {flag: (*args_keys, flag) for flag in flags}
        ranks = range(sizes.data)
        serves = node_rank == 0
        ports: dict[str, int] = {}
        added: dict[str, Any] = {}
        if several and sizes.data > 1:
            local = sizes.data // len(placement)
            ranks = range(node_rank * local, (node_rank + 1) * local)
            added["data-parallel-size-local"] = local
            added["data-parallel-address"] = leader_address(leader)
            added["data-parallel-rpc-port"] = RPC_PORT + index
            hybrid = role.args.get("data-parallel-hybrid-lb") is True
            serves = hybrid or serves
            if node_rank or hybrid:
                added["data-parallel-start-rank"] = ranks.start
            if node_rank == 0:
                ports["data_parallel_rpc"] = RPC_PORT + index
        elif several:
            added |= {"nnodes": len(placement), "node-rank": node_rank}
            added |= {"master-addr": leader_address(leader), "master-port": MASTER_PORT + index}
            if node_rank == 0:
                ports["master"] = MASTER_PORT + index
        if serves:
            flags["port"] = ports["api"] = api + replica if type(api) is int else api
            source.setdefault("port", (*args_keys,))
        else:
            flags.pop("port", None)
            added["headless"] = True
        environment: dict[str, str] = {}
        if recipe.kv_transfer is not None:
            added["kv-transfer-config"] = _kv_config(recipe, name)
            # vLLM adds the global data-parallel rank to this port itself.
            environment |= {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": own_address(node),
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(first_nixl),
                "VLLM_KV_CACHE_LAYOUT": recipe.kv_transfer.layout,
            }
            environment |= recipe.kv_transfer.environment
            if node_rank == 0 or sizes.data > 1:
                ports["nixl"] = first_nixl + ranks.start
        environment |= role.environment
        for flag in added:
            source[flag] = ("kv_transfer",) if flag == "kv-transfer-config" else ("roles", name, "gpus")
        yield Process(
            role=name,
            replica=replica,
            node=node,
            node_rank=node_rank,
            nodes=len(placement),
            gpus=gpus,
            serves=serves,
            data_parallel_ranks=ranks,
            ports=ports,
            checkpoint=recipe.model.checkpoint,
            flags=flags | added,
            environment=environment,
            flag_source=source,
        )


def _kv_config(recipe: Recipe, name: str) -> dict[str, Any]:
    assert recipe.kv_transfer is not None
    config: dict[str, Any] = {"kv_connector": recipe.kv_transfer.connector, "kv_role": KV_ROLES[name]}
    if recipe.kv_transfer.extra_config:
        config["kv_connector_extra_config"] = recipe.kv_transfer.extra_config
    return config


def _error(recipe: Recipe, keys: Keys, value: object, problem: str, legal: str, cure: str) -> RecipeError:
    return RecipeError([recipe.finding(keys, value, problem, legal, cure)])
