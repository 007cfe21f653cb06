"""For which numbers of rows the fused launch serves: ranks are threads, their clocks are given, kernels are noted."""

import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "all_reduce"))
sys.path.insert(0, str(Path(__file__).parents[1] / "memory"))
from test_all_reduce_launch import on_cpu, on_ranks  # noqa: F401  a fixture

from vllm_rose_plugin.kernels.all_reduce.config import Algorithm, Tuning
from vllm_rose_plugin.kernels.all_reduce.table import Table
from vllm_rose_plugin.kernels.all_reduce_norm import launch as norm_launch
from vllm_rose_plugin.kernels.all_reduce_norm import tune as tune_module
from vllm_rose_plugin.kernels.all_reduce_norm.tune import tune_norm, warm_norm
from vllm_rose_plugin.layers import group_norm
from vllm_rose_plugin.layers.group_norm import GroupNorm, make_norm
from vllm_rose_plugin.memory.rendezvous import GroupError

HIDDEN, ROWS = 128, 12
BYTES = HIDDEN * 2
TWO = Tuning(Algorithm.TWO_SHOT, 4)
SHAPE = {"hidden_size": HIDDEN, "dtype": torch.bfloat16, "most_rows": ROWS}


@pytest.fixture
def noted(on_cpu, monkeypatch, tmp_path):  # noqa: F811
    """Fused launches, (rank, config, rows); memory of the CPU in place of a GPU's."""
    launched: list = []
    zeros, ones, empty = torch.zeros, torch.ones, torch.empty
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **rest: zeros(*shape, **rest))
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **rest: empty(*shape, **rest))
    monkeypatch.setattr(torch, "ones", lambda *shape, device=None, **rest: ones(*shape, **rest))
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path))

    def kernel(config, target):
        def call(x, residual, weight, rows, scales, residual_out, eps, blocks, rank, *numbers):
            launched.append((rank, config, len(x)))

        return call

    for module in (norm_launch, tune_module):
        monkeypatch.setattr(module, "kernel", kernel)
    monkeypatch.setattr(norm_launch, "_check", lambda *tensors: 32)
    return launched


def clocks(monkeypatch, us):
    """time_replay, which makes the call once and shows what `us` says of (rank, what was called, rows)."""
    called: list = []

    def time_replay(reduce, call):
        called.append(None)
        what = call()
        rows = len(what[0])
        return us(reduce.group.rank, what[2] if len(what) == 3 else "fused", rows)

    monkeypatch.setattr(tune_module, "time_replay", time_replay)
    return called


def unfused(x, residual, weight, eps):
    return x, residual, "unfused"


def tuned(reduce, rank):
    return tune_norm(reduce, unfused=unfused, unfused_name="vllm 1", **SHAPE)


