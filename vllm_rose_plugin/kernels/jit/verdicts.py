"""What a self-check found, kept on disk: one JSON file per family and situation."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_rose_plugin.kernels.jit.store import acquire, cache_folder, warn_once

VERDICTS = "verdicts"
"""Folder under the cache folder."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one self-check."""

    provider: str
    """The one to use."""
    microseconds: dict[str, list[float]]
    """Provider that passed to its time at each shape that was timed; empty where nothing was."""
    failed: dict[str, str]
    """Provider that failed to the reason."""


class VerdictFile:
    """Where the verdict for one situation lies.

    Args:
        family: such as ``"qk_norm"``.
        situation: everything the verdict depends on, as text.
    """

    def __init__(self, *, family: str, situation: str) -> None:
        self._situation = situation
        folder = cache_folder()
        digest = hashlib.sha256(situation.encode()).hexdigest()[:32]
        self._path = folder / VERDICTS / f"{family}-{digest}.json" if folder else None

    def read(self) -> Verdict | None:
        """The verdict, None where there is none that can be trusted."""
        if self._path is None:
            return None
        try:
            found = json.loads(self._path.read_text())
            verdict = Verdict(**found["verdict"])
            whole = found["situation"] == self._situation and found["checksum"] == _checksum(verdict, self._situation)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return verdict if whole else None

    def write(self, verdict: Verdict) -> None:
        """Keep a verdict; a disk that refuses costs one warning."""
        if self._path is None:
            return
        text = json.dumps(
            {
                "situation": self._situation,
                "verdict": asdict(verdict),
                "checksum": _checksum(verdict, self._situation),
            },
            indent=1,
        )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, prefix=".new-", delete=False) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(file.name, self._path)
        except OSError as error:
            warn_once(f"can't write verdicts to {self._path.parent} ({error.strerror}): every start checks again")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process of a machine checks, the others wait and read: they all use the same provider."""
        handle = None
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                handle = acquire(self._path.with_suffix(".lock"))
            except OSError as error:
                warn_once(f"can't write verdicts to {self._path.parent} ({error.strerror}): every start checks again")
        try:
            yield
        finally:
            if handle is not None:
                os.close(handle)


def clear_verdicts(*, folder: Path, family: str | None) -> int:
    """Remove the verdicts of a family, or all, from a cache folder; returns how many."""
    paths = list((folder / VERDICTS).glob(f"{family or '*'}-*.json"))
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def _checksum(verdict: Verdict, situation: str) -> str:
    return hashlib.sha256(f"{situation}\0{json.dumps(asdict(verdict), sort_keys=True)}".encode()).hexdigest()
