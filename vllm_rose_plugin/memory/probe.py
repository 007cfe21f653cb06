"""What the GPUs of this host allow, by real allocations: device attributes promise more than a host permits.

``python -m vllm_rose_plugin.memory.probe`` prints one line of JSON. Run it as a process of its own: ``cuInit`` lasts as
long as the process does. No CUDA context is made: ``cuMemCreate`` and the export work on devices, not on contexts.
"""

import argparse
import ctypes
import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

PROBE_BYTES = 2 * 1024 * 1024
"""Size of a probe's allocation, rounded up to the device's granularity."""

Status = Literal["ok", "no_driver", "no_bindings", "no_gpu", "failed"]


@dataclass(frozen=True)
class Attempt:
    """One thing that was really tried."""

    works: bool
    step: str | None = None
    """The driver call that failed."""
    error: str | None = None
    """The driver's answer, such as ``CUDA_ERROR_NOT_PERMITTED (800)``."""


@dataclass(frozen=True)
class GpuProbe:
    """One GPU."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    sm_count: int
    memory_bytes: int
    fabric_attribute: bool
    """What the driver claims; only ``fabric`` tells whether it holds."""
    posix_fd_attribute: bool
    multicast_attribute: bool
    fabric: Attempt
    posix_fd: Attempt
    context_active: bool
    """Whether the probe left a primary context; it makes none."""


@dataclass(frozen=True)
class HostProbe:
    """The driver and its GPUs."""

    status: Status
    detail: str = ""
    cuda_version: str | None = None
    """The newest CUDA that the driver serves, such as ``"13.0"``."""
    gpus: list[GpuProbe] = field(default_factory=list)
    multicast: Attempt | None = None
    """A multicast object over all GPUs of the host; None: not tried."""


class DriverError(RuntimeError):
    """A driver call that didn't return CUDA_SUCCESS."""

    def __init__(self, step: str, result: Any):
        self.step = step
        self.error = f"{getattr(result, 'name', result)} ({int(result)})"
        super().__init__(f"{step}: {self.error}")


def probe_host(*, driver: Any, try_multicast: bool = False) -> HostProbe:
    """Ask every GPU, and try what its attributes promise.

    Args:
        driver: the module ``cuda.bindings.driver``.
        try_multicast: create, and free, one multicast object over all GPUs. On a host whose GPUs are shared, a
            multicast set-up that fails half-way can disturb the other users, so nothing does this unasked.

    Returns:
        The findings; a driver that fails is a finding (``status="failed"``), not an exception.
    """
    try:
        _call(driver, "cuInit", 0)
    except RuntimeError as error:  # the bindings raise their own where libcuda is missing
        if getattr(error, "error", "").startswith("CUDA_ERROR_NO_DEVICE"):
            return HostProbe("no_gpu", str(error))
        return HostProbe("failed" if isinstance(error, DriverError) else "no_driver", str(error))
    version = None
    gpus: list[GpuProbe] = []
    try:
        number = _call(driver, "cuDriverGetVersion")
        version = f"{number // 1000}.{number % 1000 // 10}"
        for ordinal in range(_call(driver, "cuDeviceGetCount")):
            gpus.append(_probe_gpu(driver, ordinal))
    except DriverError as error:
        return HostProbe("failed", str(error), version, gpus)
    if not gpus:
        return HostProbe("no_gpu", "the driver counts 0 devices", version)
    multicast = _try_multicast(driver, gpus) if try_multicast else None
    return HostProbe("ok", "", version, gpus, multicast)


def _call(driver: Any, step: str, *arguments: Any) -> Any:
    """The value of a driver call, or None where it has none."""
    result, *values = getattr(driver, step)(*arguments)
    if int(result) != 0:
        raise DriverError(step, result)
    return values[0] if values else None


