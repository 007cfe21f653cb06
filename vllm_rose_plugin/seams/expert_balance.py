"""vLLM's expert load balancing (EPLB) with our experts: what it may move, and that it may.

Replaces: ``RoutedExperts.get_expert_weights``, to which our packed scales are added, since vLLM moves parameters only;
and the ``supports_eplb`` that MoE methods inherit (ModelOpt's, compressed-tensors' and INC's MXFP8 methods never say
yes, whichever experts class computes), for methods whose experts are ours only.
Delete when: vLLM lets an experts class say which tensors EPLB moves and whether it may; no issue is known.
"""

import functools
from collections.abc import Callable
from typing import Any

from vllm_rose_plugin.seams.seam import Seam, SeamError
from vllm_rose_plugin.seams.targets import MARK, find, is_wrapped, wrap

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_SUPPORT, _WEIGHTS = "moe_eplb_support", "moe_eplb_weights"


def _wrap_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_expert_weights(self: Any) -> Any:
        from vllm_rose_plugin.layers.expert_weights import packed_by_expert

        # A weight in parts has no memory under its parameter's name.
        return [*(weight for weight in original(self) if not weight.is_meta), *packed_by_expert(self)]

    return get_expert_weights


def _apply_support() -> None:
    method = find(_SUPPORT, f"{_FUSED_MOE}.fused_moe_method_base", "FusedMoEMethodBase")
    inherited = method.__dict__.get("supports_eplb")
    if not isinstance(inherited, property) or inherited.fget is None:
        raise SeamError(_SUPPORT, "FusedMoEMethodBase.supports_eplb is no property")
    original = inherited.fget
    if is_wrapped(original):
        return

    @functools.wraps(original)
    def supports_eplb(self: Any) -> bool:
        from vllm_rose_plugin.layers.experts_base import RoseExperts

        experts = getattr(self, "experts_cls", None)
        ours = isinstance(experts, type) and issubclass(experts, RoseExperts)
        return ours or bool(original(self))

    setattr(supports_eplb, MARK, True)
    method.supports_eplb = property(supports_eplb)


SEAMS = (
    Seam(
        name=_WEIGHTS,
        module=f"{_FUSED_MOE}.routed_experts",
        target="RoutedExperts.get_expert_weights",
        kind="patch",
        why="EPLB moves a layer's parameters, and our packed scales are none",
        upstream="none known",
        apply=lambda: wrap(
            _WEIGHTS, f"{_FUSED_MOE}.routed_experts", "RoutedExperts.get_expert_weights", ("self",), _wrap_weights
        ),
    ),
    Seam(
        name=_SUPPORT,
        module=f"{_FUSED_MOE}.fused_moe_method_base",
        target="FusedMoEMethodBase.supports_eplb",
        kind="patch",
        why="most MXFP8 MoE methods refuse EPLB whichever experts class computes",
        upstream="none known",
        apply=_apply_support,
    ),
)
