"""Experts in parts, one in each locality domain: weights go there while vLLM loads them, expert by expert.

Replaces: ``create_weights`` of vLLM's MXFP8 MoE methods, for layers that ``layers/locality.py`` splits. vLLM's own runs
on the meta device, so that no layer is ever allocated whole; then scales get memory, and codes a weight loader that has
vLLM's bring each shard into memory for one expert, from where it is copied into the parts. So a load needs the model
and one expert, once for all layers.
Delete when: vLLM lets an experts class create and load its weights (no issue known).
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from vllm_rose_plugin.seams.mxfp8_moe import METHODS
from vllm_rose_plugin.seams.seam import Seam, SeamError
from vllm_rose_plugin.seams.targets import wrap

_CREATE = ("self", "layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype")
_WEIGHTS = ("w13", "w2")
_LOADERS = ("_weight_loader", "weight_loader")
"""Where a parameter keeps its loader: vLLM's own classes of parameters behind a property."""

_staging: weakref.WeakValueDictionary[Any, torch.Tensor] = weakref.WeakValueDictionary()
"""Memory for one expert, shared by layers that are alike."""


def _wrap_create(key: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def wrapped(original: Callable[..., None]) -> Callable[..., None]:
        def create_weights(self: Any, layer: Any, *arguments: Any, **how: Any) -> None:
            decision = _decide(self, key)
            if decision is None:
                original(self, layer, *arguments, **how)
                return
            device = torch.empty(0).device  # vLLM has made the layer's the default
            with torch.device("meta"):
                original(self, layer, *arguments, **how)
            _put_into_parts(layer, decision, device)

        return create_weights

    return wrapped


def _decide(method: Any, key: str) -> Any:
    from vllm_rose_plugin.layers.experts_base import RoseExperts

    experts_cls = getattr(method, "experts_cls", None)
    if not (isinstance(experts_cls, type) and issubclass(experts_cls, RoseExperts)):
        return None
    from vllm_rose_plugin.layers import locality

    return locality.decide(method.moe, experts_cls, method=key)


def _put_into_parts(layer: Any, decision: Any, device: torch.device) -> None:
    from vllm_rose_plugin.layers.expert_parts import ExpertParts, attach

    splits = dict(decision.splits)
    whole = [stem for stem in splits if not getattr(layer, f"{stem}_weight").is_meta]
    if whole:
        raise SeamError("expert_parts", f"create_weights made {', '.join(whole)} on {device}, not on meta")
    parts = ExpertParts(
        splits=splits,
        num_experts=layer.w13_weight.shape[0],
        widths={stem: getattr(layer, f"{stem}_weight").shape[2] for stem in _WEIGHTS},
        ways=decision.ways,
        packed=bool(decision.ways),
        allocate=None if decision.domains is None else decision.domains.allocate,
        device=device,
    )
    attach(layer, parts)
    for name, param in list(layer.named_parameters(recurse=False)):
        if not param.is_meta:
            continue
        stem = name.removesuffix("_weight")
        if stem not in splits:
            layer.register_parameter(name, _like(param, torch.empty(param.shape, dtype=param.dtype, device=device)))
            continue
        kept = _LOADERS[_LOADERS[0] not in param.__dict__]
        param.__dict__[kept] = _loader(layer, stem, parts, _one_expert(param, device), param.__dict__[kept])


def _like(param: torch.nn.Parameter, data: torch.Tensor) -> torch.nn.Parameter:
    """A parameter with this data, and the class and attributes of another."""
    made = torch.nn.Parameter(data, requires_grad=False)
    made.__class__ = param.__class__
    made.__dict__.update(param.__dict__)
    return made


def _one_expert(param: torch.nn.Parameter, device: torch.device) -> torch.nn.Parameter:
    """Memory for one expert that looks like that of all."""
    key = (tuple(param.shape), param.dtype, device)
    one = _staging.get(key)
    if one is None:
        one = _staging[key] = torch.zeros((1, *param.shape[1:]), dtype=torch.uint8, device=device)
    looks = one.view(param.dtype).expand(param.shape)
    staging = _like(param, looks)
    for name in _LOADERS:
        staging.__dict__.pop(name, None)  # it holds the layer, which its own parameters mustn't
    staging.memory = one  # type: ignore[attr-defined]  # which the dictionary doesn't keep
    return staging


def _loader(
    layer: Any, stem: str, parts: Any, staging: torch.nn.Parameter, vllms: Callable[..., bool | None]
) -> Callable[..., bool | None]:
    layer_of, original = weakref.ref(layer), vllms
    if getattr(vllms, "__self__", None) is layer:
        unbound = vllms.__func__  # type: ignore[attr-defined]

        def original(*arguments: Any, **how: Any) -> bool | None:
            return unbound(layer_of(), *arguments, **how)

    def weight_loader(
        param: Any,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """vLLM's loader into memory for one expert; what it has loaded goes into the parts."""
        own = layer_of()
        assert own is not None
        if loaded_weight.ndim != 2:
            raise ValueError(
                f"{weight_name}: experts in locality domains are loaded one by one, got {list(loaded_weight.shape)}: "
                'set --additional-config \'{"rose": {"locality": "off"}}\''
            )
        one = staging.data[0]
        if shard_id != "w2":
            one = one.chunk(2)[shard_id == "w3"]
        one.view(torch.uint8).zero_()  # of the expert before, where vLLM leaves out what fills up a rank's share
        done = original(
            staging, loaded_weight, weight_name, shard_id=shard_id, expert_id=expert_id, return_success=True
        )
        if done:
            expert = own._map_global_expert_id_to_local_expert_id(expert_id)
            parts.load(stem, one, expert=expert, shard_id=shard_id)
        return done if return_success else None

    return weight_loader


def _seam(key: str) -> Seam:
    module, cls, versions = METHODS[key]
    name = f"mxfp8_moe_parts_{key}"
    return Seam(
        name=name,
        module=module,
        target=f"{cls}.create_weights",
        kind="patch",
        why="weights in several locality domains can't be one parameter, and a layer has no room beside itself",
        upstream="none known",
        apply=lambda: wrap(name, module, f"{cls}.create_weights", _CREATE, _wrap_create(key)),
        versions=versions,
    )


SEAMS = tuple(_seam(key) for key in METHODS)
