"""Loads, stores and reductions that order the memory around them, at the scope of one GPU or of the whole system.

A flag protocol in three rules: write the data, then `store_release` (or `red_add_release`) the flag; the reader polls
with `load_acquire` and reads the data once it saw the flag; "sys" where the other side is another GPU or the host,
"gpu" otherwise. The flag's thread speaks for its block only after a `sync_threads`.
"""

import cutlass.cute as cute

SCOPES = ("gpu", "sys")


def load_acquire(pointer, dtype, *, scope: str):
    """Loads a number; what its writer wrote before releasing it is visible afterwards.

    Args:
        pointer: global memory, aligned to dtype.
        dtype: a 32- or 64-bit DSL type.
        scope: "gpu" or "sys".
    """
    _check(scope)
    return cute.arch.load(pointer, dtype, sem="acquire", scope=scope)


def load_relaxed(pointer, dtype, *, scope: str):
    """Loads a number others may be writing, past L1, ordering nothing."""
    _check(scope)
    return cute.arch.load(pointer, dtype, sem="relaxed", scope=scope)


def store_release(pointer, value, *, scope: str) -> None:
    """Stores a DSL number; everything this thread wrote, or saw written, before is visible to whoever acquires it."""
    _check(scope)
    cute.arch.store(pointer, value, sem="release", scope=scope)


def red_add_release(pointer, value, *, scope: str) -> None:
    """Adds a DSL integer to memory with release order, and doesn't wait for the old value."""
    _check(scope)
    cute.arch.red(pointer, value, op="add", dtype=type(value), sem="release", scope=scope)


def add_acq_rel(pointer, value, *, scope: str):
    """Adds a DSL integer to memory, both releasing and acquiring, and returns the old value."""
    _check(scope)
    return cute.arch.atomic_add(pointer, value, sem="acq_rel", scope=scope)


def _check(scope: str) -> None:
    if scope not in SCOPES:
        raise ValueError(f"memory scope {scope!r}; it must be one of {SCOPES}")
