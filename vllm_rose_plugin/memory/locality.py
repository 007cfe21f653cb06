"""Locality domains: parts of one GPU, each with memory of its own and the SMs beside it.

CUDA tells of them from 13.4 on. Where something is missing for them, :class:`Locality` says what, and everything that
would need them raises that as a :class:`LocalityUnavailableError`. Source: the CUDA driver API reference of 13.4,
``cuDeviceGetAttribute`` and ``cuPointerGetAttribute``. None of it ran on a GPU that has them.
"""

from dataclasses import dataclass
from typing import Any

from vllm_rose_plugin.memory.driver import Driver, DriverError

FIRST_CUDA = 13040
"""As ``cuDriverGetVersion`` counts."""
BINDINGS = "pip install 'cuda-python>=13.4.1,<14'"
NOWHERE = -1
"""The ordinal that the driver gives for memory which lies in no one domain."""


class LocalityUnavailableError(RuntimeError):
    """Locality domains, or the green contexts that serve them, can't be had here; the message says why."""


@dataclass(frozen=True)
class Locality:
    """The domains of one GPU."""

    domains: int
    """How many; 0: the driver can't say."""
    sms_per_domain: int
    """SMs that lie in each domain, by the driver's own count; 0: it can't say."""
    sm_count: int
    """SMs of the GPU; those beyond all domains' belong to none, or are spares of one."""
    reason: str = ""
    """Why domains can't be used; empty: they can."""


def look_at_locality(driver: Driver) -> Locality:
    """Ask the driver; makes nothing.

    Returns:
        The domains. What is missing (a driver of CUDA before 13.4, older bindings, an attribute that is refused) and a
        GPU of one domain are answers, not exceptions: see ``reason``.

    Raises:
        DriverError: version or number of SMs, which every driver tells, are refused.
    """
    version = int(driver.call("cuDriverGetVersion"))
    sm_count = driver.attribute("MULTIPROCESSOR_COUNT")
    if version < FIRST_CUDA:
        served, wanted = _cuda(version), _cuda(FIRST_CUDA)
        return Locality(
            0, 0, sm_count, f"the driver serves CUDA {served}, locality domains need {wanted}: update the NVIDIA driver"
        )
    numbers = []
    for name in ("LOCALITY_DOMAIN_COUNT", "LOCALITY_DOMAIN_MULTIPROCESSOR_COUNT"):
        if not hasattr(driver.bindings.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"):
            return Locality(0, 0, sm_count, f"cuda.bindings has no {name}: {BINDINGS}")
        try:
            numbers.append(driver.attribute(name))
        except DriverError as error:
            return Locality(0, 0, sm_count, f"the driver refuses {name}: {error}")
    domains, sms_per_domain = numbers
    if domains < 2:
        return Locality(domains, sms_per_domain, sm_count, "the GPU has one locality domain, nothing of it lies far")
    return Locality(domains, sms_per_domain, sm_count)


def require_locality(driver: Driver) -> Locality:
    """:func:`look_at_locality` where domains can't be done without.

    Raises:
        LocalityUnavailableError: the reason.
        DriverError: as above.
    """
    locality = look_at_locality(driver)
    if locality.reason:
        raise LocalityUnavailableError(f"no locality domains on GPU {driver.device}: {locality.reason}")
    return locality


def domain_of(driver: Driver, address: int) -> int | None:
    """The domain in which the memory at a device address lies; None: in no one of them.

    Raises:
        LocalityUnavailableError: bindings or driver are older than the question.
        DriverError: the address is nobody's, or no CUDA context is current.
    """
    name = "CU_POINTER_ATTRIBUTE_LOCALITY_DOMAIN_ORDINAL"
    attribute = constant(driver, "CUpointer_attribute", name)
    ordinal = int(newer_call(driver, "cuPointerGetAttribute", attribute, address))
    return None if ordinal == NOWHERE else ordinal


def reached_by_rdma(driver: Driver, *, in_domains: bool) -> bool:
    """Whether memory of ``cuMemCreate`` can be asked for so that other devices reach it by RDMA; False: unknown, too.

    Args:
        driver: the GPU.
        in_domains: memory that lies in a domain.
    """
    name = f"GPU_DIRECT_RDMA_WITH_{'LOCALIZED_MEMORY' if in_domains else 'CUDA_VMM'}_SUPPORTED"
    if not hasattr(driver.bindings.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"):
        return False
    try:
        return bool(driver.attribute(name))
    except DriverError:
        return False


def newer_call(driver: Driver, name: str, *arguments: Any) -> Any:
    """A driver call that older bindings or driver libraries don't have.

    Raises:
        LocalityUnavailableError: they don't.
        DriverError: the call failed.
    """
    if not hasattr(driver.bindings, name):
        raise LocalityUnavailableError(f"cuda.bindings has no {name}: {BINDINGS}")
    try:
        return driver.call(name, *arguments)
    except DriverError:
        raise
    except RuntimeError as error:  # the bindings' own, where the driver library lacks a function
        raise LocalityUnavailableError(f"{name} on GPU {driver.device}: {error}: update the NVIDIA driver") from error


def constant(driver: Driver, group: str, name: str) -> Any:
    """A value of one of the bindings' enumerations.

    Raises:
        LocalityUnavailableError: the bindings don't know it.
    """
    value = getattr(getattr(driver.bindings, group, None), name, None)
    if value is None:
        raise LocalityUnavailableError(f"cuda.bindings has no {name}: {BINDINGS}")
    return value


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
