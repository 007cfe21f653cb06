"""A thin, typed layer over ``cuda.bindings.driver``: the calls of CUDA's virtual memory management, for one device.

Every call that doesn't return CUDA_SUCCESS raises a :class:`DriverError` with call, result and device. Handles and
addresses are plain integers here. The order of the calls is the one of "Virtual Memory Management" and "Multicast
Object Management" in the CUDA driver API reference (https://docs.nvidia.com/cuda/cuda-driver-api).
"""

import importlib
import os
from enum import Enum
from typing import Any

PROBE_BYTES = 2 * 1024 * 1024
"""Size of an allocation that is made to see whether it can be, rounded up to the device's granularity."""


class HandleType(Enum):
    """How a memory handle travels to another process."""

    FABRIC = "fabric"
    """64 bytes; works between the hosts of an NVLink rack, wherever an IMEX channel was granted."""
    POSIX_FD = "posix_fd"
    """A file descriptor; works inside one host."""


class DriverError(RuntimeError):
    """A driver call that didn't return CUDA_SUCCESS."""

    def __init__(self, call: str, result: Any, device: int | None = None):
        self.call = call
        self.result = str(getattr(result, "name", result))
        self.code = int(result)
        self.device = device
        where = "" if device is None else f" on GPU {device}"
        super().__init__(f"{call}{where}: {self.error}")

    @property
    def error(self) -> str:
        """The driver's answer, such as ``CUDA_ERROR_NOT_PERMITTED (800)``."""
        return f"{self.result} ({self.code})"


class BindingsMissingError(RuntimeError):
    """``cuda.bindings`` isn't installed."""


