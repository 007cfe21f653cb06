"""Symmetric buffers over ranks that are threads: any group size, every injected failure, nothing left of it."""

import math

import pytest
import torch
from memfd_driver import GRANULARITY, MULTICAST_GRANULARITY, CUresult
from rank_threads import Held, drivers, on, read, run_ranks, write

from vllm_rose_plugin.memory import windows
from vllm_rose_plugin.memory.driver import DriverError, HandleType
from vllm_rose_plugin.memory.multicast import bind_multicast
from vllm_rose_plugin.memory.rendezvous import GroupError
from vllm_rose_plugin.memory.symmetric import allocate
from vllm_rose_plugin.memory.windows import BufferInUseError

FABRIC, POSIX_FD = HandleType.FABRIC, HandleType.POSIX_FD
NOTHING = {"handles": 0, "reservations": 0, "mappings": 0, "bindings": 0}


def everyone_writes_to_everyone(group, buffer):
    """Every rank leaves its number in the part of every rank; the numbers that arrive in its own part."""
    for rank, address in enumerate(buffer.addresses):
        write(address + group.rank, bytes([100 + (group.rank + rank) % 100]))
    group.agree("written", lambda: None)
    return [byte - 100 for byte in read(buffer.address, group.size)]


def use_once(fakes, group, handle_type, *, multicast=False, size=GRANULARITY + 1):
    """Allocate, use, free."""
    with allocate(
        driver=on(fakes, group), group=group, size=size, handle_type=handle_type, for_multicast=multicast
    ) as buffer:
        arrived = everyone_writes_to_everyone(group, buffer)
        if multicast:
            mapping = bind_multicast(buffer)
            assert mapping.address not in (0, *buffer.addresses) and mapping.size == buffer.size
            group.agree("used", lambda: None)
        return buffer.size, arrived


@pytest.mark.parametrize("handle_type", HandleType)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_rank_reaches_every_rank(size, handle_type):
    before, fakes = Held(), drivers(size)
    results = run_ranks(size, lambda group: use_once(fakes, group, handle_type, multicast=size > 1))
    rounded = MULTICAST_GRANULARITY if size > 1 else 2 * GRANULARITY
    assert results == [(rounded, [(rank + other) % 100 for other in range(size)]) for rank in range(size)]
    assert [fake.ledger() for fake in fakes] == [NOTHING] * size and Held() == before


def test_a_rack_of_72_ranks():
    before, fakes = Held(), drivers(72)
    results = run_ranks(72, lambda group: use_once(fakes, group, FABRIC), timeout=55)
    assert [arrived for _, arrived in results] == [[(r + o) % 100 for o in range(72)] for r in range(72)]
    assert [fake.ledger() for fake in fakes] == [NOTHING] * 72 and Held() == before


def test_granularity_is_the_largest_of_the_ranks():
    fakes = drivers(3)
    fakes[1].granularity = 2 * GRANULARITY
    results = run_ranks(3, lambda group: use_once(fakes, group, FABRIC, size=1))
    assert [size for size, _ in results] == [2 * GRANULARITY] * 3


def test_the_parts_lie_behind_each_other():
    fakes = drivers(3)

    def addresses(group):
        with allocate(driver=on(fakes, group), group=group, size=1, handle_type=FABRIC) as buffer:
            assert buffer.address == buffer.addresses[group.rank]
            return [address - buffer.addresses[0] for address in buffer.addresses]

    assert run_ranks(3, addresses) == [[0, GRANULARITY, 2 * GRANULARITY]] * 3


STEPS = [  # call (and which of its calls), phase that it belongs to
    ("cuMemGetAllocationGranularity", "size"),
    ("cuMemCreate", "create"),
    ("cuMemExportToShareableHandle", "memory: export"),
    ("cuMemImportFromShareableHandle", "memory: import"),
    (("cuMemImportFromShareableHandle", 2), "memory: import"),
    ("cuMemAddressReserve", "map"),
    ("cuMemMap", "map"),
    (("cuMemMap", 3), "map"),
    ("cuMemSetAccess", "access"),
    ("cuMulticastGetGranularity", "size"),
    ("cuDeviceGetAttribute", "multicast: support"),
    (("cuMulticastGetGranularity", 2), "multicast: support"),
    ("cuMulticastCreate", "multicast: create"),
    (("cuMemExportToShareableHandle", 2), "multicast: export"),
    (("cuMemImportFromShareableHandle", 3), "multicast: import"),
    ("cuMulticastAddDevice", "multicast: add device"),
    ("cuMulticastBindMem", "multicast: bind"),
    (("cuMulticastGetGranularity", 3), "multicast: map"),
    (("cuMemAddressReserve", 2), "multicast: map"),
    (("cuMemMap", 4), "multicast: map"),
    (("cuMemSetAccess", 2), "multicast: access"),
]
ON_RANK_0_ONLY = {"cuMulticastCreate", ("cuMemExportToShareableHandle", 2)}
NOT_ON_RANK_0 = {("cuMemImportFromShareableHandle", 3)}


