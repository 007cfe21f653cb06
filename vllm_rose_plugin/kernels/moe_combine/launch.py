"""The weighted sum of the experts' results, of tensors on an NVIDIA GPU."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from vllm_rose_plugin.kernels.gemm.checks import check_on_gpu
from vllm_rose_plugin.kernels.jit.compile import compile
from vllm_rose_plugin.kernels.moe_combine.config import DTYPES, CombineConfig, choose_config, warm_configs
from vllm_rose_plugin.kernels.mxfp8_quantize.config import alignment_of
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import (
    DeviceFacts,
    device_facts,
    row_alignment,
    with_plain_stride,
)

DTYPE_NAMES = {getattr(torch, name): name for name in DTYPES}
_ALIGNMENT = 32


def combine_tokens(
    y: torch.Tensor,
    *,
    slots: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The bits of ``reference.combine_tokens`` (but for NaN's payload), in one launch.

    Args:
        y: bf16 or fp16 ``[S, H]``, contiguous, on a CUDA device; H a multiple of 32.
        slots: int32 ``[T, top_k]``, contiguous, each below S; a negative one is skipped. top_k is 1 to 16.
        topk_weights: float32 ``[T, top_k]``, contiguous; None sums without weights.
        shared: bf16 or fp16 ``[T, H]``, added last. Rows are contiguous and may lie any distance apart.
        out: where to write, ``[T, H]`` bf16 or fp16; may not overlap y. y and out start at multiples of 32 bytes.
        out_dtype: of a new result; y's dtype by default.

    Returns:
        ``[T, H]``.

    Raises:
        TypeError, ValueError: what doesn't fit; the message names it.
        RuntimeError: the device has no compile target, or nvidia-cutlass-dsl is missing.
    """
    out = check_operands(y, slots, topk_weights, shared, out, out_dtype)
    if not slots.shape[0]:
        return out
    with torch.cuda.device(y.device):
        facts = device_facts(y.device.index)
        places = placement(slots, topk_weights, shared)
        kernel = _kernel_for(facts, **call_of(y, slots, topk_weights, shared, out), **places)
        kernel(*kernel_operands(y, slots, topk_weights, shared, out))
    return out


def check_operands(
    y: torch.Tensor,
    slots: torch.Tensor,
    topk_weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """Refuse what :func:`combine_tokens` doesn't take; returns out, a new tensor if it is None."""
    if y.ndim != 2 or slots.ndim != 2:
        raise ValueError(f"y must be [S, H] and slots [T, top_k], got {tuple(y.shape)} and {tuple(slots.shape)}")
    num_tokens, top_k = slots.shape
    hidden_size = y.shape[1]
    if out is None:
        out = torch.empty((num_tokens, hidden_size), dtype=out_dtype or y.dtype, device=y.device)
    check_on_gpu("y", y)
    _check("slots", slots, (num_tokens, top_k), y.device, (torch.int32,), alignment=4)
    _check("y", y, tuple(y.shape), y.device, tuple(DTYPE_NAMES))
    _check("out", out, (num_tokens, hidden_size), y.device, tuple(DTYPE_NAMES) if out_dtype is None else (out_dtype,))
    if topk_weights is not None:
        _check("topk_weights", topk_weights, (num_tokens, top_k), y.device, (torch.float32,), alignment=4)
    if shared is not None:
        _check_shared(shared, (num_tokens, hidden_size), y.device)
    return out


def call_of(
    y: torch.Tensor,
    slots: torch.Tensor,
    topk_weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    out: torch.Tensor,
) -> dict[str, Any]:
    """A call's shapes and dtypes, as `choose_config` takes them."""
    return {
        "num_tokens": slots.shape[0],
        "hidden_size": y.shape[1],
        "top_k": slots.shape[1],
        "dtype": DTYPE_NAMES[y.dtype],
        "shared_dtype": None if shared is None else DTYPE_NAMES[shared.dtype],
        "out_dtype": DTYPE_NAMES[out.dtype],
        "weighted": topk_weights is not None,
    }


def placement(slots: torch.Tensor, topk_weights: torch.Tensor | None, shared: torch.Tensor | None) -> dict[str, int]:
    """Where a call's tensors lie, as `choose_config` takes it."""
    starts = slots.data_ptr() | (0 if topk_weights is None else topk_weights.data_ptr())
    return {
        "shared_alignment": 32 if shared is None else row_alignment(with_plain_stride(shared), limit=32),
        "slot_alignment": alignment_of(pointer=starts, row_bytes=0, limit=16),
    }


def kernel_operands(
    y: torch.Tensor,
    slots: torch.Tensor,
    topk_weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    out: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The tensors as kernels take them; what a kernel doesn't touch is stood in for."""
    slots = slots.view(-1)
    weights = slots.view(torch.float32) if topk_weights is None else topk_weights.view(-1)
    return y, slots, weights, y if shared is None else with_plain_stride(shared), out


def warm_up(
    *,
    hidden_size: int,
    top_k: int,
    dtype: str,
    out_dtype: str | None = None,
    weighted: bool = True,
    shared_dtype: str | None = None,
) -> None:
    """Compile, or load, all kernels that calls with aligned operands can need on the current device.

    Args:
        hidden_size, top_k: of the calls.
        dtype, out_dtype, shared_dtype: "bfloat16" or "float16"; out_dtype is dtype by default.
        weighted: whether router weights are multiplied here.
    """
    facts = device_facts(torch.cuda.current_device())
    for config in warm_configs(
        hidden_size=hidden_size,
        top_k=top_k,
        dtype=dtype,
        out_dtype=out_dtype or dtype,
        weighted=weighted,
        shared_dtype=shared_dtype,
        **facts._asdict(),
    ):
        _kernel(config, facts.target)


def _check(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    *,
    alignment: int = _ALIGNMENT,
) -> None:
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tuple(tensor.shape) != shape or tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {shape} on {device}, "
            f"got {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
        )
    if tensor.data_ptr() % alignment and tensor.numel():
        raise ValueError(f"{name} must start at a multiple of {alignment} bytes, got {tensor.data_ptr():#x}")


def _check_shared(shared: torch.Tensor, shape: tuple[int, int], device: torch.device) -> None:
    if shared.dtype not in DTYPE_NAMES:
        raise TypeError(f"shared must be {' or '.join(map(str, DTYPE_NAMES))}, got {shared.dtype}")
    if tuple(shared.shape) != shape or shared.device != device or (shared.stride(1) != 1 and shared.numel()):
        raise ValueError(
            f"shared must be {shape} on {device} with contiguous rows, "
            f"got {tuple(shared.shape)} with strides {shared.stride()} on {shared.device}"
        )


@functools.lru_cache(maxsize=8192)
def _kernel_for(facts: DeviceFacts, **call: Any) -> Callable:
    """A call's kernel; building its config takes longer than looking it up."""
    return _kernel(choose_config(**call, **facts._asdict()), facts.target)


@functools.cache
def _kernel(config: CombineConfig, target: str) -> Callable:
    from vllm_rose_plugin.kernels.moe_combine.kernel import build  # imports cutlass

    return compile(family="moe_combine", config=config, build=build, target=target)
