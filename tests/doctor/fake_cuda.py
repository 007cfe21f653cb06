"""A small ``cuda.bindings.driver``: the calls that the probe makes, with every allocation and descriptor counted."""

import os
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_UNKNOWN = 999


class CUmemAllocationHandleType(IntEnum):
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
    CU_MEM_HANDLE_TYPE_FABRIC = 8


class CUdevice_attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128
    CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED = 132
    CU_DEVICE_ATTRIBUTE_LOCALITY_DOMAIN_COUNT = 149
    CU_DEVICE_ATTRIBUTE_LOCALITY_DOMAIN_MULTIPROCESSOR_COUNT = 157


FABRIC = CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
POSIX_FD = CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
GRANULARITY = 2 * 1024 * 1024


@dataclass
class FakeDriver:
    """Stands in for the module; ``fail`` maps a call's name, or (name, handle type), to what it returns."""

    gpus: list[dict[str, Any]]
    fail: dict[Any, CUresult] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)
    descriptors: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    version: int = 13000
    _next: int = 1

    CUmemAllocationHandleType = CUmemAllocationHandleType
    CUdevice_attribute = CUdevice_attribute
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmulticastGranularity_flags = SimpleNamespace(CU_MULTICAST_GRANULARITY_MINIMUM=0)

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(type=0, location=SimpleNamespace(type=0, id=-1), requestedHandleTypes=0)

    def CUmulticastObjectProp(self) -> SimpleNamespace:
        return SimpleNamespace(numDevices=0, handleTypes=0, size=0, flags=0)

    def _result(self, call: str, handle_type: Any = None) -> CUresult:
        self.calls.append(call)
        return self.fail.get((call, handle_type), self.fail.get(call, CUresult.CUDA_SUCCESS))

    def _value(self, call: str, value: Any) -> tuple[CUresult, Any]:
        result = self._result(call)
        return (result, value if result == 0 else None)

    def cuInit(self, flags: int) -> tuple[CUresult]:
        return (self._result("cuInit"),)

    def cuDriverGetVersion(self) -> tuple[CUresult, Any]:
        return self._value("cuDriverGetVersion", self.version)

    def cuDeviceGetCount(self) -> tuple[CUresult, Any]:
        return self._value("cuDeviceGetCount", len(self.gpus))

    def cuDeviceGet(self, ordinal: int) -> tuple[CUresult, Any]:
        return self._value("cuDeviceGet", ordinal)

    def cuDeviceGetName(self, length: int, device: int) -> tuple[CUresult, Any]:
        return self._value("cuDeviceGetName", self.gpus[device]["name"].encode().ljust(length, b"\0"))

    def cuDeviceGetAttribute(self, attribute: CUdevice_attribute, device: int) -> tuple[CUresult, Any]:
        key = attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_").lower()
        return self._value("cuDeviceGetAttribute", self.gpus[device][key])

    def cuDeviceTotalMem(self, device: int) -> tuple[CUresult, Any]:
        return self._value("cuDeviceTotalMem", self.gpus[device]["memory"])

    def cuDevicePrimaryCtxGetState(self, device: int) -> tuple[CUresult, Any, Any]:
        return (self._result("cuDevicePrimaryCtxGetState"), 0, 0)

    def cuMemGetAllocationGranularity(self, properties: Any, flag: int) -> tuple[CUresult, Any]:
        return self._value("cuMemGetAllocationGranularity", GRANULARITY)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[CUresult, Any]:
        assert size > 0 and size % GRANULARITY == 0
        assert properties.type == 1 and properties.location.type == 1
        assert 0 <= properties.location.id < len(self.gpus)
        return self._create("cuMemCreate", properties.requestedHandleTypes)

    def cuMulticastGetGranularity(self, properties: Any, flag: int) -> tuple[CUresult, Any]:
        return self._value("cuMulticastGetGranularity", GRANULARITY)

    def cuMulticastCreate(self, properties: Any) -> tuple[CUresult, Any]:
        assert properties.numDevices == len(self.gpus) and properties.size % GRANULARITY == 0
        return self._create("cuMulticastCreate", properties.handleTypes)

    def _create(self, call: str, handle_type: Any) -> tuple[CUresult, Any]:
        result = self._result(call, handle_type)
        if result != 0:
            return (result, None)
        handle, self._next = self._next, self._next + 1
        self.live.add(handle)
        return (result, handle)

    def cuMemExportToShareableHandle(self, handle: int, handle_type: Any, flags: int) -> tuple[CUresult, Any]:
        assert handle in self.live
        result = self._result("cuMemExportToShareableHandle", handle_type)
        if result != 0:
            return (result, None)
        if handle_type == FABRIC:
            return (result, SimpleNamespace(data=bytes(64)))
        descriptor = os.open(os.devnull, os.O_RDONLY)
        self.descriptors.append(descriptor)
        return (result, descriptor)

    def cuMemRelease(self, handle: int) -> tuple[CUresult]:
        self.live.remove(handle)  # a double release is an error of the probe
        return (self._result("cuMemRelease"),)

    def open_descriptors(self) -> list[int]:
        """Exported descriptors that nobody has closed."""
        still_open = []
        for descriptor in self.descriptors:
            try:
                os.fstat(descriptor)
            except OSError:
                continue
            still_open.append(descriptor)
        return still_open


def _gpu(
    name: str,
    major: int,
    minor: int,
    sm_count: int,
    memory: int,
    *,
    claims: bool = True,
    domains: tuple[int, int] = (1, 0),
) -> dict[str, Any]:
    return {
        "name": name,
        "compute_capability_major": major,
        "compute_capability_minor": minor,
        "multiprocessor_count": sm_count,
        "memory": memory,
        "handle_type_fabric_supported": int(claims),
        "handle_type_posix_file_descriptor_supported": 1,
        "multicast_supported": int(claims),
        "locality_domain_count": domains[0],
        "locality_domain_multiprocessor_count": domains[1],
    }


def h200_host(count: int = 1) -> FakeDriver:
    """Claims fabric handles and refuses them, as a host without an IMEX channel does."""
    gpu = _gpu("NVIDIA H200", 9, 0, 132, 150_000_000_000)
    return FakeDriver([gpu] * count, {("cuMemCreate", FABRIC): CUresult.CUDA_ERROR_NOT_PERMITTED})


def gb200_host(count: int = 4) -> FakeDriver:
    """A compute tray of a rack on which everything works."""
    return FakeDriver([_gpu("NVIDIA GB200", 10, 0, 148, 198_000_000_000)] * count)


def rubin_host(count: int = 4) -> FakeDriver:
    """The same with two locality domains in each GPU, and the CUDA that tells of them."""
    gpu = _gpu("NVIDIA Rubin", 10, 7, 212, 290_000_000_000, domains=(2, 100))
    return FakeDriver([gpu] * count, version=13040)
