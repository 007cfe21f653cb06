"""QK-norm as a family of providers, with what the self-check compares."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vllm_rose_plugin.kernels.jit.chosen import REFERENCE
from vllm_rose_plugin.kernels.jit.providers import Family, Provider
from vllm_rose_plugin.kernels.jit.targets import limits_of
from vllm_rose_plugin.kernels.mxfp8_quantize.family import ROSE, everywhere, on_gpu
from vllm_rose_plugin.kernels.qk_norm import launch
from vllm_rose_plugin.kernels.qk_norm.config import QkNormConfig, choose_config
from vllm_rose_plugin.kernels.qk_norm.reference import normalize_heads, rotate_heads

_ROUNDINGS = 4
"""Steps of the format by which an element may be off, at the size of its head's largest: float32 sums may fall on the
other side of a tie in each of three roundings, and a rotation can cancel what they are measured by."""
_FEW, _DIFFERING = 4, 1e-2
"""Elements that may differ at all, and their share where that is more."""
_CACHE_ROWS = 4096

Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(q, k, q_weight, k_weight, positions, cos_sin_cache) to (q_out, k_out), ``[T, heads, D]`` each; the last two
arguments are None without rotation."""


@dataclass(frozen=True)
class QkNormShape:
    """One call."""

    num_tokens: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """Of q and k: "bfloat16" or "float16"."""
    eps: float
    rotary_dim: int = 0
    """0: the norm alone."""
    interleaved: bool = False
    weight_dtype: str = ""
    """Empty: dtype; or "float32"."""
    cos_sin_dtype: str = ""
    """Empty: dtype; or "float32"."""

    def torch_dtype(self, name: str) -> torch.dtype:
        """Of the field ``name``, empty ones resolved."""
        return getattr(torch, getattr(self, name) or self.dtype)


def make_inputs(shape: QkNormShape, seed: int) -> tuple[torch.Tensor | None, ...]:
    """(q, k, q_weight, k_weight, positions, cos_sin_cache): views into a qkv buffer, each head at a size of its own.

    Where there are several tokens, one has a head of zeros and one a NaN, as padded rows may.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = shape.torch_dtype("dtype")
    generator = torch.Generator(device).manual_seed(seed)
    heads = shape.num_q_heads + 2 * shape.num_kv_heads
    qkv = torch.randn(shape.num_tokens, heads, shape.head_dim, device=device, generator=generator)
    sizes = torch.randint(-6, 7, (shape.num_tokens, heads, 1), device=device, generator=generator)
    qkv *= torch.exp2(sizes.float())
    if shape.num_tokens > 2:
        qkv[-1, 0], qkv[-1, shape.num_q_heads] = 0.0, 0.0
        qkv[-2, -2 * shape.num_kv_heads, 1], qkv[-2, 0, -1] = float("nan"), float("nan")
    qkv = qkv.to(dtype).flatten(1)  # (T, (Hq + 2 Hkv) * D)
    q, k, _ = qkv.split([n * shape.head_dim for n in (shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads)], 1)
    weights = torch.randn(2, shape.head_dim, device=device, generator=generator)
    q_weight, k_weight = weights.to(shape.torch_dtype("weight_dtype"))
    if not shape.rotary_dim:
        return q, k, q_weight, k_weight, None, None
    positions = torch.randint(_CACHE_ROWS, (shape.num_tokens,), device=device, generator=generator)
    frequency = 1e4 ** -(torch.arange(0, shape.rotary_dim, 2, device=device) / shape.rotary_dim)
    angle = torch.arange(_CACHE_ROWS, device=device).unsqueeze(1) * frequency
    return (
        q,
        k,
        q_weight,
        k_weight,
        positions,
        torch.cat([angle.cos(), angle.sin()], 1).to(shape.torch_dtype("cos_sin_dtype")),
    )


def by_reference(shape: QkNormShape) -> Kernel:
    """Plain torch."""
    return partial(_reference, shape)


def _reference(shape, q, k, q_weight, k_weight, positions, cos_sin_cache):
    results = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        heads = normalize_heads(x.unflatten(1, (-1, shape.head_dim)), weight, eps=shape.eps)  # (T, H, D)
        if shape.rotary_dim:
            heads = rotate_heads(heads, positions, cos_sin_cache, interleaved=shape.interleaved)
        results.append(heads)
    return tuple(results)


def by_rose(shape: QkNormShape) -> Kernel:
    """Our kernel, compiled, or loaded, for every number of tokens before this returns."""
    launch.warm_up(**config_arguments(shape))
    return partial(_rose, shape)


def config_of(shape: QkNormShape, target: str, sm_count: int) -> QkNormConfig:
    """Of our kernel: q and k are views into a qkv buffer that is aligned as torch allocates it, like all the rest."""
    return choose_config(
        num_tokens=shape.num_tokens,
        weight_offset=0.0,
        alignment=launch.ALIGNMENT,
        widest_load_bits=limits_of(target).widest_access,
        sm_count=sm_count,
        **config_arguments(shape),
    )


def config_arguments(shape: QkNormShape) -> dict[str, Any]:
    rope: dict[str, Any] = {}
    if shape.rotary_dim:
        dtype = shape.torch_dtype("cos_sin_dtype")
        row = shape.rotary_dim * dtype.itemsize
        rope = {
            "rotary_dim": shape.rotary_dim,
            "interleaved": shape.interleaved,
            "cos_sin_dtype": dtype,
            "cos_sin_alignment": min(launch.ALIGNMENT, row & -row),
        }
    return {
        "num_q_heads": shape.num_q_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "dtype": shape.torch_dtype("dtype"),
        "weight_dtype": shape.torch_dtype("weight_dtype"),
        "eps": shape.eps,
        **rope,
    }


def _rose(shape, q, k, q_weight, k_weight, positions, cos_sin_cache):
    q_out, k_out = (x.new_empty(x.shape[0], x.shape[1] // shape.head_dim, shape.head_dim) for x in (q, k))
    tensors = {"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight, "q_out": q_out, "k_out": k_out}
    if shape.rotary_dim:
        rope = {"positions": positions, "cos_sin_cache": cos_sin_cache, "interleaved": shape.interleaved}
        launch.qk_norm_rope(**tensors, **rope, eps=shape.eps)
    else:
        launch.qk_norm(**tensors, eps=shape.eps)
    return q_out, k_out


def compare(result: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> str:
    """Every element within a few rounding steps at the size of its head, and few that differ at all."""
    for name, a, b in zip(("q", "k"), result, expected, strict=True):
        if not torch.equal(a.isnan(), b.isnan()):
            return f"other elements of {name} are NaN"
        difference = (a.float() - b.float()).abs().nan_to_num()  # (T, H, D)
        bound = _ROUNDINGS * torch.finfo(b.dtype).eps * b.float().abs().nan_to_num().amax(-1, keepdim=True)
        far = (difference > bound).any(-1).nonzero()
        if len(far):
            token, head = far[0].tolist()
            return f"{len(far)} heads of {name} are off by more than rounding, the first is {head} of token {token}"
        differing = int((difference > 0).sum())
        if differing > max(_FEW, _DIFFERING * difference.numel()):
            return f"{differing} of {difference.numel()} elements of {name} differ"
    return ""


FAMILY = Family(
    name="qk_norm",
    reference=Provider(name=REFERENCE, supports=everywhere, make=by_reference),
    providers=(Provider(name=ROSE, supports=on_gpu, make=by_rose),),
    make_inputs=make_inputs,
    compare=compare,
    config_of=config_of,
)
