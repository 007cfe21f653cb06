"""Device memory in parts, each in a locality domain of one GPU.

The order of the calls is that of "Virtual Memory Management" in the CUDA driver API reference; a domain is named in
``CUmemAllocationProp.location``, and access is given to the GPU as a whole. Other devices may read it by RDMA where the
GPU has that, as they may read torch's own memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vllm_rose_plugin.memory.driver import Driver, round_up
from vllm_rose_plugin.memory.locality import (
    LocalityUnavailableError,
    constant,
    domain_of,
    reached_by_rdma,
    require_locality,
)
from vllm_rose_plugin.memory.undo import Undo
from vllm_rose_plugin.memory.windows import Windows

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Part:
    """A range of device memory."""

    domain: int | None
    """Where it lies; None: anywhere on the GPU."""
    address: int
    size: int
    """Bytes: what was asked for, rounded up to the granularity."""


class DomainMemory:
    """Ranges of memory on one GPU; made by :func:`allocate_in_domains` or :func:`allocate_anywhere`.

    Use it as a context manager, or call :meth:`free`. Objects share nothing: any number may live in one process.
    """

    def __init__(self, driver: Driver):
        """For the functions above."""
        self.driver = driver
        self.parts: tuple[Part, ...] = ()
        """In the order in which they were asked for; empty: freed."""
        self._undo = Undo()
        self._windows = Windows()

    def tensor(self, part: int, *, shape: tuple[int, ...], dtype: "torch.dtype", offset: int = 0) -> "torch.Tensor":
        """A tensor in a part; the memory isn't cleared.

        Args:
            part: which one.
            shape, dtype: any.
            offset: where it starts, bytes; a multiple of the element's size.

        Raises:
            ValueError: it doesn't fit, isn't aligned, or there is no such part.
        """
        if not 0 <= part < len(self.parts):
            raise ValueError(f"part={part} must be 0 to {len(self.parts) - 1}" if self.parts else "the memory is freed")
        place = self.parts[part]
        return self._windows.tensor(
            address=place.address, size=place.size, device=self.driver.device, shape=shape, dtype=dtype, offset=offset
        )

    def free(self) -> None:
        """Give all parts back; a second call does nothing. Kernels that use them must have ended.

        Raises:
            BufferInUseError: tensors in it are alive; nothing is freed.
            DriverError: the first call that failed; the others were made nonetheless.
        """
        self._windows.check_none("free")
        self.parts = ()
        self._undo.close()

    def __enter__(self) -> "DomainMemory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.free()

    def _fill(self, sizes: Sequence[int], domains: Sequence[int | None]) -> None:
        try:
            self.parts = tuple(self._allocate(size, domain) for size, domain in zip(sizes, domains, strict=True))
        except BaseException as error:
            self._undo.close_after(error)
            raise

    def _allocate(self, size: int, domain: int | None) -> Part:
        driver, undo = self.driver, self._undo
        properties = _properties(driver, domain, by_rdma=reached_by_rdma(driver, in_domains=domain is not None))
        minimum = driver.bindings.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = int(driver.call("cuMemGetAllocationGranularity", properties, minimum))
        size = round_up(size, granularity)
        try:
            handle = int(driver.call("cuMemCreate", size, properties, 0))
        except RuntimeError as error:
            if domain is not None:
                error.add_note(f"{size} bytes in locality domain {domain}, which holds only its share of the memory")
            raise
        undo.add(driver.release, handle=handle)
        address = driver.reserve(size=size, alignment=granularity)
        undo.add(driver.free_addresses, address=address, size=size)
        driver.map(address=address, size=size, handle=handle)
        undo.add(driver.unmap, address=address, size=size)
        driver.set_access(address=address, size=size)
        if domain is not None and (found := domain_of(driver, address)) != domain:
            raise LocalityUnavailableError(
                f"memory that was asked for in locality domain {domain} of GPU {driver.device} lies in "
                f"{'none' if found is None else found}"
            )
        return Part(domain, address, size)


def allocate_in_domains(*, driver: Driver, sizes: Sequence[int]) -> DomainMemory:
    """Allocate one part in each locality domain, and see that it lies there; all of them or none.

    Args:
        driver: the GPU. A CUDA context must be current (torch's is), since the driver is asked where addresses lie.
        sizes: bytes for domain 0, 1, …; as many as there are domains, rounded up to the granularity.

    Raises:
        ValueError: another number of sizes, or one below 1.
        LocalityUnavailableError: no domains here, or memory came from elsewhere.
        DriverError: a call failed, such as ``cuMemCreate`` where a domain is full.
    """
    domains = require_locality(driver).domains
    if len(sizes) != domains:
        raise ValueError(f"{len(sizes)} sizes for {domains} locality domains: give one for each")
    return _allocate(driver, sizes, list(range(domains)))


def allocate_anywhere(*, driver: Driver, sizes: Sequence[int]) -> DomainMemory:
    """The same parts without domains, on any GPU: what a split runs on where it is forced.

    Args:
        driver: the GPU.
        sizes: bytes, as above; any number of them.

    Raises:
        ValueError: a size below 1, or none.
        DriverError: a call failed.
    """
    return _allocate(driver, sizes, [None] * len(sizes))


def _allocate(driver: Driver, sizes: Sequence[int], domains: Sequence[int | None]) -> DomainMemory:
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes={list(sizes)} must be 1 byte or more each, and not none")
    memory = DomainMemory(driver)
    memory._fill(sizes, domains)
    return memory


def _properties(driver: Driver, domain: int | None, *, by_rdma: bool) -> Any:
    bindings = driver.bindings
    properties = bindings.CUmemAllocationProp()
    properties.type = bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.allocFlags.gpuDirectRDMACapable = int(by_rdma)
    if domain is None:
        properties.location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = driver.device
        return properties
    in_domain = constant(driver, "CUmemLocationType", "CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN")
    properties.location.type = in_domain
    properties.location.localized.deviceId = driver.device
    properties.location.localized.localityDomainId = domain
    return properties
