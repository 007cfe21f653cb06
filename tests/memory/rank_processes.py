"""Ranks as processes."""

import faulthandler
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from typing import Any

# Forked from a process without threads, which this one, with stores and ranks as threads, is not.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch.distributed", "vllm_rose_plugin.memory.multicast", "rank_threads"])
_SECONDS = 60.0

temporary_directory: str | None = None
"""What takes the place of TMPDIR in the processes."""


def in_processes(size: int, function: Callable[..., Any], *arguments: Any, seconds: float = _SECONDS) -> list[Any]:
    """Values of ``function(rank, *arguments)`` by rank; None of a process that was killed. All others end cleanly.

    Args:
        function: of a module, since the processes find it by its name.
        seconds: until a rank counts as one that hangs.
    """
    receivers, processes = [], []
    for rank in range(size):
        receiver, sender = _processes.Pipe(duplex=False)
        process = _processes.Process(
            target=_run, args=(temporary_directory, sender, seconds, function, rank, *arguments)
        )
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    values = []
    try:
        for receiver, process in zip(receivers, processes, strict=True):
            answered = True
            try:
                assert receiver.poll(seconds + 5), "a rank hangs"
                values.append(receiver.recv())
            except EOFError:
                values.append(None)
                answered = False
            process.join(20)
            assert process.exitcode is not None, "a rank doesn't end"
            assert not answered or process.exitcode == 0, f"a rank ended with {process.exitcode} after it had answered"
    finally:
        for process in processes:
            process.kill()
    return values


def _run(
    directory: str | None, sender: Any, seconds: float, function: Callable[..., Any], rank: int, *arguments: Any
) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr)
    tempfile.tempdir = directory
    sender.send(function(rank, *arguments))
