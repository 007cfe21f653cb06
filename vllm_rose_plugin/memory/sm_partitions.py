"""The SMs of one GPU in partitions, each a green context with a stream: one for each locality domain, or equal ones.

Source: "Green Contexts" in the CUDA driver API reference: ``cuDevSmResourceSplit`` with locality domains from 13.4 on,
``cuDevSmResourceSplitByCount`` without them from 12.4 on. Partitions of domains ran on no GPU that has any.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vllm_rose_plugin.memory.driver import Driver, DriverError
from vllm_rose_plugin.memory.locality import (
    Locality,
    LocalityUnavailableError,
    constant,
    newer_call,
    require_locality,
)
from vllm_rose_plugin.memory.undo import Undo

if TYPE_CHECKING:
    import torch

PAIR = 2
"""SMs that the driver splits no further, and that a cluster of two blocks needs side by side."""
_TOO_FEW = "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"
_GROUP = "CU_DEV_SM_RESOURCE_GROUP_"


class Mode(StrEnum):
    """Which SMs the partitions get."""

    DEFAULT = "default"
    """Those of their domain alone (Rubin: 100 of each of two, 12 stay idle); blocks can form clusters."""
    BACKFILL = "backfill"
    """An equal share of all (Rubin: 106 each), filled up from outside of the domain; no clusters."""
    EQUAL = "equal"
    """Equal shares without regard to domains, on any GPU with green contexts."""


@dataclass(frozen=True)
class Partition:
    """SMs with a stream on them."""

    domain: int | None
    """The locality domain whose memory lies near; None with :attr:`Mode.EQUAL`."""
    sm_count: int
    stream: int
    """``CUstream``: what is launched there runs on these SMs alone."""


class SmPartitions:
    """Made by :func:`partition_domains` or :func:`partition_equally`; use as a context manager, or call :meth:`close`.

    Objects share nothing: two of them in one process may cover the same SMs.
    """

    def __init__(self, *, driver: Driver, mode: Mode, clusters: int):
        """For the functions above."""
        self.driver = driver
        self.mode = mode
        self.clusters = clusters
        """Blocks of a cluster that can be launched for certain; 1: no clusters."""
        self.partitions: tuple[Partition, ...] = ()
        """By domain; empty: closed."""
        self._undo = Undo()

    def streams(self) -> "list[torch.cuda.ExternalStream]":
        """The streams as torch's. They don't keep the partitions alive."""
        import torch

        device = torch.device("cuda", self.driver.device)
        return [torch.cuda.ExternalStream(partition.stream, device=device) for partition in self.partitions]

    def close(self) -> None:
        """Destroy streams and contexts; a second call does nothing.

        Work in the streams must have ended, and captured graphs that hold work of theirs must be gone.

        Raises:
            DriverError: the first call that failed; the others were made nonetheless.
        """
        self.partitions = ()
        self._undo.close()

    def __enter__(self) -> "SmPartitions":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _fill(self, resources: list[Any], domains: list[int] | list[None]) -> None:
        try:
            self.partitions = tuple(map(self._make, resources, domains))
        except BaseException as error:
            self._undo.close_after(error)
            raise

    def _make(self, resource: Any, domain: int | None) -> Partition:
        driver = self.driver
        description = newer_call(driver, "cuDevResourceGenerateDesc", [resource], 1)  # lasts as long as the process
        # Drivers before 13.4 want this flag; the default stream isn't used.
        flag = driver.bindings.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = newer_call(driver, "cuGreenCtxCreate", description, driver.cu_device, flag)
        self._undo.add(_undo_call(driver, "cuGreenCtxDestroy", context))
        non_blocking = driver.bindings.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = newer_call(driver, "cuGreenCtxStreamCreate", context, non_blocking, 0)
        self._undo.add(_undo_call(driver, "cuStreamDestroy", stream))
        return Partition(domain, int(resource.sm.smCount), int(stream))


def partition_domains(*, driver: Driver, mode: Mode, clusters: int = PAIR) -> SmPartitions:
    """A partition for each locality domain; all of them or none.

    Args:
        driver: the GPU, best with its primary context active (torch's is), which green contexts retain.
        mode: DEFAULT or BACKFILL.
        clusters: DEFAULT: blocks of the largest cluster to be launched, a multiple of 2. A partition has a multiple of
            so many SMs: with 8, 96 of Rubin's 100.

    Raises:
        ValueError: another mode, or such a number.
        LocalityUnavailableError: no domains here, a driver that doesn't know them, or a domain without SMs.
        DriverError: another call failed.
    """
    if mode not in (Mode.DEFAULT, Mode.BACKFILL):
        raise ValueError(f"mode={mode} must be {Mode.DEFAULT} or {Mode.BACKFILL}; for others see partition_equally()")
    if clusters < PAIR or clusters % PAIR:
        raise ValueError(f"clusters={clusters} must be a multiple of {PAIR}")
    locality = require_locality(driver)
    device = _device_sms(driver)
    resources = _split(driver, device, _groups(driver, mode, locality, int(device.sm.smCount), clusters))
    partitions = SmPartitions(driver=driver, mode=mode, clusters=clusters if mode is Mode.DEFAULT else 1)
    partitions._fill(resources, list(range(locality.domains)))
    return partitions


def partition_equally(*, driver: Driver, parts: int) -> SmPartitions:
    """Partitions of as many SMs each, whatever domain they lie in; all of them or none.

    What a GPU of one domain runs the code for several on. Needs green contexts (CUDA 12.4; tests ask for 13.0).

    Args:
        driver: the GPU.
        parts: how many; one takes all SMs, several leave what the GPU's own grain leaves (132 SMs: two of 64).

    Raises:
        ValueError: more parts than the GPU can be cut into, or none.
        LocalityUnavailableError: a driver or bindings without green contexts.
        DriverError: another call failed.
    """
    device = _device_sms(driver)
    total, least = int(device.sm.smCount), max(int(device.sm.minSmPartitionSize), 1)
    grain = max(int(device.sm.smCoscheduledAlignment), 1)
    share = total // parts // grain * grain if parts > 0 else 0
    if share < least:
        raise ValueError(
            f"parts={parts} of {total} SMs must be 1 to {total // least}: a partition has at least {least}"
        )
    resources = [device]
    if parts > 1:
        made = newer_call(driver, "cuDevSmResourceSplitByCount", parts, device, 0, share)
        resources = [resource for resource in made if int(resource.sm.smCount)]
    if len(resources) != parts:
        raise LocalityUnavailableError(
            f"GPU {driver.device}: {total} SMs can be cut into {len(resources)} partitions of {share}, not {parts}"
        )
    partitions = SmPartitions(driver=driver, mode=Mode.EQUAL, clusters=grain)
    partitions._fill(resources, [None] * parts)
    return partitions


def shares(sm_count: int, domains: int) -> list[int]:
    """Backfill mode's SMs of each domain: pairs, spread as evenly as they go; one that is left over stays idle."""
    pairs, extra = divmod(sm_count // PAIR, domains)
    return [PAIR * (pairs + (domain < extra)) for domain in range(domains)]


def _device_sms(driver: Driver) -> Any:
    kind = constant(driver, "CUdevResourceType", "CU_DEV_RESOURCE_TYPE_SM")
    return newer_call(driver, "cuDeviceGetDevResource", driver.cu_device, kind)


def _groups(driver: Driver, mode: Mode, locality: Locality, sm_count: int, clusters: int) -> list[Any]:
    """What to ask for each domain. No SM count is the driver's to fill in: as many as the domain has left."""

    def flag(name: str) -> int:
        return int(constant(driver, "CUdevSmResourceGroup_flags", _GROUP + name))

    if mode is Mode.DEFAULT:
        counts, flags = [0] * locality.domains, flag("LOCALITY_DOMAIN_ID")
    else:
        # All SMs of the domain first, those beyond its nominal number included; then spares; then a neighbour's.
        counts = shares(sm_count, locality.domains)
        flags = flag("LOCALITY_DOMAIN_ID") | flag("LOCALITY_DOMAIN_SUPPLEMENTAL_SMS") | flag("BACKFILL")
        if min(counts) < PAIR:
            raise LocalityUnavailableError(f"{sm_count} SMs of GPU {driver.device} for {locality.domains} domains")
    groups = []
    for domain, count in enumerate(counts):
        group = driver.bindings.CU_DEV_SM_RESOURCE_GROUP_PARAMS()
        group.smCount = count
        group.coscheduledSmCount = clusters if mode is Mode.DEFAULT else PAIR
        group.flags = flags
        group.localityDomainId = domain
        groups.append(group)
    return groups


def _split(driver: Driver, device: Any, groups: list[Any]) -> list[Any]:
    """The driver's split, which makes nothing that would have to be given back."""

    def split(wanted: list[Any]) -> list[Any]:
        return list(newer_call(driver, "cuDevSmResourceSplit", len(wanted), device, 0, wanted))

    try:
        return split(groups)
    except DriverError as error:
        if error.result != _TOO_FEW:
            raise
        # One by one, to name the domain; if each is served alone, they hinder each other.
        empty = [str(group.localityDomainId) for group in groups if not _can(split, group)]
        which = f"domain {', '.join(empty)} has" if empty else "the domains together have"
        raise LocalityUnavailableError(
            f"GPU {driver.device}: {which} not enough SMs left for a partition ({error}). Look at MIG, and at "
            "limits of MPS (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE)"
        ) from error


def _can(split: Callable[[list[Any]], list[Any]], group: Any) -> bool:
    try:
        split([group])
    except DriverError as error:
        if error.result != _TOO_FEW:
            raise
        return False
    return True


def _undo_call(driver: Driver, name: str, handle: Any) -> Callable[[], Any]:
    return lambda: driver.call(name, handle)
