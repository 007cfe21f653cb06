"""Locality domains under a fake driver: what is there, what is missing, memory in them; nothing half-made."""

import numpy
import pytest
import torch
from locality_driver import LocalityDriver, OldDeviceAttribute, one_domain
from memfd_driver import GRANULARITY, CUresult

from vllm_rose_plugin.kernels.gemm.column_split import join_rows, plan_split, split_rows
from vllm_rose_plugin.memory import windows
from vllm_rose_plugin.memory.cures import describe
from vllm_rose_plugin.memory.domain_memory import allocate_anywhere, allocate_in_domains
from vllm_rose_plugin.memory.driver import Driver, DriverError
from vllm_rose_plugin.memory.locality import (
    Locality,
    LocalityUnavailableError,
    domain_of,
    look_at_locality,
    reached_by_rdma,
    require_locality,
)
from vllm_rose_plugin.memory.windows import BufferInUseError

RUBIN, FOUR, UNEVEN = ((100, 100), 12), ((50, 50, 50, 50), 12), ((104, 96), 0)


def on(fake):
    return Driver(device=0, bindings=fake)


def nothing(fake):
    return set(fake.ledger().values()) == {0}


class _Without(LocalityDriver):
    """Bindings of before 13.4, which lack names."""

    names: tuple[str, ...] = ()

    def __getattribute__(self, name):
        if name in object.__getattribute__(self, "names"):
            raise AttributeError(name)
        return super().__getattribute__(name)


def without(*names, **arguments):
    fake = _Without(**arguments)
    fake.names = names
    return fake


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (RUBIN, Locality(2, 100, 212)),
        (FOUR, Locality(4, 50, 212)),
        (UNEVEN, Locality(2, 96, 200)),
    ],
)
def test_domains_and_their_sms(layout, expected):
    domains, spare = layout
    driver = on(LocalityDriver(domains=domains, spare=spare))
    assert look_at_locality(driver) == require_locality(driver) == expected


def old_bindings():
    fake = LocalityDriver()
    fake.CUdevice_attribute = OldDeviceAttribute
    return fake


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        (one_domain(), "the driver serves CUDA 13.0, locality domains need 13.4: update"),
        (LocalityDriver(domains=(148,), spare=0), "one locality domain"),
        (old_bindings(), r"cuda.bindings has no LOCALITY_DOMAIN_COUNT: pip install 'cuda-python>=13.4.1"),
        (
            LocalityDriver(fail={("cuDeviceGetAttribute", 2): CUresult.CUDA_ERROR_INVALID_VALUE}),
            r"refuses LOCALITY_DOMAIN_COUNT: .* \(1\)",
        ),
        (
            LocalityDriver(fail={("cuDeviceGetAttribute", 3): CUresult.CUDA_ERROR_INVALID_VALUE}),
            r"refuses LOCALITY_DOMAIN_MULTIPROCESSOR_COUNT: .* \(1\)",
        ),
    ],
    ids=["old driver", "one domain", "old bindings", "no count", "no SMs"],
)
def test_not_here_says_why_and_makes_nothing(fake, reason):
    fails = dict(fake.fail)
    driver = on(fake)
    found = look_at_locality(driver)
    assert found.domains < 2 and found.sm_count == len(fake.owner)
    fake.calls.clear()
    with pytest.raises(LocalityUnavailableError, match=f"no locality domains on GPU 0: .*{reason}"):
        allocate_in_domains(driver=driver, sizes=[1, 1])
    assert fake.fail == fails and set(fake.calls) <= {"cuDriverGetVersion", "cuDeviceGetAttribute"}


def test_a_driver_that_fails_at_all_is_an_error():
    with pytest.raises(DriverError, match="cuDriverGetVersion"):
        look_at_locality(on(LocalityDriver(fail={"cuDriverGetVersion": CUresult.CUDA_ERROR_UNKNOWN})))


