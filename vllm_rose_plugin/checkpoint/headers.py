"""Reads safetensors headers, and only headers: what a checkpoint promises, without touching its data."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vllm_rose_plugin.checkpoint.structure import SCALE_SUFFIXES, structure_faults
from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK

INDEX_NAME = "model.safetensors.index.json"
CHECKSUMS_NAME = "rose_scales.json"
"""Beside the weights: CRC-32 of each scale tensor as `rose quantize` wrote it. A scale that belongs to another weight
looks like any other, so nothing else can tell."""
WEIGHT_DTYPE = "F8_E4M3"
SCALE_DTYPE = "U8"
SCALE_SUFFIX = SCALE_SUFFIXES[0]  # the one that is written
FLOAT_DTYPES = frozenset(("BF16", "F16", "F32", "F64", WEIGHT_DTYPE))
"""What a weight or a bias may be stored as in an MXFP8 checkpoint."""
ITEM_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of one element, by the dtype names of the safetensors format."""

_INTEGER = frozenset((int,))  # and not its subclass bool
_MAX_HEADER_BYTES = 100_000_000  # the format's own bound


class CheckpointError(Exception):
    """A checkpoint, or a file of it, is not what it must be; the text is one clear line."""


class TensorEntry(NamedTuple):
    """One tensor as its header describes it."""  # a NamedTuple: 80,000 frozen dataclasses take half a second longer

    name: str
    dtype: str  # as safetensors spells it: BF16, F8_E4M3, U8 …
    shape: tuple[int, ...]
    path: Path
    begin: int  # byte offsets in the file, header included
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, in the order of their data.

    Raises:
        CheckpointError: the file is truncated, or its header contradicts itself or the file's size.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > _MAX_HEADER_BYTES or 8 + length > size:
            raise CheckpointError(f"{path.name} is not a complete safetensors file ({size} bytes)")
        text = file.read(length)
    try:
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError("it is not a JSON object")
        header.pop("__metadata__", None)
        start = 8 + length
        entries = [_entry(name, item, path, start) for name, item in header.items()]
        "".join(header).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} has an unreadable safetensors header: {_one_line(error)}") from None
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    position = start
    for entry in entries:
        if entry.begin != position or entry.end < entry.begin:
            raise CheckpointError(
                f"{path.name}: {entry.name} lies at bytes {entry.begin}-{entry.end}, expected it to start at {position}"
            )
        item_size = ITEM_SIZES.get(entry.dtype)
        if item_size is not None and entry.nbytes != math.prod(entry.shape) * item_size:
            raise CheckpointError(
                f"{path.name}: {entry.name} holds {entry.nbytes} bytes, but {entry.dtype} {list(entry.shape)} needs "
                f"{math.prod(entry.shape) * item_size}"
            )
        position = entry.end
    if position > size:
        raise CheckpointError(f"{path.name} is truncated: {size} bytes, its header promises {position}")
    if position < size:
        raise CheckpointError(f"{path.name} has {size - position} bytes after its last tensor")
    return {entry.name: entry for entry in entries}


