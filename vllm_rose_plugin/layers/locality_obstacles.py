"""What keeps a layer's weights whole whatever the device: what vLLM is set to do that parts in domains can't meet."""

from typing import Any

from vllm import envs

from vllm_rose_plugin.kernels.gemm.family import FAMILY as MXFP8_LINEAR
from vllm_rose_plugin.kernels.jit.providers import Family, pin_of
from vllm_rose_plugin.kernels.moe_experts.family import FAMILY as MOE_EXPERTS
from vllm_rose_plugin.kernels.mxfp8_quantize.family import ROSE
from vllm_rose_plugin.layers import gpu
from vllm_rose_plugin.layers.checkpoint_check import NOT_FILES
from vllm_rose_plugin.layers.experts import RoseCuteDslExperts

_FILL_PARAMETERS = (*(name for name in NOT_FILES if name != "dummy"), "ipc_cache", "modelexpress")
"""Load formats that bring tensors to where parameters lie, past the weight loader that fills the parts."""


def obstacle_of(experts_cls: type, method: str) -> str:
    """Why these experts can't be split, with the flag that it is about; empty: they can.

    Args:
        experts_cls: what will compute them.
        method: key of the layer's quantization method in ``seams/mxfp8_moe.py``.
    """
    if experts_cls is not RoseCuteDslExperts:
        return f"{experts_cls.__name__} reads whole weights: choose another --all2all-backend"
    if method == "online":
        return "--quantization mxfp8 makes the weights while it loads; `rose quantize` makes a checkpoint"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT=1 is kept by whole experts only"
    return _pinned(MOE_EXPERTS) or _engine()


def obstacle_of_linear(quant_method: Any) -> str:
    """Why a linear layer's weight can't be split, with the flag that it is about; empty: it can.

    Args:
        quant_method: vLLM's, of the layer.
    """
    if ".quantization.online." in f"{type(quant_method).__module__}.":
        return "--quantization mxfp8 makes the weights while it loads; `rose quantize` makes a checkpoint"
    return _pinned(MXFP8_LINEAR) or _engine()


def _pinned(family: Family) -> str:
    pin = pin_of(family)
    if pin and not pin.endswith(f"={ROSE}") and gpu.target() is not None:
        return f"{pin} computes whole weights only"
    return ""


def _engine() -> str:
    """What all layers have in common."""
    from vllm.config import get_current_vllm_config_or_none

    vllm_config: Any = get_current_vllm_config_or_none()
    if vllm_config is None:
        return ""
    # A draft's own model_config doesn't say it.
    models = (vllm_config.model_config, getattr(vllm_config.speculative_config, "target_model_config", None))
    if any(model is not None and model.enable_sleep_mode for model in models):
        return "--enable-sleep-mode can't free or save memory in domains, which is not in vLLM's allocator"
    load_format = vllm_config.load_config.load_format
    if load_format in _FILL_PARAMETERS:
        return f"--load-format {load_format} fills parameters without the layer's weight loader"
    return _offloading(vllm_config.offload_config)


def _offloading(config: Any) -> str:
    """vLLM's offloaders copy every parameter to the host, and a weight in parts has none with memory."""
    for flag, value in (
        ("--cpu-offload-gb", config.uva.cpu_offload_gb),
        ("--offload-group-size", config.prefetch.offload_group_size),
    ):
        if value:
            return f"{flag} {value:g} moves parameters to the host, and weights in domains are none"
    return ""
