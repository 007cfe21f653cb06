"""FlashInfer's masked grouped GEMM as a provider beside our kernels, from sm_100 on.

It reads what our GEMM reads there: the checkpoint's codes, and scales of tokens and weights in tiles of 128 rows x 4
blocks. So a layer holds the same tensors whoever serves it, where gate rows fill whole tiles. Tokens lie in ``[E, M,
H]`` for both; their scales begin at expert e's tile ``e * ceil(M / 128)``, where our GEMM counts full tiles. SwiGLU and
the quantization are ours, of valid rows only, between FlashInfer's two launches. Its first product is float32: SwiGLU's
result of a bf16 one would be quantized to other codes than the reference's too often to pass the self-check.

FlashInfer compiles a kernel for every M. :func:`warm_up` makes it do so, and calls of another M are refused: none is
compiled in a request.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, Mxfp8Tensor, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm.checks import OUT_DTYPES, check_on_gpu, check_tensor
from vllm_rose_plugin.kernels.gemm.flashinfer import NAME as NAME
from vllm_rose_plugin.kernels.gemm.flashinfer import installed_version as installed_version
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight, is_sm90
from vllm_rose_plugin.kernels.jit.compile import compile
from vllm_rose_plugin.kernels.jit.targets import FAMILY_TARGET
from vllm_rose_plugin.kernels.moe_batched.config import QUANTIZED, LayerShape, MaskedConfig, tokens_config
from vllm_rose_plugin.kernels.moe_batched.launch import ALIGNMENT, check_call, check_workspace
from vllm_rose_plugin.kernels.moe_dispatch.launch import tokens_bytes, tokens_views
from vllm_rose_plugin.kernels.mxfp8_quantize.config import widest_load
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DTYPE_NAMES, row_alignment
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import (
    ROW_GROUP,
    TILE_BLOCKS,
    TILE_ROWS,
    padded_blocks,
    padded_rows,
)

_FORMAT = TokenFormat.MXFP8_TCGEN05
_GATE_UP = torch.float32
_OUT_DTYPES = {**OUT_DTYPES, _GATE_UP: DTYPE_NAMES[_GATE_UP]}

_ready: set["_Key"] = set()


class _Key(NamedTuple):
    """What FlashInfer's two kernels are compiled for, and where they are loaded."""

    device: int | None
    num_local_experts: int
    max_tokens: int
    hidden_size: int
    intermediate_size: int
    out_dtype: torch.dtype


def serves(*, target: str | None, intermediate_size: int, activation: Activation) -> bool:
    """Whether a layer can be given to it: W8A8 from sm_100 on.

    I must be a multiple of 128: our packed scales of w13 begin a tile with the first up row, FlashInfer's only where
    gate rows fill theirs. Rubin's kernel needs the compiler that knows it, so not where we fall back to sm_100f.
    """
    return bool(
        target is not None
        and not is_sm90(target)
        and target != FAMILY_TARGET
        and activation is Activation.MXFP8
        and intermediate_size % TILE_ROWS == 0
        and installed_version()
    )


def moe_batched(
    x: torch.Tensor | Mxfp8Tensor,
    *,
    expert_counts: torch.Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    out: torch.Tensor,
    workspace: torch.Tensor,
    rounding: Rounding | str = Rounding.RCEIL,
) -> None:
    """What ``reference.moe_batched`` computes with activation MXFP8, into ``out``; rows past the counts are undefined.

    Args:
        x, w13, w2, out, rounding: as ``launch.moe_batched`` takes them, w13 and w2 packed from sm_100 on.
        expert_counts: int32 ``[E]``, contiguous, on the device, starting at a multiple of 16 bytes; at most M each.
        workspace: uint8, starting at a multiple of 128 bytes, at least :func:`workspace_bytes` of them. Holds nothing
            between calls.

    Raises:
        TypeError, ValueError: what doesn't fit, an M that :func:`warm_up` wasn't called with among it.
    """
    check_on_gpu("x", x.codes if isinstance(x, Mxfp8Tensor) else x)
    shape = _shape(w13, w2)
    each = check_call(shape, x, expert_counts, w13, w2, out)
    if not each or not shape.num_local_experts:
        return
    check_tensor("expert_counts", expert_counts, torch.int32, expert_counts.shape, out.device, alignment=16)
    if _key(shape, each, out.device, out.dtype) not in _ready:
        raise ValueError(
            f"FlashInfer's kernels of this layer weren't compiled for {each} rows an expert and {out.dtype} at "
            "start-up, and nothing is in a request: set ROSE_PROVIDER_MOE_BATCHED=rose"
        )
    _run(shape, x, expert_counts, w13, w2, out, workspace, rounding=Rounding(rounding))


