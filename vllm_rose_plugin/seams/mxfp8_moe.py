"""Our experts class behind ``--moe-backend rose_cutedsl``, for every MXFP8 MoE method that vLLM has.

Replaces: ``_select_kernel_cls`` of the MXFP8 oracle for our name only, and adds our name to ``_BACKEND_NAME_MAP``.
vLLM's enum of backends can't be extended, so the name is carried by TRITON_MXFP8, the member for which vLLM changes
neither weights nor scales at load; its log line therefore names that member, and ours follows with the truth.
The MXFP8 methods never call ``experts.process_weights_after_loading``; a wrapper calls it after theirs.
Delete when: vllm-project/vllm#53897 (out-of-tree fp8 MoE backends) lands.
"""

from collections.abc import Callable
from typing import Any

from vllm_rose_plugin.config import BACKEND, SUPPORTED
from vllm_rose_plugin.seams.seam import Seam, SeamError
from vllm_rose_plugin.seams.targets import find, wrap

_ORACLE = "vllm.model_executor.layers.fused_moe.oracle.mxfp8"
_QUANTIZATION = "vllm.model_executor.layers.quantization"
_UPSTREAM = "https://github.com/vllm-project/vllm/pull/53897"

METHODS = {
    "modelopt": (f"{_QUANTIZATION}.modelopt", "ModelOptMxFp8FusedMoE", ("0.32", "0.33")),
    "compressed_tensors": (
        f"{_QUANTIZATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_mxfp8",
        "CompressedTensorsW8A8Mxfp8MoEMethod",
        ("0.32", "0.33"),
    ),
    "online": (f"{_QUANTIZATION}.online.mxfp8", "Mxfp8OnlineMoEMethod", ("0.32", "0.33")),
    "inc": (f"{_QUANTIZATION}.inc.schemes.inc_mxfp8_moe", "INCMxfp8MoEMethod", ("0.32", "0.33")),
    "quark": (f"{_QUANTIZATION}.quark.quark_moe", "QuarkW8A8Mxfp8MoEMethod", ("0.33",)),
}
"""vLLM's MXFP8 MoE methods: module, class, vLLM versions. MiniMax-style checkpoints use ModelOpt's."""


def _wrap_select(original: Callable[..., Any]) -> Callable[..., Any]:
    def _select_kernel_cls(backend: Any, config: Any) -> Any:
        if config.moe_backend != BACKEND:
            return original(backend, config)
        return _select_ours(config)

    return _select_kernel_cls


def _select_ours(config: Any) -> type:
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp8Dynamic, kMxfp8Static

    from vllm_rose_plugin.layers.experts import RoseCuteDslExperts
    from vllm_rose_plugin.layers.experts_base import RoseExperts
    from vllm_rose_plugin.layers.experts_batched import RoseCuteDslBatchedExperts
    from vllm_rose_plugin.layers.log import logger

    batched = config.moe_parallel_config.use_batched_activation_format
    wanted = mk.FusedMoEActivationFormat.BatchedExperts if batched else mk.FusedMoEActivationFormat.Standard
    cls: type[RoseExperts] = RoseCuteDslBatchedExperts if batched else RoseCuteDslExperts
    supported, reason = cls.is_supported_config(cls, config, kMxfp8Static, kMxfp8Dynamic, wanted)
    if not supported:
        raise ValueError(f"--moe-backend {BACKEND} can't serve this MoE layer: {reason}. {SUPPORTED}.")
    logger.info_once("MXFP8 MoE: %s (the TRITON_MXFP8 above is only the carrier of the name).", cls.__name__)
    return cls


def _apply_selection() -> None:
    names = find("mxfp8_moe_selection", _ORACLE, "_BACKEND_NAME_MAP")
    carrier = find("mxfp8_moe_selection", _ORACLE, "Fp8MoeBackend.TRITON_MXFP8")
    if not isinstance(names, dict):
        raise SeamError("mxfp8_moe_selection", f"{_ORACLE}._BACKEND_NAME_MAP is no dict")
    wrap("mxfp8_moe_selection", _ORACLE, "_select_kernel_cls", ("backend", "config"), _wrap_select)
    names[BACKEND] = carrier


def _wrap_weights(original: Callable[..., None]) -> Callable[..., None]:
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        before = getattr(self, "moe_kernel", None)
        original(self, layer)
        kernel = getattr(self, "moe_kernel", None)
        if kernel is None or kernel is before:  # vLLM guards against a second call; so do we
            return
        from vllm_rose_plugin.layers.experts_base import RoseExperts

        if isinstance(kernel.fused_experts, RoseExperts):
            kernel.fused_experts.process_weights_after_loading(layer)

    return process_weights_after_loading


def _weights_seam(key: str) -> Seam:
    module, cls, versions = METHODS[key]
    name = f"mxfp8_moe_weights_{key}"
    target = f"{cls}.process_weights_after_loading"
    return Seam(
        name=name,
        module=module,
        target=target,
        kind="patch",
        why="this method never tells its experts class that the weights are loaded",
        upstream=_UPSTREAM,
        apply=lambda: wrap(name, module, target, ("self", "layer"), _wrap_weights),
        versions=versions,
    )


SEAMS = (
    Seam(
        name="mxfp8_moe_selection",
        module=_ORACLE,
        target="_BACKEND_NAME_MAP, _select_kernel_cls",
        kind="patch",
        why="an experts class from outside vLLM can't be selected by name",
        upstream=_UPSTREAM,
        apply=_apply_selection,
    ),
    *(_weights_seam(key) for key in METHODS),
)
