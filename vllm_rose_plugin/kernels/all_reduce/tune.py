"""Times an AllReduce on its own ranks and gives it the table that follows."""

from collections.abc import Callable
from typing import Any

import torch

from vllm_rose_plugin.kernels.all_reduce.config import Tuning
from vllm_rose_plugin.kernels.all_reduce.launch import AllReduce, kernel
from vllm_rose_plugin.kernels.all_reduce.table import KIND, candidates, sizes_up_to
from vllm_rose_plugin.kernels.jit.compile import compiler_versions
from vllm_rose_plugin.kernels.jit.fingerprint import sources_of
from vllm_rose_plugin.kernels.jit.providers import this_machine
from vllm_rose_plugin.kernels.timed_table import replay_us

_CALLS = 20
_TURNS = 5


def tune(reduce: AllReduce) -> None:
    """Set `reduce.table` from the disk or from a measurement; collective, a few seconds.

    Before the first request: it compiles every kernel that the table can name, in bf16.

    Raises:
        GroupError, MissingRankError: the ranks can't agree.
        PeerTimeoutError: a rank didn't come along.
    """
    from vllm_rose_plugin.kernels.all_reduce.kernel import build  # imports cutlass

    def time_us(tuning: Tuning | None, num_bytes: int) -> float:
        x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device="cuda")
        out = torch.empty_like(x)
        return time_replay(reduce, lambda: reduce.launch(x, out, tuning))

    sizes = sizes_up_to(reduce.layout.max_bytes)
    tunings = candidates(sm_count=reduce.sm_count)

    def compile_all() -> None:
        for num_bytes in sizes:
            x = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device="cuda")
            for config in {reduce.plan(x, x, tuning).config for tuning in tunings}:
                kernel(config, reduce.target)

    def room() -> None:
        """A rank that has no memory for the largest tensors says so before anybody launches."""
        torch.empty(2 * reduce.layout.max_bytes, dtype=torch.uint8, device="cuda")

    reduce.group.agree("all-reduce: memory to time it in", room)
    reduce.table = KIND.measured(
        group=reduce.group,
        name="all-reduce",
        situation=situation_of(reduce, build),
        sizes=sizes,
        tunings=tunings,
        time_us=time_us,
        prepare=compile_all,
    )


def situation_of(reduce: AllReduce, build: Callable[..., Any], *further: str) -> str:
    """Everything that times depend on, as text, the same on all ranks of one kind of machine.

    Args:
        build: of the kernel that is timed.
        further: what else they depend on.
    """
    machine = this_machine()
    return "; ".join(
        (
            f"{machine.device}, {reduce.sm_count} SMs, driver {machine.driver}, CUDA {torch.version.cuda}",
            f"{reduce.group.size} ranks, {reduce.access.value}, max_bytes={reduce.layout.max_bytes}"
            + (", same bits" if reduce.same_bits else ""),
            compiler_versions(),
            sources_of(build).digest,
            *further,
        )
    )


def time_replay(reduce: AllReduce, call: Callable[[], Any]) -> float:
    """Microseconds of a call; of :func:`~vllm_rose_plugin.kernels.timed_table.replay_us`."""
    best = replay_us(call, calls=_CALLS, turns=_TURNS)
    reduce.check()
    return best
