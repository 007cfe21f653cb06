"""Around the load of a model: check the checkpoint, that we serve what was asked, and the kernels that will do it.

Replaces: nothing; runs before and after ``BaseModelLoader.load_model``.
Why: vLLM casts or ignores damaged scale tensors, and a named backend that ends up with no layer at all (everything on
the checkpoint's ignore list, or another backend in ``linear_backend_per_quant``) would go unnoticed. The kernels are
chosen here since vLLM's next step is a forward pass with the largest batch, which measures memory.
Delete when: vLLM lets a plugin look at a loaded model (no issue known).
"""

from collections.abc import Callable
from typing import Any

from vllm_rose_plugin.config import BACKEND, SUPPORTED
from vllm_rose_plugin.seams.config_check import named_flags
from vllm_rose_plugin.seams.seam import Seam
from vllm_rose_plugin.seams.targets import wrap

_MODULE = "vllm.model_executor.model_loader.base_loader"
_TARGET = "BaseModelLoader.load_model"


def _wrap_load(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        from vllm_rose_plugin.layers import checkpoint_check, report, self_check

        flags = named_flags(vllm_config.kernel_config)
        if not flags or model_config.runner_type == "draft":
            before = report.live_layers()
            model = original(self, vllm_config, model_config, prefix)
            _say_if_unused(vllm_config, model_config, report.live_layers()["qk_norm"] - before["qk_norm"])
            self_check.run()
            return model
        checkpoint_check.check_model(vllm_config, model_config, loaded=False)
        before = report.live_layers()
        model = original(self, vllm_config, model_config, prefix)
        checkpoint_check.check_model(vllm_config, model_config, loaded=True)
        made = {kind: count - before[kind] for kind, count in report.live_layers().items()}
        _require_layers(flags, made, vllm_config, model_config)
        self_check.run()
        return model

    return load_model


def _say_if_unused(vllm_config: Any, model_config: Any, norms: int) -> None:
    """Without a flag, only the setting ``qk_norm`` can have named us."""
    from vllm_rose_plugin.layers.log import logger
    from vllm_rose_plugin.layers.qk_norm import QkNorm, setting_in_force

    if not norms and model_config.runner_type != "draft" and setting_in_force(vllm_config) is not QkNorm.OFF:
        logger.warning_once(
            'The rose setting "qk_norm" serves no layer of %s (%s); the lines above may say why.',
            model_config.model,
            ", ".join(model_config.architectures),
        )


def _require_layers(flags: list[str], made: dict[str, int], vllm_config: Any, model_config: Any) -> None:
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return  # a stage may rightly hold none
    names_moe = vllm_config.kernel_config.moe_backend == BACKEND
    linear_flags = [flag for flag in flags if not flag.startswith("--moe-backend")]
    if names_moe and model_config.is_moe and not made["experts"]:
        raise ValueError(
            f"--moe-backend {BACKEND} serves no layer of {model_config.model}: its experts are not MXFP8 (see the "
            f"ignore list in its config.json). Leave the flag out, or quantize the experts: {SUPPORTED}."
        )
    if linear_flags and not made["linear"]:
        raise ValueError(
            f"{' and '.join(linear_flags)} serves no layer of {model_config.model}: it has no MXFP8 linear layer (see "
            "the ignore list in its config.json), or linear_backend_per_quant names another backend for them. Leave "
            f"the flag out, or quantize the layers: {SUPPORTED}."
        )


SEAMS = (
    Seam(
        name="model_load",
        module=_MODULE,
        target=_TARGET,
        kind="patch",
        why="refuses a damaged checkpoint by the tensor's name, and a named backend that ends up serving no layer; "
        "checks and chooses the kernels",
        upstream="none known",
        apply=lambda: wrap(
            "model_load", _MODULE, _TARGET, ("self", "vllm_config", "model_config", "prefix"), _wrap_load
        ),
    ),
)
