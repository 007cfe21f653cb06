"""The fake driver against the real bindings: the same calls with as many arguments, and values that they take."""

import re

import pytest
from cuda.bindings import driver as bindings
from locality_driver import CUdevice_attribute, LocalityDriver
from memfd_driver import MemfdDriver

from vllm_rose_plugin.memory.domain_memory import _properties
from vllm_rose_plugin.memory.driver import Driver, HandleType
from vllm_rose_plugin.memory.locality import Locality
from vllm_rose_plugin.memory.sm_partitions import Mode, _groups

CALLS = [(fake, name) for fake in (MemfdDriver, LocalityDriver) for name in vars(fake) if re.match(r"cu[A-Z]", name)]


@pytest.mark.parametrize(("fake", "name"), CALLS, ids=lambda value: getattr(value, "__name__", value))
def test_the_fakes_take_what_the_bindings_take(fake, name):
    signature = getattr(bindings, name).__doc__.split("\n")[0].removeprefix(name).strip("()")
    without_brackets = re.sub(r"\[[^\[\]]*\]", "", re.sub(r"\[[^\[\]]*\]", "", signature))
    real = len(without_brackets.split(",")) if signature else 0
    assert getattr(fake, name).__code__.co_argcount - 1 == real, signature


@pytest.mark.parametrize("handle_type", HandleType)
def test_the_bindings_take_our_values(handle_type):
    driver = object.__new__(Driver)  # __init__ needs a driver library
    driver.device, driver.bindings = 3, bindings
    properties = driver._properties(handle_type)
    assert properties.location.id == 3
    assert properties.location.type == bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    multicast = driver._multicast_properties(devices=4, size=1 << 21, handle_type=handle_type)
    assert (multicast.numDevices, multicast.size) == (4, 1 << 21)
    assert (
        multicast.handleTypes == int(properties.requestedHandleTypes) == {"fabric": 8, "posix_fd": 1}[handle_type.value]
    )
    assert len(bytes(bindings.CUmemFabricHandle().data)) == 64

    recorded = []
    real = driver.bindings

    class Recorder:
        def __getattr__(self, name):
            return getattr(real, name)

        def cuMemSetAccess(self, address, size, access, count):
            recorded.extend(access)
            return (real.CUresult.CUDA_SUCCESS,)

    driver.bindings = Recorder()
    driver.set_access(address=1 << 30, size=1 << 21)
    assert recorded[0].location.id == 3
    assert recorded[0].flags == bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE


def test_the_fakes_numbers_are_the_bindings():
    for attribute in CUdevice_attribute:
        assert getattr(bindings.CUdevice_attribute, attribute.name) == attribute
    groups = (
        "CUmemLocationType", "CUpointer_attribute", "CUdevResourceType", "CUdevSmResourceGroup_flags",
        "CUgreenCtxCreate_flags", "CUstream_flags",
    )  # fmt: skip
    for group in groups:
        for name, number in vars(getattr(LocalityDriver, group)).items():
            assert getattr(getattr(bindings, group), name) == number


@pytest.mark.parametrize("domain", [None, 0, 1])
def test_the_bindings_take_a_domain(domain):
    driver = object.__new__(Driver)
    driver.device, driver.bindings = 3, bindings
    properties = _properties(driver, domain, by_rdma=True)
    location = properties.location
    assert properties.allocFlags.gpuDirectRDMACapable == 1
    types = bindings.CUmemLocationType
    if domain is None:
        assert (location.type, location.id) == (types.CU_MEM_LOCATION_TYPE_DEVICE, 3)
    else:
        assert location.type == types.CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN
        assert (location.localized.deviceId, location.localized.localityDomainId) == (3, domain)


@pytest.mark.parametrize(("mode", "counts", "flags"), [(Mode.DEFAULT, [0, 0], 2), (Mode.BACKFILL, [106, 106], 7)])
def test_the_bindings_take_groups_of_sms(mode, counts, flags):
    driver = object.__new__(Driver)
    driver.device, driver.bindings = 3, bindings
    groups = _groups(driver, mode, Locality(2, 100, 212), 212, 2)
    assert [(g.smCount, g.coscheduledSmCount, g.flags, g.localityDomainId) for g in groups] == [
        (counts[domain], 2, flags, domain) for domain in range(2)
    ]
