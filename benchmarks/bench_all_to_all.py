"""Dispatch and combine between two GPUs of one host: ours beside vLLM's allgather_reducescatter.

    python benchmarks/bench_all_to_all.py [--tokens 1 8 64] [--payload mxfp8 bfloat16] [--emulate 4 8 16 32 72]

Starts a process for each GPU and writes benchmarks/results/all_to_all.csv. H 4096, top-8 of 128 experts, all ranks with
the same number of tokens M. Every provider is timed as the replay of a CUDA graph with a chain of calls over rotating
buffers; providers take turns; a turn's time is the slowest rank's, and the median of the turns counts. After the chain
every result of ours is compared with the oracle, bit by bit, and the peer's within rounding.

`rose` is one call for dispatch and one for combine, each one launch where the step is small; `rose_split` sends and
receives in launches of their own. `dispatch` quantizes bf16 tokens; `pair` is a whole step whose experts' rows are
there already; `combine` is their difference, since combine never runs alone. The peer gets its tokens quantized, so its
time has no quantization in it; it gathers codes, scales, ids and weights in one NCCL group, and reduces and scatters
bf16 rows, through vLLM's own communicator, as vLLM's all_gatherv and reduce_scatterv do.

`gb_per_s` is what leaves a rank for the other: rows of tokens (and of results) whose experts are there. The limit is a
copy over NVLink, measured here.

`--emulate` adds no result to the table of providers: it runs many ranks on each GPU, one after another, so that every
launch meets the flags and plans of a rack; `us` is then the time of one rank's step.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable

# Before torch and NCCL look at it, here and in the ranks' processes: no multicast objects on shared machines.
os.environ["NCCL_NVLS_ENABLE"] = "0"

import torch
import torch.distributed as dist
from bench_all_reduce import peer_copy_limit
from quantize_timing import TURNS, Table

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.dp_combine import launch as combine
from vllm_rose_plugin.kernels.dp_combine.reference import combine_rows
from vllm_rose_plugin.kernels.dp_dispatch import launch as dispatch
from vllm_rose_plugin.kernels.dp_dispatch.reference import dispatch_tokens
from vllm_rose_plugin.kernels.dp_exchange.interface import ReceivedTokens
from vllm_rose_plugin.kernels.dp_exchange.layout import ExchangeShape, Layout, Payload
from vllm_rose_plugin.kernels.dp_exchange.memory import Place, new_received, no_tokens
from vllm_rose_plugin.kernels.dp_exchange.nvlink import NvlinkExchange
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8
from vllm_rose_plugin.memory.driver import Driver, HandleType
from vllm_rose_plugin.memory.rendezvous import group_from_process_group
from vllm_rose_plugin.memory.symmetric import allocate

RANKS = 2
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
HIDDEN_SIZE, TOP_K, NUM_EXPERTS = 4096, 8, 128
SETS = 8
_MIB = 2**20


class Case:
    """Tokens of all ranks for each of the sets of buffers, and this rank's tensors."""

    def __init__(self, shape: ExchangeShape, num_tokens: int, rank: int):
        self.shape, self.num_tokens, self.rank = shape, num_tokens, rank
        self.inputs = [[_inputs(shape, num_tokens, 100 * i + r) for r in range(shape.group_size)] for i in range(SETS)]
        self.received = [new_received(shape, num_tokens, torch.device("cuda", rank)) for _ in range(SETS)]
        total = shape.group_size * num_tokens
        self.rows = [[_rows(total, shape, 100 * i + r) for r in range(shape.group_size)] for i in range(SETS)]
        self.outs = [
            torch.empty(num_tokens, shape.hidden_size, dtype=torch.bfloat16, device="cuda") for _ in range(SETS)
        ]

    def expected(self, i: int) -> tuple[list[ReceivedTokens], torch.Tensor]:
        """(what every rank receives, this rank's result) of one set."""
        xs, ids, weights = zip(*self.inputs[i], strict=True)
        received = [
            dispatch_tokens(
                xs, topk_ids=ids, topk_weights=weights, shape=self.shape, rank=r, step_tokens=self.num_tokens
            )
            for r in range(self.shape.group_size)
        ]
        out = combine_rows(self.rows[i], received=received, topk_ids=ids[self.rank], shape=self.shape, rank=self.rank)
        return received, out

    def sent_rows(self) -> float:
        """Rows that leave this rank for others, on average over the sets."""
        counts = []
        for of_ranks in self.inputs:
            ranks = of_ranks[self.rank][1] // self.shape.num_local_experts
            others = [r for r in range(self.shape.group_size) if r != self.rank]
            counts.append(sum(int((ranks == r).any(1).sum()) for r in others))
        return statistics.mean(counts)


