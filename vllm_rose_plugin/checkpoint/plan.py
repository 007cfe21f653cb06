"""What a conversion will write: decided from headers alone, before a byte of weights is read."""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm_rose_plugin
from vllm_rose_plugin.checkpoint import rules
from vllm_rose_plugin.checkpoint.files import header_bytes
from vllm_rose_plugin.checkpoint.headers import (
    CHECKSUMS_NAME,
    INDEX_NAME,
    ITEM_SIZES,
    SCALE_DTYPE,
    SCALE_SUFFIX,
    WEIGHT_DTYPE,
    CheckpointError,
    TensorEntry,
    read_checkpoint,
    read_json,
    weight_of,
)
from vllm_rose_plugin.checkpoint.structure import structure_faults
from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Rounding

SOURCE_DTYPES = ("BF16", "F16", "F32")
MAX_SHARD_BYTES = 5 * 10**9
_ALREADY_QUANTIZED = frozenset(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I4", "U4"))
_OTHER_WEIGHTS = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt"))


@dataclass(frozen=True)
class Options:
    """What the user asked for; a resumed conversion must ask for the same."""

    checkpoint_format: rules.CheckpointFormat = rules.CheckpointFormat.MODELOPT
    rounding: Rounding = Rounding.RCEIL
    ignore: tuple[str, ...] = ()
    max_shard_bytes: int = MAX_SHARD_BYTES


@dataclass(frozen=True)
class Output:
    """One linear that is cut out of a source tensor and quantized.

    The source's region is ``rows`` x ``columns`` of row-major storage whose rows are ``stride`` elements apart; with
    ``transposed`` the region is [K, N] and the output its transpose.
    """

    name: str
    shape: tuple[int, int]  # (N, K)
    offset: int  # elements from the source tensor's first
    stride: int
    transposed: bool

    @property
    def scale_shape(self) -> tuple[int, int]:
        return self.shape[0], self.shape[1] // MXFP8_BLOCK


@dataclass(frozen=True)
class Job:
    """One source tensor; copied when it has no outputs."""

    source: TensorEntry
    outputs: tuple[Output, ...] = ()

    def tensors(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """``(name, dtype, shape)`` of what the job writes."""
        if not self.outputs:
            yield self.source.name, self.source.dtype, self.source.shape
        for output in self.outputs:
            yield output.name, WEIGHT_DTYPE, output.shape
            yield output.name + SCALE_SUFFIX, SCALE_DTYPE, output.scale_shape

    @property
    def output_bytes(self) -> int:
        if not self.outputs:
            return self.source.nbytes
        return sum(math.prod(shape) for _, _, shape in self.tensors())  # both dtypes are one byte


@dataclass
class Shard:
    """One output file."""

    jobs: list[Job]
    name: str = ""
    header: bytes = b""
    offsets: dict[str, int] = field(default_factory=dict)  # tensor name: byte in the file
    size: int = 0

    def lay_out(self, name: str) -> None:
        """Fix the header and where each tensor lies: wide elements first, so that every tensor is aligned."""
        self.name = name
        tensors = [tensor for job in self.jobs for tensor in job.tensors()]
        tensors.sort(key=lambda tensor: -ITEM_SIZES.get(tensor[1], 1))
        sizes = {job.source.name: job.source.nbytes for job in self.jobs}
        laid = [
            (tensor, dtype, shape, math.prod(shape) * ITEM_SIZES[dtype] if dtype in ITEM_SIZES else sizes[tensor])
            for tensor, dtype, shape in tensors
        ]
        self.header, self.offsets = header_bytes(laid)
        self.size = len(self.header) + sum(size for *_, size in laid)

    @property
    def source_bytes(self) -> int:
        return sum(job.source.nbytes for job in self.jobs)


@dataclass
class Plan:
    """A whole conversion."""

    source: Path
    options: Options
    shards: list[Shard]
    config: dict[str, Any]  # config.json to write
    other_files: list[Path]  # relative to the source
    notes: list[str]

    @property
    def source_bytes(self) -> int:
        return sum(shard.source_bytes for shard in self.shards)

    def fingerprint(self) -> dict[str, Any]:
        """What must not change between an interrupted conversion and its resumption."""
        files = sorted({job.source.path for shard in self.shards for job in shard.jobs})
        stats = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
        return {
            "--format": self.options.checkpoint_format.value,
            "--rounding": self.options.rounding.value,
            "--ignore": sorted(self.options.ignore),
            "the shard size": self.options.max_shard_bytes,
            "vllm_rose_plugin": vllm_rose_plugin.__version__,
            "the source": [str(self.source.resolve()), hashlib.sha256(json.dumps(stats).encode()).hexdigest()],
        }


def make_plan(source: Path, options: Options) -> Plan:
    """Read SRC's headers and decide everything.

    Raises:
        CheckpointError: SRC is no checkpoint that can be converted; the text names what is wrong.
    """
    config = _read_config(source)
    _require_safetensors(source)
    tensors, faults, warnings = read_checkpoint(source)
    _refuse(source, "damaged", faults)
    for entry in tensors.values():
        if entry.dtype in _ALREADY_QUANTIZED or (entry.dtype == "U8" and weight_of(entry.name)):
            raise CheckpointError(
                f"{source} is already quantized: {entry.name} has dtype {entry.dtype}; convert the BF16 original"
            )
    quantized = _select(tensors, options.ignore)
    jobs = [
        Job(entry, _outputs(entry, tensors, quantized) if entry.name in quantized else ()) for entry in tensors.values()
    ]
    _refuse(source, "incomplete", structure_faults(tensors, config))
    shards = _split(jobs, options.max_shard_bytes)
    for number, shard in enumerate(shards, 1):
        shard.lay_out(f"model-{number:05d}-of-{len(shards):05d}.safetensors")
    names = [name for shard in shards for name in shard.offsets]
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"{source} holds {double} twice: as a tensor of its own and within a stacked one")
    ignore = rules.ignore_list(
        [(entry.name, entry.shape) for entry in tensors.values() if entry.name not in quantized],
        checkpoint_format=options.checkpoint_format,
    )
    notes = warnings[:5] + _finish_config(config, ignore, options)
    return Plan(source, options, shards, config, other_files(source), notes)


def _refuse(source: Path, what: str, faults: list[str]) -> None:
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise CheckpointError(f"{source} is {what}: {faults[0]}{more}")


def _read_config(source: Path) -> dict[str, Any]:
    if not source.is_dir():
        raise CheckpointError(f"SRC {source} is not a directory: give a local Hugging Face checkpoint directory")
    path = source / "config.json"
    if not path.is_file():
        raise CheckpointError(f"SRC {source} is not a checkpoint: it has no config.json")
    try:
        config = read_json(path)
    except CheckpointError as error:
        raise CheckpointError(f"SRC {source} is damaged: {error}") from None
    parts = [config] + [part for part in config.values() if isinstance(part, dict)]
    found = next((part["quantization_config"] for part in parts if part.get("quantization_config")), None)
    if found is not None or (source / "hf_quant_config.json").exists():
        method = found.get("quant_method") if isinstance(found, dict) else "see hf_quant_config.json"
        raise CheckpointError(f"{source} is already quantized ({method}): convert the BF16 original")
    return config


def _require_safetensors(source: Path) -> None:
    files = sorted(path.name for path in source.glob("*.safetensors"))
    if (source / INDEX_NAME).is_file():
        return
    if not files:
        pickles = sorted(path.name for path in source.glob("*.bin"))
        if pickles:
            raise CheckpointError(
                f"{source} holds {pickles[0]}, and .bin files are not read: save the model as safetensors first "
                "(save_pretrained does)"
            )
        raise CheckpointError(f"SRC {source} is not a checkpoint: it holds no *.safetensors")
    if len(files) > 1:
        raise CheckpointError(f"{source} holds {len(files)} safetensors files but no {INDEX_NAME}")


def _select(tensors: dict[str, TensorEntry], patterns: Sequence[str]) -> set[str]:
    """Names of the tensors to quantize."""
    names = {name: rules.aliases(name, entry.shape) for name, entry in tensors.items()} if patterns else {}
    kept: dict[str, str] = {}  # tensor name: pattern that keeps it
    for pattern in patterns:
        hits = [name for name in names if rules.matches(pattern, names[name])]
        if not hits and not rules.matches(pattern, rules.ALWAYS_IGNORED):
            raise CheckpointError(f"--ignore {pattern!r} matches no tensor and no module of the checkpoint")
        kept.update(dict.fromkeys(hits, pattern))
    candidates = [entry for entry in tensors.values() if rules.is_quantizable(entry.name, entry.shape)]
    quantized = {entry.name for entry in candidates if entry.name not in kept}
    if not quantized:
        raise CheckpointError("nothing to quantize: no linear projection is left after --ignore")
    groups: dict[str, list[str]] = defaultdict(list)
    for entry in candidates:
        group = rules.fused_group(rules.module_of(entry.name))
        if group:
            groups[group].append(entry.name)
    for group, members in groups.items():
        apart = [name for name in members if name in kept]
        if apart and len(apart) < len(members):
            other = next(name for name in members if name not in kept)
            raise CheckpointError(
                f"--ignore {kept[apart[0]]!r} keeps {apart[0]} but not {other}: vLLM loads {group} as one, so ignore "
                "all of it or none"
            )
    for entry in candidates:
        if entry.name in quantized and entry.dtype not in SOURCE_DTYPES:
            raise CheckpointError(
                f"{entry.name} has dtype {entry.dtype}; {', '.join(SOURCE_DTYPES)} can be quantized "
                f"(--ignore {rules.module_of(entry.name)} keeps it)"
            )
    return quantized


def _outputs(entry: TensorEntry, tensors: dict[str, TensorEntry], quantized: set[str]) -> tuple[Output, ...]:
    leaf = rules.stacked_leaf(entry.name)
    if leaf is None:
        outputs: tuple[Output, ...] = (Output(entry.name, _pair(entry.shape), 0, entry.shape[1], False),)
    else:
        outputs = _expert_outputs(entry, leaf, tensors)
    for output in outputs:
        if output.shape[1] % MXFP8_BLOCK:
            raise CheckpointError(
                f"{output.name} has shape {list(output.shape)}: its last dimension {output.shape[1]} is not a multiple "
                f"of {MXFP8_BLOCK} (--ignore {rules.fused_ignore_hint(output.name)} keeps it as it is)"
            )
    return outputs


def _pair(shape: Sequence[int]) -> tuple[int, int]:
    first, second = shape
    return first, second


def _expert_outputs(entry: TensorEntry, leaf: str, tensors: dict[str, TensorEntry]) -> tuple[Output, ...]:
    """Per-expert linears of a stacked tensor.

    transformers writes gate_up_proj [E, 2I, H] and down_proj [E, H, I]; some models (Qwen3-VL-MoE, Llama 4) write the
    transposes [E, H, 2I] and [E, I, H]. The two shapes together tell which.
    """
    layer = entry.name.rpartition(".")[0]
    gate_up, down = (tensors.get(f"{layer}.{name}") for name in rules.STACKED_LEAVES)
    if gate_up is None or down is None:
        missing = rules.STACKED_LEAVES[0 if gate_up is None else 1]
        raise CheckpointError(f"{entry.name} is there, but {layer}.{missing} is missing")
    if any(f"{layer}.{name}_bias" in tensors for name in rules.STACKED_LEAVES):
        raise CheckpointError(f"{layer} has expert biases (interleaved GPT-OSS layout), which can't be converted")
    (experts, a, b), (experts_down, c, d) = gate_up.shape, down.shape
    if experts == experts_down and a == 2 * d and b == c:
        transposed, hidden, intermediate = False, b, d
    elif experts == experts_down and b == 2 * c and a == d:
        transposed, hidden, intermediate = True, a, c
    else:
        raise CheckpointError(
            f"{layer}: gate_up_proj {list(gate_up.shape)} and down_proj {list(down.shape)} are neither [E, 2I, H] with "
            "[E, H, I] nor [E, H, 2I] with [E, I, H]"
        )
    outputs = []
    size = math.prod(entry.shape[1:])
    for expert in range(experts):
        if leaf == "down_proj":
            parts = [("down_proj", (hidden, intermediate), 0)]
        else:
            step = intermediate if transposed else intermediate * hidden
            parts = [("gate_proj", (intermediate, hidden), 0), ("up_proj", (intermediate, hidden), step)]
        for name, shape, offset in parts:
            output_name = f"{layer}.{expert}.{name}.weight"
            outputs.append(Output(output_name, shape, expert * size + offset, entry.shape[2], transposed))
    return tuple(outputs)


def _split(jobs: list[Job], max_shard_bytes: int) -> list[Shard]:
    """Output shards: a new one with each source file, and where the bound would be passed."""
    shards: list[Shard] = []
    size = 0
    for job in jobs:
        new_file = not shards or shards[-1].jobs[-1].source.path != job.source.path
        if new_file or size + job.output_bytes > max_shard_bytes:
            shards.append(Shard([]))
            size = 0
        shards[-1].jobs.append(job)
        size += job.output_bytes
    return shards


def _finish_config(config: dict[str, Any], ignore: list[str], options: Options) -> list[str]:
    config["quantization_config"] = rules.quantization_config(
        ignore=ignore, checkpoint_format=options.checkpoint_format, rounding=options.rounding
    )
    notes = []
    if options.checkpoint_format is rules.CheckpointFormat.MODELOPT:
        for part in (config, config.get("text_config")):
            for key in ("dtype", "torch_dtype"):
                if isinstance(part, dict) and part.get(key) == "float16":
                    part[key] = "bfloat16"  # vLLM's ModelOpt MXFP8 loader takes no other activation dtype
                    note = f"config.json: {key} float16 becomes bfloat16, the only one that vLLM serves in this format"
                    if note not in notes:
                        notes.append(note)
    return notes


def other_files(source: Path) -> list[Path]:
    """Files to copy: everything that is neither a weight file, an index, nor config.json, nor hidden."""
    found = []
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if any(part.startswith(".") for part in relative.parts) or not path.is_file():
            continue
        if path.suffix.lower() in _OTHER_WEIGHTS or path.name.endswith(".index.json"):
            continue
        if relative in (Path("config.json"), Path(CHECKSUMS_NAME)):
            continue
        found.append(relative)
    return found
