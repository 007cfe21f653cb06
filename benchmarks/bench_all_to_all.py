"""Dispatch and combine between two GPUs of one host: ours beside vLLM's, FlashInfer's and DeepEP's.

    python benchmarks/bench_all_to_all.py [--tokens 1 8 64] [--payload mxfp8] [--peers vllm_agrs] [--emulate 4 16 72]

Starts a process for each GPU and adds to benchmarks/results/all_to_all.csv after every M. H 4096, top-8 of 128 experts,
all ranks with the same number of tokens M. Every provider is timed as the replay of a CUDA graph with a chain of calls
over rotating buffers; providers take turns; a turn's time is the slowest rank's, and the median of the turns counts.
After the chain every result of ours is compared with the oracle, bit by bit, and the peers' within rounding. At the end
it says how `rose` stands beside the bars and the best peer. Peers are those of all_to_all_peers.py; what doesn't run is
left out with its reason.

`rose` is one call for dispatch and one for combine, each one launch where the step is small; `rose_split` sends and
receives in launches of their own. `dispatch` quantizes bf16 tokens; `pair` is a whole step whose experts' rows are
there already; `combine` is their difference, since combine never runs alone. The peer gets its tokens quantized, so its
time has no quantization in it; it gathers codes, scales, ids and weights in one NCCL group, and reduces and scatters
bf16 rows, through vLLM's own communicator, as vLLM's all_gatherv and reduce_scatterv do.

`gb_per_s` is what leaves a rank for the other: rows of tokens (and of results) whose experts are there. The limit is a
copy over NVLink, measured here.

`--emulate` runs many ranks on each GPU, one after another, so that every launch meets the flags and plans of a rack;
`us` is then the time of one rank's step, and the last lines give the microseconds for each further rank.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator

# Before torch and NCCL look at it, here and in the ranks' processes: no multicast objects on shared machines.
os.environ["NCCL_NVLS_ENABLE"] = "0"

import torch
import torch.distributed as dist
from all_to_all_peers import PEERS, SETS, Links, made
from bench_all_reduce import add_common, late, parse, peer_copy_limit
from quantize_timing import TURNS, Table

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.dp_combine import launch as combine
from vllm_rose_plugin.kernels.dp_combine.reference import combine_rows
from vllm_rose_plugin.kernels.dp_dispatch import launch as dispatch
from vllm_rose_plugin.kernels.dp_dispatch.reference import dispatch_tokens
from vllm_rose_plugin.kernels.dp_exchange.interface import ReceivedTokens
from vllm_rose_plugin.kernels.dp_exchange.layout import MAX_RANKS, ExchangeShape, Layout, Payload
from vllm_rose_plugin.kernels.dp_exchange.memory import Place, new_received, no_tokens
from vllm_rose_plugin.kernels.dp_exchange.nvlink import NvlinkExchange
from vllm_rose_plugin.kernels.dp_exchange.tune import tune
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts
from vllm_rose_plugin.memory.driver import Driver, HandleType
from vllm_rose_plugin.memory.rendezvous import group_from_process_group
from vllm_rose_plugin.memory.symmetric import allocate

RANKS = 2
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
HIDDEN_SIZE, TOP_K, NUM_EXPERTS = 4096, 8, 128
BARS = {1: 11.0, 2: 11.0, 4: 11.0, 8: 11.0, 16: 11.0, 64: 14.0, 128: 18.0, 512: 36.0}
"""Microseconds of a pair with mxfp8, by M."""
SHARE_BARS = {2048: 0.75}
"""Of a copy over NVLink, likewise."""
EMULATED_TOKENS = (1, 64)
_MIB = 2**20


class Case:
    """Tokens of all ranks for each of the sets of buffers, and this rank's tensors."""

    def __init__(self, shape: ExchangeShape, num_tokens: int, rank: int):
        self.shape, self.num_tokens, self.rank = shape, num_tokens, rank
        self.device = torch.device("cuda", rank)
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

    def poison(self) -> None:
        """Nothing of an earlier chain may pass for a result."""
        for received, out in zip(self.received, self.outs, strict=True):
            received.topk_ids.fill_(-(2**31))
            received.num_rows.fill_(-1)
            out.fill_(float("nan"))

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


def check_ours(case: Case, name: str) -> None:
    """Raises where a result that the chain of `name` has left differs from the oracle in one bit."""
    for i in range(SETS):
        received, out = case.expected(i)
        mine, right = case.received[i], received[case.rank]
        count = int(right.num_rows)
        same = int(mine.num_rows) == count
        for field in ("topk_ids", "topk_weights", "row_sources"):
            same = same and torch.equal(getattr(mine, field), getattr(right, field))
        pairs = [(mine.tokens, right.tokens)]
        if isinstance(mine.tokens, Mxfp8Tensor):
            pairs = [(getattr(mine.tokens, n), getattr(right.tokens, n)) for n in ("codes", "scales")]
        for a, b in pairs:
            same = same and torch.equal(a[:count].view(torch.uint8), b[:count].view(torch.uint8))
        if not same:
            raise AssertionError(f"M={case.num_tokens}: {name}: dispatch of set {i} differs from the oracle")
        if name.endswith("pair") and not torch.equal(case.outs[i].view(torch.int16), out.view(torch.int16)):
            raise AssertionError(f"M={case.num_tokens}: {name}: the result of set {i} differs from the oracle")


