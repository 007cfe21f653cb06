"""What the fused kernel is compiled for, and how a launch follows from a call. Imports neither torch nor cutlass."""

from dataclasses import dataclass, replace

from vllm_rose_plugin.kernels.all_reduce.config import PEERS_AT_ONCE, Access, Algorithm, access_of
from vllm_rose_plugin.kernels.all_reduce.layout import MAX_BLOCKS, MAX_RANKS, VECTOR
from vllm_rose_plugin.kernels.moe_combine.config import CombineConfig, choose_config

_ITEM_BYTES = 2
_THREADS = (128, 256, 512)
"""At least one for every rank, and for every copy of the epoch even if there is one block."""
_TOP_K_OF_128_REGISTERS = 10
"""With more, slots, router weights and rows of 512 threads don't fit into registers."""
_LOADS = 8
"""Under way in a thread, where there is enough work for all threads: of rows in the first half, of ranks' sums in the
second."""
_ONE_LAUNCH_BYTES = 2**20
"""Over ranks - 1. Not measured: one-shot sends the bytes to every other rank, through NVLS as well, since the switch
reads all ranks' memory for each that asks for the sum (benchmarks/model_all_reduce.py)."""


@dataclass(frozen=True)
class EpCombineConfig:
    """One kernel. A block sums the same vectors over its rank's experts and then over ranks, `threads` at a time."""

    combine: CombineConfig
    """How a rank's own part is summed; its threads and unroll are this kernel's."""
    group_size: int
    access: Access
    sums: int
    """Vectors that a thread reads from the ranks together."""

    @property
    def dtype(self) -> str:
        """Of the symmetric buffer and of the result."""
        return self.combine.out_dtype

    @property
    def algorithm(self) -> Algorithm:
        """Of the sum over ranks."""
        return Algorithm.ONE_SHOT

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.combine.threads

    @property
    def count(self) -> int:
        """Elements of a vector."""
        return self.combine.vector

    @property
    def vector_bytes(self) -> int:
        """Of a vector, in the buffer and in the result."""
        return self.count * _ITEM_BYTES


@dataclass(frozen=True)
class EpCombinePlan:
    """A launch: the kernel and its blocks. Blocks, threads and vectors are the same on all ranks."""

    config: EpCombineConfig
    blocks: int


def in_one_launch(*, num_tokens: int, hidden_size: int, group_size: int) -> bool:
    """Whether the fused kernel serves a call rather than moe_combine and all-reduce; the same on all ranks.

    Args:
        num_tokens, hidden_size: of the result.
        group_size: ranks.
    """
    return num_tokens * hidden_size * _ITEM_BYTES <= _ONE_LAUNCH_BYTES // (group_size - 1)


def choose_ep_plan(
    *,
    num_tokens: int,
    hidden_size: int,
    top_k: int,
    dtype: str,
    out_dtype: str,
    weighted: bool,
    group_size: int,
    access: Access,
    target: str,
    sm_count: int,
    shared_dtype: str | None = None,
    shared_alignment: int = 32,
    slot_alignment: int = 16,
    same_bits: bool = False,
    blocks: int | None = None,
) -> EpCombinePlan:
    """The launch for a call.

    Args:
        num_tokens: T.
        hidden_size, top_k, dtype, shared_dtype, out_dtype, weighted: see :class:`CombineConfig`.
        group_size: ranks, 2 to 72.
        access: PEERS or MULTIMEM.
        target: compile target.
        sm_count: of the device.
        shared_alignment, slot_alignment: as for :func:`choose_config`; they may differ from rank to rank.
        same_bits: as for :func:`all_reduce.config.access_of`.
        blocks: what was measured; None: as many as there is work for, up to half of the SMs.

    Raises:
        ValueError: what no kernel takes; the message names it.
    """
    if not 2 <= group_size <= MAX_RANKS:
        raise ValueError(f"a group of {group_size} ranks; it must be 2 to {MAX_RANKS}")
    if num_tokens < 1:
        raise ValueError(f"{num_tokens} tokens; it must be 1 or more in one launch")
    combine = choose_config(
        num_tokens=num_tokens,
        hidden_size=hidden_size,
        top_k=top_k,
        dtype=dtype,
        out_dtype=out_dtype,
        weighted=weighted,
        target=target,
        sm_count=sm_count,
        shared_dtype=shared_dtype,
        shared_alignment=shared_alignment,
        slot_alignment=slot_alignment,
    )
    access = access_of(Algorithm.ONE_SHOT, access=access, same_bits=same_bits)
    if access is Access.MULTIMEM:  # whose vectors have 128 bits
        combine = replace(combine, vector=VECTOR // _ITEM_BYTES, shared_bytes=min(VECTOR, combine.shared_bytes))
    vectors = num_tokens * combine.row_vectors
    most = min(MAX_BLOCKS, max(1, sm_count // 2))
    blocks = max(1, min(most, -(-vectors // _THREADS[0]) if blocks is None else blocks))
    sizes = _THREADS if top_k <= _TOP_K_OF_128_REGISTERS else _THREADS[:-1]
    threads = next((n for n in sizes if vectors <= blocks * n), sizes[-1])
    many = vectors > blocks * threads
    ranks = 1 if access is Access.MULTIMEM else min(group_size, PEERS_AT_ONCE)
    return EpCombinePlan(
        EpCombineConfig(
            combine=replace(
                combine, threads=threads, unroll=2 ** (max(1, _LOADS // top_k).bit_length() - 1) if many else 1
            ),
            group_size=group_size,
            access=access,
            sums=max(1, _LOADS * VECTOR // (ranks * combine.vector * _ITEM_BYTES)) if many else 1,
        ),
        blocks,
    )
