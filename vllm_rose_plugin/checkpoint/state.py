"""The state of a conversion on disk: who works on it, what it was asked for, which shards are done."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import IO, Any

from vllm_rose_plugin.checkpoint.headers import CheckpointError


def write_durably(path: Path, data: bytes) -> None:
    """Write a file so that it is there in full or not at all, also after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class WorkDirectory:
    """``DST.partial``: a lock, the plan's fingerprint, a manifest per finished shard, and the checkpoint in the making.

    The checkpoint's own directory gets config.json last and is then renamed to DST, so DST is absent or complete, and
    what lies in DST.partial never loads.
    """

    def __init__(self, destination: Path) -> None:
        self.destination = destination
        self.root = destination.with_name(destination.name + ".partial")
        self.checkpoint = self.root / "checkpoint"
        self._plan = self.root / "plan.json"
        self._lock: IO[str] | None = None
        self._begun = False

    def acquire(self) -> None:
        """Make the directory and lock it.

        Raises:
            CheckpointError: another converter holds the lock.
        """
        if self.root.exists() and not self.root.is_dir():
            raise CheckpointError(f"{self.root} is in the way: it is not a directory")
        self.root.mkdir(parents=True, exist_ok=True)
        try:
            lock = (self.root / "lock").open("a")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.fstat(lock.fileno()).st_nlink > 0  # else its owner finished and removed it meanwhile
        except (BlockingIOError, FileNotFoundError):
            held = False
        if not held:
            raise CheckpointError(f"another rose quantize is writing {self.destination} (it holds {self.root}/lock)")
        self._lock = lock

    def release(self) -> None:
        """Give up the lock, and the directory too if it is ours and holds no finished shard."""
        if self._lock is not None:
            if self._begun and not any(self.root.glob("*.done.json")):
                self.discard()
            self._lock.close()
            self._lock = None

    def discard(self) -> None:
        """Remove everything; the lock is held, so nobody else works here. The plan goes last: it says what this was."""
        shutil.rmtree(self.checkpoint, ignore_errors=True)
        with contextlib.suppress(OSError):
            for path in [*self.root.glob("*.done.json"), *self.root.glob("*.tmp"), self.root / "lock", self._plan]:
                path.unlink(missing_ok=True)
            self.root.rmdir()

    def begin(self, fingerprint: dict[str, Any]) -> bool:
        """Start, or check that what was started is the same conversion.

        Returns:
            Whether this resumes an earlier run.

        Raises:
            CheckpointError: it was started with other options or from another source.
        """
        if not self._plan.exists():
            self.checkpoint.mkdir(exist_ok=True)  # first: a plan without it means that the rename has happened
            write_durably(self._plan, json.dumps(fingerprint).encode())
            self._begun = True
            return False
        try:
            begun = json.loads(self._plan.read_text())
        except ValueError:
            begun = {}
        for key, value in fingerprint.items():
            if begun.get(key) != value:
                was, now = (v[0] if key == "the source" and v else v for v in (begun.get(key), value))
                change = f"{key} was {was!r} and is now {now!r}" if was != now else f"{key} {now} has changed since"
                raise CheckpointError(
                    f"{self.root} holds an unfinished conversion, but {change}: run it with what it was begun with, "
                    "or delete that directory"
                )
        self._begun = True
        return True

    def remove_if_empty(self) -> None:
        """Remove what a run leaves that was killed in its very last step."""
        with contextlib.suppress(OSError):
            self.root.rmdir()

    def is_renamed(self) -> bool:
        """Whether an earlier run ended between the final rename and its clean-up."""
        return self._plan.exists() and not self.checkpoint.exists() and self.destination.exists()

    def finished(self, *, shard: str, size: int, header: bytes) -> dict[str, Any] | None:
        """The manifest of a shard that is complete and is the one that the plan wants, else None."""
        path = self.checkpoint / shard
        try:
            manifest: dict[str, Any] = json.loads(self._manifest(shard).read_text())
            with path.open("rb") as file:
                same = file.read(len(header)) == header and os.fstat(file.fileno()).st_size == size
        except (OSError, ValueError):
            return None
        return manifest if same and manifest.get("header") == hashlib.sha256(header).hexdigest() else None

    def finished_layers(self, shard: str) -> dict[str, Any] | None:
        """What :meth:`finish` recorded; None where it is gone."""
        try:
            layers: dict[str, Any] = json.loads(self._manifest(shard).read_text())["layers"]
        except FileNotFoundError:
            return None
        return layers

    def finish(self, *, shard: str, header: bytes, layers: dict[str, Any]) -> None:
        """Record that a shard's data are on disk (the caller has synced the file)."""
        sync_directory(self.checkpoint)
        manifest = {"header": hashlib.sha256(header).hexdigest(), "layers": layers}
        write_durably(self._manifest(shard), json.dumps(manifest).encode())

    def publish(self) -> None:
        """Turn the finished checkpoint into DST.

        Raises:
            CheckpointError: DST appeared meanwhile.
        """
        sync_directory(self.checkpoint)
        if self.destination.exists():
            raise CheckpointError(f"DST {self.destination} appeared during the conversion; {self.root} is kept")
        self.checkpoint.rename(self.destination)
        sync_directory(self.destination.parent)
        self.discard()

    def _manifest(self, shard: str) -> Path:
        return self.root / f"{shard}.done.json"

    def allocated(self, shard: str) -> int:
        """Bytes on disk of a shard that will be written anew."""
        with contextlib.suppress(OSError):
            return (self.checkpoint / shard).stat().st_blocks * 512
        return 0