def times(
    found: dict[str, Callable[[int], None]], cpu_group, *, calls: int, case: Case | None = None
) -> dict[str, float]:
    """Microseconds of a call, the slowest rank's. Then the chains of ours are replayed once more for the oracle."""
    graphs = {}
    for name, call in found.items():
        graph, reason = _captured(call, cpu_group, calls=calls)
        failed = torch.tensor(bool(reason))
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=cpu_group)
        if not failed:
            graphs[name] = graph
        elif reason and name.startswith("rose"):
            raise RuntimeError(f"{name}: {reason}")
        else:
            print(f"left out: {name}: {reason or 'it failed on another rank'}", flush=True)
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
    for name in [name for name in graphs if case and name.startswith("rose")]:
        case.poison()
        torch.cuda.synchronize()
        dist.barrier(group=cpu_group)
        graphs[name].replay()
        torch.cuda.synchronize()
        check_ours(case, name)
    return {name: statistics.median(values) for name, values in measured.items()}


def _captured(call: Callable[[int], None], cpu_group, *, calls: int) -> tuple[torch.cuda.CUDAGraph, str]:
    """(a graph of a chain of calls, why there is none)."""
    graph, stream, reason = torch.cuda.CUDAGraph(), torch.cuda.Stream(), ""
    try:
        with torch.cuda.stream(stream):
            for i in range(2):
                call(i)
        stream.synchronize()
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
    dist.barrier(group=cpu_group)
    if reason:
        return graph, reason
    try:
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                call(i % SETS)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
    return graph, reason


