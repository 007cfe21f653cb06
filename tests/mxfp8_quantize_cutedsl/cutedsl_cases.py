"""What the machine-code tests compile and what the PTX of it is run on."""

import functools
import struct

import numpy as np
import ptx_machine
import torch

from vllm_rose_plugin.kernels.contracts import Activation, ScaleLayout
from vllm_rose_plugin.kernels.jit.compile import Artifacts, compile_to_artifacts
from vllm_rose_plugin.kernels.jit.targets import FAMILY_TARGET
from vllm_rose_plugin.kernels.jit.targets import TARGETS as OF_DEVICE
from vllm_rose_plugin.kernels.mxfp8_quantize import kernel as quantize_kernel
from vllm_rose_plugin.kernels.mxfp8_quantize.config import UnitConfig
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import padded_rows, permuted_size, scale_shape
from vllm_rose_plugin.kernels.swiglu_quantize import kernel as swiglu_kernel
from vllm_rose_plugin.kernels.swiglu_quantize.config import SwigluConfig

TARGETS = sorted({*OF_DEVICE.values(), FAMILY_TARGET})
SM_COUNT = 132


@functools.cache
def artifacts(config: UnitConfig, target: str) -> Artifacts:
    family, kernel = "mxfp8_quantize", quantize_kernel
    if isinstance(config, SwigluConfig):
        family, kernel = "swiglu_quantize", swiglu_kernel
    return compile_to_artifacts(family=family, config=config, build=kernel.build, target=target)


def grid_of(config: UnitConfig, num_rows: int) -> int:
    rows = {
        ScaleLayout.ROW_MAJOR: num_rows,
        ScaleLayout.TCGEN05_128X4: padded_rows(num_rows),
        ScaleLayout.FP32_K_MAJOR: -(-num_rows // config.unroll) * config.unroll,
    }[config.layout]
    return -(-rows * config.row_vectors // (config.threads * config.unroll))


def run(
    config: UnitConfig, target: str, x: torch.Tensor, *, row_stride: int | None = None, offset: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Results of the kernel's PTX for x, laid out with `row_stride` elements from row to row, `offset` bytes off.

    Returns:
        (codes or the plain result, as bytes [T, …]; scales: bytes, flat, or bits of float32 [K/32, columns]).
    """
    num_rows, width = x.shape
    row_stride = row_stride or width
    laid_out = torch.full((num_rows, row_stride), float("nan"), dtype=x.dtype)
    laid_out[:, :width] = x
    quantized = config.activation is Activation.MXFP8 and not config.permuted
    wide = config.layout is ScaleLayout.FP32_K_MAJOR
    row_bytes = config.hidden_size * (1 if quantized else x.element_size())
    if config.permuted:
        row_bytes = 2 * permuted_size(config.hidden_size)
    scale_bytes = 0
    if quantized:
        shape = scale_shape(num_rows=num_rows, hidden_size=config.hidden_size, layout=config.layout)
        scale_bytes = int(np.prod(shape)) * (4 if wide else 1)
    memory = ptx_machine.Memory()
    x_at = memory.place(laid_out.view(torch.uint8).numpy().tobytes(), offset=offset)
    y_at = memory.place(num_rows * row_bytes, writable=True)
    scales_at = memory.place(scale_bytes, offset=16 if wide else 1, writable=True)
    params = [
        struct.pack("<QQQ", x_at, num_rows, row_stride),
        struct.pack("<QQ", y_at, num_rows),
        struct.pack("<QQQ", scales_at, shape[1], shape[1]) if wide else struct.pack("<QQ", scales_at, scale_bytes),
    ]
    ptx_machine.run(artifacts(config, target).ptx, grid=grid_of(config, num_rows), params=params, memory=memory)
    codes = memory.read(y_at, num_rows * row_bytes).reshape(num_rows, row_bytes)
    scales = memory.read(scales_at, scale_bytes)
    return codes, scales.view(np.uint32).reshape(shape) if wide else scales


def special_values() -> dict[str, torch.Tensor]:
    """Rows of 64: every 16-bit pattern beside its neighbours and as the largest of a block, every fp32 exponent."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        found[f"{name} patterns"] = patterns.view(dtype).view(-1, 64)
        some = patterns[torch.randperm(65536, generator=generator)[:8192]].view(dtype)
        blocks = torch.rand(len(some), 32, generator=generator) * 2 - 1
        blocks = (blocks * some.float().nan_to_num(0, 0, 0).unsqueeze(1)).to(dtype)
        blocks[:, 7] = some
        found[f"{name} amax"] = blocks.view(-1, 64)
    mantissas = torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF])
    amax = ((torch.arange(256).unsqueeze(1) << 23) + mantissas).flatten()
    below = torch.randint(0, 20, (len(amax), 32), generator=generator)
    bits = torch.randint(0, 2**23, below.shape, generator=generator)
    bits += ((amax.unsqueeze(1) >> 23) - below).clamp(0) << 23
    bits = torch.minimum(bits, amax.unsqueeze(1))
    bits[:, 5] = amax
    bits |= torch.randint(0, 2, bits.shape, generator=generator) << 31
    found["float32 exponents"] = bits.to(torch.int32).view(torch.float32).view(-1, 64)
    random = torch.randint(-(2**31), 2**31, (512, 64), generator=generator).to(torch.int32)
    found["float32 patterns"] = random.view(torch.float32)
    zeros = torch.zeros(3, 64)
    zeros[1] = -0.0
    found["zeros"] = zeros
    return found
