"""Which algorithm and how many blocks serve which size: measured on the ranks themselves, kept on disk.

Every rank times every candidate, the slowest rank's time counts, and all ranks see all times: so all choose alike, as
they must, since ranks with different numbers of blocks would wait for each other for ever.
"""

from vllm_rose_plugin.kernels.all_reduce.config import Algorithm, Tuning
from vllm_rose_plugin.kernels.all_reduce.layout import MAX_BLOCKS
from vllm_rose_plugin.kernels.timed_table import TableKind, TimedTable

SIZES = tuple(2**i for i in range(13, 27))
"""Bytes that are measured: 8 KiB to 64 MiB."""
BLOCKS = (1, 2, 4, 8, 16, 24, 36, 48, 64)

Table = TimedTable[Tuning | None]
"""Sizes in bytes, and what was fastest at each; None: what the caller does without a launch of its own kind."""


def sizes_up_to(max_bytes: int) -> list[int]:
    """What is measured for tensors of at most `max_bytes`: that size too, which full steps of a prefill have."""
    largest = min(max_bytes, SIZES[-1])
    return [*(size for size in SIZES if size < largest), largest] if largest > 1 else []


def candidates(*, sm_count: int) -> tuple[Tuning, ...]:
    """What is tried at every size; at most half of the SMs."""
    return tuple(Tuning(algorithm, blocks) for algorithm in Algorithm for blocks in BLOCKS if blocks <= sm_count // 2)


def _tuning(kind: str | None, blocks: int) -> Tuning | None:
    """A launch of more blocks than there are flags for would write past them, whoever wrote the file."""
    if kind is None:
        return None
    if blocks not in range(1, MAX_BLOCKS + 1):
        raise ValueError(f"blocks={blocks} must be from 1 to {MAX_BLOCKS}")
    return Tuning(Algorithm(kind), blocks)


KIND = TableKind(
    folder="all_reduce",
    unit="bytes",
    what="all-reduce",
    fields=lambda tuning: (tuning.algorithm.value, tuning.blocks) if tuning else (None, 0),
    tuning=_tuning,
)
