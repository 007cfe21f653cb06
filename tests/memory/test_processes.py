"""The whole protocol over four processes: real descriptors over real sockets, ranks that are killed, tight limits."""

import os
import re
import resource
import signal
import tempfile
from pathlib import Path

import pytest
import rank_processes
from memfd_driver import CUresult, MemfdDriver
from rank_processes import in_processes
from rank_threads import Held, read, write
from torch.distributed import TCPStore

from vllm_rose_plugin.memory import fd_exchange
from vllm_rose_plugin.memory.driver import Driver, HandleType
from vllm_rose_plugin.memory.handles import settle_handle_type
from vllm_rose_plugin.memory.multicast import bind_multicast
from vllm_rose_plugin.memory.rendezvous import Group, GroupError, MissingRankError
from vllm_rose_plugin.memory.symmetric import allocate

SIZE = 4
NOTHING = {"handles": 0, "reservations": 0, "mappings": 0, "bindings": 0}


@pytest.fixture
def port():
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield store.port


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """A directory for sockets with a path that is too long for one; nothing may be left in it, nor in /dev/shm."""
    directory = tmp_path / ("long" * 30)
    directory.mkdir()
    monkeypatch.setattr(rank_processes, "temporary_directory", str(directory))
    shared = set(os.listdir("/dev/shm"))
    yield directory
    assert os.listdir(directory) == [] and not {name for name in os.listdir("/dev/shm") if "rose" in name} - shared


def rank_group(rank, port, timeout):
    store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    return Group(store=store, rank=rank, size=SIZE, name="processes", timeout=timeout)


def share(group, fake, handle_type=None):
    """Settle, allocate, write to everyone, bind; what arrived from everyone."""
    driver = Driver(device=group.rank, bindings=fake)
    if handle_type is None:
        handle_type = settle_handle_type(driver=driver, group=group).handle_type
    with allocate(driver=driver, group=group, size=100, handle_type=handle_type, for_multicast=True) as buffer:
        for address in buffer.addresses:
            write(address + group.rank, bytes([50 + group.rank]))
        group.agree("written", lambda: None)
        arrived = list(read(buffer.address, SIZE))
        bind_multicast(buffer)
        group.agree("done", lambda: None)
    return handle_type.value, arrived


def _share(rank, port, fail):
    fake = MemfdDriver(devices=SIZE, fail=fail if rank == 1 else {})
    group, before = rank_group(rank, port, 30), Held()
    return share(group, fake), fake.ledger(), Held() == before


@pytest.mark.parametrize(
    ("fail", "handle_type"),
    [({}, "fabric"), ({("cuMemCreate", "FABRIC"): CUresult.CUDA_ERROR_NOT_PERMITTED}, "posix_fd")],
)
def test_memory_is_shared_between_processes(port, fail, handle_type):
    expected = ((handle_type, [50, 51, 52, 53]), NOTHING, True)
    assert in_processes(SIZE, _share, port, fail) == [expected] * SIZE


def _fail_then_share(rank, port, call):
    group, before = rank_group(rank, port, 30), Held()
    fake = MemfdDriver(devices=SIZE, fail={call: CUresult.CUDA_ERROR_UNKNOWN} if rank == 2 else {})
    try:
        share(group, fake, HandleType.POSIX_FD)
    except GroupError as error:
        reasons = list(error.reasons)
    freed = fake.ledger(), Held() == before
    fake.fail = {}
    return reasons, freed, share(group, fake, HandleType.POSIX_FD)


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"])
def test_a_failure_and_a_second_try(port, call):
    expected = ([2], (NOTHING, True), ("posix_fd", [50, 51, 52, 53]))
    assert in_processes(SIZE, _fail_then_share, port, call) == [expected] * SIZE


def _lose_a_rank(rank, port, call, handle_type):
    group, before = rank_group(rank, port, 1.5), Held()
    fake = MemfdDriver(devices=SIZE, kill=call if rank == 3 else "")
    try:
        share(group, fake, handle_type)
    except MissingRankError as error:
        return list(error.reasons), error.phase, fake.ledger(), Held() == before