@pytest.mark.parametrize("handle_type", HandleType)
@pytest.mark.parametrize(("failing", "phase"), STEPS, ids=lambda value: str(value))
def test_a_failure_anywhere_is_everyones_and_a_second_try_works(handle_type, failing, phase):
    call = failing if isinstance(failing, str) else failing[0]
    ranks = [0] if failing in ON_RANK_0_ONLY else [2] if failing in NOT_ON_RANK_0 else [0, 2]
    for failing_rank in ranks:
        before = Held()
        fakes = drivers(3, failing_rank, fail={failing: CUresult.CUDA_ERROR_UNKNOWN})

        def twice(group, fakes=fakes):
            with pytest.raises(GroupError) as first:
                use_once(fakes, group, handle_type, multicast=True)
            ledger = fakes[group.rank].ledger()
            fakes[group.rank].fail = {}
            return first.value, ledger, use_once(fakes, group, handle_type, multicast=True)

        results = run_ranks(3, twice)
        errors = [error for error, _, _ in results]
        assert {error.phase for error in errors} == {phase}
        assert {tuple(error.reasons) for error in errors} == {(failing_rank,)}
        assert len({str(error) for error in errors}) == 1
        text = f"rank {failing_rank} of 3: {call} on GPU {failing_rank}: CUDA_ERROR_UNKNOWN (999)"
        assert text in str(errors[0])
        assert isinstance(errors[failing_rank].__cause__, DriverError)
        assert all(error.__cause__ is None for rank, error in enumerate(errors) if rank != failing_rank)
        assert [ledger for _, ledger, _ in results] == [NOTHING] * 3
        assert [arrived for _, _, (_, arrived) in results] == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
        assert [fake.ledger() for fake in fakes] == [NOTHING] * 3 and Held() == before


def test_a_failed_multicast_leaves_the_buffer_usable():
    fakes = drivers(3, 1, fail={"cuMulticastBindMem": CUresult.CUDA_ERROR_UNKNOWN})

    def without(group):
        with allocate(driver=on(fakes, group), group=group, size=1, handle_type=POSIX_FD, for_multicast=True) as buffer:
            with pytest.raises(GroupError, match=r"multicast: bind.*rank 1 of 3.*nvidia-fabricmanager"):
                bind_multicast(buffer)
            held = fakes[group.rank].ledger()
            return held, everyone_writes_to_everyone(group, buffer)

    for rank, (held, arrived) in enumerate(run_ranks(3, without)):
        assert held == {"handles": 3, "reservations": 1, "mappings": 3, "bindings": 0}
        assert arrived == [rank + other for other in range(3)]


@pytest.mark.parametrize(("size", "tries"), [(1, 1000), (2, 100)])  # ranks that wait for each other take their time
def test_a_thousand_failures_leak_no_address(size, tries):
    before, fakes, last = Held(), drivers(size), size - 1
    calls = ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]

    def fail_often(group):
        failures = 0
        for number in range(tries):
            if group.rank == last:
                fakes[last].fail = {calls[number % len(calls)]: CUresult.CUDA_ERROR_UNKNOWN}
            try:
                allocate(driver=on(fakes, group), group=group, size=1, handle_type=FABRIC)
            except GroupError:
                failures += 1
        return failures

    assert run_ranks(size, fail_often, timeout=50) == [tries] * size
    assert [fake.ledger() for fake in fakes] == [NOTHING] * size and Held() == before
    assert fakes[last].calls.count("cuMemAddressReserve") == 3 * tries // 5
    assert fakes[last].calls.count("cuMemAddressFree") == 2 * tries // 5


