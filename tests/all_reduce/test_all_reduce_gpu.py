"""All-reduce on two GPUs, a process for each, over file descriptor handles. Plain allocations, no multicast object."""

import contextlib
import hashlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "memory"))
from rank_processes import in_processes

from vllm_rose_plugin.kernels.all_reduce.config import Algorithm, Tuning
from vllm_rose_plugin.kernels.all_reduce.launch import AllReduce
from vllm_rose_plugin.kernels.all_reduce.reference import all_reduce as reference
from vllm_rose_plugin.kernels.peer_timeout import PeerTimeoutError
from vllm_rose_plugin.memory.driver import Driver, HandleType
from vllm_rose_plugin.memory.rendezvous import group_from_process_group

MIB = 2**20
SIZES = (1, 3, 8, 1000, 4097, 65536, MIB + 1, 16 * MIB)
KINDS = (Tuning(Algorithm.ONE_SHOT, 1), Tuning(Algorithm.ONE_SHOT, 33), Tuning(Algorithm.TWO_SHOT, 8), None)

pytestmark = pytest.mark.multi_gpu


def on_two_gpus(function, *arguments):
    with tempfile.TemporaryDirectory() as directory:
        return in_processes(2, function, f"{directory}/store", *arguments)


@contextlib.contextmanager
def reducing(rank, store, *, max_bytes=64 * MIB, heap_bytes=0, timeout=30.0, name="pair"):
    torch.cuda.set_device(rank)
    torch.zeros(1, device="cuda")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    group = group_from_process_group(dist.group.WORLD, address="127.0.0.1", name=name)
    with AllReduce(
        driver=Driver(device=rank),
        group=group,
        max_bytes=max_bytes,
        heap_bytes=heap_bytes,
        handle_type=HandleType.POSIX_FD,
        timeout=timeout,
    ) as reduce:
        yield reduce


def input_of(rank, count, dtype, seed):
    generator = torch.Generator("cuda").manual_seed(1000 * seed + rank)
    x = torch.randn(count, device="cuda", generator=generator)
    return (x * torch.exp2(torch.randint(-8, 8, (count,), device="cuda", generator=generator).float())).to(dtype)


def inputs(count, dtype, seed):
    return [input_of(rank, count, dtype, seed) for rank in range(2)]


def bits(x):
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def digest(x):
    return hashlib.sha256(bits(x).cpu().numpy().tobytes()).hexdigest()


def fault_of(result, xs, around=None):
    """What is wrong with a result: its bits against the reference, its distance from float64, what lies around it."""
    if not torch.equal(bits(result), bits(reference(xs))):
        return f"{int((bits(result) != bits(reference(xs))).sum())} of {len(result)} elements differ"
    exact = xs[0].double() + xs[1].double()
    unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}[result.dtype]
    tiny = torch.finfo(result.dtype).smallest_normal
    if ((result.double() - exact).abs() > exact.abs() * unit + tiny).any():
        return "further from float64 than one rounding"
    if around is not None and not ((around[:256] == 7).all() and (around[256 + len(result) :] == 7).all()):
        return "a store beside the result"
    return ""


def _any_size(rank, store, dtype):
    faults, digests = [], []
    with reducing(rank, store) as reduce:
        for seed, count in enumerate(SIZES):
            for tuning in KINDS:
                xs = inputs(count, dtype, seed)
                around = torch.full((count + 512,), 7.0, dtype=dtype, device="cuda")
                out = around[256 : 256 + count]
                out.fill_(float("nan"))
                given = xs[rank].clone()
                reduce.launch(given, out, tuning)
                faults.append((count, tuning, fault_of(out, xs, around)))
                faults.append((count, tuning, "" if torch.equal(bits(given), bits(xs[rank])) else "input written"))
                digests.append(digest(out))
                reduce.launch(given, given, tuning)
                faults.append((count, tuning, "in place", fault_of(given, xs)) if fault_of(given, xs) else ("",))
        reduce.check()
    return [fault for fault in faults if fault[-1]], digests


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_size_in_place_and_out_of_place(dtype):
    first, second = on_two_gpus(_any_size, dtype)
    assert first[0] == second[0] == []
    assert first[1] == second[1], "the ranks' bits differ"


