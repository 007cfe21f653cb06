"""A group of ranks that agree: every phase ends with the same verdict on all of them, or with a named culprit.

The group talks through a ``torch.distributed.Store``, which both kinds of vLLM groups have or can make. A store, and
not a collective, because a store can say *who* is missing when the deadline passes. What the ranks do about a missing
one is decided once, by the store's atomic ``compare_set``: whoever sees first that all have answered, or that time is
up, writes the verdict, and everyone obeys what is written. So no rank goes on while another gives up.
"""

import datetime
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from vllm_rose_plugin.memory.cures import describe
from vllm_rose_plugin.memory.driver import HandleType

DEFAULT_TIMEOUT = 60.0
"""Seconds that ranks wait for each other in one phase."""

_LINGER_SECONDS = 5.0
_ALL = "all"
_MEET = "meet"


class GroupError(RuntimeError):
    """A phase that failed; every rank of the group raises it with the same text."""

    def __init__(self, *, name: str, size: int, phase: str, reasons: dict[int, str]):
        self.phase = phase
        self.reasons = dict(sorted(reasons.items()))
        """Rank to what it said."""
        by_reason: dict[str, list[int]] = {}
        for rank, reason in self.reasons.items():
            by_reason.setdefault(reason, []).append(rank)
        parts = [f"{_ranks(ranks)} of {size}: {reason}" for reason, ranks in by_reason.items()]
        super().__init__(f"{name}: phase {phase!r} failed on " + "; on ".join(parts))


class MissingRankError(GroupError):
    """Ranks that didn't arrive before the deadline, and what failed on those that did."""


class StoreLostError(RuntimeError):
    """The store doesn't answer; the ranks can't agree on anything any more."""


class Group:
    """Ranks 0 … size-1 that meet in a store.

    All ranks make the same calls in the same order. After a :class:`GroupError` the group can be used again; after a
    :class:`MissingRankError` make a new one, with a new name, of the ranks that are left. Not for several threads.
    """

    def __init__(
        self,
        *,
        store: Any,
        rank: int,
        size: int,
        name: str,
        timeout: float = DEFAULT_TIMEOUT,
        hosts_store: bool = False,
    ):
        """Nothing is exchanged yet.

        Args:
            store: a ``torch.distributed.Store`` (vLLM: ``StatelessProcessGroup.store``).
            rank: this process's number in the group.
            size: ranks in the group, 1 or more.
            name: prefix of all keys: two groups that live at once in one store need two names.
            timeout: seconds that a phase may last, counted from this rank's arrival.
            hosts_store: whether the store ends with this process; it then waits for the others before it raises.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank} must be from 0 to size-1={size - 1}")
        if timeout <= 0:
            raise ValueError(f"timeout={timeout} must be above 0 seconds")
        self.rank = rank
        self.size = size
        self.name = name
        self.timeout = timeout
        self._store = store
        self._hosts_store = hosts_store
        self._phases = 0

    def agree(self, phase: str, action: Callable[[], Any], *, handle_type: HandleType | None = None) -> list[Any]:
        """Do something on every rank; go on only if it worked on all.

        Args:
            phase: its name, for messages; the same on all ranks.
            action: what this rank does; its value must be JSON.
            handle_type: what the action is about, for the cure in the message.

        Returns:
            The values of all ranks, by rank.

        Raises:
            GroupError: the action raised on some rank; the same text everywhere.
            MissingRankError: some rank didn't arrive in time; the same text everywhere.
            StoreLostError: the store doesn't answer.
        """
        number, self._phases = self._phases, self._phases + 1
        own: BaseException | None = None
        try:
            answer = {"phase": phase, "value": action()}
        except Exception as error:
            own = error
            answer = {"phase": phase, "error": describe(error, handle_type=handle_type)}
        except BaseException as error:  # Ctrl-C, exit: the others must hear of it, this rank doesn't wait for them
            with suppress(StoreLostError):
                self._publish(number, {"phase": phase, "error": f"interrupted by {type(error).__name__}"})
            raise
        self._publish(number, answer)
        try:
            answers = self._collect(number, phase)
        except MissingRankError as error:
            raise error from own
        phases = {rank: other["phase"] for rank, other in enumerate(answers)}
        if len(set(phases.values())) > 1:
            reasons = {rank: f"it is in phase {name!r}: the ranks run apart" for rank, name in phases.items()}
        else:
            reasons = {rank: other["error"] for rank, other in enumerate(answers) if "error" in other}
        if reasons:
            self._linger(number, self.size)
            raise GroupError(name=self.name, size=self.size, phase=phase, reasons=reasons) from own
        return [other["value"] for other in answers]

    def _key(self, number: int, what: str | int) -> str:
        return f"{self.name}/{number}/{what}"

    def _publish(self, number: int, answer: dict[str, Any]) -> None:
        """Say this rank's answer; the last rank to do so closes the phase."""
        self._ask("set", self._key(number, self.rank), json.dumps(answer))
        if self._ask("add", self._key(number, "count"), 1) == self.size:
            self._decide(number, _ALL)
        # Whoever is here has read phase number-1, which all had answered, so all have read number-2.
        keys: list[str | int] = [self.rank] if self.rank else [0, "count", "verdict", "read"]
        for key in keys if number >= 2 else []:
            self._ask("delete_key", self._key(number - 2, key))

    def _collect(self, number: int, phase: str) -> list[dict[str, Any]]:
        """The answers of all ranks, or the verdict that some are missing."""
        verdict = self._verdict(number)
        if verdict == _ALL:
            texts = self._ask("multi_get", [self._key(number, rank) for rank in range(self.size)])
            self._ask("add", self._key(number, "read"), 1)
            return [json.loads(text) for text in texts]
        self._ask("add", self._key(number, "read"), 1)
        missing = json.loads(verdict)
        reasons = dict.fromkeys(missing, _absent(self.timeout))
        # What failed elsewhere may be why these didn't arrive: they wait for it in a kernel.
        present = [rank for rank in range(self.size) if rank not in missing]
        texts = self._ask("multi_get", [self._key(number, rank) for rank in present])
        failed = {rank: json.loads(text).get("error") for rank, text in zip(present, texts, strict=True)}
        reasons |= {rank: error for rank, error in failed.items() if error}
        self._linger(number, self.size - len(missing))
        raise MissingRankError(name=self.name, size=self.size, phase=phase, reasons=reasons)

    def _verdict(self, number: int) -> str:
        deadline = time.monotonic() + self.timeout
        key = self._key(number, "verdict")
        while (left := deadline - time.monotonic()) > 0:
            # A store that waits too long and one that is gone raise alike; the next question tells them apart.
            with suppress(RuntimeError):
                # Stores count milliseconds, and 0 means for ever.
                self._store.wait([key], datetime.timedelta(seconds=max(left, 0.001)))
            if self._ask("check", [key]):
                break
        else:
            missing = [rank for rank in range(self.size) if not self._ask("check", [self._key(number, rank)])]
            self._decide(number, json.dumps(missing) if missing else _ALL)
        return self._ask("get", key).decode()

    def _decide(self, number: int, proposal: str) -> None:
        """Make the proposal the verdict, unless there is one."""
        key = self._key(number, "verdict")
        verdict = self._ask("compare_set", key, "", proposal)
        # TCPStore without libuv wakes nobody after a compare_set (torch 2.13); the same value again does.
        self._ask("set", key, verdict)

    def _linger(self, number: int, readers: int) -> None:
        """Where the store ends with this process: let the others read why before this rank raises and perhaps ends."""
        deadline = time.monotonic() + min(self.timeout, _LINGER_SECONDS)
        key = self._key(number, "read")
        while self._hosts_store and self._ask("add", key, 0) < readers and time.monotonic() < deadline:
            time.sleep(0.01)

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as error:
            raise StoreLostError(
                f"{self.name}: the store of the group doesn't answer ({str(error).splitlines()[0]}): the process that "
                "holds it has ended; its log says why"
            ) from error


