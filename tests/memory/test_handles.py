"""Which handle type the ranks settle on, and what they are told where none works."""

import errno
from pathlib import Path

import pytest
from memfd_driver import CUresult, MemfdDriver
from rank_threads import Held, drivers, on, run_ranks

from vllm_rose_plugin.memory import cures, fd_exchange, handles, imex
from vllm_rose_plugin.memory.cures import describe
from vllm_rose_plugin.memory.driver import BindingsMissingError, Driver, DriverError, HandleType
from vllm_rose_plugin.memory.handles import settle_handle_type
from vllm_rose_plugin.memory.rendezvous import GroupError
from vllm_rose_plugin.memory.symmetric import allocate

NO_FABRIC = {("cuMemCreate", "FABRIC"): CUresult.CUDA_ERROR_NOT_PERMITTED}
NO_DESCRIPTOR = {("cuMemExportToShareableHandle", "POSIX_FILE_DESCRIPTOR"): CUresult.CUDA_ERROR_NOT_PERMITTED}
CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"


@pytest.fixture(autouse=True)
def no_imex(monkeypatch):
    monkeypatch.setattr(cures, "look_at_imex", lambda: imex.Imex(True, [], [], "not visible"))


def settle(fakes, **arguments):
    results = run_ranks(len(fakes), lambda g: settle_handle_type(driver=on(fakes, g), group=g, **arguments))
    assert not any(fake.ledger()["handles"] for fake in fakes)
    return results


@pytest.mark.parametrize("size", [1, 3])
def test_fabric_where_all_can(size):
    before, fakes = Held(), drivers(size)
    for choice in settle(fakes):
        assert (choice.handle_type, choice.refused) == (HandleType.FABRIC, {})
    assert Held() == before
    assert all(fake.calls.count("cuMemCreate") == fake.calls.count("cuMemRelease") == 2 for fake in fakes)


@pytest.mark.parametrize("failing", [0, 2])
def test_one_rank_without_fabric_is_enough(failing):
    for choice in settle(drivers(3, failing, fail=NO_FABRIC)):
        assert choice.handle_type is HandleType.POSIX_FD
        reason = choice.refused[HandleType.FABRIC]
        assert f"rank {failing} of 3: the device attribute claims them, yet cuMemCreate on GPU {failing}" in reason
        assert "CUDA_ERROR_NOT_PERMITTED (800)" in reason and CHANNEL in reason and "ComputeDomain" in reason


def test_nothing_works_on_one_rank():
    errors = settle(drivers(3, 1, fail=NO_FABRIC | NO_DESCRIPTOR))
    assert len({str(error) for error in errors}) == 1
    assert list(errors[0].reasons) == [1]
    assert "fabric handles: " in str(errors[0]) and "posix_fd handles: " in str(errors[0])
    assert "seccomp" in str(errors[0])


def test_descriptors_stay_on_a_host(monkeypatch):
    fakes = drivers(2, 0, fail=NO_FABRIC)
    hosts = iter(["one", "another"])
    monkeypatch.setattr(handles, "_host_id", lambda: next(hosts))
    errors = settle(fakes)
    assert all(isinstance(error, GroupError) for error in errors)
    assert "rank 1 of 2: posix_fd handles: it is on another host than rank 0" in str(errors[0])
    hosts = iter(["one", "another"])
    fakes[0].fail = {}
    assert [choice.handle_type for choice in settle(fakes)] == [HandleType.FABRIC] * 2


def test_the_callers_order_is_followed_and_must_be_everyones():
    wanted = [HandleType.POSIX_FD]
    assert {choice.handle_type for choice in settle(drivers(2), wanted=wanted)} == {HandleType.POSIX_FD}
    fakes = drivers(2)
    results = run_ranks(
        2, lambda g: settle_handle_type(driver=on(fakes, g), group=g, wanted=list(HandleType)[g.rank :])
    )
    assert all("it wants fabric, posix_fd: set the same" in str(error) for error in results)


def test_the_driver_layer_names_call_result_and_device():
    fake = MemfdDriver(devices=2, fail={"cuMemCreate": CUresult.CUDA_ERROR_OUT_OF_MEMORY})
    with pytest.raises(DriverError, match=r"cuMemCreate on GPU 1: CUDA_ERROR_OUT_OF_MEMORY \(2\)") as raised:
        Driver(device=1, bindings=fake).create(size=1 << 21, handle_type=HandleType.FABRIC)
    error = raised.value
    assert (error.call, error.result, error.code, error.device) == ("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", 2, 1)
    with pytest.raises(DriverError, match="cuDeviceGet on GPU 2: CUDA_ERROR_INVALID_DEVICE"):
        Driver(device=2, bindings=fake)


