"""``torch.ops.rose.qk_norm`` and ``torch.ops.rose.qk_norm_rope``, which torch.compile does not look into.

Importing this module registers them, once per process. Both return new memory although the kernel could work in place:
a functional op needs no help from inductor, while an op that mutates two views of the qkv buffer would have it copied
(v, the third view, is read later, so the mutation can't be made in place again). The bytes that move are the same.
"""

import functools
from collections.abc import Callable

import torch

from vllm_rose_plugin.kernels.call_counts import count
from vllm_rose_plugin.kernels.jit import chosen
from vllm_rose_plugin.kernels.jit.chosen import REFERENCE
from vllm_rose_plugin.kernels.qk_norm import launch
from vllm_rose_plugin.kernels.qk_norm.family import FAMILY
from vllm_rose_plugin.kernels.qk_norm.reference import normalize_heads, rotate_heads

NAMESPACE = "rose"

SCHEMAS = {
    "qk_norm": ("(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, *, float eps) -> (Tensor q_out, Tensor k_out)"),
    "qk_norm_rope": (
        "(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor positions, Tensor cos_sin_cache, *, "
        "float eps, bool interleaved=False) -> (Tensor q_out, Tensor k_out)"
    ),
}
"""q ``[T, Hq * D]`` and k ``[T, Hkv * D]`` may be views into the qkv buffer; the results are contiguous, of the same
shapes. The rest is as in ``launch.py``. On a CPU, and until a self-check chose a provider, the reference computes."""


def _qk_norm(q, k, q_weight, k_weight, *, eps):
    provider = chosen.provider(FAMILY.name, q)
    count("qk_norm", provider)
    if provider == REFERENCE:
        return _by_reference(q, q_weight, eps, None), _by_reference(k, k_weight, eps, None)
    q_out, k_out = _fake_qk_norm(q, k, q_weight, k_weight, eps=eps)
    launch.qk_norm(q=q, k=k, q_weight=q_weight, k_weight=k_weight, eps=eps, q_out=q_out, k_out=k_out)
    return q_out, k_out


def _qk_norm_rope(q, k, q_weight, k_weight, positions, cos_sin_cache, *, eps, interleaved=False):
    provider = chosen.provider(FAMILY.name, q)
    count("qk_norm_rope", provider)
    if provider == REFERENCE:
        rope = positions, cos_sin_cache, interleaved
        return _by_reference(q, q_weight, eps, rope), _by_reference(k, k_weight, eps, rope)
    q_out, k_out = _fake_qk_norm(q, k, q_weight, k_weight, eps=eps)
    launch.qk_norm_rope(
        q=q,
        k=k,
        q_weight=q_weight,
        k_weight=k_weight,
        eps=eps,
        positions=positions,
        cos_sin_cache=cos_sin_cache,
        interleaved=interleaved,
        q_out=q_out,
        k_out=k_out,
    )
    return q_out, k_out


def _by_reference(x, weight, eps, rope):
    heads = normalize_heads(x.unflatten(-1, (-1, weight.shape[0])), weight, eps=eps)  # (T, H, D)
    if rope is not None:
        positions, cos_sin_cache, interleaved = rope
        heads = rotate_heads(heads, positions, cos_sin_cache, interleaved=interleaved)
    return heads.flatten(-2)


def _fake_qk_norm(q, k, q_weight, k_weight, *, eps):
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _fake_qk_norm_rope(q, k, q_weight, k_weight, positions, cos_sin_cache, *, eps, interleaved=False):
    return q.new_empty(q.shape), k.new_empty(k.shape)


_IMPLEMENTATIONS: dict[str, tuple[Callable, Callable]] = {
    "qk_norm": (_qk_norm, _fake_qk_norm),
    "qk_norm_rope": (_qk_norm_rope, _fake_qk_norm_rope),
}


def register() -> torch.library.Library:
    """Register the ops; a second call (or a reload of this module) finds them and changes nothing.

    As in ``kernels/ops.py``, the library object is kept on the namespace, so that the ops outlive this module.
    """
    namespace = getattr(torch.ops, NAMESPACE)
    library = namespace.__dict__.get("_qk_norm_library")
    if library is None:
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        for name, schema in SCHEMAS.items():
            implementation, fake = _IMPLEMENTATIONS[name]
            library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
            library.impl(name, implementation, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{NAMESPACE}::{name}", functools.partial(fake), lib=library)
        namespace.__dict__["_qk_norm_library"] = library
    return library


register()
