"""The format of a recipe: one YAML file that says everything about one deployment.

``load_recipe`` reads a file, merges the overlays asked for, and checks the format; what needs vLLM's parser, the
model's shapes or the hardware is checked by :mod:`vllm_rose_plugin.recipes.check`. ``docs/recipes.md`` explains the
keys.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from vllm_rose_plugin.recipes.finding import Finding, Keys, RecipeError
from vllm_rose_plugin.recipes.hardware import GPUS
from vllm_rose_plugin.recipes.lines import Lines, read_yaml

FORMAT = 1
"""The version of this format, ``recipe:`` in a file."""

Port = Annotated[int, Field(ge=1024, le=65535)]
Count = Annotated[int, Field(ge=1)]
Few = Annotated[int, Field(ge=1, le=4096)]
"""Nodes, GPUs, replicas: each becomes an entry or a process."""
Line = Annotated[str, Field(pattern=r"^[^\r\n]+$")]
"""Stands in comments of rendered files."""
Size = Annotated[str, Field(pattern=r"^[1-9][0-9]*(Mi|Gi|Ti)$")]
"""An amount of memory or disk, in Kubernetes' binary units: ``64Gi``."""
Environment = dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str]
"""Values are text: ``"1"``, not ``1``, since that is what a process gets."""
Flag = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]


def _given(value: Any) -> Any:
    if value is None:  # vLLM would get the word None
        raise ValueError("has no value")
    if isinstance(value, str) and _is_json_object(value):  # vLLM would take it, our checks would not see inside
        raise ValueError("is JSON in quotes; write it as a mapping, without them")
    return value


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


Arguments = dict[Flag, Annotated[Any, AfterValidator(_given)]]
"""vLLM's own long flags without dashes. ``true`` gives ``--flag``, ``false`` ``--no-flag``, a mapping JSON, a list
several values."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Hardware(_Strict):
    """Which nodes the deployment takes."""

    gpu: Literal[tuple(GPUS)]  # type: ignore[valid-type]
    """Key of :data:`vllm_rose_plugin.recipes.hardware.GPUS`."""
    nodes: Few
    """Nodes (trays) used."""
    gpus_per_node: Few
    first_node: Annotated[int, Field(ge=0)] = 0
    """The first node of the rack that is used, so that several recipes can share one rack."""


class Model(_Strict):
    """What is served."""

    id: str
    """The public name, such as ``Qwen/Qwen3-235B-A22B``."""
    checkpoint: Annotated[
        str, Field(pattern=r"^((/[A-Za-z0-9._-]+){2,}|[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._-]+)?)$")
    ]
    """What vLLM is given: a folder inside the container, whose parent is mounted, or a public name."""
    config: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+\.json$")]
    """File in ``models/`` beside the recipes: the facts of the model's config.json, with their source."""
    weights: Literal["mxfp8", "nvfp4", "fp8", "bf16"]
    """How the checkpoint's experts and linear layers are stored."""
    expert_weights: Literal["mxfp8", "nvfp4", "fp8", "bf16"] | None = None
    """How routed experts are stored, where that differs from the rest."""
    ignore: list[str] = []
    """Shell patterns of modules that stay in BF16, beside the embedding, the head, routers and norms."""


class Container(_Strict):
    """The image, without a registry host; its digest is given when a file is rendered from the recipe."""

    image: Annotated[str, Field(pattern=r"^[a-z0-9]+([._/-][a-z0-9]+)*$")]
    tag: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]


class Resources(_Strict):
    """What one node's container gets besides its GPUs."""

    cpus: Count
    memory: Size
    shared_memory: Size
    """/dev/shm, which NCCL and vLLM's processes use among themselves."""
    cache_volume: Size
    """One volume for compiled kernels, torch.compile and JIT caches."""


class KvTransfer(_Strict):
    """How KV gets from prefill to decode."""

    connector: Literal["NixlConnector"]
    transport: Literal["ucx/ib", "ucx/nvlink-fabric"]
    """``ucx/ib``: InfiniBand, kept apart from NVLink. ``ucx/nvlink-fabric``: NVLink, with fabric memory (IMEX)."""
    layout: Literal["LBHNC"] = "LBHNC"
    """``VLLM_KV_CACHE_LAYOUT`` on both roles. Named HND before vLLM 0.32: heads before tokens, so that a rank can
    read some heads of a block as one run of bytes."""
    side_channel_port: Port = 5600
    """First port of NIXL's handshake; each data-parallel rank of each replica has one of its own."""
    environment: Environment = {}
    """UCX and NIXL variables of both roles."""
    extra_config: dict[str, Any] = {}
    """``kv_connector_extra_config`` on both roles."""


class Role(_Strict):
    """One kind of vLLM server: prefill, decode, or both at once (``serve``)."""

    replicas: Few = 1
    gpus: Few
    """GPUs of one replica: tensor x pipeline x data parallel size."""
    args: Arguments
    environment: Environment = {}


class Router(_Strict):
    """What stands in front of the replicas."""

    kind: Literal["vllm-router", "none"]
    """``vllm-router``: the vLLM project's, which knows prefill and decode. ``none``: one server, asked itself."""
    port: Port
    policy: Literal["consistent_hash", "round_robin", "random", "power_of_two", "cache_aware"] | None = None


class Benchmark(_Strict):
    """The load that the deployment is meant to be measured with (``vllm bench serve``)."""

    input_tokens: Count
    output_tokens: Count
    concurrency: Annotated[list[Count], Field(min_length=1)]


