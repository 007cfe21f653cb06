"""The state of a conversion on disk: who works on it, what it was asked for, which shards are done."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from vllm_rose_plugin.checkpoint.headers import CheckpointError

_SHARD = re.compile(r"^model-\d{5,}-of-\d{5,}\.safetensors$")
_RECORD = re.compile(r"^(model-\d{5,}-of-\d{5,}\.safetensors\.done\.json|plan\.json)(\.tmp)?$")


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


def _is_shard(path: Path, size: int, header: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(header)) == header and os.fstat(file.fileno()).st_size == size
    except OSError:
        return False


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
            CheckpointError: another converter holds the lock, or the place holds what no converter wrote.
        """
        if self.root.is_symlink() or (self.root.exists() and not self.root.is_dir()):
            raise CheckpointError(f"{self.root} is in the way: it is not a directory")
        self._require_ours()
        self.root.mkdir(exist_ok=True)
        try:
            lock = (self.root / "lock").open("a")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.fstat(lock.fileno()).st_nlink > 0  # else its owner finished and removed it meanwhile
        except (BlockingIOError, FileNotFoundError):
            held = False
        if not held:
            raise CheckpointError(f"another rose quantize is writing {self.destination} (it holds {self.root}/lock)")
        self._lock = lock

    def _require_ours(self) -> None:
        """Refuse a directory that somebody keeps other things in: it would be built in and cleaned up."""
        found = sorted(path.name for path in self.root.iterdir()) if self.root.exists() else []
        if not found or self._read_plan() is not None:
            return
        # Killed before the plan was written: the lock is there, and nothing in the checkpoint's directory yet.
        empty = not self.checkpoint.exists() or (self.checkpoint.is_dir() and not any(self.checkpoint.iterdir()))
        if "lock" in found and set(found) <= {"lock", "checkpoint", "plan.json.tmp"} and empty:
            return
        other = next((name for name in found if name not in ("lock", "checkpoint")), found[0])
        raise CheckpointError(
            f"{self.root} is in the way: it holds {other} and no plan.json of rose quantize, which works there "
            "while it writes DST; move it or give another DST"
        )

    def _read_plan(self) -> dict[str, Any] | None:
        """The plan that an earlier run wrote; None where there is none, or a file that is not one of ours."""
        try:
            plan = json.loads(self._plan.read_text())
        except (OSError, ValueError, RecursionError):
            return None
        return plan if isinstance(plan, dict) and "vllm_rose_plugin" in plan else None

    def release(self) -> None:
        """Give up the lock, and the directory too if it is ours and holds no finished shard."""
        if self._lock is not None:
            if self._begun and not any(self.root.glob("*.done.json")):
                self.discard()
            self._lock.close()
            self._lock = None

    def discard(self) -> None:
        """Remove what a converter wrote, by its names, and the directories if nothing else is in them.

        The lock is held, so nobody else works here. The plan goes last: it says what this was.
        """
        with contextlib.suppress(OSError):
            if self.checkpoint.exists():
                for path in self.checkpoint.iterdir():
                    if _SHARD.match(path.name):
                        path.unlink()
                self.checkpoint.rmdir()
            records = [path for path in self.root.iterdir() if _RECORD.match(path.name) and path != self._plan]
            for path in [*records, self.root / "lock", self._plan]:
                path.unlink(missing_ok=True)
            self.root.rmdir()

    def begin(self, fingerprint: dict[str, Any]) -> bool:
        """Start, or check that what was started is the same conversion.

        Returns:
            Whether this resumes an earlier run.

        Raises:
            CheckpointError: it was started with other options or from another source.
        """
        begun = self._read_plan()
        if begun is not None and not self.checkpoint.exists() and not os.path.lexists(self.destination):
            # Its DST was published and is gone since, or it was killed while it gave up: nothing is left to resume.
            self._forget()
            begun = None
        if begun is None:
            self.checkpoint.mkdir(exist_ok=True)  # first: a plan without it means that the rename has happened
            write_durably(self._plan, json.dumps(fingerprint).encode())
            self._begun = True
            return False
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

    def _forget(self) -> None:
        """Remove the records of an earlier run, the plan last."""
        records = [path for path in self.root.iterdir() if _RECORD.match(path.name) and path != self._plan]
        for path in [*records, self._plan]:
            path.unlink()

    def remove_if_empty(self) -> None:
        """Remove what a run leaves that was killed in its very last step: the empty directory, beside its DST."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            if "vllm_rose_plugin" in (self.destination / "config.json").read_text(encoding="utf-8"):
                self.root.rmdir()

    def is_renamed(self) -> bool:
        """Whether an earlier run ended between the final rename and its clean-up."""
        return self._read_plan() is not None and not self.checkpoint.exists() and self.destination.is_dir()

    def is_published(self, shards: Iterable[tuple[str, int, bytes]]) -> bool:
        """Whether DST holds the shards ``(name, size, header)`` of a plan, and is not another directory."""
        return (self.destination / "config.json").is_file() and all(
            _is_shard(self.destination / name, size, header) for name, size, header in shards
        )

    def finished(self, *, shard: str, size: int, header: bytes) -> dict[str, Any] | None:
        """The manifest of a shard that is complete and is the one that the plan wants, else None."""
        try:
            manifest: dict[str, Any] = json.loads(self._manifest(shard).read_text())
        except (OSError, ValueError):
            return None
        same = _is_shard(self.checkpoint / shard, size, header)
        same = same and "scales" in manifest  # else written before checksums were kept
        return manifest if same and manifest.get("header") == hashlib.sha256(header).hexdigest() else None

    def recorded(self, shard: str, what: str) -> dict[str, Any] | None:
        """The ``layers`` or ``scales`` that :meth:`finish` recorded; None where they are gone."""
        try:
            record: dict[str, Any] = json.loads(self._manifest(shard).read_text())[what]
        except (FileNotFoundError, KeyError):
            return None
        return record

    def finish(self, *, shard: str, header: bytes, layers: dict[str, Any], scales: dict[str, str]) -> None:
        """Record that a shard's data are on disk (the caller has synced the file).

        Args:
            shard: its name.
            header: its first bytes, by which a later run knows it again.
            layers: the error of each layer.
            scales: the checksum of each scale tensor.
        """
        sync_directory(self.checkpoint)
        manifest = {"header": hashlib.sha256(header).hexdigest(), "layers": layers, "scales": scales}
        write_durably(self._manifest(shard), json.dumps(manifest).encode())

    def publish(self) -> None:
        """Turn the finished checkpoint into DST.

        Raises:
            CheckpointError: DST appeared meanwhile.
        """
        sync_directory(self.checkpoint)
        if os.path.lexists(self.destination):
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
