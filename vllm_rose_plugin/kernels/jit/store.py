"""Compiled kernels on disk: object files with a checksum and their full key beside them, shared by processes."""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_rose_plugin.kernels.jit.fingerprint import host_features

logger = logging.getLogger(__name__)

TUNED = "tuned"
"""Folder under the cache folder for choices that were measured."""
LOCK_SECONDS = 120.0
"""How long to wait for another process that compiles the same kernel (the largest take some seconds)."""


@dataclasses.dataclass(frozen=True)
class Key:
    """What a compiled kernel depends on; every field is text that people can read."""

    family: str
    target: str
    config: str
    build: str
    sources: str
    compiler: str
    settings: str

    @functools.cached_property
    def digest(self) -> str:
        """Name of the entry: 32 hexadecimal digits."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:32]

    @property
    def symbol(self) -> str:
        """Name of the function in the object file."""
        return f"rose_{self.family}_{self.digest}"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One kernel on disk, as it was found."""

    path: Path
    """The object file."""
    key: Key | None
    """None: the description beside it is missing or unreadable."""
    size: int
    fault: str
    """Why it can't be used here; empty: it can."""


class Store:
    """A folder of entries ``<family>/<digest>.o`` with ``<digest>.json`` beside each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: Key) -> Path:
        """Where the object file of a key lies, whether or not it exists."""
        return self.folder / key.family / f"{key.digest}.o"

    def get(self, key: Key) -> Path | None:
        """The object file, if it is complete, belongs to this key and runs on this CPU."""
        path = self.path(key)
        if not os.path.exists(path):
            return None
        fault = self.look(path, key).fault
        if fault:
            logger.warning("%s: %s is not used (%s): compiling it again", key.family, path, fault)
            return None
        return path

    def entries(self) -> list[Entry]:
        """All entries, each checked."""
        return [self.look(path) for path in sorted(self.folder.glob("*/*.o"))]

    def clear(self, family: str | None = None) -> int:
        """Remove the entries of a family, or all. A kernel that is being compiled right now is left alone.

        Returns:
            How many were removed.
        """
        removed = 0
        for folder in sorted(self.folder.glob(family or "*")):
            for path in sorted(folder.glob("*.o")):
                path.unlink(missing_ok=True)
                path.with_suffix(".json").unlink(missing_ok=True)
                removed += 1
            for path in sorted(folder.glob("*.lock")):
                handle = os.open(path, os.O_RDWR)
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    _remove_leftovers(folder, path.stem)
                os.close(handle)
        return removed

    def look(self, path: Path, key: Key | None = None) -> Entry:
        """Check one object file against its description, and against ``key`` where given."""
        try:
            content = path.read_bytes()
        except OSError as error:
            return Entry(path, None, 0, f"unreadable: {error.strerror}")
        try:
            description = json.loads(path.with_suffix(".json").read_text())
            found = Key(**description["key"])
            checksum, machine, flags = description["sha256"], description["machine"], set(description["cpu"])
        except (OSError, ValueError, KeyError, TypeError):
            return Entry(path, None, len(content), "its description is missing or damaged")
        here_machine, here_flags = host_features()
        fault = ""
        if hashlib.sha256(content).hexdigest() != checksum:
            fault = "its content doesn't match its checksum"
        elif found.digest != path.stem or found.family != path.parent.name or (key is not None and found != key):
            fault = "it belongs to another key"
        elif machine != here_machine:
            fault = f"it was built on {machine}"
        elif flags - here_flags:
            fault = f"it was built on a CPU with {' '.join(sorted(flags - here_flags)[:4])}, which this one lacks"
        return Entry(path, found, len(content), fault)

    def put(self, key: Key, write: Callable[[str], None], *, cpu: frozenset[str] | None = None) -> bool:
        """Store an entry. False, with one warning, where the disk refuses.

        Args:
            key: of the entry.
            write: ``write(path)`` makes the object file.
            cpu: instruction sets that the object needs; None: all of this CPU's.
        """
        path = self.path(key)
        machine, flags = host_features()
        try:
            _remove_leftovers(path.parent, key.digest)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=_scratch_prefix(key.digest)) as scratch:
                fresh = Path(scratch, path.name)
                write(str(fresh))
                description = {
                    "key": dataclasses.asdict(key),
                    "sha256": hashlib.sha256(fresh.read_bytes()).hexdigest(),
                    "machine": machine,
                    "cpu": sorted(flags if cpu is None else cpu),
                }
                fresh.with_suffix(".json").write_text(json.dumps(description, indent=1))
                self.publish(fresh)
        except OSError as error:
            self._refused(error)
            return False
        return True

    def publish(self, fresh: Path) -> None:
        """Move an object file and its description from a folder on the same file system to their place."""
        family = json.loads(fresh.with_suffix(".json").read_text())["key"]["family"]
        for path in (fresh, fresh.with_suffix(".json")):  # the description last: it vouches for the object
            with path.open("rb") as file:
                os.fsync(file.fileno())
            path.rename(self.folder / family / path.name)

    @contextlib.contextmanager
    def locked(self, key: Key) -> Iterator[bool]:
        """Hold the right to compile ``key``; gives False, with one warning, where nothing can be written.

        The lock is on an open file, so the system drops it with its process, however that ends.
        """
        path = self.path(key).with_suffix(".lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = acquire(path)
        except OSError as error:
            self._refused(error)
            yield False
            return
        try:
            yield True
        finally:
            if handle is not None:
                os.close(handle)

    def _refused(self, error: OSError) -> None:
        warn_once(
            f"can't write kernels to {self.folder} ({error.strerror}): they stay in memory only; "
            "ROSE_CACHE_DIR names another place"
        )


def _scratch_prefix(digest: str) -> str:
    return f".new-{digest}-"


def _remove_leftovers(folder: Path, digest: str) -> None:
    """Whoever holds the lock may remove what a killed predecessor left."""
    for scratch in folder.glob(f"{_scratch_prefix(digest)}*"):
        shutil.rmtree(scratch, ignore_errors=True)


def acquire(path: Path) -> int | None:
    """Lock a file, made if need be; the lock is gone when the returned handle is closed or its process ends.

    Returns:
        None where it must be done without: no lock is to be had here, or another holds it too long.

    Raises:
        OSError: the file can't be made.
    """
    deadline, pause = time.monotonic() + LOCK_SECONDS, 0.005
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(handle), path.stat()):
                return handle
            os.close(handle)  # removed by `rose cache clear` between open and lock
            continue
        except BlockingIOError:
            os.close(handle)
        except OSError as error:
            os.close(handle)
            logger.warning("%s can't be locked (%s): processes may do the same work", path, error.strerror)
            return None
        if time.monotonic() > deadline:
            logger.warning("%s has been held for %.0f s: going on without it", path, LOCK_SECONDS)
            return None
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """One warning per process for a cache that can't be used."""
    if not _warned:
        logger.warning("%s", message)
    _warned.add(message)


def cache_folder() -> Path | None:
    """``ROSE_CACHE_DIR``, else ``rose`` under vLLM's cache root; None, with one warning, where there is no home."""
    chosen = os.environ.get("ROSE_CACHE_DIR")
    if not chosen:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        chosen = os.path.join(os.environ.get("VLLM_CACHE_ROOT") or os.path.join(cache, "vllm"), "rose")
    try:
        return Path(chosen).expanduser().absolute()
    except RuntimeError:  # no HOME and no entry in passwd
        warn_once("there is no home directory, so kernels stay in memory only; ROSE_CACHE_DIR names a place for them")
        return None


def open_store() -> Store | None:
    """The kernels under :func:`cache_folder`."""
    folder = cache_folder()
    return Store(folder / "kernels") if folder else None
