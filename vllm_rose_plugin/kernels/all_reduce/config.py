"""What all-reduce is compiled for, and how a launch follows from bytes and ranks. Imports neither torch nor cutlass."""

import enum
from dataclasses import dataclass

from vllm_rose_plugin.kernels.all_reduce.layout import MAX_BLOCKS, MAX_RANKS, VECTOR, ZERO_COPY_BYTES
from vllm_rose_plugin.kernels.mxfp8_quantize.config import widest_load

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""The dtypes; sums are in float32."""
PEERS_AT_ONCE = 8
"""Loads from that many peers are under way before the first is added."""

_LOADS = 16
"""Of 128 bits, under way in a thread where there is work for all: 64 registers."""
_THREADS = 512
_DECODE_THREADS = 128
_MAX_ELEMENTS = 2**31 - 2**20
"""Elements are counted in 32 bits."""
_ONE_SHOT_BYTES = 2**20
"""Not measured: one-shot sends the bytes to every other rank and has one flag less to wait for. Through NVLS as well:
the switch reads all ranks' memory for each rank that asks for the sum (benchmarks/model_all_reduce.py)."""


class Algorithm(enum.Enum):
    """Who reduces what."""

    ONE_SHOT = "one_shot"
    """Every rank reduces everything for itself: one wait."""
    TWO_SHOT = "two_shot"
    """Every rank reduces its part and stores it to all: two waits, and each byte travels twice at most."""


class Access(enum.Enum):
    """How a rank reads the sum over all ranks and stores to all of them."""

    PEERS = "peers"
    """A loop over the ranks' memory: sums in the order of ranks, so all ranks get the same bits, always."""
    MULTIMEM = "multimem"
    """NVLS: the switch adds, in an order of its own. Two-shot still gives all ranks the same bits, one-shot may not."""