def _inputs(shape: ExchangeShape, num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(num_tokens, shape.hidden_size, generator=generator, device="cuda").bfloat16()
    scores = torch.rand(num_tokens, shape.num_experts, generator=generator, device="cuda")
    weights, ids = scores.topk(shape.top_k, dim=1)
    return x, ids.to(torch.int32).contiguous(), weights.contiguous()


def _rows(total: int, shape: ExchangeShape, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + 50)
    return torch.randn(total, shape.hidden_size, generator=generator, device="cuda").bfloat16()


def ours(exchange: NvlinkExchange, case: Case) -> dict[str, Callable[[int], None]]:
    """Calls on set i."""
    most = case.num_tokens

    def send_and_receive(i: int) -> None:
        x, ids, weights = case.inputs[i][case.rank]
        exchange.dispatch_send(x, topk_ids=ids, topk_weights=weights, step_tokens=most)
        exchange.dispatch_receive(step_tokens=most, out=case.received[i])

    def pair(i: int) -> None:
        send_and_receive(i)
        exchange.combine_send(case.rows[i][case.rank], received=case.received[i])
        exchange.combine_receive(topk_ids=case.inputs[i][case.rank][1], out=case.outs[i])

    def one_call(i: int) -> None:
        x, ids, weights = case.inputs[i][case.rank]
        exchange.dispatch(x, topk_ids=ids, topk_weights=weights, step_tokens=most, out=case.received[i])

    def pair_of_two(i: int) -> None:
        one_call(i)
        ids, rows = case.inputs[i][case.rank][1], case.rows[i][case.rank]
        exchange.combine(rows, received=case.received[i], topk_ids=ids, out=case.outs[i])

    return {
        "rose dispatch": one_call,
        "rose pair": pair_of_two,
        "rose_split dispatch": send_and_receive,
        "rose_split pair": pair,
    }


def check_ours(case: Case) -> None:
    """Raises where a result that the chain has left differs from the oracle in one bit."""
    for i in range(SETS):
        received, out = case.expected(i)
        mine, right = case.received[i], received[case.rank]
        count = int(right.num_rows)
        same = int(mine.num_rows) == count
        for name in ("topk_ids", "topk_weights", "row_sources"):
            same = same and torch.equal(getattr(mine, name), getattr(right, name))
        pairs = [(mine.tokens, right.tokens)]
        if isinstance(mine.tokens, Mxfp8Tensor):
            pairs = [(getattr(mine.tokens, n), getattr(right.tokens, n)) for n in ("codes", "scales")]
        for a, b in pairs:
            same = same and torch.equal(a[:count].view(torch.uint8), b[:count].view(torch.uint8))
        if not same:
            raise AssertionError(f"M={case.num_tokens}: dispatch of set {i} differs from the oracle")
        if not torch.equal(case.outs[i].view(torch.int16), out.view(torch.int16)):
            raise AssertionError(f"M={case.num_tokens}: the result of set {i} differs from the oracle")


class AllGatherReduceScatter:
    """vLLM's, through its NCCL communicator."""

    def __init__(self, communicator, case: Case):
        self.communicator, self.case = communicator, case
        self.given, self.gathered = [], []
        for i in range(SETS):
            x, ids, weights = case.inputs[i][case.rank]
            tensors = [x]
            if case.shape.payload is Payload.MXFP8:
                codes, scales = quantize_mxfp8(x)
                tensors = [codes.view(torch.uint8), scales]
            self.given.append([*tensors, weights, ids])
            self.gathered.append([t.new_empty((len(t) * RANKS, *t.shape[1:])) for t in self.given[i]])
        self.outs = [torch.empty_like(case.outs[0]) for _ in range(SETS)]

    def dispatch(self, i: int) -> None:
        self.communicator.group_start()
        for source, target in zip(self.given[i], self.gathered[i], strict=True):
            self.communicator.all_gather(target, source)
        self.communicator.group_end()

    def pair(self, i: int) -> None:
        self.dispatch(i)
        self.communicator.reduce_scatter(self.outs[i], self.case.rows[i][self.case.rank])

    def check(self) -> None:
        """Raises where something else was computed."""
        case = self.case
        for i in range(SETS):
            tokens = self.gathered[i][0][case.rank * case.num_tokens :][: case.num_tokens]
            parts = [rows[case.rank * case.num_tokens :][: case.num_tokens].float() for rows in case.rows[i]]
            if not torch.equal(tokens, self.given[i][0]) or not torch.allclose(
                self.outs[i].float(), sum(parts), rtol=2**-6, atol=2**-6
            ):
                raise AssertionError(f"M={case.num_tokens}: vLLM's all-gather or reduce-scatter gave something else")


def vllm_communicator(cpu_group, device: torch.device):
    """vLLM's NCCL communicator, None where the CUDA wheel isn't there."""
    try:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    except ImportError as error:
        print(f"left out: vllm_agrs: {error}")
        return None
    made = PyNcclCommunicator(group=cpu_group, device=device)
    return None if made.disabled else made


def times(found: dict[str, Callable[[int], None]], cpu_group, *, calls: int) -> dict[str, float]:
    """Microseconds of a call, the slowest rank's."""
    graphs = {}
    for name, call in found.items():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for i in range(2):
                call(i)
        stream.synchronize()
        dist.barrier(group=cpu_group)
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], stream=stream):
            for i in range(calls):
                call(i % SETS)
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


