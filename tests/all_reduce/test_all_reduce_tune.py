"""How start-up times all-reduce: ranks are threads, kernels and clocks are given."""

import sys
import threading
from pathlib import Path

import pytest
import torch
from test_all_reduce_launch import on_cpu, on_ranks  # noqa: F401  a fixture

sys.path.insert(0, str(Path(__file__).parents[1] / "memory"))
from vllm_rose_plugin.kernels.all_reduce import launch
from vllm_rose_plugin.kernels.all_reduce import tune as tune_module
from vllm_rose_plugin.kernels.all_reduce.table import candidates
from vllm_rose_plugin.memory.rendezvous import GroupError

MOST = 16384


@pytest.fixture
def made(on_cpu, monkeypatch, tmp_path):  # noqa: F811
    """(rank, config) of kernels that were compiled and of those that were launched."""
    compiled, launched = [], []
    for name in ("zeros", "empty"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *shape, real=real, device=None, **rest: real(*shape, **rest))
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path))

    def kernel(config, target):
        compiled.append((threading.current_thread().name, config))
        return lambda x, out, blocks, rank, *numbers: launched.append((threading.current_thread().name, config))

    for module in (launch, tune_module):
        monkeypatch.setattr(module, "kernel", kernel)
    monkeypatch.setattr(tune_module, "time_replay", lambda reduce, call: call().nbytes * 1.0)
    return compiled, launched


def tuned(reduce, rank):
    tune_module.tune(reduce)
    return reduce.table


def test_every_candidate_is_compiled_before_the_first_is_timed(made, monkeypatch):
    compiled, launched = made
    before = []
    monkeypatch.setattr(tune_module, "time_replay", lambda reduce, call: before.append(set(compiled)) or call().nbytes)
    tables = on_ranks(2, tuned, max_bytes=MOST)
    assert tables[0] == tables[1] and [size for size, _ in tables[0].rows] == [8192, MOST]
    assert len(launched) == 2 * 2 * len(candidates(sm_count=132)) and set(launched) <= before[0] == set(compiled)


def test_a_rank_that_cannot_compile_is_heard_of_before_anybody_waits_in_a_kernel(made, monkeypatch):
    def kernel(config, target):
        if threading.current_thread().name == "rank-1":
            raise RuntimeError("no compiler here")
        return lambda *arguments: made[1].append(arguments)

    for module in (launch, tune_module):
        monkeypatch.setattr(module, "kernel", kernel)
    errors = on_ranks(2, tuned, max_bytes=MOST)
    assert all(isinstance(error, GroupError) for error in errors) and len({str(error) for error in errors}) == 1
    assert "rank 1 of 2: no compiler here" in str(errors[0]) and made[1] == []
