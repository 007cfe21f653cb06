"""Reads an MXFP8 checkpoint back: headers, config, then every byte that can give a mistake away."""

import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm_rose_plugin.checkpoint import rules
from vllm_rose_plugin.checkpoint.draft import is_draft_directory, is_ours, layer_count
from vllm_rose_plugin.checkpoint.headers import (
    CHECKSUMS_NAME,
    SCALE_DTYPE,
    WEIGHT_DTYPE,
    CheckpointError,
    TensorEntry,
    read_checkpoint,
    read_json,
    scale_faults,
    scale_of,
    weight_of,
)
from vllm_rose_plugin.checkpoint.quantizer import NonFiniteError, require_finite
from vllm_rose_plugin.checkpoint.scale_use import ScaleUse
from vllm_rose_plugin.checkpoint.structure import structure_faults
from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Rounding

_CHUNK_BYTES = 4 << 20
_NAN_SCALE = 255
_HIGH_SCALE = 127 + 32  # a weight above 448 * 2**32 is no weight
_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


@dataclass
class Verdict:
    """What was found."""

    directory: Path
    format: str | None = None
    rounding: str | None = None
    tensors: int = 0
    quantized: int = 0
    total_bytes: int = 0
    zero_scales: int = 0
    scales: int = 0
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.faults

    @property
    def zero_scale_share(self) -> float:
        return self.zero_scales / self.scales if self.scales else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "directory": str(self.directory),
            "ok": self.ok,
            "format": self.format,
            "rounding": self.rounding,
            "tensors": self.tensors,
            "quantized": self.quantized,
            "bytes": self.total_bytes,
            "zero_scale_share": self.zero_scale_share,
            "faults": self.faults,
            "warnings": self.warnings,
        }


def verify(directory: Path, *, workers: int = 2) -> Verdict:
    """Check a checkpoint directory.

    Args:
        directory: holds config.json and safetensors.
        workers: threads that scan data, each with 8 MB of buffers.

    Returns:
        The verdict; every fault is one sentence that names its tensor or file.
    """
    verdict = Verdict(directory)
    try:
        if not directory.is_dir():
            verdict.faults.append(f"{directory} is not a directory")
            return verdict
        config = _read_config(directory, verdict)
        tensors, faults, verdict.warnings = read_checkpoint(directory)
    except OSError as error:
        verdict.faults.append(f"{directory} can't be read: {error.strerror}")
        return verdict
    plain = _is_plain_with_draft(tensors.values(), config or {})
    ignore = _read_quantization(config, verdict) if config is not None and not plain else None
    verdict.faults += faults
    verdict.faults += scale_faults(tensors)
    if not faults:  # else what the files lack would be reported again, weight by weight
        verdict.faults += structure_faults(tensors, config or {})
    verdict.tensors = len(tensors)
    verdict.quantized = sum(entry.dtype == WEIGHT_DTYPE for entry in tensors.values())
    verdict.total_bytes = sum(entry.nbytes for entry in tensors.values())
    if ignore is not None:
        verdict.faults += coverage_faults(tensors.values(), ignore)
    if tensors and not verdict.quantized and not plain:
        verdict.faults.append(f"no tensor is quantized: none has dtype {WEIGHT_DTYPE}")
    rounding = Rounding(ignore.rounding) if ignore is not None and ignore.ours and ignore.rounding else None
    _Scan(tensors, rounding, _read_checksums(directory, verdict)).run(verdict, workers)
    return verdict


def _is_plain_with_draft(tensors: Iterable[TensorEntry], config: dict[str, Any]) -> bool:
    """Whether this is an unquantized draft directory, or an unquantized target with its draft attached.

    Both are inputs of `rose mtp` and served as they are, so they are checked too; what else is unquantized was not
    made by us, and there MXFP8 is missing.
    """
    declared = is_draft_directory(config) or (is_ours(config) and layer_count(config) > 0)
    return declared and "quantization_config" not in config and all(e.dtype != WEIGHT_DTYPE for e in tensors)