def test_freeing_goes_on_behind_a_failing_call():
    fakes = drivers(2, 1, fail={("cuMemUnmap", 1): CUresult.CUDA_ERROR_UNKNOWN, "cuMemRelease": CUresult(1)})

    def free(group):
        buffer = allocate(driver=on(fakes, group), group=group, size=1, handle_type=FABRIC)
        try:
            buffer.free()
        except DriverError as error:
            return error
        finally:
            buffer.free()  # a second one does nothing

    first, error = run_ranks(2, free)
    assert first is None and (error.call, error.device) == ("cuMemUnmap", 1)
    assert len(error.__notes__) == 2 and all("cuMemRelease" in note for note in error.__notes__)
    assert [fake.ledger() for fake in fakes] == [NOTHING] * 2


def test_a_failure_while_freeing_is_told_beside_the_first_one():
    fail = {"cuMemMap": CUresult.CUDA_ERROR_UNKNOWN, ("cuMemRelease", 1): CUresult.CUDA_ERROR_INVALID_VALUE}
    fakes = drivers(2, 1, fail=fail)
    results = run_ranks(2, lambda group: use_once(fakes, group, FABRIC))
    assert "cuMemMap" in str(results[1]) and "cuMemRelease" in results[1].__notes__[0]
    assert [fake.ledger() for fake in fakes] == [NOTHING] * 2


def test_different_sizes_are_refused_with_everyones():
    fakes = drivers(3)
    sizes = [100, 100, 200]
    results = run_ranks(3, lambda group: use_once(fakes, group, FABRIC, size=sizes[group.rank]))
    assert {str(error) for error in results} == {
        "test: phase 'size' failed on ranks 0, 1 of 3: it asks for 100 bytes: ask for the same; "
        "on rank 2 of 3: it asks for 200 bytes: ask for the same"
    }
    results = run_ranks(2, lambda group: use_once(fakes, group, FABRIC, size=0))
    assert all("size=0 must be above 0 bytes" in str(error) for error in results)
    assert [fake.ledger() for fake in fakes] == [NOTHING] * 3


def test_multicast_names_what_is_missing():
    fakes = drivers(2)
    fakes[1].multicast_supported = 0

    def bind(group, for_multicast=True):
        with allocate(
            driver=on(fakes, group), group=group, size=1, handle_type=FABRIC, for_multicast=for_multicast
        ) as buffer:
            bind_multicast(buffer)

    assert all("GPU 1 has no NVLink multicast" in str(error) for error in run_ranks(2, bind))
    fakes[1].multicast_supported = 1
    errors = run_ranks(2, lambda group: bind(group, for_multicast=False))
    assert all("for_multicast=True" in str(error) for error in errors)
    fakes[0].fail = {"cuMulticastAddDevice": CUresult.CUDA_ERROR_INVALID_DEVICE}
    assert all("GPU 0 is not in the NVLink clique" in str(error) for error in run_ranks(2, bind))
    assert [fake.ledger() for fake in fakes] == [NOTHING] * 2


@pytest.fixture
def host_tensors(monkeypatch):
    """The fake's memory is the host's, which torch takes over by the array interface of NumPy instead of CUDA's."""

    class Host:
        def __init__(self, window):
            self.window = window
            self.__array_interface__ = window.__cuda_array_interface__

    import numpy

    monkeypatch.setattr(windows, "as_bytes", lambda window, device: torch.from_numpy(numpy.asarray(Host(window))))


def test_tensors_lie_in_the_buffer_and_keep_it_from_being_freed(host_tensors):
    fakes = drivers(2)

    def use(group):
        buffer = allocate(driver=on(fakes, group), group=group, size=GRANULARITY, handle_type=FABRIC)
        tensor = buffer.tensor(shape=(3, 4), dtype=torch.bfloat16, offset=64)
        tensor.copy_(torch.arange(12).view(3, 4) + 100 * group.rank)
        assert tensor.data_ptr() == buffer.address + 64 and tensor.is_contiguous()
        group.agree("written", lambda: None)
        peer = read(buffer.addresses[1 - group.rank] + 64, 24)
        row = tensor[1]
        del tensor
        with pytest.raises(BufferInUseError, match="1 tensors"):
            buffer.free()
        assert row[0] == 4 + 100 * group.rank  # still mapped
        del row
        group.agree("read", lambda: None)
        buffer.free()
        with pytest.raises(ValueError, match="freed"):
            buffer.tensor(shape=(1,), dtype=torch.int32)
        return torch.frombuffer(bytearray(peer), dtype=torch.bfloat16).tolist()

    assert run_ranks(2, use) == [[float(100 + n) for n in range(12)], [float(n) for n in range(12)]]
    assert [fake.ledger() for fake in fakes] == [NOTHING] * 2


