"""Memory handles between ranks: which kind they use, settled by trying on every rank, and how one travels."""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_rose_plugin.memory.cures import describe
from vllm_rose_plugin.memory.driver import Driver, DriverError, HandleType, try_handle_type
from vllm_rose_plugin.memory.fd_exchange import exchange_descriptors
from vllm_rose_plugin.memory.rendezvous import Group, GroupError

_PHASE = "handle type"


@dataclass(frozen=True)
class HandleChoice:
    """What the ranks settled on; the same on all of them."""

    handle_type: HandleType
    refused: dict[HandleType, str]
    """The types that were wanted more, with the reason."""


def settle_handle_type(
    *,
    driver: Driver,
    group: Group,
    wanted: Sequence[HandleType] = (HandleType.FABRIC, HandleType.POSIX_FD),
) -> HandleChoice:
    """The first type with which a real allocation and export worked on every rank.

    Device attributes promise more than a host permits (a host without an IMEX channel claims fabric handles and then
    refuses them), so they only explain a refusal here.

    Args:
        wanted: the types in order of preference, the same on all ranks.

    Raises:
        GroupError: no type works for all, with what every rank said.
        MissingRankError: a rank didn't arrive.
    """
    order = ", ".join(handle_type.value for handle_type in wanted)

    def attempt() -> dict[str, Any]:
        return {"wanted": order, "host": _host_id(), "refused": {t.value: _refusal(driver, t) for t in wanted}}

    answers = group.agree(_PHASE, attempt)
    if len({answer["wanted"] for answer in answers}) > 1:
        reasons = {
            rank: f"it wants {answer['wanted']}: set the same on all ranks" for rank, answer in enumerate(answers)
        }
        raise GroupError(name=group.name, size=group.size, phase=_PHASE, reasons=reasons)
    refused: dict[HandleType, str] = {}
    all_reasons: dict[int, str] = {}
    for handle_type in wanted:
        reasons = {
            rank: reason for rank, answer in enumerate(answers) if (reason := answer["refused"][handle_type.value])
        }
        if handle_type is HandleType.POSIX_FD and len({answer["host"] for answer in answers}) > 1:
            # Whatever the ranks say: a descriptor can't leave its host.
            apart = {rank for rank, answer in enumerate(answers) if answer["host"] != answers[0]["host"]}
            reasons.update(dict.fromkeys(apart, "it is on another host than rank 0, and descriptors stay on a host"))
        if not reasons:
            return HandleChoice(handle_type, refused)
        refused[handle_type] = str(GroupError(name=group.name, size=group.size, phase=_PHASE, reasons=reasons))
        for rank, reason in reasons.items():
            before = f"{all_reasons[rank]}; " if rank in all_reasons else ""
            all_reasons[rank] = f"{before}{handle_type.value} handles: {reason}"
    raise GroupError(name=group.name, size=group.size, phase=_PHASE, reasons=all_reasons)


def share_handles(
    *,
    driver: Driver,
    group: Group,
    handle: int,
    handle_type: HandleType,
    senders: Collection[int],
    receive: Callable[[int, int | bytes], None],
    subject: str,
) -> None:
    """Export a driver handle on some ranks and let all others import it; collective.

    Args:
        handle: what this rank exports; not looked at on ranks that aren't among ``senders``.
        senders: the ranks that export one, the same on all ranks.
        receive: called with sender and what the driver can import; an error of it fails the phase "import".
        subject: for the names of the phases.

    Raises:
        GroupError: some rank failed; nothing of the exchange stays open.
        MissingRankError: some rank didn't arrive; likewise.
    """
    descriptor: int | None = None

    def export() -> str | None:
        nonlocal descriptor
        if group.rank not in senders:
            return None
        shareable = driver.export(handle=handle, handle_type=handle_type)
        if isinstance(shareable, bytes):
            return shareable.hex()
        descriptor = shareable
        return None

    try:
        exported = group.agree(f"{subject}: export", export, handle_type=handle_type)

        def import_all() -> None:
            for rank in senders:
                if rank != group.rank:
                    receive(rank, bytes.fromhex(exported[rank]))

        if handle_type is HandleType.FABRIC:
            group.agree(f"{subject}: import", import_all, handle_type=handle_type)
        else:
            exchange_descriptors(group=group, descriptor=descriptor, senders=senders, receive=receive, subject=subject)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _refusal(driver: Driver, handle_type: HandleType) -> str:
    """Why this rank can't share memory by such handles; empty if it can."""
    try:
        try_handle_type(driver=driver, handle_type=handle_type)
    except (DriverError, OSError) as error:
        text = describe(error, handle_type=handle_type)
        try:
            claims = driver.claims(handle_type)
        except DriverError:
            return text
        return f"{'the device attribute claims them, yet ' if claims else 'the device does not claim them: '}{text}"
    return ""


def _host_id() -> str:
    """The same in all processes of one host, containers included, and nowhere else."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
