"""docs/troubleshooting.md quotes messages; each is made here by what prints it."""

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
from doctor_facts import cpu_machine, gpu_machine
from fake_cuda import gb200_host, h200_host

from vllm_rose_plugin.doctor.facts import Environment, Facts, Host, Imex, KvTransport, Vllm
from vllm_rose_plugin.doctor.judge import judge
from vllm_rose_plugin.kernels.jit import store
from vllm_rose_plugin.memory.probe import Attempt, probe_host

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs/troubleshooting.md").read_text()
CACHE = "/var/cache/vllm"
READ_ONLY = f"{CACHE}: Read-only file system"
REFUSED = Attempt(False, "cuMulticastCreate", "CUDA_ERROR_NOT_PERMITTED (800)")
INFINIBAND = KvTransport("1.5.1", ["mlx5_0"], ["uverbs0"], {})


def sections() -> dict[str, str]:
    """Heading to text."""
    parts = re.split(r"^## (.*)\n", DOCUMENT, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def quoted(heading: str) -> set[str]:
    """The indented lines of a section that look like a finding."""
    lines = re.findall(r"^    ((?:error|warning|note): .*)$", sections()[heading], flags=re.MULTILINE)
    return set(lines)


MACHINES: dict[str, list[Facts]] = {
    "IMEX channel missing": [gpu_machine(h200_host(), imex=Imex(True, [], [], "not visible"))],
    "NVLS in containers": [
        gpu_machine(gb200_host(), driver=replace(probe_host(driver=gb200_host()), multicast=REFUSED))
    ],
    "KV over TCP by accident": [
        gpu_machine(gb200_host(), kv_transport=replace(INFINIBAND, **change))
        for change in ({"usable": []}, {"ucx": {"UCX_TLS": "tcp,cuda_copy"}}, {"ucx": {"UCX_NET_DEVICES": "eth0"}})
    ],
    "Stale images": [
        cpu_machine(environment=Environment(False, "rose", {"ROSE_EXPECT_VERSION": "0.2.0"})),
        cpu_machine(vllm=Vllm("vllm", "0.34.0", False, True, "0.34.0", "x")),
    ],
    "JIT cache read-only": [
        cpu_machine(host=Host("g++", "g++", {}, {f"{CACHE}/rose": READ_ONLY})),
        cpu_machine(host=Host("g++", "g++", {CACHE: READ_ONLY})),
    ],
}


@pytest.mark.parametrize("heading", MACHINES)
def test_the_doctor_prints_what_is_quoted(heading: str) -> None:
    printed = {f"{finding.level}: {finding.text}" for facts in MACHINES[heading] for finding in judge(facts)}
    assert quoted(heading) and quoted(heading) <= printed
    assert len(quoted(heading)) == len(MACHINES[heading])


def test_the_cures_of_imex_are_as_quoted() -> None:
    def cure(imex: Imex) -> str:
        return next(f.cure for f in judge(gpu_machine(h200_host(), imex=imex)) if f.code == "no_fabric")

    missing, stuck = sections()["IMEX channel missing"], sections()["ComputeDomain stuck"]
    words = "no IMEX channel is here"
    assert words in missing and cure(Imex(True, [], [], "not visible")).startswith(words)
    assert cure(Imex(True, ["channel0"], [], "READY")) in " ".join(missing.split())
    assert f"    {cure(Imex(True, ['channel0'], ['channel0'], 'INITIALIZING'))}\n" in stuck


def test_the_warning_of_the_kernel_cache_is_as_quoted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store, "_warned", set())
    with caplog.at_level(logging.WARNING):
        store.Store(Path(CACHE, "rose/kernels"))._refused(OSError(30, "Read-only file system"))
    assert f"    {caplog.messages[-1]}\n" in sections()["JIT cache read-only"]
