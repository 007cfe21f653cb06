"""MXFP8 quantization of tensors on an NVIDIA GPU."""

import functools
import importlib.metadata as metadata
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, Mxfp8Tensor, Rounding, ScaleLayout
from vllm_rose_plugin.kernels.jit.compile import compile
from vllm_rose_plugin.kernels.jit.targets import choose_target
from vllm_rose_plugin.kernels.mxfp8_quantize.config import (
    ITEM_BYTES,
    QuantizeConfig,
    alignment_of,
    choose_config,
    warm_configs,
    widest_load,
)
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import permuted_size, scale_shape

DTYPE_NAMES = {getattr(torch, name): name for name in ITEM_BYTES}
_RESULT_ALIGNMENT = 32


class DeviceFacts(NamedTuple):
    """What launch shapes depend on."""

    target: str
    sm_count: int


def quantize_mxfp8(
    x: torch.Tensor,
    *,
    rounding: Rounding | str = Rounding.RCEIL,
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    out: Mxfp8Tensor | None = None,
) -> Mxfp8Tensor:
    """Quantize along the last dimension in blocks of 32: the bits of ``reference.quantize_mxfp8``, in one launch.

    Args:
        x: bf16, fp16 or fp32 ``[T, H]`` on a CUDA device, H a multiple of 32. Rows are contiguous and may lie any
            distance apart; those that don't start at a multiple of 16 bytes (32 from Blackwell on) are read in
            narrower pieces.
        rounding: see :class:`Rounding`.
        layout: of the scales; see :mod:`scale_layout`. Whatever fills up a tile is written too, as 0; what fills up a
            row of float32 scales is not.
        out: where to write, of the same shapes; its codes start at a multiple of 32 bytes.

    Returns:
        Codes ``[T, H]`` float8_e4m3fn, scales as :func:`scale_layout.scale_shape` says.

    Raises:
        TypeError: x is not bf16, fp16 or fp32.
        ValueError: shapes or strides that the kernel doesn't take; the message names them.
        RuntimeError: the device has no compile target, or nvidia-cutlass-dsl is missing.
    """
    check_rows(x, what="x")
    num_rows, hidden_size = x.shape
    check_blocks(hidden_size)
    out = quantized_like(x, num_rows=num_rows, hidden_size=hidden_size, layout=layout, out=out)
    scales = out.scales if layout is ScaleLayout.FP32_K_MAJOR else out.scales.view(-1)
    _launch(x, out.codes.view(torch.uint8), scales, rounding=rounding, layout=layout)
    return out


