"""What a compiled kernel depends on, as text: its config, the sources behind it, and the host it was built on."""

import ast
import dataclasses
import enum
import functools
import hashlib
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

_CODEGEN_FLAG = re.compile(
    r"(sse|ssse|avx|amx|fma|bmi|f16c|xop|tbm|adx|sha|sm[34]$|vaes|vpclmul|gfni|movbe|popcnt|abm|lzcnt|cx16|lahf|pclmul|aes)"
)
"""The flags of /proc/cpuinfo that name instructions a compiler picks by itself, on x86."""


def config_text(config: object) -> str:
    """A text that two configs share only if the same code comes out of them.

    Args:
        config: a frozen dataclass of bools, ints, floats, strings, None, enums, dtypes, classes, tuples of these and
            frozen dataclasses of these.

    Raises:
        TypeError: for anything else, naming the field. Also for ``1`` in a field annotated ``float`` and the like:
            Python calls them equal and a compiler doesn't.
    """
    if not _is_frozen_dataclass(config):
        raise TypeError(f"a kernel config must be a frozen dataclass, got {type(config).__qualname__}")
    return stable_text(config, where=type(config).__qualname__)


def _is_frozen_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and value.__dataclass_params__.frozen  # type: ignore[attr-defined]


def stable_text(value: object, *, where: str) -> str:
    """As :func:`config_text`, of any value that a config may hold; ``where`` names it in errors."""
    if _is_frozen_dataclass(value):
        parts = []
        for field in dataclasses.fields(value):  # type: ignore[arg-type]
            item, spot = getattr(value, field.name), f"{where}.{field.name}"
            annotation = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")
            if annotation in ("bool", "int", "float", "str") and type(item).__name__ != annotation:
                raise TypeError(f"{spot} is {item!r}, a {type(item).__name__}; the field is annotated {annotation}")
            parts.append(f"{field.name}={stable_text(item, where=spot)}")
        return f"{type(value).__qualname__}({', '.join(parts)})"
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    if type(value) is tuple:
        return f"({', '.join(stable_text(item, where=where) for item in value)})"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value)
    raise TypeError(f"{where} holds a {type(value).__qualname__}, which has no stable text for a cache key")


@dataclasses.dataclass(frozen=True)
class Sources:
    """The files behind a kernel."""

    digest: str
    files: tuple[str, ...]
    newest: float
    """Latest modification time, in seconds of the epoch."""


def sources_of(function: Callable) -> Sources:
    """The module that defines ``function`` and whatever it imports from its own package or from this one, at any depth.

    Imports are read from the text, also those inside functions, so nothing is imported to find them. Packages that
    come with a version (torch, cutlass) are not followed: their versions belong into the key.
    """
    start = Path(sys.modules[function.__module__].__file__ or "").resolve()
    top = function.__module__.partition(".")[0]
    folders = {top: start.parents[function.__module__.count(".") + (start.name == "__init__.py")], _OWN: _OWN_FOLDER}
    return _sources([start], folders)


def sources_of_modules(*names: str) -> Sources:
    """As :func:`sources_of`, of modules of this package, which are not imported.

    Args:
        names: such as ``"vllm_rose_plugin.kernels.gemm.sm90"``.
    """
    starts = [_OWN_FOLDER.joinpath(*name.split(".")).with_suffix(".py") for name in names]
    return _sources(starts, {_OWN: _OWN_FOLDER})


def _sources(starts: list[Path], folders: dict[str, Path]) -> Sources:
    found, waiting = set(starts), list(starts)
    while waiting:
        for path in _imports(waiting.pop(), folders):
            if path not in found:
                found.add(path)
                waiting.append(path)
    digest, names = hashlib.sha256(), []
    for path in sorted(found):
        folder = next(folder for folder in folders.values() if path.is_relative_to(folder))
        names.append(str(path.relative_to(folder)))
        text = path.read_bytes()
        digest.update(f"{names[-1]}\0{len(text)}\0".encode() + text)
    return Sources(digest.hexdigest(), tuple(names), max(path.stat().st_mtime for path in found))


_OWN = __name__.partition(".")[0]
_OWN_FOLDER = Path(__file__).resolve().parents[__name__.count(".")]


def _imports(path: Path, folders: dict[str, Path]) -> Iterator[Path]:
    for level, dotted in _import_names(path, path.stat().st_mtime_ns):
        if level:
            stem = path.parents[level - 1].joinpath(*dotted.split("."))
        elif (top := dotted.partition(".")[0]) in folders:
            stem = folders[top].joinpath(*dotted.split("."))
        else:
            # A script or a lone test module finds its neighbours by their bare names.
            stem = path.parent.joinpath(*dotted.split("."))
        for candidate in (stem.with_suffix(".py"), stem / "__init__.py"):
            if candidate.is_file():
                yield candidate.resolve()


@functools.cache
def _import_names(path: Path, modified: int) -> tuple[tuple[int, str], ...]:
    """(level, dotted name) of every import in a file; ``from a import b`` gives both a and a.b."""
    del modified  # a part of the cache's key
    names = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names.append((node.level, module))
            names += [(node.level, f"{module}.{alias.name}".lstrip(".")) for alias in node.names]
    return tuple(names)


@functools.cache
def host_features() -> tuple[str, frozenset[str]]:
    """Machine architecture and the CPU's instruction sets.

    Where the host half of an object file was built for the CPU it was built on (see portable.py), such a file must not
    be loaded on a CPU that lacks one of them.
    """
    machine = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return machine, frozenset()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    if machine == "x86_64":
        flags = [flag for flag in flags if _CODEGEN_FLAG.match(flag)]
    return machine, frozenset(flags)