def warm_up(
    w13: PackedWeight, w2: PackedWeight, *, max_tokens: int, dtype: torch.dtype, rounding: Rounding | str
) -> None:
    """Compile, or load, all that calls of a layer's sizes launch, by a call in which no expert has a token.

    Takes the memory of such a call, for a moment.

    Args:
        w13, w2: of one such layer.
        max_tokens: M of the calls.
        dtype: of x and of out.
        rounding: of the calls.
    """
    shape, device, rounding = _shape(w13, w2), w13.codes.device, Rounding(rounding)
    with torch.cuda.device(device):
        for name in (DTYPE_NAMES[dtype], QUANTIZED):
            _kernel_for(_tokens_config(shape, name, rounding, widest_load(shape.target)), shape.target)
        _kernel_for(_swiglu_config(shape, rounding), shape.target)
    key = _key(shape, max_tokens, device, dtype)
    if key in _ready:
        return
    size = workspace_bytes(
        max_tokens=max_tokens,
        num_local_experts=shape.num_local_experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
    )
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    counts = torch.zeros(shape.num_local_experts, dtype=torch.int32, device=device)
    x = torch.empty(shape.num_local_experts, max_tokens, shape.hidden_size, dtype=dtype, device=device)
    _run(shape, x, counts, w13, w2, torch.empty_like(x), workspace, rounding=rounding)
    _ready.add(key)


def workspace_bytes(*, max_tokens: int, num_local_experts: int, hidden_size: int, intermediate_size: int) -> int:
    """Bytes that a call needs; more tokens never need less.

    Args:
        max_tokens: M, rows of an expert.
        num_local_experts, hidden_size, intermediate_size: of the layer.
    """
    num_rows = num_local_experts * max_tokens
    if not num_rows:
        return 0
    return _gate_up_bytes(num_rows, intermediate_size) + max(
        tokens_bytes(num_rows=num_rows, hidden_size=size, num_local_experts=num_local_experts, token_format=_FORMAT)
        for size in (hidden_size, intermediate_size)
    )


