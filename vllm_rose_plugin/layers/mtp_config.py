"""An MTP draft's configuration: its Hugging Face config, and the vLLM configuration that its model is built from."""

import copy
from typing import Any

from transformers import Qwen3MoeConfig

from vllm_rose_plugin.checkpoint.draft import DRAFT_ARCHITECTURE, DRAFT_MODEL_TYPE, LAYER_COUNT, TARGET_MODEL_TYPE
from vllm_rose_plugin.config import ALL2ALL, BACKEND
from vllm_rose_plugin.layers import gpu
from vllm_rose_plugin.layers.schemes import mxfp8_share

_VLLM_MODEL_TYPE = "mtp"
"""What vLLM's list of MTP model types has for models that bring nothing special."""

_built = False


def note_built() -> None:
    """Called when a draft of ours is built in this process."""
    global _built
    _built = True


def is_built() -> bool:
    """Whether a draft of ours was built in this process."""
    return _built


class Qwen3MoeMTPConfig(Qwen3MoeConfig):
    """config.json of a draft directory: Qwen3-MoE's, with ``num_nextn_predict_layers``."""

    model_type = DRAFT_MODEL_TYPE


def has_draft(hf_config: Any) -> bool:
    """Whether this is a draft's config, or that of a Qwen3-MoE with a draft in its checkpoint."""
    if hf_config.model_type == TARGET_MODEL_TYPE:
        return bool(getattr(hf_config, LAYER_COUNT, 0))
    return hf_config.model_type == DRAFT_MODEL_TYPE


def as_draft(hf_config: Any) -> Any:
    """Make the config of a draft, or of a target that holds one, what vLLM's speculative decoding understands.

    Args:
        hf_config: changed in place.

    Returns:
        The same.

    Raises:
        ValueError: it has another number of MTP layers than one.
    """
    layers = getattr(hf_config, LAYER_COUNT, None)
    if layers != 1:
        raise ValueError(
            f"MTP draft {hf_config.name_or_path} can't be served: its config.json has {LAYER_COUNT} {layers!r}, and "
            'one MTP layer is served, which drafts "num_speculative_tokens": 1 to 4 tokens by running that often'
        )
    hf_config.model_type = _VLLM_MODEL_TYPE
    hf_config.update(
        {
            "architectures": [DRAFT_ARCHITECTURE],
            "n_predict": layers,
            "num_hidden_layers": layers,
            # Which of the target's layers have no experts says nothing about the draft's.
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
        }
    )
    return hf_config


def draft_model_config(vllm_config: Any) -> Any:
    """vLLM's ``ModelConfig`` of our draft; None where the configuration has none."""
    model_config = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if model_config is None or DRAFT_ARCHITECTURE not in model_config.architectures:
        return None
    return model_config


def draft_vllm_config(vllm_config: Any, *, model_class: type) -> Any:
    """The configuration to build the draft's layers from.

    vLLM hands a draft model the target's configuration, whose ``model_config`` and ``quant_config`` are the target's.

    Args:
        vllm_config: as vLLM hands it over, with ``moe_backend`` of the speculative configuration applied.
        model_class: the draft's, whose ``packed_modules_mapping`` its quantization config needs.

    Returns:
        A copy that shares everything but the model, its quantization and the kernels that go with it, so that
        attention layers register where vLLM looks for them.
    """
    from vllm.model_executor.model_loader.utils import configure_quant_config

    own = copy.copy(vllm_config)
    own.model_config = draft_model_config(vllm_config)
    own.quant_config = _quant_config(own.model_config, vllm_config.load_config)
    if own.quant_config is not None:
        configure_quant_config(own.quant_config, model_class)
    own.kernel_config = _kernel_config(vllm_config, own.quant_config)
    return own


def is_mxfp8(vllm_config: Any) -> bool:
    """Whether the draft has MXFP8 layers, whatever the target is."""
    model_config = draft_model_config(vllm_config)
    quant_config = _quant_config(model_config, vllm_config.load_config) if model_config is not None else None
    return quant_config is not None and mxfp8_share(quant_config) != "none"


def _quant_config(model_config: Any, load_config: Any) -> Any:
    from vllm.config import VllmConfig

    return VllmConfig.get_quantization_config(model_config, load_config)


def _kernel_config(vllm_config: Any, quant_config: Any) -> Any:
    """The target's choice of kernels, seen from the draft's quantization.

    MXFP8: the target's, and ours where no backend is named and ours can serve: on a CPU, where vLLM has none, and on a
    GPU that our kernels are compiled for, with data parallelism only over our own all-to-all. Anything else: vLLM's
    choice where the target's is ours.
    """
    from vllm.config.utils import replace
    from vllm.platforms import current_platform

    target = vllm_config.kernel_config
    changes = {}
    if quant_config is None or mxfp8_share(quant_config) == "none":
        changes = {key: "auto" for key in ("moe_backend", "linear_backend") if getattr(target, key) == BACKEND}
    elif current_platform.is_cpu() or (_reaches_our_experts(vllm_config.parallel_config) and not gpu.obstacle()):
        per_quant = target.linear_backend_per_quant or {}
        named = {"moe_backend": target.moe_backend, "linear_backend": per_quant.get("mxfp8", target.linear_backend)}
        changes = {key: BACKEND for key, backend in named.items() if backend == "auto"}
    return replace(target, **changes) if changes else target


def _reaches_our_experts(parallel: Any) -> bool:
    return bool(parallel.data_parallel_size == 1 or parallel.all2all_backend == ALL2ALL)
