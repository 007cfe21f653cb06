"""Where a command that makes a checkpoint may write."""

from collections.abc import Mapping
from pathlib import Path

from vllm_rose_plugin.checkpoint.headers import CheckpointError


def require_place(destination: Path, place: str, *, sources: Mapping[str, Path]) -> Path:
    """Look whether a directory can be made, before anything is read; nothing is made or removed.

    A destination that exists is the caller's affair: it may be its own, of an interrupted run.

    Args:
        destination: the directory to make.
        place: what the command line calls it, such as DST.
        sources: directories that are read, by what the command line calls them.

    Returns:
        Beside it, where work is kept.

    Raises:
        CheckpointError: it can't be made, or it and a source lie in one another.
    """
    if destination.is_symlink():
        raise CheckpointError(f"{place} {destination} is a symbolic link: give a new directory, or remove it")
    if destination.name in ("", ".."):
        raise CheckpointError(f"{place} {destination} exists: give a new directory")
    if not destination.parent.is_dir():
        raise CheckpointError(f"{place} {destination}: its parent {destination.parent} is not a directory")
    root = destination.with_name(destination.name + ".partial")
    there, work = destination.resolve(), root.resolve()
    for name, source in sources.items():
        here = source.resolve()
        if here == there:
            raise CheckpointError(f"{name} and {place} are the same directory: {source}")
        if here in there.parents:
            raise CheckpointError(f"{place} {destination} lies inside {name} {source}: give a directory outside of it")
        if there in here.parents:
            raise CheckpointError(f"{name} {source} lies inside {place} {destination}: give a new directory")
        if work == here or work in here.parents or here in work.parents:
            raise CheckpointError(f"{name} {source} is {root}, or lies in it, where work is kept: give another {place}")
    root.is_dir()  # raises where the name is too long for the file system
    return root


def os_error(error: OSError) -> str:
    """An operating system's error in one line."""
    name = f": {error.filename}" if error.filename else ""
    return f"{type(error).__name__}: {error.strerror or error}{name}"
