"""How often each op ran in this process, and which provider served it.

Counts are taken inside the ops, so compiled graphs count too. Replays of a CUDA graph do not: no host code runs then.
"""

import threading

_lock = threading.Lock()
_counts: dict[str, dict[str, int]] = {}


def count(op: str, provider: str) -> None:
    """Add one call of `op` by `provider`."""
    with _lock:
        of_op = _counts.setdefault(op, {})
        of_op[provider] = of_op.get(provider, 0) + 1


def snapshot() -> dict[str, dict[str, int]]:
    """A copy of the counts so far, ``{op: {provider: calls}}``; an op that never ran is absent."""
    with _lock:
        return {op: dict(of_op) for op, of_op in _counts.items()}
