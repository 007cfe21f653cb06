"""Whole calls on ranks that are threads: the fake driver's shared memory, and the kernels' PTX run on the CPU."""

import contextlib
import ctypes
import itertools
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "memory"))
import exchange_machine
import numpy
from exchange_cases import difference, expected_out, expected_received, expert_rows, inputs_of, same_bits, shape_of
from exchange_machine import artifacts, parameters
from memfd_driver import CUresult
from rank_streams import RankBlock, grid_machine
from rank_threads import Held, drivers, on, run_ranks

from vllm_rose_plugin.kernels.dp_combine import launch as combine
from vllm_rose_plugin.kernels.dp_dispatch import launch as dispatch
from vllm_rose_plugin.kernels.dp_exchange import nvlink
from vllm_rose_plugin.kernels.dp_exchange.layout import Payload
from vllm_rose_plugin.kernels.dp_exchange.nvlink import NvlinkExchange
from vllm_rose_plugin.kernels.dp_exchange.table import Table, Tuning, Way
from vllm_rose_plugin.kernels.dp_exchange.tune import tune
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DeviceFacts
from vllm_rose_plugin.kernels.peer_timeout import PeerTimeoutError, TimeoutWord
from vllm_rose_plugin.memory import windows
from vllm_rose_plugin.memory.driver import HandleType
from vllm_rose_plugin.memory.rendezvous import GroupError

NOTHING = {"handles": 0, "reservations": 0, "mappings": 0, "bindings": 0}
TARGET = "sm_90a"


@contextlib.contextmanager
def default_dtype(dtype):
    """The process's, so not to be used by ranks that are threads: they would undo each other's."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Host:
    def __init__(self, window):
        self.window = window
        self.__array_interface__ = window.__cuda_array_interface__


def run_ptx(kind, config, *arguments):
    """What a launch does, on this thread; the other ranks' threads do theirs at the same time."""
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    blocks, *numbers = [a for a in arguments if isinstance(a, int)]
    rank, base, stride = numbers[:3]
    size = getattr(config, "send", config).shape.group_size
    shared = (ctypes.c_uint8 * (stride * size)).from_address(base)
    named = {f"{i}": t for i, t in enumerate(tensors)} | {"memory": torch.frombuffer(shared, dtype=torch.uint8)}
    if len(numbers) > 3:
        word = (ctypes.c_uint8 * 8).from_address(numbers[4])
        named["report"] = torch.frombuffer(word, dtype=torch.uint8)
    memory = grid_machine.Memory(named, {*named})
    grid = blocks + (size if kind == "dispatch_send" else 0)
    params = parameters(kind, tensors, tuple(numbers))
    machine = grid_machine.Machine(artifacts(config, TARGET).ptx, memory, params, grid=grid, shared=4096, seed=rank)
    machine.previous_ended = True
    running = [RankBlock(machine, index) for index in range(grid)]
    while running:
        for block in running:
            block.turn()
        for block in [b for b in running if b.left.all()]:
            block.publish()
            running.remove(block)


