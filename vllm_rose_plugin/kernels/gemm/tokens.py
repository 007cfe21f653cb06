"""The token operand of a GEMM, in the formats that its kernels read: the index functions, and plain torch that packs.

The torch packer is the oracle of the quantizers that write these formats on a GPU. See :class:`TokenFormat`.

Why k is permuted: sm_90's W8A16 kernel turns weight codes into bf16 in the registers that feed the matrix instruction.
There, lane q of four holds k 2q, 2q+1, 2q+8 and 2q+9 of each 16. So that it can read 16 codes with one instruction, it
takes bytes 16q to 16q+15 of each 64 and calls them by those k; the tokens' k must follow. The order of additions inside
the tensor core changes, the products don't.
"""

from dataclasses import dataclass

import torch

from vllm_rose_plugin.kernels.contracts import (
    MXFP8_BLOCK,
    Activation,
    Mxfp8Tensor,
    Rounding,
    ScaleLayout,
    TokenFormat,
)
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8, e8m0_to_float, quantize_mxfp8
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import (
    PERMUTED_K,
    fp32_pitch,
    permuted_size,
    row_major,
    scale_shape,
    tile_scales,
)

LAYOUT_OF = {
    TokenFormat.MXFP8_FP32_SCALES: ScaleLayout.FP32_K_MAJOR,
    TokenFormat.MXFP8_TCGEN05: ScaleLayout.TCGEN05_128X4,
}
"""Of the scales, in formats that have any."""


@dataclass(frozen=True)
class PackedTokens:
    """Tokens ready for a kernel: what a quantizer wrote, and what it means."""

    token_format: TokenFormat
    data: torch.Tensor  # [S, K] float8_e4m3fn, or [S, ceil(K/64) * 64] bfloat16 when BF16_PERMUTED
    scales: torch.Tensor | None  # as the format says; None when BF16_PERMUTED
    k: int

    @property
    def num_rows(self) -> int:
        """S."""
        return self.data.shape[0]

    @classmethod
    def of(cls, tokens: Mxfp8Tensor) -> "PackedTokens":
        """What a quantizer gave with a layout that a kernel reads.

        Raises:
            ValueError: the scales lie as no kernel reads them.
        """
        for token_format, layout in LAYOUT_OF.items():
            if tokens.layout is layout:
                return cls(token_format, tokens.codes, tokens.scales, tokens.codes.shape[-1])
        raise ValueError(
            f"tokens have scales {tokens.layout}; kernels read {', '.join(str(x) for x in LAYOUT_OF.values())}"
        )


def source_of(slot: int) -> int:
    """The k, within 64, whose value lies in `slot` of a permuted block of 64."""
    step, in_step = divmod(slot, 16)  # of the matrix instruction, 16 k each
    half, in_half = divmod(in_step, 8)
    lane, element = divmod(in_half, 2)
    return 16 * lane + 4 * step + 2 * element + half


def slot_of(k: int) -> int:
    """The inverse of :func:`source_of`."""
    lane, byte = divmod(k, 16)
    step, in_word = divmod(byte, 4)
    element, half = divmod(in_word, 2)
    return 16 * step + 8 * half + 2 * lane + element


