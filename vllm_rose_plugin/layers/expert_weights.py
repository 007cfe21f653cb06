"""The tensors of a layer of experts: what was loaded, checked, and what our kernels need besides."""

from typing import Any

import torch

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Mxfp8Tensor
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.layers import checkpoint_check, kept_buffers
from vllm_rose_plugin.layers.expert_parts import ExpertParts

PACKED_W13, PACKED_W2 = "rose_w13_scale", "rose_w2_scale"
"""Buffers that a layer gets on a GPU, in no state_dict: its scales in the order in which the kernels read them."""


def check_loaded(layer: Any) -> None:
    """Refuse weights or scales of another dtype or shape than the kernels take.

    Args:
        layer: vLLM's ``RoutedExperts`` after its load.

    Raises:
        ValueError: names the tensor.
    """
    experts, rows, hidden_size = layer.w13_weight.shape
    intermediate_size = rows // 2
    prefix = getattr(layer, "layer_name", type(layer).__name__)
    for name, dtype, shape in (
        ("w13_weight", torch.float8_e4m3fn, (experts, rows, hidden_size)),
        ("w13_weight_scale", torch.uint8, (experts, rows, hidden_size // MXFP8_BLOCK)),
        ("w2_weight", torch.float8_e4m3fn, (experts, hidden_size, intermediate_size)),
        ("w2_weight_scale", torch.uint8, (experts, hidden_size, intermediate_size // MXFP8_BLOCK)),
    ):
        checkpoint_check.check_tensor(f"{prefix}.{name}", getattr(layer, name), dtype, shape)
    parts = ExpertParts.of(layer)
    if parts is not None and (parts.filled or not _is_dummy()):
        parts.check_loaded(prefix)


def pack_scales(layer: Any, *, target: str) -> None:
    """Give a layer its scales in a target's order, as buffers.

    A second call packs into the memory of the first: captured graphs go on reading it.

    Args:
        layer: vLLM's ``RoutedExperts``.
        target: compile target.
    """
    parts = ExpertParts.of(layer)
    for stem, name in (("w13", PACKED_W13), ("w2", PACKED_W2)):
        if parts is not None and stem in parts.splits:  # which have packed scales of their own
            continue
        weight, scales = getattr(layer, f"{stem}_weight"), getattr(layer, f"{stem}_weight_scale")
        packed = pack_weight(
            Mxfp8Tensor(weight.data, scales.data.contiguous()),
            target=target,
            gate_up=name == PACKED_W13,
            out=kept_buffers.find(layer, name),
        )
        kept_buffers.put(layer, name, packed.scales)


def packed_by_expert(layer: Any) -> list[torch.Tensor]:
    """The packed scales as EPLB moves them: views ``[E_local, bytes]`` uint8, a row for each expert.

    Every target packs one expert after another, so a row that is copied over another is all that a move takes. Empty
    for a layer that has none. Weights in parts come with them, codes and packed scales of each part.
    """
    buffers = (getattr(layer, name, None) for name in (PACKED_W13, PACKED_W2))
    packed = [buffer.view(layer.local_num_experts, -1) for buffer in buffers if buffer is not None]
    parts = ExpertParts.of(layer)
    return packed if parts is None else packed + parts.by_expert()


def _is_dummy() -> bool:
    """Whether weights aren't loaded, but made up."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and config.load_config.load_format == "dummy"
