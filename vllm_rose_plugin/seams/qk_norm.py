"""Our Qwen3 and Qwen3-MoE in vLLM's model registry: vLLM's classes, whose attention is ours when the settings name us.

Official: ``ModelRegistry.register_model``. What is registered is decided before any configuration is known, so our
classes stand there always; whether they differ from vLLM's is decided when a model is built.
"""

from typing import Any

from vllm_rose_plugin.seams.seam import Seam, SeamError
from vllm_rose_plugin.seams.targets import find

_MODULE = "vllm.model_executor.models.registry"
_LAYERS = "vllm_rose_plugin.layers"
_STOCK = "vllm.model_executor.models"

MODELS = {"Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}
"""Architecture, also the class's name, to the module, which is called alike in vLLM and here."""


def _apply() -> None:
    registry: Any = find("qk_norm_models", _MODULE, "ModelRegistry")
    find("qk_norm_models", _MODULE, "ModelRegistry.register_model")
    for architecture, module in MODELS.items():
        present = getattr(registry.models.get(architecture), "module_name", None)
        if present == f"{_STOCK}.{module}":
            registry.register_model(architecture, f"{_LAYERS}.{module}:{architecture}")
        elif architecture not in registry.models:
            raise SeamError("qk_norm_models", f"the registry has no {architecture}")
        elif present != f"{_LAYERS}.{module}":
            from vllm_rose_plugin.layers.log import logger

            logger.info("QK-norm: another plugin has registered %s, which is left as it is.", architecture)


SEAMS = (
    Seam(
        name="qk_norm_models",
        module=_MODULE,
        target="ModelRegistry.register_model",
        kind="official",
        why="lets Qwen3's and Qwen3-MoE's attention run our QK-norm; without our settings they are vLLM's own",
        upstream="https://docs.vllm.ai/en/latest/contributing/model/registration.html",
        apply=_apply,
    ),
)
