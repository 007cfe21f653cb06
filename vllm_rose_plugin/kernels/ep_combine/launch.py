"""Combine and all-reduce through the buffer of an :class:`AllReduce`: one launch for few tokens, two for many."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from vllm_rose_plugin.kernels.all_reduce.launch import AllReduce
from vllm_rose_plugin.kernels.ep_combine.config import (
    EpCombineConfig,
    EpCombinePlan,
    choose_ep_plan,
    in_one_launch,
)
from vllm_rose_plugin.kernels.jit.compile import compile
from vllm_rose_plugin.kernels.moe_combine.launch import (
    call_of,
    check_operands,
    combine_tokens,
    kernel_operands,
    placement,
)


def ep_combine(
    reduce: AllReduce,
    y: torch.Tensor,
    *,
    slots: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    part: torch.Tensor | None = None,
    fused: bool | None = None,
    blocks: int | None = None,
) -> torch.Tensor:
    """The bits of ``reference.ep_combine`` (but for NaN's payload) where `reduce` loops over peers.

    A launch, or two, like any other of `reduce`: all ranks make the call in the same order, with the same number of
    tokens, dtypes, `fused` and `blocks`, all with `part` in the heap or none, and may capture it. Which rows, slots and
    alignments a rank has is its own affair; so is whether it has `shared`.

    Args:
        reduce: whose buffer is used; out must fit into it.
        y: bf16 or fp16 ``[S, H]``, the results of this rank's experts, as for :func:`combine_tokens`.
        slots: int32 ``[T, top_k]``; -1 where the expert is another rank's.
        topk_weights: float32 ``[T, top_k]``; None sums without weights.
        shared: bf16 or fp16 ``[T, H]``, this rank's part of the shared expert's output.
        out: where to write, ``[T, H]`` bf16 or fp16; None: a new tensor in y's dtype.
        part: like out, where this rank's own sum goes if there are two launches; a tensor of `reduce.empty` is read
            there by all-reduce (zero copy). None: out. One launch needs none.
        fused: one launch, or two; None: by the number of tokens.
        blocks: of the fused launch; None: the heuristic.

    Returns:
        out.

    Raises:
        PeerTimeoutError: an earlier launch gave up.
        TypeError, ValueError: what no kernel takes; the message names it.
    """
    reduce.check()
    out = check_operands(y, slots, topk_weights, shared, out, None)
    num_tokens, hidden_size = out.shape
    if not num_tokens:
        return out
    if out.nbytes > reduce.layout.capacity:
        raise ValueError(
            f"{out.nbytes} bytes of {tuple(out.shape)} {out.dtype} are more than max_bytes={reduce.layout.max_bytes}: "
            "make it larger"
        )
    if fused is None:
        fused = in_one_launch(num_tokens=num_tokens, hidden_size=hidden_size, group_size=reduce.group.size)
    if not fused:
        part = out if part is None else part
        combine_tokens(y, slots=slots, topk_weights=topk_weights, shared=shared, out=part, out_dtype=out.dtype)
        return reduce(part, out=out)
    plan = _plan(
        **call_of(y, slots, topk_weights, shared, out),
        **placement(slots, topk_weights, shared),
        group_size=reduce.group.size,
        access=reduce.access,
        target=reduce.target,
        sm_count=reduce.sm_count,
        same_bits=reduce.same_bits,
        blocks=blocks,
    )
    with torch.cuda.device(y.device):
        kernel(plan.config, reduce.target)(
            *kernel_operands(y, slots, topk_weights, shared, out), plan.blocks, *reduce.numbers(None, None)
        )
    return out


@functools.lru_cache(maxsize=8192)
def _plan(**call: Any) -> EpCombinePlan:
    return choose_ep_plan(**call)


@functools.cache
def kernel(config: EpCombineConfig, target: str) -> Callable:
    """The compiled kernel of a config."""
    from vllm_rose_plugin.kernels.ep_combine.kernel import build  # imports cutlass

    return compile(family="ep_combine", config=config, build=build, target=target)
