"""The exchange between processes on a CPU: whole steps against the oracle, bit by bit, and ranks that don't come."""

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from exchange_cases import difference, expected_out, expected_received, expert_rows, inputs_of, same_bits, shape_of

sys.path.insert(0, str(Path(__file__).parents[1] / "memory"))
sys.path.insert(0, str(Path(__file__).parent))
from rank_processes import in_processes
from torch.distributed import FileStore

from vllm_rose_plugin.kernels.dp_exchange.layout import Payload
from vllm_rose_plugin.kernels.dp_exchange.shared_memory import SharedMemoryExchange
from vllm_rose_plugin.kernels.peer_timeout import PeerTimeoutError
from vllm_rose_plugin.memory.rendezvous import Group, GroupError


def on_ranks(size, function, *arguments):
    with tempfile.TemporaryDirectory() as directory:
        return in_processes(size, function, f"{directory}/store", size, *arguments)


def exchange_of(rank, store, size, shape, *, timeout=30.0, name="exchange", **settings):
    torch.set_num_threads(1)
    group = Group(store=FileStore(store, size), rank=rank, size=size, name=name)
    return SharedMemoryExchange(group=group, shape=shape, timeout=timeout, **settings)


def step(exchange, inputs, *, step_tokens=None, out=None):
    """One step of this rank; (what it received, its result)."""
    x, ids, weights = inputs
    exchange.dispatch_send(x, topk_ids=ids, topk_weights=weights, step_tokens=step_tokens)
    received = exchange.dispatch_receive(step_tokens=step_tokens, out=out)
    exchange.combine_send(expert_rows(received), received=received)
    return received, exchange.combine_receive(topk_ids=ids)


def _steps(rank, store, size, shape, codes, seed):
    exchange = exchange_of(rank, store, size, shape)
    draw, faults = random.Random(seed), []
    for number in range(30):
        most = draw.choice((None, 1, 33))
        limit = most or shape.max_tokens
        counts = [draw.choice((0, 1, limit, draw.randrange(limit + 1))) for _ in range(size)]
        inputs = [inputs_of(shape, counts[r], 1000 * number + r, codes=codes) for r in range(size)]
        if draw.random() < 0.2:
            time.sleep(0.02 * draw.random() * rank)
        out = exchange.new_received(step_tokens=most)
        out.topk_ids.fill_(-(2**31))
        out.topk_weights.fill_(float("nan"))
        received, result = step(exchange, inputs[rank], step_tokens=most, out=out)
        faults.append(difference(received, expected_received(inputs, shape, rank, most)))
        faults.append("" if same_bits(result, expected_out(inputs, shape, rank, most)) else f"result of step {number}")
    exchange.close()
    return [fault for fault in faults if fault]


@pytest.mark.parametrize(
    ("size", "payload", "codes"), [(2, Payload.MXFP8, False), (2, Payload.MXFP8, True), (3, Payload.BF16, False)]
)
def test_steps_of_any_size(size, payload, codes):
    shape = shape_of(size, payload=payload, hidden_size=96, max_tokens=70)
    assert on_ranks(size, _steps, shape, codes, 7) == [[]] * size


