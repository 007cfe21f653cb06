"""The sum over ranks, in plain torch."""

from collections.abc import Sequence

import torch


def all_reduce(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """``x[0] + x[1] + …`` in float32 and in the order of the ranks, rounded once.

    The kernels that loop over peers have these bits; those that use multimem are within one rounding of them, since the
    switch adds in an order of its own.

    Args:
        inputs: of all ranks, bf16, fp16 or fp32, of one shape and dtype.

    Returns:
        What every rank gets, in the inputs' dtype.
    """
    total = inputs[0].float()
    for x in inputs[1:]:
        total = total + x.float()
    return total.to(inputs[0].dtype)