def bench_payload(rank: int, group, cpu_group, driver: Driver, communicator, table: Table, payload: Payload, tokens):
    shape = ExchangeShape(HIDDEN_SIZE, TOP_K, NUM_EXPERTS, max(tokens), RANKS, payload)
    layout = Layout(shape)
    with NvlinkExchange(driver=driver, group=group, shape=shape, handle_type=HandleType.POSIX_FD) as exchange:
        if rank == 0:
            print(layout.describe())
        exchange.warm_up(step_tokens=tuple(tokens))
        for num_tokens in tokens:
            case = Case(shape, num_tokens, rank)
            found = ours(exchange, case)
            peer = AllGatherReduceScatter(communicator, case) if communicator else None
            if peer:
                found |= {"vllm_agrs dispatch": peer.dispatch, "vllm_agrs pair": peer.pair}
            us = times(found, cpu_group, calls=80 if num_tokens <= 512 else 16)
            exchange.check()
            check_ours(case)
            if peer:
                peer.check()
            there, back = case.sent_rows() * layout.row_bytes, case.sent_rows() * 2 * HIDDEN_SIZE
            for provider in dict.fromkeys(name.split()[0] for name in us):
                of = {part: us[f"{provider} {part}"] for part in ("dispatch", "pair")}
                of["combine"] = of["pair"] - of["dispatch"]
                for part, moved in (("dispatch", there), ("combine", back), ("pair", there + back)):
                    table.add(
                        case=f"{part} {payload.value}",
                        provider=provider,
                        shape=f"M={num_tokens};H={HIDDEN_SIZE};E={NUM_EXPERTS};ranks={RANKS}",
                        us=of[part],
                        moved=moved,
                    )
            del case, found, peer
            torch.cuda.empty_cache()


