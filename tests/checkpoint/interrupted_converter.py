"""Run by test_resume: forks converters and kills them. Reads one JSON request a line, answers one line each.

torch is imported once and runs no operation before the fork, so each attempt costs milliseconds.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from checkpoint_builders import CHANGING_CALLS

from vllm_rose_plugin.checkpoint.convert import convert
from vllm_rose_plugin.checkpoint.headers import CheckpointError
from vllm_rose_plugin.checkpoint.plan import Options


def die_before_call(number: int) -> None:
    """Kill this process just before its n-th call that changes what is on disk."""
    done = 0

    def guarded(call: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            return call(*args, **kwargs)

        return wrapper

    for name in CHANGING_CALLS:
        setattr(os, name, guarded(getattr(os, name)))


def attempt(request: dict[str, Any]) -> str:
    pid = os.fork()
    if pid == 0:
        status = 3
        try:
            torch.set_num_threads(1)
            if "call" in request:
                die_before_call(request["call"])
            convert(
                source=Path(request["source"]),
                destination=Path(request["destination"]),
                options=Options(max_shard_bytes=request["shard"]),
                workers=request["workers"],
                progress=False,
            )
            status = 0
        except CheckpointError as error:
            print(error, file=sys.stderr)
        finally:
            os._exit(status)
    status = os.waitpid(pid, 0)[1]
    return "killed" if os.WIFSIGNALED(status) else str(os.WEXITSTATUS(status))


for line in sys.stdin:
    print(attempt(json.loads(line)), flush=True)
