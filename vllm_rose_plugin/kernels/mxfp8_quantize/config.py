"""What the quantizer is compiled for, and how that follows from a call's shapes. Imports neither torch nor cutlass."""

import math
from dataclasses import dataclass

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, Rounding, ScaleLayout
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import padded_blocks, padded_rows, permuted_size

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""The dtypes a kernel reads."""

_THREADS = 256
_DECODE_THREADS = 128
_THREADS_PER_SM = 2048
PERMUTED_VECTOR = 8
"""Elements of a thread in a permuted result: eight lanes hold the 64 that are permuted, and exchange them."""
_MAX_VECTORS = 2**31 - 2**16
"""Vectors are counted in 32 bits."""


@dataclass(frozen=True)
class UnitConfig:
    """How the work is cut up: a thread takes `unroll` vectors of `vector` neighbouring elements of the result.

    The lanes that share a block of 32 exchange its largest magnitude by shuffles.
    """

    dtype: str
    """Of the input; a key of ITEM_BYTES."""
    hidden_size: int
    """K of the result, a multiple of 32."""
    activation: Activation
    """BF16: the result isn't quantized."""
    permuted: bool
    """The result is TokenFormat.BF16_PERMUTED, and has no scales: quantized elements are multiplied by theirs."""
    layout: ScaleLayout
    """Means nothing where there are no scales; ROW_MAJOR then."""
    rounding: Rounding
    load_bytes: int
    """Width of a load; smaller than a vector where the rows aren't aligned to one."""
    vector: int
    unroll: int
    """Vectors, and so independent loads, of a thread. 32 x unroll neighbours make up a warp's work; but where scales of
    several rows are neighbours, they lie in `unroll` rows: 32 apart where the scales are tiled, else one after another.
    """
    threads: int

    @property
    def lanes_per_block(self) -> int:
        """Lanes that share one block of 32 elements."""
        return MXFP8_BLOCK // self.vector

    @property
    def row_vectors(self) -> int:
        """Vectors of a row, with what fills up the last tile of scales or the last permuted elements."""
        if self.permuted:
            return permuted_size(self.hidden_size) // self.vector
        if self.layout is not ScaleLayout.TCGEN05_128X4:
            return self.hidden_size // self.vector
        return padded_blocks(self.hidden_size // MXFP8_BLOCK) * self.lanes_per_block


@dataclass(frozen=True)
class QuantizeConfig(UnitConfig):
    """Of :mod:`mxfp8_quantize.kernel`."""


def widest_load(target: str) -> int:
    """Bytes of the widest global load of one thread: 256 bits from Blackwell on."""
    return 16 if target.startswith("sm_90") else 32


def alignment_of(*, pointer: int, row_bytes: int, limit: int) -> int:
    """The widest access in bytes, at most ``limit``, that every row's start allows."""
    both = pointer | row_bytes | limit
    return both & -both


def unit_shape(
    *,
    item_bytes: int,
    alignment: int,
    num_rows: int,
    hidden_size: int,
    layout: ScaleLayout,
    sm_count: int,
    permuted: bool = False,
    inputs: int = 1,
) -> dict[str, int]:
    """load_bytes, vector, unroll and threads for a call.

    Args:
        item_bytes: of an input element.
        alignment: widest load in bytes that the target and the rows allow.
        num_rows, hidden_size, layout, permuted: of the result.
        sm_count: of the device.
        inputs: elements that make one element of the result.

    Raises:
        ValueError: the result is too large for one launch.
    """
    wide = alignment == 32 and not permuted
    vector = PERMUTED_VECTOR if permuted else math.gcd((32 if wide else 16) // item_bytes, hidden_size)
    rows = padded_rows(num_rows) if layout is ScaleLayout.TCGEN05_128X4 else num_rows
    vectors = rows * -(-(permuted_size(hidden_size) if permuted else hidden_size) // vector)
    if vectors > _MAX_VECTORS:
        raise ValueError(
            f"{num_rows} rows of {hidden_size} are {vectors} vectors of {vector}, more than the {_MAX_VECTORS} of one "
            "launch: quantize fewer rows at a time"
        )
    # Few vectors: one for each thread, so that all of them are under way at once. Many: several loads in each thread.
    few = vectors <= sm_count * _THREADS_PER_SM
    unroll = 1 if few else (2 if wide and item_bytes == 2 else 4) // inputs
    return {
        "load_bytes": min(alignment, vector * item_bytes),
        "vector": vector,
        "unroll": unroll,
        "threads": _DECODE_THREADS if few else _THREADS,
    }


def choose_config(
    *,
    dtype: str,
    num_rows: int,
    hidden_size: int,
    layout: ScaleLayout,
    rounding: Rounding,
    alignment: int,
    sm_count: int,
    activation: Activation = Activation.MXFP8,
    permuted: bool = False,
) -> QuantizeConfig:
    """The config for a call; arguments as in :func:`unit_shape` and :class:`UnitConfig`."""
    shape = unit_shape(
        item_bytes=ITEM_BYTES[dtype],
        alignment=alignment,
        num_rows=num_rows,
        hidden_size=hidden_size,
        layout=layout,
        sm_count=sm_count,
        permuted=permuted,
    )
    return QuantizeConfig(
        dtype=dtype,
        hidden_size=hidden_size,
        activation=activation,
        permuted=permuted,
        layout=layout,
        rounding=rounding,
        **shape,
    )


def warm_configs(
    *,
    dtype: str,
    hidden_size: int,
    layout: ScaleLayout,
    rounding: Rounding,
    target: str,
    sm_count: int,
    activation: Activation = Activation.MXFP8,
    permuted: bool = False,
) -> tuple[QuantizeConfig, ...]:
    """Every config that calls with aligned rows can need: compile these before the first request."""
    return tuple(
        choose_config(
            dtype=dtype,
            num_rows=num_rows,
            hidden_size=hidden_size,
            layout=layout,
            rounding=rounding,
            alignment=widest_load(target),
            sm_count=sm_count,
            activation=activation,
            permuted=permuted,
        )
        for num_rows in (1, _MAX_VECTORS // permuted_size(hidden_size))
    )
