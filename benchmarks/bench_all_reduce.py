"""All-reduce over the GPUs of one host, bf16: ours beside NCCL and vLLM's custom all-reduce.

    python benchmarks/bench_all_reduce.py [--ranks 2] [--bytes 8192 1048576] [--tune]

Starts a process for each GPU and writes benchmarks/results/all_reduce.csv. Every provider is timed as the replay of a
CUDA graph with many calls over rotating buffers; providers take turns; a turn's time is the slowest rank's, and the
median of the turns counts. `gb_per_s` is the tensor's bytes by the time, so for two ranks, which must send each other
the whole tensor, it can be held against the limit: a copy from the other GPU's memory, measured here.

No multicast object is made: on a host whose GPUs are shared, one that fails half-way can disturb others. So NCCL runs
without NVLS, vLLM's without the buffer it makes for other collectives, and torch's symmetric memory isn't measured.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable

# Before torch and NCCL look at them, here and in the ranks' processes.
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"

import torch
import torch.distributed as dist
from quantize_timing import Table, buffer_sets

from vllm_rose_plugin.kernels.all_reduce.launch import AllReduce
from vllm_rose_plugin.kernels.all_reduce.reference import all_reduce
from vllm_rose_plugin.kernels.all_reduce.tune import tune
from vllm_rose_plugin.memory.driver import Driver, HandleType
from vllm_rose_plugin.memory.rendezvous import group_from_process_group
from vllm_rose_plugin.memory.symmetric import allocate

MIB = 2**20
BYTES = tuple(2**i for i in range(13, 27))
TURNS = 15
_MOST_SETS = 32


class Provider:
    """How one all-reduce is called, on set i of the inputs; `around` surrounds the capture of its graph."""

    def __init__(self, call: Callable[[int], torch.Tensor], around: Callable = contextlib.nullcontext):
        self.call, self.around = call, around


def vllm_custom(cpu_group, device: torch.device):
    """vLLM's custom all-reduce, None where the CUDA wheel isn't there."""
    try:
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    except ImportError as error:
        print(f"left out: vllm_custom: {error}")
        return None

    class WithoutMulticast(CustomAllreduce):
        def _init_mnnvl_buffer(self, stage_size):
            """For other collectives, over multicast."""

    made = WithoutMulticast(group=cpu_group, device=device)
    return None if made.disabled else made


def providers(reduce: AllReduce, custom, xs: torch.Tensor, heap: torch.Tensor) -> dict[str, Provider]:
    """xs is ``[sets, N]``; heap has room for one input."""
    outs = torch.empty_like(xs)
    zero_copy = heap[: xs.shape[1]]
    found = {
        "rose": Provider(lambda i: reduce(xs[i], out=outs[i])),
        "rose_zero_copy": Provider(lambda i: reduce(zero_copy, out=zero_copy)),
    }

    def nccl(i: int) -> torch.Tensor:
        dist.all_reduce(xs[i])
        return xs[i]

    found["nccl"] = Provider(nccl)
    if custom is not None and custom.should_custom_ar(xs[0]):
        found["vllm_custom"] = Provider(lambda i: custom.custom_all_reduce(xs[i]), custom.capture)
    return found


def check(found: dict[str, Provider], xs: torch.Tensor, heap: torch.Tensor, rank: int, ranks: int) -> None:
    """Raises where a provider's sum is further from the reference than one rounding."""
    for name, provider in found.items():
        generators = [torch.Generator("cuda").manual_seed(r) for r in range(ranks)]
        inputs = [torch.randn(xs.shape[1], generator=g, device="cuda").bfloat16() for g in generators]
        xs[0].copy_(inputs[rank])
        heap[: xs.shape[1]].copy_(inputs[rank])
        result = provider.call(0)
        expected = all_reduce(inputs).float()
        torch.cuda.synchronize()
        if not torch.allclose(result.float(), expected, rtol=2**-6, atol=2**-6):
            raise AssertionError(f"{name} computed something else")
    xs.zero_()
    heap.zero_()  # replays in place must not grow beyond all numbers


