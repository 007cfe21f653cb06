"""Compile many kernels at once: worker processes fill the cache on disk, from which this process then loads them."""

import contextlib
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_rose_plugin.kernels.jit.compile import cache_key, compile
from vllm_rose_plugin.kernels.jit.store import open_store

logger = logging.getLogger(__name__)

_WORTH_A_WORKER = 2
"""Kernels: a worker spends longer on its imports than on compiling one."""
_MOST_WORKERS = 16
"""Of one process; there is one of those for each GPU, and a worker takes some 0.7 GB."""


@dataclass(frozen=True)
class Wanted:
    """One kernel, as ``compile`` takes it."""

    family: str
    config: Any
    build: Callable
    target: str

    def on_disk(self) -> bool:
        """Whether it need not be compiled."""
        disk = open_store()
        key = cache_key(family=self.family, config=self.config, build=self.build, target=self.target)
        return disk is not None and disk.get(key) is not None


def compile_ahead(kernels: Sequence[Wanted]) -> None:
    """Bring kernels onto the disk, with as many processes as this one may use CPUs, up to 16.

    A kernel that can't be compiled is left to whoever asks ``compile`` for it, and gets the error. So is everything
    where there is no cache folder.

    Args:
        kernels: those that are on disk already cost nothing.
    """
    if open_store() is None:
        return
    missing = [kernel for kernel in dict.fromkeys(kernels) if not kernel.on_disk()]
    count = min(len(os.sched_getaffinity(0)), _MOST_WORKERS, len(missing) // _WORTH_A_WORKER)
    workers = [_start() for _ in range(count)]
    try:
        for i, worker in enumerate(workers):
            _hand_over(missing[i::count], worker)
        for worker in workers:
            if worker.wait():
                logger.warning("a worker that compiles kernels ended with code %d", worker.returncode)
    finally:
        for worker in workers:
            worker.kill()  # where this process was interrupted


def _start() -> subprocess.Popen:
    # Not multiprocessing: vLLM's workers are daemons, which may not have children of that kind.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "CUDA_VISIBLE_DEVICES": "",  # nothing here needs a device, nor may take its memory
    }
    return subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, env=environment)


def _hand_over(kernels: Sequence[Wanted], worker: subprocess.Popen) -> None:
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError), worker.stdin:  # one that ended at once has a code to tell
        worker.stdin.write(pickle.dumps(list(kernels)))


def _work() -> None:
    for kernel in pickle.loads(sys.stdin.buffer.read()):
        try:
            compile(family=kernel.family, config=kernel.config, build=kernel.build, target=kernel.target)
        except Exception as error:
            print(f"{kernel.family} for {kernel.target}: {type(error).__name__}: {error}", file=sys.stderr)


if __name__ == "__main__":
    _work()
