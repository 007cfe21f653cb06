"""Tensors in device memory that torch didn't allocate, and how many of them still live."""

import math
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class BufferInUseError(RuntimeError):
    """Tensors still lie in the buffer that is to be freed."""


class Window:
    """Device memory as torch takes it over: the CUDA Array Interface, version 3 (Numba's documentation)."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


class Windows:
    """The tensors in one buffer."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[Window] = weakref.WeakSet()

    def tensor(
        self, *, address: int, size: int, device: int, shape: tuple[int, ...], dtype: "torch.dtype", offset: int = 0
    ) -> "torch.Tensor":
        """A tensor in a range of device memory; the memory isn't cleared.

        Args:
            address, size: the range; its size in bytes.
            device: ordinal of the GPU.
            shape, dtype: any.
            offset: where it starts in the range, bytes; a multiple of the element's size.

        Raises:
            ValueError: it doesn't fit, or isn't aligned.
        """
        wanted = math.prod(shape) * dtype.itemsize
        if offset < 0 or offset + wanted > size:
            raise ValueError(f"offset={offset} with {wanted} bytes of {shape} {dtype} must lie within size={size}")
        if offset % dtype.itemsize:
            raise ValueError(f"offset={offset} must be a multiple of {dtype.itemsize}, the bytes of {dtype}")
        window = Window(address + offset, wanted)
        self._alive.add(window)
        return as_bytes(window, device).view(dtype).view(shape)

    def check_none(self, what: str) -> None:
        """Refuse to go on while a tensor lives.

        Args:
            what: what is to be done then, such as "free".

        Raises:
            BufferInUseError: some do.
        """
        if self._alive:
            raise BufferInUseError(f"{len(self._alive)} tensors still lie in the buffer: drop them, then {what} it")


def as_bytes(window: Window, device: int) -> "torch.Tensor":
    """The memory as a tensor of bytes, which keeps the window alive for as long as its storage lives."""
    import torch

    return torch.as_tensor(window, device=f"cuda:{device}")
