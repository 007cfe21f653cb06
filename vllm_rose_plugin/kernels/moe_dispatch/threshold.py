"""Up to how many tokens route and dispatch are one launch, where that was measured in this process.

The heuristic (``config.is_one_launch``) says how many can be; a measurement only lowers it. Imports neither torch nor
cutlass.
"""

from collections.abc import Callable, Hashable

_most: dict[Hashable, int | None] = {}
_followers: list[Callable[[], None]] = []


def known(config: Hashable) -> bool:
    """Whether calls of this config, without its route, were measured."""
    return config in _most


def most_tokens(config: Hashable) -> int | None:
    """Most tokens of one launch; None: as many as the heuristic takes."""
    return _most.get(config)


def record(config: Hashable, most: int | None) -> None:
    """From now on calls of this config with more tokens are two launches."""
    _most[config] = most
    if most is not None:
        for follower in _followers:
            follower()


def on_change(call: Callable[[], None]) -> None:
    """Have something called whenever calls become two launches."""
    _followers.append(call)


def digest() -> str:
    """Of what was lowered, empty where nothing was: which kernels run depends on it."""
    return "; ".join(sorted(f"{config}: {most}" for config, most in _most.items() if most is not None))


def clear() -> None:
    """Forget all measurements."""
    _most.clear()
    for follower in _followers:
        follower()
