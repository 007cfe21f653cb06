"""Gather the facts; what could crash or hold a GPU runs in children."""

import importlib.util
import os
import platform
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import vllm_rose_plugin
from vllm_rose_plugin.doctor.child import ChildError, run_module
from vllm_rose_plugin.doctor.facts import Facts, Gpu, GroupCheck, Imports, SeamCheck, SeamState, Vllm
from vllm_rose_plugin.doctor.host import driver_module, look_at_environment, look_at_host, look_at_kv_transport
from vllm_rose_plugin.doctor.packages import (
    dsl_problems,
    installed,
    look_at_entry_points,
    look_at_packages,
    look_at_vllm,
)
from vllm_rose_plugin.kernels.jit.targets import choose_target
from vllm_rose_plugin.memory.group_probe import GroupAnswer
from vllm_rose_plugin.memory.imex import look_at_imex
from vllm_rose_plugin.memory.locality import Locality
from vllm_rose_plugin.memory.probe import Attempt, GpuProbe, HostProbe

_GROUP_MODULE = "vllm_rose_plugin.memory.group_probe"
_GROUP_SECONDS = 60.0
_PROBE_SECONDS = 60.0
_IMPORT_SECONDS = 120.0
_SEAM_SECONDS = 300.0


def collect(*, try_multicast: bool = False, group_size: int | None = None) -> Facts:
    """Everything that the doctor judges; takes as long as importing vLLM.

    Args:
        try_multicast: see :func:`vllm_rose_plugin.memory.probe.probe_host`.
        group_size: ranks of this host that also try to share memory; None: none.
    """
    vllm = look_at_vllm()
    with ThreadPoolExecutor() as pool:  # its threads only wait for children
        driver_answer = pool.submit(_probe, try_multicast)
        imports_answer = pool.submit(_imports)
        seams_answer = pool.submit(_seams, vllm)
        driver, imports, seam_check = driver_answer.result(), imports_answer.result(), seams_answer.result()
    extra = extra_for(vllm, driver)
    dsl_version = installed("nvidia-cutlass-dsl")
    return Facts(
        plugin_version=vllm_rose_plugin.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        vllm=vllm,
        packages=look_at_packages(extra=extra, vllm_distribution=vllm.distribution),
        dsl_problems=dsl_problems(extra=extra),
        environment=look_at_environment(),
        entry_points=look_at_entry_points(),
        imports=imports,
        seam_check=seam_check,
        driver=driver,
        driver_module=driver_module(),
        gpus=[_gpu(probe, dsl_version) for probe in driver.gpus],
        imex=look_at_imex(),
        host=look_at_host(),
        kv_transport=look_at_kv_transport(installed("nixl")),
        device_kernels=device_kernels(),
        group=None if group_size is None else check_group(group_size, driver, try_multicast=try_multicast),
    )


def extra_for(vllm: Vllm, driver: HostProbe) -> str:
    """The plugin's extra for this machine: vLLM's build decides, without vLLM the driver."""
    if vllm.distribution:
        return "cpu" if vllm.cpu_build else "cuda"
    return "cpu" if driver.status == "no_driver" else "cuda"


def device_kernels() -> list[str]:
    """Kernel families with code for a GPU; the others have their torch reference only."""
    kernels = Path(vllm_rose_plugin.__file__).parent / "kernels"
    return sorted(path.parent.name for path in kernels.glob("*/kernel.py"))


def _gpu(probe: GpuProbe, dsl_version: str | None) -> Gpu:
    choice = choose_target(capability=probe.capability, dsl_version=dsl_version)
    return Gpu(probe, choice.target, choice.note)


def _probe(try_multicast: bool) -> HostProbe:
    arguments = ("--multicast",) if try_multicast else ()
    try:
        answer = run_module("vllm_rose_plugin.memory.probe", *arguments, timeout=_PROBE_SECONDS)
    except ChildError as error:
        return HostProbe("failed", str(error))
    return host_probe_from(answer)


def host_probe_from(answer: dict[str, Any]) -> HostProbe:
    """The probe's JSON as the object that it was made from."""
    gpus = [
        GpuProbe(
            **{
                **gpu,
                "capability": tuple(gpu["capability"]),
                "fabric": Attempt(**gpu["fabric"]),
                "posix_fd": Attempt(**gpu["posix_fd"]),
                "locality": Locality(**gpu["locality"]),
            }
        )
        for gpu in answer["gpus"]
    ]
    multicast = Attempt(**answer["multicast"]) if answer["multicast"] else None
    return HostProbe(**{**answer, "gpus": gpus, "multicast": multicast})


def check_group(size: int, driver: HostProbe, *, try_multicast: bool) -> GroupCheck:
    """Let ``size`` processes, each on a GPU of its own, share memory and write to each other."""
    if driver.status != "ok":
        reason = {"no_driver": "this machine has no NVIDIA driver", "no_gpu": "the NVIDIA driver shows no GPU"}
        return GroupCheck(size, False, reason.get(driver.status, driver.detail), tried=False)
    if len(driver.gpus) < size:
        return GroupCheck(size, False, f"{size} ranks need as many GPUs, {len(driver.gpus)} are here", tried=False)
    options = ["--multicast"] if try_multicast else []
    with tempfile.TemporaryDirectory(prefix="rose-doctor-") as directory, ThreadPoolExecutor(size) as pool:
        common = ["--size", str(size), "--store", f"{directory}/store", "--timeout", str(_GROUP_SECONDS), *options]
        ranks = [
            pool.submit(run_module, _GROUP_MODULE, "--rank", str(rank), *common, timeout=3 * _GROUP_SECONDS)
            for rank in range(size)
        ]
        answers, problems = [], []
        for rank, answer in enumerate(ranks):
            try:
                answers.append(GroupAnswer(**answer.result()))
            except ChildError as error:
                problems.append(f"rank {rank} of {size}: {error}")
    # A rank that died says more than the others, which missed it; those that answer say the same.
    problems += sorted({answer.error for answer in answers if answer.error})
    return GroupCheck(size, not problems, "; ".join(problems), answers=answers)


def _imports() -> Imports:
    try:
        return Imports(**run_module("vllm_rose_plugin.doctor.import_check", timeout=_IMPORT_SECONDS))
    except ChildError as error:
        return Imports(None, {"torch": str(error)})


def _seams(vllm: Vllm) -> SeamCheck:
    if vllm.distribution is None and importlib.util.find_spec("vllm") is None:
        return SeamCheck(False, "vLLM is not installed")
    try:
        answer = run_module("vllm_rose_plugin.doctor.seam_check", timeout=_SEAM_SECONDS)
    except ChildError as error:
        return SeamCheck(False, str(error))
    return SeamCheck(**{**answer, "seams": [SeamState(**seam) for seam in answer["seams"]]})
