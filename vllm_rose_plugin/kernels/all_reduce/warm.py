"""Makes every kernel that a model's tensors can need, before a request or a graph capture needs it."""

import torch

from vllm_rose_plugin.kernels.all_reduce.config import AllReduceConfig
from vllm_rose_plugin.kernels.all_reduce.launch import AllReduce, kernel


def warm(reduce: AllReduce, *, hidden_size: int, dtype: torch.dtype, most_rows: int) -> int:
    """Compile, load and run once the kernels for (rows, hidden_size) with 1 to most_rows rows; collective.

    Loading a kernel while a peer waits makes that peer wait, and during a capture it may fail. After this, a call with
    such tensors that start at a multiple of 32 bytes finds its plan and its kernel.

    Args:
        reduce: with the table that is to serve.
        hidden_size: elements of a row.
        dtype: of the tensors.
        most_rows: of a tensor; it must not be larger than the buffer takes.

    Returns:
        How many kernels there are.

    Raises:
        GroupError, MissingRankError: some rank can't compile them, or didn't arrive.
        PeerTimeoutError: a rank didn't come along.
    """
    x = torch.zeros(most_rows, hidden_size, dtype=dtype, device="cuda")
    out = torch.empty_like(x)
    rows_of: dict[AllReduceConfig, int] = {}
    for rows in range(1, most_rows + 1):
        plan = reduce.plan(x[:rows], out[:rows], reduce.tuning(x[:rows]))
        rows_of.setdefault(plan.config, rows)

    def compile_all() -> None:
        for config in rows_of:
            kernel(config, reduce.target)

    # Nobody launches before all have compiled: how long that takes differs with the ranks' caches.
    reduce.group.agree("all-reduce: compile", compile_all)
    for rows in rows_of.values():
        reduce(x[:rows], out[:rows])
    torch.cuda.synchronize()
    reduce.check()
    return len(rows_of)
