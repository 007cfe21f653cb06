"""Reads an MXFP8 checkpoint back: headers, config, then every byte that can give a mistake away."""

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm_rose_plugin.checkpoint import rules
from vllm_rose_plugin.checkpoint.headers import (
    SCALE_SUFFIX,
    WEIGHT_DTYPE,
    CheckpointError,
    TensorEntry,
    read_checkpoint,
    scale_faults,
)
from vllm_rose_plugin.checkpoint.quantizer import NonFiniteError, require_finite

_CHUNK_BYTES = 4 << 20
_NAN_SCALE = 255
_HIGH_SCALE = 127 + 32  # a weight above 448 * 2**32 is no weight
_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


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
    if not directory.is_dir():
        verdict.faults.append(f"{directory} is not a directory")
        return verdict
    ignore = _read_config(directory, verdict)
    tensors, faults = read_checkpoint(directory)
    verdict.faults += faults
    verdict.faults += scale_faults(tensors)
    verdict.tensors = len(tensors)
    verdict.quantized = sum(entry.dtype == WEIGHT_DTYPE for entry in tensors.values())
    verdict.total_bytes = sum(entry.nbytes for entry in tensors.values())
    if ignore is not None:
        verdict.faults += _coverage_faults(tensors.values(), ignore)
    if tensors and not verdict.quantized:
        verdict.faults.append(f"no tensor is quantized: none has dtype {WEIGHT_DTYPE}")
    _scan(tensors, verdict, workers)
    return verdict


def _read_config(directory: Path, verdict: Verdict) -> rules.IgnoreRules | None:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
    except FileNotFoundError:
        verdict.faults.append("config.json is missing")
        return None
    except ValueError as error:
        verdict.faults.append(f"config.json can't be read: {error}")
        return None
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        verdict.faults.append("config.json has no quantization_config: vLLM would take the checkpoint as unquantized")
        return None
    try:
        ignore = rules.IgnoreRules(quantization)
    except CheckpointError as error:
        verdict.faults.append(f"config.json: {error}")
        return None
    verdict.format, verdict.rounding = ignore.format, ignore.rounding
    return ignore


def _coverage_faults(tensors: Iterable[TensorEntry], ignore: rules.IgnoreRules) -> list[str]:
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


def _scan(tensors: dict[str, TensorEntry], verdict: Verdict, workers: int) -> None:
    by_file: dict[Path, list[TensorEntry]] = defaultdict(list)
    for entry in tensors.values():
        by_file[entry.path].append(entry)
    threads_before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for path, entries in by_file.items():
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    step = -(-len(entries) // workers)
                    batches = [entries[at : at + step] for at in range(0, len(entries), step)]
                    for findings in pool.map(lambda batch: _scan_batch(batch, descriptor), batches):  # noqa: B023
                        for finding in findings:
                            verdict.scales += finding.scales
                            verdict.zero_scales += finding.zero_scales
                            verdict.faults += [finding.fault] if finding.fault else []
                            verdict.warnings += [finding.warning] if finding.warning else []
                finally:
                    os.close(descriptor)
    finally:
        torch.set_num_threads(threads_before)


def _scan_batch(entries: list[TensorEntry], descriptor: int) -> list[_Finding]:
    buffer = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
    scratch = torch.empty_like(buffer)
    return [_scan_tensor(entry, descriptor, buffer, scratch) for entry in entries]


def _scan_tensor(entry: TensorEntry, descriptor: int, buffer: torch.Tensor, scratch: torch.Tensor) -> _Finding:
    is_scale = entry.dtype == "U8" and entry.name.endswith(SCALE_SUFFIX)
    highest = zeros = 0
    for begin in range(entry.begin, entry.end, _CHUNK_BYTES):
        data = buffer[: min(_CHUNK_BYTES, entry.end - begin)]
        try:
            _read(descriptor, data, begin, entry)
            if entry.dtype == WEIGHT_DTYPE:
                magnitude = torch.bitwise_and(data, 0x7F, out=scratch[: data.numel()])
                if int(magnitude.max()) == 0x7F:
                    return _Finding(f"{entry.name} holds E4M3 NaN codes (0x7f or 0xff)")
            elif is_scale:
                highest = max(highest, int(data.max()))
                zeros += data.numel() - int(torch.count_nonzero(data))
            elif entry.dtype in _FLOATS:
                require_finite(data.view(_FLOATS[entry.dtype]))
        except NonFiniteError:
            return _Finding(f"{entry.name} holds NaN or inf")
        except OSError as error:
            return _Finding(f"{entry.name} can't be read: {error}")
    if not is_scale:
        return _Finding()
    fault = f"{entry.name} holds the scale code {_NAN_SCALE}, which is NaN" if highest == _NAN_SCALE else None
    warning = None
    if _HIGH_SCALE < highest < _NAN_SCALE:
        warning = f"{entry.name} has a scale of 2**{highest - 127}, implausible for a weight"
    elif entry.nbytes and zeros * 2 > entry.nbytes:
        warning = f"{entry.name}: {zeros / entry.nbytes:.0%} of the scale codes are 0 (blocks of zeros)"
    return _Finding(fault, warning, entry.nbytes, zeros)


def _read(descriptor: int, data: torch.Tensor, offset: int, entry: TensorEntry) -> None:
    view = data.numpy().data
    while len(view):
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise OSError(f"{entry.path.name} ends at byte {offset}")
        view, offset = view[count:], offset + count
