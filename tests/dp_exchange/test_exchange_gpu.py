"""The exchange on two GPUs, a process for each, over file descriptor handles."""

import contextlib
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "memory"))
sys.path.insert(0, str(Path(__file__).parent))
from exchange_cases import (
    difference,
    expected_out,
    expected_received,
    expert_rows,
    inputs_of,
    same_bits,
    shape_of,
)
from rank_processes import in_processes

from vllm_rose_plugin.kernels import timed_table
from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.dp_exchange.layout import Payload
from vllm_rose_plugin.kernels.dp_exchange.nvlink import NvlinkExchange
from vllm_rose_plugin.kernels.dp_exchange.table import candidates, sizes
from vllm_rose_plugin.kernels.dp_exchange.tune import tune
from vllm_rose_plugin.kernels.peer_timeout import PeerTimeoutError
from vllm_rose_plugin.memory.driver import Driver, HandleType
from vllm_rose_plugin.memory.rendezvous import group_from_process_group

pytestmark = pytest.mark.multi_gpu
SMALL = {"hidden_size": 512, "top_k": 8, "experts_each": 16}
SECONDS = 300
"""Of a test: the first one of a shape compiles its kernels."""
LARGE = {"hidden_size": 4096, "top_k": 8, "experts_each": 64}


def on_two_gpus(function, *arguments):
    with tempfile.TemporaryDirectory() as directory:
        return in_processes(2, function, f"{directory}/store", *arguments, seconds=SECONDS)


@contextlib.contextmanager
def exchanging(rank, store, shape, *, timeout=30.0, name="pair", dirty=True):
    torch.cuda.set_device(rank)
    torch.zeros(1, device="cuda")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    group = group_from_process_group(dist.group.WORLD, address="127.0.0.1", name=name, timeout=SECONDS)
    with NvlinkExchange(
        driver=Driver(device=rank), group=group, shape=shape, handle_type=HandleType.POSIX_FD, timeout=timeout
    ) as exchange:
        if dirty:  # what was never sent must not be read
            layout = exchange.layout
            rest = (layout.size - layout.plans,)
            exchange._buffer.tensor(shape=rest, dtype=torch.uint8, offset=layout.plans).fill_(0xFF)
            torch.cuda.synchronize()
            group.agree("dirty", lambda: None)
        exchange.warm_up()
        group.agree("warm", lambda: None)
        yield exchange


def on_gpu(inputs):
    x, ids, weights = inputs
    x = Mxfp8Tensor(x.codes.cuda(), x.scales.cuda()) if isinstance(x, Mxfp8Tensor) else x.cuda()
    return x, ids.cuda(), weights.cuda()


def inputs_for(shape, counts, seed, **how):
    return [on_gpu(inputs_of(shape, count, 100 * seed + rank, **how)) for rank, count in enumerate(counts)]


def fresh(exchange, step_tokens=None):
    """Tensors to receive into, with values in them that must not stay."""
    out = exchange.new_received(step_tokens=step_tokens)
    out.topk_ids.fill_(-(2**31))
    out.topk_weights.fill_(float("nan"))
    out.row_sources.fill_(2**31 - 1)
    out.num_rows.fill_(-1)
    return out


def step(exchange, inputs, *, step_tokens=None, out=None, fused=False):
    """One step of this rank, with its halves in two calls each, or in one."""
    x, ids, weights = inputs
    if fused:
        received = exchange.dispatch(x, topk_ids=ids, topk_weights=weights, step_tokens=step_tokens, out=out)
        return received, exchange.combine(expert_rows(received), received=received, topk_ids=ids)
    exchange.dispatch_send(x, topk_ids=ids, topk_weights=weights, step_tokens=step_tokens)
    received = exchange.dispatch_receive(step_tokens=step_tokens, out=out)
    exchange.combine_send(expert_rows(received), received=received)
    return received, exchange.combine_receive(topk_ids=ids)


def fault_of(exchange, inputs, received, out, step_tokens=None):
    fault = difference(received, expected_received(inputs, exchange.shape, exchange.rank, step_tokens))
    if fault:
        return fault
    right = expected_out(inputs, exchange.shape, exchange.rank, step_tokens)
    return "" if same_bits(out, right) else f"{int((out != right).any(1).sum())} rows of the result differ"


def _subsets(rank, store, payload, codes, fused):
    shape = shape_of(2, max_tokens=300, payload=payload, **SMALL)
    faults = []
    with exchanging(rank, store, shape) as exchange:
        for seed, counts in enumerate(itertools.product((0, 1, 300), repeat=2)):
            inputs = inputs_for(shape, counts, seed, codes=codes)
            received, out = step(exchange, inputs[rank], out=fresh(exchange), fused=fused)
            faults.append(fault_of(exchange, inputs, received, out))
        exchange.check()
    return [fault for fault in faults if fault]