def _read_config(directory: Path, verdict: Verdict) -> dict[str, Any] | None:
    try:
        return read_json(directory / "config.json")
    except FileNotFoundError:
        verdict.faults.append("config.json is missing")
    except CheckpointError as error:
        verdict.faults.append(str(error))
    return None


def _read_quantization(config: dict[str, Any], verdict: Verdict) -> rules.IgnoreRules | None:
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        verdict.faults.append(
            "config.json has no quantization_config: for vLLM it is unquantized; `rose quantize` converts BF16 ones"
        )
        return None
    try:
        ignore = rules.IgnoreRules(quantization)
    except CheckpointError as error:
        verdict.faults.append(f"config.json: {error}")
        return None
    verdict.format, verdict.rounding = ignore.format, ignore.rounding
    return ignore


def _read_checksums(directory: Path, verdict: Verdict) -> dict[str, str]:
    """CRC-32 by scale tensor; empty for checkpoints of others."""
    try:
        checksums = read_json(directory / CHECKSUMS_NAME).get("crc32")
    except FileNotFoundError:
        return {}
    except CheckpointError as error:
        verdict.faults.append(str(error))
        return {}
    return checksums if isinstance(checksums, dict) else {}


def coverage_faults(tensors: Iterable[TensorEntry], ignore: rules.IgnoreRules) -> list[str]:
    """Weights that are not what the ignore list makes vLLM expect."""
    faults = []
    groups: dict[str, dict[bool, str]] = defaultdict(dict)
    for entry in tensors:
        if not rules.needs_ignore_entry(entry.name, entry.shape):
            continue
        module = rules.module_of(entry.name)
        quantized = entry.dtype == WEIGHT_DTYPE
        group = rules.fused_group(module)
        if group:
            groups[group][quantized] = entry.name
        covered = ignore.covers(module)
        if quantized and covered:
            faults.append(f"{entry.name} is quantized, but the ignore list covers it: vLLM takes it as unquantized")
        elif not quantized and not covered and not rules.expected_unquantized(entry.name):
            faults.append(f"{entry.name} has dtype {entry.dtype} and the ignore list doesn't cover it: not quantized")
    for group, found in groups.items():
        if len(found) == 2:
            faults.append(f"{found[True]} is quantized and {found[False]} is not, but vLLM loads {group} as one")
    return faults


@dataclass(frozen=True)
class _Finding:
    """What the scan of one tensor saw."""

    fault: str | None = None
    warning: str | None = None
    scales: int = 0
    zero_scales: int = 0


