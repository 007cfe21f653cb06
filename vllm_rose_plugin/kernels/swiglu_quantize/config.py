"""What SwiGLU is compiled for, and how that follows from a call's shapes. Imports neither torch nor cutlass."""

from dataclasses import dataclass

from vllm_rose_plugin.kernels.contracts import Activation, Rounding, ScaleLayout
from vllm_rose_plugin.kernels.mxfp8_quantize.config import ITEM_BYTES, UnitConfig, unit_shape, widest_load


@dataclass(frozen=True)
class SwigluConfig(UnitConfig):
    """Of :mod:`swiglu_quantize.kernel`; `hidden_size` is I. Unquantized, `layout` and `rounding` mean nothing."""

    limit: float | None
    """Gate is clamped from above, up from both sides."""


def choose_config(
    *,
    dtype: str,
    num_rows: int,
    intermediate_size: int,
    activation: Activation,
    layout: ScaleLayout,
    rounding: Rounding,
    limit: float | None,
    alignment: int,
    sm_count: int,
    permuted: bool = False,
) -> SwigluConfig:
    """The config for a call.

    Args:
        dtype: of the input, a key of ITEM_BYTES.
        num_rows, intermediate_size: of the result.
        activation, layout, rounding, limit: as in the reference; ScaleLayout.ROW_MAJOR where there are no scales.
        permuted: the result is TokenFormat.BF16_PERMUTED.
        alignment: widest load in bytes that the target, the rows, and the distance of up from gate allow.
        sm_count: of the device.

    Raises:
        ValueError: the result is too large for one launch.
    """
    shape = unit_shape(
        item_bytes=ITEM_BYTES[dtype],
        alignment=alignment,
        num_rows=num_rows,
        hidden_size=intermediate_size,
        layout=layout,
        sm_count=sm_count,
        permuted=permuted,
        inputs=2,
    )
    return SwigluConfig(
        dtype=dtype,
        hidden_size=intermediate_size,
        activation=activation,
        permuted=permuted,
        layout=layout,
        rounding=rounding,
        limit=None if limit is None else float(limit),
        **shape,
    )


def warm_configs(
    *,
    dtype: str,
    intermediate_size: int,
    activation: Activation,
    layout: ScaleLayout,
    rounding: Rounding,
    limit: float | None,
    target: str,
    sm_count: int,
    permuted: bool = False,
) -> tuple[SwigluConfig, ...]:
    """Every config that calls with aligned rows can need: compile these before the first request."""
    row_bytes = intermediate_size * ITEM_BYTES[dtype]
    return tuple(
        choose_config(
            dtype=dtype,
            num_rows=num_rows,
            intermediate_size=intermediate_size,
            activation=activation,
            layout=layout,
            rounding=rounding,
            limit=limit,
            alignment=min(widest_load(target), row_bytes & -row_bytes),
            sm_count=sm_count,
            permuted=permuted,
        )
        for num_rows in (1, 2**30 // intermediate_size)
    )