HALVES = pytest.mark.parametrize("fused", [False, True], ids=["two launches", "one launch"])


@HALVES
@pytest.mark.parametrize(
    ("payload", "codes"), [(Payload.MXFP8, False), (Payload.MXFP8, True), (Payload.BF16, False)], ids=str
)
def test_every_subset_of_none_one_and_most(payload, codes, fused):
    assert on_two_gpus(_subsets, payload, codes, fused) == [[], []]


def _mixed(rank, store, steps):
    shape = shape_of(2, max_tokens=2048, **SMALL)
    draw, faults = random.Random(5), []
    with exchanging(rank, store, shape) as exchange:
        for number in range(steps):
            most = draw.choice((None, 1, 16, 128, 1000))
            limit = most or 2048
            busy = number // 50 % 2
            counts = [draw.randrange(limit + 1) if r == busy else draw.choice((0, 1, limit // 8)) for r in range(2)]
            inputs = inputs_for(shape, counts, number)
            fused = (rank + number) % 3 == 0  # the other rank may choose otherwise
            received, out = step(exchange, inputs[rank], step_tokens=most, out=fresh(exchange, most), fused=fused)
            if number % 10 == 0 or number > steps - 5:
                faults.append(fault_of(exchange, inputs, received, out, most))
        exchange.check()
    return [fault for fault in faults if fault]


def test_a_thousand_mixed_steps_with_one_busy_rank():
    assert on_two_gpus(_mixed, 1000) == [[], []]


def _constant(rank, store):
    shape = shape_of(2, max_tokens=128, **LARGE)
    with exchanging(rank, store, shape) as exchange:
        x, ids, weights = on_gpu(inputs_of(shape, 128, rank, wrong=0))
        exchange.dispatch_send(x, topk_ids=ids, topk_weights=weights)
        received = exchange.dispatch_receive()
        rows = (received.topk_weights.sum(1, keepdim=True) * 2).bfloat16().expand(-1, shape.hidden_size).contiguous()
        exchange.combine_send(rows, received=received)
        out = exchange.combine_receive(topk_ids=ids)
        exact = 2 * weights.sum(1, keepdim=True).expand_as(out)
        return bool(torch.allclose(out.float(), exact, rtol=2**-7))


def test_constant_experts_give_the_weights_sum_once():
    assert on_two_gpus(_constant) == [True, True]


def captured(exchange, inputs, received, rows, out, fused):
    """A graph of one step whose experts give `rows`."""
    x, ids, weights = inputs

    def run():
        if fused:
            exchange.dispatch(x, topk_ids=ids, topk_weights=weights, step_tokens=len(ids), out=received)
            exchange.combine(rows, received=received, topk_ids=ids, out=out)
            return
        exchange.dispatch_send(x, topk_ids=ids, topk_weights=weights, step_tokens=len(ids))
        exchange.dispatch_receive(step_tokens=len(ids), out=received)
        exchange.combine_send(rows, received=received)
        exchange.combine_receive(topk_ids=ids, out=out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def _replays(rank, store, tokens, replays, fused):
    shape = shape_of(2, max_tokens=tokens, **LARGE)
    with exchanging(rank, store, shape) as exchange:
        inputs = inputs_for(shape, (tokens, tokens), 3)
        right = expected_received(inputs, shape, rank)
        rows = expert_rows(right)
        result = expected_out(inputs, shape, rank)
        count = int(right.num_rows)
        received, out = fresh(exchange), torch.empty_like(result)
        graph = captured(exchange, inputs[rank], received, rows, out, fused)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(replays):
            received.tokens.codes.view(torch.uint8).fill_(0xFF)
            received.topk_ids.fill_(-7)
            received.num_rows.fill_(-1)
            out.fill_(float("nan"))
            graph.replay()
            codes = received.tokens.codes.view(torch.uint8)[:count] != right.tokens.codes.view(torch.uint8)[:count]
            wrong += codes.any(1).sum() + (received.topk_ids != right.topk_ids).any(1).sum()
            wrong += (received.tokens.scales[:count] != right.tokens.scales[:count]).any(1).sum()
            wrong += (received.row_sources != right.row_sources).sum() + (received.num_rows != count).sum()
            wrong += (out.view(torch.int16) != result.view(torch.int16)).any(1).sum()
        torch.cuda.synchronize()
        exchange.check()
        return int(wrong)


@pytest.mark.parametrize(
    ("tokens", "fused"), [(256, False), (256, True), (1024, False)], ids=["256", "256 in one launch", "1024"]
)
def test_two_thousand_replays_row_by_row(tokens, fused):
    assert on_two_gpus(_replays, tokens, 2000, fused) == [0, 0]


def _back_to_back(rank, store, beside, fused):
    shape = shape_of(2, max_tokens=64, **LARGE)
    with exchanging(rank, store, shape) as exchange:
        nccl, busy = None, None
        if beside:
            nccl = dist.new_group(backend="nccl")
            busy = torch.ones(2**22, device="cuda")
            dist.all_reduce(busy, group=nccl)
        inputs = [inputs_for(shape, (64 - i, 1 + i), i) for i in range(8)]
        rows = [expert_rows(expected_received(of, shape, rank)) for of in inputs]
        rights = [expected_out(of, shape, rank) for of in inputs]
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        outs = []
        for pair in range(128):
            x, ids, weights = inputs[pair % 8][rank]
            if fused:
                received = exchange.dispatch(x, topk_ids=ids, topk_weights=weights)
                outs.append(exchange.combine(rows[pair % 8], received=received, topk_ids=ids))
            else:
                exchange.dispatch_send(x, topk_ids=ids, topk_weights=weights)
                received = exchange.dispatch_receive()
                exchange.combine_send(rows[pair % 8], received=received)
                outs.append(exchange.combine_receive(topk_ids=ids))
            if beside and pair % 16 == 0:
                with torch.cuda.stream(side):
                    dist.all_reduce(busy, group=nccl)
        torch.cuda.synchronize()
        exchange.check()
        return sum(not same_bits(out, rights[pair % 8]) for pair, out in enumerate(outs))


@HALVES
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "with a collective on a side stream"])
def test_128_pairs_without_a_look_by_the_host(beside, fused):
    assert on_two_gpus(_back_to_back, beside, fused) == [0, 0]


def _apart(rank, store, seconds):
    shape = shape_of(2, max_tokens=64, **SMALL)
    faults = []
    with exchanging(rank, store, shape) as exchange:
        for turn in range(4):
            inputs = inputs_for(shape, (64, 3), turn)
            if rank == turn % 2:
                time.sleep(seconds)
            received, out = step(exchange, inputs[rank], out=fresh(exchange))
            faults.append(fault_of(exchange, inputs, received, out))
        exchange.check()
    return [fault for fault in faults if fault]


@pytest.mark.parametrize("seconds", [0.1, 4.0])
def test_ranks_that_enter_apart(seconds):
    assert on_two_gpus(_apart, seconds) == [[], []]


def _idle(rank, store, steps):
    """Rank 1 has no tokens, step after step, or tokens whose ids are all padding."""
    shape = shape_of(2, max_tokens=32, **SMALL)
    with exchanging(rank, store, shape) as exchange:
        inputs = inputs_for(shape, (32, 0), 1)
        padding = inputs_for(shape, (32, 8), 1)
        padding[1][1].fill_(-1)
        faults = []
        for number in range(steps):
            now = padding if number % 3 == 0 else inputs
            received, out = step(exchange, now[rank])
            if number % 100 == 0:
                faults.append(fault_of(exchange, now, received, out))
        torch.cuda.synchronize()
        exchange.check()
    return [fault for fault in faults if fault]


def test_a_rank_that_is_idle_for_a_long_time():
    assert on_two_gpus(_idle, 3000) == [[], []]


def _two_exchanges(rank, store):
    """As two engines, or two micro-batches, on two streams."""
    shape = shape_of(2, max_tokens=128, **LARGE)
    with exchanging(rank, store, shape, name="a") as first, exchanging(rank, store, shape, name="b") as second:
        inputs = [inputs_for(shape, (128, 100), seed) for seed in range(2)]
        rows = [expert_rows(expected_received(of, shape, rank)) for of in inputs]
        rights = [expected_out(of, shape, rank) for of in inputs]
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        wrong = 0
        for _ in range(50):
            outs = []
            for i, exchange in enumerate((first, second)):
                x, ids, weights = inputs[i][rank]
                with torch.cuda.stream(streams[i]):
                    exchange.dispatch_send(x, topk_ids=ids, topk_weights=weights)
            for i, exchange in enumerate((first, second)):
                with torch.cuda.stream(streams[i]):
                    received = exchange.dispatch_receive()
                    exchange.combine_send(rows[i], received=received)
                    outs.append(exchange.combine_receive(topk_ids=inputs[i][rank][1]))
            torch.cuda.synchronize()
            wrong += sum(not same_bits(out, right) for out, right in zip(outs, rights, strict=True))
        return wrong


def test_two_exchanges_at_once():
    assert on_two_gpus(_two_exchanges) == [0, 0]


def _tuned(rank, store, cache):
    """Steps of every size that a table knows, as it says and in every other way that it could have said."""
    timed_table.cache_folder = lambda: Path(cache)  # kernels stay where they are
    shape = shape_of(2, max_tokens=300, **SMALL)
    faults = []
    with exchanging(rank, store, shape) as exchange:
        tune(exchange)
        first = exchange.table
        assert list(Path(cache).rglob("*.json")), "kept elsewhere"
        assert [size for size, _ in first.rows] == [*sizes(300)]
        exchange.table = None
        tune(exchange)
        assert exchange.table == first, "not from the disk"
        for seed, (tokens, _) in enumerate(first.rows):
            inputs = inputs_for(shape, (tokens, tokens // 2), seed)
            for tuning in (None, *candidates()):
                with exchange.forced(tuning) if tuning else contextlib.nullcontext():
                    out = fresh(exchange, tokens)
                    received, out = step(exchange, inputs[rank], step_tokens=tokens, out=out, fused=True)
                fault = fault_of(exchange, inputs, received, out, tokens)
                faults.append(fault and f"{tokens} tokens, {tuning}: {fault}")
        exchange.check()
    return [fault for fault in faults if fault]


def test_every_way_that_a_table_can_name(tmp_path):
    assert on_two_gpus(_tuned, str(tmp_path)) == [[], []]


def _engine(process, stores):
    """Processes 0 and 1 are one engine, 2 and 3 another, on the same two GPUs."""
    rank = process % 2
    shape = shape_of(2, max_tokens=64, **SMALL)
    faults = []
    with exchanging(rank, stores[process // 2], shape, name="all-to-all") as exchange:
        for turn in range(200):
            inputs = inputs_for(shape, (64, turn % 64), turn + 1000 * (process // 2))
            received, out = step(exchange, inputs[rank], out=fresh(exchange), fused=turn % 2 == 0)
            if turn % 10 == 0:
                faults.append(fault_of(exchange, inputs, received, out))
        exchange.check()
    return [fault for fault in faults if fault]


def test_two_engines_on_one_host_at_once():
    with tempfile.TemporaryDirectory() as directory:
        assert in_processes(4, _engine, (f"{directory}/one", f"{directory}/other"), seconds=SECONDS) == [[]] * 4


def _moved(rank, store):
    """Experts change places while steps go on, as EPLB does: the same tokens with other physical ids."""
    shape = shape_of(2, max_tokens=64, **SMALL)
    faults = []
    with exchanging(rank, store, shape) as exchange:
        for turn in range(20):
            places = torch.randperm(shape.num_experts, generator=torch.Generator().manual_seed(turn)).to(torch.int32)
            inputs = []
            for r in range(2):
                x, ids, weights = inputs_of(shape, 64, r, wrong=0)
                inputs.append(on_gpu((x, places[ids.long()], weights)))
            received, out = step(exchange, inputs[rank], out=fresh(exchange))
            faults.append(fault_of(exchange, inputs, received, out))
    return [fault for fault in faults if fault]


def test_experts_that_move_between_steps():
    assert on_two_gpus(_moved) == [[], []]


def _dead(rank, store, stage, killed, fused):
    timeout = 2.0
    shape = shape_of(2, max_tokens=16, **SMALL)
    with exchanging(rank, store, shape, timeout=timeout) as exchange:
        x, ids, weights = inputs = on_gpu(inputs_of(shape, 16, rank, wrong=0))
        step(exchange, inputs)
        torch.cuda.synchronize()
        if rank == 1:
            if stage == "combine":
                exchange.dispatch_send(x, topk_ids=ids, topk_weights=weights)
                exchange.dispatch_receive()
                torch.cuda.synchronize()
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3 * timeout)
            return None
        start = time.monotonic()
        errors = []
        try:
            for _ in range(50):  # many launches, one deadline
                received, _ = step(exchange, inputs, fused=fused)
            torch.cuda.synchronize()
            exchange.check()
        except PeerTimeoutError as error:
            errors.append((error.peer, error.phase, error.epoch))
        torch.cuda.synchronize()
        try:
            exchange.check()
        except PeerTimeoutError as error:
            errors.append((error.peer, error.phase, error.epoch))
        known = (received.topk_ids >= -1) & (received.topk_ids < shape.num_local_experts)
        return errors, time.monotonic() - start, bool(known.all())


@HALVES
@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("stage", ["dispatch", "combine"])
def test_a_dead_rank_is_named_within_the_deadline(stage, killed, fused):
    (errors, seconds, known), second = on_two_gpus(_dead, stage, killed, fused)
    assert second is None
    phase = "dispatch plan" if stage == "dispatch" else "combine row"
    assert errors and set(errors) == {(1, phase, 2)}
    assert known and 1.9 < seconds < 8
