"""Unquantized MoE layers beside MXFP8 ones: vLLM's own choice, with one log line.

Replaces: nothing; ``UnquantizedFusedMoEMethod.__init__`` sees ``auto`` instead of our name.
Why: an unquantized MTP draft of an MXFP8 target, or an MoE layer on the checkpoint's ignore list, inherits
``--moe-backend`` and would abort. vLLM does the same for its quantization-only backends ``humming`` and ``marlin``.
A model that is not quantized at all never gets here: the configuration check refuses it.
Delete when: vllm-project/vllm#53897 (out-of-tree fp8 MoE backends) lands.
"""

from collections.abc import Callable
from typing import Any

from vllm_rose_plugin.config import BACKEND
from vllm_rose_plugin.seams.seam import Seam
from vllm_rose_plugin.seams.targets import wrap

_MODULE = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
_TARGET = "UnquantizedFusedMoEMethod.__init__"


def _wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, moe: Any) -> None:
        if moe.moe_backend == BACKEND:
            from vllm_rose_plugin.layers.log import logger

            logger.warning_once(
                "--moe-backend %s serves MXFP8 layers only: an unquantized MoE layer (an unquantized draft, or one on "
                "the checkpoint's ignore list) uses vLLM's own choice.",
                BACKEND,
            )
            moe.moe_backend = "auto"
        original(self, moe)

    return __init__


SEAMS = (
    Seam(
        name="unquantized_moe_fallback",
        module=_MODULE,
        target=_TARGET,
        kind="patch",
        why="an unquantized MTP draft beside an MXFP8 target would abort on our backend name",
        upstream="https://github.com/vllm-project/vllm/pull/53897",
        apply=lambda: wrap("unquantized_moe_fallback", _MODULE, _TARGET, ("self", "moe"), _wrap_init),
    ),
)
