"""Attaches an MTP draft to its target's checkpoint and takes it off again. Tensors keep every byte."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_rose_plugin.checkpoint.assembly import Assembly, Written
from vllm_rose_plugin.checkpoint.attached_quantization import joined, parted
from vllm_rose_plugin.checkpoint.draft import (
    DRAFT_ARCHITECTURE,
    DRAFT_MODEL_TYPE,
    LAYER_COUNT,
    TARGET_ARCHITECTURE,
    TARGET_MODEL_TYPE,
    differences,
    is_draft_directory,
    is_draft_tensor,
    layer_count,
)
from vllm_rose_plugin.checkpoint.files import checksums_text, config_text, index_text
from vllm_rose_plugin.checkpoint.headers import (
    CHECKSUMS_NAME,
    INDEX_NAME,
    CheckpointError,
    TensorEntry,
    read_checkpoint,
    read_json,
    scale_faults,
)
from vllm_rose_plugin.checkpoint.places import require_place
from vllm_rose_plugin.checkpoint.plan import other_files
from vllm_rose_plugin.checkpoint.structure import structure_faults

SINGLE_NAME = "model.safetensors"
TARGET_FOLDER, DRAFT_FOLDER = "target", "mtp"
"""What `rose mtp detach` makes in OUT."""


@dataclass(frozen=True)
class Source:
    """A checkpoint that is read: what its config and headers say."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    checksums: dict[str, str]

    def files(self) -> dict[Path, list[TensorEntry]]:
        """Weight files with their tensors, by name."""
        found: dict[Path, list[TensorEntry]] = defaultdict(list)
        for entry in self.tensors.values():
            found[entry.path].append(entry)
        return dict(sorted(found.items()))

    def fingerprint(self) -> list[str]:
        """Changes when a file of it does."""
        paths = [path for path in sorted(self.directory.iterdir()) if path.is_file()]
        stats = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
        return [str(self.directory.resolve()), hashlib.sha256(json.dumps(stats).encode()).hexdigest()]


@dataclass
class Summary:
    """What was done."""

    tensors: int  # of the draft
    quantized: bool  # whether the draft is
    written: Written
    notes: list[str] = field(default_factory=list)


@dataclass
class _Layout:
    """Weight files of one checkpoint to write."""

    whole: dict[str, Path] = field(default_factory=dict)  # name: a file taken over as it is
    parts: dict[str, list[TensorEntry]] = field(default_factory=dict)  # name: tensors of one file
    weight_map: dict[str, str] = field(default_factory=dict)
    total_size: int = 0

    def add(self, name: str, path: Path, entries: list[TensorEntry], *, whole: bool) -> None:
        """A file with these tensors."""
        if whole:
            self.whole[name] = path
        else:
            self.parts[name] = entries
        self.weight_map |= dict.fromkeys((entry.name for entry in entries), name)
        self.total_size += sum(entry.nbytes for entry in entries)

    def write(self, assembly: Assembly, folder: str, *, copy: bool) -> None:
        """The files, and an index unless there is but one of the usual name."""
        for name, path in self.whole.items():
            assembly.weights(path, folder + name, copy=copy)
        for name, entries in self.parts.items():
            assembly.tensors(entries, folder + name)
        if set(self.weight_map.values()) != {SINGLE_NAME}:
            text = index_text(weight_map=self.weight_map, total_size=self.total_size)
            assembly.json_file(folder + INDEX_NAME, text)


