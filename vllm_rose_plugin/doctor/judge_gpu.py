"""Findings about the driver, the GPUs and the memory that they can share."""

from collections.abc import Iterator

from vllm_rose_plugin.doctor.facts import Facts
from vllm_rose_plugin.doctor.finding import Finding
from vllm_rose_plugin.memory.imex import fabric_cure
from vllm_rose_plugin.memory.probe import Attempt

_SLOW = "the torch reference kernels serve (slow)"
_NO_NVLS = "all-reduce goes over NVLink peer to peer, without NVLS"
_ONE_HOST = "GPU memory can't be shared between hosts: all-to-all and all-reduce stay inside one host"


def gpu_findings(facts: Facts) -> Iterator[Finding]:
    """Findings about the GPUs; without a driver just one."""
    yield from _driver(facts)
    if not facts.gpus:
        return
    yield from _targets(facts)
    yield from _torch(facts)
    yield from _fabric(facts)
    yield from _posix_fd(facts)
    yield from _multicast(facts)
    if any(gpu.probe.context_active for gpu in facts.gpus):
        yield Finding(
            "warning",
            "probe_context",
            "the probe left a CUDA context, which it should not need",
            "none: its process has ended",
            "report this as a fault of the plugin",
        )


def group_findings(facts: Facts) -> Iterator[Finding]:
    """Findings about the ranks of ``--group``."""
    group = facts.group
    if group is None:
        return
    again = f"then run `rose doctor --group {group.size}` again"
    if not group.tried:
        yield Finding(
            "warning",
            "group_not_tried",
            f"--group {group.size} was not tried: {group.problem}",
            "whether the ranks can share memory is unknown",
            f"give this machine, or its container, {group.size} GPUs and their driver, {again}",
        )
    elif not group.works:
        yield Finding(
            "warning",
            "group_failed",
            f"{group.size} ranks of this host can't share memory: {group.problem}",
            "communication that needs the ranks' shared memory can't be used",
            f"mend what the message names, {again}",
        )
    for problem in sorted({answer.multicast for answer in group.answers if answer.multicast}):
        yield Finding(
            "warning",
            "group_multicast",
            f"the ranks of --group {group.size} can't use multicast: {problem}",
            _NO_NVLS,
            f"mend what the message names, {again}",
        )


def _driver(facts: Facts) -> Iterator[Finding]:
    driver = facts.driver
    if driver.status == "no_driver":
        yield Finding(
            "note",
            "no_driver",
            "no NVIDIA driver",
            _SLOW,
            "on a machine with a GPU, install the driver or start the container with its GPUs (`--gpus all`)",
        )
    elif driver.status == "no_bindings":
        wanted = next((p.wanted for p in facts.packages if p.name == "cuda-bindings" and p.wanted), "")
        yield Finding(
            "warning",
            "no_bindings",
            f"an NVIDIA driver is installed, but the GPUs can't be looked at: {driver.detail}",
            "GPUs, fabric handles and multicast are unknown here",
            f"pip install 'cuda-python{wanted}'",
        )
    elif driver.status == "no_gpu":
        yield Finding(
            "warning",
            "no_gpu",
            f"the NVIDIA driver shows no GPU: {driver.detail}",
            _SLOW,
            "check nvidia-smi, CUDA_VISIBLE_DEVICES and the container's GPUs",
        )
    elif driver.status == "failed":
        # On the CPU build a sick driver is beside the point; the CUDA build can't start with one.
        yield Finding(
            "warning" if facts.vllm.cpu_build else "error",
            "driver_failed",
            f"the NVIDIA driver doesn't work: {driver.detail}",
            "no GPU can be used",
            "check nvidia-smi and the kernel log; driver library and kernel module must have the same version",
        )