@pytest.fixture
def on_cpu(monkeypatch):
    """Everything of CUDA is left out; kernels are small, since every thread of theirs is run."""

    def kernel_of(kind):
        def kernel(config, target):
            assert target == TARGET
            return lambda *arguments: run_ptx(kind, config, *arguments)

        return kernel

    def timeout_word(**arguments):
        return TimeoutWord(memory=torch.zeros(1, dtype=torch.int64), **arguments)

    monkeypatch.setattr(windows, "as_bytes", lambda window, device: torch.from_numpy(numpy.asarray(_Host(window))))
    monkeypatch.setattr(nvlink, "device_facts", lambda index: DeviceFacts(TARGET, 8))
    monkeypatch.setattr(nvlink, "_device_of", lambda driver: torch.device("cpu"))
    monkeypatch.setattr(nvlink, "TimeoutWord", timeout_word)
    monkeypatch.setattr(dispatch, "_send_kernel", kernel_of("dispatch_send"))
    monkeypatch.setattr(dispatch, "_receive_kernel", kernel_of("dispatch_receive"))
    monkeypatch.setattr(combine, "_send_kernel", kernel_of("combine_send"))
    monkeypatch.setattr(combine, "_receive_kernel", kernel_of("combine_receive"))
    monkeypatch.setattr(dispatch, "_fused_kernel", kernel_of("dispatch"))
    monkeypatch.setattr(combine, "_fused_kernel", kernel_of("combine"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def on_ranks(size, function, shape, **arguments):
    """function(exchange, rank) on every rank; values or errors. Nothing is left of the memory."""
    before, fakes = Held(), drivers(size)

    def run(group):
        with NvlinkExchange(
            driver=on(fakes, group), group=group, shape=shape, handle_type=HandleType.POSIX_FD, **arguments
        ) as exchange:
            return function(exchange, group.rank)

    values = run_ranks(size, run)
    for value in values:
        if isinstance(value, BaseException) and not isinstance(value, PeerTimeoutError | GroupError):
            raise value
    assert [fake.ledger() for fake in fakes] == [NOTHING] * size and Held() == before
    return values


def test_kernels_of_all_steps_are_loaded_before_the_first(on_cpu, monkeypatch):
    """Of a GPU with 132 SMs, where combine receives 529 to 1055 tokens with a kernel of their own."""
    loaded = set()
    monkeypatch.setattr(nvlink, "device_facts", lambda index: DeviceFacts(TARGET, 132))
    for module, name in itertools.product((dispatch, combine), ("send", "receive", "fused")):
        monkeypatch.setattr(module, f"_{name}_kernel", lambda config, target: loaded.add(config))
    shape = shape_of(2, hidden_size=4096, max_tokens=1100)
    how = {"shape": shape, "sm_count": 132}

    def use(exchange, rank):
        if rank == 0:
            exchange.warm_up()

    assert on_ranks(2, use, shape) == [None, None]
    for tokens in range(1, 1101):
        assert combine.choose_receive(num_tokens=tokens, **how)[0] in loaded
        assert combine.choose_send(total_rows=2 * tokens, **how)[0] in loaded
        assert dispatch.choose_receive(total_rows=2 * tokens, **how)[0] in loaded
        assert dispatch.choose_send(num_tokens=tokens, input="bfloat16", **how)[0] in loaded
        rows = {"num_tokens": tokens, "total_rows": 2 * tokens, **how}
        one = dispatch.choose_fused(input="bfloat16", **rows), combine.choose_fused(**rows)
        assert all(fused is None or fused[0] in loaded for fused in one)
        assert [fused is None for fused in one] == [tokens > 128, tokens > 128]


@pytest.mark.slow
@pytest.mark.parametrize("payload", Payload)
def test_steps(on_cpu, payload):
    shape = shape_of(2, hidden_size=32, max_tokens=4, payload=payload)

    def use(exchange, rank):
        exchange.warm_up(step_tokens=(2,))
        faults = []
        for number, (counts, most) in enumerate([((4, 0), None), ((1, 2), 2), ((0, 0), 1)]):
            codes = number == 0 and payload is Payload.MXFP8
            inputs = [inputs_of(shape, counts[r], 10 * number + r, codes=codes) for r in range(2)]
            x, ids, weights = inputs[rank]
            exchange.dispatch_send(x, topk_ids=ids, topk_weights=weights, step_tokens=most)
            received = exchange.dispatch_receive(step_tokens=most)
            exchange.combine_send(expert_rows(received), received=received)
            out = exchange.combine_receive(topk_ids=ids)
            faults.append(difference(received, expected_received(inputs, shape, rank, most)))
            faults.append("" if same_bits(out, expected_out(inputs, shape, rank, most)) else "result")
            received = exchange.dispatch(x, topk_ids=ids, topk_weights=weights, step_tokens=most)
            out = exchange.combine(expert_rows(received), received=received, topk_ids=ids)
            faults.append(difference(received, expected_received(inputs, shape, rank, most)))
            faults.append("" if same_bits(out, expected_out(inputs, shape, rank, most)) else "result")
        exchange.check()
        return [fault for fault in faults if fault]

    assert on_ranks(2, use, shape) == [[], []]


def test_a_step_that_is_too_large_for_one_launch_has_two(on_cpu, monkeypatch):
    shape, seen = shape_of(2, max_tokens=2048), []
    for module, name in itertools.product((dispatch, combine), ("send", "receive", "fused")):
        what = module.__name__.split(".")[-2], name
        monkeypatch.setattr(
            module, f"_{name}_kernel", lambda config, target, what=what: lambda *arguments: seen.append(what)
        )

    def use(exchange, rank):
        for tokens, most in ((4, 4), (0, 4), (2048, None)):
            x, ids, weights = inputs_of(shape, tokens, 1)
            received = exchange.dispatch(x, topk_ids=ids, topk_weights=weights, step_tokens=most)
            rows = torch.zeros(len(received.topk_ids), shape.hidden_size, dtype=torch.bfloat16)
            exchange.combine(rows, received=received, topk_ids=ids)
        with pytest.raises(RuntimeError, match="combine_send after combine_receive"):
            exchange.combine(rows, received=received, topk_ids=ids)
        with pytest.raises(ValueError, match="3 tokens in one step, more than step_tokens=2"):
            exchange.dispatch(x[:3], topk_ids=ids[:3], topk_weights=weights[:3], step_tokens=2)

    assert on_ranks(2, use, shape) == [None, None]
    one = [("dp_dispatch", "fused"), ("dp_combine", "fused")]
    none = [("dp_dispatch", "fused"), ("dp_combine", "send")]
    two = [(family, half) for family in ("dp_dispatch", "dp_combine") for half in ("send", "receive")]
    assert sorted(seen) == sorted(2 * (one + none + two))


def test_steps_are_made_as_the_table_says(on_cpu, monkeypatch):
    shape, seen = shape_of(2, max_tokens=64), []
    for module, name in itertools.product((dispatch, combine), ("send", "receive", "fused")):

        def kernel(config, target, name=name):
            team = "one" if name == "fused" else "block" if config.team == config.threads else "warp"
            return lambda *arguments: seen.append((name, team))

        monkeypatch.setattr(module, f"_{name}_kernel", kernel)

    def use(exchange, rank):
        if rank:
            return
        exchange.table = Table(((1, Tuning(Way.WARPS)), (8, Tuning(Way.ONE_LAUNCH, 2)), (16, Tuning(Way.BLOCKS))))
        made = []

        def step(tokens, most):
            x, ids, weights = inputs_of(shape, tokens, 1)
            received = exchange.dispatch(x, topk_ids=ids, topk_weights=weights, step_tokens=most)
            exchange.combine(torch.zeros(2 * (most or 64), 64).bfloat16(), received=received, topk_ids=ids)
            made.append({team for _, team in seen})
            seen.clear()

        for tokens, most in ((1, 1), (1, 8), (5, 16), (0, 16), (5, None)):
            step(tokens, most)
        with exchange.forced(Tuning(Way.WARPS)):
            step(5, 16)
        step(5, 16)
        return made

    heuristic = {"block", "warp"}  # of 5 and of 128 rows on one SM
    assert on_ranks(2, use, shape)[0] == [{"warp"}, {"one"}, {"block"}, {"block"}, heuristic, {"warp"}, {"block"}]


def test_a_table_is_measured_and_served_at_the_next_start(on_cpu, monkeypatch, tmp_path):
    """With a clock on which two launches by warps, on half of the blocks, are the fastest of 9 tokens and more."""
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path))
    now = threading.local()

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            tuning, tokens = now.step
            best = Tuning(Way.WARPS, 2) if tokens > 8 else Tuning(Way.ONE_LAUNCH)
            return 1.0 if tuning == best else 2.0

    def note(place, x, *arguments, **named):
        now.step = place.tuning, len(x)

    properties = SimpleNamespace(name="a GPU", multi_processor_count=1)
    graph = SimpleNamespace(replay=lambda: None)
    for name, value in {
        "get_device_properties": lambda device: properties,
        "Event": Event,
        "CUDAGraph": lambda: graph,
        "graph": lambda graph, **how: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(dispatch, "send_and_receive", note)
    monkeypatch.setattr(combine, "send_and_receive", lambda *arguments, **named: None)
    shape, seen = shape_of(2, max_tokens=20), []

    def use(exchange, rank):
        tune(exchange)
        seen.append(vars(now).pop("step", None))
        return exchange.table

    one, warps = Tuning(Way.ONE_LAUNCH), Tuning(Way.WARPS, 2)
    expected = Table(((1, one), (2, one), (4, one), (8, one), (16, warps), (20, warps)))
    with default_dtype(torch.bfloat16):  # as vLLM has it while it makes a model
        assert on_ranks(2, use, shape) == [expected, expected] and None not in seen
        seen.clear()
        assert on_ranks(2, use, shape) == [expected, expected] and seen == [None, None], "measured again"


def test_a_rank_without_memory_to_time_steps_in_says_so_before_anybody_launches(on_cpu, monkeypatch):
    """Whichever tensor of a step doesn't fit: the other ranks would wait in a kernel."""
    now, empty_like = threading.local(), torch.empty_like

    def full(like):
        if now.rank:
            raise torch.OutOfMemoryError("no room for the result")
        return empty_like(like)

    monkeypatch.setattr(torch, "empty_like", full)
    properties = SimpleNamespace(name="a GPU", multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(dispatch, "send_and_receive", lambda *arguments, **named: pytest.fail("launched"))

    def use(exchange, rank):
        now.rank = rank
        with pytest.raises(GroupError, match=r"memory to time steps in' failed on rank 1 of 2: .*no room"):
            tune(exchange)

    assert on_ranks(2, use, shape_of(2, max_tokens=20)) == [None, None]


def test_the_deadline_can_be_changed_and_a_fault_is_told_on_the_device(on_cpu):
    """By launches that follow: a captured one has its deadline already."""

    def use(exchange, rank):
        first = exchange.timeout, exchange._place.nanoseconds
        exchange.timeout = 2.5
        found = [bool(exchange.gave_up())]
        exchange._timeout._memory[0] = rank + 1
        return (*first, exchange.timeout, exchange._place.nanoseconds, *found, bool(exchange.gave_up()))

    shape = shape_of(2, hidden_size=32, max_tokens=1)
    assert on_ranks(2, use, shape, timeout=9.0) == [(9.0, 9_000_000_000, 2.5, 2_500_000_000, False, True)] * 2


@pytest.mark.slow
def test_a_missing_peer_ends_in_an_error_that_names_it(on_cpu):
    shape = shape_of(2, hidden_size=32, max_tokens=1)

    def use(exchange, rank):
        if rank == 1:
            return None
        x, ids, weights = inputs_of(shape, 1, 1)
        exchange.dispatch_send(x, topk_ids=ids, topk_weights=weights)
        received = exchange.dispatch_receive()  # returns: the launch gave up, and nobody waited for it
        assert (received.topk_ids == -1).all() and int(received.num_rows) == 0
        with pytest.raises(PeerTimeoutError):
            exchange.check()
        exchange.combine_send(expert_rows(received), received=received)

    error, nothing = on_ranks(2, use, shape, timeout=2e-5, timeout_setting="--patience")
    assert nothing is None
    assert (error.rank, error.peer, error.phase, error.epoch) == (0, 1, "dispatch plan", 1)
    assert "--patience" in str(error)


def test_what_does_not_fit_is_refused_with_the_setting_that_mends_it(on_cpu):
    shape = shape_of(2, hidden_size=32, max_tokens=4)

    def use(exchange, rank):
        x, ids, weights = inputs_of(shape, 5, 1)
        with pytest.raises(ValueError, match=r"5 tokens in one step, more than max_tokens=4.*--max-num-batched-tokens"):
            exchange.dispatch_send(x, topk_ids=ids, topk_weights=weights)
        with pytest.raises(RuntimeError, match="dispatch_receive after combine_receive"):
            exchange.dispatch_receive()
        with pytest.raises(ValueError, match="rows; it must be a multiple"):
            exchange.dispatch_receive(out=exchange_machine.new_received(shape, 5, torch.device("cpu")))
        return "refused"

    assert on_ranks(2, use, shape, setting="--max-num-batched-tokens") == ["refused"] * 2


def test_a_full_gpu_is_an_error_on_all_ranks_that_names_the_setting_and_the_size(on_cpu):
    fakes, shape = drivers(2, failing=1, fail={"cuMemCreate": CUresult.CUDA_ERROR_OUT_OF_MEMORY}), shape_of(2)

    def run(group):
        how = {"handle_type": HandleType.POSIX_FD, "setting": "--max-num-batched-tokens"}
        NvlinkExchange(driver=on(fakes, group), group=group, shape=shape, **how)

    first, second = run_ranks(2, run)
    assert isinstance(first, GroupError) and str(first) == str(second)
    text = first.reasons[1]
    assert "CUDA_ERROR_OUT_OF_MEMORY" in text and "--gpu-memory-utilization" in text
    assert "a lower --max-num-batched-tokens" in text and "MiB on each of 2 ranks for 40 tokens" in text
    assert [fake.ledger() for fake in fakes] == [NOTHING] * 2


def test_a_failed_step_leaves_nothing(on_cpu, monkeypatch):
    def fail(self):
        raise RuntimeError("no stream")

    monkeypatch.setattr(NvlinkExchange, "_clear", fail)
    errors = on_ranks(2, lambda exchange, rank: None, shape_of(2))
    assert all("phase 'dp exchange: clear' failed" in str(error) for error in errors)
