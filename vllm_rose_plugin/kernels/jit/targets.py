"""Which compile target serves which device."""

import re
from dataclasses import dataclass

TARGETS = {
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (10, 7): "sm_107a",
}
"""Compute capability to the target whose kernels use all of the device."""

FAMILY_TARGET = "sm_100f"
"""Runs on every 10.x device, without what only one of them has."""

RUBIN_DSL = (4, 8)
"""The first nvidia-cutlass-dsl (major, minor) that compiles sm_107a."""


@dataclass(frozen=True)
class Limits:
    """What a kernel for a target may use. A family target has the least of its members."""

    shared_memory: int
    """Bytes that one block can have."""
    tmem_columns: int
    """Tensor memory, in columns of 128 lanes x 32 bits; 0: there is none."""
    widest_access: int
    """Bits that one thread's global load or store can move."""
    sm_count: int
    """What to assume where no device can be asked; sizes of a real launch come from the device."""


LIMITS = {
    "sm_90a": Limits(shared_memory=232_448, tmem_columns=0, widest_access=128, sm_count=132),
    "sm_100a": Limits(shared_memory=232_448, tmem_columns=512, widest_access=256, sm_count=148),
    "sm_100f": Limits(shared_memory=232_448, tmem_columns=512, widest_access=256, sm_count=148),
    "sm_103a": Limits(shared_memory=232_448, tmem_columns=512, widest_access=256, sm_count=148),
    "sm_107a": Limits(shared_memory=334_848, tmem_columns=576, widest_access=256, sm_count=212),
}
"""Every target that kernels are compiled for, with its limits."""


def limits_of(target: str) -> Limits:
    """The limits of a target.

    Raises:
        ValueError: ``target`` is none of ours.
    """
    if target not in LIMITS:
        raise ValueError(f"unknown target {target!r}; known: {', '.join(LIMITS)}")
    return LIMITS[target]


@dataclass(frozen=True)
class TargetChoice:
    """The target for a device, and what the user should know about the choice."""

    target: str | None
    """None: no kernel of ours runs there."""
    note: str
    """Empty where the choice needs no words."""


def choose_target(*, capability: tuple[int, int], dsl_version: str | None) -> TargetChoice:
    """The compile target of a device.

    Args:
        capability: compute capability, such as ``(9, 0)``.
        dsl_version: version of nvidia-cutlass-dsl, such as ``"4.8.0"``; None where it isn't installed.

    Returns:
        The choice. An unknown device gives ``target=None`` and a note that names the known ones.
    """
    target = TARGETS.get(capability)
    if target is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in TARGETS)
        return TargetChoice(
            None, f"compute capability {capability[0]}.{capability[1]} has no target; those with one: {known}"
        )
    if capability == (10, 7) and version_tuple(dsl_version) < RUBIN_DSL:
        needed = ".".join(map(str, RUBIN_DSL))
        found = f"found {dsl_version}" if dsl_version else "it isn't installed"
        return TargetChoice(
            FAMILY_TARGET,
            f"{target} needs nvidia-cutlass-dsl {needed} or later ({found}): {FAMILY_TARGET} runs there without "
            "Rubin's wider matrix instructions",
        )
    return TargetChoice(target, "")


def version_tuple(version: str | None) -> tuple[int, int]:
    """(major, minor) of a version, (0, 0) of None."""
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else (0, 0)
