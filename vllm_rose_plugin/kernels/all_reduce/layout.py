"""Where everything lies in a rank's part of the symmetric buffer, and who does which piece of the work.

The functions take Python's integers on the host and the DSL's on the device, so that what a test counts is what the
kernel does. Imports neither torch nor cutlass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_RANKS = 72
"""Of a group; each has a thread in every block that signals it and waits for it."""
MAX_BLOCKS = 128
"""Of a launch."""
PHASES = ("input", "result")
"""What a flag says: the peer's block has its input in place; the peer's block has stored its sums everywhere."""

WORD = 8
"""Bytes of a flag and of an epoch. With 32 bits a flag that no launch used for a day would look new again."""
VECTOR = 16
"""Bytes that a zero-copy tensor's place and size are multiples of."""
ZERO_COPY_BYTES = 2**16
"""Up to here zero-copy tensors are copied all the same, so a staging buffer has at least this size."""
_LINE = 128


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def flag_offset(phase: Any, block: Any, peer: Any, group_size: int) -> Any:
    """Byte offset of the flag that `peer` writes for one block: each word has one writer and one reader."""
    return ((phase * MAX_BLOCKS + block) * group_size + peer) * WORD


def state_offset(group_size: int) -> int:
    """Byte offset of MAX_BLOCKS copies of the epoch and, behind them, whether this rank gave up; nobody else's."""
    return _round_up(len(PHASES) * MAX_BLOCKS * group_size * WORD, _LINE)


def part_vectors(vectors: Any, group_size: int, vector_bytes: int) -> Any:
    """Vectors that one rank reduces in two-shot, but for the last ranks: whole lines, shared by no two ranks."""
    line = _LINE // vector_bytes
    return (vectors + (group_size * line - 1)) // (group_size * line) * line


def part_of(owner: Any, vectors: Any, group_size: int, vector_bytes: int, least: Callable = min) -> tuple[Any, Any]:
    """(first, count) of the vectors that `owner` reduces in two-shot; `least` is the minimum of two numbers."""
    size = part_vectors(vectors, group_size, vector_bytes)
    first = least(owner * size, vectors)
    return first, least(size, vectors - first)


@dataclass(frozen=True)
class Layout:
    """A rank's part: flags, state, two staging buffers, the heap of zero-copy tensors. The same on all ranks."""

    group_size: int
    max_bytes: int
    """Largest tensor that a kernel must be able to copy."""
    heap_bytes: int

    @property
    def capacity(self) -> int:
        """Bytes of one staging buffer."""
        return _round_up(max(self.max_bytes, ZERO_COPY_BYTES), 2 * _LINE)

    @property
    def staging(self) -> int:
        """Byte offset of the buffer for even epochs, then comes the one for odd epochs. Zero what lies before."""
        return _round_up(state_offset(self.group_size) + (MAX_BLOCKS + 1) * WORD, 2 * _LINE)

    @property
    def heap(self) -> int:
        """Byte offset of the heap."""
        return self.staging + 2 * self.capacity

    @property
    def size(self) -> int:
        """Bytes of the part."""
        return self.heap + _round_up(self.heap_bytes, 2 * _LINE)


class Heap:
    """Gives out pieces of the heap, one behind the other, and takes none back.

    The ranks' pieces must lie at the same offsets. When a tensor dies depends on each rank's garbage collector, so a
    heap that used space again would come apart; one that doesn't only needs the same requests in the same order.
    """

    def __init__(self, layout: Layout):
        self._next, self._end = layout.heap, layout.size
        self._heap_bytes = layout.heap_bytes

    def take(self, size: int) -> int:
        """Byte offset of `size` more bytes, at a multiple of 128.

        Raises:
            MemoryError: the heap is too small; the message says by how much.
        """
        start, end = self._next, self._next + _round_up(max(size, 1), _LINE)
        if end > self._end:
            raise MemoryError(
                f"{size} bytes of zero-copy tensor asked for, {self._end - start} of heap_bytes={self._heap_bytes} are "
                f"left: heap_bytes must be at least {self._heap_bytes + end - self._end}"
            )
        self._next = end
        return start
