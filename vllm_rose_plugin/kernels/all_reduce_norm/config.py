"""What the fused kernel is compiled for, and how a launch follows from a call. Imports neither torch nor cutlass."""

from dataclasses import dataclass

from vllm_rose_plugin.kernels.all_reduce.config import (
    ITEM_BYTES,
    PEERS_AT_ONCE,
    Access,
    Algorithm,
    Tuning,
    access_of,
    choose_tuning,
)
from vllm_rose_plugin.kernels.all_reduce.layout import MAX_BLOCKS, MAX_RANKS, VECTOR
from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, Rounding, TokenFormat
from vllm_rose_plugin.kernels.mxfp8_quantize.config import widest_load

DTYPES = ("bfloat16", "float16")
ROW_MULTIPLE = 128
"""Of hidden_size: whole tiles of scales, whole permuted runs."""
MAX_HIDDEN_SIZE = 8192
"""Elements of a row that a block's registers hold with its residual, whatever the number of ranks."""

_MOST_THREADS = 512
_LEAST_THREADS = 128  # a thread for every rank, and for every copy of the epoch even if there is one block
_LOADS = 8
"""Of 128 bits, under way in a thread: half of what all-reduce has, since the residual takes registers too."""
_MOST_ROWS = 4
_MAX_ROWS = 2**22


@dataclass(frozen=True)
class AllReduceNormConfig:
    """One kernel. A block takes whole rows, `rows` at a time; a thread takes vectors that lie `threads` apart."""

    dtype: str
    """One of DTYPES, of everything that isn't quantized."""
    hidden_size: int
    group_size: int
    algorithm: Algorithm
    access: Access
    copy_in: bool
    """The kernel copies its input into the symmetric buffer; False only in two-shot, as in all-reduce."""
    token_format: TokenFormat | None
    """Of the normalized rows. None: in dtype, as they are."""
    activation: Activation
    """What BF16_PERMUTED holds; MXFP8 in the formats that have scales, BF16 where there is no format."""
    rounding: Rounding
    threads: int
    vector_bytes: int
    """Of every access to rows."""
    rows: int

    @property
    def count(self) -> int:
        """Elements of a vector."""
        return self.vector_bytes // ITEM_BYTES[self.dtype]

    @property
    def row_vectors(self) -> int:
        """Vectors of a row."""
        return self.hidden_size // self.count

    @property
    def per_thread(self) -> int:
        """Vectors of a row that a thread holds."""
        return -(-self.row_vectors // self.threads)

    @property
    def at_once(self) -> int:
        """Vectors that a thread reads from the ranks together, as many as its registers hold."""
        ranks = 1 if self.access is Access.MULTIMEM else min(self.group_size, PEERS_AT_ONCE)
        return max(1, _LOADS * VECTOR // (ranks * self.vector_bytes))

    @property
    def lanes_per_block(self) -> int:
        """Lanes that share one MXFP8 block."""
        return MXFP8_BLOCK // self.count


@dataclass(frozen=True)
class NormPlan:
    """A launch: the kernel and its blocks, the same on all ranks."""

    config: AllReduceNormConfig
    blocks: int


def choose_norm_plan(
    *,
    num_rows: int,
    hidden_size: int,
    dtype: str,
    group_size: int,
    access: Access,
    zero_copy_in: bool,
    alignment: int,
    target: str,
    sm_count: int,
    token_format: TokenFormat | None = None,
    activation: Activation = Activation.MXFP8,
    rounding: Rounding = Rounding.RCEIL,
    same_bits: bool = False,
    tuning: Tuning | None = None,
) -> NormPlan:
    """The launch for a call.

    Args:
        num_rows, hidden_size, dtype: of the input, ``[T, H]``.
        group_size: ranks, 2 to 72.
        access: PEERS or MULTIMEM.
        zero_copy_in: whether the input lies in the heap.
        alignment: bytes of which all rows start at a multiple.
        target: compile target.
        sm_count: of the device.
        token_format, activation, rounding: of the result.
        same_bits: as for :func:`all_reduce.config.access_of`.
        tuning: what was measured; None: the heuristic of all-reduce decides the algorithm, and there is a block for
            each row that a rank reduces, up to half of the SMs.

    Raises:
        ValueError: what no kernel takes; the message names it.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; it must be one of {', '.join(DTYPES)}")
    if not 2 <= group_size <= MAX_RANKS:
        raise ValueError(f"a group of {group_size} ranks; it must be 2 to {MAX_RANKS}")
    if hidden_size % ROW_MULTIPLE or not 0 < hidden_size <= MAX_HIDDEN_SIZE:
        raise ValueError(
            f"hidden_size is {hidden_size}; it must be a multiple of {ROW_MULTIPLE} up to {MAX_HIDDEN_SIZE}"
        )
    if not 0 < num_rows <= _MAX_ROWS:
        raise ValueError(f"{num_rows} rows; it must be 1 to {_MAX_ROWS} in one launch")
    if alignment < VECTOR:
        raise ValueError(f"rows that start at a multiple of {alignment} bytes; it must be {VECTOR}: copy them")
    if token_format is None:
        activation = Activation.BF16
    elif activation is not Activation.MXFP8 and token_format is not TokenFormat.BF16_PERMUTED:
        raise ValueError(f"{token_format} holds quantized tokens only, got activation={activation.value!r}")
    num_bytes = num_rows * hidden_size * ITEM_BYTES[dtype]
    if tuning is None:
        chosen = choose_tuning(
            num_bytes=num_bytes,
            group_size=group_size,
            access=access,
            zero_copy_in=zero_copy_in,
            sm_count=sm_count,
            vector_bytes=VECTOR,  # which is about blocks
        ).algorithm
        blocks = MAX_BLOCKS
    else:
        chosen, blocks = tuning.algorithm, tuning.blocks
    access = access_of(chosen, access=access, same_bits=same_bits)
    narrow = access is Access.MULTIMEM or token_format is TokenFormat.BF16_PERMUTED
    vector_bytes = VECTOR if narrow else min(widest_load(target), alignment)
    two_shot = chosen is Algorithm.TWO_SHOT
    most = -(-num_rows // group_size) if two_shot else num_rows
    blocks = max(1, min(blocks, most, MAX_BLOCKS, sm_count // 2 or 1))
    row_vectors = hidden_size * ITEM_BYTES[dtype] // vector_bytes
    # The most threads that leave none without work in its last vector, where there are several.
    per_thread = -(-row_vectors // _MOST_THREADS)
    threads = max(_LEAST_THREADS, -(-row_vectors // per_thread // 32) * 32)
    wide = vector_bytes // VECTOR
    ranks = 1 if access is Access.MULTIMEM else min(group_size, PEERS_AT_ONCE)
    return NormPlan(
        AllReduceNormConfig(
            dtype=dtype,
            hidden_size=hidden_size,
            group_size=group_size,
            algorithm=chosen,
            access=access,
            copy_in=not (zero_copy_in and two_shot),
            token_format=token_format,
            activation=activation,
            rounding=rounding,
            threads=threads,
            vector_bytes=vector_bytes,
            rows=max(1, min(_MOST_ROWS // (per_thread**2 * wide), 2 * _LOADS // (ranks * wide)))
            if most > blocks
            else 1,
        ),
        blocks,
    )
