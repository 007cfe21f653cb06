"""Dispatch on an NVIDIA GPU: in one launch with the routing, or behind it."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, Mxfp8Tensor, Rounding, ScaleLayout, TokenFormat
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens
from vllm_rose_plugin.kernels.jit.compile import compile
from vllm_rose_plugin.kernels.moe_dispatch import threshold
from vllm_rose_plugin.kernels.moe_dispatch.config import (
    DispatchConfig,
    choose_config,
    needs_scale_rows,
    warm_configs,
)
from vllm_rose_plugin.kernels.moe_dispatch.reference import max_rows
from vllm_rose_plugin.kernels.moe_route import launch as route
from vllm_rose_plugin.kernels.moe_route.launch import Routed
from vllm_rose_plugin.kernels.mxfp8_quantize.config import widest_load
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import (
    DTYPE_NAMES,
    DeviceFacts,
    check_rows,
    device_facts,
    row_alignment,
    with_plain_stride,
)
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import TILE_ROWS, fp32_pitch, padded_blocks, permuted_size

_PART = 128
"""Data and scales begin at multiples of so many bytes, as the GEMMs' tensor maps want it."""


def route_and_dispatch(
    x: torch.Tensor | Mxfp8Tensor,
    topk_ids: torch.Tensor,
    *,
    num_local_experts: int,
    workspace: torch.Tensor,
    token_format: TokenFormat,
    expert_map: torch.Tensor | None = None,
    alignment: int = 1,
    activation: Activation | str = Activation.MXFP8,
    rounding: Rounding | str = Rounding.RCEIL,
    topk_weights: torch.Tensor | None = None,
    routed: Routed | None = None,
    out: PackedTokens | None = None,
    two_launches: bool = False,
) -> tuple[Routed, PackedTokens]:
    """Tokens in their experts' runs: one launch for few tokens, ``route_tokens`` and ``dispatch_tokens`` for more.

    Args:
        topk_ids, num_local_experts, workspace, expert_map: as ``moe_route.launch.route_tokens`` takes them.
        x, token_format, alignment, activation, rounding, topk_weights: as :func:`dispatch_tokens` takes them.
        routed, out: where to write.
        two_launches: also for few tokens, as the self-check asks for to compare.

    Returns:
        Where the tokens went, and the S rows of :func:`dispatch_tokens`.

    Raises:
        TypeError, ValueError, RuntimeError: as those functions.
    """
    route.check_ids(topk_ids, expert_map, workspace)
    with_scale_rows = needs_scale_rows(token_format=token_format, alignment=alignment)
    how: dict[str, Any] = {"token_format": token_format, "alignment": alignment}
    how |= {"activation": activation, "rounding": rounding, "topk_weights": topk_weights}
    if topk_ids.shape[0] and not two_launches:
        _check_x(x, topk_ids)
        facts = device_facts(topk_ids.device.index)
        config = _config_for(
            facts,
            _what(x),
            _load_alignment(x, facts),
            tuple(topk_ids.shape),
            num_local_experts,
            alignment,
            token_format,
            Activation(activation),
            Rounding(rounding),
            topk_weights is not None,
            route.dtype_name(topk_ids),
            expert_map is not None,
        )
        if config.route is not None:
            route.check_workspace(workspace, num_local_experts=num_local_experts)
            routed = route.routed_like(
                topk_ids, num_local_experts=num_local_experts, with_scale_rows=with_scale_rows, out=routed
            )
            out = _checked_tokens(x, topk_ids.shape, num_local_experts, alignment, token_format, out)
            _launch(config, facts, x, routed, topk_weights, out, topk_ids.view(-1), expert_map, workspace)
            return routed, out
    routed = route.route_tokens(
        topk_ids,
        num_local_experts=num_local_experts,
        workspace=workspace,
        expert_map=expert_map,
        alignment=alignment,
        with_scale_rows=with_scale_rows,
        out=routed,
    )
    return routed, dispatch_tokens(x, routed=routed, out=out, **how)


