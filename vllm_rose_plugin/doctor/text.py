"""Facts and findings as plain text."""

import textwrap
from collections.abc import Iterator

from vllm_rose_plugin.doctor.facts import Facts, GroupCheck
from vllm_rose_plugin.doctor.finding import Finding
from vllm_rose_plugin.doctor.judge import serving_can_work
from vllm_rose_plugin.memory.locality import Locality
from vllm_rose_plugin.memory.probe import Attempt

_WIDTH = 110


def render(facts: Facts, findings: list[Finding]) -> str:
    """The whole report; findings on top, errors first."""
    lines = [
        "serving with the plugin can work"
        if serving_can_work(findings)
        else "serving with the plugin can't work: see the errors"
    ]
    group = facts.group
    if group is not None and not group.tried:
        lines.append(f"whether {group.size} ranks can share memory was not tried: {group.problem}")
    elif group is not None:
        lines.append(f"{group.size} ranks of this host can{'' if group.works else 'not'} share memory")
    for finding in findings:
        lines += ["", *_wrapped(f"{finding.level}: {finding.text}", "")]
        lines += [*_wrapped(f"cost: {finding.cost}", "  "), *_wrapped(f"cure: {finding.cure}", "  ")]
    for title, rows in (
        ("versions", _versions(facts)),
        ("loading", _loading(facts)),
        ("seams", _seams(facts)),
        ("host", _host(facts)),
        ("GPUs", _gpus(facts)),
        *([("group", _group(facts.group))] if facts.group and facts.group.answers else []),
        ("KV transfer", _kv(facts)),
    ):
        pairs = list(rows)
        width = max(len(key) for key, _ in pairs)
        lines += ["", title, *(f"  {key:<{width}}  {value}".rstrip() for key, value in pairs)]
    return "\n".join(lines)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _versions(facts: Facts) -> Iterator[tuple[str, str]]:
    yield "plugin", facts.plugin_version
    yield "Python", facts.python
    yield "platform", facts.platform
    vllm = facts.vllm
    yield "vLLM", f"{vllm.distribution} {vllm.version}" if vllm.distribution else "not installed"
    if vllm.distribution:
        build = "CPU build" if vllm.cpu_build else "CUDA build"
        yield "", f"{build}, {'supported' if vllm.supported else 'not supported'}"
    for package in facts.packages:
        wanted = f"wanted {package.wanted}" if package.wanted else ""
        verdict = {True: "ok", False: "differs", None: ""}[package.satisfied]
        yield package.name, f"{package.version or 'not installed':<16}  {wanted:<24}  {verdict}"
    yield "torch built for", f"CUDA {facts.imports.torch_cuda}" if facts.imports.torch_cuda else "CPU only, or no torch"


def _loading(facts: Facts) -> Iterator[tuple[str, str]]:
    environment = facts.environment
    yield "VLLM_PLUGINS", "not set" if environment.vllm_plugins is None else repr(environment.vllm_plugins)
    yield "VLLM_ROSE_DISABLE", environment.rose.get("VLLM_ROSE_DISABLE", "not set")
    for name, value in environment.rose.items():
        if name != "VLLM_ROSE_DISABLE":
            yield name, value
    for name, value in (facts.seam_check.settings or {}).items():
        yield f"setting {name}", value
    for point in facts.entry_points:
        yield point.group, f"{point.value} of {point.distribution}" + ("" if point.ours else f": {point.problem}")


def _seams(facts: Facts) -> Iterator[tuple[str, str]]:
    check = facts.seam_check
    if not check.seams:
        yield "not looked at", check.problem
    for seam in check.seams:
        found = "target found" if seam.target_found else "target missing" if seam.importable else "not importable"
        yield seam.name, f"{seam.state:<13}  {seam.kind:<8}  {found:<14}  {seam.target}"


def _host(facts: Facts) -> Iterator[tuple[str, str]]:
    yield "C++ compiler", facts.host.compiler or f"{facts.host.compiler_name} not found"
    for directory, problem in facts.host.directories.items():
        yield "cache directory", f"{directory}: {problem or 'writable'}"
    for directory, problem in facts.host.kernel_cache.items():
        yield "kernel cache", f"{directory}: {problem or 'writable'}"


def _gpus(facts: Facts) -> Iterator[tuple[str, str]]:
    driver = facts.driver
    if driver.cuda_version:
        yield "driver", f"{facts.driver_module or 'version unknown'}, serves CUDA up to {driver.cuda_version}"
    if driver.status != "ok":
        yield "driver status", f"{driver.status}: {driver.detail}"
    yield "device kernels", ", ".join(facts.device_kernels) or "none in this version: torch reference"
    if not facts.gpus:
        return
    for gpu in facts.gpus:
        probe = gpu.probe
        capability = ".".join(map(str, probe.capability))
        yield f"GPU {probe.ordinal}", f"{probe.name}, {probe.memory_bytes / 2**30:.1f} GiB, {probe.sm_count} SMs"
        yield "  target", f"{gpu.target or 'none'} (compute capability {capability})"
        yield "  fabric handle", _attempt(probe.fabric, probe.fabric_attribute)
        yield "  file descriptor handle", _attempt(probe.posix_fd, probe.posix_fd_attribute)
        yield "  multicast", f"attribute says {_yes(probe.multicast_attribute)}"
        yield "  locality domains", _locality(probe.locality)
    tried = "not tried (--probe-multicast)" if driver.multicast is None else _attempt(driver.multicast, None)
    yield "multicast over all GPUs", tried
    imex = facts.imex
    yield "IMEX channels", ", ".join(imex.channels) or "none"
    yield "IMEX channels usable", ", ".join(imex.accessible) or "none"
    yield "IMEX in /proc/devices", _yes(imex.device_registered)
    yield "IMEX service", imex.service


def _kv(facts: Facts) -> Iterator[tuple[str, str]]:
    kv = facts.kv_transport
    yield "NIXL", kv.nixl or "not installed"
    yield "RDMA devices", ", ".join(kv.rdma_devices) or "none"
    yield "RDMA devices usable", ", ".join(kv.usable) or "none"
    yield from kv.ucx.items()


def _group(group: GroupCheck) -> Iterator[tuple[str, str]]:
    for answer in group.answers:
        yield f"rank {answer.rank}", f"{answer.handle_type or 'no'} handles: {'fails' if answer.error else 'works'}"
    for refused, reason in group.answers[0].refused.items():
        yield f"not {refused}", reason
    multicast = {answer.multicast for answer in group.answers}
    if multicast != {None}:
        yield "multicast", "works" if multicast == {""} else "fails"


def _attempt(attempt: Attempt, attribute: bool | None) -> str:
    claim = "" if attribute is None else f" (attribute says {_yes(attribute)})"
    if attempt.works:
        return f"works{claim}"
    return " ".join(filter(None, ("fails:", attempt.step, attempt.error))) + claim


def _locality(locality: Locality) -> str:
    if locality.reason:
        return f"not here: {locality.reason}"
    sms = f"{locality.sms_per_domain} of {locality.sm_count} SMs"
    return f"{locality.domains}, each with {sms}; experts use them as the setting locality says"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
