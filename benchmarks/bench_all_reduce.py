"""All-reduce over GPUs, bf16: ours beside NCCL, vLLM's custom all-reduce, torch's and FlashInfer's.

    python benchmarks/bench_all_reduce.py [--ranks 2] [--bytes 8192 1048576] [--tune] [--peers nccl vllm_custom]
    torchrun --nnodes 18 --nproc-per-node 4 … benchmarks/bench_all_reduce.py --tune --access nvls

Starts a process for each GPU of this host, or is one of torchrun's on each of several. Writes
benchmarks/results/all_reduce.csv, or, for other than two ranks without NVLS, a file with their number in its name.
Every provider is timed as the replay of a CUDA graph with many calls over rotating buffers; providers take turns; a
turn's time is the slowest rank's, and the median of the turns counts. Rows of ours say how many blocks they launch;
the other SMs are free for what overlaps. `gb_per_s` is the tensor's bytes by the time, so
for two ranks, which must send each other the whole tensor, it can be held against the limit: a copy from the other
GPU's memory, measured here.

`rose_zero_copy`, `torch_one_shot` and `torch_two_shot` have their input in symmetric memory already, always the same
one; the others' inputs rotate. A peer that is missing, refuses a size or computes something else is named and left
out, on all ranks alike.

No multicast object is made but by ours with `--access nvls`, for machines that nobody else uses: on a host whose GPUs
are shared, one that fails half-way can disturb others. NCCL runs without NVLS, torch's symmetric memory without
multicast, vLLM's custom all-reduce without the buffer it makes for other collectives, FlashInfer's as its trtllm
backend; without `nvls`, whoever asks the driver for one through its Python bindings gets an error.
"""

import argparse
import contextlib
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before torch and NCCL look at them, here and in the ranks' processes.
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"

import torch
import torch.distributed as dist
from quantize_timing import Table, buffer_sets

from vllm_rose_plugin.kernels.all_reduce.config import Access
from vllm_rose_plugin.kernels.all_reduce.launch import AllReduce
from vllm_rose_plugin.kernels.all_reduce.reference import all_reduce
from vllm_rose_plugin.kernels.all_reduce.tune import tune
from vllm_rose_plugin.memory.driver import Driver
from vllm_rose_plugin.memory.handles import settle_handle_type
from vllm_rose_plugin.memory.rendezvous import group_from_process_group
from vllm_rose_plugin.memory.symmetric import allocate

MIB = 2**20
BYTES = tuple(2**i for i in range(13, 27))
TURNS = 15
ROW = 4096
"""Elements of a row, for who reduces rows."""
PEERS = ("nccl", "vllm_custom", "torch", "flashinfer")
_ACCESSES = {Access.PEERS: "p2p", Access.MULTIMEM: "nvls"}
LARGE_BAR, LINK_BAR, LINK_FROM = 0.75, 0.8, 16 * MIB
"""Of the best peer's time from 1 MiB on, below its whole; of the rate of one-way copies, from so many bytes on."""
_MOST_SETS = 32


class Provider:
    """How one all-reduce is called, on set i of the inputs; `around` surrounds the capture of its graph."""

    def __init__(self, call: Callable[[int], torch.Tensor], around: Callable = contextlib.nullcontext):
        self.call, self.around = call, around


def everywhere(done: bool, cpu_group) -> bool:
    """Whether it is done on all ranks."""
    verdict = torch.tensor(int(done))
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=cpu_group)
    return bool(verdict)


def add_common(parser: argparse.ArgumentParser, area: str) -> None:
    """Arguments of all benchmarks over several GPUs."""
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which no further size begins")
    parser.add_argument("--out", type=Path, help=f"the CSV file, benchmarks/results/{area}.csv by default")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, with the moment of the deadline: one clock serves the processes of a host."""
    arguments = parser.parse_args()
    arguments.until = time.monotonic() + arguments.deadline
    return arguments


def late(arguments: argparse.Namespace, cpu_group, what: str) -> bool:
    """Whether the deadline has passed on some rank; collective."""
    if everywhere(time.monotonic() < arguments.until, cpu_group):
        return False
    if dist.get_rank(cpu_group) == 0:
        print(f"deadline: {what} and what follows was not measured", flush=True)
    return True


def left_out(name: str, reason: object) -> None:
    """One line that says so."""
    text = f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else str(reason)
    print(f"left out: {name}: {text.splitlines()[0][:300]}", flush=True)


def built(name: str, make: Callable[[], Any], cpu_group) -> Any:
    """What `make` makes, None unless it works on all ranks."""
    made, reason = None, "it isn't there on another rank"
    try:
        made = make()
    except Exception as error:
        reason = error
    if everywhere(made is not None, cpu_group):
        return made
    left_out(name, reason)
    return None


def vllm_custom(cpu_group, device: torch.device):
    """vLLM's custom all-reduce."""
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    class WithoutMulticast(CustomAllreduce):
        def _init_mnnvl_buffer(self, stage_size):
            """For other collectives, over multicast."""

    made = WithoutMulticast(group=cpu_group, device=device)
    if made.disabled:
        raise RuntimeError("it has disabled itself")
    return made


