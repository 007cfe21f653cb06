"""Our MXFP8 linear kernel behind ``--linear-backend rose_cutedsl``.

Official: ``register_linear_kernel``. Two private names complete it: the map from a flag's value to kernel classes,
without which a named backend is dropped with a warning, and the function that drops it, which raises for our name.
Delete the patches when: vLLM lets a registered kernel carry a backend name (no issue known).
"""

from collections.abc import Callable

from vllm_rose_plugin.config import BACKEND, SUPPORTED
from vllm_rose_plugin.seams.seam import Seam, SeamError
from vllm_rose_plugin.seams.targets import find, wrap

_MODULE = "vllm.model_executor.kernels.linear"


def _apply_registration() -> None:
    from vllm.platforms import PlatformEnum

    from vllm_rose_plugin.layers.linear import RoseCuteDslMxfp8LinearKernel

    register = find("linear_registration", _MODULE, "register_linear_kernel")
    possible = find("linear_registration", _MODULE, "_POSSIBLE_MXFP8_KERNELS")
    for platform in (PlatformEnum.CUDA, PlatformEnum.CPU):
        if RoseCuteDslMxfp8LinearKernel not in possible.get(platform, []):
            register(RoseCuteDslMxfp8LinearKernel, platform, "mxfp8")


def _apply_name() -> None:
    from vllm_rose_plugin.layers.linear import RoseCuteDslMxfp8LinearKernel

    by_backend = find("linear_backend_map", _MODULE, "_LINEAR_BACKEND_KERNEL_MAP")
    if not isinstance(by_backend, dict):
        raise SeamError("linear_backend_map", f"{_MODULE}._LINEAR_BACKEND_KERNEL_MAP is no dict")
    by_backend[BACKEND] = {RoseCuteDslMxfp8LinearKernel}


def _wrap_filter(original: Callable[..., list[type]]) -> Callable[..., list[type]]:
    def _filter_kernels_by_backend(backend: str, kernels: list[type]) -> list[type]:
        if backend == BACKEND:
            ours: set[type] = find("linear_no_fallback", _MODULE, "_LINEAR_BACKEND_KERNEL_MAP")[BACKEND]
            if not ours.intersection(kernels):
                others = ", ".join(sorted(kernel.__name__ for kernel in kernels)[:3]) or "none on this platform"
                raise ValueError(
                    f"--linear-backend {BACKEND} has no kernel for a linear layer of this type (vLLM's kernels for "
                    f"it: {others}, …): {SUPPORTED}. For one scheme only, use --kernel-config "
                    f'\'{{"linear_backend_per_quant": {{"mxfp8": "{BACKEND}"}}}}\'.'
                )
        return original(backend, kernels)

    return _filter_kernels_by_backend


SEAMS = (
    Seam(
        name="linear_registration",
        module=_MODULE,
        target="register_linear_kernel",
        kind="official",
        why="adds our kernel to the MXFP8 linear kernels; it declines unless it is named",
        upstream="vllm.model_executor.kernels.linear.register_linear_kernel",
        apply=_apply_registration,
    ),
    Seam(
        name="linear_backend_map",
        module=_MODULE,
        target="_LINEAR_BACKEND_KERNEL_MAP",
        kind="patch",
        why="a registered kernel can't be selected by name, and the name is dropped with a warning",
        upstream="none known; the flag came with https://github.com/vllm-project/vllm/pull/39538",
        apply=_apply_name,
    ),
    Seam(
        name="linear_no_fallback",
        module=_MODULE,
        target="_filter_kernels_by_backend",
        kind="patch",
        why="vLLM falls back to another kernel where a named backend has none; for our name that is an error",
        upstream="none known; the flag came with https://github.com/vllm-project/vllm/pull/39538",
        apply=lambda: wrap(
            "linear_no_fallback", _MODULE, "_filter_kernels_by_backend", ("backend", "kernels"), _wrap_filter
        ),
    ),
)
