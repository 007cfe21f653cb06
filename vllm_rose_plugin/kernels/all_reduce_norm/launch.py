"""All-reduce, residual and RMS norm in one launch, through the buffer of an :class:`AllReduce`."""

import functools
from collections.abc import Callable

import torch

from vllm_rose_plugin.kernels.all_reduce.config import Tuning
from vllm_rose_plugin.kernels.all_reduce.launch import AllReduce
from vllm_rose_plugin.kernels.all_reduce_norm.config import DTYPES, AllReduceNormConfig, NormPlan, choose_norm_plan
from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm.checks import check_on_gpu
from vllm_rose_plugin.kernels.gemm.tokens import LAYOUT_OF, PackedTokens
from vllm_rose_plugin.kernels.jit.compile import compile
from vllm_rose_plugin.kernels.mxfp8_quantize.config import alignment_of
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import no_scales, quantized_like

DTYPE_NAMES = {getattr(torch, name): name for name in DTYPES}
_ALIGNMENT = 32


def all_reduce_norm(
    reduce: AllReduce,
    x: torch.Tensor,
    *,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    token_format: TokenFormat | None = None,
    activation: Activation | str = Activation.MXFP8,
    rounding: Rounding | str = Rounding.RCEIL,
    residual_out: torch.Tensor | None = None,
    tuning: Tuning | None = None,
) -> tuple[torch.Tensor | PackedTokens, torch.Tensor]:
    """``rms_norm(sum over ranks of x + residual) * weight``; see ``reference.py`` for the order of roundings.

    A launch like any other of `reduce`: all ranks make it in the same order, with the same sizes, format and tuning,
    and may capture it.

    Args:
        reduce: whose buffer is used; x must fit into it, or be a tensor of its :meth:`AllReduce.empty`.
        x: bf16 or fp16 ``[T, H]``, contiguous, H a multiple of 128.
        residual: like x, the same on all ranks.
        weight: ``[H]`` in x's dtype.
        eps: added to the mean of squares.
        token_format: what the GEMM that follows reads; None: x's dtype, ``[T, H]``.
        activation: as in :func:`gemm.tokens.pack_tokens`. It means nothing without a format.
        rounding: how scales are chosen.
        residual_out: where the new residual goes, like x; residual itself for in place. None: a new tensor.
        tuning: algorithm and blocks; None: the heuristic.

    Returns:
        (normalized rows, new residual).

    Raises:
        PeerTimeoutError: an earlier launch gave up.
        TypeError, ValueError: what no kernel takes; the message names it.
    """
    reduce.check()
    if residual_out is None:
        residual_out = torch.empty_like(residual)
    alignment = _check(x, residual, weight, residual_out)
    result, scales, rows = _result(x, token_format)
    if not x.shape[0]:
        return result, residual_out
    source = reduce.heap_offset(x)
    plan = norm_plan(
        reduce,
        x,
        alignment=alignment,
        token_format=token_format,
        activation=Activation(activation),
        rounding=Rounding(rounding),
        tuning=tuning,
    )
    if x.nbytes > reduce.layout.capacity:  # sums are stored there even where the input is read in place
        raise ValueError(
            f"{x.nbytes} bytes of {tuple(x.shape)} {x.dtype} are more than max_bytes={reduce.layout.max_bytes}: make "
            "it larger"
        )
    with torch.cuda.device(x.device):
        kernel(plan.config, reduce.target)(
            x,
            residual,
            weight,
            rows,
            scales,
            residual_out,
            eps,
            plan.blocks,
            *reduce.numbers(None if plan.config.copy_in else source, None),
        )
    return result, residual_out


def norm_plan(
    reduce: AllReduce,
    x: torch.Tensor,
    *,
    tuning: Tuning | None,
    alignment: int = _ALIGNMENT,
    token_format: TokenFormat | None = None,
    activation: Activation = Activation.MXFP8,
    rounding: Rounding = Rounding.RCEIL,
) -> NormPlan:
    """The kernel and the blocks of a launch for x ``[T, H]`` of some rows; see :func:`choose_norm_plan`.

    Raises:
        ValueError: no kernel takes it.
    """
    return _plan(
        num_rows=x.shape[0],
        hidden_size=x.shape[1],
        dtype=DTYPE_NAMES[x.dtype],
        group_size=reduce.group.size,
        access=reduce.access,
        zero_copy_in=reduce.heap_offset(x) is not None,
        alignment=alignment,
        target=reduce.target,
        sm_count=reduce.sm_count,
        token_format=token_format,
        activation=activation,
        rounding=rounding,
        same_bits=reduce.same_bits,
        tuning=tuning,
    )


def _result(
    x: torch.Tensor, token_format: TokenFormat | None
) -> tuple[torch.Tensor | PackedTokens, torch.Tensor, torch.Tensor]:
    """What is returned, and its scales and rows as the kernel takes them."""
    num_rows, hidden_size = x.shape
    if token_format is None or token_format is TokenFormat.BF16_PERMUTED:
        dtype = x.dtype if token_format is None else torch.bfloat16
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        result = out if token_format is None else PackedTokens(token_format, out, None, hidden_size)
        return result, no_scales(out), out
    layout = LAYOUT_OF[token_format]
    made: Mxfp8Tensor = quantized_like(x, num_rows=num_rows, hidden_size=hidden_size, layout=layout, out=None)
    return PackedTokens.of(made), made.scales, made.codes.view(torch.uint8)


def _check(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, residual_out: torch.Tensor) -> int:
    """Refuse what no kernel takes; the bytes of which all starts are multiples."""
    check_on_gpu("x", x)
    if x.dtype not in DTYPE_NAMES:
        raise TypeError(f"x must be {' or '.join(map(str, DTYPE_NAMES))}, got {x.dtype}")
    if x.ndim != 2:
        raise ValueError(f"x must be [T, H], got shape {tuple(x.shape)}: flatten its leading dimensions")
    places = 0
    for name, tensor, shape in (
        ("x", x, x.shape),
        ("residual", residual, x.shape),
        ("residual_out", residual_out, x.shape),
        ("weight", weight, x.shape[1:]),
    ):
        if tensor.dtype != x.dtype or tensor.shape != shape or tensor.device != x.device or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {tuple(shape)} {x.dtype} on {x.device}, "
                f"got {tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()} on {tensor.device}"
            )
        places |= tensor.data_ptr()
    apart = abs(residual.data_ptr() - residual_out.data_ptr())
    if 0 < apart < x.nbytes:
        raise ValueError("residual and residual_out overlap without being the same")
    return alignment_of(pointer=places, row_bytes=0, limit=_ALIGNMENT)


@functools.lru_cache(maxsize=8192)
def _plan(**call) -> NormPlan:
    return choose_norm_plan(**call)


@functools.cache
def kernel(config: AllReduceNormConfig, target: str) -> Callable:
    """The compiled kernel of a config."""
    from vllm_rose_plugin.kernels.all_reduce_norm.kernel import build  # imports cutlass

    return compile(family="all_reduce_norm", config=config, build=build, target=target)
