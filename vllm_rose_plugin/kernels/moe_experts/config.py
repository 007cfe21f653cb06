"""How a batch goes through a layer of experts: chunks, rows, token format. Imports neither torch nor cutlass.

Runs are not padded (alignment 1): the GEMMs of every target take runs that begin at any row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_rose_plugin.kernels.contracts import Activation, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm.call import Call
from vllm_rose_plugin.kernels.gemm.config import Epilogue
from vllm_rose_plugin.kernels.gemm.plan import batch_invariant_rows, plan, token_format_of
from vllm_rose_plugin.kernels.moe_combine import config as combine
from vllm_rose_plugin.kernels.moe_dispatch import config as dispatch
from vllm_rose_plugin.kernels.moe_route import config as route
from vllm_rose_plugin.kernels.mxfp8_quantize.config import widest_load

MOST_ROWS = 2**16
"""Rows (token, k) that pass through the layer at a time. More tokens are taken in chunks, which bounds the workspace:
for H = 4096 it holds half a gigabyte of results."""
QUANTIZED = "mxfp8"
"""What the dispatch calls tokens that arrive as codes and scales."""
PartOf = Callable[[Call], Call]
"""The call on a weight to that on one of its parts."""
_CHUNK_ALIGNMENT = 8
"""Tokens: with it, the rows of a chunk start where wide accesses may."""


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
    num_experts: int
    """On all ranks."""
    top_k: int
    activation: Activation
    batch_invariant: bool = False
    """One config for every number of tokens, so that a token's bits depend on that token alone."""


@dataclass(frozen=True)
class Step:
    """One chunk."""

    num_rows: int
    """S: T * top_k, since any of them may be here."""
    expected_rows: int
    """Those that are here if experts are chosen evenly; of a batch-invariant layer, what stands for any number."""
    token_format: TokenFormat


def token_formats_of(target: str, activation: Activation) -> tuple[TokenFormat, ...]:
    """All that calls can choose."""
    if not target.startswith("sm_90"):
        return (TokenFormat.MXFP8_TCGEN05,)
    if activation is Activation.BF16:
        return (TokenFormat.BF16_PERMUTED,)
    return (TokenFormat.MXFP8_FP32_SCALES, TokenFormat.BF16_PERMUTED)


