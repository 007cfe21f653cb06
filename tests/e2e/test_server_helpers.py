"""What the tests' servers are started with, and what is said when they fail; no server is started."""

import sys
from pathlib import Path

import pytest
from vllm_server import NO_MULTICAST, first_errors, gpu_environment, script


def test_on_gpus_what_the_machine_says_about_vllm_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where FlashInfer isn't installed, a server that isn't told so ends while it makes its sampler."""
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    monkeypatch.setenv("ROSE_CACHE_DIR", "kernels")
    monkeypatch.setenv("ROSE_PROVIDER_MOE_EXPERTS", "reference")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    environment = gpu_environment(tmp_path)
    assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0" and environment["ROSE_CACHE_DIR"] == "kernels"
    assert environment["VLLM_PLUGINS"] == "rose" and environment["VLLM_CACHE_ROOT"] == str(tmp_path)
    assert "ROSE_PROVIDER_MOE_EXPERTS" not in environment
    assert NO_MULTICAST.items() <= environment.items()


def test_a_command_without_a_script_is_run_by_its_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    assert script("vllm-router", "vllm_router.launch_router") == [sys.executable, "-m", "vllm_router.launch_router"]
    (tmp_path / "vllm-router").touch()
    assert script("vllm-router", "vllm_router.launch_router") == [str(tmp_path / "vllm-router")]


def test_the_first_error_is_told_however_long_what_follows_is() -> None:
    output = "\n".join(["start", "ERROR ValueError: the cause", *["later"] * 500, "RuntimeError: engine died"])
    assert first_errors(output).splitlines()[0] == "ERROR ValueError: the cause"
    assert first_errors(output).endswith("RuntimeError: engine died") and len(first_errors(output)) < 1000
