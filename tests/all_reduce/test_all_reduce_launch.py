"""Whole calls on ranks that are threads: the fake driver's shared memory, and the kernels' PTX run on the CPU."""

import contextlib
import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "memory"))
import numpy
from memfd_driver import GRANULARITY
from rank_threads import Held, drivers, on, run_ranks
from ranks_machine import RankBlock, artifacts, grid_machine, pack

from vllm_rose_plugin.kernels.all_reduce import launch
from vllm_rose_plugin.kernels.all_reduce import warm as warm_module
from vllm_rose_plugin.kernels.all_reduce.config import Access, Algorithm, Tuning
from vllm_rose_plugin.kernels.all_reduce.launch import AllReduce
from vllm_rose_plugin.kernels.all_reduce.reference import all_reduce
from vllm_rose_plugin.kernels.all_reduce.table import Table
from vllm_rose_plugin.kernels.all_reduce.warm import warm
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DeviceFacts
from vllm_rose_plugin.kernels.peer_timeout import PeerTimeoutError, TimeoutWord
from vllm_rose_plugin.memory import windows
from vllm_rose_plugin.memory.driver import HandleType
from vllm_rose_plugin.memory.rendezvous import GroupError
from vllm_rose_plugin.memory.windows import BufferInUseError

NOTHING = {"handles": 0, "reservations": 0, "mappings": 0, "bindings": 0}
TARGET = "sm_90a"


class _Host:
    def __init__(self, window):
        self.window = window
        self.__array_interface__ = window.__cuda_array_interface__


def run_ptx(
    config, x, out, blocks, rank, base, stride, multicast, source, source_step, target, target_step, ns, report
):
    """What a launch does, on this thread; the other ranks' threads do theirs at the same time."""
    assert multicast == 0
    shared = (ctypes.c_uint8 * (stride * config.group_size)).from_address(base)
    word = (ctypes.c_uint8 * 8).from_address(report)
    tensors = {
        "memory": torch.frombuffer(shared, dtype=torch.uint8),
        "report": torch.frombuffer(word, dtype=torch.uint8),
    }
    tensors |= {name: t for name, t in (("x", x), ("out", out)) if not base <= t.data_ptr() < base + len(shared)}
    params = pack(
        x=(x.data_ptr(), x.numel()),
        out=(out.data_ptr(), out.numel()),
        rank=rank,
        base=base,
        stride=stride,
        source=(source, source_step),
        target=(target, target_step),
        nanoseconds=ns,
        report=report,
    )
    memory = grid_machine.Memory(tensors, {*tensors})
    machine = grid_machine.Machine(artifacts(config, TARGET).ptx, memory, params, grid=blocks, shared=1024, seed=rank)
    machine.previous_ended = True
    running = [RankBlock(machine, index) for index in range(blocks)]
    while running:
        for block in running:
            block.turn()
        for block in [b for b in running if b.left.all()]:
            block.publish()
            running.remove(block)


