"""SwiGLU, quantized or not, of tensors on an NVIDIA GPU."""

import functools
from collections.abc import Callable

import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding, ScaleLayout
from vllm_rose_plugin.kernels.jit.compile import compile
from vllm_rose_plugin.kernels.mxfp8_quantize.config import widest_load
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import (
    DTYPE_NAMES,
    check_blocks,
    check_rows,
    device_facts,
    no_scales,
    plain_like,
    quantized_like,
    row_alignment,
    with_plain_stride,
)
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import permuted_size
from vllm_rose_plugin.kernels.swiglu_quantize.config import SwigluConfig, choose_config, warm_configs


def swiglu_quantize(
    x: torch.Tensor,
    *,
    activation: Activation | str = Activation.MXFP8,
    rounding: Rounding | str = Rounding.RCEIL,
    limit: float | None = None,
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    permuted: bool = False,
    out: Mxfp8Tensor | torch.Tensor | None = None,
) -> torch.Tensor | Mxfp8Tensor:
    """``silu(gate) * up`` in fp32, quantized from there or rounded to x's dtype, in one launch.

    Against the reference the product is within 3 ulp of fp32. So an element differs only where that moves it across a
    rounding boundary, then by one code; a scale only where its amax crosses one, then by one.

    Args:
        x: bf16, fp16 or fp32 ``[T, 2 * I]`` on a CUDA device: gate, then up; I a multiple of 32, or even where the
            result isn't quantized. Rows are contiguous and may lie any distance apart.
        activation, rounding, limit: as in the reference.
        layout: of the scales; ROW_MAJOR where the result has none.
        permuted: the result is TokenFormat.BF16_PERMUTED; quantized elements are multiplied by their scales again, fp32
            ones are rounded to bf16 where they aren't quantized.
        out: where to write, of the result's shapes.

    Returns:
        Codes ``[T, I]`` and scales, ``[T, I]`` in x's dtype, or permuted, bf16 ``[T, ceil(I/64) * 64]``.

    Raises:
        TypeError: x is not bf16, fp16 or fp32.
        ValueError: shapes or strides that the kernel doesn't take; the message names them.
        RuntimeError: the device has no compile target, or nvidia-cutlass-dsl is missing.
    """
    check_rows(x, what="x")
    activation = Activation(activation)
    num_rows, intermediate_size = x.shape[0], x.shape[1] // 2
    if x.shape[1] % 2:
        raise ValueError(f"SwiGLU needs gate and up, an even last dimension, got {x.shape[1]}")
    y: torch.Tensor
    result: torch.Tensor | Mxfp8Tensor
    if (permuted or activation is Activation.BF16) and layout is not ScaleLayout.ROW_MAJOR:
        what = "a permuted" if permuted else "an unquantized"
        raise ValueError(f"{what} result has no scales to lay out as {layout}")
    if permuted:
        check_blocks(intermediate_size)
        result = y = plain_like(x, (num_rows, permuted_size(intermediate_size)), torch.bfloat16, out)
        scales = no_scales(y)
    elif activation is Activation.MXFP8:
        check_blocks(intermediate_size)
        if isinstance(out, torch.Tensor):
            raise TypeError("out is a tensor, but the result is an Mxfp8Tensor")
        result = quantized_like(x, num_rows=num_rows, hidden_size=intermediate_size, layout=layout, out=out)
        y, scales = result.codes.view(torch.uint8), result.scales
        if layout is not ScaleLayout.FP32_K_MAJOR:
            scales = scales.view(-1)
    else:
        if intermediate_size % 2:
            raise ValueError(
                f"the kernel takes an even number of elements in a row of the result, got {intermediate_size}"
            )
        result = y = plain_like(x, (num_rows, intermediate_size), x.dtype, out)
        scales = no_scales(y)
    if not x.numel():
        return result
    with torch.cuda.device(x.device):
        facts = device_facts(x.device.index)
        x = with_plain_stride(x)
        offset = intermediate_size * x.element_size()
        kernel = _kernel(
            choose_config(
                dtype=DTYPE_NAMES[x.dtype],
                num_rows=num_rows,
                intermediate_size=intermediate_size,
                activation=activation,
                layout=layout,
                rounding=Rounding(rounding),
                limit=limit,
                alignment=row_alignment(x, limit=widest_load(facts.target), offset_bytes=offset),
                sm_count=facts.sm_count,
                permuted=permuted,
            ),
            facts.target,
        )
        kernel(x, y, scales)
    return result


def warm_up(
    *,
    intermediate_size: int,
    dtype: str,
    activation: Activation,
    rounding: Rounding,
    limit: float | None = None,
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
) -> None:
    """Compile, or load, all kernels that calls with aligned rows can need on the current device.

    Args:
        intermediate_size: I of the result.
        dtype: of the input, such as "bfloat16".
        activation, rounding, limit, layout: as in :func:`swiglu_quantize`.
    """
    facts = device_facts(torch.cuda.current_device())
    for config in warm_configs(
        dtype=dtype,
        intermediate_size=intermediate_size,
        activation=activation,
        layout=layout,
        rounding=rounding,
        limit=limit,
        **facts._asdict(),
    ):
        _kernel(config, facts.target)


@functools.cache
def _kernel(config: SwigluConfig, target: str) -> Callable:
    from vllm_rose_plugin.kernels.swiglu_quantize.kernel import build  # imports cutlass

    return compile(family="swiglu_quantize", config=config, build=build, target=target)