def attach(*, target: Path, draft: Path, destination: Path, copy: bool = False) -> Summary:
    """Put a draft directory's tensors into a copy of its target's checkpoint.

    Args:
        target: a Qwen3-MoE checkpoint directory, MXFP8 or unquantized.
        draft: a draft directory, MXFP8 or unquantized.
        destination: must not exist; appears complete, in one rename.
        copy: copy weight files even where hard links are possible.

    Raises:
        CheckpointError: the two don't go together, or a file is not what it must be; one line that names it.
    """
    root = require_place(destination, "OUT", sources={"TARGET": target, "DRAFT": draft})
    one, other = _read(target, "TARGET"), _read(draft, "DRAFT")
    _require_target(one)
    if any(map(is_draft_tensor, one.tensors)) or layer_count(one.config):
        raise CheckpointError(
            f"TARGET {target} has a draft attached already: it holds mtp.* tensors or says so in config.json's "
            f"{LAYER_COUNT}; `rose mtp detach` takes it off"
        )
    if not is_draft_directory(other.config):
        raise CheckpointError(
            f"DRAFT {draft} is no draft directory: its config.json has model_type "
            f"{other.config.get('model_type')!r}, expected {DRAFT_MODEL_TYPE!r} ({DRAFT_ARCHITECTURE})"
        )
    _refuse(f"DRAFT {draft} is no draft for TARGET {target}", differences(one.config, other.config))
    _refuse(f"TARGET {target} is damaged", structure_faults(one.tensors, one.config) + scale_faults(one.tensors))
    _refuse(f"DRAFT {draft} is damaged", structure_faults(other.tensors, other.config) + scale_faults(other.tensors))
    tensors = {**one.tensors, **other.tensors}
    config = {**one.config, LAYER_COUNT: layer_count(other.config)}
    _put(config, "quantization_config", joined(target=one.config, draft=other.config, tensors=tensors))
    _refuse(f"DRAFT {draft} is no draft for TARGET {target}", structure_faults(tensors, config))

    layout = _Layout()
    for path, entries in one.files().items():
        layout.add(path.name, path, entries, whole=True)
    files = other.files()
    for number, (path, entries) in enumerate(files.items(), 1):
        layout.add(_free_name(layout, number, len(files)), path, entries, whole=True)
    notes = _notes_of_attach(one, other)
    fingerprint = {"the command": "attach", "TARGET": one.fingerprint(), "DRAFT": other.fingerprint(), "--copy": copy}
    with Assembly(destination, root=root, fingerprint=fingerprint) as assembly:
        layout.write(assembly, "", copy=copy)
        for relative in other_files(target):
            assembly.other_file(target / relative, str(relative))
        if checksums := {**one.checksums, **other.checksums}:
            assembly.json_file(CHECKSUMS_NAME, checksums_text(checksums))
        assembly.json_file("config.json", _text_like(one.config, config))
        assembly.publish()
    return Summary(len(other.tensors), "quantization_config" in other.config, assembly.written, notes)


def detach(*, target: Path, destination: Path, copy: bool = False) -> Summary:
    """Take the draft off a checkpoint: ``OUT/target`` without it, and ``OUT/mtp``, a draft directory.

    Args, raises: as for :func:`attach`.
    """
    root = require_place(destination, "OUT", sources={"TARGET": target})
    source = _read(target, "TARGET")
    _require_target(source)
    if not any(map(is_draft_tensor, source.tensors)):
        raise CheckpointError(f"TARGET {target} has nothing attached: it holds no mtp.* tensor")
    _refuse(
        f"TARGET {target} is damaged",
        structure_faults(source.tensors, source.config) + scale_faults(source.tensors),
    )
    quantized: dict[bool, dict[str, Any] | None] = {}
    for of_draft in (False, True):
        quantized[of_draft] = parted(attached=source.config, tensors=source.tensors, of_draft=of_draft)
    config = {key: value for key, value in source.config.items() if key != LAYER_COUNT}
    _put(config, "quantization_config", quantized[False])
    draft_config = {**source.config, "architectures": [DRAFT_ARCHITECTURE], "model_type": DRAFT_MODEL_TYPE}
    _put(draft_config, "quantization_config", quantized[True])

    kept, taken = _Layout(), _Layout()
    with_draft = {p: [e for e in entries if is_draft_tensor(e.name)] for p, entries in source.files().items()}
    drafts = {path: entries for path, entries in with_draft.items() if entries}
    for path, entries in source.files().items():
        rest = [entry for entry in entries if not is_draft_tensor(entry.name)]
        if rest:
            kept.add(path.name, path, rest, whole=len(rest) == len(entries))
        if path in drafts:
            number, count = list(drafts).index(path) + 1, len(drafts)
            name = SINGLE_NAME if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            taken.add(name, path, drafts[path], whole=not rest)
    fingerprint = {"the command": "detach", "TARGET": source.fingerprint(), "--copy": copy}
    with Assembly(destination, root=root, fingerprint=fingerprint) as assembly:
        halves = ((TARGET_FOLDER, kept, config, False), (DRAFT_FOLDER, taken, draft_config, True))
        for folder, layout, _, of_draft in halves:
            layout.write(assembly, f"{folder}/", copy=copy)
            own = {n: c for n, c in source.checksums.items() if is_draft_tensor(n) == of_draft}
            if own:
                assembly.json_file(f"{folder}/{CHECKSUMS_NAME}", checksums_text(own))
        for relative in other_files(target):
            assembly.other_file(target / relative, f"{TARGET_FOLDER}/{relative}")
        for folder, _, written, _ in halves:
            assembly.json_file(f"{folder}/config.json", _text_like(source.config, written))
        assembly.publish()
    number = sum(map(is_draft_tensor, source.tensors))
    return Summary(number, quantized[True] is not None, assembly.written)