def _engine(process, stores):
    """Of the ranks of two engines, whose groups have one name."""
    shape, rank = shape_of(2), process % 2
    exchange = exchange_of(rank, stores[process // 2], 2, shape, name="all-to-all")
    faults = []
    for number in range(30):
        inputs = [inputs_of(shape, 10 + number, 1000 * (process // 2) + 2 * number + r) for r in range(2)]
        x, ids, weights = inputs[rank]
        received = exchange.dispatch(x, topk_ids=ids, topk_weights=weights)
        result = exchange.combine(expert_rows(received), received=received, topk_ids=ids)
        faults.append(difference(received, expected_received(inputs, shape, rank)))
        faults.append("" if same_bits(result, expected_out(inputs, shape, rank)) else f"result of step {number}")
    return [fault for fault in faults if fault]


def test_two_engines_on_one_host_at_once():
    with tempfile.TemporaryDirectory() as directory:
        assert in_processes(4, _engine, (f"{directory}/one", f"{directory}/other")) == [[]] * 4


def _absent(rank, store, size, shape, phase):
    exchange = exchange_of(rank, store, size, shape, timeout=60.0, timeout_setting="--patience")
    exchange.timeout = 1.0
    inputs = [inputs_of(shape, 9, r, wrong=0) for r in range(size)]
    step(exchange, inputs[rank])
    x, ids, weights = inputs[rank]
    if rank == 1 and phase == "dispatch":
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        exchange.dispatch_send(x, topk_ids=ids, topk_weights=weights)
        received = exchange.dispatch_receive()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        exchange.combine_send(expert_rows(received), received=received)
        exchange.combine_receive(topk_ids=ids)
    except PeerTimeoutError as error:
        seconds = time.monotonic() - start
        try:
            exchange.check()
        except PeerTimeoutError as again:
            told = again is error and bool(exchange.gave_up())
            return error.peer, error.phase, error.epoch, seconds, told, "--patience" in str(error)


@pytest.mark.parametrize(("phase", "name"), [("dispatch", "dispatch plan"), ("combine", "combine row")])
def test_a_killed_rank_is_named_within_the_deadline(phase, name):
    first, second, third = on_ranks(3, _absent, shape_of(3, top_k=8), phase)
    assert second is None
    for peer, found, epoch, seconds, again, setting in (first, third):
        assert (peer, found, epoch) == (1, name, 2)
        assert 0.9 < seconds < 5 and again and setting


def _refusals(rank, store, size):
    shape = shape_of(size, max_tokens=8)
    exchange = exchange_of(rank, store, size, shape, setting="--max-num-batched-tokens")
    texts = []

    def refused(kind, call, *arguments, **named):
        try:
            call(*arguments, **named)
            texts.append("nothing raised")
        except kind as error:
            texts.append(str(error))

    x, ids, weights = inputs_of(shape, 9, 1)
    refused(ValueError, exchange.dispatch_send, x, topk_ids=ids, topk_weights=weights)
    refused(ValueError, exchange.dispatch_send, x[:5], topk_ids=ids[:5], topk_weights=weights[:5], step_tokens=4)
    refused(RuntimeError, exchange.combine_receive, topk_ids=ids[:8])
    refused(TypeError, exchange.dispatch_send, x[:5].float(), topk_ids=ids[:5], topk_weights=weights[:5])
    refused(TypeError, exchange.dispatch_send, x[:5], topk_ids=ids[:5].long(), topk_weights=weights[:5])
    few, sent = exchange.new_received(step_tokens=4), {"topk_ids": ids[:8], "topk_weights": weights[:8]}
    refused(ValueError, exchange.dispatch, x[:8], **sent, out=few)
    refused(ValueError, exchange.dispatch_receive, step_tokens=8, out=few)
    step(exchange, (x[:8], ids[:8], weights[:8]))  # none of them was noted
    return texts


def test_what_does_not_fit_is_refused_before_anything_is_sent():
    for texts in on_ranks(2, _refusals):
        assert "9 tokens" in texts[0] and "max_tokens=8" in texts[0] and "--max-num-batched-tokens" in texts[0]
        assert "5 tokens" in texts[1] and "step_tokens=4" in texts[1]
        assert "combine_receive after combine_receive" in texts[2]
        assert "float32" in texts[3] and "int64" in texts[4]
        for text in texts[5:]:
            assert "out has 8 rows" in text and "step_tokens=8 needs 8 of each of the 2 ranks" in text


def _other_shape(rank, store, size):
    try:
        exchange_of(rank, store, size, shape_of(size, max_tokens=8 + rank))
    except GroupError as error:
        return str(error)


def test_ranks_with_other_shapes_all_hear_of_it():
    first, second = on_ranks(2, _other_shape)
    assert first == second and "max_tokens=8" in first and "max_tokens=9" in first