def _sweep(rank, store):
    """16 bytes to 1 MiB in steps of an odd number of elements, and nothing at all."""
    faults = []
    with reducing(rank, store) as reduce:
        for seed, count in enumerate((0, *range(8, MIB // 2 + 1, 3067), MIB // 2)):
            xs = inputs(count, torch.bfloat16, seed)
            out = torch.full_like(xs[0], float("nan"))
            assert reduce(xs[rank], out=out) is out
            fault = fault_of(out, xs)
            faults += [(count, fault)] if fault else []
        torch.cuda.synchronize()
        reduce.check()
    return faults


def test_sizes_in_odd_steps():
    assert on_two_gpus(_sweep) == [[], []]


def _beside_nccl(rank, store):
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # it would make a multicast object
    with reducing(rank, store) as reduce:
        nccl = dist.new_group(backend="nccl", device_id=torch.device("cuda", rank))
        side = torch.cuda.Stream()
        theirs = torch.full((16 * MIB,), float(rank + 1), device="cuda")
        xs = inputs(50_000, torch.bfloat16, 1)
        expected = reference(xs)
        dist.all_reduce(theirs, group=nccl)  # connects
        theirs.fill_(rank + 1)
        torch.cuda.synchronize()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for turn in range(40):
            with torch.cuda.stream(side):
                dist.all_reduce(theirs, group=nccl)
                theirs.mul_(0.5)
            for _ in range(50):
                out = reduce.launch(xs[rank], torch.empty_like(xs[rank]), KINDS[turn % len(KINDS)])
            wrong += (bits(out) != bits(expected)).sum()
        torch.cuda.synchronize()
        reduce.check()
        result = int(wrong), theirs.unique().tolist()
        dist.destroy_process_group(nccl)
        return result


def test_nccl_runs_on_a_side_stream():
    assert on_two_gpus(_beside_nccl) == [(0, [1.5])] * 2


def _unaligned(rank, store):
    faults = []
    with reducing(rank, store) as reduce:
        for offset in (1, 2, 4, 8):
            for count in (1, 17, 1001, 70_001):
                xs = inputs(count, torch.bfloat16, offset)
                around = torch.full((count + 512 + offset,), 7.0, dtype=torch.bfloat16, device="cuda")
                view = around[256 + offset : 256 + offset + count]
                view.copy_(xs[rank])
                reduce(view, out=view)
                faults.append(fault_of(view, xs))
                faults.append("" if (around[256 + offset + count :] == 7).all() else "a store behind")
    return [fault for fault in faults if fault]


def test_unaligned_views():
    assert on_two_gpus(_unaligned) == [[], []]


def _replays(rank, store):
    counts = (8, 4096, 4096, 300_001, MIB)
    with reducing(rank, store) as reduce:
        xs = [inputs(count, torch.bfloat16, seed) for seed, count in enumerate(counts)]
        expected = [reference(x) for x in xs]
        mine = [x[rank] for x in xs]
        outs = [torch.empty_like(x) for x in mine]
        kinds = [KINDS[i % len(KINDS)] for i in range(len(counts))]

        def run():
            for x, out, kind in zip(mine, outs, kinds, strict=True):
                reduce.launch(x, out, kind)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for turn in range(1000):
            for out in outs:
                out.fill_(float("nan"))
            graph.replay()
            for out, right in zip(outs, expected, strict=True):
                wrong += (bits(out) != bits(right)).sum()
            if turn % 100 == 0:
                run()  # eager calls in between count as well
        torch.cuda.synchronize()
        reduce.check()
        return int(wrong)


def test_a_thousand_replays_are_equal():
    assert on_two_gpus(_replays) == [0, 0]


def _back_to_back(rank, store):
    counts = (1, 64, 4096, 33_000)
    with reducing(rank, store) as reduce:
        xs = [inputs(count, torch.bfloat16, seed) for seed, count in enumerate(counts)]
        expected = [reference(x) for x in xs]
        outs = [torch.empty_like(x[0]) for x in xs]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for call in range(10_000):
            i = call * 7 % len(counts)
            reduce.launch(xs[i][rank], outs[i], KINDS[call % len(KINDS)])
            if call % 50 < len(counts):
                wrong += (bits(outs[i]) != bits(expected[i])).sum()
        torch.cuda.synchronize()
        reduce.check()
        return int(wrong)


def test_ten_thousand_calls_without_a_look_by_the_host():
    assert on_two_gpus(_back_to_back) == [0, 0]


def _zero_copy(rank, store):
    faults = []
    with reducing(rank, store, heap_bytes=80 * MIB) as reduce:
        x = reduce.empty((16 * MIB,), torch.bfloat16)
        out = reduce.empty((16 * MIB,), torch.bfloat16)
        for seed, count in enumerate((8, 4096, 65_536, MIB, 16 * MIB)):
            xs = inputs(count, torch.bfloat16, seed)
            for target in (out[:count], torch.empty_like(xs[0]), x[:count]):
                for _ in range(3):
                    x[:count].copy_(xs[rank])  # at once after the call before: peers must be done with it
                    reduce(x[:count], out=target)
                    faults.append(fault_of(target, xs))
        torch.cuda.synchronize()
        del x, out, target
    return [fault for fault in faults if fault]


def test_zero_copy():
    assert on_two_gpus(_zero_copy) == [[], []]


def _apart(rank, store, seconds):
    with reducing(rank, store) as reduce:
        xs = inputs(5000, torch.bfloat16, 1)
        for turn in range(3):
            if rank == turn % 2:
                time.sleep(seconds)
            out = reduce(xs[rank])
        torch.cuda.synchronize()
        reduce.check()
        return fault_of(out, xs)


@pytest.mark.parametrize("seconds", [0.1, 5.0])
def test_ranks_that_enter_apart(seconds):
    assert on_two_gpus(_apart, seconds) == ["", ""]


def _two_groups(rank, store):
    with reducing(rank, store, name="a") as first, reducing(rank, store, name="b") as second:
        faults = []
        streams = [torch.cuda.Stream() for _ in range(2)]
        xs = inputs(50_000, torch.bfloat16, 1)
        torch.cuda.synchronize()
        outs = []
        for _ in range(200):
            for reduce, stream in zip((first, second), streams, strict=True):
                with torch.cuda.stream(stream):
                    outs.append(reduce(xs[rank]))
        torch.cuda.synchronize()
        faults += [fault_of(out, xs) for out in outs[-20:]]
        return [fault for fault in faults if fault]


def test_two_groups_alive_at_once_on_two_streams():
    assert on_two_gpus(_two_groups) == [[], []]


def _dead(rank, store, killed):
    timeout = 2.0
    with reducing(rank, store, timeout=timeout) as reduce:
        xs = inputs(5000, torch.bfloat16, 1)
        fault = fault_of(reduce(xs[rank]), xs)
        torch.cuda.synchronize()
        if rank == 1 and killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            time.sleep(2 * timeout)
            return fault
        start = time.monotonic()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                reduce(xs[rank])
        graph.replay()  # a hundred launches, one deadline
        torch.cuda.synchronize()
        seconds = time.monotonic() - start
        errors = []
        for look in (reduce.check, lambda: reduce(xs[rank])):
            try:
                look()
            except PeerTimeoutError as error:
                errors.append((error.rank, error.peer, error.phase, error.epoch))
    return fault, errors, seconds


def _killed_in_the_middle(rank, store):
    timeout = 2.0
    with reducing(rank, store, timeout=timeout) as reduce:
        xs = inputs(16 * MIB, torch.bfloat16, 1)
        out = torch.empty_like(xs[rank])
        fault = fault_of(reduce.launch(xs[rank], out, Tuning(Algorithm.TWO_SHOT, 32)), xs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(5000):  # over half a second of all-reduces
                reduce.launch(xs[rank], out, Tuning(Algorithm.TWO_SHOT, 32))
        torch.cuda.synchronize()
        reduce.group.agree("captured", lambda: None)
        graph.replay()
        time.sleep(0.2)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # while its kernels run
        start = time.monotonic()
        torch.cuda.synchronize()
        seconds = time.monotonic() - start
        try:
            reduce.check()
        except PeerTimeoutError as error:
            return fault, error.peer, error.phase, error.epoch, seconds


def test_a_rank_killed_in_the_middle_of_a_launch_is_named_within_the_deadline():
    """in_processes sees to it that the other one's process ends cleanly."""
    first, second = on_two_gpus(_killed_in_the_middle)
    fault, peer, phase, epoch, seconds = first
    assert second is None and fault == "" and peer == 1 and phase in ("input", "result")
    assert epoch > 100, "it died before its launches ran"
    assert 1.0 < seconds < 8


@pytest.mark.parametrize("killed", [False, True])
def test_a_dead_rank_is_named_within_the_deadline(killed):
    first, second = on_two_gpus(_dead, killed)
    fault, errors, seconds = first
    assert fault == "" and second == (None if killed else "")
    assert errors == [(0, 1, "input", 2)] * 2
    assert 1.9 < seconds < 8
