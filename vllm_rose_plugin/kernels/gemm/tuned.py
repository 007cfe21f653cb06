"""Configs that were measured to be faster than the heuristic's, on this device: a table on disk, read once per process.

One JSON file per kind of device under ``tuned/`` of the cache folder. It holds for the plugin's version, the kernels'
sources and the compiler it was measured with; the driver may change. Imports neither torch nor cutlass.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from vllm_rose_plugin import __version__
from vllm_rose_plugin.kernels.contracts import Rounding
from vllm_rose_plugin.kernels.gemm.call import Call, heuristic
from vllm_rose_plugin.kernels.gemm.candidates import Config, with_free_fields
from vllm_rose_plugin.kernels.jit.compile import compiler_settings, compiler_versions
from vllm_rose_plugin.kernels.jit.fingerprint import sources_of_modules, stable_text
from vllm_rose_plugin.kernels.jit.store import TUNED, acquire, cache_folder, warn_once

logger = logging.getLogger(__name__)

GAIN = 1.03
"""A choice must be faster than the heuristic's config by this factor: less may be chance."""
_KERNELS = ("vllm_rose_plugin.kernels.gemm.sm90", "vllm_rose_plugin.kernels.gemm.sm100")


@dataclass(frozen=True)
class Choice:
    """What was measured for a call and a bucket of tokens."""

    fields: dict[str, int | bool]
    """Free fields of the best config; the heuristic's own where none was faster."""
    heuristic_us: float
    choice_us: float

    @property
    def counts(self) -> bool:
        """Whether it is used."""
        return self.choice_us * GAIN < self.heuristic_us


