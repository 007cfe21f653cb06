"""A ``cuda.bindings.driver`` whose device memory is real shared memory of the host, with a ledger of everything.

An allocation is a memfd, its file descriptor handle a duplicate of it, its fabric handle the way to it through /proc.
Reserved addresses, mappings and access rights are those of ``mmap``, so what one rank writes another one reads, and a
range that wasn't mapped or given access can't be touched. Misuse of the API (a double release, freeing addresses that
are still mapped, binding before all devices are in a multicast object) is an AssertionError.
"""

import ctypes
import os
import signal
import threading
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

GRANULARITY = 64 * 1024
MULTICAST_GRANULARITY = 256 * 1024

_NONE, _READ_WRITE, _SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = 0, 3, 0x01, 0x02, 0x10, 0x20, 0x4000
_KIND = "CU_MEM_HANDLE_TYPE_"
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_OPERATING_SYSTEM = 304
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_UNKNOWN = 999


class CUmemAllocationHandleType(IntEnum):
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
    CU_MEM_HANDLE_TYPE_FABRIC = 8


POSIX_FD = CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
FABRIC = CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC


class CUdevice_attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128
    CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED = 132


class _OpenFiles:
    """One descriptor of this process for each memory file, however many handles of however many ranks lead to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], list[int]] = {}

    def take(self, descriptor: int) -> int:
        with self._lock:
            stat = os.fstat(descriptor)
            key = (stat.st_dev, stat.st_ino)
            if key not in self._open:
                self._open[key] = [0, os.dup(descriptor)]
            self._open[key][0] += 1
            return self._open[key][1]

    def give_back(self, descriptor: int) -> None:
        with self._lock:
            stat = os.fstat(descriptor)
            entry = self._open[(stat.st_dev, stat.st_ino)]
            entry[0] -= 1
            if entry[0] == 0:
                os.close(descriptor)
                del self._open[(stat.st_dev, stat.st_ino)]

    def __len__(self) -> int:
        return len(self._open)


OPEN_FILES = _OpenFiles()


class MemfdDriver:
    """Stands in for the module, for one rank.

    Args:
        devices: how many GPUs this rank sees.
        fail: call to the result it returns; a key ``(call, n)`` means its n-th call only (from 1), a key
            ``(call, "FABRIC")`` or ``(call, "POSIX_FILE_DESCRIPTOR")`` a call that is about such a handle.
        kill: the process ends by SIGKILL in place of this call.
    """

    CUmemAllocationHandleType = CUmemAllocationHandleType
    CUdevice_attribute = CUdevice_attribute
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmulticastGranularity_flags = SimpleNamespace(CU_MULTICAST_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self, *, devices: int = 1, fail: dict[Any, CUresult] | None = None, kill: str = ""):
        self.devices = devices
        self.fail = fail or {}
        self.kill = kill
        self.granularity = GRANULARITY
        self.multicast_supported = 1
        self.device = 0
        self.calls: list[str] = []
        self.handles: dict[int, tuple[int, int]] = {}  # handle -> (descriptor, size)
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}  # address -> (size, handle)
        self.bound: dict[int, int] = {}  # multicast handle -> size
        self._next = 1

    def ledger(self) -> dict[str, int]:
        """What this rank holds."""
        held = (self.handles, self.reserved, self.mapped, self.bound)
        return dict(zip(("handles", "reservations", "mappings", "bindings"), map(len, held), strict=True))

    CUmemAllocationProp = staticmethod(
        lambda: SimpleNamespace(type=0, location=SimpleNamespace(type=0, id=-1), requestedHandleTypes=0)
    )
    CUmulticastObjectProp = staticmethod(lambda: SimpleNamespace(numDevices=0, handleTypes=0, size=0, flags=0))
    CUmemAccessDesc = staticmethod(lambda: SimpleNamespace(location=SimpleNamespace(type=0, id=-1), flags=0))

    def _begin(self, call: str, handle_type: Any = None) -> CUresult:
        self.calls.append(call)
        if self.kill == call:
            os.kill(os.getpid(), signal.SIGKILL)
        kind = "" if handle_type is None else CUmemAllocationHandleType(handle_type).name.removeprefix(_KIND)
        keys = [call, (call, self.calls.count(call)), (call, kind)]
        return next((self.fail[key] for key in keys if key in self.fail), CUresult.CUDA_SUCCESS)

    def _value(self, call: str, value: Any) -> tuple[CUresult, Any]:
        result = self._begin(call)
        return (result, None if result else value)

    def cuInit(self, flags: int) -> tuple[CUresult]:
        return (self._begin("cuInit"),)

    def cuDeviceGet(self, ordinal: int) -> tuple[CUresult, Any]:
        if ordinal >= self.devices:
            return (CUresult.CUDA_ERROR_INVALID_DEVICE, None)
        self.device = ordinal
        return self._value("cuDeviceGet", ordinal)

    def cuDeviceGetAttribute(self, attribute: CUdevice_attribute, device: int) -> tuple[CUresult, Any]:
        multicast = attribute is CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
        return self._value("cuDeviceGetAttribute", self.multicast_supported if multicast else 1)

    def cuMemGetAllocationGranularity(self, properties: Any, flag: int) -> tuple[CUresult, Any]:
        assert properties.type == 1 and properties.location.type == 1
        return self._value("cuMemGetAllocationGranularity", self.granularity)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[CUresult, Any]:
        assert size > 0 and size % self.granularity == 0
        assert properties.type == 1 and properties.location.type == 1 and properties.location.id == self.device
        return self._create("cuMemCreate", size, properties.requestedHandleTypes)

    def _create(self, call: str, size: int, handle_type: Any) -> tuple[CUresult, Any]:
        if result := self._begin(call, handle_type):
            return (result, None)
        try:
            descriptor = os.memfd_create("device memory", os.MFD_CLOEXEC)
        except OSError:
            return (CUresult.CUDA_ERROR_OPERATING_SYSTEM, None)
        os.truncate(descriptor, size)
        try:
            return self._add(descriptor, size)
        finally:
            os.close(descriptor)

    def _add(self, descriptor: int, size: int) -> tuple[CUresult, Any]:
        try:
            kept = OPEN_FILES.take(descriptor)
        except OSError:
            return (CUresult.CUDA_ERROR_OPERATING_SYSTEM, None)
        handle, self._next = self._next, self._next + 1
        self.handles[handle] = (kept, size)
        return (CUresult.CUDA_SUCCESS, handle)

    def cuMemExportToShareableHandle(self, handle: int, handle_type: Any, flags: int) -> tuple[CUresult, Any]:
        descriptor, _ = self.handles[handle]
        if result := self._begin("cuMemExportToShareableHandle", handle_type):
            return (result, None)
        if handle_type == FABRIC:
            return (result, SimpleNamespace(data=f"/proc/{os.getpid()}/fd/{descriptor}".encode().ljust(64, b"\0")))
        try:
            return (result, os.dup(descriptor))
        except OSError:
            return (CUresult.CUDA_ERROR_OPERATING_SYSTEM, None)

    def cuMemImportFromShareableHandle(self, shareable: Any, handle_type: Any) -> tuple[CUresult, Any]:
        if result := self._begin("cuMemImportFromShareableHandle", handle_type):
            return (result, None)
        if handle_type == POSIX_FD:
            return self._add(shareable, os.fstat(shareable).st_size)
        assert len(shareable) == 64
        opened = os.open(shareable.rstrip(b"\0"), os.O_RDWR | os.O_CLOEXEC)
        try:
            return self._add(opened, os.fstat(opened).st_size)
        finally:
            os.close(opened)

    def cuMemRelease(self, handle: int) -> tuple[CUresult]:
        result = self._begin("cuMemRelease")
        OPEN_FILES.give_back(self.handles.pop(handle)[0])
        return (result,)

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[CUresult, Any]:
        assert size > 0 and size % self.granularity == 0 and alignment & (alignment - 1) == 0
        if result := self._begin("cuMemAddressReserve"):
            return (result, None)
        address = _libc.mmap(None, size, _NONE, _PRIVATE | _ANONYMOUS | _NORESERVE, -1, 0)
        assert address != _FAILED
        self.reserved[address] = size
        return (result, address)

    def cuMemAddressFree(self, address: int, size: int) -> tuple[CUresult]:
        assert self.reserved.pop(address) == size
        assert not [start for start in self.mapped if address <= start < address + size], "still mapped"
        assert _libc.munmap(address, size) == 0
        return (self._begin("cuMemAddressFree"),)

    def _reservation(self, address: int, size: int) -> bool:
        return any(start <= address and address + size <= start + length for start, length in self.reserved.items())

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[CUresult]:
        descriptor, length = self.handles[handle]
        assert self._reservation(address, size) and offset == 0 and size <= length
        assert not [s for s, (n, _) in self.mapped.items() if s < address + size and address < s + n], "mapped already"
        if result := self._begin("cuMemMap"):
            return (result,)
        assert _libc.mmap(address, size, _NONE, _SHARED | _FIXED, descriptor, 0) == address
        self.mapped[address] = (size, handle)
        return (result,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[CUresult]:
        assert self.mapped.pop(address)[0] == size
        flags = _PRIVATE | _ANONYMOUS | _NORESERVE | _FIXED
        assert _libc.mmap(address, size, _NONE, flags, -1, 0) == address
        return (self._begin("cuMemUnmap"),)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[CUresult]:
        assert count == len(access) == 1 and access[0].flags == 3 and access[0].location.type == 1
        covered = sum(length for start, (length, _) in self.mapped.items() if address <= start < address + size)
        assert covered == size, "not mapped everywhere"
        if result := self._begin("cuMemSetAccess"):
            return (result,)
        assert _libc.mprotect(address, size, _READ_WRITE) == 0
        return (result,)

    # A multicast object is a memory file too: byte d says that device d is in, byte 128 + d that it is bound, bytes 256
    # and up how many devices there are to be.

    def cuMulticastGetGranularity(self, properties: Any, flag: int) -> tuple[CUresult, Any]:
        return self._value("cuMulticastGetGranularity", MULTICAST_GRANULARITY)

    def cuMulticastCreate(self, properties: Any) -> tuple[CUresult, Any]:
        assert properties.size % MULTICAST_GRANULARITY == 0 and properties.handleTypes in (1, 8)
        result, handle = self._create("cuMulticastCreate", properties.size, properties.handleTypes)
        if not result:
            os.pwrite(self.handles[handle][0], bytes([properties.numDevices]), 256)
        return (result, handle)

    def _marks(self, handle: int, start: int) -> int:
        return os.pread(self.handles[handle][0], 128, start).count(1)

    def _mark(self, handle: int, start: int, value: int) -> None:
        os.pwrite(self.handles[handle][0], bytes([value]), start + self.device)

    def cuMulticastAddDevice(self, handle: int, device: int) -> tuple[CUresult]:
        if result := self._begin("cuMulticastAddDevice"):
            return (result,)
        self._mark(handle, 0, 1)
        return (result,)

    def cuMulticastBindMem(
        self, multicast: int, offset: int, memory: int, memory_offset: int, size: int, flags: int
    ) -> tuple[CUresult]:
        assert offset == memory_offset == 0 and size % MULTICAST_GRANULARITY == 0
        assert size <= min(self.handles[memory][1], self.handles[multicast][1])
        wanted = os.pread(self.handles[multicast][0], 1, 256)[0]
        assert self._marks(multicast, 0) == wanted, "a real driver would block: not all devices are in"
        if result := self._begin("cuMulticastBindMem"):
            return (result,)
        self._mark(multicast, 128, 1)
        self.bound[multicast] = size
        return (result,)

    def cuMulticastUnbind(self, multicast: int, device: int, offset: int, size: int) -> tuple[CUresult]:
        assert self.bound.pop(multicast) == size and offset == 0
        self._mark(multicast, 128, 0)
        return (self._begin("cuMulticastUnbind"),)

    # What the doctor's ranks need to see whether a write arrives.

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[CUresult, Any]:
        return self._value("cuDevicePrimaryCtxRetain", "context")

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[CUresult]:
        return (self._begin("cuDevicePrimaryCtxRelease"),)

    def cuCtxSetCurrent(self, context: Any) -> tuple[CUresult]:
        return (self._begin("cuCtxSetCurrent"),)

    def cuCtxSynchronize(self) -> tuple[CUresult]:
        return (self._begin("cuCtxSynchronize"),)

    def cuMemsetD32(self, address: int, value: int, count: int) -> tuple[CUresult]:
        if result := self._begin("cuMemsetD32"):
            return (result,)
        ctypes.memmove(address, value.to_bytes(4, "little") * count, 4 * count)
        return (result,)

    def cuMemcpyDtoH(self, target: bytearray, address: int, size: int) -> tuple[CUresult]:
        if result := self._begin("cuMemcpyDtoH"):
            return (result,)
        target[:size] = ctypes.string_at(address, size)
        return (result,)