class _Buffers:
    """Of one thread."""

    def __init__(self) -> None:
        self.data = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
        self.scratch = torch.empty_like(self.data)
        self.scales = torch.empty(_CHUNK_BYTES // MXFP8_BLOCK, dtype=torch.uint8)


class _Scan:
    """Reads every byte of a checkpoint."""

    def __init__(self, tensors: dict[str, TensorEntry], rounding: Rounding | None, checksums: dict[str, str]) -> None:
        self.tensors, self.rounding, self.checksums = tensors, rounding, checksums

    def run(self, verdict: Verdict, workers: int) -> None:
        by_file: dict[Path, list[TensorEntry]] = defaultdict(list)
        for entry in self.tensors.values():
            by_file[entry.path].append(entry)
        threads_before = torch.get_num_threads()
        try:
            with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                for path, entries in by_file.items():
                    descriptor = os.open(path, os.O_RDONLY)
                    try:
                        step = -(-len(entries) // workers)
                        batches = [entries[at : at + step] for at in range(0, len(entries), step)]
                        for findings in pool.map(lambda batch: self._batch(batch, descriptor), batches):  # noqa: B023
                            for finding in findings:
                                verdict.scales += finding.scales
                                verdict.zero_scales += finding.zero_scales
                                verdict.faults += [finding.fault] if finding.fault else []
                                verdict.warnings += [finding.warning] if finding.warning else []
                    finally:
                        os.close(descriptor)
        finally:
            torch.set_num_threads(threads_before)

    def _batch(self, entries: list[TensorEntry], descriptor: int) -> list[_Finding]:
        buffers = _Buffers()
        findings = []
        for entry in entries:
            try:
                if entry.dtype == WEIGHT_DTYPE:
                    findings.append(self._weight(entry, descriptor, buffers))
                elif entry.dtype == SCALE_DTYPE and weight_of(entry.name):
                    findings.append(self._scale(entry, descriptor, buffers))
                elif entry.dtype in _FLOATS:
                    for _, data in _chunks(entry, descriptor, buffers.data):
                        require_finite(data.view(_FLOATS[entry.dtype]))
            except NonFiniteError:
                findings.append(_Finding(f"{entry.name} holds NaN or inf"))
            except OSError as error:
                findings.append(_Finding(f"{entry.name} can't be read: {error}"))
        return findings

    def _weight(self, entry: TensorEntry, descriptor: int, buffers: _Buffers) -> _Finding:
        """NaN codes, and whether the elements are what the scales want."""
        scale = scale_of(self.tensors, entry.name)
        if scale is not None and (scale.dtype != SCALE_DTYPE or scale.nbytes * MXFP8_BLOCK != entry.nbytes):
            scale = None  # a fault already
        other = os.open(scale.path, os.O_RDONLY) if scale is not None and scale.path != entry.path else None
        use = ScaleUse(self.rounding)
        try:
            for at, data in _chunks(entry, descriptor, buffers.data):
                magnitude = torch.bitwise_and(data, 0x7F, out=buffers.scratch[: data.numel()])
                if int(magnitude.max()) == 0x7F:
                    return _Finding(f"{entry.name} holds E4M3 NaN codes (0x7f or 0xff)")
                if scale is not None:
                    codes = buffers.scales[: data.numel() // MXFP8_BLOCK]
                    begin = scale.begin + at // MXFP8_BLOCK
                    _read(descriptor if other is None else other, codes, begin, scale)
                    use.add(magnitude, codes)
        finally:
            if other is not None:
                os.close(other)
        fault = use.fault()
        return _Finding(f"{entry.name}: {fault}" if fault else None)

    def _scale(self, entry: TensorEntry, descriptor: int, buffers: _Buffers) -> _Finding:
        highest = zeros = checksum = 0
        for _, data in _chunks(entry, descriptor, buffers.data):
            highest = max(highest, int(data.max()))
            zeros += data.numel() - int(torch.count_nonzero(data))
            checksum = zlib.crc32(data.numpy().data, checksum)
        fault = warning = None
        if highest == _NAN_SCALE:
            fault = f"{entry.name} holds the scale code {_NAN_SCALE}, which is NaN"
        elif self.checksums.get(entry.name, f"{checksum:08x}") != f"{checksum:08x}":
            fault = (
                f"{entry.name} is not what rose quantize wrote: its checksum differs from the one in {CHECKSUMS_NAME}"
            )
        if _HIGH_SCALE < highest < _NAN_SCALE:
            warning = f"{entry.name} has a scale of 2**{highest - 127}, implausible for a weight"
        elif entry.nbytes and zeros * 2 > entry.nbytes:
            warning = f"{entry.name}: {zeros / entry.nbytes:.0%} of the scale codes are 0 (blocks of zeros)"
        return _Finding(fault, warning, entry.nbytes, zeros)


def _chunks(entry: TensorEntry, descriptor: int, buffer: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """The tensor's bytes in order, each run with its place in the tensor; the next one overwrites it."""
    for begin in range(entry.begin, entry.end, _CHUNK_BYTES):
        data = buffer[: min(_CHUNK_BYTES, entry.end - begin)]
        _read(descriptor, data, begin, entry)
        yield begin - entry.begin, data


def _read(descriptor: int, data: torch.Tensor, offset: int, entry: TensorEntry) -> None:
    view = data.numpy().data
    while len(view):
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise OSError(f"{entry.path.name} ends at byte {offset}")
        view, offset = view[count:], offset + count
