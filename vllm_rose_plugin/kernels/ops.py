"""``torch.ops.rose.*``: the kernel families as ops that torch.compile does not look into.

Importing this module registers them, once per process. The ops take what the ``reference.py`` of their family takes;
an MXFP8 tensor travels as two tensors (codes, scales), row-major. Where a plain result comes back in place of an MXFP8
one, its scales are an empty ``[..., 0]`` tensor. Every op works on CPU and CUDA tensors and returns new memory.

Each op runs the provider that the self-check chose for its family (``jit/chosen.py``), the reference where none was.
``mxfp8_linear`` runs ours only with scales that ``gemm/weights.py`` packed for the GPU at hand.
``grouped_gemm`` synchronizes with the host (see its reference); the others don't.
"""

import functools
from collections.abc import Callable

import torch

from vllm_rose_plugin.kernels.call_counts import count
from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, Mxfp8Tensor, ScaleLayout
from vllm_rose_plugin.kernels.gemm import flashinfer
from vllm_rose_plugin.kernels.gemm import launch as gemm_launch
from vllm_rose_plugin.kernels.gemm import reference as gemm
from vllm_rose_plugin.kernels.jit import chosen
from vllm_rose_plugin.kernels.jit.chosen import REFERENCE
from vllm_rose_plugin.kernels.moe_combine.reference import combine_tokens
from vllm_rose_plugin.kernels.moe_dispatch.reference import dispatch_tokens, max_rows
from vllm_rose_plugin.kernels.moe_route.reference import route_tokens
from vllm_rose_plugin.kernels.mxfp8_quantize import launch as mxfp8_quantize
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import row_major
from vllm_rose_plugin.kernels.swiglu_quantize import launch as swiglu
from vllm_rose_plugin.kernels.swiglu_quantize.reference import swiglu_quantize

NAMESPACE = "rose"

SCHEMAS = {
    "mxfp8_quantize": '(Tensor x, *, str rounding="rceil") -> (Tensor codes, Tensor scales)',
    "mxfp8_linear": (
        "(Tensor x, Tensor weight, Tensor weight_scales, *, Tensor? x_scales=None, Tensor? bias=None, "
        'str activation="mxfp8", str rounding="rceil", ScalarType? out_dtype=None, Tensor? packed_scales=None, '
        "bool batch_invariant=False) -> Tensor"
    ),
    "moe_route": (
        "(Tensor topk_ids, *, int num_local_experts, Tensor? expert_map=None, int alignment=1) "
        "-> (Tensor expert_counts, Tensor expert_offsets, Tensor slots)"
    ),
    "moe_dispatch": (
        "(Tensor x, Tensor slots, *, int num_local_experts, int alignment=1, Tensor? topk_weights=None, "
        'str activation="mxfp8", str rounding="rceil") -> (Tensor tokens, Tensor scales)'
    ),
    "grouped_gemm": (
        "(Tensor tokens, Tensor? token_scales, Tensor expert_offsets, Tensor expert_counts, Tensor weight, "
        "Tensor weight_scales, *, ScalarType? out_dtype=None) -> Tensor"
    ),
    "swiglu_quantize": (
        '(Tensor x, *, str activation="mxfp8", str rounding="rceil", float? limit=None) -> (Tensor y, Tensor scales)'
    ),
    "moe_combine": ("(Tensor y, Tensor slots, *, Tensor? topk_weights=None, ScalarType? out_dtype=None) -> Tensor"),
}
"""The ops by name. Arguments have the shapes and dtypes of the reference functions."""


