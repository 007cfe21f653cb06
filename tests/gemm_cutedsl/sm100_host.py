"""Runs a compiled host function on the CPU, with stand-ins for the CUDA runtime, and keeps what it launches."""

import ctypes
import math
import re
from dataclasses import dataclass
from typing import Any

import torch

_DTYPES = {torch.uint8: (1, 8), torch.int32: (0, 32), torch.int64: (0, 64), torch.float32: (2, 32)}
_DTYPES |= {torch.bfloat16: (4, 16), torch.float16: (2, 16)}
_NONE, _INT, _TENSOR = 0, 1, 7
"""TVM FFI's type codes."""


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class _Any(ctypes.Structure):
    """TVMFFIAny."""

    _fields_ = (("code", ctypes.c_int32), ("zero", ctypes.c_int32), ("value", ctypes.c_int64))


class _Config(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
    )


@dataclass
class Launch:
    """What the driver would have got."""

    grid: tuple
    block: tuple
    shared: int
    cluster: tuple | None
    pdl: bool
    cooperative: bool
    params: list[bytes]


def aligned(shape: tuple, dtype: torch.dtype) -> torch.Tensor:
    """Zeros at a multiple of 128 bytes, as torch's allocations on a GPU are."""
    size = math.prod(shape) * dtype.itemsize
    raw = torch.zeros(size + 128, dtype=torch.uint8)
    start = -raw.data_ptr() % 128
    return raw[start : start + size].view(dtype).view(shape)


def launch_of(compiled: Any, arguments: list, sizes: list[int]) -> Launch:
    """Calls a function compiled with TVM FFI.

    Args:
        arguments: tensors on the CPU, which are said to be on a GPU, integers and None.
        sizes: bytes of the kernel's parameters.
    """
    from cutlass._mlir.execution_engine import ExecutionEngine

    seen = []

    def launch(config, _kernel, params) -> int:
        config = ctypes.cast(config, ctypes.POINTER(_Config))[0]
        held = ctypes.cast(params, ctypes.POINTER(ctypes.c_void_p))
        attributes = {}
        for i in range(config.count):  # 72 bytes each: id, padding, value
            words = (ctypes.c_uint32 * 5).from_address(config.attributes + 72 * i)
            attributes[words[0]] = tuple(words[2:5])
        seen.append(
            Launch(
                grid=tuple(config.grid),
                block=tuple(config.block),
                shared=config.shared,
                cluster=attributes.get(4),
                pdl=attributes.get(6, (0,))[0] == 1,
                cooperative=attributes.get(2, (0,))[0] == 1,
                params=[ctypes.string_at(held[i], size) for i, size in enumerate(sizes)],
            )
        )
        return 0

    engine = ExecutionEngine(compiled.ir_module, 2, [])
    pointer, keep = ctypes.c_void_p, []

    def provide(name: str, function, count: int, result=ctypes.c_int) -> None:
        callback = ctypes.CFUNCTYPE(result, *[pointer] * count)(function)
        keep.append(callback)
        engine.raw_register_runtime(name, ctypes.cast(callback, pointer))

    text = str(compiled.ir_module)
    for name, inputs in re.findall(r"llvm\.func @((?:_cu|cuda_dialect|CuteDSLRT|TVMFFI)\w+)\(([^)]*)\)", text):
        if name == "_cudaLaunchKernelEx":
            provide(name, launch, 3)
        else:
            provide(name, lambda *_: 0, len(inputs.split(",")), ctypes.c_size_t)
    entry = re.search(r"@(__tvm_ffi_cutlass\w+)\(", text)[1]
    packed = (_Any * len(arguments))()
    for i, argument in enumerate(arguments):
        if isinstance(argument, int):
            packed[i] = _Any(_INT, 0, argument)
            continue
        if argument is None:
            packed[i] = _Any(_NONE, 0, 0)
            continue
        rank = argument.dim()
        code, bits = _DTYPES[argument.dtype]
        numbers = [(ctypes.c_int64 * rank)(*numbers) for numbers in (argument.shape, argument.stride())]
        tensor = _Tensor(argument.data_ptr(), (2, 0), rank, (code, bits, 1, 0), *numbers, 0)
        keep.append((tensor, numbers))
        packed[i] = _Any(_TENSOR, 0, ctypes.addressof(tensor))
    result, status = _Any(), ctypes.c_int(-1)
    values = (pointer(None), pointer(ctypes.addressof(packed)), ctypes.c_int32(len(arguments)))
    values += (pointer(ctypes.addressof(result)), status)
    # The engine's entry takes pointers to the arguments and to the result.
    places = (pointer * len(values))(*(ctypes.addressof(value) for value in values))
    ctypes.CFUNCTYPE(None, pointer)(engine.raw_lookup(entry))(ctypes.addressof(places))
    assert status.value == 0
    assert len(seen) == 1
    return seen[0]