@dataclass(frozen=True)
class AllReduceConfig:
    """One kernel. A thread takes vectors that lie `blocks * threads` apart, `unroll` of them at a time."""

    dtype: str
    """A key of ITEM_BYTES."""
    group_size: int
    algorithm: Algorithm
    access: Access
    copy_in: bool
    """The kernel copies its input into the symmetric buffer; always so in one-shot, where it is what makes a second
    wait needless: nobody reads the caller's tensor, so the caller may write it again at once."""
    copy_out: bool
    """Two-shot: the kernel copies the result out of the symmetric buffer. False: it is stored where it belongs."""
    threads: int
    vector_bytes: int
    """Of one access to the symmetric buffer."""
    io_bytes: int
    """Widest access that the places of input and output allow."""
    unroll: int

    @property
    def count(self) -> int:
        """Elements of a vector."""
        return self.vector_bytes // ITEM_BYTES[self.dtype]

    @property
    def parts_at_once(self) -> int:
        """Parts of two-shot that a thread copies together, as many as its registers hold."""
        return min(self.group_size, PEERS_AT_ONCE, max(1, _LOADS * VECTOR // (self.unroll * self.vector_bytes)))


@dataclass(frozen=True)
class Plan:
    """A launch: the kernel and its blocks, the same on all ranks."""

    config: AllReduceConfig
    blocks: int


@dataclass(frozen=True)
class Tuning:
    """What a measurement can decide."""

    algorithm: Algorithm
    blocks: int


def access_of(algorithm: Algorithm, *, access: Access, same_bits: bool) -> Access:
    """How a launch of a group reads and stores.

    Args:
        access: the group's.
        same_bits: whether all ranks must get the same bits. In two-shot they do, as one rank's sum goes to all; in
            one-shot every rank asks the switch for itself, so that over NVLS they loop over peers then.
    """
    return Access.PEERS if same_bits and algorithm is Algorithm.ONE_SHOT else access


def choose_tuning(
    *, num_bytes: int, group_size: int, access: Access, zero_copy_in: bool, sm_count: int, vector_bytes: int
) -> Tuning:
    """The heuristic, for calls that nobody has measured.

    Two ranks send each other the same bytes either way, so one-shot wins unless two-shot saves the copy. The blocks
    are as many as there is work for, up to a quarter of the SMs: the rest is left to what overlaps.

    Args:
        num_bytes: of the tensor.
        group_size: ranks.
        access: PEERS or MULTIMEM.
        zero_copy_in: whether two-shot can read the input where it lies.
        sm_count: of the device.
        vector_bytes: of one access.
    """
    if zero_copy_in:
        limit = ZERO_COPY_BYTES  # below, copying costs less than the second wait that does without; not measured
    elif group_size == 2 and access is Access.PEERS:
        limit = num_bytes
    else:
        limit = _ONE_SHOT_BYTES // (group_size - 1)
    two_shot = num_bytes > limit
    vectors = -(-num_bytes // vector_bytes)
    work = -(-vectors // group_size) if two_shot else vectors
    most = max(1, min(MAX_BLOCKS, sm_count // 4))
    return Tuning(
        Algorithm.TWO_SHOT if two_shot else Algorithm.ONE_SHOT, max(1, min(most, -(-work // _DECODE_THREADS)))
    )


def choose_plan(
    *,
    num_bytes: int,
    dtype: str,
    group_size: int,
    access: Access,
    zero_copy_in: bool,
    zero_copy_out: bool,
    alignment: int,
    target: str,
    sm_count: int,
    same_bits: bool = False,
    tuning: Tuning | None = None,
) -> Plan:
    """The launch for a tensor.

    Args:
        num_bytes: of the tensor, above 0.
        dtype: a key of ITEM_BYTES.
        group_size: ranks, 2 to 72.
        access: PEERS or MULTIMEM.
        zero_copy_in, zero_copy_out: whether input and output lie in the heap, in whole vectors.
        alignment: bytes of which input and output start at a multiple.
        target: compile target.
        sm_count: of the device.
        same_bits: see :func:`access_of`.
        tuning: what was measured of calls that copy their input; None: the heuristic.

    Raises:
        ValueError: what no kernel takes; the message names it.
    """
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype is {dtype}; it must be one of {', '.join(ITEM_BYTES)}")
    if not 2 <= group_size <= MAX_RANKS:
        raise ValueError(f"a group of {group_size} ranks; it must be 2 to {MAX_RANKS}")
    if not 0 < num_bytes // ITEM_BYTES[dtype] <= _MAX_ELEMENTS:
        raise ValueError(f"{num_bytes} bytes of {dtype}; it must be 1 to {_MAX_ELEMENTS} elements in one launch")

    def widest() -> int:
        # A vector of multimem has 128 bits. The heap's tensors are only known to be whole vectors of 16 bytes.
        wide = access is Access.PEERS and not (zero_copy_in or zero_copy_out)
        return widest_load(target) if wide else VECTOR

    if tuning is None or zero_copy_in:
        tuning = choose_tuning(
            num_bytes=num_bytes,
            group_size=group_size,
            access=access,
            zero_copy_in=zero_copy_in,
            sm_count=sm_count,
            vector_bytes=widest(),
        )
    access = access_of(tuning.algorithm, access=access, same_bits=same_bits)
    vector_bytes = widest()
    vectors = -(-num_bytes // vector_bytes)
    two_shot = tuning.algorithm is Algorithm.TWO_SHOT
    work = -(-vectors // group_size) if two_shot else vectors
    few = work <= tuning.blocks * _DECODE_THREADS
    loads = 4 if access is Access.MULTIMEM else min(group_size, PEERS_AT_ONCE) * (vector_bytes // VECTOR)
    return Plan(
        AllReduceConfig(
            dtype=dtype,
            group_size=group_size,
            algorithm=tuning.algorithm,
            access=access,
            copy_in=not (zero_copy_in and two_shot),
            copy_out=two_shot and not zero_copy_out,
            threads=_DECODE_THREADS if few else _THREADS,
            vector_bytes=vector_bytes,
            io_bytes=min(alignment, vector_bytes),
            unroll=1 if work <= tuning.blocks * _THREADS else max(1, _LOADS // loads),
        ),
        tuning.blocks,
    )
