"""A CUDA platform without a GPU, for `rose check`: lets vLLM build its configuration as it would on that hardware.

No seam: it is never installed into a server. `rose check` calls :func:`stand_in` in a process of its own that ends
afterwards. What it answers for the hardware is GPU name, compute capability, memory, device count and the yes of
vLLM's "is this kernel compiled in" questions. So a configuration that passes says that vLLM's flags, defaults and cross
checks hold together for that GPU; whether a kernel exists and runs is left to the start-up on the hardware.

Replaces, in that process: `vllm.platforms.current_platform`, the compiled extensions that the CPU wheel lacks (empty
modules), torchvision where it isn't installed, the form of a Triton configuration where Triton isn't, and the
subprocess in which vLLM looks at a model class (done in place, since a subprocess would see the CPU).
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

_EXTENSIONS = ("vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C", "vllm._moe_C_stable_libtorch")
_ATTENTION_EXTENSIONS = "vllm.vllm_flash_attn._vllm_fa"
_IMAGES = "torchvision"
"""Imported by vision models' files, used on pictures alone; the CPU installation leaves it out."""
_KERNEL_QUESTIONS = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
)


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last in line, so that what is installed is taken."""

    images = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname in _EXTENSIONS or fullname.startswith(_ATTENTION_EXTENSIONS):
            return importlib.machinery.ModuleSpec(fullname, self)
        if self.images and fullname.partition(".")[0] == _IMAGES:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__.partition(".")[0] == _IMAGES:
            module.__getattr__ = lambda name: _image_name(module.__name__, name)  # type: ignore[method-assign]


def _image_name(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"{module}.{name}")
    return MagicMock(name=f"{module}.{name}")


def _triton_config(kwargs: Any, *, num_warps: int = 4, num_stages: int = 3, **others: Any) -> SimpleNamespace:
    """With the fields that vLLM's Mamba kernels look at on sm_90; vLLM's own placeholder has none."""
    return SimpleNamespace(kwargs=kwargs, num_warps=num_warps, num_stages=num_stages, **others)


def stand_in() -> Any:
    """Put the stand-in in the place of vLLM's platform; call before anything else of vLLM is imported.

    Returns:
        A class with the attributes ``gpu_name``, ``capability`` (major, minor), ``memory_bytes`` and ``gpus``, which
        the caller sets for each configuration.
    """
    absent = _Absent()
    sys.meta_path.append(absent)
    import torch

    importlib.import_module("transformers.models.auto.image_processing_auto")  # must still see no torchvision
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    absent.images = True
    for question in _KERNEL_QUESTIONS:
        setattr(torch.ops._C, question, lambda *args: True)

    class StandIn(NonNvmlCudaPlatform):  # type: ignore[misc]
        gpu_name = "GB200"
        capability = (10, 0)
        memory_bytes = 0
        gpus = 1

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:  # type: ignore[override]
            return DeviceCapability(*cls.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return f"NVIDIA {cls.gpu_name}"

        @classmethod
        def get_device_uuid(cls, device_id: int = 0) -> str:
            return f"GPU-{device_id}"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return cls.memory_bytes

        @classmethod
        def device_count(cls) -> int:
            return cls.gpus

        @classmethod
        def is_cumem_allocator_available(cls) -> bool:
            return True

        @classmethod
        def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
            return True

    vllm.platforms._current_platform = StandIn()  # type: ignore[assignment]
    from vllm import triton_utils

    if not triton_utils.HAS_TRITON:
        triton_utils.triton.Config = _triton_config  # type: ignore[misc,assignment]
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # type: ignore[attr-defined,assignment]
    return StandIn
