"""Is the installed nvidia-cutlass-dsl one that our kernels can be compiled with?"""

import functools
import importlib.metadata as metadata

from vllm_rose_plugin.kernels.jit.targets import RUBIN_DSL, version_tuple

DSL = "nvidia-cutlass-dsl"
OLDEST = (4, 5)
"""The first (major, minor) whose TVM-FFI export the disk cache stands on."""


def install_problems() -> list[str]:
    """What is wrong with the set of nvidia-cutlass-dsl distributions, in words; imports nothing of it."""
    found = {dist.name.lower().replace("_", "-"): dist for dist in metadata.distributions() if dist.name}
    versions = {name: dist.version for name, dist in sorted(found.items()) if name.startswith(DSL)}
    if DSL not in versions:
        return [f"{DSL} is not installed"]
    problems = []
    if len(set(versions.values())) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        problems.append(f"the parts of {DSL} have different versions: {listed}")
    if version_tuple(versions[DSL]) < OLDEST:
        problems.append(f"{DSL} {versions[DSL]} is too old; the oldest that works is {OLDEST[0]}.{OLDEST[1]}")
    return problems


@functools.cache
def check_install() -> None:
    """Refuse an install that would fail later and without words.

    Raises:
        RuntimeError: names what is wrong and how to mend it.
    """
    problems = install_problems()
    if problems:
        raise RuntimeError(
            f"kernels can't be compiled: {'; '.join(problems)}. Uninstall everything named {DSL}*, "
            "then install vllm-rose-plugin[cuda] in one go"
        )


def require_target(target: str) -> None:
    """Refuse a target that the installed DSL doesn't know.

    Raises:
        RuntimeError: names the version that does.
    """
    version = metadata.version(DSL)
    if target.startswith("sm_107") and version_tuple(version) < RUBIN_DSL:
        raise RuntimeError(f"{target} needs {DSL} {'.'.join(map(str, RUBIN_DSL))} or later, found {version}")