def torch_symmetric(cpu_group, elements: int) -> tuple[torch.Tensor, str]:
    """A tensor in torch's symmetric memory, and the name of its group."""
    import torch.distributed._symmetric_memory as symmetric_memory

    buffer = symmetric_memory.empty(elements, dtype=torch.bfloat16, device="cuda")
    handle = symmetric_memory.rendezvous(buffer, cpu_group.group_name)
    if handle.multicast_ptr:
        raise RuntimeError("it has made a multicast object")
    buffer.zero_()
    return buffer, cpu_group.group_name


def flashinfer_workspace(cpu_group, rank: int, ranks: int, largest: int, dtype: torch.dtype = torch.bfloat16):
    """FlashInfer's trtllm backend, which works without multicast, for rows of ROW elements."""
    import flashinfer.comm as comm
    from flashinfer.comm.mnnvl import TorchDistBackend

    return comm.create_allreduce_fusion_workspace(
        backend="trtllm",
        world_size=ranks,
        rank=rank,
        max_token_num=max(1, largest // (ROW * dtype.itemsize)),
        hidden_dim=ROW,
        dtype=dtype,
        comm_backend=TorchDistBackend(group=cpu_group),
        group=cpu_group,
    )


def flashinfer_one_shot(num_bytes: int, ranks: int) -> bool:
    """Which algorithm vLLM 0.33 asks FlashInfer for on sm_90."""
    return num_bytes <= {2: 32, 4: 2, 8: 0.5}.get(ranks, 0) * MIB


class Peers:
    """The peers that could be built, each once for all sizes."""

    def __init__(self, wanted: list[str], *, cpu_group, device: torch.device, rank: int, ranks: int, largest: int):
        self.wanted, self.ranks = wanted, ranks
        self.custom = self.symmetric = self.workspace = None
        if "vllm_custom" in wanted:
            self.custom = built("vllm_custom", lambda: vllm_custom(cpu_group, device), cpu_group)
        if "torch" in wanted:
            self.symmetric = built("torch", lambda: torch_symmetric(cpu_group, largest // 2), cpu_group)
        if "flashinfer" in wanted:
            make = lambda: flashinfer_workspace(cpu_group, rank, ranks, largest)  # noqa: E731
            self.workspace = built("flashinfer", make, cpu_group)

    def providers(self, xs: torch.Tensor, outs: torch.Tensor) -> dict[str, Provider]:
        """Those that take inputs of this size; what doesn't is named."""
        found: dict[str, Provider] = {}
        count = xs.shape[1]
        if "nccl" in self.wanted:

            def nccl(i: int) -> torch.Tensor:
                dist.all_reduce(xs[i])
                return xs[i]

            found["nccl"] = Provider(nccl)
        if self.custom is not None:
            if self.custom.should_custom_ar(xs[0]):
                found["vllm_custom"] = Provider(lambda i: self.custom.custom_all_reduce(xs[i]), self.custom.capture)
            else:
                left_out("vllm_custom", f"it doesn't take {2 * count} bytes")
        if self.symmetric is not None:
            buffer, name = self.symmetric
            x, ops = buffer[:count], torch.ops.symm_mem
            found["torch_one_shot"] = Provider(lambda i: ops.one_shot_all_reduce(x, "sum", name))
            found["torch_two_shot"] = Provider(lambda i: ops.two_shot_all_reduce_(x, "sum", name))
        if self.workspace is not None:
            if count % ROW:
                left_out("flashinfer", f"{2 * count} bytes aren't rows of {ROW}")
            else:
                found["flashinfer"] = Provider(lambda i: self.flashinfer(xs[i], outs[i]))
        return found

    def flashinfer(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """As vLLM calls it."""
        import flashinfer.comm as comm

        rows = x.view(-1, ROW)
        comm.allreduce_fusion(
            input=rows,
            workspace=self.workspace,
            pattern=comm.AllReduceFusionPattern.kAllReduce,
            launch_with_pdl=True,
            trigger_completion_at_end=True,
            output=out.view(-1, ROW),
            use_oneshot=flashinfer_one_shot(x.nbytes, self.ranks),
            fp32_acc=True,
        )
        return out


def providers(
    reduce: AllReduce, peers: Peers, xs: torch.Tensor, outs: torch.Tensor, heap: torch.Tensor
) -> dict[str, Provider]:
    """xs and outs are ``[sets, N]``; heap has room for one input."""
    zero_copy = heap[: xs.shape[1]]
    return {
        "rose": Provider(lambda i: reduce(xs[i], out=outs[i])),
        "rose_zero_copy": Provider(lambda i: reduce(zero_copy, out=zero_copy)),
        **peers.providers(xs, outs),
    }


def checked(
    found: dict[str, Provider], xs: torch.Tensor, inputs_of: list[torch.Tensor], cpu_group, rank: int, ranks: int
) -> dict[str, Provider]:
    """Those whose sum is within one rounding of the reference, on all ranks. Ours must be.

    Args:
        inputs_of: where a provider reads its input, other than xs[0].
    """
    sound = {}
    for name, provider in found.items():
        generators = [torch.Generator("cuda").manual_seed(r) for r in range(ranks)]
        inputs = [torch.randn(xs.shape[1], generator=g, device="cuda").bfloat16() for g in generators]
        for place in (xs[0], *inputs_of):
            place[: xs.shape[1]].copy_(inputs[rank])
        torch.cuda.synchronize()
        everywhere(True, cpu_group)  # some read the peers' input without asking
        reason: object = "it computed something else"
        try:
            result = provider.call(0)
            torch.cuda.synchronize()
            right = torch.allclose(result.float(), all_reduce(inputs).float(), rtol=2**-6, atol=2**-6)
        except Exception as error:
            if name.startswith("rose"):
                raise
            right, reason = False, error
        if everywhere(right, cpu_group):
            sound[name] = provider
        elif name.startswith("rose"):
            raise AssertionError(f"{name} computed something else")
        else:
            left_out(name, reason)
    for place in (xs, *inputs_of):
        place.zero_()  # replays in place must not grow beyond all numbers
    torch.cuda.synchronize()
    return sound


def times(found: dict[str, Provider], cpu_group, *, sets: int, calls: int) -> dict[str, float]:
    """Microseconds of a call, the slowest rank's."""
    graphs = {}
    for name, provider in found.items():
        for i in range(min(2, sets)):
            provider.call(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        reason: object = "it can't be captured on another rank"
        try:
            with provider.around(), torch.cuda.graph(graph):
                for i in range(calls):
                    provider.call(i % sets)
            captured = True
        except Exception as error:
            captured, reason = False, error
        if everywhere(captured, cpu_group):
            graphs[name] = graph
        else:
            left_out(name, reason)
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
    handle_type = settle_handle_type(driver=driver, group=group).handle_type
    with allocate(driver=driver, group=group, size=size, handle_type=handle_type) as buffer:
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


def forbid_multicast() -> None:
    """Whoever asks the driver's Python bindings for a multicast object gets an error instead."""
    import cuda.bindings.driver as bindings

    def refuse(*_: object) -> None:
        raise RuntimeError("no multicast objects in this benchmark")

    bindings.cuMulticastCreate = refuse


def bench_size(reduce: AllReduce, peers: Peers, table: Table, heap: torch.Tensor, cpu_group, size: int) -> None:
    """Adds the rows of one size in bytes."""
    rank, ranks = reduce.group.rank, reduce.group.size
    sets = min(_MOST_SETS, buffer_sets(2 * size, rotate=True))
    xs = torch.zeros(sets, size // 2, dtype=torch.bfloat16, device="cuda")
    outs = torch.empty_like(xs)
    found = providers(reduce, peers, xs, outs, heap)
    elsewhere = [heap, *([peers.symmetric[0]] if peers.symmetric else [])]
    found = checked(found, xs, elsewhere, cpu_group, rank, ranks)
    us = times(found, cpu_group, sets=sets, calls=200 if size <= MIB else 20)
    reduce.check()
    plans = {"rose": reduce.plan(xs[0], outs[0], reduce.tuning(xs[0]))}
    zero_copy = heap[: xs.shape[1]]
    plans["rose_zero_copy"] = reduce.plan(zero_copy, zero_copy, reduce.tuning(zero_copy))
    for name, value in us.items():
        blocks = f";blocks={plans[name].blocks}" if name in plans else ""
        table.add(case=str(size), provider=name, shape=f"bytes={size};ranks={ranks}{blocks}", us=value, moved=size)
    for name, plan in plans.items() if rank == 0 else ():
        algorithm = f"{plan.config.algorithm.value}, {plan.blocks} blocks of {plan.config.threads}"
        print(f"{size} bytes, {name}: {algorithm}", flush=True)
    if rank == 0:
        table.write()
    torch.cuda.empty_cache()


def verdicts(rows: list[dict[str, Any]]) -> Iterator[str]:
    """For every size: ours over the best peer beside its bar; with the input in the buffer over all peers, of which
    torch's has it there too, otherwise over the others."""
    us: dict[int, dict[str, float]] = {}
    shares: dict[int, float] = {}
    for row in rows:
        if row["case"] != "limit":
            us.setdefault(int(row["case"]), {})[row["provider"]] = float(row["us"])
            if row["provider"].startswith("rose"):
                shares[int(row["case"])] = max(shares.get(int(row["case"]), 0), float(row["share_of_limit"]))
    for size, found in sorted(us.items()):
        peers = {name: value for name, value in found.items() if not name.startswith("rose")}
        bar, parts = LARGE_BAR if size >= MIB else 1.0, []
        for ours, beside in (("rose", [n for n in peers if not n.startswith("torch")]), ("rose_zero_copy", [*peers])):
            if ours in found and beside:
                best = min(beside, key=peers.__getitem__)
                ratio = found[ours] / peers[best]
                parts.append(f"{ours} {ratio:.2f} of {best}, bar {bar}{'' if ratio <= bar else ' MISSED'}")
        if parts and size >= LINK_FROM:
            missed = "" if shares[size] >= LINK_BAR else " MISSED"
            parts.append(f"{shares[size]:.2f} of a copy's rate, bar {LINK_BAR}{missed}")
        if parts:
            yield f"{size} bytes: {'; '.join(parts)}"


def area_of(ranks: int, access: Access) -> str:
    """Name of the results' file."""
    return "all_reduce" if (ranks, access) == (2, Access.PEERS) else f"all_reduce_{_ACCESSES[access]}_{ranks}"


def bench(rank: int, store: str | None, arguments: argparse.Namespace) -> None:
    """One rank's process; store: a file that the ranks of this host share, None: torchrun's environment."""
    access = next(access for access, name in _ACCESSES.items() if name == arguments.access)
    if access is Access.PEERS:
        forbid_multicast()
    ranks, sizes = arguments.ranks, sorted(arguments.bytes)
    local = rank if store else int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    how: dict = {"store": dist.FileStore(store, ranks)} if store else {"init_method": "env://"}
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=device, **how)
    cpu_group = dist.new_group(backend="gloo")
    address = "127.0.0.1" if store else socket.gethostbyname(socket.gethostname())
    group = group_from_process_group(cpu_group, address=address, name="bench")
    driver = Driver(device=local)
    table = Table(area_of(ranks, access), peer_copy_limit(driver, group), path=arguments.out)
    table.rows[0]["provider"] = "peer_copy"
    largest = max(sizes)
    peers = Peers(arguments.peers, cpu_group=cpu_group, device=device, rank=rank, ranks=ranks, largest=largest)
    try:
        with AllReduce(driver=driver, group=group, max_bytes=largest, heap_bytes=largest, access=access) as reduce:
            if arguments.tune:
                tune(reduce)
            heap = reduce.empty((largest // 2,), torch.bfloat16)
            for size in sizes:
                if late(arguments, cpu_group, f"{size} bytes"):
                    break
                bench_size(reduce, peers, table, heap, cpu_group, size)
            del heap
    finally:  # what was measured until something broke is a result
        if rank == 0:
            print(*verdicts(table.rows), sep="\n", flush=True)
    dist.barrier(group=cpu_group)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, nargs="+", default=list(BYTES))
    parser.add_argument(
        "--tune", action="store_true", help="measure the table of algorithms first, or take it from disk"
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--access", choices=[*_ACCESSES.values()], default="p2p", help="nvls makes a multicast object")
    add_common(parser, "all_reduce")
    arguments = parse(parser)
    if "LOCAL_RANK" in os.environ:  # torchrun's
        arguments.ranks = int(os.environ["WORLD_SIZE"])
        bench(int(os.environ["RANK"]), None, arguments)
        return
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(bench, (f"{directory}/store", arguments), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