@pytest.mark.parametrize(
    ("call", "handle_type", "phase"),
    [
        ("cuMemCreate", HandleType.POSIX_FD, "create"),
        ("cuMemImportFromShareableHandle", HandleType.POSIX_FD, "memory: import"),
        ("cuMemSetAccess", HandleType.FABRIC, "access"),
        ("cuMulticastBindMem", HandleType.POSIX_FD, "multicast: bind"),
    ],
)
def test_a_killed_rank_is_named_and_leaves_nothing(port, call, handle_type, phase):
    values = in_processes(SIZE, _lose_a_rank, port, call, handle_type)
    assert values == [([3], phase, NOTHING, True)] * 3 + [None]


def _without_descriptors(rank, port):
    group, fake = rank_group(rank, port, 30), MemfdDriver(devices=SIZE)
    share(group, fake, HandleType.POSIX_FD)  # what Python and torch open on first use is open now
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    texts = []
    for spare in range(9):  # from nothing at all to enough, through every place where it can run out
        before, filler = Held(), []
        if rank == 1:
            highest = max(int(name) for name in os.listdir("/proc/self/fd"))
            filler = [os.dup(0) for _ in range(highest + 1 - len(os.listdir("/proc/self/fd")))]  # no gaps
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1 + spare, limits[1]))
        try:
            share(group, fake, HandleType.POSIX_FD)
            texts.append("")
        except GroupError as error:
            texts.append(str(error))
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        [os.close(descriptor) for descriptor in filler]
        assert fake.ledger() == NOTHING and Held() == before
        assert share(group, fake, HandleType.POSIX_FD) == ("posix_fd", [50, 51, 52, 53])
    return texts


def test_the_limit_of_open_files_is_named_with_the_count_needed(port):
    texts, *others = in_processes(SIZE, _without_descriptors, port)
    assert others == [texts] * 3
    failures = [text for text in texts if text]
    assert all("rank 1 of 4" in text and re.search(r"(\d+) more are needed.*ulimit -n \d+", text) for text in failures)
    phases = {text.split("'")[1] for text in failures}
    assert {"create", "memory: open a socket", "memory: import"} <= phases and texts[-1] == "", phases


def _without_a_directory(rank, port, why):
    group, fake, before = rank_group(rank, port, 30), MemfdDriver(devices=SIZE), Held()
    found = tempfile.tempdir
    if rank == 2:
        tempfile.tempdir = None if why == "none" else "/proc/nothing"
    if rank == 2 and why == "none":
        tempfile._candidate_tempdir_list = lambda: ["/proc/nothing"]
    with pytest.raises(GroupError) as error:
        share(group, fake, HandleType.POSIX_FD)
    freed = fake.ledger(), Held() == before
    tempfile.tempdir = found
    return str(error.value), freed, share(group, fake, HandleType.POSIX_FD)


@pytest.mark.parametrize("why", ["none", "it can't be written to"])
def test_a_rank_without_a_directory_for_its_socket_is_told_to_set_tmpdir(port, why):
    values = in_processes(SIZE, _without_a_directory, port, why)
    assert len({text for text, _, _ in values}) == 1
    text = values[0][0]
    assert "rank 2 of 4: there is no directory for a socket" in text and "Set TMPDIR to one that this user may" in text
    assert "must run as one user" not in text, "a cure that mends nothing"
    assert [rest for _, *rest in values] == [[(NOTHING, True), ("posix_fd", [50, 51, 52, 53])]] * SIZE


def _bind_and_die(rank):
    fd_exchange._remove = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    fd_exchange._Inbox(1)


def test_what_a_kill_at_the_worst_moment_leaves_is_swept(temporary, port):
    """A rank that died between binding its socket and removing its name."""

    assert in_processes(1, _bind_and_die) == [None]
    (left,) = temporary.iterdir()
    assert [path.name for path in left.iterdir()] == ["s"] and left.stat().st_mode & 0o777 == 0o700
    stranger = Path(temporary / "rose-fd-of-someone-else")
    stranger.mkdir()
    assert in_processes(SIZE, _share, port, {("cuMemCreate", "FABRIC"): CUresult.CUDA_ERROR_NOT_PERMITTED})
    assert list(temporary.iterdir()) == [stranger]
    stranger.rmdir()
