"""The JSON files beside the weights that this package writes, as text."""

import json
from collections.abc import Iterable, Mapping
from typing import Any


def index_text(*, weight_map: Mapping[str, str], total_size: int) -> bytes:
    """``model.safetensors.index.json``.

    Args:
        weight_map: file of every tensor.
        total_size: bytes of all tensors.
    """
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def checksums_text(checksums: Mapping[str, str]) -> bytes:
    """``rose_scales.json``: CRC-32 of each scale tensor, in hexadecimal."""
    return (json.dumps({"crc32": dict(sorted(checksums.items()))}, indent=1) + "\n").encode()


def config_text(config: Mapping[str, Any]) -> bytes:
    """``config.json``."""
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> tuple[bytes, dict[str, int]]:
    """Length and header of a safetensors file whose tensors lie in the order given.

    Args:
        tensors: ``(name, dtype, shape, bytes)`` of each.

    Returns:
        The file's first bytes, and where in the file each tensor begins.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    offsets: dict[str, int] = {}
    for name, dtype, shape, size in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        offsets[name] = position
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map the file: the data start aligned
    first = len(text).to_bytes(8, "little") + text
    return first, {name: at + len(first) for name, at in offsets.items()}
