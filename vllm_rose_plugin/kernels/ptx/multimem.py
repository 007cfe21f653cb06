"""Accesses to multicast memory (NVLS): the switch reduces a load over all GPUs of the group, or sends a store to all.

Every pointer here is an address of a multicast mapping; on ordinary memory these instructions fault. They are compiled
and their machine code is read by the tests; kernels that use them are tested with a loop over the peers in their place.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32
from cutlass.utils import distributed

_PTX_TYPES = {BFloat16: "bf16x2", Float16: "f16x2", Float32: "f32"}


def multimem_load_sum(pointer, dtype):
    """Loads 128 bits summed over the group, 16-bit types with a float32 accumulator.

    Returns:
        Four Int32 that hold 8 bf16, 8 fp16 or 4 fp32.
    """
    _check(dtype)
    return distributed.multimem_ld_reduce(pointer, dtype=dtype, num_elements=128 // dtype.width)


def multimem_store(pointer, words) -> None:
    """Stores 32, 64 or 128 bits (1, 2 or 4 Int32) to every GPU of the group."""
    distributed.multimem_st(pointer, *words)


def multimem_red_add(pointer, words, dtype) -> None:
    """Adds 128 bits (four Int32 that hold 8 bf16, 8 fp16 or 4 fp32) to memory of every GPU of the group, relaxed."""
    _check(dtype)
    instruction = f"multimem.red.relaxed.sys.global.add.v4.{_PTX_TYPES[dtype]}"
    cute.arch.inline_ptx(
        instruction + " [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[pointer, *words],
    )


def multimem_signal(pointer, *, scope: str = "sys") -> None:
    """Adds 1 to an int32 flag of every GPU of the group, with release order."""
    if scope not in ("gpu", "sys"):
        raise ValueError(f"memory scope {scope!r}; it must be 'gpu' or 'sys'")
    distributed.multimem_red_add1(lock_ptr=pointer, order="release", scope=scope)


def _check(dtype) -> None:
    if dtype not in _PTX_TYPES:
        raise ValueError(f"multimem on {dtype}; it must be BFloat16, Float16 or Float32")
