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

_RUBIN_DSL = (4, 8)
"""The first nvidia-cutlass-dsl (major, minor) that compiles sm_107a."""


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
    if capability == (10, 7) and _major_minor(dsl_version) < _RUBIN_DSL:
        needed = ".".join(map(str, _RUBIN_DSL))
        found = f"found {dsl_version}" if dsl_version else "it isn't installed"
        return TargetChoice(
            FAMILY_TARGET,
            f"{target} needs nvidia-cutlass-dsl {needed} or later ({found}): {FAMILY_TARGET} runs there without "
            "Rubin's wider matrix instructions",
        )
    return TargetChoice(target, "")


def _major_minor(version: str | None) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else (0, 0)
