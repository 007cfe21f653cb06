"""Times an AllReduce on its own ranks and gives it the table that follows."""

import torch

from vllm_rose_plugin.kernels.all_reduce.config import Tuning
from vllm_rose_plugin.kernels.all_reduce.launch import AllReduce
from vllm_rose_plugin.kernels.all_reduce.table import SIZES, candidates, measured_table
from vllm_rose_plugin.kernels.jit.compile import compiler_versions
from vllm_rose_plugin.kernels.jit.fingerprint import sources_of

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

    device = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(device)
    situation = "; ".join(
        (
            f"{properties.name}, {properties.multi_processor_count} SMs, CUDA {torch.version.cuda}",
            f"{reduce.group.size} ranks, {reduce.access.value}, max_bytes={reduce.layout.max_bytes}",
            compiler_versions(),
            sources_of(build).digest,
        )
    )
    reduce.table = measured_table(
        group=reduce.group,
        situation=situation,
        sizes=[size for size in SIZES if size <= reduce.layout.max_bytes],
        tunings=candidates(sm_count=properties.multi_processor_count),
        time_us=lambda tuning, num_bytes: _time_us(reduce, tuning, num_bytes),
    )


def _time_us(reduce: AllReduce, tuning: Tuning, num_bytes: int) -> float:
    """Microseconds of a call, as the replay of a graph: the best of some turns, since ranks don't start together."""
    x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(x)
    reduce.launch(x, out, tuning)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            reduce.launch(x, out, tuning)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(_TURNS):
        reduce.launch(x, out, tuning)  # the ranks meet
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3 / _CALLS)
    reduce.check()
    return best
