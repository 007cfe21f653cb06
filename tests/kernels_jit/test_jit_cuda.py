"""Kernels from the cache on a GPU."""

import logging

import pytest
import tiny_kernel
import torch

from vllm_rose_plugin.kernels.jit import compile as jit
from vllm_rose_plugin.kernels.jit import providers

pytestmark = pytest.mark.gpu


@pytest.fixture
def scale(tmp_path, monkeypatch):
    """Factor to the kernel as a new process finds it; the first call compiles."""
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path))

    def get(factor):
        jit.clear_memory()
        return jit.compile(family="tiny", config=tiny_kernel.TinyConfig(factor=factor), build=tiny_kernel.build)

    return get


def test_compiled_and_loaded_kernels_compute_the_same(scale):
    x = torch.randn(1000, 128, device="cuda")
    for compiled in (1, 0):
        before = jit.counts.compiled
        kernel = scale(3.0)
        assert jit.counts.compiled - before == compiled
        y = x.clone()
        kernel(y)
        assert torch.equal(y, x * 3)


def test_kernel_in_memory_only_computes_the_same(scale, monkeypatch):
    monkeypatch.setenv("ROSE_CACHE_DIR", "/dev/null/cache")
    x = torch.randn(1000, 128, device="cuda")
    y = x.clone()
    scale(3.0)(y)
    assert torch.equal(y, x * 3)


def test_runs_on_torchs_current_stream_and_in_a_graph(scale):
    kernel = scale(2.0)
    x = torch.ones(64, 128, device="cuda")
    kernel(x)  # the first call loads the library, which is no part of a capture
    torch.cuda.synchronize()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(1)
        kernel(x)
    side.synchronize()
    assert torch.equal(x, torch.full_like(x, 2))
    with torch.cuda.graph(graph):
        kernel(x)
    assert torch.equal(x, torch.full_like(x, 2))  # captured, not run
    for _ in range(3):
        graph.replay()
    assert torch.equal(x, torch.full_like(x, 16))


def everywhere(shape, target):
    return target is not None


def make_kernel(shape):
    def run(x):
        jit.compile(family="tiny", config=tiny_kernel.TinyConfig(), build=tiny_kernel.build)(x)
        return x

    return run


def make_reference(shape):
    return lambda x: x * 3


def make_inputs(shape, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return (torch.randn(shape, 128, device="cuda", generator=generator),)


def compare(outputs, wanted):
    return "" if torch.equal(outputs, wanted) else "differs"


def test_provider_is_checked_and_timed_on_the_device(scale, caplog):
    caplog.set_level(logging.INFO)
    family = providers.Family(
        "tiny",
        providers.Provider("reference", everywhere, make_reference),
        (providers.Provider("cutedsl", everywhere, make_kernel),),
        make_inputs,
        compare,
    )
    choice = providers.choose(family=family, shapes=(1 << 18,))
    times = choice.verdict.microseconds
    # 268 MB of traffic at no more than 10 TB/s: a timer that doesn't wait for the device reads less
    assert set(times) == {"cutedsl", "reference"} and all(time > 26 for (time,) in times.values())
    assert not choice.verdict.failed
    assert "tiny: provider" in caplog.text
    assert "by an earlier verdict" not in caplog.text
    providers.choose(family=family, shapes=(1 << 18,))
    assert "by an earlier verdict" in caplog.text