def times(found: dict[str, Provider], cpu_group, *, sets: int, calls: int) -> dict[str, float]:
    """Microseconds of a call, the slowest rank's."""
    graphs = {}
    for name, provider in found.items():
        for i in range(min(2, sets)):
            provider.call(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with provider.around(), torch.cuda.graph(graph):
            for i in range(calls):
                provider.call(i % sets)
        graphs[name] = graph
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    measured: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(TURNS + 2):
        for name, graph in graphs.items():
            torch.cuda.synchronize()
            dist.barrier(group=cpu_group)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            us = torch.tensor(start.elapsed_time(end) * 1e3 / calls)
            dist.all_reduce(us, op=dist.ReduceOp.MAX, group=cpu_group)
            if turn >= 2:
                measured[name].append(us.item())
    return {name: statistics.median(values) for name, values in measured.items()}


def peer_copy_limit(driver: Driver, group) -> tuple[float, int]:
    """GB/s of a copy from the next rank's memory while all ranks copy, and the bytes that it moves."""
    size = 256 * MIB
    with allocate(driver=driver, group=group, size=size, handle_type=HandleType.POSIX_FD) as buffer:
        target = torch.empty(size, dtype=torch.uint8, device="cuda")
        source = buffer.addresses[(group.rank + 1) % group.size]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        rates = []
        for _ in range(7):
            torch.cuda.synchronize()
            group.agree("copy", lambda: None)
            stream = torch.cuda.current_stream().cuda_stream
            start.record()
            for _ in range(4):
                driver.call("cuMemcpyDtoDAsync", target.data_ptr(), source, size, stream)
            end.record()
            end.synchronize()
            rates.append(4 * size / start.elapsed_time(end) / 1e6)
        slowest = min(group.agree("rates", lambda: statistics.median(rates)))
    return slowest, size


def bench(rank: int, ranks: int, store: str, sizes: list[int], tuned: bool) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, device_id=device)
    cpu_group = dist.new_group(backend="gloo")
    group = group_from_process_group(cpu_group, address="127.0.0.1", name="bench")
    driver = Driver(device=rank)
    table = Table("all_reduce", peer_copy_limit(driver, group))
    table.rows[0]["provider"] = "peer_copy"
    custom = vllm_custom(cpu_group, device)
    largest = max(sizes)
    with AllReduce(driver=driver, group=group, max_bytes=largest, heap_bytes=largest) as reduce:
        if tuned:
            tune(reduce)
        heap = reduce.empty((largest // 2,), torch.bfloat16)
        for size in sizes:
            sets = min(_MOST_SETS, buffer_sets(2 * size, rotate=True))
            xs = torch.zeros(sets, size // 2, dtype=torch.bfloat16, device="cuda")
            found = providers(reduce, custom, xs, heap)
            check(found, xs, heap, rank, ranks)
            us = times(found, cpu_group, sets=sets, calls=200 if size <= MIB else 20)
            reduce.check()
            for name, value in us.items():
                table.add(case=str(size), provider=name, shape=f"bytes={size};ranks={ranks}", us=value, moved=size)
            if rank == 0:
                plan = reduce.plan(xs[0], xs[0], reduce.table.lookup(size) if reduce.table else None)
                print(f"{size} bytes: {plan.config.algorithm.value}, {plan.blocks} blocks of {plan.config.threads}")
            del xs, found
            torch.cuda.empty_cache()
        del heap
    if rank == 0:
        table.write()
    dist.barrier(group=cpu_group)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, nargs="+", default=list(BYTES))
    parser.add_argument(
        "--tune", action="store_true", help="measure the table of algorithms first, or take it from disk"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(
            bench, (arguments.ranks, f"{directory}/store", arguments.bytes, arguments.tune), nprocs=arguments.ranks
        )


if __name__ == "__main__":
    main()
