"""Batched experts on an NVIDIA GPU: prepare tokens, w13 with SwiGLU, w2, in three launches.

They are chained by programmatic dependent launch. Nothing here reads the device, waits for it or allocates: memory is
the caller's, so all of it can be captured into a CUDA graph. A config's first call compiles its kernel and loads it
onto the device, so it must come before; see :func:`warm_up`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, Mxfp8Tensor, Rounding, ScaleLayout, TokenFormat
from vllm_rose_plugin.kernels.gemm import launch as gemm
from vllm_rose_plugin.kernels.gemm import plan
from vllm_rose_plugin.kernels.gemm.checks import OUT_DTYPES, check_on_gpu, check_tensor
from vllm_rose_plugin.kernels.gemm.one_run import prepare_device
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight
from vllm_rose_plugin.kernels.jit.compile import compile
from vllm_rose_plugin.kernels.moe_batched.config import QUANTIZED, LayerShape, token_format_for, tokens_config
from vllm_rose_plugin.kernels.moe_dispatch.config import DispatchConfig
from vllm_rose_plugin.kernels.moe_dispatch.launch import tokens_bytes, tokens_views
from vllm_rose_plugin.kernels.moe_experts.config import token_formats_of
from vllm_rose_plugin.kernels.mxfp8_quantize.config import widest_load
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DTYPE_NAMES, device_facts, row_alignment

ALIGNMENT = 128
"""Bytes, of everything that lies in the workspace."""


def moe_batched(
    x: torch.Tensor | Mxfp8Tensor,
    *,
    expert_counts: torch.Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    out: torch.Tensor,
    workspace: torch.Tensor,
    expected_rows: int | None = None,
    activation: Activation | str = Activation.MXFP8,
    rounding: Rounding | str = Rounding.RCEIL,
) -> None:
    """What ``reference.moe_batched`` computes, into ``out``; rows past the counts keep what they hold.

    Args:
        x: bf16, fp16 or fp32 ``[E, M, H]`` on a CUDA device, contiguous; or MXFP8 with row-major scales. Rows past a
            count are not read.
        expert_counts: int32 ``[E]``, contiguous, on the device; at most M each.
        w13: packed with gate_up. w2: packed.
        out: bf16 or fp16 ``[E, M, H]``, contiguous; may overlap neither x nor the workspace.
        workspace: uint8, starting at a multiple of 128 bytes, at least :func:`workspace_bytes` of them. Holds nothing
            between calls.
        expected_rows: tokens to expect in all experts, 1 to E * M; decides the kernels. All E * M by default.
        activation, rounding: of the tokens and of SwiGLU's result.

    Raises:
        TypeError, ValueError: what doesn't fit; the message names it.
    """
    quantized = isinstance(x, Mxfp8Tensor)
    rows = x.codes if isinstance(x, Mxfp8Tensor) else x
    check_on_gpu("x", rows)
    shape = LayerShape(
        target=w13.target,
        hidden_size=w13.k,
        intermediate_size=w2.k,
        num_local_experts=w13.num_groups,
        activation=Activation(activation),
    )
    each = check_call(shape, x, expert_counts, w13, w2, out)
    num_rows = shape.num_local_experts * each
    needed = workspace_bytes(
        max_tokens=each,
        num_local_experts=shape.num_local_experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        token_formats=token_formats_of(shape.target, shape.activation),
    )
    check_workspace(workspace, needed, each)
    if not num_rows:
        return
    expected_rows = num_rows if expected_rows is None else expected_rows
    token_format = token_format_for(shape, expected_rows=expected_rows, quantized=quantized)
    memory = _views(shape, num_rows, token_format, workspace)
    _prepare_tokens(shape, x, expert_counts, memory, rounding=Rounding(rounding))
    runs: dict[str, Any] = {"expert_offsets": memory.offsets, "expert_counts": expert_counts}
    gemm.grouped_gemm_swiglu(
        memory.tokens,
        w13,
        activation=shape.activation,
        rounding=rounding,
        out=memory.intermediate,
        expected_rows=expected_rows,
        early_counts=False,  # the kernel in front writes the offsets
        **runs,
    )
    gemm.grouped_gemm(
        memory.intermediate,
        w2,
        out_dtype=out.dtype,
        out=out.view(num_rows, shape.hidden_size),
        expected_rows=expected_rows,
        early_counts=True,
        **runs,
    )


class _Memory(NamedTuple):
    """Views of the workspace."""

    offsets: torch.Tensor  # (E + 1,) int32
    tokens: PackedTokens  # E * M rows of H
    intermediate: PackedTokens  # E * M rows of I


def workspace_bytes(
    *,
    max_tokens: int,
    num_local_experts: int,
    hidden_size: int,
    intermediate_size: int,
    token_formats: tuple[TokenFormat, ...],
) -> int:
    """Bytes that a call needs; more tokens never need less.

    Args:
        max_tokens: M, rows of an expert.
        num_local_experts, hidden_size, intermediate_size: of the layer.
        token_formats: of ``moe_experts.config.token_formats_of``.
    """
    rows: dict[str, Any] = {"num_rows": num_local_experts * max_tokens, "num_local_experts": num_local_experts}
    if not rows["num_rows"]:
        return 0
    tokens = max(
        tokens_bytes(hidden_size=hidden_size, token_format=token_format, **rows)
        + tokens_bytes(hidden_size=intermediate_size, token_format=token_format, **rows)
        for token_format in token_formats
    )
    return _offsets_bytes(num_local_experts) + tokens


def _offsets_bytes(num_local_experts: int) -> int:
    return -(-4 * (num_local_experts + 1) // ALIGNMENT) * ALIGNMENT


def _views(shape: LayerShape, num_rows: int, token_format: TokenFormat, workspace: torch.Tensor) -> _Memory:
    experts = shape.num_local_experts
    rows: dict[str, Any] = {"num_rows": num_rows, "num_local_experts": experts, "token_format": token_format}
    at_tokens = _offsets_bytes(experts)
    at_intermediate = at_tokens + tokens_bytes(hidden_size=shape.hidden_size, **rows)
    return _Memory(
        workspace[: 4 * (experts + 1)].view(torch.int32),
        tokens_views(workspace[at_tokens:at_intermediate], hidden_size=shape.hidden_size, **rows),
        tokens_views(workspace[at_intermediate:], hidden_size=shape.intermediate_size, **rows),
    )


def check_workspace(workspace: torch.Tensor, needed: int, each: int) -> None:
    """That it holds `needed` bytes, for M = `each`."""
    if workspace.dtype != torch.uint8 or workspace.ndim != 1 or workspace.numel() < needed:
        raise ValueError(
            f"the workspace of {each} tokens an expert must be flat torch.uint8 of at least {needed} bytes, "
            f"got {workspace.dtype} {tuple(workspace.shape)}"
        )
    if workspace.data_ptr() % ALIGNMENT and workspace.numel():
        raise ValueError(f"the workspace must start at a multiple of {ALIGNMENT} bytes, got {workspace.data_ptr():#x}")


def check_call(
    shape: LayerShape,
    x: torch.Tensor | Mxfp8Tensor,
    expert_counts: torch.Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    out: torch.Tensor,
) -> int:
    """That everything fits together: M."""
    experts, hidden_size, device = shape.num_local_experts, shape.hidden_size, w13.codes.device
    if (w13.num_groups, w13.n, w13.k) != (experts, 2 * shape.intermediate_size, hidden_size) or (
        w2.num_groups,
        w2.n,
    ) != (experts, hidden_size):
        raise ValueError(
            f"w13 must be [E, 2 * I, H] and w2 [E, H, I], got {tuple(w13.codes.shape)} and {tuple(w2.codes.shape)}"
        )
    if not w13.gate_up or w2.gate_up:
        raise ValueError("w13 must be packed with gate_up=True, and w2 without")
    rows = x.codes if isinstance(x, Mxfp8Tensor) else x
    if rows.ndim != 3 or rows.shape[0] != experts or rows.shape[2] != hidden_size:
        raise ValueError(f"x must be [{experts}, M, {hidden_size}] for these weights, got {tuple(rows.shape)}")
    each = rows.shape[1]
    if isinstance(x, Mxfp8Tensor):
        if x.layout is not ScaleLayout.ROW_MAJOR:
            raise ValueError(f"quantized tokens must have scales {ScaleLayout.ROW_MAJOR}, got {x.layout}")
        check_tensor("x", rows, torch.float8_e4m3fn, (experts, each, hidden_size), device)
        blocks = hidden_size // MXFP8_BLOCK
        check_tensor("x's scales", x.scales, torch.uint8, (experts, each, blocks), device, alignment=1)
    else:
        if rows.dtype not in DTYPE_NAMES:
            raise TypeError(f"x must be bf16, fp16 or fp32, or MXFP8, got {rows.dtype}")
        check_tensor("x", rows, rows.dtype, (experts, each, hidden_size), device, alignment=rows.element_size())
    check_tensor("expert_counts", expert_counts, torch.int32, (experts,), device, alignment=4)
    if out.dtype not in OUT_DTYPES:
        raise TypeError(f"out must be bf16 or fp16, got {out.dtype}: serve with --dtype bfloat16")
    check_tensor("out", out, out.dtype, (experts, each, hidden_size), device)
    return each


def _prepare_tokens(
    shape: LayerShape,
    x: torch.Tensor | Mxfp8Tensor,
    expert_counts: torch.Tensor,
    memory: _Memory,
    *,
    rounding: Rounding,
) -> None:
    if isinstance(x, Mxfp8Tensor):
        rows, dtype, x_scales = x.codes.view(torch.uint8).flatten(0, 1), QUANTIZED, x.scales.view(-1)
    else:
        rows, dtype, x_scales = x.flatten(0, 1), DTYPE_NAMES[x.dtype], None
    alignment = row_alignment(rows, limit=widest_load(shape.target))
    kernel = _kernel_for(shape, dtype, memory.tokens.token_format, rounding, alignment)
    data, scales = memory.tokens.data.view(torch.uint8), memory.tokens.scales
    with torch.cuda.device(data.device):
        kernel(rows, x_scales, expert_counts, memory.offsets, data, data.view(-1) if scales is None else scales)


@functools.lru_cache(maxsize=1024)
def _kernel_for(
    shape: LayerShape, dtype: str, token_format: TokenFormat, rounding: Rounding, load_alignment: int
) -> Callable[..., Any]:
    config = tokens_config(
        shape, dtype=dtype, token_format=token_format, rounding=rounding, load_alignment=load_alignment
    )
    return compile_config(config, target=shape.target)


def compile_config(config: DispatchConfig, *, target: str) -> Callable[..., Any]:
    """The compiled kernel that prepares tokens."""
    from vllm_rose_plugin.kernels.moe_batched.kernel import build  # imports cutlass

    return compile(family="moe_batched", config=config, build=build, target=target)


def warm_up(
    *,
    device: torch.device,
    hidden_size: int,
    intermediate_size: int,
    num_local_experts: int,
    most_rows: int,
    dtype: torch.dtype,
    activation: Activation,
    rounding: Rounding,
) -> None:
    """Compile, or load, every kernel that calls with unquantized tokens can choose on a device.

    Args:
        device: the GPU.
        hidden_size, intermediate_size, num_local_experts: of the layer.
        most_rows: the most rows that a call expects.
        dtype: of x and of out.
        activation, rounding: of the calls.
    """
    facts = device_facts(device.index)
    shape = LayerShape(
        target=facts.target,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_local_experts=num_local_experts,
        activation=activation,
    )
    with torch.cuda.device(device):
        prepare_device(device, max_rows=1)
        for token_format in token_formats_of(shape.target, activation):
            _kernel_for(shape, DTYPE_NAMES[dtype], token_format, rounding, widest_load(shape.target))
        for config in plan.warm_expert_configs(
            **facts._asdict(),
            num_groups=num_local_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            max_rows=most_rows,
            out_dtype=OUT_DTYPES[dtype],
            activation=activation,
            rounding=rounding,
        ):
            plan.compile_config(config, target=facts.target)
