"""File descriptors from rank to rank of one host, over unix sockets that have no name left when anyone can see them.

A rank binds a socket in a directory of its own, opens the socket's inode, and removes name and directory at once. The
others connect through ``/proc/<pid>/fd/<number>``, which leads to the inode. So a rank that is killed leaves nothing
behind; between ``bind`` and the removal lie some microseconds, and what a kill in them leaves, the next exchange sweeps
away. Descriptors travel as SCM_RIGHTS, which needs no capability (``pidfd_getfd`` would need SYS_PTRACE).
"""

import array
import contextlib
import errno
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from vllm_rose_plugin.memory.cures import descriptor_limit_cure, descriptors_left
from vllm_rose_plugin.memory.driver import HandleType
from vllm_rose_plugin.memory.rendezvous import Group

_PREFIX = "rose-fd-"
_DESCRIPTORS_PER_EXCHANGE = 4
"""Open at a time beside what the caller keeps: two sockets, the inode, one descriptor under way."""

_ACCEPT_SECONDS = 10.0
"""Only for what lies in the queue already: every sender has reported that it has sent."""


class ExchangeError(RuntimeError):
    """A descriptor that can't be sent or received; the message holds the cure."""


class _Inbox:
    """This rank's socket; other ranks find it by ``address``."""

    def __init__(self, backlog: int):
        with _directory_needed():
            sweep()
        self.nonce = secrets.token_hex(16)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.inode = -1
        directory = None
        try:
            with _directory_needed():
                directory = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-{_start_time(os.getpid())}-")
            opened = os.open(directory, os.O_PATH | os.O_DIRECTORY)
            try:
                # Through /proc, since a socket's path may not exceed 107 bytes and TMPDIR may.
                self.listener.bind(f"/proc/self/fd/{opened}/s")
                self.inode = os.open("s", os.O_PATH, dir_fd=opened)
            finally:
                os.close(opened)
            self.listener.listen(backlog)
            self.listener.settimeout(_ACCEPT_SECONDS)
        except BaseException:
            self.close()
            raise
        finally:
            if directory is not None:
                _remove(Path(directory))
        self.address = f"/proc/{os.getpid()}/fd/{self.inode}"

    def receive(self) -> tuple[int, int]:
        """Sender and descriptor of the next message, which the caller closes."""
        try:
            connection, _ = self.listener.accept()
        except TimeoutError:
            raise ExchangeError("a rank has reported its descriptor as sent, and nothing came") from None
        with connection:
            message, ancillary, flags, _ = connection.recvmsg(64, socket.CMSG_SPACE(array.array("i").itemsize))
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        try:
            nonce, sender = message.decode().split()
            if not secrets.compare_digest(nonce, self.nonce):
                raise ValueError
        except ValueError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ExchangeError("a process that isn't of the group has written to the socket of this rank") from None
        if len(descriptors) != 1:
            cut = bool(flags & socket.MSG_CTRUNC)  # what the kernel says where this process has none free
            reason = descriptor_limit_cure(_DESCRIPTORS_PER_EXCHANGE) if cut else "the message holds none"
            raise ExchangeError(f"the descriptor of rank {sender} can't be received. {reason}")
        return int(sender), descriptors[0]

    def close(self) -> None:
        """Messages that nobody has read go too, with the descriptors in them."""
        self.listener.close()
        if self.inode >= 0:
            os.close(self.inode)
            self.inode = -1


def exchange_descriptors(
    *,
    group: Group,
    descriptor: int | None,
    senders: Collection[int],
    receive: Callable[[int, int], None],
    subject: str,
) -> None:
    """Give this rank's descriptor to all other ranks, and take theirs.

    Three phases of the group: every rank opens its socket; every sender sends to all; every rank takes what lies there.

    Args:
        group: ranks of one host and one user.
        descriptor: what this rank gives, which stays its own; None on ranks that aren't among ``senders``.
        senders: the ranks that give one, the same on all ranks.
        receive: called with sender and descriptor, one at a time, so that few are open; the descriptor is closed behind
            it.
        subject: what it is about, for the names of the phases.

    Raises:
        GroupError: some rank failed, or ``receive`` raised; every socket and descriptor of this exchange is closed.
        MissingRankError: some rank didn't arrive.
    """
    inbox: _Inbox | None = None

    def open_inbox() -> list[str]:
        nonlocal inbox
        inbox = _Inbox(group.size)
        return [inbox.address, inbox.nonce]

    def send() -> None:
        assert descriptor is not None
        for rank, (address, nonce) in enumerate(addresses):
            if rank != group.rank:
                _send(address, f"{nonce} {group.rank}".encode(), descriptor, group.size)

    def take_all() -> None:
        assert inbox is not None
        expected = set(senders) - {group.rank}
        while expected:
            sender, received = inbox.receive()
            try:
                if sender not in expected:
                    raise ExchangeError(f"rank {sender} was not expected to send")
                receive(sender, received)
            finally:
                os.close(received)
            expected.remove(sender)

    handle_type = HandleType.POSIX_FD
    try:
        addresses = group.agree(f"{subject}: open a socket", open_inbox, handle_type=handle_type)
        nothing: Callable[[], Any] = lambda: None  # noqa: E731
        sends = group.rank in senders
        group.agree(f"{subject}: send the descriptor", send if sends else nothing, handle_type=handle_type)
        group.agree(f"{subject}: import", take_all, handle_type=handle_type)
    finally:
        if inbox is not None:
            inbox.close()


def _send(address: str, message: bytes, descriptor: int, ranks: int) -> None:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_ACCEPT_SECONDS)
            connection.connect(address)
            socket.send_fds(connection, [message], [descriptor])
    except OSError as error:
        if (
            error.errno == errno.ETOOMANYREFS
        ):  # the kernel counts descriptors under way per user, without CAP_SYS_RESOURCE
            raise ExchangeError(
                f"too many descriptors are under way. Raise the limit of open files to {ranks * ranks} "
                f"(`ulimit -n {ranks * ranks}`) for {ranks} ranks"
            ) from error
        raise


@contextlib.contextmanager
def _directory_needed() -> Iterator[None]:
    """Python looks for a place to write in, and says that there is none for want of a file descriptor too."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        if descriptors_left() < _DESCRIPTORS_PER_EXCHANGE:
            raise ExchangeError(f"no socket can be made. {descriptor_limit_cure(_DESCRIPTORS_PER_EXCHANGE)}") from error
        raise ExchangeError(
            f"there is no directory for a socket ({error}). Set TMPDIR to one that this user may write to, such as an "
            "emptyDir where the container's root is read-only; nothing stays in it"
        ) from error


def sweep() -> None:
    """Remove what ranks of this user left that were killed between making a socket and removing its name."""
    directory = Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):  # a directory that may be used but not listed
        for path in directory.glob(f"{_PREFIX}*"):
            match = re.fullmatch(rf"{_PREFIX}(\d+)-(\d+)-.*", path.name)
            if match and path.stat().st_uid == os.getuid() and _start_time(int(match[1])) != int(match[2]):
                _remove(path)


def _remove(directory: Path) -> None:
    """By path, since ``shutil.rmtree`` opens what it removes, and this must work with no descriptor left."""
    with contextlib.suppress(OSError):  # no socket was made yet, or another rank sweeps too
        (directory / "s").unlink(missing_ok=True)
        directory.rmdir()


def _start_time(pid: int) -> int:
    """When a process began, in clock ticks since boot; 0: there is none. Tells a process from a later one of its id."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0