@pytest.fixture
def on_cpu(monkeypatch):
    """Configs that were launched, by rank; everything of CUDA is left out."""
    launched: list = []

    def kernel(config, target):
        assert target == TARGET

        def call(x, out, blocks, rank, *numbers):
            launched.append((rank, config, blocks))
            run_ptx(config, x, out, blocks, rank, *numbers)

        return call

    def timeout_word(**arguments):
        return TimeoutWord(memory=torch.zeros(1, dtype=torch.int64), **arguments)

    monkeypatch.setattr(windows, "as_bytes", lambda window, device: torch.from_numpy(numpy.asarray(_Host(window))))
    monkeypatch.setattr(launch, "device_facts", lambda index: DeviceFacts(TARGET, 132))
    monkeypatch.setattr(launch, "kernel", kernel)
    monkeypatch.setattr(launch, "TimeoutWord", timeout_word)
    monkeypatch.setattr(launch, "_check", lambda x, out, device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return launched


def on_ranks(size, function, **arguments):
    """function(all_reduce, rank) on every rank; values or errors. Nothing is left of the buffers."""
    before, fakes = Held(), drivers(size)
    arguments = {"max_bytes": 4096, "heap_bytes": 512 * 1024, "handle_type": HandleType.POSIX_FD, **arguments}

    def run(group):
        with AllReduce(driver=on(fakes, group), group=group, **arguments) as reduce:
            return function(reduce, group.rank)

    values = run_ranks(size, run)
    for value in values:
        if isinstance(value, BaseException) and not isinstance(value, PeerTimeoutError | GroupError):
            raise value
    assert [fake.ledger() for fake in fakes] == [NOTHING] * size and Held() == before
    assert not [call for fake in fakes for call in fake.calls if "Multicast" in call]
    return values


def values_of(rank, count, dtype, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_calls_of_every_kind(on_cpu, size):
    def use(reduce, rank):
        wrong = []
        for seed, (count, dtype) in enumerate(
            [(1, torch.bfloat16), (777, torch.float16), (600, torch.float32), (2048, torch.bfloat16)]
        ):
            expected = all_reduce([values_of(r, count, dtype, seed) for r in range(size)])
            x = values_of(rank, count, dtype, seed)
            out = reduce(x)
            in_place = reduce(x.view(1, -1).clone(), out=None)
            y = x.clone()
            assert reduce(y, out=y) is y
            wrong += [not torch.equal(found.view(-1), expected) for found in (out, in_place, y)]
        odd = values_of(rank, 400, torch.bfloat16)[1:-3]
        wrong.append(
            not torch.equal(reduce(odd), all_reduce([values_of(r, 400, odd.dtype)[1:-3] for r in range(size)]))
        )
        assert reduce(torch.empty(0, 5)).shape == (0, 5)
        return wrong

    assert on_ranks(size, use) == [[False] * 13] * size
    kinds = {config.algorithm for _, config, _ in on_cpu}
    assert kinds == {Algorithm.ONE_SHOT}
    assert {config.io_bytes for _, config, _ in on_cpu} >= {2, 16}


@pytest.mark.slow
def test_zero_copy_tensors_are_reduced_where_they_lie(on_cpu):
    count = 40_000  # above what is copied all the same

    def use(reduce, rank):
        x = reduce.empty((count,), torch.bfloat16)
        small = reduce.empty((64,), torch.bfloat16)
        x.copy_(values_of(rank, count, torch.bfloat16))
        small.copy_(values_of(rank, 64, torch.bfloat16, 5))
        out = reduce.empty((count,), torch.bfloat16)
        reduce(x, out=out)
        reduce(x, out=x)
        reduce(small[:32], out=small[:32])
        found = out.clone(), x.clone(), small.clone()
        with pytest.raises(BufferInUseError):
            reduce.close()
        del x, small, out
        return found

    results = on_ranks(2, use)
    expected = all_reduce([values_of(rank, count, torch.bfloat16) for rank in range(2)])
    small = [values_of(rank, 64, torch.bfloat16, 5) for rank in range(2)]
    for rank, (out, x, part) in enumerate(results):
        assert torch.equal(out, expected) and torch.equal(x, expected)
        assert torch.equal(part[:32], all_reduce([s[:32] for s in small])) and torch.equal(part[32:], small[rank][32:])
    assert [(c.copy_in, c.copy_out) for r, c, _ in on_cpu if r == 0] == [(False, False)] * 2 + [(True, False)]


@pytest.mark.slow
def test_what_was_measured_decides(on_cpu):
    def use(reduce, rank):
        reduce.table = Table(((1024, Tuning(Algorithm.TWO_SHOT, 2)), (2048, Tuning(Algorithm.ONE_SHOT, 3))))
        return [
            torch.equal(
                reduce(values_of(rank, count, torch.bfloat16)),
                all_reduce([values_of(r, count, torch.bfloat16) for r in range(2)]),
            )
            for count in (512, 513, 2000)
        ]

    assert on_ranks(2, use) == [[True] * 3] * 2
    chosen = [(c.algorithm, blocks) for r, c, blocks in on_cpu if r == 0]
    assert chosen[:2] == [(Algorithm.TWO_SHOT, 2), (Algorithm.ONE_SHOT, 3)] and chosen[2][1] == 2


@pytest.mark.slow
def test_a_missing_peer_ends_in_an_error_that_names_it(on_cpu):
    def use(reduce, rank):
        x = values_of(rank, 100, torch.bfloat16)
        reduce(x)
        if rank == 1:
            return None
        reduce(x)  # returns: the launch gave up, and nobody waited for it
        with pytest.raises(PeerTimeoutError):
            reduce.check()
        reduce(x)

    error, nothing = on_ranks(2, use, timeout=2e-5, setting='{"rose": {"peer_timeout": …}}')
    assert nothing is None
    assert str(error) == (
        "test: rank 0 waited 2e-05 s for rank 1 in phase 'input' of epoch 2 and gave up: look at the log of rank 1; "
        'if it was only late, {"rose": {"peer_timeout": …}} sets the time'
    )
    assert (error.rank, error.peer, error.phase, error.epoch, error.seconds) == (0, 1, "input", 2, 2e-5)


@pytest.mark.slow
def test_a_captured_call_works_after_sleep(on_cpu):
    """The same addresses, new memory: what a graph replays is a launch with the numbers of before."""

    def use(reduce, rank):
        x = values_of(rank, 500, torch.bfloat16)
        before = reduce._buffer.addresses
        found = [reduce(x), reduce(x)]
        reduce.suspend()
        reduce.resume()
        assert reduce._buffer.addresses == before
        return [*found, reduce(x)]

    expected = all_reduce([values_of(rank, 500, torch.bfloat16) for rank in range(2)])
    for found in on_ranks(2, use):
        assert all(torch.equal(each, expected) for each in found)


@pytest.mark.slow
def test_the_deadline_can_be_changed_between_launches(on_cpu):
    def use(reduce, rank):
        x = values_of(rank, 100, torch.bfloat16)
        reduce(x)
        with pytest.raises(ValueError, match="it must be above 0"):
            reduce.timeout = 0
        reduce.timeout = 2e-5
        if rank == 0:
            reduce(x)
            reduce.check()

    error, nothing = on_ranks(2, use, timeout=600.0)
    assert nothing is None and "waited 2e-05 s for rank 1 in phase 'input' of epoch 2" in str(error)


@pytest.mark.slow
def test_warming_runs_each_kernel_once_and_later_calls_need_no_other(on_cpu, monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **rest: zeros(*shape, **rest))
    made: list = []
    monkeypatch.setattr(warm_module, "kernel", lambda config, target: made.append(config))

    def use(reduce, rank):
        reduce.table = Table(((256, Tuning(Algorithm.ONE_SHOT, 1)), (4096, Tuning(Algorithm.TWO_SHOT, 2))))
        count = warm(reduce, hidden_size=64, dtype=torch.bfloat16, most_rows=32)
        warmed = {config for r, config, _ in on_cpu if r == rank}
        launched = sum(r == rank for r, _, _ in on_cpu)
        x = aligned_rows(32, 64)
        needed = {reduce.plan(x[:n], x[:n], reduce.tuning(x[:n])).config for n in range(1, 33)}
        return count, launched, needed == warmed

    for count, launched, same in on_ranks(2, use):
        assert count == launched == len(set(made)) and count >= 2 and same


def aligned_rows(rows, width):
    whole = torch.zeros(rows * width + 16, dtype=torch.bfloat16)
    skip = -whole.data_ptr() % 32 // 2
    return whole[skip : skip + rows * width].view(rows, width)


def test_ranks_that_were_given_other_numbers_all_hear_of_it(on_cpu):
    before, fakes = Held(), drivers(2)

    def run(group):
        AllReduce(driver=on(fakes, group), group=group, max_bytes=1000 + group.rank, handle_type=HandleType.POSIX_FD)

    errors = run_ranks(2, run)
    assert str(errors[0]) == str(errors[1]) and "max_bytes=1001, heap_bytes=0, peers, sm_90a" in str(errors[0])
    assert [fake.ledger() for fake in fakes] == [NOTHING] * 2 and Held() == before


def test_a_failed_step_leaves_nothing(on_cpu, monkeypatch):
    def fail(self):
        raise RuntimeError("no stream")

    monkeypatch.setattr(AllReduce, "_clear", fail)
    errors = on_ranks(2, lambda reduce, rank: None)
    assert all("phase 'all-reduce: clear' failed" in str(error) for error in errors)


@pytest.mark.parametrize(("end", "word"), [("suspend", "suspended: resume it first"), ("close", "freed")])
def test_a_call_without_memory_is_refused_and_not_launched(on_cpu, end, word):
    """A launch would fault, which ends the process's use of the GPU."""

    def use(reduce, rank):
        x = torch.zeros(64).bfloat16()
        plan = reduce.plan(x, x, None)
        getattr(reduce, end)()
        for call in (lambda: reduce(x), lambda: reduce.numbers(None, None)):
            with pytest.raises(ValueError, match=f"the buffer is {word}"):
                call()
        return plan.blocks

    assert on_ranks(2, use) == [1, 1] and not on_cpu


def test_refusals(on_cpu):
    def use(reduce, rank):
        messages = []
        for call, error in (
            (lambda: reduce(torch.zeros(GRANULARITY).bfloat16()), ValueError),
            (lambda: reduce.empty((2**20,), torch.bfloat16), MemoryError),
        ):
            with pytest.raises(error) as caught:
                call()
            messages.append(str(caught.value))
        fake = {"dtype": torch.bfloat16, "is_cuda": True, "is_contiguous": lambda: True, "data_ptr": lambda: 0}
        takes = [reduce.takes(SimpleNamespace(**{**fake, "nbytes": n})) for n in (0, 65536, 65538)]
        takes += [reduce.takes(SimpleNamespace(**{**fake, "nbytes": 2, name: value})) for name, value in OTHERS]
        return messages, takes

    for messages, takes in on_ranks(2, use):
        assert "131072 bytes of (65536,) torch.bfloat16 are more than max_bytes=4096" in messages[0]
        assert "heap_bytes must be at least" in messages[1]
        assert takes == [True, True, False] + [False] * len(OTHERS)


@pytest.mark.parametrize(
    ("group_size", "arguments", "message"),
    [
        (1, {}, "all-reduce over 1 ranks; it must be 2 to 72"),
        (73, {}, "all-reduce over 73 ranks; it must be 2 to 72"),
        (2, {"max_bytes": -1}, "max_bytes=-1; it must be 0 or more"),
        (2, {"heap_bytes": -1}, "heap_bytes=-1; it must be 0 or more"),
        *(
            (
                2,
                {"timeout": t, "setting": "--wait"},
                r"a timeout of \S+ s; it must be above 0 and up to 86400 s: --wait",
            )
            for t in (0, -1.0, float("nan"), float("inf"), 86401)
        ),
    ],
)
def test_numbers_out_of_range_are_named_with_their_range(group_size, arguments, message):
    with pytest.raises(ValueError, match=message):
        AllReduce(
            driver=SimpleNamespace(device=0), group=SimpleNamespace(size=group_size), **{"max_bytes": 1, **arguments}
        )


def test_a_rank_without_pinned_memory_is_heard_of_by_all(on_cpu, monkeypatch):
    def none_left(**arguments):
        if arguments["rank"] == 1:
            raise RuntimeError("no pinned memory")
        return TimeoutWord(memory=torch.zeros(1, dtype=torch.int64), **arguments)

    monkeypatch.setattr(launch, "TimeoutWord", none_left)
    errors = on_ranks(2, lambda reduce, rank: None)
    assert len({str(error) for error in errors}) == 1 and "rank 1 of 2: no pinned memory" in str(errors[0])


OTHERS = (("dtype", torch.int32), ("is_cuda", False), ("is_contiguous", lambda: False))


def test_tensors_that_do_not_fit_are_named(monkeypatch):
    monkeypatch.setattr(launch, "check_on_gpu", lambda what, x: None)
    x = torch.zeros(4, 8).bfloat16()
    long = torch.zeros(40).bfloat16()
    for error, message, given, out in (
        (TypeError, "x must be torch.bfloat16 or torch.float16 or torch.float32", x.double(), x),
        (ValueError, "x must be contiguous", x.t(), x),
        (ValueError, r"out must be contiguous \(4, 8\)", x, x[:3]),
        (ValueError, "out must be contiguous", x, x.half()),
        (ValueError, "overlap without being the same", long[:32], long[8:]),
    ):
        with pytest.raises(error, match=message):
            launch._check(given, out, None)
    launch._check(x, x, None)
    launch._check(long[:20], long[20:], None)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="x can't be on cpu"):
        launch._check(x, x, 0)


def test_nothing_asks_for_multicast_unless_told():
    assert AllReduce.__init__.__kwdefaults__["access"] is Access.PEERS
