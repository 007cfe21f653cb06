"""The MXFP8 checkpoints that `make serve` keeps in build/: one per model folder, shared by concurrent runs."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from server import ServeError, say

ROOT = Path(__file__).resolve().parent.parent
# Inside a finished checkpoint: the fingerprint of what it was made from.
STAMP = ".made-from"


def checkpoint_error(model: Path) -> str | None:
    """Why ``model`` can't be converted, as far as one look tells, in one line, or None."""
    try:
        os.stat(model / "config.json")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return f"{os.path.realpath(model)} is no checkpoint (config.json: {reason}); choose one with MODEL=…"
    return None


def output_name(source: Path) -> str:
    """The folder for ``source``, which is absolute: readable, and another one for another path."""
    readable = re.sub(r"[^\w.-]", "_", f"{source.parent.name}-{source.name}")[:60]
    return f"{readable}-{hashlib.sha256(os.fsencode(source)).hexdigest()[:10]}-mxfp8"


def quantized(model: Path, build: Path) -> Path:
    """The MXFP8 checkpoint of ``model``: itself where it is quantized, else one in ``build``, made where it is missing
    or older than its source.

    It is made beside the final folder, under a name that tells from what, so that an interrupted conversion is resumed
    only by the same one, and a finished one replaces its predecessor by renaming.

    Raises:
        ServeError: ``model`` is no checkpoint or can't be converted.
    """
    source = Path(os.path.realpath(model))
    if problem := checkpoint_error(source):
        raise ServeError(problem)
    if "quantization_config" in json.loads((source / "config.json").read_text()):
        say(f"{source} is quantized already; serving it as it is")
        return source
    destination = build / output_name(source)

    def wait() -> None:
        say(f"another make serve is converting {source}, waiting for it to end")

    with held(build / f"{destination.name}.lock", otherwise=wait) as lock:
        replaced = build / f"{destination.name}.replaced"
        if replaced.is_dir():  # an earlier run was killed while it removed this
            shutil.rmtree(replaced)
        state = fingerprint(source)
        if (destination / STAMP).is_file() and (destination / STAMP).read_text() == state:
            say(f"{destination.relative_to(ROOT)} is up to date")
            return destination
        made = build / f"{destination.name}.{state[:12]}"
        convert(source, made, lock)
        (made / STAMP).write_text(state)
        if destination.exists():
            destination.rename(replaced)
        made.rename(destination)
        shutil.rmtree(replaced, ignore_errors=True)
        note_leftovers(destination)
    return destination


def convert(source: Path, made: Path, lock: int) -> None:
    """Run `rose quantize`, which resumes and whose output is absent or complete."""
    partial = made.with_name(f"{made.name}.partial")
    # Complete with a .partial: killed after the last rename; the converter then only clears its .partial.
    if made.is_dir() and not partial.exists():
        return
    command = [str(Path(sys.executable).with_name("rose")), "quantize", str(source), str(made)]
    # The converter inherits the lock, so an orphan of a killed run is waited for too.
    code = subprocess.run(command, pass_fds=[lock]).returncode
    if not made.is_dir():
        raise ServeError(f"rose quantize ended with exit code {code}")


def note_leftovers(destination: Path) -> None:
    """Name what conversions of other states left; it may be hours of work, so removing it is the user's business."""
    for path in sorted(destination.parent.iterdir()):
        if path.name.startswith(f"{destination.name}.") and path.is_dir():
            say(f"{path.relative_to(ROOT)} is left of an earlier state of the model; remove it to free its space")


def fingerprint(source: Path) -> str:
    """Changes when a file of the checkpoint or the converter does."""
    digest = hashlib.sha256()
    for file in sorted(p for p in source.iterdir() if p.is_file()):
        digest.update(os.fsencode(file) + f" {file.stat().st_size} {file.stat().st_mtime_ns}\n".encode())
    package = ROOT / "vllm_rose_plugin"
    for file in sorted([*(package / "checkpoint").glob("*.py"), *(package / "kernels/mxfp8_quantize").glob("*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def held(path: Path, *, otherwise: Callable[[], None]) -> Iterator[int]:
    """Hold the lock file ``path``; the value is its descriptor.

    Args:
        path: made where it is missing, never removed: another run may be waiting on it.
        otherwise: called where another process holds it; returning means to wait.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            otherwise()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()