def _gate_up_bytes(num_rows: int, intermediate_size: int) -> int:
    return -(-num_rows * 2 * intermediate_size * _GATE_UP.itemsize // ALIGNMENT) * ALIGNMENT


def _shape(w13: PackedWeight, w2: PackedWeight) -> LayerShape:
    """Of the layer.

    Raises:
        ValueError: weights that FlashInfer doesn't read.
    """
    if is_sm90(w13.target) or w2.k % TILE_ROWS:
        raise ValueError(
            f"needs weights packed from sm_100 on and I a multiple of {TILE_ROWS}, got I = {w2.k} for {w13.target}"
        )
    return LayerShape(
        target=w13.target,
        hidden_size=w13.k,
        intermediate_size=w2.k,
        num_local_experts=w13.num_groups,
        activation=Activation.MXFP8,
    )


def _key(shape: LayerShape, max_tokens: int, device: torch.device, out_dtype: torch.dtype) -> _Key:
    return _Key(
        device=device.index,
        num_local_experts=shape.num_local_experts,
        max_tokens=max_tokens,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        out_dtype=out_dtype,
    )


def _run(
    shape: LayerShape,
    x: torch.Tensor | Mxfp8Tensor,
    expert_counts: torch.Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    out: torch.Tensor,
    workspace: torch.Tensor,
    *,
    rounding: Rounding,
) -> None:
    experts, each, _ = out.shape
    num_rows = experts * each
    needed = workspace_bytes(
        max_tokens=each,
        num_local_experts=experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
    )
    check_workspace(workspace, needed, each)
    at_tokens = _gate_up_bytes(num_rows, shape.intermediate_size)
    size = num_rows * 2 * shape.intermediate_size * _GATE_UP.itemsize
    gate_up = workspace[:size].view(_GATE_UP).view(experts, each, 2 * shape.intermediate_size)
    place: dict[str, Any] = {"num_rows": num_rows, "num_local_experts": experts, "token_format": _FORMAT}
    tokens = tokens_views(workspace[at_tokens:], hidden_size=shape.hidden_size, **place)
    # Nobody reads the tokens any more when SwiGLU writes.
    intermediate = tokens_views(workspace[at_tokens:], hidden_size=shape.intermediate_size, **place)
    with torch.cuda.device(out.device):
        _write_tokens(shape, x, expert_counts, tokens, rounding=rounding)
        _gemm(tokens, w13, gate_up, expert_counts)
        kernel = _kernel_for(_swiglu_config(shape, rounding), shape.target)
        kernel(gate_up.flatten(0, 1), None, expert_counts, intermediate.data.view(torch.uint8), intermediate.scales)
        _gemm(intermediate, w2, out, expert_counts)


def _write_tokens(
    shape: LayerShape,
    x: torch.Tensor | Mxfp8Tensor,
    expert_counts: torch.Tensor,
    tokens: PackedTokens,
    *,
    rounding: Rounding,
) -> None:
    if isinstance(x, Mxfp8Tensor):
        rows, dtype, x_scales = x.codes.view(torch.uint8).flatten(0, 1), QUANTIZED, x.scales.view(-1)
    else:
        rows, dtype, x_scales = x.flatten(0, 1), DTYPE_NAMES[x.dtype], None
    alignment = row_alignment(rows, limit=widest_load(shape.target))
    kernel = _kernel_for(_tokens_config(shape, dtype, rounding, alignment), shape.target)
    kernel(rows, x_scales, expert_counts, tokens.data.view(torch.uint8), tokens.scales)


def _gemm(tokens: PackedTokens, weight: PackedWeight, out: torch.Tensor, expert_counts: torch.Tensor) -> None:
    """``tokens[e, :count] @ weight[e].T`` into ``out``; FlashInfer writes whole tiles of rows."""
    from flashinfer.gemm import grouped_gemm_nt_masked

    experts, each, _ = out.shape
    assert tokens.scales is not None
    grouped_gemm_nt_masked(
        (
            tokens.data.view(experts, each, tokens.k).permute(1, 2, 0),
            _scales(tokens.scales, num_groups=experts, num_rows=each, k=tokens.k),
        ),
        (
            weight.codes.view(torch.float8_e4m3fn).permute(1, 2, 0),
            _scales(weight.scales, num_groups=experts, num_rows=weight.n, k=weight.k),
        ),
        out.permute(1, 2, 0),
        expert_counts,
        ab_dtype="float8_e4m3fn",
        sf_dtype="float8_e8m0fnu",
        c_dtype=_OUT_DTYPES[out.dtype],
        sf_vec_size=MXFP8_BLOCK,
    )


def _scales(scales: torch.Tensor, *, num_groups: int, num_rows: int, k: int) -> torch.Tensor:
    """Tiled scales with the dimensions that FlashInfer names ``(m32, m4, rm, k4, rk, l)``."""
    row_tiles, block_tiles = padded_rows(num_rows) // TILE_ROWS, padded_blocks(k // MXFP8_BLOCK) // TILE_BLOCKS
    sizes = num_groups, row_tiles, block_tiles, ROW_GROUP, TILE_ROWS // ROW_GROUP, TILE_BLOCKS
    used = scales[: num_groups * row_tiles * block_tiles * TILE_ROWS * TILE_BLOCKS]
    return used.view(torch.float8_e8m0fnu).view(sizes).permute(3, 4, 1, 5, 2, 0)


def _tokens_config(shape: LayerShape, dtype: str, rounding: Rounding, load_alignment: int) -> MaskedConfig:
    how: dict[str, Any] = {"dtype": dtype, "rounding": rounding, "load_alignment": load_alignment}
    return MaskedConfig(tokens_config(shape, token_format=_FORMAT, **how), swiglu=False)


def _swiglu_config(shape: LayerShape, rounding: Rounding) -> MaskedConfig:
    rows = replace(shape, hidden_size=shape.intermediate_size)
    how: dict[str, Any] = {"rounding": rounding, "load_alignment": widest_load(shape.target)}
    return MaskedConfig(tokens_config(rows, dtype=DTYPE_NAMES[_GATE_UP], token_format=_FORMAT, **how), swiglu=True)


@functools.lru_cache(maxsize=1024)
def _kernel_for(config: MaskedConfig, target: str) -> Callable[..., Any]:
    return compile_config(config, target=target)


def compile_config(config: MaskedConfig, *, target: str) -> Callable[..., Any]:
    """The compiled kernel in front of a masked GEMM."""
    from vllm_rose_plugin.kernels.moe_batched.masked import build  # imports cutlass

    return compile(family="moe_batched", config=config, build=build, target=target)