def _probe_gpu(driver: Any, ordinal: int) -> GpuProbe:
    device = _call(driver, "cuDeviceGet", ordinal)

    def attribute(name: str) -> int:
        key = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_call(driver, "cuDeviceGetAttribute", key, device))

    name = _call(driver, "cuDeviceGetName", 256, device)
    handle_types = driver.CUmemAllocationHandleType
    fabric = _try_handle(driver, ordinal, handle_types.CU_MEM_HANDLE_TYPE_FABRIC)
    posix_fd = _try_handle(driver, ordinal, handle_types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    result, _flags, active = driver.cuDevicePrimaryCtxGetState(device)
    if int(result) != 0:
        raise DriverError("cuDevicePrimaryCtxGetState", result)
    return GpuProbe(
        ordinal=ordinal,
        name=name.split(b"\0")[0].decode(errors="replace"),
        capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        memory_bytes=int(_call(driver, "cuDeviceTotalMem", device)),
        fabric_attribute=bool(attribute("HANDLE_TYPE_FABRIC_SUPPORTED")),
        posix_fd_attribute=bool(attribute("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")),
        multicast_attribute=bool(attribute("MULTICAST_SUPPORTED")),
        fabric=fabric,
        posix_fd=posix_fd,
        context_active=bool(active),
    )


def _try_handle(driver: Any, ordinal: int, handle_type: Any) -> Attempt:
    """Allocate, export and free one block of device memory with a handle of this type."""
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    properties.requestedHandleTypes = handle_type
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    try:
        granularity = int(_call(driver, "cuMemGetAllocationGranularity", properties, minimum))
        memory = _call(driver, "cuMemCreate", _round_up(PROBE_BYTES, granularity), properties, 0)
    except DriverError as error:
        return Attempt(False, error.step, error.error)
    failure: DriverError | None = None
    try:
        shareable = _call(driver, "cuMemExportToShareableHandle", memory, handle_type, 0)
        if handle_type == driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
            os.close(int(shareable))  # a fabric handle is a value and holds nothing
    except DriverError as error:
        failure = error
    finally:
        released = _release(driver, memory)
    failure = failure or released
    return Attempt(True) if failure is None else Attempt(False, failure.step, failure.error)


def _try_multicast(driver: Any, gpus: list[GpuProbe]) -> Attempt:
    """Create and free one multicast object over all GPUs; nothing is bound to it."""
    if len(gpus) < 2:
        return Attempt(False, None, "needs two GPUs or more, found 1")
    handle_types = driver.CUmemAllocationHandleType
    fabric = all(gpu.fabric.works for gpu in gpus)
    properties = driver.CUmulticastObjectProp()
    properties.numDevices = len(gpus)
    properties.handleTypes = int(
        handle_types.CU_MEM_HANDLE_TYPE_FABRIC if fabric else handle_types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    )
    properties.size = PROBE_BYTES
    minimum = driver.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM
    try:
        granularity = int(_call(driver, "cuMulticastGetGranularity", properties, minimum))
        properties.size = _round_up(PROBE_BYTES, granularity)
        created = _call(driver, "cuMulticastCreate", properties)
    except DriverError as error:
        return Attempt(False, error.step, error.error)
    released = _release(driver, created)
    return Attempt(True) if released is None else Attempt(False, released.step, released.error)


def _release(driver: Any, memory: Any) -> DriverError | None:
    try:
        _call(driver, "cuMemRelease", memory)
    except DriverError as error:
        return error
    return None


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def load_and_probe(*, try_multicast: bool = False) -> HostProbe:
    """:func:`probe_host` with the installed bindings."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        if _has_libcuda():
            return HostProbe("no_bindings", f"libcuda.so.1 is there, cuda.bindings is not ({error})")
        return HostProbe("no_driver", "libcuda.so.1 is not found")
    return probe_host(driver=driver, try_multicast=try_multicast)


def _has_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def main() -> int:
    """Print the probe as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--multicast", action="store_true", help="also create and free a multicast object")
    print(json.dumps(asdict(load_and_probe(try_multicast=parser.parse_args().multicast))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
