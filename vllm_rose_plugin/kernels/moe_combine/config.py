"""What combining is compiled for, and how that follows from a call's shapes. Imports neither torch nor cutlass."""

import math
from dataclasses import dataclass

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK
from vllm_rose_plugin.kernels.mxfp8_quantize.config import widest_load

DTYPES = ("bfloat16", "float16")
"""Of the experts' results, of the shared expert's, and of the sum."""
MAX_TOP_K = 16

_ITEM_BYTES = 2
_MOST_BYTES_IN_FLIGHT = 256
"""Of a thread; as many as 64 registers hold."""
_FEWEST_LOADS = 8
"""Under way in a thread, where there is enough work for all threads."""
_THREADS = 256
_DECODE_THREADS = 128
_THREADS_PER_SM = 1024
_MAX_VECTORS = 2**31 - 2**16
"""Vectors are counted in 32 bits."""


@dataclass(frozen=True)
class CombineConfig:
    """How the work is cut up: a thread sums `unroll` vectors of `vector` neighbouring elements of the result.

    All top_k loads of all its vectors are under way before the first is used.
    """

    hidden_size: int
    """H, a multiple of 32."""
    top_k: int
    dtype: str
    """Of the experts' results; one of DTYPES."""
    shared_dtype: str | None
    """Of the shared expert's output; None: there is none."""
    out_dtype: str
    weighted: bool
    """Whether router weights are multiplied here."""
    vector: int
    """A power of two that divides H; its elements are one load."""
    shared_bytes: int
    """Widest load from the shared expert's output, whose rows may lie anywhere."""
    slot_bytes: int
    """Widest load from slots and router weights."""
    unroll: int
    threads: int

    @property
    def row_vectors(self) -> int:
        """Vectors of a row."""
        return self.hidden_size // self.vector

    @property
    def block_vectors(self) -> int:
        """Vectors of a thread block."""
        return self.threads * self.unroll


def choose_config(
    *,
    num_tokens: int,
    hidden_size: int,
    top_k: int,
    dtype: str,
    out_dtype: str,
    weighted: bool,
    target: str,
    sm_count: int,
    shared_dtype: str | None = None,
    shared_alignment: int = 32,
    slot_alignment: int = 16,
) -> CombineConfig:
    """The config for a call.

    Args:
        num_tokens: T.
        hidden_size, top_k, dtype, shared_dtype, out_dtype, weighted: see :class:`CombineConfig`.
        target: compile target.
        sm_count: of the device.
        shared_alignment: bytes of which every row of the shared expert's output starts at a multiple.
        slot_alignment: bytes of which slots and router weights start at a multiple.

    Raises:
        ValueError: sizes or dtypes that the kernel doesn't take; the message names them.
    """
    if hidden_size < MXFP8_BLOCK or hidden_size % MXFP8_BLOCK:
        raise ValueError(f"H is {hidden_size}; it must be a multiple of {MXFP8_BLOCK}")
    if not 1 <= top_k <= MAX_TOP_K:
        raise ValueError(f"top_k is {top_k}; it must be 1 to {MAX_TOP_K}")
    for name, value in (("y", dtype), ("shared", shared_dtype or dtype), ("out", out_dtype)):
        if value not in DTYPES:
            raise ValueError(f"{name} is {value}; it must be one of {', '.join(DTYPES)}")
    load_bytes = widest_load(target)
    while load_bytes * top_k > _MOST_BYTES_IN_FLIGHT:
        load_bytes //= 2
    vector = math.gcd(load_bytes // _ITEM_BYTES, hidden_size)
    vectors = num_tokens * (hidden_size // vector)
    if vectors > _MAX_VECTORS:
        raise ValueError(
            f"{num_tokens} tokens of {hidden_size} are {vectors} vectors of {vector}, more than the {_MAX_VECTORS} of "
            "one launch: combine fewer tokens at a time"
        )
    # Few vectors: one for each thread, so that all of them are under way at once. Many: several loads in each thread.
    few = vectors <= sm_count * _THREADS_PER_SM
    unroll = 1 if few else 2 ** (max(1, _FEWEST_LOADS // top_k).bit_length() - 1)
    return CombineConfig(
        hidden_size=hidden_size,
        top_k=top_k,
        dtype=dtype,
        shared_dtype=shared_dtype,
        out_dtype=out_dtype,
        weighted=weighted,
        vector=vector,
        shared_bytes=min(vector * _ITEM_BYTES, shared_alignment) if shared_dtype else vector * _ITEM_BYTES,
        slot_bytes=math.gcd(4 * top_k, min(slot_alignment, 16)),
        unroll=unroll,
        threads=_DECODE_THREADS if few else _THREADS,
    )


def warm_configs(
    *,
    hidden_size: int,
    top_k: int,
    dtype: str,
    out_dtype: str,
    weighted: bool,
    target: str,
    sm_count: int,
    shared_dtype: str | None = None,
) -> tuple[CombineConfig, ...]:
    """Every config that calls with aligned operands can need: compile these before the first request."""
    return tuple(
        dict.fromkeys(
            choose_config(
                num_tokens=num_tokens,
                hidden_size=hidden_size,
                top_k=top_k,
                dtype=dtype,
                out_dtype=out_dtype,
                weighted=weighted,
                target=target,
                sm_count=sm_count,
                shared_dtype=shared_dtype,
            )
            for num_tokens in (1, 2**30 // hidden_size)
        )
    )