@pytest.mark.parametrize("layout", [RUBIN, FOUR, UNEVEN])
def test_each_part_lies_in_its_domain(layout):
    fake = LocalityDriver(domains=layout[0], spare=layout[1])
    driver, count = on(fake), len(layout[0])
    with allocate_in_domains(driver=driver, sizes=[GRANULARITY * d + 1 for d in range(count)]) as memory:
        assert [part.domain for part in memory.parts] == list(range(count))
        assert [part.size for part in memory.parts] == [GRANULARITY * (d + 1) for d in range(count)]
        assert [domain_of(driver, part.address + part.size - 1) for part in memory.parts] == list(range(count))
        assert fake.ledger()["mappings"] == count
    assert memory.parts == () and nothing(fake)
    memory.free()


def test_memory_anywhere_is_in_no_domain():
    for fake in (LocalityDriver(), one_domain()):
        driver = on(fake)
        with allocate_anywhere(driver=driver, sizes=[1, 1, 1]) as memory:
            assert [domain_of(driver, part.address) for part in memory.parts] == [None] * 3
            assert [part.domain for part in memory.parts] == [None] * 3
        assert nothing(fake)


@pytest.mark.parametrize("rdma", [(True, True), (True, False), (False, False)])
def test_others_reach_memory_by_rdma_where_the_device_has_that(rdma):
    """As torch's own: EPLB over NIXL reads weights where they lie."""
    fake = LocalityDriver(rdma=rdma)
    for allocate, expected in ((allocate_anywhere, rdma[0]), (allocate_in_domains, rdma[1])):
        with allocate(driver=on(fake), sizes=[1, 1]):
            assert len(fake.by_rdma) == 2 * expected
        fake.by_rdma.clear()
    assert reached_by_rdma(on(old_bindings()), in_domains=True) is False


STEPS = [
    "cuMemGetAllocationGranularity", "cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
    "cuPointerGetAttribute",
]  # fmt: skip


@pytest.mark.parametrize("domain", [0, 1, 3])
@pytest.mark.parametrize("call", STEPS)
def test_a_refusal_in_any_domain_frees_the_others(call, domain):
    fake = LocalityDriver(domains=FOUR[0], fail={(call, domain + 1): CUresult.CUDA_ERROR_UNKNOWN})
    driver = on(fake)
    with pytest.raises(DriverError, match=call):
        allocate_in_domains(driver=driver, sizes=[1] * 4)
    assert nothing(fake) and fake.calls.count("cuMemCreate") == fake.calls.count("cuMemRelease") + (
        call == "cuMemCreate"
    )
    with allocate_in_domains(driver=driver, sizes=[1] * 4) as memory:
        assert len(memory.parts) == 4


def test_a_full_second_domain_frees_the_first_and_is_named():
    fake = LocalityDriver(room=2 * GRANULARITY)
    with pytest.raises(DriverError) as caught:
        allocate_in_domains(driver=on(fake), sizes=[GRANULARITY, 3 * GRANULARITY])
    assert nothing(fake)
    text = describe(caught.value)
    assert "OUT_OF_MEMORY" in text and "locality domain 1" in text and "GPU 0 is full" in text


def test_a_failure_while_freeing_is_a_note_and_frees_the_rest():
    fail = {("cuMemCreate", 2): CUresult.CUDA_ERROR_OUT_OF_MEMORY, "cuMemUnmap": CUresult.CUDA_ERROR_UNKNOWN}
    fake = LocalityDriver(fail=fail)
    with pytest.raises(DriverError, match="cuMemCreate") as caught:
        allocate_in_domains(driver=on(fake), sizes=[1, 1])
    assert "while freeing what was made: cuMemUnmap" in "".join(caught.value.__notes__) and nothing(fake)


def test_memory_that_comes_from_elsewhere_is_refused():
    fake = LocalityDriver(strays=1)
    with pytest.raises(LocalityUnavailableError, match="asked for in locality domain 1 of GPU 0 lies in none"):
        allocate_in_domains(driver=on(fake), sizes=[1, 1])
    assert nothing(fake)