def permute_k(x: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` to ``[..., ceil(K/64) * 64]`` with the k of every 64 permuted, zero where K ends earlier."""
    size = permuted_size(x.shape[-1])
    padded = torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    order = torch.tensor([source_of(slot) for slot in range(PERMUTED_K)], device=x.device)
    return padded.unflatten(-1, (-1, PERMUTED_K)).index_select(-1, order).flatten(-2)


def unpermute_k(x: torch.Tensor, *, k: int) -> torch.Tensor:
    """The inverse of :func:`permute_k`: ``[..., k]``."""
    order = torch.tensor([slot_of(source) for source in range(PERMUTED_K)], device=x.device)
    return x.unflatten(-1, (-1, PERMUTED_K)).index_select(-1, order).flatten(-2)[..., :k].contiguous()


def fp32_scales(scales: torch.Tensor) -> torch.Tensor:
    """Row-major E8M0 scales ``[S, K/32]`` as ``FP32_K_MAJOR``: float32 ``[K/32, ceil(S/4) * 4]``, NaN past S."""
    num_rows, num_blocks = scales.shape
    out = torch.full((num_blocks, fp32_pitch(num_rows)), float("nan"), dtype=torch.float32, device=scales.device)
    out[:, :num_rows] = e8m0_to_float(scales).t()
    return out


def pack_tokens(
    x: torch.Tensor | Mxfp8Tensor,
    *,
    token_format: TokenFormat,
    activation: Activation | str = Activation.MXFP8,
    rounding: Rounding | str = Rounding.RCEIL,
) -> PackedTokens:
    """Bring tokens into a kernel's format, in plain torch, on any device.

    Args:
        x: bf16, fp16 or fp32 ``[S, K]``, K a multiple of 32, or MXFP8 with row-major scales.
        token_format: what the kernel reads.
        activation: whether a plain x is quantized. MXFP8 formats hold nothing else. As BF16_PERMUTED, quantized values
            are exact, but for those below bf16's 2**-133, which are rounded, and those of 2**128, which are inf.
        rounding: how x is quantized.

    Raises:
        ValueError: a shape, a layout or a combination that doesn't fit; the message names it.
    """
    activation = Activation(activation)
    shape = x.codes.shape if isinstance(x, Mxfp8Tensor) else x.shape
    if len(shape) != 2 or shape[1] % MXFP8_BLOCK:
        raise ValueError(f"tokens must be [S, K] with K a multiple of {MXFP8_BLOCK}, got {tuple(shape)}")
    if isinstance(x, Mxfp8Tensor) and x.layout is not ScaleLayout.ROW_MAJOR:
        raise ValueError(f"quantized tokens must have scales {ScaleLayout.ROW_MAJOR}, got {x.layout}")
    k = shape[1]
    if token_format is TokenFormat.BF16_PERMUTED:
        if isinstance(x, torch.Tensor) and activation is Activation.MXFP8:
            x = Mxfp8Tensor(*quantize_mxfp8(x, rounding=rounding))
        if isinstance(x, Mxfp8Tensor):
            plain = dequantize_mxfp8(x.codes, x.scales, dtype=torch.bfloat16)
        else:
            plain = x.to(torch.bfloat16)
        return PackedTokens(token_format, permute_k(plain), None, k)
    if isinstance(x, torch.Tensor):
        if activation is not Activation.MXFP8:
            raise ValueError(f"{token_format} holds quantized tokens only, got activation={activation.value!r}")
        x = Mxfp8Tensor(*quantize_mxfp8(x, rounding=rounding))
    tiled = token_format is TokenFormat.MXFP8_TCGEN05
    return PackedTokens(token_format, x.codes, tile_scales(x.scales) if tiled else fp32_scales(x.scales), k)


def unpack_tokens(tokens: PackedTokens) -> torch.Tensor:
    """float32 ``[S, K]``: the values that a kernel multiplies. Where scales are tiled, runs must be padded to tiles."""
    if tokens.token_format is TokenFormat.BF16_PERMUTED:
        return unpermute_k(tokens.data, k=tokens.k).float()
    assert tokens.scales is not None
    scales, layout = tokens.scales, LAYOUT_OF[tokens.token_format]
    if layout is ScaleLayout.TCGEN05_128X4:  # a GEMM that writes tokens leaves room for runs that aren't padded
        (size,) = scale_shape(num_rows=tokens.num_rows, hidden_size=tokens.k, layout=layout)
        scales = scales[:size]
    plain = row_major(Mxfp8Tensor(tokens.data, scales, layout))
    return dequantize_mxfp8(plain.codes, plain.scales)