def bucket(num_groups: int, expected_rows: int) -> tuple[int, int]:
    """The least and the most rows, over all groups, that share a choice with expected_rows.

    Up to one token for each group, most rows are a power of two; from there on they are 2, 3, 4, 6, 8, 12 … tokens of a
    group, where the tiles of tokens end too.
    """
    if expected_rows <= num_groups:
        most = 1 << (expected_rows - 1).bit_length()
        return most // 2 + 1, min(most, num_groups)
    mean = -(-expected_rows // num_groups)
    power = 1 << (mean - 1).bit_length()
    between = power * 3 // 4
    if power >= 4 and mean <= between:
        return power // 2 * num_groups + 1, between * num_groups
    return (between if power >= 4 else power // 2) * num_groups + 1, power * num_groups


def config(call: Call, expected_rows: int) -> Config | None:
    """What is used in place of the heuristic's config; None: nothing, or there is no device that it was measured on."""
    device = device_name()
    if not device or call.batch_invariant:
        return None
    return next(iter(_configs(call, bucket(call.num_groups, expected_rows)[1], device)), None)


def configs(call: Call, expected_rows: int) -> tuple[Config, ...]:
    """What may be used: on a device :func:`config`, without one what the tables of all devices say."""
    if call.batch_invariant:
        return ()
    return _configs(call, bucket(call.num_groups, expected_rows)[1], device_name())


def measured(call: Call, expected_rows: int) -> Choice | None:
    """What the table of this device has for a call, whether or not it is used."""
    device = device_name()
    if not device:
        return None
    (table,) = _tables(device)
    return table.get(_key(call, bucket(call.num_groups, expected_rows)[1]))


def record(call: Call, expected_rows: int, choice: Choice) -> None:
    """Put a measurement on this device into its table, here and on disk; a disk that refuses costs one warning."""
    device = device_name()
    if not device:
        raise RuntimeError("nothing can have been measured: torch has no CUDA device in this process")
    key = _key(call, bucket(call.num_groups, expected_rows)[1])
    _recorded.setdefault(device, {})[key] = choice
    try:
        _write(device, key, choice)
    except OSError as error:
        warn_once(f"can't write tuned choices to {cache_folder()} ({error.strerror}): every start measures again")
    forget()


def digest() -> str:
    """Of the choices that this process uses, empty where there are none: which kernels run depends on it."""
    device = device_name()
    if not device:
        return ""
    (table,) = _tables(device)
    used = {key: choice.fields for key, choice in table.items() if choice.counts}
    return _sha256(used) if used else ""


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """One process of a machine measures, the others wait, up to two minutes, and then read what it found."""
    path, handle = _path(device_name()), None
    if path is not None:
        with contextlib.suppress(OSError):  # record() says what is wrong
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = acquire(path.with_suffix(".measuring.lock"))
    try:
        forget()
        yield
    finally:
        if handle is not None:
            os.close(handle)


def device_name() -> str:
    """Of torch's current CUDA device, where this process uses one already; else empty. Creates no CUDA context."""
    torch = sys.modules.get("torch")
    return torch.cuda.get_device_name() if torch is not None and torch.cuda.is_initialized() else ""


# ---- what is kept in memory ----

_recorded: dict[str, dict[str, Choice]] = {}
"""Device to what this process measured; it stays where the disk refuses."""
_followers: list[Callable[[], None]] = []

Cached = TypeVar("Cached", bound=Callable[..., Any])


def follows_table(cached: Cached) -> Cached:
    """A function with a cache of its own (``functools.lru_cache``), which is emptied whenever choices change."""
    on_change(cached.cache_clear)  # type: ignore[attr-defined]
    return cached


def on_change(call: Callable[[], None]) -> None:
    """Have something called whenever choices change."""
    _followers.append(call)


def forget() -> None:
    """Read the disk again at the next look."""
    for follower in _followers:
        follower()


@follows_table
@functools.lru_cache(maxsize=4096)
def _configs(call: Call, most_rows: int, device: str) -> tuple[Config, ...]:
    key, found = _key(call, most_rows), []
    for choice in (table[key] for table in _tables(device) if key in table):
        if choice.counts:
            try:
                found.append(with_free_fields(heuristic(call, most_rows), choice.fields, target=call.target))
            except ValueError as error:
                logger.warning("a tuned choice for %s is ignored: %s", key, error)
    return tuple(dict.fromkeys(found))


@functools.lru_cache(maxsize=4096)
def _key(call: Call, most_rows: int) -> str:
    # How a result is rounded or limited changes no speed.
    same = replace(call, rounding=Rounding.RCEIL, limit=None, batch_invariant=False)
    return f"{stable_text(same, where='a call')} up to {most_rows} rows"


@follows_table
@functools.cache
def _tables(device: str) -> tuple[dict[str, Choice], ...]:
    """The table of a device; without one, those of all devices."""
    path = _path(device)
    if path is not None:
        return ({**_read(path), **_recorded.get(device, {})},)
    folder = cache_folder()
    if device or folder is None:
        return (_recorded.get(device, {}),)
    return tuple(map(_read, sorted((folder / TUNED).glob("*.json"))))


# ---- what is kept on disk ----


def _path(device: str) -> Path | None:
    folder = cache_folder()
    return folder / TUNED / f"{re.sub(r'[^A-Za-z0-9]+', '_', device)}.json" if folder and device else None


@functools.cache
def fingerprint() -> str:
    """What a table must have been measured with."""
    return f"{__version__} {sources_of_modules(*_KERNELS).digest} {compiler_versions()} {compiler_settings()}"


def _read(path: Path) -> dict[str, Choice]:
    try:
        found = json.loads(path.read_text())
        choices = {key: Choice(**values) for key, values in found["choices"].items()}
        whole = found["checksum"] == _sha256(found["choices"])
        stale = found["fingerprint"] != fingerprint()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        whole = stale = False
    if whole and not stale:
        return choices
    reason = "it was measured with other kernels" if stale else "it is damaged or can't be read"
    logger.warning("tuned choices in %s are not used, %s: `rose tune` measures anew", path, reason)
    return {}


def _write(device: str, key: str, choice: Choice) -> None:
    path = _path(device)
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = acquire(path.with_suffix(".lock"))
    try:
        known = _read(path) if path.exists() else {}
        choices = {key: asdict(each) for key, each in {**known, key: choice}.items()}
        content = {"device": device, "fingerprint": fingerprint(), "choices": choices, "checksum": _sha256(choices)}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".new-", delete=False) as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, path)
    finally:
        if handle is not None:
            os.close(handle)


def clear_tuned(folder: Path) -> int:
    """Remove the tables of a cache folder; returns how many."""
    paths = list((folder / TUNED).glob("*.json"))
    for path in (*paths, *(folder / TUNED).glob("*.lock")):
        path.unlink(missing_ok=True)
    return len(paths)


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