def _operand(x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor | Mxfp8Tensor:
    """x with its scales when it is MXFP8; the scales of a plain x are absent or empty."""
    if x.dtype != torch.float8_e4m3fn:
        return x
    if scales is None:
        raise TypeError("float8_e4m3fn activations are MXFP8 codes: pass their scales too")
    return Mxfp8Tensor(x, scales)


def _pair(x: torch.Tensor | Mxfp8Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(x, Mxfp8Tensor):
        return x.codes, x.scales
    return x, _no_scales(x)


def _no_scales(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(*x.shape[:-1], 0, dtype=torch.uint8, device=x.device)


# ---- what the ops do ----


def _provider(family: str, x: torch.Tensor) -> str:
    provider = chosen.provider(family, x)
    count(family, provider)
    return provider


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _mxfp8_quantize(x, *, rounding="rceil"):
    if _provider("mxfp8_quantize", x) == REFERENCE:
        return quantize_mxfp8(x, rounding=rounding)
    out = mxfp8_quantize.quantize_mxfp8(_flat(x), rounding=rounding)
    return out.codes.view(x.shape), out.scales.view(*x.shape[:-1], x.shape[-1] // MXFP8_BLOCK)


def _mxfp8_linear(
    x,
    weight,
    weight_scales,
    *,
    x_scales=None,
    bias=None,
    activation="mxfp8",
    rounding="rceil",
    out_dtype=None,
    packed_scales=None,
    batch_invariant=False,
):
    operand: torch.Tensor | Mxfp8Tensor
    if x_scales is not None and x_scales.ndim == 1:  # tiled, as vLLM's quantizers for tcgen05 leave them
        operand = Mxfp8Tensor(x, x_scales, ScaleLayout.TCGEN05_128X4)
    else:
        operand = _operand(x, x_scales)
    provider = REFERENCE if packed_scales is None else chosen.provider("mxfp8_linear", weight)
    count("mxfp8_linear", provider)
    if provider != REFERENCE:
        packed = gemm_launch.packed_linear_weight(weight, packed_scales)
        if provider == flashinfer.NAME:
            return flashinfer.linear(operand, packed, bias=bias, rounding=rounding, out_dtype=out_dtype)
        return gemm_launch.linear(
            operand,
            packed,
            bias=bias,
            activation=activation,
            rounding=rounding,
            out_dtype=out_dtype,
            batch_invariant=batch_invariant,
        )
    if isinstance(operand, Mxfp8Tensor):
        operand = row_major(operand)
    elif Activation(activation) is Activation.MXFP8:
        out_dtype = out_dtype or x.dtype
        operand = Mxfp8Tensor(*_mxfp8_quantize(operand, rounding=rounding))
    return gemm.mxfp8_linear(
        operand,
        Mxfp8Tensor(weight, weight_scales),
        bias=bias,
        activation=activation,
        rounding=rounding,
        out_dtype=out_dtype,
    )


def _moe_route(topk_ids, *, num_local_experts, expert_map=None, alignment=1):
    count("moe_route", REFERENCE)
    return tuple(
        route_tokens(topk_ids, num_local_experts=num_local_experts, expert_map=expert_map, alignment=alignment)
    )


def _moe_dispatch(x, slots, *, num_local_experts, alignment=1, topk_weights=None, activation="mxfp8", rounding="rceil"):
    count("moe_dispatch", REFERENCE)
    tokens = dispatch_tokens(
        x,
        slots=slots,
        num_local_experts=num_local_experts,
        alignment=alignment,
        topk_weights=topk_weights,
        activation=activation,
        rounding=rounding,
    )
    return _pair(tokens)


def _grouped_gemm(tokens, token_scales, expert_offsets, expert_counts, weight, weight_scales, *, out_dtype=None):
    count("grouped_gemm", REFERENCE)
    return gemm.grouped_gemm(
        _operand(tokens, token_scales),
        Mxfp8Tensor(weight, weight_scales),
        expert_offsets=expert_offsets,
        expert_counts=expert_counts,
        out_dtype=out_dtype,
    )


def _swiglu_quantize(x, *, activation="mxfp8", rounding="rceil", limit=None):
    how = {"activation": activation, "rounding": rounding, "limit": limit}
    if _provider("swiglu_quantize", x) == REFERENCE:
        return _pair(swiglu_quantize(x, **how))
    y, scales = _pair(swiglu.swiglu_quantize(_flat(x), **how))
    return y.view(*x.shape[:-1], y.shape[-1]), scales.view(*x.shape[:-1], scales.shape[-1])


def _moe_combine(y, slots, *, topk_weights=None, out_dtype=None):
    count("moe_combine", REFERENCE)
    return combine_tokens(y, slots=slots, topk_weights=topk_weights, out_dtype=out_dtype)


# ---- what their results look like (torch.compile traces these) ----


def _empty_like_tokens(x: torch.Tensor, shape: tuple, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    if Activation(activation) is Activation.BF16:
        out = x.new_empty(shape)
        return out, _no_scales(out)
    codes = x.new_empty(shape, dtype=torch.float8_e4m3fn)
    return codes, x.new_empty((*shape[:-1], shape[-1] // MXFP8_BLOCK), dtype=torch.uint8)


def _fake_mxfp8_quantize(x, *, rounding="rceil"):
    return _empty_like_tokens(x, tuple(x.shape), "mxfp8")


def _fake_mxfp8_linear(
    x,
    weight,
    weight_scales,
    *,
    x_scales=None,
    bias=None,
    activation="mxfp8",
    rounding="rceil",
    out_dtype=None,
    packed_scales=None,
    batch_invariant=False,
):
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype or x.dtype)


def _fake_moe_route(topk_ids, *, num_local_experts, expert_map=None, alignment=1):
    shapes = ((num_local_experts,), (num_local_experts + 1,), tuple(topk_ids.shape))
    return tuple(topk_ids.new_empty(shape, dtype=torch.int32) for shape in shapes)


def _fake_moe_dispatch(
    x, slots, *, num_local_experts, alignment=1, topk_weights=None, activation="mxfp8", rounding="rceil"
):
    num_tokens, top_k = slots.shape
    num_rows = max_rows(num_tokens=num_tokens, top_k=top_k, num_local_experts=num_local_experts, alignment=alignment)
    return _empty_like_tokens(x, (num_rows, x.shape[-1]), activation)


def _fake_grouped_gemm(tokens, token_scales, expert_offsets, expert_counts, weight, weight_scales, *, out_dtype=None):
    return tokens.new_empty((tokens.shape[0], weight.shape[1]), dtype=out_dtype or tokens.dtype)


def _fake_swiglu_quantize(x, *, activation="mxfp8", rounding="rceil", limit=None):
    return _empty_like_tokens(x, (*x.shape[:-1], x.shape[-1] // 2), activation)


def _fake_moe_combine(y, slots, *, topk_weights=None, out_dtype=None):
    return y.new_empty((slots.shape[0], y.shape[-1]), dtype=out_dtype or y.dtype)


_IMPLEMENTATIONS: dict[str, tuple[Callable, Callable]] = {
    "mxfp8_quantize": (_mxfp8_quantize, _fake_mxfp8_quantize),
    "mxfp8_linear": (_mxfp8_linear, _fake_mxfp8_linear),
    "moe_route": (_moe_route, _fake_moe_route),
    "moe_dispatch": (_moe_dispatch, _fake_moe_dispatch),
    "grouped_gemm": (_grouped_gemm, _fake_grouped_gemm),
    "swiglu_quantize": (_swiglu_quantize, _fake_swiglu_quantize),
    "moe_combine": (_moe_combine, _fake_moe_combine),
}


def register() -> torch.library.Library:
    """Register the ops; a second call (or a reload of this module) finds them and changes nothing.

    The library object is kept on the namespace and not in this module: it would take the ops with it when the module
    goes, and a module that is imported again must find them.
    """
    namespace = getattr(torch.ops, NAMESPACE)
    library = namespace.__dict__.get("_library")
    if library is None:
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        for name, schema in SCHEMAS.items():
            implementation, fake = _IMPLEMENTATIONS[name]
            tags = [torch.Tag.pt2_compliant_tag]
            if name == "grouped_gemm":
                tags.append(torch.Tag.cudagraph_unsafe)  # it reads counts to the host
            library.define(name + schema, tags=tuple(tags))
            library.impl(name, implementation, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{NAMESPACE}::{name}", functools.partial(fake), lib=library)
        namespace.__dict__["_library"] = library
    return library


register()
