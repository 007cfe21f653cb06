"""The ops in the order in which the layer calls them, and inputs for them."""

import torch

import vllm_rose_plugin.kernels.ops  # noqa: F401  (registers torch.ops.rose)


def moe_chain(
    x,  # (T, H)
    topk_ids,  # (T, top_k)
    topk_weights,  # (T, top_k)
    w13,  # codes (E_local, 2 * I, H), scales (E_local, 2 * I, H / 32)
    w2,  # codes (E_local, H, I), scales (E_local, H, I / 32)
    *,
    expert_map=None,
    alignment=1,
    activation="mxfp8",
    weight_on_input=False,
    out_dtype=None,
):
    rose = torch.ops.rose
    num_local_experts = w13[0].shape[0]
    counts, offsets, slots = rose.moe_route(
        topk_ids, num_local_experts=num_local_experts, expert_map=expert_map, alignment=alignment
    )
    tokens, scales = rose.moe_dispatch(
        x,
        slots,
        num_local_experts=num_local_experts,
        alignment=alignment,
        topk_weights=topk_weights if weight_on_input else None,
        activation=activation,
    )
    h = rose.grouped_gemm(tokens, scales, offsets, counts, *w13, out_dtype=torch.float32)
    y, y_scales = rose.swiglu_quantize(h, activation=activation)
    z = rose.grouped_gemm(y, y_scales, offsets, counts, *w2, out_dtype=torch.float32)
    return rose.moe_combine(
        z, slots, topk_weights=None if weight_on_input else topk_weights, out_dtype=out_dtype or x.dtype
    )


def random_moe(seed, *, tokens, top_k=2, experts=4, hidden=64, intermediate=64, dtype=torch.float32):
    """(x, topk_ids, topk_weights, w13, w2); a token's experts are distinct."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=g).to(dtype)
    topk_ids = torch.rand(tokens, experts, generator=g).argsort(-1)[:, :top_k].contiguous()
    topk_weights = torch.rand(tokens, top_k, generator=g)
    quantize = torch.ops.rose.mxfp8_quantize
    w13 = quantize(torch.randn(experts, 2 * intermediate, hidden, generator=g) / hidden**0.5)
    w2 = quantize(torch.randn(experts, hidden, intermediate, generator=g) / intermediate**0.5)
    return x, topk_ids, topk_weights, w13, w2