def permute_tokens(
    x: torch.Tensor,
    *,
    activation: Activation | str,
    rounding: Rounding | str = Rounding.RCEIL,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tokens as TokenFormat.BF16_PERMUTED: the bits of ``gemm.tokens.pack_tokens``, but for NaN's payload, one launch.

    Args:
        x: as :func:`quantize_mxfp8` takes it.
        activation: MXFP8 quantizes and multiplies by the scales again, BF16 rounds to bf16.
        rounding: how x is quantized.
        out: where to write; starts at a multiple of 32 bytes.

    Returns:
        bf16 ``[T, ceil(H/64) * 64]``.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`quantize_mxfp8`.
    """
    check_rows(x, what="x")
    check_blocks(x.shape[1])
    y = plain_like(x, (x.shape[0], permuted_size(x.shape[1])), torch.bfloat16, out)
    _launch(x, y, no_scales(y), rounding=rounding, activation=Activation(activation), permuted=True)
    return y


def _launch(
    x: torch.Tensor,
    y: torch.Tensor,
    scales: torch.Tensor,
    *,
    rounding: Rounding | str,
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    activation: Activation = Activation.MXFP8,
    permuted: bool = False,
) -> None:
    if not x.numel():
        return
    with torch.cuda.device(x.device):
        facts = device_facts(x.device.index)
        x = with_plain_stride(x)
        alignment = row_alignment(x, limit=widest_load(facts.target))
        kernel = _kernel_for(
            facts, x.dtype, x.shape[0], x.shape[1], alignment, layout, Rounding(rounding), activation, permuted
        )
        kernel(x, y, scales)


def check_blocks(hidden_size: int) -> None:
    """Refuse rows that aren't made of whole blocks."""
    if hidden_size % MXFP8_BLOCK:
        raise ValueError(f"MXFP8 needs a last dimension that is a multiple of {MXFP8_BLOCK}, got {hidden_size}")


def no_scales(y: torch.Tensor) -> torch.Tensor:
    """A tensor for a kernel that writes no scales; it won't touch it."""
    return y.view(torch.uint8).view(-1)


def plain_like(
    x: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, out: Mxfp8Tensor | torch.Tensor | None
) -> torch.Tensor:
    """Memory for a result without scales on x's device: `out` once it is checked, or new."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=x.device)
    if not isinstance(out, torch.Tensor):
        raise TypeError("out is an Mxfp8Tensor, but the result is a tensor")
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != x.device or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous {dtype} {shape} on {x.device}, "
            f"got {out.dtype} {tuple(out.shape)} with strides {out.stride()} on {out.device}"
        )
    if out.data_ptr() % _RESULT_ALIGNMENT and out.numel():
        raise ValueError(f"out must start at a multiple of {_RESULT_ALIGNMENT} bytes, got {out.data_ptr():#x}")
    return out


def warm_up(**call: Any) -> None:
    """Compile, or load, all kernels that calls with aligned rows can need on the current device.

    Args:
        call: as in :func:`config.warm_configs`, but for target and sm_count.
    """
    facts = device_facts(torch.cuda.current_device())
    for config in warm_configs(**call, **facts._asdict()):
        _kernel(config, facts.target)


def check_rows(x: torch.Tensor, *, what: str) -> None:
    """Refuse what no kernel of this family reads."""
    if x.dtype not in DTYPE_NAMES:
        raise TypeError(f"MXFP8 quantization takes bf16, fp16 or fp32, got {x.dtype}")
    if x.ndim != 2:
        raise ValueError(f"{what} must be [T, H], got shape {tuple(x.shape)}: flatten its leading dimensions")
    if not x.is_cuda:
        raise ValueError(f"{what} is on {x.device}: the kernel runs on CUDA devices, the reference elsewhere")
    if x.stride(1) != 1 and x.numel():
        raise ValueError(f"rows of {what} must be contiguous, got strides {x.stride()}: pass {what}.contiguous()")


def quantized_like(
    x: torch.Tensor, *, num_rows: int, hidden_size: int, layout: ScaleLayout, out: Mxfp8Tensor | None
) -> Mxfp8Tensor:
    """Memory for a result ``[num_rows, hidden_size]`` on x's device: `out` once it is checked, or new."""
    shape = scale_shape(num_rows=num_rows, hidden_size=hidden_size, layout=layout)
    scale_dtype = torch.float32 if layout is ScaleLayout.FP32_K_MAJOR else torch.uint8
    if out is None:
        codes = torch.empty((num_rows, hidden_size), dtype=torch.float8_e4m3fn, device=x.device)
        return Mxfp8Tensor(codes, torch.empty(shape, dtype=scale_dtype, device=x.device), layout)
    if out.layout is not layout:
        raise ValueError(f"out has scales {out.layout}, asked for were {layout}")
    for name, tensor, expected, dtype in (
        ("codes", out.codes, (num_rows, hidden_size), torch.float8_e4m3fn),
        ("scales", out.scales, shape, scale_dtype),
    ):
        if tuple(tensor.shape) != expected or tensor.dtype != dtype or tensor.device != x.device:
            raise ValueError(
                f"out.{name} must be {dtype} {expected} on {x.device}, "
                f"got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"out.{name} must be contiguous, got strides {tensor.stride()}")
    if out.codes.data_ptr() % _RESULT_ALIGNMENT and out.codes.numel():
        raise ValueError(
            f"out.codes must start at a multiple of {_RESULT_ALIGNMENT} bytes, got {out.codes.data_ptr():#x}"
        )
    if layout is ScaleLayout.FP32_K_MAJOR and out.scales.data_ptr() % 16 and out.scales.numel():
        raise ValueError(f"float32 out.scales must start at a multiple of 16 bytes, got {out.scales.data_ptr():#x}")
    return out


def with_plain_stride(x: torch.Tensor) -> torch.Tensor:
    """x; a single row's stride says nothing about memory, so it is replaced by one that is aligned."""
    return x.as_strided(x.shape, (x.shape[1], 1)) if x.shape[0] == 1 else x


def row_alignment(x: torch.Tensor, *, limit: int, offset_bytes: int = 0) -> int:
    """The widest load in bytes, at most `limit`, that starts at every row and `offset_bytes` after it."""
    return alignment_of(pointer=x.data_ptr(), row_bytes=(x.stride(0) * x.element_size()) | offset_bytes, limit=limit)


@functools.cache
def device_facts(index: int) -> DeviceFacts:
    """Of a CUDA device.

    Raises:
        RuntimeError: nothing of ours runs there.
    """
    choice = choose_target(
        capability=torch.cuda.get_device_capability(index), dsl_version=metadata.version("nvidia-cutlass-dsl")
    )
    if choice.target is None:
        raise RuntimeError(choice.note)
    return DeviceFacts(choice.target, torch.cuda.get_device_properties(index).multi_processor_count)


@functools.lru_cache(maxsize=8192)
def _kernel_for(
    facts: DeviceFacts,
    dtype: torch.dtype,
    num_rows: int,
    hidden_size: int,
    alignment: int,
    layout: ScaleLayout,
    rounding: Rounding,
    activation: Activation,
    permuted: bool,
) -> Callable:
    """A call's kernel; building its config takes longer than looking it up."""
    config = choose_config(
        dtype=DTYPE_NAMES[dtype],
        num_rows=num_rows,
        hidden_size=hidden_size,
        layout=layout,
        rounding=rounding,
        alignment=alignment,
        sm_count=facts.sm_count,
        activation=activation,
        permuted=permuted,
    )
    return _kernel(config, facts.target)


@functools.cache
def _kernel(config: QuantizeConfig, target: str) -> Callable:
    from vllm_rose_plugin.kernels.mxfp8_quantize.kernel import build  # imports cutlass

    return compile(family="mxfp8_quantize", config=config, build=build, target=target)