def _targets(facts: Facts) -> Iterator[Finding]:
    if not facts.device_kernels:
        yield Finding(
            "note", "no_device_kernels", "this version of the plugin has no device kernels", _SLOW, "nothing to do"
        )
    if facts.vllm.cpu_build:
        yield Finding(
            "warning",
            "cpu_build_with_gpu",
            f"{facts.vllm.distribution} is the CPU build, and there are {len(facts.gpus)} GPUs",
            f"the GPUs stay idle; {_SLOW}",
            "install the extra `cuda` in a fresh environment",
        )
    for note in sorted({gpu.note for gpu in facts.gpus if gpu.note}):
        unknown = any(gpu.target is None for gpu in facts.gpus if gpu.note == note)
        names = _names(facts, [gpu.probe.ordinal for gpu in facts.gpus if gpu.note == note])
        yield Finding(
            "warning",
            "no_target" if unknown else "family_target",
            f"{names}: {note}",
            _SLOW if unknown else "GEMMs run below the device's rate",
            "use one of the devices named" if unknown else "install the nvidia-cutlass-dsl that the extra `cuda` pins",
        )


def _torch(facts: Facts) -> Iterator[Finding]:
    built, served = facts.imports.torch_cuda, facts.driver.cuda_version
    if built and served and int(built.split(".")[0]) > int(served.split(".")[0]):
        yield Finding(
            "error",
            "driver_too_old",
            f"torch is built for CUDA {built}, the driver serves up to {served}",
            "torch finds no GPU",
            "update the NVIDIA driver, or install a torch for the older CUDA",
        )


def _fabric(facts: Facts) -> Iterator[Finding]:
    failing = [gpu.probe for gpu in facts.gpus if not gpu.probe.fabric.works]
    if not failing:
        return
    names = _names(facts, [probe.ordinal for probe in failing])
    if not any(probe.fabric_attribute for probe in failing):
        yield Finding(
            "note",
            "no_fabric",
            f"{names}: no fabric handles, the device doesn't claim to have them",
            _ONE_HOST,
            "they need GPUs of an NVLink rack (or an NVSwitch host) and its driver",
        )
        return
    yield Finding(
        "warning",
        "no_fabric",
        f"{names}: no fabric handles, though the device attribute claims them: {_words(failing[0].fabric)}",
        _ONE_HOST,
        fabric_cure(facts.imex, error=failing[0].fabric.error),
    )


def _posix_fd(facts: Facts) -> Iterator[Finding]:
    failing = [gpu.probe for gpu in facts.gpus if not gpu.probe.posix_fd.works]
    if failing:
        yield Finding(
            "warning",
            "no_posix_fd",
            f"{_names(facts, [probe.ordinal for probe in failing])}: device memory can't be exported as a file "
            f"descriptor: {_words(failing[0].posix_fd)}",
            "the GPUs of this host can't reach each other's memory: one GPU at a time",
            "free GPU memory if it is full; otherwise look at the container's seccomp profile and at the driver, and "
            "at virtual memory management in a virtual machine's GPU profile",
        )


def _multicast(facts: Facts) -> Iterator[Finding]:
    without = [gpu.probe.ordinal for gpu in facts.gpus if not gpu.probe.multicast_attribute]
    if without and len(facts.gpus) > 1:
        yield Finding(
            "note",
            "no_multicast",
            f"{_names(facts, without)}: no NVLink multicast, by the device attribute",
            _NO_NVLS,
            "it needs GPUs behind an NVSwitch and a running nvidia-fabricmanager",
        )
    attempt = facts.driver.multicast
    if attempt is not None and not attempt.works:
        yield Finding(
            "warning",
            "multicast_failed",
            f"a multicast object over all GPUs can't be made: {_words(attempt)}",
            f"{_NO_NVLS}; NCCL, which tries the same, may end start-up",
            "check nvidia-fabricmanager, that the container has /dev/nvidia-caps and, across hosts, the IMEX service; "
            "until then NCCL_NVLS_ENABLE=0 lets NCCL do without",
        )


def _words(attempt: Attempt) -> str:
    return f"{attempt.step} returned {attempt.error}" if attempt.step else str(attempt.error)


def _names(facts: Facts, ordinals: list[int]) -> str:
    if len(ordinals) == len(facts.gpus) > 1:
        return f"all {len(ordinals)} GPUs"
    return "GPU " + ", ".join(map(str, ordinals))
