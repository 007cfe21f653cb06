"""What the GPUs of this host allow, by real allocations: device attributes promise more than a host permits.

``python -m vllm_rose_plugin.memory.probe`` prints one line of JSON. Run it as a process of its own: ``cuInit`` lasts as
long as the process does. No CUDA context is made: ``cuMemCreate`` and the export work on devices, not on contexts.
"""

import argparse
import ctypes
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from vllm_rose_plugin.memory.driver import PROBE_BYTES, Driver, DriverError, HandleType, call, round_up, try_handle_type
from vllm_rose_plugin.memory.locality import Locality, look_at_locality

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
    locality: Locality = field(default_factory=lambda: Locality(0, 0, 0, "not looked at"))


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
        call(driver, "cuInit", 0)
    except RuntimeError as error:  # the bindings raise their own where libcuda is missing
        if getattr(error, "error", "").startswith("CUDA_ERROR_NO_DEVICE"):
            return HostProbe("no_gpu", str(error))
        return HostProbe("failed" if isinstance(error, DriverError) else "no_driver", str(error))
    version = None
    gpus: list[GpuProbe] = []
    try:
        number = call(driver, "cuDriverGetVersion")
        version = f"{number // 1000}.{number % 1000 // 10}"
        for ordinal in range(call(driver, "cuDeviceGetCount")):
            gpus.append(_probe_gpu(driver, ordinal))
    except DriverError as error:
        return HostProbe("failed", str(error), version, gpus)
    if not gpus:
        return HostProbe("no_gpu", "the driver counts 0 devices", version)
    multicast = _try_multicast(driver, gpus) if try_multicast else None
    return HostProbe("ok", "", version, gpus, multicast)


def _probe_gpu(driver: Any, ordinal: int) -> GpuProbe:
    device = call(driver, "cuDeviceGet", ordinal)

    def attribute(name: str) -> int:
        key = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call(driver, "cuDeviceGetAttribute", key, device))

    name = call(driver, "cuDeviceGetName", 256, device)
    fabric = _try_handle(driver, ordinal, HandleType.FABRIC)
    posix_fd = _try_handle(driver, ordinal, HandleType.POSIX_FD)
    result, _flags, active = driver.cuDevicePrimaryCtxGetState(device)
    if int(result) != 0:
        raise DriverError("cuDevicePrimaryCtxGetState", result)
    return GpuProbe(
        ordinal=ordinal,
        name=name.split(b"\0")[0].decode(errors="replace"),
        capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        memory_bytes=int(call(driver, "cuDeviceTotalMem", device)),
        fabric_attribute=bool(attribute("HANDLE_TYPE_FABRIC_SUPPORTED")),
        posix_fd_attribute=bool(attribute("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")),
        multicast_attribute=bool(attribute("MULTICAST_SUPPORTED")),
        fabric=fabric,
        posix_fd=posix_fd,
        context_active=bool(active),
        locality=look_at_locality(Driver(device=ordinal, bindings=driver)),
    )


def _try_handle(bindings: Any, ordinal: int, handle_type: HandleType) -> Attempt:
    """Allocate, export and free one block of device memory with a handle of this type."""
    try:
        driver = Driver(device=ordinal, bindings=bindings)
        try_handle_type(driver=driver, handle_type=handle_type)
    except DriverError as error:
        return Attempt(False, error.call, error.error)
    return Attempt(True)


def _try_multicast(bindings: Any, gpus: list[GpuProbe]) -> Attempt:
    """Create and free one multicast object over all GPUs; nothing is bound to it."""
    if len(gpus) < 2:
        return Attempt(False, None, "needs two GPUs or more, found 1")
    handle_type = HandleType.FABRIC if all(gpu.fabric.works for gpu in gpus) else HandleType.POSIX_FD
    try:
        driver = Driver(device=0, bindings=bindings)
        granularity = driver.multicast_granularity(devices=len(gpus), handle_type=handle_type)
        size = round_up(PROBE_BYTES, granularity)
        driver.release(driver.multicast_create(devices=len(gpus), size=size, handle_type=handle_type))
    except DriverError as error:
        return Attempt(False, error.call, error.error)
    return Attempt(True)


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
