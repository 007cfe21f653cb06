"""The fake driver against the real bindings: the same calls with as many arguments, and values that they take."""

import re

import pytest
from cuda.bindings import driver as bindings
from memfd_driver import MemfdDriver

from vllm_rose_plugin.memory.driver import Driver, HandleType

CALLS = [name for name in vars(MemfdDriver) if re.match(r"cu[A-Z]", name)]


@pytest.mark.parametrize("name", CALLS)
def test_the_fake_takes_what_the_bindings_take(name):
    signature = getattr(bindings, name).__doc__.split("\n")[0].removeprefix(name).strip("()")
    without_brackets = re.sub(r"\[[^\[\]]*\]", "", re.sub(r"\[[^\[\]]*\]", "", signature))
    real = len(without_brackets.split(",")) if signature else 0
    assert getattr(MemfdDriver, name).__code__.co_argcount - 1 == real, signature


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