def verdicts(rows: Iterable[dict[str, str]]) -> Iterator[str]:
    """Pairs of `rose` beside the bars and the best peer of the same case and shape; how latency grows with ranks.

    Args:
        rows: of the table.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    shares: dict[tuple[str, str], float] = {}
    emulated: dict[int, list[tuple[int, float]]] = {}
    for row in rows:
        sizes = dict(part.split("=") for part in row["shape"].split(";") if "=" in part)
        if row["case"] == "emulated pair":
            emulated.setdefault(int(sizes["M"]), []).append((int(sizes["ranks"]), float(row["us"])))
        elif row["case"].startswith("pair "):
            found.setdefault((row["case"], sizes["M"]), {})[row["provider"]] = float(row["us"])
            if row["provider"] == "rose":
                shares[row["case"], sizes["M"]] = float(row["share_of_limit"])
    for (case, size), us in found.items():
        peers = {name: value for name, value in us.items() if not name.startswith("rose")}
        if "rose" not in us:
            continue
        line, num_tokens = f"{case} M={size}: rose {us['rose']:.1f} us", int(size)
        bar = BARS.get(num_tokens) if case == "pair mxfp8" else None
        if bar is not None:
            line += f", bar {bar:g}{' MISSED' if us['rose'] > bar else ''}"
        least = SHARE_BARS.get(num_tokens) if case == "pair mxfp8" else None
        if least is not None:
            line += (
                f", {shares[case, size]:.2f} of a copy, bar {least}{' MISSED' if shares[case, size] < least else ''}"
            )
        if peers:
            best = min(peers, key=lambda name: peers[name])
            share, most = us["rose"] / peers[best], 0.7 if num_tokens >= 64 else 0.85
            line += f", {share:.2f} times {best}, bar {most}{' MISSED' if share > most else ''}"
        yield line
    for size, points in sorted(emulated.items()):
        if len(points) > 1:
            yield f"emulated ranks, M={size}: {slope(points):+.3f} us for each further rank, of {sorted(points)}"


def slope(points: list[tuple[int, float]]) -> float:
    """Microseconds for each further rank, by least squares.

    Args:
        points: (ranks, microseconds of one rank's step), of two numbers of ranks at least.
    """
    ranks, us = zip(*points, strict=True)
    return statistics.linear_regression(ranks, us).slope


def bench_payload(
    rank: int, group, links: Links, driver: Driver, table: Table, payload: Payload, arguments: argparse.Namespace
) -> None:
    """All numbers of tokens."""
    shape = ExchangeShape(HIDDEN_SIZE, TOP_K, NUM_EXPERTS, max(arguments.tokens), RANKS, payload)
    layout = Layout(shape)
    with NvlinkExchange(driver=driver, group=group, shape=shape, handle_type=HandleType.POSIX_FD) as exchange:
        if rank == 0:
            print(layout.describe())
        exchange.warm_up()
        group.agree("warm", lambda: None)
        tune(exchange)
        if rank == 0 and exchange.table:
            print(f"{payload.value}: " + ", ".join(f"{n}: {t.way.value}/{t.share}" for n, t in exchange.table.rows))
        for num_tokens in arguments.tokens:
            if late(arguments, links.cpu_group, f"{payload.value} M={num_tokens}"):
                break
            case = Case(shape, num_tokens, rank)
            found = ours(exchange, case)
            beside = [peer for peer in (made(name, links, case) for name in arguments.peers) if peer is not None]
            for peer in beside:
                found |= {f"{peer.name} dispatch": peer.dispatch, f"{peer.name} pair": peer.pair}
            us = times(found, links.cpu_group, calls=80 if num_tokens <= 512 else 16, case=case)
            exchange.check()
            for peer in beside:
                peer.check()
                peer.close()
            there, back = case.sent_rows() * layout.row_bytes, case.sent_rows() * 2 * HIDDEN_SIZE
            for provider in dict.fromkeys(name.split()[0] for name in us):
                of = {part: us[f"{provider} {part}"] for part in ("dispatch", "pair") if f"{provider} {part}" in us}
                if len(of) < 2:  # one of them couldn't be captured
                    continue
                of["combine"] = of["pair"] - of["dispatch"]
                for part, moved in (("dispatch", there), ("combine", back), ("pair", there + back)):
                    table.add(
                        case=f"{part} {payload.value}",
                        provider=provider,
                        shape=f"M={num_tokens};H={HIDDEN_SIZE};E={NUM_EXPERTS};ranks={RANKS}",
                        us=of[part],
                        moved=moved,
                    )
            if rank == 0:
                table.write()
            del case, found, beside
            torch.cuda.empty_cache()


def check_emulated(shape: ExchangeShape, num_tokens: int, rank: int, out: torch.Tensor) -> None:
    """Raises where the result of one of the emulated ranks differs from the oracle in one bit."""
    ranks = range(shape.group_size)
    xs, ids, weights = zip(*(_inputs(shape, num_tokens, r) for r in ranks), strict=True)
    received = [dispatch_tokens(xs, topk_ids=ids, topk_weights=weights, shape=shape, rank=r) for r in ranks]
    rows = [_rows(shape.group_size * num_tokens, shape, r) for r in ranks]
    right = combine_rows(rows, received=received, topk_ids=ids[rank], shape=shape, rank=rank)
    if not torch.equal(out.view(torch.int16), right.view(torch.int16)):
        raise AssertionError(f"{shape.group_size} emulated ranks, M={num_tokens}: the result differs from the oracle")


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
        check_emulated(shape, num_tokens, places[0].rank, outs[0])
    table.add(
        case="emulated pair",
        provider="rose",
        shape=f"M={num_tokens};H={HIDDEN_SIZE};E={experts};ranks={ranks}",
        us=us,
        moved=None,
    )
    if rank == 0:
        table.write()


def bench(rank: int, store: str, arguments: argparse.Namespace) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    cpu_group = dist.group.WORLD
    group = group_from_process_group(cpu_group, address="127.0.0.1", name="bench")
    driver = Driver(device=rank)
    table = Table("all_to_all", peer_copy_limit(driver, group), path=arguments.out)
    table.rows[0]["provider"] = "peer_copy"
    links = Links(cpu_group)
    for payload in arguments.payload:
        bench_payload(rank, group, links, driver, table, Payload(payload), arguments)
    for ranks in arguments.emulate:
        for num_tokens in EMULATED_TOKENS:
            if late(arguments, cpu_group, f"{ranks} emulated ranks, M={num_tokens}"):
                break
            emulate(rank, group, cpu_group, driver, table, ranks, num_tokens)
    if rank == 0:
        print(*verdicts(table.rows), sep="\n", flush=True)
    dist.barrier(group=cpu_group)
    dist.destroy_process_group()


def parsed() -> argparse.Namespace:
    """The arguments, refused before a process starts where they can't be run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    most = ExchangeShape(HIDDEN_SIZE, TOP_K, NUM_EXPERTS, 1, RANKS).most_tokens
    payloads = [payload.value for payload in Payload]
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="of each rank")
    parser.add_argument("--payload", nargs="+", choices=payloads, default=payloads)
    parser.add_argument("--peers", nargs="*", choices=tuple(PEERS), default=list(PEERS))
    parser.add_argument("--emulate", type=int, nargs="*", default=[], help="even numbers of ranks, to 72")
    add_common(parser, "all_to_all")
    arguments = parse(parser)
    if not all(1 <= tokens <= most for tokens in arguments.tokens):
        parser.error(f"--tokens {arguments.tokens} must be 1 to {most}")
    if not all(2 <= ranks <= MAX_RANKS and ranks % 2 == 0 for ranks in arguments.emulate):
        parser.error(f"--emulate {arguments.emulate} must be even numbers of ranks, 2 to {MAX_RANKS}")
    return arguments


def main() -> None:
    arguments = parsed()
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(bench, (f"{directory}/store", arguments), nprocs=RANKS)


if __name__ == "__main__":
    main()
