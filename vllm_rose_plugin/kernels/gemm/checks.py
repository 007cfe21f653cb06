"""What the host functions of the GEMM refuse, with messages that name the value and what is legal."""

import torch

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, ScaleLayout, TokenFormat
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight, is_sm90
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import padded_blocks, padded_rows, permuted_size, scale_shape

OUT_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""What a plain result may be."""
_SCALE_TILE_BYTES = 512
_SCALES_ALIGNMENT = 128


def check_on_gpu(what: str, x: torch.Tensor) -> None:
    if not x.is_cuda:
        raise ValueError(f"{what} can't be on {x.device}: the kernel runs on CUDA devices, the reference elsewhere")


def check_k(k: int, weight: PackedWeight) -> None:
    if k != weight.k:
        raise ValueError(f"tokens have K = {k}, the weight [{weight.n}, {weight.k}] needs {weight.k}")


def check_call(
    tokens: PackedTokens, weight: PackedWeight, expert_offsets: torch.Tensor, expert_counts: torch.Tensor
) -> None:
    device, groups = weight.codes.device, weight.num_groups
    check_on_gpu("the tokens", tokens.data)
    if tokens.data.device != device:
        raise ValueError(f"tokens are on {tokens.data.device}, the weight on {device}")
    check_k(tokens.k, weight)
    check_tensor("expert_offsets", expert_offsets, torch.int32, (groups + 1,), device, alignment=4)
    check_tensor("expert_counts", expert_counts, torch.int32, (groups,), device, alignment=4)


def check_packed(tokens: PackedTokens, weight: PackedWeight) -> None:
    """That tokens are what their format says, and the target reads it."""
    legal = (
        (TokenFormat.MXFP8_FP32_SCALES, TokenFormat.BF16_PERMUTED)
        if is_sm90(weight.target)
        else (TokenFormat.MXFP8_TCGEN05,)
    )
    if tokens.token_format not in legal:
        raise ValueError(f"{weight.target} reads {' or '.join(str(f) for f in legal)}, got {tokens.token_format}")
    check_tokens(tokens, weight.codes.device)


def check_tokens(tokens: PackedTokens, device: torch.device, *, num_groups: int = 0) -> None:
    """That tokens are what their format says.

    Args:
        num_groups: where tiled scales are written, so that every run may begin a tile of its own.
    """
    s, k = tokens.num_rows, tokens.k
    if tokens.token_format is TokenFormat.BF16_PERMUTED:
        check_tensor("tokens", tokens.data, torch.bfloat16, (s, permuted_size(k)), device)
        return
    check_tensor("tokens", tokens.data, torch.float8_e4m3fn, (s, k), device)
    assert tokens.scales is not None
    if tokens.token_format is TokenFormat.MXFP8_FP32_SCALES:
        shape = scale_shape(num_rows=s, hidden_size=k, layout=ScaleLayout.FP32_K_MAJOR)
        check_tensor("token scales", tokens.scales, torch.float32, shape, device)
        return
    least = padded_rows(s) * padded_blocks(k // MXFP8_BLOCK)
    if num_groups:
        least = tiled_bytes(s, k, num_groups=num_groups)
    if tokens.scales.numel() < least or tokens.scales.numel() % _SCALE_TILE_BYTES:
        raise ValueError(
            f"tiled scales of {s} tokens are whole tiles of {_SCALE_TILE_BYTES} bytes, at least {least} of them, "
            f"got {tokens.scales.numel()}"
        )
    size = (tokens.scales.numel(),)
    check_tensor("token scales", tokens.scales, torch.uint8, size, device, alignment=_SCALES_ALIGNMENT)


def tiled_bytes(num_rows: int, k: int, *, num_groups: int) -> int:
    """Tiled scales of runs of any lengths, num_rows in all, each of which begins a tile of its own."""
    tiles = num_rows // 128 + min(num_groups, num_rows)
    return tiles * 128 * padded_blocks(k // MXFP8_BLOCK)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
    *,
    alignment: int = 16,
) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {dtype} {shape} on {device}, "
            f"got {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
        )
    if tensor.data_ptr() % alignment and tensor.numel():
        raise ValueError(f"{name} must start at a multiple of {alignment} bytes, got {tensor.data_ptr():#x}")


def checked_out_dtype(own: torch.dtype | None, asked: torch.dtype | None) -> torch.dtype:
    dtype = asked or own
    if dtype is None:
        raise TypeError("MXFP8 activations carry no output dtype: pass out_dtype (bf16 or fp16)")
    if dtype not in OUT_DTYPES:
        raise TypeError(f"the kernel writes bf16 or fp16, got {dtype}: pass out_dtype, or serve with --dtype bfloat16")
    return dtype