def chunk_tokens(top_k: int) -> int:
    """Most tokens that pass through the layer at a time."""
    return max(1, MOST_ROWS // top_k // _CHUNK_ALIGNMENT) * _CHUNK_ALIGNMENT


def step_of(shape: LayerShape, num_tokens: int) -> Step:
    """What a chunk of at least one token needs.

    Raises:
        ValueError: the target doesn't serve the activation.
    """
    num_rows = num_tokens * shape.top_k
    expected = max(1, -(-num_rows * shape.num_local_experts // shape.num_experts))
    expected = min(expected, num_rows)
    if shape.batch_invariant:
        expected = batch_invariant_rows(shape.num_local_experts)
    token_format = token_format_of(
        target=shape.target,
        activation=shape.activation,
        num_groups=shape.num_local_experts,
        num_rows=expected,
        batch_invariant=shape.batch_invariant,
    )
    return Step(num_rows, expected, token_format)


def gemm_calls(shape: LayerShape, step: Step, *, sm_count: int, dtype: str, rounding: Rounding) -> tuple[Call, Call]:
    """The products of a chunk: w13 and w2.

    Args: as in :func:`step_configs`.
    """
    call: dict[str, Any] = {
        "target": shape.target,
        "sm_count": sm_count,
        "num_groups": shape.num_local_experts,
        "token_format": step.token_format,
        "batch_invariant": shape.batch_invariant,
    }
    w13 = Call(
        n=2 * shape.intermediate_size,
        k=shape.hidden_size,
        epilogue=Epilogue.SWIGLU,
        out_format=step.token_format,
        activation=shape.activation,
        rounding=rounding,
        early_counts=False,
        **call,
    )
    w2 = Call(n=shape.hidden_size, k=shape.intermediate_size, out_dtype=dtype, early_counts=True, **call)
    return w13, w2


def step_configs(
    shape: LayerShape,
    num_tokens: int,
    *,
    sm_count: int,
    dtype: str,
    rounding: Rounding,
    id_dtype: str = "int32",
    quantized: bool = False,
) -> tuple[Any, ...]:
    """The configs of all kernels that a call launches, chunk by chunk: calls with the same ones run the same code.

    Args:
        shape: of the layer. More experts than the local ones come with an expert map.
        num_tokens: T, at least 1.
        sm_count: of the device.
        dtype: of x and of the result.
        rounding: of the tokens and of SwiGLU's result.
        id_dtype: of the ids.
        quantized: x is MXFP8.
    """
    how: dict[str, Any] = {"sm_count": sm_count, "dtype": dtype, "rounding": rounding, "id_dtype": id_dtype}
    how["arrives"] = QUANTIZED if quantized else dtype
    sizes = _chunks(shape, num_tokens)
    return tuple(dict.fromkeys(config for size in sizes for config in _chunk_configs(shape, size, **how)))


def product_configs(
    shape: LayerShape,
    num_tokens: int,
    *,
    sm_count: int,
    dtype: str,
    rounding: Rounding,
    parts_of: tuple[PartOf | None, PartOf | None] = (None, None),
) -> tuple[Any, ...]:
    """Those of the two products alone, chunk by chunk; the weights may lie in parts.

    Args:
        parts_of: for w13 and for w2, the call on the whole weight to that on a part; None: it is whole.
        (others): as in :func:`step_configs`.
    """
    found = []
    for size in _chunks(shape, num_tokens):
        step = step_of(shape, size)
        calls = gemm_calls(shape, step, sm_count=sm_count, dtype=dtype, rounding=rounding)
        for call, part_of in zip(calls, parts_of, strict=True):
            own = call if part_of is None else part_of(call)
            found.append(plan(own, expected_rows=step.expected_rows, num_rows=step.num_rows).config)
    return tuple(dict.fromkeys(found))


def _chunks(shape: LayerShape, num_tokens: int) -> dict[int, None]:
    """Numbers of tokens of a call's chunks."""
    each = chunk_tokens(shape.top_k)
    return dict.fromkeys(min(each, num_tokens - begin) for begin in range(0, num_tokens, each))


def _chunk_configs(
    shape: LayerShape,
    num_tokens: int,
    *,
    sm_count: int,
    dtype: str,
    rounding: Rounding,
    id_dtype: str,
    arrives: str,
) -> tuple[Any, ...]:
    step = step_of(shape, num_tokens)
    ids: dict[str, Any] = {
        "id_dtype": id_dtype,
        "has_map": shape.num_experts > shape.num_local_experts,
        "sm_count": sm_count,
    }
    experts: dict[str, Any] = {"num_experts": shape.num_local_experts, "alignment": 1}
    copy = dispatch.choose_config(
        dtype=arrives,
        num_tokens=num_tokens,
        hidden_size=shape.hidden_size,
        top_k=shape.top_k,
        token_format=step.token_format,
        activation=shape.activation,
        rounding=rounding,
        weighted=False,
        load_alignment=widest_load(shape.target),
        **experts,
        **ids,
    )
    routed: tuple[Any, ...] = ()
    if copy.route is None:
        routed = (route.choose_config(num_pairs=step.num_rows, scale_rows=copy.scale_rows, **experts, **ids),)
    calls = gemm_calls(shape, step, sm_count=sm_count, dtype=dtype, rounding=rounding)
    products = [plan(c, expected_rows=step.expected_rows, num_rows=step.num_rows).config for c in calls]
    combined = combine.choose_config(
        num_tokens=num_tokens,
        hidden_size=shape.hidden_size,
        top_k=shape.top_k,
        dtype=dtype,
        out_dtype=dtype,
        weighted=True,
        target=shape.target,
        sm_count=sm_count,
    )
    return *routed, copy, *products, combined
