"""Attention of Qwen3 and Qwen3-MoE with one op for the norms of q and k, and for their rotary embedding where it fits.

vLLM builds its own attention; :func:`adopt` then gives it a subclass with another ``forward``. So parameters, their
names, the KV cache and every check of vLLM's are its own, and a model that is not adopted is vLLM's, bit for bit.
"""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from vllm_rose_plugin.config import QkNorm
from vllm_rose_plugin.kernels.qk_norm.config import HEAD_DIMS, rope_fits
from vllm_rose_plugin.layers import gpu
from vllm_rose_plugin.layers.log import logger

_DTYPES = (torch.bfloat16, torch.float16)
_ROTARY_METHODS = ("forward", "forward_native", "forward_static", "forward_cuda", "forward_cpu")
"""What a rotary embedding must have from vLLM's base for its cos_sin_cache to say all about it."""


class QkNormAttention(nn.Module):
    """Mixed in before one of vLLM's attention classes, whose attributes it uses."""

    fuses_rope: bool

    def forward(
        self,
        positions: torch.Tensor,  # (T,) int64; (3, T) with M-RoPE, which is never fused
        hidden_states: torch.Tensor,  # (T, H)
    ) -> torch.Tensor:
        """``[T, H]``."""
        this: Any = self
        qkv, _ = this.qkv_proj(hidden_states)  # (T, (Hq + 2 Hkv) * D)
        q, k, v = qkv.split([this.q_size, this.kv_size, this.kv_size], dim=-1)
        weights = this.q_norm.weight.data, this.k_norm.weight.data
        eps = this.q_norm.variance_epsilon
        if self.fuses_rope:
            rotary = this.rotary_emb
            q, k = torch.ops.rose.qk_norm_rope(
                q, k, *weights, positions, rotary.cos_sin_cache, eps=eps, interleaved=not rotary.is_neox_style
            )
        else:
            q, k = torch.ops.rose.qk_norm(q, k, *weights, eps=eps)
            q, k = this.rotary_emb(positions, q, k)
        output, _ = this.o_proj(this.attn(q, k, v))
        return output


def setting_in_force(vllm_config: Any) -> QkNorm:
    """What the configuration check has recorded; ``off`` where nothing names us, since nothing is recorded then."""
    additional = vllm_config.additional_config
    recorded = additional.get("rose") if isinstance(additional, dict) else None
    if not isinstance(recorded, dict) or "version" not in recorded:
        return QkNorm.OFF
    return QkNorm(recorded["qk_norm"])


def adopt(model: nn.Module, vllm_config: Any, *, stock: type[nn.Module], ours: type[QkNormAttention]) -> None:
    """Give the attention layers of a model our forward, where the settings ask for it and the kernel can serve them.

    Args:
        model: as vLLM built it, before its weights are loaded.
        vllm_config: the configuration it was built from.
        stock: vLLM's attention class; layers of any other, a subclass included, are left alone.
        ours: a subclass of it.
    """
    setting = setting_in_force(vllm_config)
    if setting is QkNorm.OFF:
        return
    import vllm_rose_plugin.kernels.qk_norm.ops  # noqa: F401  registers torch.ops.rose.qk_norm

    for layer in model.modules():
        if type(layer) is not stock:
            continue
        reason = obstacle(layer, setting)
        if reason:
            logger.info_once("QK-norm: vLLM's own, since %s.", reason)
            continue
        _adopt_layer(layer, setting, ours)


def obstacle(attention: Any, setting: QkNorm) -> str:
    """Why a layer keeps vLLM's norms, in words; empty: it needn't."""
    if setting is QkNorm.AUTO:
        reason = gpu.obstacle()
        if reason:
            return reason
    if attention.dual_chunk_attention_config:
        return "the model uses dual-chunk attention"
    norms = attention.q_norm, attention.k_norm
    for norm in norms:
        if type(norm) is not RMSNorm or not norm.has_weight or norm.variance_size_override is not None:
            return f"its norm is a {norm!r}"
    if norms[0].variance_epsilon != norms[1].variance_epsilon:
        return f"q and k have different eps, {norms[0].variance_epsilon} and {norms[1].variance_epsilon}"
    if attention.head_dim not in HEAD_DIMS:
        return f"head_dim is {attention.head_dim}, ours are {', '.join(map(str, HEAD_DIMS))}"
    if norms[0].weight.dtype not in _DTYPES:
        return f"the model is {norms[0].weight.dtype}, the kernel takes bfloat16 and float16"
    return ""


def fits_rope(attention: Any) -> bool:
    """Whether one launch can do the rotary embedding too: vLLM's plain one, or one that differs by its cache alone."""
    rotary, weight = attention.rotary_emb, attention.q_norm.weight
    if not isinstance(rotary, RotaryEmbedding):
        return False
    if any(getattr(type(rotary), name) is not getattr(RotaryEmbedding, name) for name in _ROTARY_METHODS):
        return False
    cache = rotary.cos_sin_cache
    return (
        rotary.head_size == attention.head_dim
        and cache.dim() == 2
        and cache.shape[1] == rotary.rotary_dim
        and cache.is_contiguous()
        and cache.dtype == weight.dtype  # vLLM would convert any other at every call
        and cache.device == weight.device
        and rope_fits(head_dim=attention.head_dim, rotary_dim=rotary.rotary_dim, interleaved=not rotary.is_neox_style)
    )


def _adopt_layer(attention: Any, setting: QkNorm, ours: type[QkNormAttention]) -> None:
    from vllm_rose_plugin.layers import report

    attention.fuses_rope = fits_rope(attention)
    attention.__class__ = ours
    report.add_layer("qk_norm", attention)
    if setting is QkNorm.AUTO:
        _need_kernels(attention)
    logger.info_once(
        "QK-norm: ours (%s), %s.",
        setting.value,
        "with the rotary embedding in the same launch" if attention.fuses_rope else "then vLLM's rotary embedding",
    )


def _need_kernels(attention: Any) -> None:
    """Have them checked, compiled and chosen before the first forward pass."""
    from vllm_rose_plugin.kernels.qk_norm.family import FAMILY, QkNormShape
    from vllm_rose_plugin.layers import self_check

    rope = {}
    if attention.fuses_rope:
        rotary = attention.rotary_emb
        rope = {"rotary_dim": rotary.rotary_dim, "interleaved": not rotary.is_neox_style}
    self_check.need(
        FAMILY,
        lambda tokens: QkNormShape(
            num_tokens=tokens,
            num_q_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            dtype=str(attention.q_norm.weight.dtype).removeprefix("torch."),  # the cos_sin_cache has it too
            eps=attention.q_norm.variance_epsilon,
            **rope,
        ),
    )
