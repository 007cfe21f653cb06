"""A linear layer whose weight lies in parts by columns, one in each locality domain: loading, export, loading again.

vLLM loads the layer as ever, and what it has loaded is moved into the parts, so that a start-up has room for the model
and one layer. Then the parameter is on the meta device: it has the shape that vLLM asks for and no memory. The scales,
3 % of the weight, stay a parameter as loaded.

Parts are buffers, since torch.compile traces a linear layer: it takes a module's buffers for what they are, memory that
stays where it is.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.gemm.column_split import ColumnSplit
from vllm_rose_plugin.kernels.gemm.weights import pack_weight, packed_shape
from vllm_rose_plugin.layers import kept_buffers
from vllm_rose_plugin.layers.log import logger
from vllm_rose_plugin.memory.domain_memory import DomainMemory
from vllm_rose_plugin.memory.driver import round_up

ATTRIBUTE, COUNT = "rose_linear_parts", "rose_num_parts"
"""Of a layer whose weight lies in parts: its LinearParts, and their number, which is all that a compiled graph asks."""
CODES, SCALES = "rose_part{}_weight", "rose_part{}_scale"
"""Buffers of a layer, in no state_dict; scales are packed, or where the reference computes row-major."""
_ALIGNMENT = 256

Allocate = Callable[[list[int]], DomainMemory]
"""(bytes of each part) -> memory, all of it or none."""


@dataclass(frozen=True)
class LinearParts:
    """How a layer lies in parts; holds none of its tensors."""

    split: ColumnSplit
    packed: bool
    """Whether our kernels compute, which read packed scales."""

    def fill(self, layer: Any) -> None:
        """Move what was loaded into the parts; what is loaded again goes to the same memory.

        Args:
            layer: where its weight has no memory, codes are in the parts already, and only scales are taken.
        """
        parts, whole = self.split.parts, layer.weight
        # vLLM takes buffers away while it loads a layer again.
        buffers = [[_found(layer, name.format(part)) for name in (CODES, SCALES)] for part in range(parts)]
        if not whole.is_meta:
            _put(whole.data, [codes for codes, _ in buffers])
        for part, ((codes, own), rows) in enumerate(zip(buffers, layer.weight_scale.data.chunk(parts), strict=True)):
            if self.packed:
                pack_weight(Mxfp8Tensor(codes, rows), target=self.split.target, out=own)
            else:
                own.copy_(rows)
            for name, buffer in ((CODES, codes), (SCALES, own)):
                kept_buffers.put(layer, name.format(part), buffer)
        if not whole.is_meta:
            _forget(layer, whole)


def _found(layer: Any, name: str) -> torch.Tensor:
    buffer = kept_buffers.find(layer, name)
    assert buffer is not None
    return buffer


def of(layer: Any) -> LinearParts | None:
    """How a layer's weight lies in parts; None: it is whole."""
    return getattr(layer, ATTRIBUTE, None)


def operands(layer: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(codes, scales) of each part of a layer that has some."""
    parts = range(getattr(layer, COUNT))
    return [getattr(layer, CODES.format(p)) for p in parts], [getattr(layer, SCALES.format(p)) for p in parts]


def attach(layer: Any, split: ColumnSplit, allocate: Allocate | None) -> LinearParts:
    """Make a layer's parts, empty; they are freed with it. Its state_dict holds the whole weight, and takes one.

    Args:
        layer: with its weight and scales as loaded.
        split: of the weight.
        allocate: of memory in domains, for our kernels; None: torch's memory, for the reference.

    Raises:
        RuntimeError, LocalityUnavailableError: a domain has no room; nothing stays allocated.
    """
    k, scale_k = layer.weight.shape[1], layer.weight_scale.shape[1]
    codes: tuple[int, ...] = (split.part_n, k)
    scales: tuple[int, ...] = (split.part_n, scale_k)
    memory: DomainMemory | None = None
    if allocate is None:
        made = [
            (layer.weight.data.new_empty(codes), layer.weight_scale.data.new_empty(scales)) for _ in range(split.parts)
        ]
    else:
        scales = packed_shape(num_groups=1, n=split.part_n, k=k, target=split.target, gate_up=False)
        sizes = [round_up(torch.Size(shape).numel(), _ALIGNMENT) for shape in (codes, scales)]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the layer before has left, which is torch's and can't be had otherwise
        memory = allocate([sum(sizes)] * split.parts)
        made = [
            (
                memory.tensor(part, shape=codes, dtype=torch.uint8).view(torch.float8_e4m3fn),
                memory.tensor(part, shape=scales, dtype=torch.uint8, offset=sizes[0]),
            )
            for part in range(split.parts)
        ]
    for part, buffers in enumerate(made):
        for name, buffer in zip((CODES, SCALES), buffers, strict=True):
            kept_buffers.put(layer, name.format(part), buffer)
    if memory is not None:
        held = (layer._buffers, layer.__dict__[kept_buffers.ATTRIBUTE])
        weakref.finalize(layer, _free, memory, held).atexit = False  # the driver frees what an ending process holds
    parts = LinearParts(split, packed=allocate is not None)
    setattr(layer, ATTRIBUTE, parts)
    setattr(layer, COUNT, split.parts)
    layer.register_state_dict_post_hook(_give_whole)
    layer.register_load_state_dict_pre_hook(_take_whole)
    return parts


def _put(codes: torch.Tensor, parts: list[torch.Tensor]) -> None:
    with _disable_current_modes():  # vLLM counts what a load copies, and these were counted
        for part, rows in zip(parts, codes.chunk(len(parts)), strict=True):
            part.view(torch.uint8).copy_(rows.view(torch.uint8))


def _forget(layer: Any, whole: torch.nn.Parameter) -> None:
    """The parameter without its memory, which refuses what would be loaded into it."""
    empty = torch.nn.Parameter(torch.empty_like(whole.data, device="meta"), requires_grad=False)
    empty.__class__ = whole.__class__
    empty.__dict__.update(whole.__dict__)
    name = getattr(layer, "prefix", type(layer).__name__)

    def refuse(*arguments: Any, **how: Any) -> None:
        raise ValueError(
            f"{name}: its weight lies in locality domains and can't be loaded in place: load with vLLM's "
            'reload_weights, or set --additional-config \'{"rose": {"locality_linear": false}}\''
        )

    for kept in ("_weight_loader", "weight_loader"):  # vLLM's own classes of parameters keep it behind a property
        if kept in empty.__dict__:
            empty.__dict__[kept] = refuse
    layer.register_parameter("weight", empty)


def whole(layer: Any) -> torch.Tensor:
    """Codes ``[N, K]`` of a layer in parts, in host memory."""
    return torch.cat([part.view(torch.uint8).cpu() for part in operands(layer)[0]]).view(torch.float8_e4m3fn)


def _give_whole(layer: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    if f"{prefix}weight" in state:
        state[f"{prefix}weight"] = whole(layer)


def _take_whole(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    codes = state.get(f"{prefix}weight")
    if codes is None or codes.is_meta or not layer.weight.is_meta:
        return
    _put(codes, operands(layer)[0])
    state[f"{prefix}weight"] = codes.to("meta")  # as the parameter is, so that torch needn't warn


def _free(memory: DomainMemory, held: tuple[dict[str, Any], ...]) -> None:
    """Once the layer goes, with the tensors that it still holds there."""
    for names in held:
        for name in [name for name in names if name.startswith("rose_part")]:
            del names[name]
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        memory.free()
    except Exception as error:  # nobody could catch it: a layer goes when it is collected
        logger.warning("memory in locality domains stays allocated: %s", error)
