"""The probe against drivers that work, lie and fail: what it reports, and that nothing stays allocated."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_cuda import FABRIC, POSIX_FD, CUresult, FakeDriver, gb200_host, h200_host, rubin_host

from vllm_rose_plugin.memory.locality import Locality
from vllm_rose_plugin.memory.probe import Attempt, probe_host

NOT_PERMITTED = "CUDA_ERROR_NOT_PERMITTED (800)"


def test_attributes_that_lie_are_found_out():
    driver = h200_host()
    host = probe_host(driver=driver)
    assert (host.status, host.cuda_version, len(host.gpus)) == ("ok", "13.0", 1)
    gpu = host.gpus[0]
    assert (gpu.name, gpu.capability, gpu.sm_count, gpu.memory_bytes) == ("NVIDIA H200", (9, 0), 132, 150_000_000_000)
    assert gpu.fabric_attribute and gpu.fabric == Attempt(False, "cuMemCreate", NOT_PERMITTED)
    assert gpu.posix_fd_attribute and gpu.posix_fd == Attempt(True)
    assert not driver.live and driver.descriptors and not driver.open_descriptors()


def test_everything_works_on_a_rack():
    driver = gb200_host(4)
    host = probe_host(driver=driver)
    assert [gpu.ordinal for gpu in host.gpus] == [0, 1, 2, 3]
    assert all(gpu.fabric.works and gpu.posix_fd.works and not gpu.context_active for gpu in host.gpus)
    assert driver.calls.count("cuMemCreate") == driver.calls.count("cuMemRelease") == 8
    assert not driver.live and not driver.open_descriptors()


def test_no_context_is_made_and_no_multicast_object_unasked():
    driver = gb200_host()
    host = probe_host(driver=driver)
    assert host.multicast is None
    assert not [call for call in driver.calls if "Multicast" in call or "Retain" in call or "Ctx" in call[:5]]


@pytest.mark.parametrize("call", ["cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle"])
@pytest.mark.parametrize("handle_type", [FABRIC, POSIX_FD])
def test_a_failing_step_is_named_and_what_was_made_is_freed(call, handle_type):
    driver = gb200_host(2)
    key = call if call == "cuMemGetAllocationGranularity" else (call, handle_type)
    driver.fail = {key: CUresult.CUDA_ERROR_OUT_OF_MEMORY}
    host = probe_host(driver=driver)
    failed = Attempt(False, call, "CUDA_ERROR_OUT_OF_MEMORY (2)")
    assert host.status == "ok"
    for gpu in host.gpus:
        assert (gpu.fabric if handle_type == FABRIC else gpu.posix_fd) == failed
        if isinstance(key, tuple):
            assert (gpu.posix_fd if handle_type == FABRIC else gpu.fabric) == Attempt(True)
    assert not driver.live and not driver.open_descriptors()
    driver.fail = {}
    assert all(gpu.fabric.works and gpu.posix_fd.works for gpu in probe_host(driver=driver).gpus)


def test_a_failing_release_is_no_success():
    driver = gb200_host(1)
    driver.fail = {"cuMemRelease": CUresult.CUDA_ERROR_UNKNOWN}
    assert probe_host(driver=driver).gpus[0].fabric == Attempt(False, "cuMemRelease", "CUDA_ERROR_UNKNOWN (999)")


def test_an_exception_in_the_export_still_frees():
    driver = gb200_host(1)

    def interrupted(*_):
        raise KeyboardInterrupt

    driver.cuMemExportToShareableHandle = interrupted
    with pytest.raises(KeyboardInterrupt):
        probe_host(driver=driver)
    assert not driver.live


@pytest.mark.parametrize(
    "call",
    [
        "cuDriverGetVersion",
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDeviceGetAttribute",
        "cuDeviceTotalMem",
        "cuDevicePrimaryCtxGetState",
    ],
)
def test_a_sick_driver_is_a_finding(call):
    driver = h200_host()
    driver.fail[call] = CUresult.CUDA_ERROR_UNKNOWN
    host = probe_host(driver=driver)
    assert (host.status, host.detail) == ("failed", f"{call}: CUDA_ERROR_UNKNOWN (999)")
    assert not driver.live and not driver.open_descriptors()


def test_no_gpu_and_no_library():
    assert probe_host(driver=FakeDriver([])).status == "no_gpu"
    assert probe_host(driver=FakeDriver([], {"cuInit": CUresult.CUDA_ERROR_NO_DEVICE})).status == "no_gpu"
    assert probe_host(driver=FakeDriver([], {"cuInit": CUresult.CUDA_ERROR_UNKNOWN})).status == "failed"
    missing = FakeDriver([])

    def raises(_):
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    missing.cuInit = raises
    assert probe_host(driver=missing).status == "no_driver"


@pytest.mark.parametrize("failing", [None, "cuMulticastGetGranularity", "cuMulticastCreate"])
def test_multicast_on_request(failing):
    driver = gb200_host(2)
    if failing:
        driver.fail = {failing: CUresult.CUDA_ERROR_NOT_SUPPORTED}
    host = probe_host(driver=driver, try_multicast=True)
    expected = Attempt(False, failing, "CUDA_ERROR_NOT_SUPPORTED (801)") if failing else Attempt(True)
    assert host.multicast == expected
    assert driver.calls.count("cuMulticastCreate") == (failing != "cuMulticastGetGranularity")
    assert not driver.live


def test_locality_domains():
    assert [gpu.locality for gpu in probe_host(driver=rubin_host(2)).gpus] == [Locality(2, 100, 212)] * 2
    old = probe_host(driver=h200_host()).gpus[0].locality
    assert old.domains == 0 and "need 13.4" in old.reason
    blackwell = gb200_host(1)
    blackwell.version = 13040
    assert "one locality domain" in probe_host(driver=blackwell).gpus[0].locality.reason


def test_multicast_needs_two_gpus():
    driver = gb200_host(1)
    assert probe_host(driver=driver, try_multicast=True).multicast.error == "needs two GPUs or more, found 1"
    assert "cuMulticastCreate" not in driver.calls


def test_as_a_process_without_bindings(tmp_path):
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda/__init__.py").write_text("raise ImportError('none here')\n")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "vllm_rose_plugin.memory.probe"],
        env={"PYTHONPATH": f"{tmp_path}:{root}"},
        capture_output=True,
        text=True,
    )
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and answer["status"] in ("no_driver", "no_bindings") and answer["gpus"] == []
