"""Worker processes that fill the compile cache."""

from dataclasses import replace

import pytest
import torch

from vllm_rose_plugin.kernels.jit import parallel
from vllm_rose_plugin.kernels.jit.compile import clear_memory, compile, counts
from vllm_rose_plugin.kernels.jit.parallel import Wanted, compile_ahead
from vllm_rose_plugin.kernels.qk_norm.config import choose_config
from vllm_rose_plugin.kernels.qk_norm.kernel import build

pytestmark = pytest.mark.slow


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """Four small ones that the cache of this test doesn't hold."""
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path))
    clear_memory()
    config = choose_config(
        head_dim=128,
        dtype=torch.bfloat16,
        weight_dtype=torch.bfloat16,
        eps=1e-6,
        weight_offset=0.0,
        rotary_dim=0,
        num_tokens=1,
        num_q_heads=8,
        num_kv_heads=1,
        alignment=16,
        widest_load_bits=128,
        sm_count=132,
    )
    yield [Wanted("qk_norm", replace(config, eps=eps), build, "sm_90a") for eps in (1e-6, 2e-6, 3e-6, 4e-6)]
    clear_memory()


def test_kernels_are_on_disk_afterwards(kernels, monkeypatch):
    monkeypatch.setattr(parallel.os, "sched_getaffinity", lambda process: {0, 1})
    before = counts.compiled, counts.loaded
    compile_ahead([*kernels, kernels[0]])
    assert all(kernel.on_disk() for kernel in kernels)
    assert counts.compiled == before[0], "not in this process"
    for kernel in kernels:
        compile(family=kernel.family, config=kernel.config, build=kernel.build, target=kernel.target)
    assert (counts.compiled, counts.loaded) == (before[0], before[1] + len(kernels))
    monkeypatch.setattr(parallel, "_start", lambda: pytest.fail("nothing is missing"))
    compile_ahead(kernels)


def test_a_kernel_that_cannot_be_compiled_does_not_keep_the_others_away(kernels, monkeypatch, capfd):
    monkeypatch.setattr(parallel.os, "sched_getaffinity", lambda process: {0})
    wrong = replace(kernels[0], config=replace(kernels[0].config, head_dim=96))
    compile_ahead([wrong, *kernels[1:]])
    assert all(kernel.on_disk() for kernel in kernels[1:]) and not wrong.on_disk()
    assert "qk_norm for sm_90a: " in capfd.readouterr().err


def test_without_a_cache_nothing_is_compiled_ahead(kernels, monkeypatch):
    monkeypatch.setattr(parallel, "open_store", lambda: None)
    monkeypatch.setattr(parallel, "_start", lambda: pytest.fail("nobody could load it"))
    compile_ahead(kernels)


def test_a_worker_that_ends_at_once_is_named(kernels, monkeypatch, caplog):
    monkeypatch.setattr(parallel.sys, "executable", "/bin/false")
    compile_ahead(kernels)
    assert "ended with code 1" in caplog.text
