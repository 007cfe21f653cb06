"""The host side: checks the tensors, picks a compiled kernel, launches it."""

import functools

import torch

from vllm_rose_plugin.kernels.jit.compile import compile, current_target
from vllm_rose_plugin.kernels.jit.targets import limits_of
from vllm_rose_plugin.kernels.qk_norm.config import QkNormConfig, choose_config, model_configs

FAMILY = "qk_norm"
ALIGNMENT = 32
"""Bytes to which every head is aligned in memory of torch's own, as far as any load looks."""
_MAX_HEAD_STRIDE = 1 << 30
"""Elements that all heads of one token may span: the kernel counts their bytes in 32 bits."""


def qk_norm(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
) -> None:
    """RMS norm of every head of q and k, in one launch.

    Roundings are those of vLLM's RMSNorm, see `reference.py`. A row's result depends neither on the other rows nor on
    how many there are.

    Args:
        q: ``[T, Hq, D]`` or ``[T, Hq * D]`` bf16 or fp16 on a GPU, D = 64, 128 or 256. Views into a qkv buffer are
            meant to come here: any strides, as long as the elements of a head are consecutive.
        k: ``[T, Hkv, D]`` or ``[T, Hkv * D]``, like q.
        q_weight: ``[D]`` in q's dtype or float32.
        k_weight: ``[D]`` in q_weight's dtype.
        eps: added to the mean of squares.
        weight_offset: added to the weights in float32 (1.0: Gemma's norm).
        q_out: shaped like q, any strides; must be q or not overlap it. None: in place.
        k_out: as q_out, for k.

    Raises:
        ValueError: a shape, dtype, device or stride outside of these, naming it.
    """
    _launch(q, k, q_weight, k_weight, eps, weight_offset, q_out, k_out, None, None, False)


def qk_norm_rope(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool = False,
    weight_offset: float = 0.0,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
) -> None:
    """`qk_norm` followed by the rotary embedding, still one launch.

    Args:
        positions: ``[T]`` int64, contiguous; rows of the cache. A position outside of it reads memory that isn't the
            cache's.
        cos_sin_cache: ``[P, rotary_dim]`` in q's dtype or float32, contiguous; first the cosines, then the sines.
            Elements of a head from rotary_dim on are only normalized.
        interleaved: pairs are (2i, 2i + 1) (GPT-J); otherwise (i, i + rotary_dim / 2) (NeoX).

    The others are those of `qk_norm`.

    Raises:
        ValueError: as `qk_norm`; also a rotary_dim that the lanes of the kernel can't share, see `rope_fits`.
    """
    _launch(q, k, q_weight, k_weight, eps, weight_offset, q_out, k_out, positions, cos_sin_cache, interleaved)


def compile_config(config: QkNormConfig):
    """The callable of a config, from memory, disk or the compiler. Warm-up calls this, so that no request compiles."""
    from vllm_rose_plugin.kernels.qk_norm.kernel import build

    return compile(family=FAMILY, config=config, build=build)


def warm_up(**arguments) -> None:
    """Compile, or load, both kernels of a model with aligned tensors on the current device.

    Args:
        arguments: num_q_heads, num_kv_heads, head_dim, dtype, weight_dtype, eps, and with rotary embedding rotary_dim,
            interleaved and cos_sin_dtype, as in `choose_config`.
    """
    device = torch.cuda.current_device()
    limits = limits_of(current_target())
    for config in model_configs(
        weight_offset=0.0,
        alignment=ALIGNMENT,
        widest_load_bits=limits.widest_access,
        sm_count=torch.cuda.get_device_properties(device).multi_processor_count,
        **arguments,
    ):
        compile_config(config)


def _launch(q, k, q_weight, k_weight, eps, weight_offset, q_out, k_out, positions, cos_sin_cache, interleaved) -> None:
    head_dim = q_weight.shape[0]
    q, k = _heads("q", q, head_dim), _heads("k", k, head_dim)  # (T, Hq, D), (T, Hkv, D)
    q_out = q if q_out is None else _heads("q_out", q_out, head_dim)
    k_out = k if k_out is None else _heads("k_out", k_out, head_dim)
    _check(q, k, q_weight, k_weight, q_out, k_out)
    rotary_dim, cos_sin_dtype, cos_sin_alignment = 0, None, 16
    if cos_sin_cache is not None:
        _check_rope(q, positions, cos_sin_cache)
        rotary_dim, cos_sin_dtype = cos_sin_cache.shape[1], cos_sin_cache.dtype
        cos_sin_alignment = _alignment(cos_sin_cache)
    if q.shape[0] == 0:
        return
    with torch.cuda.device(q.device):
        kernel = _kernel(
            q.device.index,
            num_tokens=1 << (q.shape[0] - 1).bit_length(),
            num_q_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=head_dim,
            dtype=q.dtype,
            weight_dtype=q_weight.dtype,
            eps=float(eps),
            weight_offset=float(weight_offset),
            alignment=min(_alignment(q), _alignment(k), _alignment(q_out), _alignment(k_out)),
            weight_alignment=min(_alignment(q_weight), _alignment(k_weight)),
            rotary_dim=rotary_dim,
            interleaved=bool(interleaved),
            cos_sin_dtype=cos_sin_dtype,
            cos_sin_alignment=cos_sin_alignment,
        )
        kernel(q, k, q_out, k_out, q_weight, k_weight, positions, cos_sin_cache)


