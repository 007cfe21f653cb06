"""Global loads and stores of 16 to 256 bits, with a hint to the cache.

The address must be aligned to the access. 256 bits is one instruction from Blackwell on and two of 128 bits on Hopper.
"""

import enum

import cutlass.cute as cute
from cutlass import Uint32
from cutlass.cute.nvgpu import CopyG2ROp, CopyR2GOp
from cutlass.cute.nvgpu.common import CacheEvictionPriority


class CacheHint(enum.Enum):
    """What L1 should do with a line after the access."""

    NORMAL = CacheEvictionPriority.EVICT_NORMAL
    EVICT_FIRST = CacheEvictionPriority.EVICT_FIRST
    """Read or written once."""
    EVICT_LAST = CacheEvictionPriority.EVICT_LAST
    """Read again by many blocks."""
    NO_ALLOCATE = CacheEvictionPriority.NO_ALLOCATE
    """Don't displace what L1 holds."""


def pointer_to(dtype, address, align: int):
    """Global memory at an address, Int64."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)


def load_global(pointer, count: int, *, max_bits: int = 128, hint: CacheHint = CacheHint.NORMAL):
    """Loads `count` consecutive elements.

    Args:
        pointer: global memory, aligned to the access: min(max_bits, all of the elements).
        count: a power of two.
        max_bits: widest access, at most 256.
        hint: for L1.

    Returns:
        Register tensor (count,).
    """
    fragment = cute.make_rmem_tensor((count,), pointer.dtype)
    bits = access_bits(count, pointer.dtype.width, max_bits)
    atom = cute.make_copy_atom(CopyG2ROp(), pointer.dtype, num_bits_per_copy=bits, l1c_evict_priority=hint.value)
    cute.copy(atom, *_split(cute.make_tensor(pointer, cute.make_layout((count,))), fragment, bits))
    return fragment


def store_global(pointer, fragment, *, max_bits: int = 128, hint: CacheHint = CacheHint.NORMAL) -> None:
    """Stores a register tensor to consecutive elements; arguments as in `load_global`."""
    count = cute.size(fragment)
    bits = access_bits(count, pointer.dtype.width, max_bits)
    atom = cute.make_copy_atom(CopyR2GOp(), pointer.dtype, num_bits_per_copy=bits, l1c_evict_priority=hint.value)
    cute.copy(atom, *_split(fragment, cute.make_tensor(pointer, cute.make_layout((count,))), bits))


def access_bits(count: int, element_bits: int, max_bits: int) -> int:
    """Width of one access to `count` elements: all of them, or max_bits."""
    if max_bits not in (16, 32, 64, 128, 256):
        raise ValueError(f"an access of at most {max_bits} bits; it must be 16, 32, 64, 128 or 256")
    if count < 1 or count & (count - 1):
        raise ValueError(f"an access to {count} elements; it must be a power of two")
    return max(element_bits, min(max_bits, count * element_bits))


def zero_after(fragments: list, number):
    """Uint32 0 that is known once all loads have come.

    Whatever takes part in it can't be computed before; else the compiler starts the last loads when their turn to be
    used comes, which saves registers, and they wait for memory one after another.

    Args:
        fragments: of `load_global`, of at least 32 bits.
        number: an Int32 that is never negative, which the compiler can't know.
    """
    mixed = Uint32(0)
    for fragment in fragments:
        words = cute.recast_tensor(fragment, Uint32)
        for i in range(0, cute.size(words), 4):  # of narrower loads there would be too many
            mixed = mixed ^ words[i]
    return mixed & Uint32(number >> 31)


def prefetch_l2(pointer) -> None:
    """Starts bringing the line that holds pointer into L2. No load: it never reads a stale value."""
    cute.arch.prefetch(pointer.to_llvm_ptr(), cache_level="L2")


def _split(source, target, bits: int):
    """Both tensors as (elements of one access, accesses)."""
    each = bits // source.element_type.width
    return cute.logical_divide(source, cute.make_layout((each,))), cute.logical_divide(
        target, cute.make_layout((each,))
    )
