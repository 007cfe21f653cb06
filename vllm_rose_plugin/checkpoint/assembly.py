"""Puts a checkpoint together from files and tensors of others: hard links and copies, published in one rename."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import vllm_rose_plugin
from vllm_rose_plugin.checkpoint.files import header_bytes
from vllm_rose_plugin.checkpoint.headers import ITEM_SIZES, CheckpointError, TensorEntry
from vllm_rose_plugin.checkpoint.places import os_error
from vllm_rose_plugin.checkpoint.state import sync_directory, write_durably

_MARK = ".rose-assembly.json"
_TEMPORARY = ".rose-tmp"
_BUFFER = 4 << 20
_CANT_LINK = frozenset(
    (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
)


@dataclass
class Written:
    """How the bytes came to be in OUT."""

    linked: int = 0
    copied: int = 0


class Assembly:
    """OUT in the making: ``OUT.partial``, which becomes OUT in one rename.

    A file gets its name there when it is whole, so a run that was killed goes on after the last one. config.json must
    be written last: without it nothing loads. A hidden file says what is being made and carries the lock; it is removed
    after the rename.

    Use it as a context manager; leaving it without :meth:`publish` keeps what is done for the next run.
    """

    def __init__(self, destination: Path, *, root: Path, fingerprint: Mapping[str, Any]) -> None:
        """Args:
        destination: OUT, which must not exist.
        root: OUT.partial.
        fingerprint: what must not change until the end, by what the user calls it.
        """
        self.destination, self.root = destination, root
        self.written = Written()
        self._fingerprint = {"vllm_rose_plugin": vllm_rose_plugin.__version__, **fingerprint}
        self._names: set[str] = set()
        self._lock: IO[str] | None = None

    def __enter__(self) -> "Assembly":
        """Make or take over the directory.

        Raises:
            CheckpointError: OUT exists, the place is somebody else's, or another run works there.
        """
        if os.path.lexists(self.destination):
            raise CheckpointError(f"OUT {self.destination} exists: give a new directory, or remove it")
        try:
            self._acquire()
        except OSError as error:
            raise CheckpointError(f"can't write OUT {self.destination}: {os_error(error)}") from error
        return self

    def _acquire(self) -> None:
        mark = self.root / _MARK
        if self.root.is_symlink() or (self.root.exists() and not self.root.is_dir()):
            raise CheckpointError(f"{self.root} is in the way: it is not a directory")
        found = sorted(path.name for path in self.root.iterdir()) if self.root.exists() else []
        if found and _MARK not in found:
            raise CheckpointError(
                f"{self.root} is in the way: it holds {found[0]}, and `rose mtp` works there while it writes OUT; move "
                "it or give another OUT"
            )
        self.root.mkdir(exist_ok=True)
        lock = mark.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.fstat(lock.fileno()).st_nlink > 0  # else its owner finished meanwhile
        except BlockingIOError:
            held = False
        if not held:
            lock.close()
            raise CheckpointError(f"another rose mtp is writing {self.destination} (it holds {mark})")
        try:
            self._begin(lock)
        except BaseException:
            lock.close()
            raise
        self._lock = lock

    def _begin(self, lock: IO[str]) -> None:
        """Write what is being made, or check that it is what an earlier run began."""
        lock.seek(0)
        try:
            begun = json.loads(lock.read())
        except ValueError:  # empty, or cut by a kill: nothing else was written before it was whole
            begun = None
        if not isinstance(begun, dict):
            lock.truncate(0)
            lock.write(json.dumps(self._fingerprint))
            lock.flush()
            os.fsync(lock.fileno())
            return
        for key, value in self._fingerprint.items():
            if begun.get(key) != value:
                raise CheckpointError(
                    f"{self.root} holds an unfinished OUT, but {key} has changed since: run it as it was begun, or "
                    "delete that directory"
                )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if isinstance(error, OSError):
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            text = f"no space left while writing {self.root}: free some" if full else os_error(error)
            raise CheckpointError(f"{text}; run the same command again to resume") from error

    def weights(self, source: Path, name: str, *, copy: bool) -> None:
        """Take a weight file over as it is: as a hard link, or as a copy where there can be none.

        Args:
            source: the file; a symbolic link is followed.
            name: in OUT.
            copy: never link.
        """
        target = self._target(name)
        size = source.stat().st_size
        if target.exists():
            self._count(target, size)
            return
        if not copy:
            try:
                os.link(source.resolve(), target)
                self._count(target, size)
                return
            except OSError as error:
                if error.errno not in _CANT_LINK:
                    raise
        self._require_space(size)
        self._copy(source, target)
        self._count(target, size)

    def other_file(self, source: Path, name: str) -> None:
        """Copy a small file, which a user may edit in one place and not in the other."""
        self._copy(source, self._target(name))

    def json_file(self, name: str, data: bytes) -> None:
        """Write a file of our own."""
        write_durably(self._target(name), data)

    def tensors(self, entries: Sequence[TensorEntry], name: str) -> None:
        """Write some tensors of another file into one of their own, byte by byte.

        Args:
            entries: of one source file.
            name: in OUT.
        """
        target = self._target(name)
        ordered = sorted(entries, key=lambda entry: -ITEM_SIZES.get(entry.dtype, 1))  # wide first: all are aligned
        header, offsets = header_bytes((e.name, e.dtype, e.shape, e.nbytes) for e in ordered)
        size = len(header) + sum(entry.nbytes for entry in ordered)
        if target.exists():
            self.written.copied += size
            return
        self._require_space(size)
        temporary = target.with_name(target.name + _TEMPORARY)
        with ordered[0].path.open("rb") as source, temporary.open("wb") as file:
            file.write(header)
            for entry in ordered:
                assert file.tell() == offsets[entry.name]
                source.seek(entry.begin)
                left = entry.nbytes
                while left:
                    data = source.read(min(_BUFFER, left))
                    if not data:
                        raise CheckpointError(f"{entry.path} ended at byte {source.tell()}: it was truncated meanwhile")
                    file.write(data)
                    left -= len(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        self.written.copied += size

    def publish(self) -> None:
        """Turn what was put together into OUT.

        Raises:
            CheckpointError: something else lies in OUT.partial, or OUT appeared meanwhile.
        """
        folders = [path for path in sorted(self.root.rglob("*")) if path.is_dir()]
        files = {str(path.relative_to(self.root)) for path in self.root.rglob("*") if not path.is_dir()}
        for name in sorted(files - self._names - {_MARK}):
            if not name.endswith((_TEMPORARY, ".tmp")):
                raise CheckpointError(f"{self.root} holds {name}, which isn't part of OUT: move it and run this again")
            (self.root / name).unlink()  # a killed run's
        for folder in [*folders, self.root]:
            sync_directory(folder)
        if os.path.lexists(self.destination):
            raise CheckpointError(f"OUT {self.destination} appeared meanwhile; {self.root} is kept")
        self.root.rename(self.destination)
        sync_directory(self.destination.parent)
        with contextlib.suppress(OSError):
            (self.destination / _MARK).unlink()

    def _target(self, name: str) -> Path:
        self._names.add(name)
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _copy(self, source: Path, target: Path) -> None:
        temporary = target.with_name(target.name + _TEMPORARY)
        shutil.copyfile(source, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)

    def _count(self, target: Path, size: int) -> None:
        if target.stat().st_nlink > 1:
            self.written.linked += size
        else:
            self.written.copied += size

    def _require_space(self, size: int) -> None:
        available = shutil.disk_usage(self.root).free
        if size > available:
            raise CheckpointError(
                f"not enough space for OUT {self.destination}: {size / 1e9:.2f} GB needed for the next file, "
                f"{available / 1e9:.2f} GB available; free some and run the same command again to resume"
            )
