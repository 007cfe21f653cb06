"""``torch.ops.rose.moe_batched``, experts whose tokens come sorted by expert, which torch.compile does not look into.

Importing this module registers it, once per process. It writes into memory that the caller gives and, where our
kernels serve, allocates nothing, so it can be captured into a CUDA graph.
"""

from vllm_rose_plugin.kernels.call_counts import count
from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor
from vllm_rose_plugin.kernels.jit import chosen
from vllm_rose_plugin.kernels.jit.chosen import REFERENCE
from vllm_rose_plugin.kernels.moe_batched import flashinfer, launch
from vllm_rose_plugin.kernels.moe_batched.family import FAMILY
from vllm_rose_plugin.kernels.moe_batched.reference import moe_batched
from vllm_rose_plugin.kernels.moe_experts.config import token_formats_of
from vllm_rose_plugin.kernels.moe_experts.ops import packed_weight
from vllm_rose_plugin.kernels.op_library import register_op

SCHEMA = (
    "moe_batched(Tensor x, Tensor? x_scales, Tensor expert_counts, Tensor w13, Tensor w13_scales, Tensor w2, "
    "Tensor w2_scales, *, Tensor(a!) out, Tensor? w13_packed=None, Tensor? w2_packed=None, "
    "Tensor(b!)? workspace=None, int? expected_rows=None, "
    'str activation="mxfp8", str rounding="rceil") -> ()'
)
"""Weights are E4M3 codes as the checkpoint has them, with row-major scales; with packed scales and a workspace, the
provider that the self-check chose computes, else the reference, which writes zeros past the counts. x is E4M3 codes
where x_scales are given. The rest is as in ``launch.moe_batched``."""


def _moe_batched(
    x,
    x_scales,
    expert_counts,
    w13,
    w13_scales,
    w2,
    w2_scales,
    *,
    out,
    w13_packed=None,
    w2_packed=None,
    workspace=None,
    expected_rows=None,
    activation="mxfp8",
    rounding="rceil",
):
    ready = all(part is not None for part in (w13_packed, w2_packed, workspace))
    provider = chosen.provider(FAMILY.name, x) if ready else REFERENCE
    count("moe_batched", provider)
    tokens = x if x_scales is None else Mxfp8Tensor(x, x_scales)
    how = {"expert_counts": expert_counts, "rounding": rounding}
    if provider == REFERENCE:
        plain = Mxfp8Tensor(w13, w13_scales), Mxfp8Tensor(w2, w2_scales)
        out.copy_(moe_batched(tokens, w13=plain[0], w2=plain[1], activation=activation, out_dtype=out.dtype, **how))
        return
    how["w13"] = packed_weight(w13, w13_packed, gate_up=True)
    how["w2"] = packed_weight(w2, w2_packed, gate_up=False)
    if provider == flashinfer.NAME:
        flashinfer.moe_batched(tokens, out=out, workspace=workspace, **how)
        return
    launch.moe_batched(tokens, out=out, workspace=workspace, expected_rows=expected_rows, activation=activation, **how)


def workspace_bytes(
    *,
    target: str,
    activation: Activation,
    max_tokens: int,
    num_local_experts: int,
    hidden_size: int,
    intermediate_size: int,
) -> int:
    """Bytes that a call of the provider that the self-check chose needs, or before that one of our kernels.

    Args:
        target: of the device.
        activation: of the calls.
        max_tokens: M, rows of an expert.
        num_local_experts, hidden_size, intermediate_size: of the layer.
    """
    sizes = {
        "max_tokens": max_tokens,
        "num_local_experts": num_local_experts,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
    }
    if chosen.snapshot().get(FAMILY.name) == flashinfer.NAME:
        return flashinfer.workspace_bytes(**sizes)
    return launch.workspace_bytes(token_formats=token_formats_of(target, activation), **sizes)


register_op("moe_batched", SCHEMA, _moe_batched)
