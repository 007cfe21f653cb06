"""Makes the ways in which a layer in parts can be launched on a GPU: partitions of its SMs, tables of their domains."""

from dataclasses import dataclass
from typing import Any

import torch

from vllm_rose_plugin.kernels.gemm.config_sm100 import MAX_SPLIT
from vllm_rose_plugin.kernels.gemm.forked import ForkedStreams
from vllm_rose_plugin.kernels.gemm.forked_gemm import Forked
from vllm_rose_plugin.kernels.moe_experts.ways import OneLaunch, Way
from vllm_rose_plugin.kernels.sm_domain_probe import launch as probe
from vllm_rose_plugin.memory.domain_memory import DomainMemory, allocate_anywhere, allocate_in_domains
from vllm_rose_plugin.memory.driver import Driver
from vllm_rose_plugin.memory.sm_partitions import Mode, SmPartitions, partition_domains, partition_equally

DEFAULT, BACKFILL, SINGLE_LAUNCH = "default", "backfill", "single_launch"
WAYS = (DEFAULT, BACKFILL, SINGLE_LAUNCH)


@dataclass(frozen=True)
class Domains:
    """The domains of one GPU that weights are split over."""

    driver: Driver
    count: int
    forced: bool
    """Whether they are none, but equal shares of the SMs and memory anywhere."""

    def allocate(self, sizes: list[int]) -> DomainMemory:
        """Memory, a part in each domain; all of them or none.

        Raises:
            LocalityUnavailableError, DriverError: see ``domain_memory``.
        """
        how = allocate_anywhere if self.forced else allocate_in_domains
        return how(driver=self.driver, sizes=sizes)

    def way(self, name: str) -> Way:
        """One of WAYS. What it holds of the GPU stays for as long as the process: captured graphs may need it.

        Raises:
            LocalityUnavailableError, DriverError: it can't be had; nothing is left of it.
        """
        key = (id(self.driver.bindings), self.driver.device, self.count, self.forced, name)
        if key not in _made:
            _made[key] = self._one_launch() if name == SINGLE_LAUNCH else self._forked(Mode(name))
        return _made[key]

    def _partitions(self, mode: Mode) -> SmPartitions:
        if self.forced:
            return partition_equally(driver=self.driver, parts=self.count)
        if mode is Mode.DEFAULT:
            return partition_domains(driver=self.driver, mode=mode, clusters=MAX_SPLIT)
        return partition_domains(driver=self.driver, mode=mode)

    def _forked(self, mode: Mode) -> Forked:
        partitions = self._partitions(mode)
        try:
            streams = ForkedStreams(partitions.streams())
        except BaseException:
            partitions.close()
            raise
        _kept.append(partitions)
        clusters = mode is Mode.DEFAULT and partitions.clusters >= MAX_SPLIT
        return Forked(streams, tuple(each.sm_count for each in partitions.partitions), clusters)

    def _one_launch(self) -> OneLaunch:
        if self.forced:
            sm_count = self.driver.attribute("MULTIPROCESSOR_COUNT")
            device = torch.device("cuda", self.driver.device)
            return OneLaunch(probe.forced_sm_domains(sm_count, self.count, device=device))
        with self._partitions(Mode.BACKFILL) as partitions:  # which leave no SM out
            return OneLaunch(probe.learn_sm_domains(partitions))


_made: dict[tuple[Any, ...], Way] = {}
_kept: list[SmPartitions] = []