def _entry(name: str, item: object, path: Path, start: int) -> TensorEntry:
    """One tensor of a header whose data begin at byte ``start``; ValueError where it isn't described as it must be."""
    if not isinstance(item, dict):
        raise ValueError(f"{name!r} is {item!r}, not an object")
    dtype, shape, offsets = item.get("dtype"), item.get("shape"), item.get("data_offsets")
    if not isinstance(dtype, str):
        raise ValueError(f"{name!r} has the dtype {dtype!r}, not a string")
    if type(shape) is not list or not _INTEGER.issuperset(map(type, shape)) or (shape and min(shape) < 0):
        raise ValueError(f"{name!r} has the shape {shape!r}, not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not _INTEGER.issuperset(map(type, offsets)):
        raise ValueError(f"{name!r} has the data_offsets {offsets!r}, not two numbers")
    return TensorEntry(name, dtype, tuple(shape), path, start + offsets[0], start + offsets[1])


def _one_line(error: BaseException) -> str:
    """An error's text, printable and short, whatever a damaged file holds."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeEncodeError):
        return f"a name holds {error.object[error.start : error.end]!r}, which is no text"
    text = ascii(str(error))[1:-1] if not str(error).isprintable() else str(error)
    return text if len(text) <= 300 else text[:300] + "…"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it can't be read as one; one line.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("not a JSON object")
        if "\\u" in text:  # half of a surrogate pair could not be written again
            json.dumps(data, ensure_ascii=False).encode()
    except FileNotFoundError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} can't be read: {_one_line(error)}") from None
    except OSError as error:
        raise CheckpointError(f"{path.name} can't be read: {error.strerror}") from None
    return data


def read_index(directory: Path) -> dict[str, str] | None:
    """File name of every tensor that ``model.safetensors.index.json`` promises; None where there is no index.

    Raises:
        CheckpointError: the index can't be read, or names a file outside the directory.
    """
    path = directory / INDEX_NAME
    if not path.is_file():
        return None
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{INDEX_NAME} can't be read: it has no weight_map of tensor names")
    values = weight_map.values()
    bad = next((name for name in values if not isinstance(name, str)), None)
    if bad is None:
        bad = next((name for name in set(values) if Path(name).name != name), None)
    if bad is not None:
        raise CheckpointError(f"{INDEX_NAME} names the file {bad!r}, which is not in the checkpoint's directory")
    return weight_map


class Headers(NamedTuple):
    """What the headers of a checkpoint say."""

    tensors: dict[str, TensorEntry]
    faults: list[str]
    warnings: list[str]


def read_checkpoint(directory: Path) -> Headers:
    """Every tensor of a checkpoint directory, with the faults met on the way.

    Files are those of the index, or all ``*.safetensors`` where there is none. As vLLM does, all tensors of such a
    file are taken; one that the index doesn't mention is worth a warning only.

    Returns:
        A file that can't be read is a fault, and its tensors are left out without being reported one by one.
    """
    try:
        index = read_index(directory)
    except CheckpointError as error:
        return Headers({}, [str(error)], [])
    files = [path.name for path in directory.glob("*.safetensors")] if index is None else index.values()
    names = sorted(set(files))
    if not names:
        return Headers({}, [f"{directory} holds no *.safetensors"], [])
    tensors: dict[str, TensorEntry] = {}
    faults: list[str] = []
    warnings: list[str] = []
    unreadable: set[str] = set()
    for name in names:
        path = directory / name
        try:
            entries = read_header(path)
        except FileNotFoundError:
            faults.append(f"{name} is missing")
            unreadable.add(name)
            continue
        except CheckpointError as error:
            faults.append(str(error))
            unreadable.add(name)
            continue
        except OSError as error:
            faults.append(f"{name} can't be read: {error.strerror}")
            unreadable.add(name)
            continue
        for tensor_name, entry in entries.items():
            if tensor_name in tensors:
                faults.append(f"{tensor_name} is in both {tensors[tensor_name].path.name} and {name}")
            elif index is not None and tensor_name not in index:
                warnings.append(f"{tensor_name} is in {name}, but the index doesn't mention it; vLLM loads it")
            elif index is not None and index[tensor_name] != name:
                faults.append(f"{tensor_name} is in {name}, but the index puts it in {index[tensor_name]}")
            tensors[tensor_name] = entry
    if index is not None:
        faults += [
            f"{tensor_name} is missing: the index puts it in {file_name}, which doesn't hold it"
            for tensor_name, file_name in index.items()
            if tensor_name not in tensors and file_name not in unreadable
        ]
    return Headers(tensors, faults, warnings)


def weight_of(scale_name: str) -> str | None:
    """The weight that a scale tensor belongs to by its name; None where the name is not that of a scale."""
    for suffix in SCALE_SUFFIXES:
        if scale_name.endswith(".weight" + suffix):
            return scale_name.removesuffix(suffix)
    return None


def scale_of(tensors: Mapping[str, TensorEntry], weight_name: str) -> TensorEntry | None:
    """The scale beside a weight, in either spelling."""
    return tensors.get(weight_name + SCALE_SUFFIX) or tensors.get(weight_name + SCALE_SUFFIXES[1])


def scale_faults(tensors: Mapping[str, TensorEntry], *, names: Iterable[str] | None = None) -> list[str]:
    """Faults between MXFP8 weights and their scales.

    Args:
        tensors: every tensor of the checkpoint.
        names: those to look at; all by default.
    """
    faults: list[str] = []
    for name in tensors if names is None else names:
        entry = tensors[name]
        weight_name = weight_of(name)
        if weight_name is not None:
            weight = tensors.get(weight_name)
            if weight is None:
                faults.append(f"{name} has no weight: {weight_name} is missing")
            elif weight.dtype != WEIGHT_DTYPE and entry.dtype == SCALE_DTYPE:
                faults.append(f"{weight_name} has an MXFP8 scale but dtype {weight.dtype}, expected {WEIGHT_DTYPE}")
        elif entry.dtype == WEIGHT_DTYPE:
            faults += _weight_faults(entry, scale_of(tensors, name))
            if all(name + suffix in tensors for suffix in SCALE_SUFFIXES):
                faults.append(f"{name} has two scales: {' and '.join(name + suffix for suffix in SCALE_SUFFIXES)}")
        elif entry.dtype not in FLOAT_DTYPES and name.endswith((".weight", ".bias")):
            faults.append(f"{name} has dtype {entry.dtype}, expected one of {', '.join(sorted(FLOAT_DTYPES))}")
    return faults


def _weight_faults(weight: TensorEntry, scale: TensorEntry | None) -> list[str]:
    """Faults of one F8_E4M3 tensor and the scale beside it."""
    if not weight.shape or weight.shape[-1] % MXFP8_BLOCK:
        return [f"{weight.name} has shape {list(weight.shape)}: the last dimension must be a multiple of {MXFP8_BLOCK}"]
    expected = (*weight.shape[:-1], weight.shape[-1] // MXFP8_BLOCK)
    if scale is None:
        name = weight.name + SCALE_SUFFIX
        return [f"{name} is missing: {weight.name} is {WEIGHT_DTYPE} {list(weight.shape)} and needs it"]
    faults = []
    if scale.dtype != SCALE_DTYPE:
        faults.append(f"{scale.name} has dtype {scale.dtype}, expected {SCALE_DTYPE} (E8M0 codes)")
    if scale.shape != expected:
        transposed = scale.shape == (*expected[:-2], *reversed(expected[-2:]))
        faults.append(
            f"{scale.name} {'is transposed: it ' if transposed else ''}has shape {list(scale.shape)}, expected "
            f"{list(expected)} for {weight.name} {list(weight.shape)}"
        )
    return faults


def check_headers(directory: Path) -> list[str]:
    """Faults of an MXFP8 checkpoint that its headers show, for use when weights are loaded.

    Reads no tensor data: 80,000 tensors take well under two seconds.

    Args:
        directory: holds ``*.safetensors``, with or without an index.

    Returns:
        One sentence for each fault, naming the tensor: files missing or truncated, tensors missing from the index's
        file, an F8_E4M3 weight whose scale is missing, of the wrong dtype, transposed or of the wrong shape, a scale
        without its weight, a weight that is no float, and what :func:`structure_faults` finds, which knows config.json
        where there is one. Empty for a sound checkpoint.
    """
    directory = Path(directory)
    tensors, faults, _ = read_checkpoint(directory)
    if faults:  # what the files lack would be reported again, weight by weight
        return faults + scale_faults(tensors)
    try:
        config = read_json(directory / "config.json")
    except (FileNotFoundError, CheckpointError):
        config = {}  # vLLM has read its own
    return scale_faults(tensors) + structure_faults(tensors, config)