def call(bindings: Any, name: str, *arguments: Any, device: int | None = None) -> Any:
    """The value of a driver call, or None where it has none."""
    result, *values = getattr(bindings, name)(*arguments)
    if int(result) != 0:
        raise DriverError(name, result, device)
    return values[0] if values else None


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that is not below ``size``."""
    return -(-size // multiple) * multiple


class Driver:
    """The driver as one rank sees it: everything is made on, and made accessible to, one device.

    No CUDA context is made; none of these calls is documented to need a current one.
    """

    def __init__(self, *, device: int, bindings: Any = None):
        """Initialize CUDA's driver library in this process.

        Args:
            device: ordinal among the devices that this process sees (``CUDA_VISIBLE_DEVICES`` counts).
            bindings: the module ``cuda.bindings.driver`` or what stands in for it; None: the installed one.

        Raises:
            BindingsMissingError: the package ``cuda-bindings`` isn't installed.
            DriverError: CUDA doesn't work here, or there is no such device.
            RuntimeError: from the bindings, where ``libcuda.so.1`` is missing.
        """
        if bindings is None:
            try:
                bindings = importlib.import_module("cuda.bindings.driver")
            except ImportError as error:
                raise BindingsMissingError(
                    f"cuda.bindings can't be imported ({error}): pip install 'cuda-python>=13.0,<14'"
                ) from error
        self.device = device
        self.bindings = bindings
        self.call("cuInit", 0)
        self._cu_device = self.call("cuDeviceGet", device)

    def call(self, name: str, *arguments: Any) -> Any:
        """One driver call; its errors name this device."""
        return call(self.bindings, name, *arguments, device=self.device)

    @property
    def cu_device(self) -> Any:
        """The device as the driver's calls take it."""
        return self._cu_device

    def attribute(self, name: str) -> int:
        """A device attribute, by its name without ``CU_DEVICE_ATTRIBUTE_``."""
        key = getattr(self.bindings.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", key, self._cu_device))

    def claims(self, handle_type: HandleType) -> bool:
        """What the device attribute promises; only a real allocation tells whether it holds."""
        name = "POSIX_FILE_DESCRIPTOR" if handle_type is HandleType.POSIX_FD else "FABRIC"
        return bool(self.attribute(f"HANDLE_TYPE_{name}_SUPPORTED"))

    def granularity(self, handle_type: HandleType) -> int:
        """What sizes and addresses of an allocation must be multiples of, bytes."""
        minimum = self.bindings.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.call("cuMemGetAllocationGranularity", self._properties(handle_type), minimum))

    def create(self, *, size: int, handle_type: HandleType) -> int:
        """Allocate physical memory that can be exported; undone by :meth:`release`."""
        return int(self.call("cuMemCreate", size, self._properties(handle_type), 0))

    def export(self, *, handle: int, handle_type: HandleType) -> int | bytes:
        """What another process imports: a file descriptor that the caller closes, or the 64 bytes of a fabric handle.

        Works for allocations and for multicast objects.
        """
        shareable = self.call("cuMemExportToShareableHandle", handle, self._cu_handle_type(handle_type), 0)
        if handle_type is HandleType.POSIX_FD:
            return int(shareable)
        return bytes(shareable.data)

    def import_handle(self, *, shareable: int | bytes, handle_type: HandleType) -> int:
        """The handle of another process's memory; undone by :meth:`release`. A descriptor stays the caller's."""
        return int(self.call("cuMemImportFromShareableHandle", shareable, self._cu_handle_type(handle_type)))

    def release(self, handle: int) -> None:
        """Give a handle back; the memory goes when no handle and no mapping of any process is left."""
        self.call("cuMemRelease", handle)

    def reserve(self, *, size: int, alignment: int) -> int:
        """The start of an empty range of addresses; undone by :meth:`free_addresses`."""
        return int(self.call("cuMemAddressReserve", size, alignment, 0, 0))

    def free_addresses(self, *, address: int, size: int) -> None:
        """Give a range of :meth:`reserve` back; nothing may be mapped in it."""
        self.call("cuMemAddressFree", address, size)

    def map(self, *, address: int, size: int, handle: int) -> None:
        """Put memory, or a multicast object, at reserved addresses; undone by :meth:`unmap`."""
        self.call("cuMemMap", address, size, 0, handle, 0)

    def unmap(self, *, address: int, size: int) -> None:
        """Empty a range that :meth:`map` filled."""
        self.call("cuMemUnmap", address, size)

    def set_access(self, *, address: int, size: int) -> None:
        """Let this device read and write a range whose every byte is mapped."""
        access = self.bindings.CUmemAccessDesc()
        access.location.type = self.bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device
        access.flags = self.bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.call("cuMemSetAccess", address, size, [access], 1)

    def multicast_granularity(self, *, devices: int, handle_type: HandleType) -> int:
        """What size and offsets of a multicast object must be multiples of, bytes."""
        minimum = self.bindings.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM
        # The driver wants a size to be named; any will do for the question.
        properties = self._multicast_properties(devices=devices, size=2 * 1024 * 1024, handle_type=handle_type)
        return int(self.call("cuMulticastGetGranularity", properties, minimum))

    def multicast_create(self, *, devices: int, size: int, handle_type: HandleType) -> int:
        """A multicast object without devices; undone by :meth:`release`."""
        properties = self._multicast_properties(devices=devices, size=size, handle_type=handle_type)
        return int(self.call("cuMulticastCreate", properties))

    def multicast_add_device(self, handle: int) -> None:
        """Add this device for the life of the object. All devices must be in before the first bind or map."""
        self.call("cuMulticastAddDevice", handle, self._cu_device)

    def multicast_bind(self, *, multicast: int, memory: int, size: int) -> None:
        """Put this device's memory behind the object; undone by :meth:`multicast_unbind` with the same size."""
        self.call("cuMulticastBindMem", multicast, 0, memory, 0, size, 0)

    def multicast_unbind(self, *, multicast: int, size: int) -> None:
        """Take this device's memory away from the object."""
        self.call("cuMulticastUnbind", multicast, self._cu_device, 0, size)

    def _cu_handle_type(self, handle_type: HandleType) -> Any:
        types = self.bindings.CUmemAllocationHandleType
        if handle_type is HandleType.FABRIC:
            return types.CU_MEM_HANDLE_TYPE_FABRIC
        return types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _properties(self, handle_type: HandleType) -> Any:
        properties = self.bindings.CUmemAllocationProp()
        properties.type = self.bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self.bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.device
        properties.requestedHandleTypes = self._cu_handle_type(handle_type)
        return properties

    def _multicast_properties(self, *, devices: int, size: int, handle_type: HandleType) -> Any:
        properties = self.bindings.CUmulticastObjectProp()
        properties.numDevices = devices
        properties.size = size
        properties.handleTypes = int(self._cu_handle_type(handle_type))
        return properties


def try_handle_type(*, driver: Driver, handle_type: HandleType) -> None:
    """Really allocate, export and free some memory.

    Raises:
        DriverError: of the first call that failed, the release included; nothing stays allocated otherwise.
    """
    handle = driver.create(size=round_up(PROBE_BYTES, driver.granularity(handle_type)), handle_type=handle_type)
    try:
        shareable = driver.export(handle=handle, handle_type=handle_type)
        if isinstance(shareable, int):
            os.close(shareable)  # a fabric handle is a value and holds nothing
    finally:
        driver.release(handle)
