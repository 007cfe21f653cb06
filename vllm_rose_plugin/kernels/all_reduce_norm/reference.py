"""The sum over ranks, the residual and the norm, in plain torch.

The order of roundings is that of vLLM's all-reduce followed by its ``fused_add_rms_norm``, as in
``vllm/ir/ops/layernorm.py``: the sum over ranks is rounded to the dtype; sum and residual are added in float32; the new
residual is that, rounded; the norm starts from what wasn't rounded, is rounded, multiplied by the weight and rounded
again.
"""

from collections.abc import Sequence

import torch

from vllm_rose_plugin.kernels.all_reduce.reference import all_reduce


def all_reduce_norm(
    inputs: Sequence[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, *, eps: float, exact: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rms_norm(sum(inputs) + residual) * weight`` and the new residual.

    Args:
        inputs: of all ranks, bf16 or fp16 ``[T, H]``.
        residual: ``[T, H]`` in their dtype, the same on all ranks.
        weight: ``[H]`` in their dtype.
        eps: added to the mean of squares.
        exact: the norm in float64 from the rounded sum, rounded nowhere: the oracle of this function and the kernel.

    Returns:
        (normalized rows, new residual), what every rank gets, in the inputs' dtype; float64 if exact. Packed rows are
        what ``gemm.tokens.pack_tokens`` makes of the former.
    """
    total = all_reduce(inputs)
    if exact:
        wide = total.double() + residual.double()
        return wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double(), wide
    z = total.float() + residual.float()
    scaled = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + eps)
    return scaled.to(weight.dtype) * weight, z.to(residual.dtype)
