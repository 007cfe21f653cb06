"""The format of a recipe: one YAML file that says everything about one deployment.

``load_recipe`` reads a file, merges the overlays asked for, and checks the format; what needs vLLM's parser, the
model's shapes or the hardware is checked by :mod:`vllm_rose_plugin.recipes.check`. ``docs/recipes.md`` explains the
keys.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from vllm_rose_plugin.recipes.fault_words import Fault, Form, finding_of, line_of, write_near
from vllm_rose_plugin.recipes.finding import Finding, Keys, RecipeError
from vllm_rose_plugin.recipes.hardware import GPUS
from vllm_rose_plugin.recipes.lines import Lines, read_yaml

FORMAT = 1
"""The version of this format, ``recipe:`` in a file."""

_LINE = Form(r"^[^\r\n]+$", "one line of text")
_SIZE = Form(r"^[1-9][0-9]*(Mi|Gi|Ti)$", "a whole number with Mi, Gi or Ti behind it, such as 64Gi")
_VARIABLE = Form(r"^[A-Za-z_][A-Za-z0-9_]*$", "letters, digits and _, no digit first")
_FLAG = Form(r"^[a-z0-9][a-z0-9-]*$", "vLLM's long flag without dashes in front, such as max-num-seqs")
_CHECKPOINT = Form(
    r"^((/[A-Za-z0-9._-]+){2,}|[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._-]+)?)$",
    "a path of two parts or more, such as /models/NAME, or a public name, such as OWNER/NAME",
)
_JSON_FILE = Form(r"^[A-Za-z0-9._-]+\.json$", "the name of a file in models/ beside the recipe, such as NAME.json")
_IMAGE = Form(r"^[a-z0-9]+([._/-][a-z0-9]+)*$", "an image without registry host and tag, such as team/vllm-rose")
_TAG = Form(r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$", "letters, digits and _ . -, at most 128, such as 0.1.0-cu130")
_NAME = Form(r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$", "a-z, 0-9, . and -, at most 63, the file's name without .yaml")
_STATUS = Form(
    r"^(not measured$|measured on .+, [0-9]{4}-[0-9]{2}-[0-9]{2}: .+$)",
    "not measured, or measured on HARDWARE, YYYY-MM-DD: FILE",
)
_FORMS = (_LINE, _SIZE, _VARIABLE, _FLAG, _CHECKPOINT, _JSON_FILE, _IMAGE, _TAG, _NAME, _STATUS)

Port = Annotated[int, Field(ge=1024, le=65535)]
Count = Annotated[int, Field(ge=1)]
Few = Annotated[int, Field(ge=1, le=4096)]
"""Nodes, GPUs, replicas: each becomes an entry or a process."""
Line = Annotated[str, Field(pattern=_LINE.pattern)]
"""Stands in comments of rendered files."""
Size = Annotated[str, Field(pattern=_SIZE.pattern)]
"""An amount of memory or disk, in Kubernetes' binary units: ``64Gi``."""
Environment = dict[Annotated[str, Field(pattern=_VARIABLE.pattern)], str]
"""Values are text: ``"1"``, not ``1``, since that is what a process gets."""
Flag = Annotated[str, Field(pattern=_FLAG.pattern)]


def _given(value: Any) -> Any:
    if value is None:  # vLLM would get the word None
        raise Fault("has no value", legal="text, a number, true, false, a list or a mapping", cure="give one")
    if isinstance(value, str) and _is_json_object(value):  # vLLM would take it, our checks would not see inside
        raise Fault("is JSON in quotes", legal="a mapping", cure="write it as a mapping, without the quotes")
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
    checkpoint: Annotated[str, Field(pattern=_CHECKPOINT.pattern)]
    """What vLLM is given: a folder inside the container, whose parent is mounted, or a public name."""
    config: Annotated[str, Field(pattern=_JSON_FILE.pattern)]
    """File in ``models/`` beside the recipes: the facts of the model's config.json, with their source."""
    weights: Literal["mxfp8", "nvfp4", "fp8", "bf16"]
    """How the checkpoint's experts and linear layers are stored."""
    expert_weights: Literal["mxfp8", "nvfp4", "fp8", "bf16"] | None = None
    """How routed experts are stored, where that differs from the rest."""
    ignore: list[str] = []
    """Shell patterns of modules that stay in BF16, beside the embedding, the head, routers and norms."""


class Container(_Strict):
    """The image, without a registry host; its digest is given when a file is rendered from the recipe."""

    image: Annotated[str, Field(pattern=_IMAGE.pattern)]
    tag: Annotated[str, Field(pattern=_TAG.pattern)]


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
    name: Annotated[str, Field(pattern=_NAME.pattern)]
    description: Line
    status: Annotated[str, Field(pattern=_STATUS.pattern)]
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
        router = ("router", "kind")
        if given not in ({"serve"}, {"prefill", "decode"}):
            problem, legal = f"has {' and '.join(sorted(given)) or 'none'}", "prefill with decode, or serve alone"
            raise Fault(problem, legal=legal, cure="give these roles", keys=("roles",))
        if given == {"serve"}:
            if self.kv_transfer is not None:
                problem, cure = "is given, and the only role is serve", "remove it, or give prefill and decode"
                raise Fault(problem, legal="only with prefill and decode", cure=cure, keys=("kv_transfer",))
            if self.router.kind == "none" and self.roles["serve"].replicas != 1:
                problem = f"is none, and serve has {self.roles['serve'].replicas} replicas"
                raise Fault(problem, legal="vllm-router, or one replica", cure="write kind: vllm-router", keys=router)
        elif self.kv_transfer is None:
            legal, cure = "a mapping; prefill and decode need it", "add it (docs/recipes.md)"
            raise Fault("is not given", legal=legal, cure=cure, keys=("kv_transfer",))
        elif self.router.kind == "none":
            problem = "is none, and nothing would take a request from prefill to decode"
            raise Fault(problem, legal="vllm-router", cure="write kind: vllm-router", keys=router)
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
        return line_of(self._lines, keys)

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
    if "recipe" not in data:  # another kind of file would get a finding for each of its keys
        legal = f"recipe: {FORMAT}, the version of the format"
        raise RecipeError([Finding(path, 1, ("recipe",), None, "is not given", legal, "add it, or name a recipe")])
    given = data.get("overlays")
    available = (
        {name: change for name, change in given.items() if isinstance(change, dict)} if isinstance(given, dict) else {}
    )
    for name in overlays:
        if name not in available:
            legal = ", ".join(available) if available else "none; this recipe has no overlays"
            cure = write_near(name, available) if available else f"leave out --overlay {name}"
            line = line_of(lines, ("overlays",))
            raise RecipeError([Finding(path, line, ("overlays",), name, "is no overlay of this recipe", legal, cure)])
        _merge(data, available[name], (), ("overlays", name), lines)
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(
            [finding_of(path, lines, fault, model=Recipe, forms=_FORMS) for fault in error.errors()]
        ) from None
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