@functools.lru_cache(maxsize=1024)
def _kernel(device: int, **arguments):
    """One lookup per call where the sizes have been seen: tokens come rounded up to a power of two."""
    limits = limits_of(current_target())
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    config = choose_config(sm_count=sm_count, widest_load_bits=limits.widest_access, **arguments)
    return compile_config(config)


def _heads(name: str, x: torch.Tensor, head_dim: int) -> torch.Tensor:
    if x.dim() == 2 and x.shape[1] % head_dim == 0 and x.stride(1) == 1:
        x = x.unflatten(1, (x.shape[1] // head_dim, head_dim))
    if x.dim() != 3 or x.shape[2] != head_dim:
        raise ValueError(
            f"qk_norm: {name} is {tuple(x.shape)}; with weights of {head_dim} it must be (T, heads, {head_dim}) "
            f"or (T, heads * {head_dim})"
        )
    if x.stride(2) != 1:
        raise ValueError(f"qk_norm: the elements of a head of {name} are {x.stride(2)} apart, they must be consecutive")
    return x


def _check(q, k, q_weight, k_weight, q_out, k_out) -> None:
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"qk_norm: q has {q.shape[0]} tokens and k {k.shape[0]}")
    for name, x, like in (("q_out", q_out, q), ("k_out", k_out, k)):
        if x.shape != like.shape:
            raise ValueError(f"qk_norm: {name} is {tuple(x.shape)}, it must be {tuple(like.shape)}")
    for name, x in (("k", k), ("q_out", q_out), ("k_out", k_out)):
        if x.dtype != q.dtype:
            raise ValueError(f"qk_norm: {name} is {x.dtype}, it must be {q.dtype} like q")
    if k_weight.shape != q_weight.shape or k_weight.dtype != q_weight.dtype:
        raise ValueError(
            f"qk_norm: k_weight is {tuple(k_weight.shape)} {k_weight.dtype}, it must be like q_weight, "
            f"{tuple(q_weight.shape)} {q_weight.dtype}"
        )
    named = {"q": q, "k": k, "q_out": q_out, "k_out": k_out, "q_weight": q_weight, "k_weight": k_weight}
    for name, x in named.items():
        if not x.is_cuda or x.device != q.device:
            raise ValueError(f"qk_norm: {name} is on {x.device}, all tensors must be on one GPU")
        if x.dim() == 1 and x.stride(0) != 1:
            raise ValueError(f"qk_norm: {name} must be contiguous")
        if x.dim() == 3 and x.shape[1] > 1 and abs(x.stride(1)) * x.shape[1] >= _MAX_HEAD_STRIDE:
            raise ValueError(
                f"qk_norm: the heads of {name} are {x.stride(1)} elements apart, {x.shape[1]} of them must stay under "
                f"{_MAX_HEAD_STRIDE}"
            )


def _check_rope(q, positions, cos_sin_cache) -> None:
    if positions.shape != (q.shape[0],) or positions.dtype != torch.int64 or not positions.is_contiguous():
        raise ValueError(
            f"qk_norm: positions are {tuple(positions.shape)} {positions.dtype}, they must be ({q.shape[0]},) "
            "torch.int64 and contiguous"
        )
    if cos_sin_cache.dim() != 2 or not cos_sin_cache.is_contiguous():
        raise ValueError(
            f"qk_norm: cos_sin_cache is {tuple(cos_sin_cache.shape)}, it must be (P, rotary_dim), contiguous"
        )
    for name, x in (("positions", positions), ("cos_sin_cache", cos_sin_cache)):
        if x.device != q.device:
            raise ValueError(f"qk_norm: {name} is on {x.device}, all tensors must be on one GPU")


def _alignment(x: torch.Tensor) -> int:
    """Bytes, up to ALIGNMENT, that divide the address of every row of the last dimension."""
    bits = ALIGNMENT | x.data_ptr()
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size > 1:
            bits |= stride * x.element_size()
    return bits & -bits