def dispatch_tokens(
    x: torch.Tensor | Mxfp8Tensor,
    *,
    routed: Routed,
    token_format: TokenFormat,
    alignment: int = 1,
    activation: Activation | str = Activation.MXFP8,
    rounding: Rounding | str = Rounding.RCEIL,
    topk_weights: torch.Tensor | None = None,
    out: PackedTokens | None = None,
) -> PackedTokens:
    """Copy each token to the rows that its slots name, in the format that a GEMM reads, in one launch.

    Args:
        x: bf16, fp16 or fp32 ``[T, H]`` on a CUDA device, H a multiple of 32, contiguous rows any distance apart; or
            MXFP8 with contiguous row-major scales, which is taken as it is: copied, or its values in bf16.
        routed: of ``moe_route.launch.route_tokens`` with the same alignment.
        token_format: what the GEMM reads.
        alignment: rows to which runs are padded.
        activation: BF16: not quantized, BF16_PERMUTED only.
        rounding: how x is quantized.
        topk_weights: float32 ``[T, top_k]``, contiguous; given when the router weight applies to the expert's input.
            Products are formed in float32 and quantized from there, or rounded to x's dtype.
        out: where to write; see :func:`tokens_views`.

    Returns:
        S rows, S of ``reference.max_rows``. Rows of a run without a token are zero, as are the scales that fill up its
        last tile (2**-127 where they are float32). What lies past the last run is undefined.

    Raises:
        TypeError, ValueError: what doesn't fit; the message names it.
        RuntimeError: the device has no compile target, or nvidia-cutlass-dsl is missing.
    """
    num_tokens, top_k = routed.slots.shape
    num_local_experts = routed.expert_counts.numel()
    _check_x(x, routed.slots)
    device = routed.slots.device
    route.check_routed(routed, num_tokens=num_tokens, top_k=top_k, num_local_experts=num_local_experts, device=device)
    if needs_scale_rows(token_format=token_format, alignment=alignment) and routed.scale_rows is None:
        raise ValueError(f"{token_format} with alignment {alignment} needs routing with with_scale_rows=True")
    out = _checked_tokens(x, routed.slots.shape, num_local_experts, alignment, token_format, out)
    if num_tokens:
        facts = device_facts(device.index)
        config = _config_for(
            facts,
            _what(x),
            _load_alignment(x, facts),
            (num_tokens, top_k),
            num_local_experts,
            alignment,
            token_format,
            Activation(activation),
            Rounding(rounding),
            topk_weights is not None,
            None,
            False,
        )
        _launch(config, facts, x, routed, topk_weights, out, None, None, None)
    return out


def tokens_bytes(*, num_rows: int, hidden_size: int, num_local_experts: int, token_format: TokenFormat) -> int:
    """Bytes that :func:`tokens_views` needs."""
    data, scales = _sizes(num_rows, hidden_size, num_local_experts, token_format)
    return _padded(data) + _padded(scales)


