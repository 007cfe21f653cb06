"""What went wrong on one rank, in one line that ends with what mends it."""

import errno
import os
import resource

from vllm_rose_plugin.memory.driver import DriverError, HandleType
from vllm_rose_plugin.memory.imex import fabric_cure, look_at_imex

_SPARE_DESCRIPTORS = 4
"""With fewer free ones than this, a driver call that needs a descriptor may well have failed for want of one."""

_REFUSALS = ("CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_NOT_SUPPORTED")


def describe(error: BaseException, *, handle_type: HandleType | None = None) -> str:
    """The error and its cure.

    Args:
        error: what an action of this package raised.
        handle_type: the kind of handle that the action was about; None: none.
    """
    cure = _driver_cure(error, handle_type) if isinstance(error, DriverError) else _system_cure(error)
    text = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{text}{notes}. {cure}" if cure else f"{text}{notes}"


def descriptor_limit_cure(needed: int) -> str:
    """What to do where this process has no file descriptor left.

    Args:
        needed: how many more it takes.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = open_descriptors()
    return (
        f"The limit of open files is {limit}, {used} are open and {needed} more are needed: "
        f"raise it to at least {used + needed} (`ulimit -n {used + needed}`, or nofile in the container's ulimits)"
    )


def open_descriptors() -> int:
    """How many file descriptors this process holds."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # the listing's own
    except OSError:  # no descriptor is left to list with
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def descriptors_left() -> int:
    """How many more this process may open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - open_descriptors()


def _driver_cure(error: DriverError, handle_type: HandleType | None) -> str:
    name, on = error.result, f"GPU {error.device}"
    if descriptors_left() < _SPARE_DESCRIPTORS and name not in _REFUSALS:
        return descriptor_limit_cure(_SPARE_DESCRIPTORS)
    if name == "CUDA_ERROR_OUT_OF_MEMORY":
        if error.call == "cuMemAddressReserve":
            return "The address space is full: look at `ulimit -v`, which CUDA needs to be unlimited"
        return f"{on} is full: end what else runs there, or lower --gpu-memory-utilization"
    if error.call == "cuMulticastAddDevice" and name == "CUDA_ERROR_INVALID_DEVICE":
        return f"{on} is not in the NVLink clique of the other ranks' GPUs: take the ranks from one NVLink domain"
    if error.call.startswith("cuMulticast"):
        return "Check that nvidia-fabricmanager runs and, across hosts, that the IMEX service is READY on each"
    if handle_type is HandleType.FABRIC and error.call == "cuMemImportFromShareableHandle":
        return "Exporter and importer must hold the same IMEX channel of one IMEX domain: " + fabric_cure(
            look_at_imex(), error=error.error
        )
    if handle_type is HandleType.FABRIC and error.call in ("cuMemCreate", "cuMemExportToShareableHandle"):
        return fabric_cure(look_at_imex(), error=error.error)
    if handle_type is HandleType.POSIX_FD and error.call in (
        "cuMemCreate",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
    ):
        return (
            "Look at the container's seccomp profile and, in a virtual machine, at whether the GPU's profile allows "
            "virtual memory management"
        )
    return ""


def _system_cure(error: BaseException) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        return descriptor_limit_cure(_SPARE_DESCRIPTORS)
    if number == errno.ENFILE:
        return "The whole host has no file descriptor left: raise fs.file-max with sysctl"
    if number in (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ECONNREFUSED):
        return (
            "Ranks that share memory by file descriptor must run as one user and see each other's processes in /proc: "
            "put them into one container, or give their pod shareProcessNamespace: true. No capability is needed"
        )
    return ""
