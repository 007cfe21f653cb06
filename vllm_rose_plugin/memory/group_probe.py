"""One rank of ``rose doctor --group N``: settle the handle type, share a buffer, write to every peer, free all again.

``python -m vllm_rose_plugin.memory.group_probe`` prints one line of JSON. Ranks meet in a file, so
they are of one host; rank r takes GPU r. The write makes a CUDA context, which ends with the process.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_rose_plugin.memory.cures import describe
from vllm_rose_plugin.memory.driver import PROBE_BYTES, Driver, HandleType
from vllm_rose_plugin.memory.handles import settle_handle_type
from vllm_rose_plugin.memory.multicast import bind_multicast
from vllm_rose_plugin.memory.rendezvous import Group, GroupError
from vllm_rose_plugin.memory.symmetric import SymmetricBuffer, allocate
from vllm_rose_plugin.memory.undo import Undo

_WORD_BYTES = 4


@dataclass(frozen=True)
class GroupAnswer:
    """What one rank found."""

    rank: int
    error: str = ""
    """Empty: all ranks reach each other's memory."""
    handle_type: str | None = None
    """``fabric`` or ``posix_fd``; None: the ranks settled on none."""
    refused: dict[str, str] = field(default_factory=dict)
    """Handle types that were wanted more, with the reason."""
    multicast: str | None = None
    """None: not tried. Empty: it works. Otherwise why it doesn't."""


class WrongDataError(RuntimeError):
    """A peer's write didn't arrive."""


def probe_rank(*, group: Group, try_multicast: bool = False, bindings: Any = None) -> GroupAnswer:
    """Try everything that a communicator needs; collective.

    Args:
        group: rank r takes GPU r.
        try_multicast: also bind the buffer to a multicast object. On a host whose GPUs are shared, a multicast set-up
            that fails half-way can disturb the other users.
        bindings: see :class:`~vllm_rose_plugin.memory.driver.Driver`.
    """
    drivers: list[Driver] = []
    handle_type: HandleType | None = None
    refused: dict[str, str] = {}
    multicast: str | None = None
    try:
        group.agree("driver", lambda: drivers.append(Driver(device=group.rank, bindings=bindings)))
        choice = settle_handle_type(driver=drivers[0], group=group)
        handle_type = choice.handle_type
        refused = {other.value: reason for other, reason in choice.refused.items()}
        size = max(PROBE_BYTES, _WORD_BYTES * group.size)
        with (
            _context(drivers[0], group),
            allocate(
                driver=drivers[0], group=group, size=size, handle_type=handle_type, for_multicast=try_multicast
            ) as buffer,
        ):
            _write_to_peers(buffer)
            if try_multicast:
                multicast = _multicast_problem(buffer)
    except GroupError as error:
        return GroupAnswer(group.rank, str(error), handle_type and handle_type.value, refused, multicast)
    return GroupAnswer(group.rank, "", handle_type.value, refused, multicast)


@contextmanager
def _context(driver: Driver, group: Group) -> Iterator[None]:
    """This device's primary context as the current one."""

    undo = Undo()

    def enter() -> None:
        context = driver.call("cuDevicePrimaryCtxRetain", driver.device)
        undo.add(lambda: driver.call("cuDevicePrimaryCtxRelease", driver.device))
        driver.call("cuCtxSetCurrent", context)

    try:
        group.agree("context", enter)
        yield
    finally:
        undo.close()


def _write_to_peers(buffer: SymmetricBuffer) -> None:
    """Every rank writes a word of its own to every rank, itself included, and reads what came."""
    group, driver = buffer.group, buffer.driver

    def word(sender: int, receiver: int) -> int:
        return (sender + 1) * 1000 + receiver

    def write() -> None:
        for peer, address in enumerate(buffer.addresses):
            driver.call("cuMemsetD32", address + group.rank * _WORD_BYTES, word(group.rank, peer), 1)
        driver.call("cuCtxSynchronize")

    def read() -> None:
        came = bytearray(group.size * _WORD_BYTES)
        driver.call("cuMemcpyDtoH", came, buffer.address, len(came))
        for sender in range(group.size):
            value = int.from_bytes(came[sender * _WORD_BYTES : (sender + 1) * _WORD_BYTES], "little")
            if value != word(sender, group.rank):
                raise WrongDataError(f"rank {sender} wrote {word(sender, group.rank)}, {value} is here")

    group.agree("write to peers", write)
    group.agree("read", read)


def _multicast_problem(buffer: SymmetricBuffer) -> str:
    try:
        bind_multicast(buffer).free()
    except GroupError as error:
        return str(error)
    return ""


def main() -> int:
    """Print this rank's answer as one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--store", required=True, help="a file in which the ranks meet")
    parser.add_argument("--timeout", type=float, required=True, help="seconds that a phase may last")
    parser.add_argument("--multicast", action="store_true", help="also bind the buffer to a multicast object")
    args = parser.parse_args()
    try:
        from torch.distributed import FileStore

        store = FileStore(args.store, args.size)
        group = Group(store=store, rank=args.rank, size=args.size, name="rose doctor", timeout=args.timeout)
        answer = probe_rank(group=group, try_multicast=args.multicast)
    except Exception as error:
        answer = GroupAnswer(args.rank, describe(error))
    print(json.dumps(asdict(answer)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
