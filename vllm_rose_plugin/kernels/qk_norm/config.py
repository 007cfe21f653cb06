"""What a QK-norm kernel is compiled for, and how a call chooses it."""

from dataclasses import dataclass

import torch

HEAD_DIMS = (64, 128, 256)
_WARP = 32
_DTYPES = (torch.bfloat16, torch.float16)

_RESIDENT_THREADS = 2048
"""Per SM. As long as one head per group of lanes fills the device at most once, each group takes one head; beyond it
several, so that more bytes are in flight and cosines are read once for all of them."""


@dataclass(frozen=True)
class QkNormConfig:
    """Constants of one compiled kernel. Its repr is part of the cache key."""

    head_dim: int
    num_q_heads: int
    num_kv_heads: int
    dtype: str
    """Of q, k and the outputs: "bfloat16" or "float16"."""
    weight_dtype: str
    """dtype, or "float32"."""
    eps: float
    weight_offset: float
    """Added to the weight in float32: 1.0 for Gemma's and Qwen3-Next's norm, 0.0 otherwise."""
    elements_per_lane: int
    """Consecutive elements of a head that one lane holds."""
    vector_bits: int
    """Widest load and store that every head's address allows; a lane takes several for its elements where it must."""
    weight_bits: int
    """Widest load of the weights."""
    heads_per_lane: int
    """Heads of one token that a lane works on, all of their loads in flight at once."""
    threads: int
    rotary_dim: int
    """Leading elements of a head that are rotated; 0: no rotary embedding."""
    interleaved: bool
    """Pairs are (2i, 2i + 1) (GPT-J); otherwise (i, i + rotary_dim / 2) (NeoX)."""
    cos_sin_dtype: str
    """Of the cache; "" without rotary embedding."""
    cos_sin_bits: int
    """Widest load of the cache, 0 without rotary embedding."""

    @property
    def lanes_per_head(self) -> int:
        return self.head_dim // self.elements_per_lane

    @property
    def groups_per_token(self) -> int:
        """Lane groups that share the heads of one token."""
        return -(-(self.num_q_heads + self.num_kv_heads) // self.heads_per_lane)

    @property
    def groups_per_block(self) -> int:
        return self.threads // self.lanes_per_head


def choose_config(
    *,
    num_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    eps: float,
    weight_offset: float,
    alignment: int,
    widest_load_bits: int,
    sm_count: int,
    weight_alignment: int = 16,
    rotary_dim: int = 0,
    interleaved: bool = False,
    cos_sin_dtype: torch.dtype | None = None,
    cos_sin_alignment: int = 16,
) -> QkNormConfig:
    """The kernel for a call.

    Args:
        num_tokens: decides between the decode shape (one head per lane) and the prefill shape (64 bytes in flight per
            lane).
        num_q_heads: heads of q, at least 1.
        num_kv_heads: heads of k, at least 1.
        head_dim: 64, 128 or 256.
        dtype: bf16 or fp16, of q, k and the outputs.
        weight_dtype: dtype, or fp32.
        eps: added to the mean of squares.
        weight_offset: added to the weights.
        alignment: bytes, a power of two, that divide the address of every head of every tensor.
        widest_load_bits: what the target can load at once: 128 on Hopper, 256 from Blackwell on.
        sm_count: of the device.
        weight_alignment: bytes, a power of two, that divide the addresses of both weights.
        rotary_dim: 0, or the even number of leading elements that are rotated.
        interleaved: the pairing of the rotary embedding.
        cos_sin_dtype: dtype of the cache, None without rotary embedding.
        cos_sin_alignment: bytes, a power of two, that divide the addresses of the cache's rows.

    Raises:
        ValueError: a value outside its range, or a rotary_dim that splits the elements of one lane.
    """
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"qk_norm: head_dim is {head_dim}, it must be one of {HEAD_DIMS}")
    if dtype not in _DTYPES:
        raise ValueError(f"qk_norm: dtype is {dtype}, it must be torch.bfloat16 or torch.float16")
    if weight_dtype not in (dtype, torch.float32):
        raise ValueError(
            f"qk_norm: the weights are {weight_dtype}, they must be {dtype} like q and k, or torch.float32"
        )
    if num_q_heads < 1 or num_kv_heads < 1:
        raise ValueError(f"qk_norm: {num_q_heads} q heads and {num_kv_heads} k heads; each must be at least 1")
    for name, value in (("", alignment), ("weight_", weight_alignment), ("cos_sin_", cos_sin_alignment)):
        if value < 2 or value & (value - 1):
            raise ValueError(f"qk_norm: {name}alignment is {value} bytes, it must be a power of two of at least 2")
    if rotary_dim and cos_sin_dtype not in (dtype, torch.float32):
        raise ValueError(f"qk_norm: the cos_sin_cache is {cos_sin_dtype}, it must be {dtype} or torch.float32")

    widest = min(alignment * 8, widest_load_bits)
    elements = _elements_per_lane(head_dim, rotary_dim, interleaved, wide=widest > 128)
    heads = num_q_heads + num_kv_heads
    prefill = num_tokens * heads * (head_dim // elements) > sm_count * _RESIDENT_THREADS
    return QkNormConfig(
        head_dim=head_dim,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        dtype=_name(dtype),
        weight_dtype=_name(weight_dtype),
        eps=eps,
        weight_offset=weight_offset,
        elements_per_lane=elements,
        vector_bits=min(widest, elements * 16),
        heads_per_lane=min(32 // elements if prefill else 1, heads),
        threads=256 if prefill else 128,
        weight_bits=min(weight_alignment * 8, 128),
        rotary_dim=rotary_dim,
        interleaved=bool(rotary_dim) and interleaved,
        cos_sin_dtype=_name(cos_sin_dtype) if rotary_dim and cos_sin_dtype else "",
        cos_sin_bits=min(cos_sin_alignment * 8, 128) if rotary_dim else 0,
    )


def model_configs(**arguments) -> list[QkNormConfig]:
    """All configs that calls of a model can choose, the arguments being those of `choose_config` without num_tokens:
    what a warm-up compiles."""
    return list(dict.fromkeys(choose_config(num_tokens=tokens, **arguments) for tokens in (1, 1 << 40)))


def rope_fits(*, head_dim: int, rotary_dim: int, interleaved: bool) -> bool:
    """Whether the fused kernel can do a model's rotary embedding."""
    try:
        _elements_per_lane(head_dim, rotary_dim, interleaved, wide=False)
    except ValueError:
        return False
    return head_dim in HEAD_DIMS


def _elements_per_lane(head_dim: int, rotary_dim: int, interleaved: bool, *, wide: bool) -> int:
    """Elements of a lane: 16 for 256-bit accesses, else 8 whatever the alignment, so that narrower loads give the same
    bits; fewer where the rotated part ends inside a lane's elements."""
    if rotary_dim % 2 or not 0 <= rotary_dim <= head_dim:
        raise ValueError(f"qk_norm: rotary_dim is {rotary_dim}, it must be even and at most head_dim, {head_dim}")
    boundary = rotary_dim if interleaved else rotary_dim // 2
    smallest = max(2, head_dim // _WARP)
    elements = 16 if wide else 8
    while elements >= smallest:
        if boundary % elements == 0:
            return elements
        elements //= 2
    unit = smallest if interleaved else 2 * smallest
    raise ValueError(
        f"qk_norm: rotary_dim is {rotary_dim}, it must be a multiple of {unit} for head_dim {head_dim}"
        f" ({'interleaved' if interleaved else 'NeoX'}); use qk_norm and vLLM's rotary embedding instead"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