def emulate(rank: int, group, cpu_group, driver: Driver, table: Table, ranks: int, num_tokens: int) -> None:
    """Half of the ranks on each GPU, one after another on one stream."""
    half = ranks // 2
    experts = -(-NUM_EXPERTS // ranks) * ranks
    shape = ExchangeShape(HIDDEN_SIZE, TOP_K, experts, num_tokens, ranks)
    layout = Layout(shape)
    stride = -(-layout.size // (2 * _MIB)) * 2 * _MIB
    with allocate(driver=driver, group=group, size=stride * half, handle_type=HandleType.POSIX_FD) as buffer:
        if buffer.size != stride * half:
            raise RuntimeError(f"the parts of {stride} bytes leave holes in a buffer of {buffer.size}")
        buffer.tensor(shape=(buffer.size,), dtype=torch.uint8).zero_()
        torch.cuda.synchronize()
        group.agree("clear", lambda: None)
        report = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        places = [
            Place(
                shape=shape,
                rank=rank * half + i,
                base=buffer.addresses[0],
                stride=stride,
                nanoseconds=30 * 10**9,
                report=report.data_ptr(),
                device=torch.device("cuda", rank),
                facts=device_facts(rank),
                nothing=no_tokens(shape, torch.device("cuda", rank)),
            )
            for i in range(half)
        ]
        inputs = [_inputs(shape, num_tokens, place.rank) for place in places]
        received = [new_received(shape, num_tokens, place.device) for place in places]
        rows = [_rows(ranks * num_tokens, shape, place.rank) for place in places]
        outs = [torch.empty_like(x) for x, _, _ in inputs]

        def step(_: int) -> None:
            for place, (x, ids, weights) in zip(places, inputs, strict=True):
                dispatch.send(place, x, topk_ids=ids, topk_weights=weights)
            for place, target in zip(places, received, strict=True):
                dispatch.receive(place, target)
            for place, source, of in zip(places, rows, received, strict=True):
                combine.send(place, source, received=of)
            for place, (_, ids, _), out in zip(places, inputs, outs, strict=True):
                combine.receive(place, topk_ids=ids, out=out)

        dispatch.warm_up(places[0], step_tokens=(num_tokens,), input="bfloat16")
        combine.warm_up(places[0], step_tokens=(num_tokens,))
        group.agree("warm", lambda: None)
        us = times({"step": step}, cpu_group, calls=4)["step"] / half
        if int(report):
            raise RuntimeError(f"rank {rank}: a wait came to its deadline: {int(report):#x}")
        for x, out in zip(inputs, outs, strict=True):
            if len(x[0]) and bool(out.isnan().any()):
                raise AssertionError("a row of the result isn't there")
    table.add(
        case="emulated pair",
        provider="rose",
        shape=f"M={num_tokens};H={HIDDEN_SIZE};E={experts};ranks={ranks}",
        us=us,
        moved=None,
    )


def bench(rank: int, store: str, tokens: list[int], payloads: list[str], emulated: list[int]) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    cpu_group = dist.group.WORLD
    group = group_from_process_group(cpu_group, address="127.0.0.1", name="bench")
    driver = Driver(device=rank)
    table = Table("all_to_all", peer_copy_limit(driver, group))
    table.rows[0]["provider"] = "peer_copy"
    communicator = vllm_communicator(cpu_group, device)
    for payload in payloads:
        bench_payload(rank, group, cpu_group, driver, communicator, table, Payload(payload), tokens)
    for ranks in emulated:
        for num_tokens in (1, 64):
            emulate(rank, group, cpu_group, driver, table, ranks, num_tokens)
    if rank == 0:
        table.write()
    dist.barrier(group=cpu_group)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="of each rank")
    parser.add_argument("--payload", nargs="+", default=[payload.value for payload in Payload])
    parser.add_argument("--emulate", type=int, nargs="*", default=[], help="even numbers of ranks")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(
            bench, (f"{directory}/store", arguments.tokens, arguments.payload, arguments.emulate), nprocs=RANKS
        )


if __name__ == "__main__":
    main()