@pytest.mark.parametrize(
    "fake",
    [
        LocalityDriver(absent=("cuPointerGetAttribute",)),
        without("CUpointer_attribute"),
        without("cuPointerGetAttribute"),
        without("CUmemLocationType"),
    ],
)
def test_a_missing_symbol_is_named_and_nothing_stays(fake):
    with pytest.raises(LocalityUnavailableError, match=r"cuPointerGetAttribute|CU_\w+_LOCALITY_DOMAIN"):
        allocate_in_domains(driver=on(fake), sizes=[1, 1])
    assert nothing(fake)


@pytest.mark.parametrize(("sizes", "message"), [([1], "1 sizes for 2"), ([1, 0], "1 byte"), ([1, 1, 1], "3 sizes")])
def test_sizes_that_are_refused(sizes, message):
    fake = LocalityDriver()
    with pytest.raises(ValueError, match=message):
        allocate_in_domains(driver=on(fake), sizes=sizes)
    with pytest.raises(ValueError, match="not none"):
        allocate_anywhere(driver=on(fake), sizes=[])
    assert nothing(fake)


def test_two_engines_in_one_process_know_nothing_of_each_other():
    fake = LocalityDriver(room=2 * GRANULARITY)
    first = allocate_in_domains(driver=on(fake), sizes=[1, 1])
    second = allocate_in_domains(driver=on(fake), sizes=[1, 1])
    assert not {part.address for part in first.parts} & {part.address for part in second.parts}
    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        allocate_in_domains(driver=on(fake), sizes=[1, 1])
    first.free()
    assert [domain_of(on(fake), part.address) for part in second.parts] == [0, 1]
    second.free()
    assert nothing(fake)


@pytest.fixture
def host_tensors(monkeypatch):
    """The fake's memory is the host's, which torch takes over by the array interface of NumPy instead of CUDA's."""

    class Host:
        def __init__(self, window):
            self.window = window
            self.__array_interface__ = window.__cuda_array_interface__

    monkeypatch.setattr(windows, "as_bytes", lambda window, device: torch.from_numpy(numpy.asarray(Host(window))))


def test_each_part_of_a_weight_lies_in_its_domain(host_tensors):
    fake = LocalityDriver()
    split = plan_split(n=512, parts=2, target="sm_107a", gate_up=True)
    whole = torch.randint(0, 256, (3, 512, 64), dtype=torch.uint8)
    size = 3 * split.part_n * 64
    with allocate_in_domains(driver=on(fake), sizes=[size] * 2) as memory:
        parts = split_rows(split, whole, lambda part, shape, dtype: memory.tensor(part, shape=shape, dtype=dtype))
        assert [domain_of(on(fake), part.data_ptr()) for part in parts] == [0, 1]
        assert [domain_of(on(fake), part[-1, -1, -1:].data_ptr()) for part in parts] == [0, 1]
        assert torch.equal(join_rows(split, parts, out=torch.empty_like(whole)), whole)
        del parts
    assert nothing(fake)


def test_tensors_in_a_domain_keep_it_from_being_freed(host_tensors):
    fake = LocalityDriver()
    memory = allocate_in_domains(driver=on(fake), sizes=[4096, 4096])
    tensor = memory.tensor(1, shape=(8, 16), dtype=torch.uint8, offset=16)
    tensor.fill_(7)
    assert tensor.data_ptr() == memory.parts[1].address + 16 and domain_of(on(fake), tensor.data_ptr()) == 1
    with pytest.raises(BufferInUseError, match="1 tensors"):
        memory.free()
    del tensor
    for part in (-1, 2):
        with pytest.raises(ValueError, match="must be 0 to 1"):
            memory.tensor(part, shape=(1,), dtype=torch.uint8)
    memory.free()
    with pytest.raises(ValueError, match="freed"):
        memory.tensor(0, shape=(1,), dtype=torch.uint8)
    assert nothing(fake)
