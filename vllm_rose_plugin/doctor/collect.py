"""Gather the facts; what could crash or hold a GPU runs in children."""

import importlib.util
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import vllm_rose_plugin
from vllm_rose_plugin.doctor.child import ChildError, run_module
from vllm_rose_plugin.doctor.facts import Facts, Gpu, Imports, SeamCheck, SeamState, Vllm
from vllm_rose_plugin.doctor.host import driver_module, look_at_environment, look_at_host, look_at_imex
from vllm_rose_plugin.doctor.packages import (
    dsl_problems,
    installed,
    look_at_entry_points,
    look_at_packages,
    look_at_vllm,
)
from vllm_rose_plugin.kernels.jit.targets import choose_target
from vllm_rose_plugin.memory.probe import Attempt, GpuProbe, HostProbe

_PROBE_SECONDS = 60.0
_IMPORT_SECONDS = 120.0
_SEAM_SECONDS = 300.0


def collect(*, try_multicast: bool = False) -> Facts:
    """Everything that the doctor judges; takes as long as importing vLLM.

    Args:
        try_multicast: see :func:`vllm_rose_plugin.memory.probe.probe_host`.
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
        device_kernels=device_kernels(),
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
            }
        )
        for gpu in answer["gpus"]
    ]
    multicast = Attempt(**answer["multicast"]) if answer["multicast"] else None
    return HostProbe(**{**answer, "gpus": gpus, "multicast": multicast})


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
