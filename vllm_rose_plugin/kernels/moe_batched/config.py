"""What batched experts launch: the kernel that prepares tokens, and both GEMMs. Imports neither torch nor cutlass."""

from dataclasses import dataclass
from typing import Any

from vllm_rose_plugin.kernels.contracts import Activation, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm.config import Epilogue
from vllm_rose_plugin.kernels.gemm.plan import Call, plan, token_format_of
from vllm_rose_plugin.kernels.moe_dispatch import config as dispatch
from vllm_rose_plugin.kernels.moe_dispatch.config import DispatchConfig
from vllm_rose_plugin.kernels.mxfp8_quantize.config import widest_load

QUANTIZED = "mxfp8"
"""As the dtype of tokens: they arrive as codes and scales."""


@dataclass(frozen=True)
class LayerShape:
    """What all calls of a layer have in common."""

    target: str
    hidden_size: int
    """H."""
    intermediate_size: int
    """I, of this rank."""
    num_local_experts: int
    """E_local."""
    activation: Activation


@dataclass(frozen=True)
class MaskedConfig:
    """Constants of a kernel in front of a masked GEMM; see ``masked.py``."""

    rows: DispatchConfig
    """Of what it writes."""
    swiglu: bool
    """What it reads is gate, then up."""


def token_format_for(shape: LayerShape, *, expected_rows: int, quantized: bool) -> TokenFormat:
    """The format in which tokens are brought to the GEMMs.

    Args:
        shape: of the layer.
        expected_rows: tokens to expect in all experts.
        quantized: they arrive as codes and scales, which on sm_90 means W8A8 however many they are.

    Raises:
        ValueError: the target, or tokens that arrive quantized, don't go with the activation.
    """
    if quantized and shape.activation is not Activation.MXFP8:
        raise ValueError(
            f"tokens that arrive quantized can't be served with activation={shape.activation.value!r}: set "
            'ROSE_ACTIVATION=mxfp8 or --additional-config \'{"rose": {"activation": "mxfp8"}}\''
        )
    if quantized and shape.target.startswith("sm_90"):
        return TokenFormat.MXFP8_FP32_SCALES
    return token_format_of(
        target=shape.target,
        activation=shape.activation,
        num_groups=shape.num_local_experts,
        num_rows=expected_rows,
    )


def expected_rows_of(*, num_tokens: int, top_k: int, num_local_experts: int, num_experts: int, num_rows: int) -> int:
    """Rows to expect in the local experts if experts are chosen evenly.

    Args:
        num_tokens: of all ranks that send tokens.
        top_k: experts of a token.
        num_local_experts, num_experts: of this rank, and of all.
        num_rows: E_local * M, which is never exceeded.
    """
    return max(1, min(num_rows, -(-num_tokens * top_k * num_local_experts // num_experts)))


def tokens_config(
    shape: LayerShape, *, dtype: str, token_format: TokenFormat, rounding: Rounding, load_alignment: int
) -> DispatchConfig:
    """The kernel that prepares tokens: that of a dispatch to one expert each, whatever the number of tokens.

    Args:
        shape: of the layer.
        dtype: of x, "mxfp8" where it arrives quantized.
        token_format: what the GEMMs read.
        rounding: how x is quantized.
        load_alignment: widest load in bytes that the target and the rows of x allow.

    Raises:
        ValueError: a value outside of its range; the message names it.
    """
    return dispatch.choose_config(
        dtype=dtype,
        num_tokens=1,
        hidden_size=shape.hidden_size,
        top_k=1,
        num_experts=shape.num_local_experts,
        alignment=1,
        token_format=token_format,
        activation=shape.activation,
        rounding=rounding,
        weighted=False,
        load_alignment=load_alignment,
    )


def gemm_calls(
    shape: LayerShape, *, sm_count: int, token_format: TokenFormat, rounding: Rounding, out_dtype: str
) -> tuple[Call, Call]:
    """w13 with SwiGLU, and w2."""
    common: dict[str, Any] = {
        "target": shape.target,
        "sm_count": sm_count,
        "num_groups": shape.num_local_experts,
        "token_format": token_format,
    }
    w13 = Call(
        n=2 * shape.intermediate_size,
        k=shape.hidden_size,
        epilogue=Epilogue.SWIGLU,
        out_format=token_format,
        activation=shape.activation,
        rounding=rounding,
        early_counts=False,
        **common,
    )
    return w13, Call(n=shape.hidden_size, k=shape.intermediate_size, out_dtype=out_dtype, early_counts=True, **common)


def call_configs(
    shape: LayerShape, *, max_tokens: int, expected_rows: int, sm_count: int, dtype: str, rounding: Rounding
) -> tuple[Any, ...]:
    """The configs of all kernels that a call with unquantized tokens launches.

    Args:
        shape: of the layer.
        max_tokens: M, rows of an expert.
        expected_rows: tokens to expect in all experts.
        sm_count: of the device.
        dtype: of x and of the result.
        rounding: of the tokens and of SwiGLU's result.
    """
    token_format = token_format_for(shape, expected_rows=expected_rows, quantized=False)
    tokens = tokens_config(
        shape, dtype=dtype, token_format=token_format, rounding=rounding, load_alignment=widest_load(shape.target)
    )
    calls = gemm_calls(shape, sm_count=sm_count, token_format=token_format, rounding=rounding, out_dtype=dtype)
    rows = shape.num_local_experts * max_tokens
    return tokens, *(plan(call, expected_rows=expected_rows, num_rows=rows).config for call in calls)