@pytest.mark.parametrize(
    ("shape", "dtype", "offset", "text"),
    [
        ((GRANULARITY // 2 + 1,), torch.bfloat16, 0, "must lie within size"),
        ((1,), torch.float32, GRANULARITY, "must lie within size"),
        ((1,), torch.float32, -4, "must lie within size"),
        ((1,), torch.float32, 2, "multiple of 4"),
    ],
)
def test_tensors_that_do_not_fit(host_tensors, shape, dtype, offset, text):
    fakes = drivers(1)

    def ask(group):
        with allocate(driver=on(fakes, group), group=group, size=GRANULARITY, handle_type=FABRIC) as buffer:
            full = buffer.tensor(shape=(GRANULARITY // 4,), dtype=torch.float32)
            empty = buffer.tensor(shape=(0, 7), dtype=torch.float32, offset=GRANULARITY)
            assert full.numel() * 4 == GRANULARITY and empty.shape == (0, 7) and math.prod(empty.shape) == 0
            del full, empty
            with pytest.raises(ValueError, match=text):
                buffer.tensor(shape=shape, dtype=dtype, offset=offset)
            return "asked"

    assert run_ranks(1, ask) == ["asked"]


@pytest.mark.parametrize("handle_type", HandleType)
def test_memory_goes_and_comes_back_at_the_same_addresses(handle_type):
    before, fakes = Held(), drivers(3)

    def sleep_twice(group):
        driver, fake = on(fakes, group), fakes[group.rank]
        seen = []
        with allocate(driver=driver, group=group, size=GRANULARITY + 1, handle_type=handle_type) as buffer:
            addresses, size = buffer.addresses, buffer.size
            for _ in range(2):
                seen.append(everyone_writes_to_everyone(group, buffer))
                group.agree("read", lambda: None)
                buffer.suspend()
                buffer.suspend()
                assert fake.ledger() == {**NOTHING, "reservations": 1} and buffer.suspended
                with pytest.raises(ValueError, match="the buffer is suspended"):
                    buffer.tensor(shape=(1,), dtype=torch.uint8)
                buffer.resume()
                buffer.resume()
                assert (buffer.addresses, buffer.size) == (addresses, size) and not buffer.suspended
            buffer.suspend()  # freed while it is asleep
        assert fake.ledger() == NOTHING
        return seen

    expected = [[(rank + other) % 100 for other in range(3)] for rank in range(3)]
    assert run_ranks(3, sleep_twice) == [[mine, mine] for mine in expected]
    assert Held() == before


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"])
def test_a_failed_wake_up_leaves_all_asleep_and_a_second_try_works(call):
    before, fakes = Held(), drivers(3)

    def wake(group):
        driver, fake = on(fakes, group), fakes[group.rank]
        with allocate(driver=driver, group=group, size=1, handle_type=POSIX_FD) as buffer:
            addresses = buffer.addresses
            buffer.suspend()
            fake.fail = {call: CUresult.CUDA_ERROR_OUT_OF_MEMORY} if group.rank == 1 else {}
            with pytest.raises(GroupError) as error:
                buffer.resume()
            assert buffer.suspended and fake.ledger() == {**NOTHING, "reservations": 1}
            fake.fail = {}
            buffer.resume()
            assert buffer.addresses == addresses
            return str(error.value), everyone_writes_to_everyone(group, buffer)

    results = run_ranks(3, wake)
    assert len({text for text, _ in results}) == 1 and call in results[0][0]
    assert [arrived for _, arrived in results] == [[(r + o) % 100 for o in range(3)] for r in range(3)]
    assert [fake.ledger() for fake in fakes] == [NOTHING] * 3 and Held() == before


def test_a_buffer_with_tensors_is_not_suspended(host_tensors):
    fakes = drivers(1)

    def run(group):
        with allocate(driver=on(fakes, group), group=group, size=1, handle_type=POSIX_FD) as buffer:
            x = buffer.tensor(shape=(4,), dtype=torch.uint8)
            with pytest.raises(BufferInUseError, match="1 tensors still lie in the buffer"):
                buffer.suspend()
            x[0] = 1
            del x

    assert run_ranks(1, run) == [None]
