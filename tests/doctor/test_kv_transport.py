"""KV over TCP by accident, a stale image, a kernel cache that can't be written: what the doctor says."""

from dataclasses import replace
from pathlib import Path

import pytest
from doctor_facts import cpu_machine, gpu_machine
from fake_cuda import h200_host

from vllm_rose_plugin.doctor.facts import Environment, Facts, Host, KvTransport
from vllm_rose_plugin.doctor.finding import Finding
from vllm_rose_plugin.doctor.host import look_at_host, look_at_kv_transport
from vllm_rose_plugin.doctor.judge import judge, serving_can_work
from vllm_rose_plugin.doctor.text import render

SOUND = KvTransport("1.5.1", ["mlx5_0", "mlx5_1"], ["uverbs0", "uverbs1"], {})


def kv(**changes: object) -> list[Finding]:
    """Findings about KV on a GPU host on which one thing differs."""
    facts = gpu_machine(h200_host(2), kv_transport=replace(SOUND, **changes))
    return [finding for finding in judge(facts) if finding.code.startswith("kv_")]


def test_devices_that_the_container_lacks() -> None:
    (finding,) = kv(usable=[])
    assert (finding.level, finding.code) == ("warning", "kv_no_rdma")
    assert "this host has mlx5_0, mlx5_1, but no device under /dev/infiniband can be opened here" in finding.text
    assert "goes over TCP" in finding.cost
    assert "--device /dev/infiniband" in finding.cure
    (finding,) = kv(usable=[], rdma_devices=[])
    assert "and no device under /dev/infiniband" in finding.text


@pytest.mark.parametrize("value", ["tcp", "tcp,cuda_copy,cuda_ipc", "sm,self,tcp", "^ib", "^rc,dc,ud"])
def test_transports_without_infiniband(value: str) -> None:
    (finding,) = kv(ucx={"UCX_TLS": value})
    assert finding.code == "kv_ucx_tls"
    assert f"UCX_TLS={value} keeps UCX from InfiniBand" in finding.text


@pytest.mark.parametrize("value", ["all", "rc,cuda_copy", "rc_x,cuda_ipc", "ib,sm", "^tcp", "^cuda_ipc,tcp"])
def test_transports_with_infiniband(value: str) -> None:
    assert kv(ucx={"UCX_TLS": value}) == []


def test_network_devices() -> None:
    (finding,) = kv(ucx={"UCX_NET_DEVICES": "eth0"})
    assert finding.text == "UCX_NET_DEVICES=eth0 names none of mlx5_0, mlx5_1"
    assert kv(ucx={"UCX_NET_DEVICES": "eth0,mlx5_1:1"}) == kv(ucx={"UCX_NET_DEVICES": "all"}) == []


def test_nothing_to_say_without_nixl_or_without_a_gpu() -> None:
    assert kv() == kv(nixl=None, usable=[]) == []
    facts = cpu_machine(kv_transport=replace(SOUND, usable=[], rdma_devices=[]))
    assert {finding.code for finding in judge(facts)} == {"no_driver"}
    assert "NIXL                 1.5.1" in render(facts, judge(facts))


def test_devices_are_read_from_the_file_system(tmp_path: Path) -> None:
    for name in ("sys/class/infiniband/mlx5_0", "dev/infiniband"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()
    (tmp_path / "dev/infiniband/rdma_cm").touch()
    found = look_at_kv_transport("1.5.1", {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "", "UCX_LOG_LEVEL": "info"}, tmp_path)
    assert found == KvTransport("1.5.1", ["mlx5_0"], ["uverbs0"], {"UCX_TLS": "tcp"})
    assert look_at_kv_transport(None, {}, tmp_path / "none") == KvTransport(None, [], [], {})


def expecting(version: str) -> Facts:
    return cpu_machine(environment=Environment(False, "rose", {"ROSE_EXPECT_VERSION": version}))


def test_a_stale_image() -> None:
    facts = expecting("0.2.0")
    (finding,) = [finding for finding in judge(facts) if finding.code == "stale_image"]
    assert finding.text == "ROSE_EXPECT_VERSION=0.2.0, and this is plugin 0.1.0"
    assert "by its digest" in finding.cure
    assert not serving_can_work(judge(facts))
    assert {finding.code for finding in judge(expecting("0.1.0"))} == {"no_driver"}


def test_a_kernel_cache_that_cant_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning: kernels are then compiled at every start, and the server works."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "file/rose"))
    ((folder, problem),) = look_at_host().kernel_cache.items()
    assert (folder, problem) == (str(tmp_path / "file/rose"), f"{tmp_path / 'file'} is no directory")
    facts = cpu_machine(host=Host("/usr/bin/g++", "g++", {}, {folder: problem}))
    (finding,) = [finding for finding in judge(facts) if finding.code == "kernel_cache"]
    assert finding.level == "warning"
    assert "ROSE_CACHE_DIR" in finding.cure
    assert serving_can_work(judge(facts))
