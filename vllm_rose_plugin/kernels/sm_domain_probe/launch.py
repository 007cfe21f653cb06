"""The table SM -> locality domain, as ``gemm/domains.py`` takes it: learned from partitions, or made up.

Learned once, at start-up: this waits for the device.
"""

from collections.abc import Callable

import torch

from vllm_rose_plugin.kernels.jit.compile import compile
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts
from vllm_rose_plugin.kernels.sm_domain_probe.config import BLOCKS_PER_SM, ProbeConfig
from vllm_rose_plugin.memory.sm_partitions import SmPartitions

UNKNOWN = -1
TRIES = 20


def learn_sm_domains(partitions: SmPartitions) -> torch.Tensor:
    """Launches a kernel on each partition's stream until all its SMs were seen.

    Args:
        partitions: of locality domains, or equal ones, which then count as domains 0, 1 and so on.

    Returns:
        int32 ``[SMs]`` on the partitions' device: each SM's domain; -1 where it's in no partition.

    Raises:
        ValueError: closed partitions.
        RuntimeError: some of a partition's SMs were never seen, or an SM was seen in two.
    """
    if not partitions.partitions:
        raise ValueError("the partitions are closed, nothing can be learned from them")
    device = torch.device("cuda", partitions.driver.device)
    facts = device_facts(device.index)
    kernel = compile(family="sm_domain_probe", config=ProbeConfig(), build=_build(), target=facts.target)
    found: list[list[int]] = []
    for partition, stream in zip(partitions.partitions, partitions.streams(), strict=True):
        with torch.cuda.device(device), torch.cuda.stream(stream):
            seen = torch.zeros(facts.sm_count, dtype=torch.int32, device=device)

            def once(seen: torch.Tensor = seen, grid: int = BLOCKS_PER_SM * partition.sm_count) -> list[int]:
                kernel(seen, grid)
                return seen.nonzero().flatten().tolist()  # waits

            found.append(seen_sms(once, sm_count=partition.sm_count, name=f"partition {len(found)}"))
    domains = [i if p.domain is None else p.domain for i, p in enumerate(partitions.partitions)]
    return torch.tensor(table_of(found, domains, sm_count=facts.sm_count), dtype=torch.int32, device=device)


def forced_sm_domains(sm_count: int, domains: int, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """A table for a GPU of one domain: as many of equal shares of neighbouring SMs, to run the same path there.

    Args:
        sm_count: SMs of the device.
        domains: how many to pretend.
        device: of the result.
    """
    if not 1 <= domains <= sm_count:
        raise ValueError(f"domains={domains} must be 1 to {sm_count}, the number of SMs")
    return torch.tensor([sm * domains // sm_count for sm in range(sm_count)], dtype=torch.int32, device=device)


def seen_sms(once: Callable[[], list[int]], *, sm_count: int, name: str) -> list[int]:
    """SMs that were seen, once there are as many as there should be.

    Args:
        once: launches, and gives all that were seen up to now.
        sm_count: how many there should be.
        name: of the partition.

    Raises:
        RuntimeError: there are fewer after a number of tries, or more.
    """
    seen: list[int] = []
    for _ in range(TRIES):
        seen = once()
        if len(seen) >= sm_count:
            break
    if len(seen) != sm_count:
        raise RuntimeError(
            f"{name} has {sm_count} SMs, but in {TRIES} launches blocks ran on {len(seen)}: {seen}. Look whether other "
            'work keeps SMs busy; --additional-config \'{"rose": {"locality": "off"}}\' does without'
        )
    return seen


def table_of(found: list[list[int]], domains: list[int], *, sm_count: int) -> list[int]:
    """Domain of each SM.

    Args:
        found: SMs of each partition.
        domains: of each partition.
        sm_count: of the device.

    Raises:
        RuntimeError: two partitions have the same SM.
    """
    table = [UNKNOWN] * sm_count
    for sms, domain in zip(found, domains, strict=True):
        for sm in sms:
            if table[sm] != UNKNOWN:
                raise RuntimeError(f"SM {sm} was seen in the partitions of domains {table[sm]} and {domain}")
            table[sm] = domain
    return table


def _build() -> Callable:
    from vllm_rose_plugin.kernels.sm_domain_probe import kernel

    return kernel.build