def test_without_bindings(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.driver", None)
    with pytest.raises(BindingsMissingError, match="pip install 'cuda-python"):
        Driver(device=0)


@pytest.mark.parametrize(
    ("call", "result", "handle_type", "words"),
    [
        ("cuMemCreate", 800, HandleType.FABRIC, CHANNEL),
        ("cuMemCreate", 801, HandleType.FABRIC, "nvidia-smi -q"),
        ("cuMemImportFromShareableHandle", 800, HandleType.FABRIC, "same IMEX channel"),
        ("cuMemCreate", 2, HandleType.FABRIC, "--gpu-memory-utilization"),
        ("cuMemAddressReserve", 2, HandleType.FABRIC, "ulimit -v"),
        ("cuMemExportToShareableHandle", 800, HandleType.POSIX_FD, "seccomp"),
        ("cuMulticastCreate", 800, HandleType.POSIX_FD, "nvidia-fabricmanager"),
        ("cuMulticastAddDevice", 101, HandleType.POSIX_FD, "NVLink clique"),
    ],
)
def test_driver_errors_come_with_their_cure(call, result, handle_type, words):
    class Result(int):
        name = {2: "CUDA_ERROR_OUT_OF_MEMORY", 101: "CUDA_ERROR_INVALID_DEVICE", 800: "CUDA_ERROR_NOT_PERMITTED"}.get(
            result, "CUDA_ERROR_NOT_SUPPORTED"
        )

    text = describe(DriverError(call, Result(result), 3), handle_type=handle_type)
    assert text.startswith(f"{call} on GPU 3: ") and words in text


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "fs.file-max"),
        (errno.EACCES, "shareProcessNamespace"),
        (errno.EPERM, "No capability is needed"),
        (errno.ECONNREFUSED, "run as one user"),
    ],
)
def test_system_errors_come_with_their_cure(number, words):
    text = describe(OSError(number, "why", "/proc/1/fd/2"), handle_type=HandleType.POSIX_FD)
    assert "why" in text and words in text


def test_a_rank_in_another_container_cant_be_reached(monkeypatch):
    """Its process id means nothing here."""

    class Elsewhere(fd_exchange._Inbox):
        def __init__(self, backlog):
            super().__init__(backlog)
            self.address = f"/proc/{2**22 + 1}/fd/3"

    def exchange(group):
        fd_exchange.exchange_descriptors(
            group=group, descriptor=0, senders=range(2), receive=lambda *_: None, subject="memory"
        )

    before = Held()
    monkeypatch.setattr(fd_exchange, "_Inbox", Elsewhere)
    results = run_ranks(2, exchange)
    assert all("memory: send the descriptor" in str(error) for error in results)
    assert all("shareProcessNamespace: true" in str(error) for error in results)
    assert Held() == before


def test_a_stranger_at_the_socket_is_refused():
    inbox = fd_exchange._Inbox(2)
    before = Held()
    try:
        for message in (b"not the nonce 1", b"\xff", b"", f"{'0' * 32} 1".encode()):
            fd_exchange._send(inbox.address, message, 0, 2)
            with pytest.raises(fd_exchange.ExchangeError, match="isn't of the group"):
                inbox.receive()
        assert Held() == before
    finally:
        inbox.close()


def test_too_many_descriptors_under_way(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ETOOMANYREFS, "Too many references")

    monkeypatch.setattr(fd_exchange.socket, "send_fds", refuse)
    fakes = drivers(3)

    def exchange(group):
        settled = settle_handle_type(driver=on(fakes, group), group=group, wanted=[HandleType.POSIX_FD])
        allocate(driver=on(fakes, group), group=group, size=1, handle_type=settled.handle_type)

    assert all("ulimit -n 9" in str(error) for error in run_ranks(3, exchange))
    assert not any(fake.ledger()["handles"] for fake in fakes)


def test_memory_code_names_no_vllm():
    for path in (Path(cures.__file__).parent).glob("*.py"):
        assert "import vllm\n" not in path.read_text() and "from vllm." not in path.read_text()
