"""Ranks as threads of the test's process, around one store."""

import ctypes
import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from memfd_driver import OPEN_FILES, MemfdDriver
from torch.distributed import HashStore

from vllm_rose_plugin.memory.driver import Driver
from vllm_rose_plugin.memory.rendezvous import Group


def run_ranks(
    size: int, function: Callable[..., Any], *, timeout: float = 30.0, absent: Collection[int] = ()
) -> list[Any]:
    """Call ``function(group)`` on every rank; its values or exceptions by rank, None for ranks that are absent."""
    store = HashStore()
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        group = Group(store=store, rank=rank, size=size, name="test", timeout=timeout)
        try:
            results[rank] = function(group)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(size)]
    for rank, thread in enumerate(threads):
        if rank not in absent:
            thread.start()
    for rank, thread in enumerate(threads):
        if rank not in absent:
            thread.join(60)
            assert not thread.is_alive(), f"rank {rank} hangs"
    return results


def drivers(size: int, failing: int | None = None, **arguments: Any) -> list[MemfdDriver]:
    """One for each rank; ``arguments`` are those of the failing rank's."""
    return [MemfdDriver(devices=size, **(arguments if rank == failing else {})) for rank in range(size)]


def on(fakes: list[MemfdDriver], group: Group) -> Driver:
    """The driver of one rank, which has the GPU of its number."""
    return Driver(device=group.rank, bindings=fakes[group.rank])


class Held:
    """What this process holds: file descriptors, mappings of memory files, the fake drivers' files."""

    def __init__(self) -> None:
        self.descriptors = len(os.listdir("/proc/self/fd"))
        self.mappings = Path("/proc/self/maps").read_text().count("device memory")
        self.files = len(OPEN_FILES)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return repr(vars(self))


def write(address: int, text: bytes) -> None:
    ctypes.memmove(address, text, len(text))


def read(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)
