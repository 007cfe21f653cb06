"""The table SM -> domain, learned from launches that are emulated, and what the compiler makes of the probe."""

import random

import pytest
import torch

from vllm_rose_plugin.kernels.jit.compile import compile_to_artifacts
from vllm_rose_plugin.kernels.jit.sass import resource_usage, sass
from vllm_rose_plugin.kernels.sm_domain_probe import launch
from vllm_rose_plugin.kernels.sm_domain_probe.config import ProbeConfig
from vllm_rose_plugin.kernels.sm_domain_probe.kernel import build
from vllm_rose_plugin.kernels.sm_domain_probe.launch import forced_sm_domains, learn_sm_domains, seen_sms, table_of
from vllm_rose_plugin.memory.sm_partitions import Mode, Partition, SmPartitions


def launches(sms: list[int], *, each: int, seed: int = 0):
    """Every launch sees a few of a partition's SMs more."""
    drawn, seen = random.Random(seed), set()

    def once() -> list[int]:
        seen.update(drawn.sample(sms, min(each, len(sms))))
        return sorted(seen)

    return once


def test_launches_until_all_were_seen():
    sms = list(range(3, 103))
    assert seen_sms(launches(sms, each=60), sm_count=100, name="partition 0") == sms


def test_sms_that_are_never_seen_are_named():
    with pytest.raises(RuntimeError, match=r"partition 1 has 9 SMs, but in 20 launches blocks ran on 8: \[0, 1, 2"):
        seen_sms(launches(list(range(8)), each=8), sm_count=9, name="partition 1")
    with pytest.raises(RuntimeError, match="partition 1 has 4 SMs, but in 20 launches blocks ran on 5"):
        seen_sms(launches(list(range(5)), each=5), sm_count=4, name="partition 1")


def test_table():
    assert table_of([[1, 2], [4]], [1, 0], sm_count=6) == [-1, 1, 1, -1, 0, -1]
    with pytest.raises(RuntimeError, match="SM 2 was seen in the partitions of domains 0 and 1"):
        table_of([[1, 2], [2]], [0, 1], sm_count=6)


def test_forced_tables():
    table = forced_sm_domains(132, 2)
    assert table.dtype == torch.int32 and table.bincount().tolist() == [66, 66] and table[65] == 0 and table[66] == 1
    assert forced_sm_domains(10, 3).bincount().tolist() == [4, 3, 3]
    for domains in (0, 5):
        with pytest.raises(ValueError, match=f"domains={domains} must be 1 to 4"):
            forced_sm_domains(4, domains)


def test_what_is_learned_of_two_partitions(monkeypatch):
    """Through the whole function, on a device that torch's CPU stands in for."""
    sms, made = [[5, 0, 2], [1, 4, 7]], []

    def kernel(seen: torch.Tensor, grid: int) -> None:
        assert grid == 4 * 3
        made.append(len(made))
        seen[random.Random(len(made)).choice(sms[current[0]])] = 1

    current = [-1]

    class Stream:
        def __init__(self, number: int):
            self.number = number

        def __enter__(self):
            current[0] = self.number

        def __exit__(self, *_):
            pass

    class Partitions(SmPartitions):
        def streams(self):
            return [Stream(i) for i in range(len(self.partitions))]

    class OfDriver:
        device = 0

    partitions = Partitions(driver=OfDriver(), mode=Mode.DEFAULT, clusters=2)
    with pytest.raises(ValueError, match="the partitions are closed"):
        learn_sm_domains(partitions)
    partitions.partitions = (Partition(1, 3, 0), Partition(0, 3, 0))
    monkeypatch.setattr(launch, "compile", lambda **_: kernel)
    monkeypatch.setattr(launch, "device_facts", lambda index: type("Facts", (), {"target": "sm_107a", "sm_count": 8}))
    monkeypatch.setattr(launch.torch, "device", lambda *_: type("Device", (str,), {"index": 0})("cpu"))
    monkeypatch.setattr(launch.torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(launch.torch.cuda, "device", lambda device: Stream(-1))
    assert learn_sm_domains(partitions).tolist() == [1, 0, 1, -1, 0, 1, -1, 0]
    assert len(made) >= 6


@pytest.mark.parametrize("target", ["sm_90a", "sm_100f", "sm_107a"])
def test_machine_code(target):
    cubin = compile_to_artifacts(family="sm_domain_probe", config=ProbeConfig(), build=build, target=target).cubin
    code, usage = sass(cubin), resource_usage(cubin)
    assert "SR_VIRTUALSMID" in code and "STG" in code and usage["stack"] == 0
