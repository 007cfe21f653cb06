"""``torch.ops.rose.moe_experts``, a layer of experts, which torch.compile does not look into.

``moe_experts_split`` is one whose weights lie in parts.

Importing this module registers it, once per process. It writes into memory that the caller gives and, where our
kernels serve, allocates nothing, so it can be captured into a CUDA graph.
"""

import torch

from vllm_rose_plugin.kernels.call_counts import count
from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.gemm.checks import check_tensor
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight, packed_shape, wrap_weight
from vllm_rose_plugin.kernels.jit import chosen
from vllm_rose_plugin.kernels.jit.chosen import REFERENCE
from vllm_rose_plugin.kernels.moe_experts import launch
from vllm_rose_plugin.kernels.moe_experts import ways as ways_of
from vllm_rose_plugin.kernels.moe_experts.family import FAMILY
from vllm_rose_plugin.kernels.moe_experts.reference import moe_experts
from vllm_rose_plugin.kernels.mxfp8_quantize.family import ROSE
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts
from vllm_rose_plugin.kernels.op_library import register_op

SCHEMA = (
    "moe_experts(Tensor x, Tensor topk_ids, Tensor? topk_weights, Tensor w13, Tensor w13_scales, Tensor w2, "
    "Tensor w2_scales, *, Tensor(a!) out, Tensor? w13_packed=None, Tensor? w2_packed=None, "
    "Tensor(b!)? workspace=None, Tensor(c!)? route_workspace=None, Tensor? expert_map=None, int? num_experts=None, "
    'str activation="mxfp8", str rounding="rceil", bool weight_on_input=False, Tensor? shared=None, '
    "Tensor? x_scales=None, bool batch_invariant=False) -> ()"
)
"""Weights are E4M3 codes as the checkpoint has them, with row-major scales; with packed scales, and both workspaces,
the provider that the self-check chose computes, else the reference. With x_scales, x is MXFP8 codes. The rest is as in
``launch.moe_experts``."""

SPLIT_SCHEMA = (
    "moe_experts_split(Tensor x, Tensor topk_ids, Tensor? topk_weights, Tensor[] w13, Tensor[] w13_packed, "
    "Tensor[] w2, Tensor[] w2_packed, *, str ways, Tensor(a!) out, Tensor(b!) workspace, Tensor(c!) route_workspace, "
    'Tensor? expert_map=None, int? num_experts=None, str activation="mxfp8", str rounding="rceil", '
    "Tensor? x_scales=None) -> ()"
)
"""Codes and packed scales of each part, ``ways`` a name of ``ways.py``; there is no reference for it. The rest is as
above."""


WHOLE_SETTING = 'set --additional-config \'{"rose": {"locality": "off"}}\''
"""What keeps weights whole, which the reference computes too."""


def _moe_experts(
    x,
    topk_ids,
    topk_weights,
    w13,
    w13_scales,
    w2,
    w2_scales,
    *,
    out,
    w13_packed=None,
    w2_packed=None,
    workspace=None,
    route_workspace=None,
    expert_map=None,
    num_experts=None,
    activation="mxfp8",
    rounding="rceil",
    weight_on_input=False,
    shared=None,
    x_scales=None,
    batch_invariant=False,
):
    ready = all(part is not None for part in (w13_packed, w2_packed, workspace, route_workspace))
    provider = chosen.provider(FAMILY.name, x) if ready else REFERENCE
    count("moe_experts", provider)
    how = {
        "topk_ids": topk_ids,
        "topk_weights": topk_weights,
        "expert_map": expert_map,
        "activation": activation,
        "rounding": rounding,
        "weight_on_input": weight_on_input,
        "shared": shared,
    }
    if x_scales is not None:
        x = Mxfp8Tensor(x, x_scales)
    if provider == REFERENCE:
        plain = Mxfp8Tensor(w13, w13_scales), Mxfp8Tensor(w2, w2_scales)
        out.copy_(moe_experts(x, w13=plain[0], w2=plain[1], out_dtype=out.dtype, **how))
        return
    launch.moe_experts(
        x,
        w13=packed_weight(w13, w13_packed, gate_up=True),
        w2=packed_weight(w2, w2_packed, gate_up=False),
        out=out,
        workspace=workspace,
        route_workspace=route_workspace,
        num_experts=num_experts,
        batch_invariant=batch_invariant,
        **how,
    )


def _moe_experts_split(
    x,
    topk_ids,
    topk_weights,
    w13,
    w13_packed,
    w2,
    w2_packed,
    *,
    ways,
    out,
    workspace,
    route_workspace,
    expert_map=None,
    num_experts=None,
    activation="mxfp8",
    rounding="rceil",
    x_scales=None,
):
    provider = chosen.provider(FAMILY.name, x)
    if provider != ROSE:
        raise RuntimeError(
            f"experts in parts are served by {ROSE} only, the self-check chose {provider}: {WHOLE_SETTING}"
        )
    count("moe_experts_split", provider)
    launch.moe_experts(
        x if x_scales is None else Mxfp8Tensor(x, x_scales),
        topk_ids=topk_ids,
        topk_weights=topk_weights,
        w13=[packed_weight(*part, gate_up=True) for part in zip(w13, w13_packed, strict=True)],
        w2=[packed_weight(*part, gate_up=False) for part in zip(w2, w2_packed, strict=True)],
        way=ways_of.registered(ways).at(len(topk_ids)),
        out=out,
        workspace=workspace,
        route_workspace=route_workspace,
        num_experts=num_experts,
        expert_map=expert_map,
        activation=activation,
        rounding=rounding,
    )


def packed_weight(codes: torch.Tensor, scales: torch.Tensor, *, gate_up: bool) -> PackedWeight:
    """A weight out of codes and packed scales, for the device that it lies on."""
    target = device_facts(codes.device.index).target
    groups, n, k = codes.shape
    shape = packed_shape(num_groups=groups, n=n, k=k, target=target, gate_up=gate_up)
    check_tensor("packed scales", scales, torch.uint8, shape, codes.device)
    return PackedWeight(wrap_weight(codes, target=target, gate_up=gate_up), scales, gate_up=gate_up, target=target)


register_op("moe_experts", SCHEMA, _moe_experts)
register_op("moe_experts_split", SPLIT_SCHEMA, _moe_experts_split)