def group_from_process_group(process_group: Any, *, address: str, name: str, timeout: float = DEFAULT_TIMEOUT) -> Group:
    """A :class:`Group` of the ranks of a gloo process group (vLLM: ``GroupCoordinator.cpu_group``, stateless or not).

    Rank 0 opens a TCP store and sends its address to the others through the process group.

    Args:
        process_group: a ``torch.distributed.ProcessGroup`` with gloo.
        address: where the other ranks reach this host; used on rank 0.
        name: see :class:`Group`.
        timeout: see :class:`Group`.

    Raises:
        MissingRankError: some rank didn't arrive in time.
        StoreLostError: rank 0's store can't be reached at ``address``.
    """
    import torch
    from torch.distributed import TCPStore

    rank, size = process_group.rank(), process_group.size()
    wait = datetime.timedelta(seconds=timeout)
    where = torch.zeros(512, dtype=torch.uint8, device="cpu")  # JSON, zeros behind it
    if rank == 0:
        store = TCPStore(address, 0, is_master=True, timeout=wait, wait_for_workers=False)
        text = json.dumps([address, store.port]).encode()
        where[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        sending = [process_group.send([where], other, 0) for other in range(1, size)]
    else:
        try:
            process_group.recv([where], 0, 0).wait(wait)
        except RuntimeError as error:
            raise MissingRankError(name=name, size=size, phase=_MEET, reasons={0: _absent(timeout)}) from error
        host, port = json.loads(bytes(where.tolist()).rstrip(b"\0"))
        try:
            store = TCPStore(host, port, is_master=False, timeout=wait, wait_for_workers=False)
        except RuntimeError as error:
            raise StoreLostError(f"{name}: rank {rank} can't reach the store of rank 0 at {host}:{port}") from error
    group = Group(store=store, rank=rank, size=size, name=name, timeout=timeout, hosts_store=rank == 0)
    try:
        group.agree(_MEET, lambda: None)
    finally:
        if rank == 0:
            for work in sending:
                with suppress(RuntimeError):  # to a rank that isn't there
                    work.wait(datetime.timedelta(milliseconds=100))
    return group


def _absent(timeout: float) -> str:
    return f"it didn't arrive within {timeout:g} s; look at its log"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
