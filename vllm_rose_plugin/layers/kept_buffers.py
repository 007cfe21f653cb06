"""Buffers that outlive vLLM's reloading of weights.

While it reloads a layer in place, vLLM takes every buffer away that wasn't there before the first load, and afterwards
puts the old one back as it was: what was made meanwhile under the same name is dropped (``_copy_and_restore_kernel_
tensors`` of ``model_loader/reload/layerwise.py`` copies no buffer that is in no state_dict and has no weight loader).
So a layer also holds its buffers where vLLM doesn't look, and whoever fills one writes into the memory that comes back.
"""

from typing import Any

import torch

ATTRIBUTE = "rose_buffers"
"""Of a layer: name to tensor."""


def find(layer: Any, name: str) -> torch.Tensor | None:
    """A buffer that an earlier load has made, also while vLLM has taken it away; None: there was none."""
    buffer = getattr(layer, name, None)
    return layer.__dict__.get(ATTRIBUTE, {}).get(name) if buffer is None else buffer


def put(layer: Any, name: str, buffer: torch.Tensor) -> None:
    """Give a layer a buffer, in no state_dict; a second call with the same one changes nothing.

    Args:
        layer: a torch module.
        name: of the buffer.
        buffer: its content is the caller's; captured graphs read it where it lies.
    """
    layer.__dict__.setdefault(ATTRIBUTE, {})[name] = buffer
    layer.register_buffer(name, buffer, persistent=False)
