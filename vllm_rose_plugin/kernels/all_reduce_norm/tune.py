"""Which numbers of rows the fused launch serves: timed on the ranks themselves beside what it would replace."""

from collections.abc import Callable
from typing import Any

import torch

from vllm_rose_plugin.kernels.all_reduce.config import Tuning
from vllm_rose_plugin.kernels.all_reduce.launch import AllReduce
from vllm_rose_plugin.kernels.all_reduce.table import KIND, Table, candidates
from vllm_rose_plugin.kernels.all_reduce.tune import situation_of, time_replay
from vllm_rose_plugin.kernels.all_reduce_norm.config import AllReduceNormConfig
from vllm_rose_plugin.kernels.all_reduce_norm.launch import all_reduce_norm, kernel, norm_plan

_EPS = 1e-6


def tune_norm(
    reduce: AllReduce,
    *,
    hidden_size: int,
    dtype: torch.dtype,
    most_rows: int,
    unfused: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Any],
    unfused_name: str,
) -> Table:
    """The table of sizes in bytes, from the disk or from a measurement; collective.

    Where it says None, and above its largest size, what isn't fused was faster, or nothing was measured.

    Args:
        reduce: ready for plain launches.
        hidden_size: elements of a row.
        dtype: of the rows.
        most_rows: of a call.
        unfused: the same from (x, residual, weight, eps) without the fused launch; it may overwrite none of them.
        unfused_name: what that is and of which version, for the cache.

    Raises:
        GroupError, MissingRankError: some rank can't take rows of that size, or can't compile; the ranks can't agree.
        PeerTimeoutError: a rank didn't come along.
    """
    from vllm_rose_plugin.kernels.all_reduce_norm.kernel import build  # imports cutlass

    row_bytes = hidden_size * dtype.itemsize
    weight = torch.ones(hidden_size, dtype=dtype, device="cuda")

    def time_us(tuning: Tuning | None, num_bytes: int) -> float:
        x, residual = (torch.zeros(num_bytes // row_bytes, hidden_size, dtype=dtype, device="cuda") for _ in range(2))
        if tuning is None:
            return time_replay(reduce, lambda: unfused(x, residual, weight, _EPS))
        return time_replay(
            reduce, lambda: all_reduce_norm(reduce, x, residual=residual, weight=weight, eps=_EPS, tuning=tuning)
        )

    rows = [*(2**i for i in range(most_rows.bit_length()) if 2**i < most_rows), most_rows]
    tunings = candidates(sm_count=reduce.sm_count)

    def compile_all() -> None:
        for count in rows:
            x = torch.empty(count, hidden_size, dtype=dtype, device="cuda")
            for config in {norm_plan(reduce, x, tuning=tuning).config for tuning in tunings}:
                kernel(config, reduce.target)

    return KIND.measured(
        group=reduce.group,
        name="all-reduce and norm",
        situation=situation_of(reduce, build, f"rows of {hidden_size} {dtype}, {unfused_name}"),
        sizes=[count * row_bytes for count in rows],
        tunings=(None, *tunings),
        time_us=time_us,
        prepare=compile_all,
    )


def warm_norm(reduce: AllReduce, *, table: Table, hidden_size: int, dtype: torch.dtype, most_rows: int) -> int:
    """Compile, load and run once the kernels that the table can name for 1 to most_rows rows; collective.

    As all-reduce's :func:`~vllm_rose_plugin.kernels.all_reduce.warm.warm`, for tensors that start at a multiple of 32
    bytes.

    Returns:
        How many kernels there are.

    Raises:
        GroupError, MissingRankError: some rank can't compile them, or didn't arrive.
        PeerTimeoutError: a rank didn't come along.
    """
    x, residual = (torch.zeros(most_rows, hidden_size, dtype=dtype, device="cuda") for _ in range(2))
    weight = torch.ones(hidden_size, dtype=dtype, device="cuda")
    rows_of: dict[AllReduceNormConfig, int] = {}
    for rows in range(1, most_rows + 1):
        tuning = table.lookup(x[:rows].nbytes)
        if tuning is not None:
            rows_of.setdefault(norm_plan(reduce, x[:rows], tuning=tuning).config, rows)

    def compile_all() -> None:
        for config in rows_of:
            kernel(config, reduce.target)

    reduce.group.agree("all-reduce and norm: compile", compile_all)
    for rows in rows_of.values():
        all_reduce_norm(
            reduce,
            x[:rows],
            residual=residual[:rows],
            weight=weight,
            eps=_EPS,
            tuning=table.lookup(x[:rows].nbytes),
        )
    torch.cuda.synchronize()
    reduce.check()
    return len(rows_of)
