"""Ship a warm cache: kernels, verdicts and tuned choices in one tar file, checked at both ends."""

import io
import json
import os
import re
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from vllm_rose_plugin.kernels.jit.store import TUNED, Store
from vllm_rose_plugin.kernels.jit.verdicts import VERDICTS

_OBJECT = re.compile(r"kernels/([A-Za-z_][A-Za-z0-9_]*)/([0-9a-f]{32})\.(o|json)")
_TABLE = re.compile(rf"{TUNED}/[A-Za-z0-9_]+\.json")
_VERDICT = re.compile(rf"{VERDICTS}/[A-Za-z_][A-Za-z0-9_]*-[0-9a-f]{{32}}\.json")


@dataclass
class Report:
    """What went into an archive, or came out of it."""

    kernels: int = 0
    verdicts: int = 0
    tables: int = 0
    """Of tuned choices, one for each kind of device."""
    left_out: list[str] = field(default_factory=list)
    """``name: why``."""


def export_cache(*, folder: Path, archive: Path) -> Report:
    """Write the usable kernels, the verdicts and the tuned choices under a cache folder into a tar file.

    Args:
        folder: the cache folder, ``ROSE_CACHE_DIR``.
        archive: the tar file; compressed where its name ends in ``.gz``.

    Raises:
        OSError: the archive can't be written.
    """
    report = Report()
    with tarfile.open(archive, "w:gz" if archive.suffix == ".gz" else "w") as tar:
        for entry in Store(folder / "kernels").entries():
            if entry.fault:
                report.left_out.append(f"{entry.path.name}: {entry.fault}")
                continue
            for path in (entry.path, entry.path.with_suffix(".json")):
                _add(tar, path, folder)
            report.kernels += 1
        for path in sorted((folder / VERDICTS).glob("*.json")):
            _add(tar, path, folder)
            report.verdicts += 1
        for path in sorted((folder / TUNED).glob("*.json")):
            _add(tar, path, folder)
            report.tables += 1
    return report


def _add(tar: tarfile.TarFile, path: Path, folder: Path) -> None:
    content = path.read_bytes()
    member = tarfile.TarInfo(str(path.relative_to(folder)))  # no owner, no date: the same cache gives the same tar
    member.size, member.mode = len(content), 0o644
    tar.addfile(member, io.BytesIO(content))


def import_cache(*, folder: Path, archive: Path) -> Report:
    """Take the kernels, verdicts and tuned choices of an archive into a cache folder, each checked as at a load.

    Args: as in :func:`export_cache`.

    Raises:
        OSError: the archive can't be read or the folder can't be written.
        tarfile.TarError: it is no tar file, or a truncated one.
    """
    report = Report()
    store = Store(folder / "kernels")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".import-") as scratch:
        unpacked = Path(scratch)
        with tarfile.open(archive) as tar:
            for member in tar:
                known = any(pattern.fullmatch(member.name) for pattern in (_OBJECT, _VERDICT, _TABLE))
                if not member.isfile() or not known:
                    report.left_out.append(f"{member.name}: not a file of a kernel cache")
                    continue
                content = tar.extractfile(member)
                assert content is not None  # isfile() said so
                path = unpacked / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())
        for entry in Store(unpacked / "kernels").entries():
            if entry.fault:
                report.left_out.append(f"{entry.path.name}: {entry.fault}")
                continue
            (store.folder / entry.path.parent.name).mkdir(parents=True, exist_ok=True)
            store.publish(entry.path)
            report.kernels += 1
        report.verdicts = _take(unpacked / VERDICTS, folder / VERDICTS, report)
        report.tables = _take(unpacked / TUNED, folder / TUNED, report)
    return report


def _take(source: Path, target: Path, report: Report) -> int:
    """Move JSON files to their place; returns how many. Whoever reads one checks what it says."""
    taken = 0
    for path in sorted(source.glob("*.json")):
        try:
            json.loads(path.read_text())
        except ValueError:
            report.left_out.append(f"{path.name}: damaged")
            continue
        target.mkdir(exist_ok=True)
        os.replace(path, target / path.name)
        taken += 1
    return taken