class Recipe(_Strict):
    """One deployment."""

    recipe: Literal[1]
    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")]
    description: Line
    status: Annotated[str, Field(pattern=r"^(not measured$|measured on .+, [0-9]{4}-[0-9]{2}-[0-9]{2}: .+$)")]
    hardware: Hardware
    model: Model
    container: Container
    resources: Resources
    kv_transfer: KvTransfer | None = None
    roles: dict[Literal["prefill", "decode", "serve"], Role]
    """``prefill`` and ``decode`` (needs ``kv_transfer``), or ``serve`` alone."""
    router: Router
    benchmark: Benchmark
    overlays: dict[str, dict[str, Any]] = {}
    """Named changes, merged over the file by ``--overlay NAME``; ``null`` removes a key."""

    _path: Path = PrivateAttr(default=Path("recipe.yaml"))
    _lines: Lines = PrivateAttr(default_factory=dict)
    _applied: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="after")
    def _roles_belong_together(self) -> "Recipe":
        given = set(self.roles)
        if given == {"serve"}:
            if self.kv_transfer is not None:
                raise ValueError("kv_transfer is given, but the only role is serve")
        elif given == {"prefill", "decode"}:
            if self.kv_transfer is None:
                raise ValueError("prefill and decode need kv_transfer")
        else:
            raise ValueError(f"roles are {sorted(given)}; legal: prefill with decode, or serve alone")
        if self.router.kind == "none" and (self.kv_transfer is not None or self.roles["serve"].replicas != 1):
            raise ValueError("router.kind none serves one replica of the role serve; use vllm-router")
        return self

    @property
    def path(self) -> Path:
        """The file it was read from."""
        return self._path

    @property
    def applied_overlays(self) -> tuple[str, ...]:
        """Names of the overlays that were merged, in order."""
        return self._applied

    def line_of(self, *keys: str | int) -> int:
        """The line of a key, or of the nearest key above it that the file has; with an overlay, its line there."""
        return _line(self._lines, keys)

    def finding(self, keys: Keys, value: object, problem: str, legal: str, cure: str) -> Finding:
        """A fault of this recipe, with the line of ``keys`` filled in."""
        return Finding(self.path, self.line_of(*keys), keys, value, problem, legal, cure)

    def model_config_path(self) -> Path:
        """Where the model's shapes lie."""
        return self.path.parent / "models" / self.model.config


def load_recipe(path: Path, *, overlays: Sequence[str] = ()) -> Recipe:
    """Read one recipe.

    Args:
        path: the YAML file; its name without ``.yaml`` is the recipe's name.
        overlays: names under the file's ``overlays``, merged in this order. A mapping merges into a mapping, anything
            else replaces, ``null`` removes.

    Raises:
        RecipeError: with one finding for every fault of the format.
    """
    path = Path(path)
    data, lines = read_yaml(path)
    if not isinstance(data, dict):
        raise RecipeError([Finding(path, 1, (), None, "is no mapping", "a recipe", "see docs/recipes.md")])
    given = data.get("overlays")
    available = (
        {name: change for name, change in given.items() if isinstance(change, dict)} if isinstance(given, dict) else {}
    )
    for name in overlays:
        if name not in available:
            legal = ", ".join(available) if available else "none; this recipe has no overlays"
            line = _line(lines, ("overlays",))
            raise RecipeError(
                [Finding(path, line, ("overlays",), name, "is no overlay of this recipe", legal, "name another")]
            )
        _merge(data, available[name], (), ("overlays", name), lines)
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError([_format_fault(path, lines, fault) for fault in error.errors()]) from None
    recipe._path, recipe._lines, recipe._applied = path, lines, tuple(overlays)
    if recipe.name != path.stem:
        raise RecipeError(
            [recipe.finding(("name",), recipe.name, "is not the file's name", path.stem, f"write name: {path.stem}")]
        )
    return recipe


def _merge(base: dict[str, Any], change: dict[str, Any], keys: Keys, source: Keys, lines: Lines) -> None:
    """Merge ``change`` into ``base``, and the lines of its keys under ``source`` into those under ``keys``."""
    for key, value in change.items():
        here, there = (*keys, key), (*source, key)
        if value is None:
            base.pop(key, None)
        elif isinstance(value, dict) and isinstance(base.setdefault(key, {}), dict):
            if there in lines:
                lines.setdefault(here, lines[there])
            _merge(base[key], value, here, there, lines)
        else:
            base[key] = value
            for old in [old for old in lines if old[: len(there)] == there]:
                lines[here + old[len(there) :]] = lines[old]


def _line(lines: Lines, keys: Keys) -> int:
    while keys and keys not in lines:
        keys = keys[:-1]
    return lines.get(keys, 1)


_FORMAT_ADVICE = {
    "extra_forbidden": ("the keys of docs/recipes.md", "remove it, or mend its spelling"),
    "missing": ("the key must be given", "add it"),
}


def _format_fault(path: Path, lines: Lines, fault: Any) -> Finding:
    keys = tuple(part for part in fault["loc"] if part != "[key]")
    problem = re.sub(r"^Value error, ", "", fault["msg"])
    pattern = fault.get("ctx", {}).get("pattern")
    legal, cure = _FORMAT_ADVICE.get(fault["type"], (pattern or problem, "see docs/recipes.md"))
    value = fault["input"] if fault["type"] != "missing" and not isinstance(fault["input"], dict) else None
    if pattern:
        problem = "isn't written as it must be"
        flag = str(value).lstrip("-").replace("_", "-")
        if fault["loc"][-1] == "[key]" and re.fullmatch(pattern, flag):
            cure = f"write {flag}"
    return Finding(path, _line(lines, keys), keys, value, problem, legal, cure)