def test_the_slowest_rank_decides_and_what_is_not_fused_can_win(noted, monkeypatch):
    # Fused wins up to 4 rows, but for 2, where rank 1 is slow.
    def us(rank, what, rows):
        if what == "unfused":
            return 10.0
        return 20.0 if rows > 4 or (rows == 2 and rank == 1) else 5.0

    called = clocks(monkeypatch, us)
    tables = on_ranks(2, tuned)
    assert tables[0] == tables[1]
    assert [(size // BYTES, tuning is not None) for size, tuning in tables[0].rows] == [
        (1, True), (2, False), (4, True), (8, False), (12, False),
    ]  # fmt: skip
    assert called
    called.clear()
    assert on_ranks(2, tuned) == tables and not called, "the next start reads it"


def test_a_rank_that_cannot_compile_is_heard_of_before_anybody_waits_in_a_kernel(noted, monkeypatch):
    def kernel(config, target):
        if threading.current_thread().name == "rank-1":
            raise RuntimeError("no compiler here")

    monkeypatch.setattr(tune_module, "kernel", kernel)
    called = clocks(monkeypatch, lambda rank, what, rows: 1.0)
    errors = on_ranks(2, tuned)
    assert len({str(error) for error in errors}) == 1 and "rank 1 of 2: no compiler here" in str(errors[0])
    assert not called and not noted


def test_a_power_of_two_is_measured_once(noted, monkeypatch):
    clocks(monkeypatch, lambda rank, what, rows: 1.0)
    (table, _) = on_ranks(
        2, lambda reduce, rank: tune_norm(reduce, unfused=unfused, unfused_name="x", **{**SHAPE, "most_rows": 8})
    )
    assert [size // BYTES for size, _ in table.rows] == [1, 2, 4, 8]


def test_warming_runs_what_can_be_named_and_nothing_else(noted):
    table = Table(((4 * BYTES, None), (8 * BYTES, Tuning(Algorithm.ONE_SHOT, 2)), (12 * BYTES, TWO)))

    def use(reduce, rank):
        return warm_norm(reduce, table=table, **SHAPE)

    counts = on_ranks(2, use)
    mine = [(config, rows) for rank, config, rows in noted if rank == 0]
    assert counts == [len(mine)] * 2 and len({config for config, _ in mine}) == len(mine) >= 2
    assert {config.algorithm for config, _ in mine} == set(Algorithm) and min(rows for _, rows in mine) == 5


def test_nothing_is_warmed_where_nothing_is_faster(noted):
    assert on_ranks(2, lambda reduce, rank: warm_norm(reduce, table=Table(((12 * BYTES, None),)), **SHAPE)) == [0, 0]
    assert not noted


def norm_of(reduce=None):
    return GroupNorm(reduce=reduce, table=Table(((2 * BYTES, TWO), (4 * BYTES, None), (12 * BYTES, TWO))), **SHAPE)


def test_which_calls_are_taken():
    norm, weight = norm_of(), torch.ones(HIDDEN).bfloat16()

    def taken(rows, **changes):
        x = torch.zeros(rows, HIDDEN).bfloat16()
        return norm.takes(**{"x": x, "residual": x, "weight": weight, **changes})

    assert [taken(n) for n in (0, 1, 2, 3, 4, 5, 12, 13)] == [None, TWO, TWO, None, None, TWO, TWO, None]
    other = torch.zeros(1, HIDDEN)
    assert [taken(1, x=other), taken(1, residual=other), taken(1, weight=weight.float())] == [None] * 3
    assert taken(1, residual=torch.zeros(2, HIDDEN).bfloat16()) is None
    for shape in ((1, HIDDEN // 2), (1, 1, HIDDEN), (HIDDEN,)):
        x = torch.zeros(shape).bfloat16()
        assert taken(1, x=x, residual=x) is None
    assert norm.why == "in one launch with residual and norm for 1 to 2 and 5 to 12 tokens"


def test_what_lies_at_an_odd_place_is_copied(noted):
    """On the rank where it does: the kernels that were warmed up are for multiples of 32 bytes."""

    def use(reduce, rank):
        norm, odd = norm_of(reduce), torch.arange(2 * HIDDEN + 1).bfloat16()[rank:][: 2 * HIDDEN].view(2, HIDDEN)
        given = (odd, odd.clone(), torch.ones(HIDDEN + 1).bfloat16()[1:])
        rows, new = norm(given[0], residual=given[1], weight=given[2], eps=1e-6, tuning=TWO)
        return rows.shape == new.shape == odd.shape

    addresses = []
    norm_launch._check = lambda *tensors: addresses.extend(t.data_ptr() % 32 for t in tensors) or 32
    assert on_ranks(2, use) == [True, True] and len(noted) == 2 and set(addresses) == {0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float32}, "the model's dtype is torch.float32; the fused launch takes torch.bfloat16, torch."),
        ({"hidden_size": 8320}, "hidden_size is 8320; the fused launch takes multiples of 128 up to 8192"),
        ({"hidden_size": 96}, "hidden_size is 96; the fused launch takes multiples of 128 up to 8192"),
    ],
)
def test_models_that_no_kernel_takes_are_named_on_all_ranks(noted, changes, message):
    errors = on_ranks(2, lambda reduce, rank: make_norm(reduce, **{**SHAPE, **changes}))
    assert all(isinstance(error, GroupError) and message in str(error) for error in errors)


def test_a_group_gets_what_was_measured(noted, monkeypatch):
    clocks(monkeypatch, lambda rank, what, rows: {"unfused": 3.0}.get(what, 2.0 if rows <= 4 else 9.0))
    monkeypatch.setattr(group_norm, "vllm_norm", lambda rows, residual, weight, eps: (rows, residual, "unfused"))
    monkeypatch.setattr(group_norm, "version", lambda package: "0.33.0")
    norms = on_ranks(2, lambda reduce, rank: make_norm(reduce, **SHAPE).why)
    assert norms == ["in one launch with residual and norm for 1 to 4 tokens"] * 2