def _read(directory: Path, what: str) -> Source:
    if not directory.is_dir():
        raise CheckpointError(f"{what} {directory} is not a directory: give a local checkpoint directory")
    try:
        config = read_json(directory / "config.json")
    except FileNotFoundError:
        raise CheckpointError(f"{what} {directory} is not a checkpoint: it has no config.json") from None
    except CheckpointError as error:
        raise CheckpointError(f"{what} {directory} is damaged: {error}") from None
    tensors, faults, _ = read_checkpoint(directory)
    _refuse(f"{what} {directory} is damaged", faults)
    try:
        checksums = read_json(directory / CHECKSUMS_NAME).get("crc32")
    except FileNotFoundError:
        checksums = None
    return Source(directory, config, tensors, checksums if isinstance(checksums, dict) else {})


def _require_target(source: Source) -> None:
    if source.config.get("model_type") != TARGET_MODEL_TYPE or is_draft_directory(source.config):
        raise CheckpointError(
            f"TARGET {source.directory} has model_type {source.config.get('model_type')!r} in config.json, expected "
            f"{TARGET_MODEL_TYPE!r} ({TARGET_ARCHITECTURE})"
        )


def _refuse(what: str, faults: list[str]) -> None:
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise CheckpointError(f"{what}: {faults[0]}{more}")


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a key, or remove it where there is no value."""
    if value is None:
        config.pop(key, None)
    else:
        config[key] = value


def _free_name(layout: _Layout, number: int, count: int) -> str:
    name = f"mtp-{number:05d}-of-{count:05d}.safetensors"
    if name in layout.whole:
        raise CheckpointError(f"TARGET has a file {name}, which OUT needs for the draft: rename it and its index entry")
    return name


def _text_like(original: Mapping[str, Any], config: Mapping[str, Any]) -> bytes:
    """config.json in the order of the original: transformers sorts the keys, and we put our own behind them."""
    last = "quantization_config"
    keys = [key for key in original if key != last]
    if keys == sorted(keys):
        config = {key: config[key] for key in sorted(config, key=lambda key: (key == last, key))}
    return config_text(config)


def _notes_of_attach(target: Source, draft: Source) -> list[str]:
    notes = []
    left = [str(path) for path in other_files(draft.directory)]
    for name in ("tokenizer.json", "vocab.json"):
        mine, other = target.directory / name, draft.directory / name
        if mine.is_file() and other.is_file() and mine.read_bytes() != other.read_bytes():
            notes.append(f"DRAFT's {name} differs from TARGET's: a draft trained with another tokenizer is of no use")
    if left:
        notes.append(f"OUT has TARGET's files; left out of DRAFT: {_some(left)}")
    return notes


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