def tokens_views(
    buffer: torch.Tensor, *, num_rows: int, hidden_size: int, num_local_experts: int, token_format: TokenFormat
) -> PackedTokens:
    """A place for S tokens inside of memory that somebody else owns.

    Args:
        buffer: flat uint8, starting at a multiple of 128 bytes, of at least :func:`tokens_bytes`.

    Raises:
        ValueError: a buffer that is none of these.
    """
    data, scales = _sizes(num_rows, hidden_size, num_local_experts, token_format)
    needed = _padded(data) + _padded(scales)
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.numel() < needed or buffer.data_ptr() % _PART:
        raise ValueError(
            f"{num_rows} tokens need flat uint8 memory of {needed} bytes that starts at a multiple of {_PART}, "
            f"got {buffer.dtype} {tuple(buffer.shape)} at {buffer.data_ptr():#x}"
        )
    rows, held = buffer[:data], buffer[_padded(data) : _padded(data) + scales]
    if token_format is TokenFormat.BF16_PERMUTED:
        width = permuted_size(hidden_size)
        return PackedTokens(token_format, rows.view(torch.bfloat16).view(num_rows, width), None, hidden_size)
    codes = rows.view(torch.float8_e4m3fn).view(num_rows, hidden_size)
    if token_format is TokenFormat.MXFP8_FP32_SCALES:
        held = held.view(torch.float32).view(hidden_size // MXFP8_BLOCK, fp32_pitch(num_rows))
    return PackedTokens(token_format, codes, held, hidden_size)


def warm_up(
    *,
    hidden_size: int,
    top_k: int,
    num_local_experts: int,
    max_tokens: int,
    dtype: str,
    id_dtype: str,
    has_map: bool,
    token_formats: tuple[TokenFormat, ...],
    alignment: int = 1,
    activation: Activation | str = Activation.MXFP8,
    rounding: Rounding | str = Rounding.RCEIL,
    weighted: bool = False,
    two_launches: bool = False,
) -> None:
    """Compile, or load, all kernels that :func:`route_and_dispatch` of 1 to max_tokens tokens with aligned rows can
    need on the current device.

    Args:
        dtype: of x, such as "bfloat16", or "mxfp8" where it arrives quantized.
        id_dtype: "int32" or "int64".
        token_formats: those that the layer asks for.
        (others): of the calls.
    """
    facts = device_facts(torch.cuda.current_device())
    for token_format in token_formats:
        configs = warm_configs(
            max_tokens=max_tokens,
            target=facts.target,
            sm_count=facts.sm_count,
            top_k=top_k,
            dtype=dtype,
            hidden_size=hidden_size,
            num_experts=num_local_experts,
            alignment=alignment,
            token_format=token_format,
            activation=Activation(activation),
            rounding=Rounding(rounding),
            weighted=weighted,
            id_dtype=None if two_launches else id_dtype,
            has_map=has_map and not two_launches,
        )
        for config in configs:
            compile_config(config, target=facts.target)
        if any(config.route is None for config in configs):
            route.warm_up(
                max_tokens=max_tokens,
                top_k=top_k,
                num_local_experts=num_local_experts,
                id_dtype=id_dtype,
                has_map=has_map,
                alignment=alignment,
                with_scale_rows=needs_scale_rows(token_format=token_format, alignment=alignment),
            )


@functools.cache
def compile_config(config: DispatchConfig, *, target: str) -> Callable[..., Any]:
    """The compiled kernel of a config."""
    from vllm_rose_plugin.kernels.moe_dispatch.kernel import build  # imports cutlass

    return compile(family="moe_dispatch", config=config, build=build, target=target)


def _launch(
    config: DispatchConfig,
    facts: DeviceFacts,
    x: torch.Tensor | Mxfp8Tensor,
    routed: Routed,
    topk_weights: torch.Tensor | None,
    out: PackedTokens,
    ids: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    weights = None if topk_weights is None else _checked_weights(topk_weights, routed.slots)
    if isinstance(x, Mxfp8Tensor):
        rows, x_scales = x.codes.view(torch.uint8), x.scales.view(-1)
    else:
        rows, x_scales = with_plain_stride(x), None
    data = out.data.view(torch.uint8)
    with torch.cuda.device(data.device):
        compile_config(config, target=facts.target)(
            rows,
            x_scales,
            weights,
            ids,
            expert_map,
            workspace,
            routed.expert_counts,
            routed.expert_offsets,
            routed.slots.view(-1),
            None if routed.scale_rows is None or not config.scale_rows else routed.scale_rows.view(-1),
            data,
            data.view(-1) if out.scales is None else out.scales,
        )


@functools.lru_cache(maxsize=8192)
def _config_for(
    facts: DeviceFacts,
    what: tuple[str, int],
    load_alignment: int,
    shape: tuple[int, int],
    num_experts: int,
    alignment: int,
    token_format: TokenFormat,
    activation: Activation,
    rounding: Rounding,
    weighted: bool,
    id_dtype: str | None,
    has_map: bool,
) -> DispatchConfig:
    dtype, hidden_size = what
    num_tokens, top_k = shape
    return choose_config(
        dtype=dtype,
        num_tokens=num_tokens,
        hidden_size=hidden_size,
        top_k=top_k,
        num_experts=num_experts,
        alignment=alignment,
        token_format=token_format,
        activation=activation,
        rounding=rounding,
        weighted=weighted,
        load_alignment=load_alignment,
        id_dtype=id_dtype,
        has_map=has_map,
        sm_count=facts.sm_count,
    )


threshold.on_change(_config_for.cache_clear)


def _what(x: torch.Tensor | Mxfp8Tensor) -> tuple[str, int]:
    """(name of the dtype, H)"""
    if isinstance(x, Mxfp8Tensor):
        return "mxfp8", x.codes.shape[1]
    return DTYPE_NAMES[x.dtype], x.shape[1]


def _load_alignment(x: torch.Tensor | Mxfp8Tensor, facts: DeviceFacts) -> int:
    rows = x.codes.view(torch.uint8) if isinstance(x, Mxfp8Tensor) else with_plain_stride(x)
    return row_alignment(rows, limit=widest_load(facts.target))


def _check_x(x: torch.Tensor | Mxfp8Tensor, like: torch.Tensor) -> None:
    """That x is a kernel's input with a row for each of `like`, on its device."""
    if isinstance(x, Mxfp8Tensor):
        codes, scales = x.codes, x.scales
        if codes.dim() != 2 or x.layout is not ScaleLayout.ROW_MAJOR:
            raise ValueError(f"quantized tokens must be [T, H] with scales {ScaleLayout.ROW_MAJOR}, got {x.layout}")
        shape = (codes.shape[0], codes.shape[1] // MXFP8_BLOCK)
        if tuple(scales.shape) != shape or scales.dtype != torch.uint8 or scales.device != codes.device:
            raise ValueError(f"scales of codes {tuple(codes.shape)} are uint8 {shape}, got {tuple(scales.shape)}")
        if not codes.is_contiguous() or not scales.is_contiguous():
            raise ValueError("quantized tokens and their scales must be contiguous")
        rows = codes
    else:
        check_rows(x, what="x")
        rows = x
    if rows.shape[0] != like.shape[0] or rows.device != like.device:
        raise ValueError(f"x has {rows.shape[0]} tokens on {rows.device}, the routing {like.shape[0]} on {like.device}")


def _checked_weights(topk_weights: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    if topk_weights.shape != slots.shape or topk_weights.dtype != torch.float32 or not topk_weights.is_contiguous():
        raise ValueError(
            f"topk_weights must be contiguous float32 {tuple(slots.shape)}, "
            f"got {topk_weights.dtype} {tuple(topk_weights.shape)}"
        )
    if topk_weights.device != slots.device:
        raise ValueError(f"topk_weights are on {topk_weights.device}, the tokens on {slots.device}")
    return topk_weights.view(-1)


def _checked_tokens(
    x: torch.Tensor | Mxfp8Tensor,
    shape: torch.Size,
    num_local_experts: int,
    alignment: int,
    token_format: TokenFormat,
    out: PackedTokens | None,
) -> PackedTokens:
    """Memory for the result: `out` once it is checked, or new."""
    rows = x.codes if isinstance(x, Mxfp8Tensor) else x
    num_tokens, top_k = shape
    num_rows = max_rows(num_tokens=num_tokens, top_k=top_k, num_local_experts=num_local_experts, alignment=alignment)
    hidden_size = rows.shape[1]
    size: dict[str, Any] = {"num_rows": num_rows, "hidden_size": hidden_size}
    size |= {"num_local_experts": num_local_experts, "token_format": token_format}
    if out is None:
        return tokens_views(torch.empty(tokens_bytes(**size), dtype=torch.uint8, device=rows.device), **size)
    # The same shapes as new memory would have, wherever it lies.
    wanted = tokens_views(_nowhere(**size), **size)
    if out.token_format is not token_format or out.k != hidden_size:
        raise ValueError(f"out is {out.token_format} of {out.k}, asked for were {token_format} of {hidden_size}")
    for name, tensor, like in (("data", out.data, wanted.data), ("scales", out.scales, wanted.scales)):
        if (tensor is None) != (like is None):
            raise ValueError(f"out.{name} must {'not ' if like is None else ''}be given for {token_format}")
        if tensor is None or like is None:
            continue
        if tensor.shape != like.shape or tensor.dtype != like.dtype or tensor.device != rows.device:
            raise ValueError(
                f"out.{name} must be {like.dtype} {tuple(like.shape)} on {rows.device}, "
                f"got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            )
        if not tensor.is_contiguous() or (tensor.data_ptr() % _PART and tensor.numel()):
            raise ValueError(
                f"out.{name} must be contiguous and start at a multiple of {_PART} bytes, "
                f"got strides {tensor.stride()} at {tensor.data_ptr():#x}"
            )
    return out


@functools.lru_cache(maxsize=1024)
def _nowhere(*, num_rows: int, hidden_size: int, num_local_experts: int, token_format: TokenFormat) -> torch.Tensor:
    size = tokens_bytes(
        num_rows=num_rows, hidden_size=hidden_size, num_local_experts=num_local_experts, token_format=token_format
    )
    return torch.empty(size, dtype=torch.uint8, device="meta")


def _sizes(num_rows: int, hidden_size: int, num_local_experts: int, token_format: TokenFormat) -> tuple[int, int]:
    """Bytes of (data, scales)."""
    blocks = hidden_size // MXFP8_BLOCK
    if token_format is TokenFormat.BF16_PERMUTED:
        return 2 * num_rows * permuted_size(hidden_size), 0
    if token_format is TokenFormat.MXFP8_FP32_SCALES:
        return num_rows * hidden_size, 4 * blocks * fp32_pitch(num_rows)
    tiles = num_rows // TILE_ROWS + min(num_local_experts, num_rows)  # every run may begin a tile of its own
    return num_rows * hidden_size, tiles * TILE_ROWS * padded_blocks(blocks)


def _padded(size: int) -> int:
    return -(-size // _PART) * _PART
