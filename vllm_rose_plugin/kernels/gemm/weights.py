"""The weight operand of a GEMM: codes as the checkpoint has them, scales copied into the order a kernel reads them in.

sm_90: ``[G, ceil(N/64), ceil(K/128), 64, 4]``: the 256 bytes that belong to 64 rows x 128 k lie together and ride with
every stage of weights. With gate_up, rows are in the kernel's order: it loads 8 gate rows, then the 8 up rows of the
same elements, and so on, so that one thread holds both. What fills up the last rows and blocks is 127, a scale of 1.

sm_100 and later: ``TCGEN05_128X4`` for each group; with gate_up for the gate rows, then for the up rows, each filled up
to whole tiles with 0.
"""

from dataclasses import dataclass

import torch

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Mxfp8Tensor, ScaleLayout
from vllm_rose_plugin.kernels.jit.targets import limits_of
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import padded_blocks, padded_rows, tile_scales

ROW_TILE = 64
SCALE_BLOCKS = 4
"""Blocks of 32 k whose scales make one word."""
HALF_FRAGMENT = 8
"""Rows of gate, and then of up, that follow each other in the kernel's order."""
_PADDING = 127
_CODES_ALIGNMENT = 16


@dataclass(frozen=True)
class PackedWeight:
    """A weight ready for a kernel: a view of the checkpoint's codes, and scales of its own."""

    codes: torch.Tensor  # [G, N, K] uint8: the memory of the checkpoint's E4M3 codes
    scales: torch.Tensor  # uint8 of packed_shape()
    gate_up: bool
    target: str

    @property
    def num_groups(self) -> int:
        """G."""
        return self.codes.shape[0]

    @property
    def n(self) -> int:
        """Rows of a group."""
        return self.codes.shape[1]

    @property
    def k(self) -> int:
        """Columns."""
        return self.codes.shape[2]

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """What its kernel takes."""
        return self.codes, self.scales

    @property
    def extra_bytes(self) -> int:
        """What packing added to the memory of the model."""
        return self.scales.numel()


def is_sm90(target: str) -> bool:
    """Whether a target's GEMM is sm90.py, else it is sm100.py."""
    return target.startswith("sm_90")


def packed_shape(*, num_groups: int, n: int, k: int, target: str, gate_up: bool) -> tuple[int, ...]:
    """Shape of the packed scales: ``[G * ceil(N/64), ceil(K/128) * 256]`` on sm_90, flat from sm_100 on."""
    limits_of(target)
    num_blocks = padded_blocks(k // MXFP8_BLOCK)
    if is_sm90(target):
        return num_groups * -(-n // ROW_TILE), num_blocks * ROW_TILE
    parts = 2 if gate_up else 1
    return (num_groups * parts * padded_rows(n // parts) * num_blocks,)


def pack_weight(
    weight: Mxfp8Tensor, *, target: str, gate_up: bool = False, out: torch.Tensor | None = None
) -> PackedWeight:
    """Copy the scales of a weight into a target's order, one group after another.

    Codes are not touched nor copied. Needs memory for the packed scales and, for a moment, for those of one group.

    Args:
        weight: codes float8_e4m3fn ``[G, N, K]`` (or ``[N, K]``, one group), contiguous, starting at a multiple of 16
            bytes; scales row-major. N a multiple of 8, K of 32. Any device.
        target: compile target, such as "sm_90a".
        gate_up: w13: the first half of the rows is gate, the second up; N is a multiple of 16 then.
        out: packed scales to write into, for weights that are loaded again under a captured graph.

    Raises:
        TypeError, ValueError: dtypes, shapes or strides that don't fit; the message names them.
    """
    codes, scales = weight.codes, weight.scales
    if weight.layout is not ScaleLayout.ROW_MAJOR:
        raise ValueError(f"the weight's scales must be {ScaleLayout.ROW_MAJOR}, got {weight.layout}")
    if codes.dtype != torch.float8_e4m3fn or scales.dtype != torch.uint8:
        raise TypeError(f"the weight must be float8_e4m3fn with uint8 scales, got {codes.dtype} with {scales.dtype}")
    packed = wrap_weight(codes, target=target, gate_up=gate_up)
    num_groups, n, k = packed.shape
    expected = (*codes.shape[:-1], k // MXFP8_BLOCK)
    if tuple(scales.shape) != expected:
        raise ValueError(f"codes {tuple(codes.shape)} need scales {expected}, got {tuple(scales.shape)}")
    shape = packed_shape(num_groups=num_groups, n=n, k=k, target=target, gate_up=gate_up)
    if out is None:
        out = torch.empty(shape, dtype=torch.uint8, device=codes.device)
    elif tuple(out.shape) != shape or out.dtype != torch.uint8 or out.device != codes.device or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous torch.uint8 {shape} on {codes.device}, "
            f"got {out.dtype} {tuple(out.shape)} with strides {out.stride()} on {out.device}"
        )
    order = kernel_rows(n).to(codes.device) if gate_up and is_sm90(target) else None
    for group, target_bytes in zip(scales.view(num_groups, n, -1), out.view(num_groups, -1), strict=True):
        if is_sm90(target):
            target_bytes.copy_(_words(group if order is None else group[order]).flatten())
        else:
            target_bytes.copy_(torch.cat([tile_scales(part) for part in group.chunk(2 if gate_up else 1)]))
    return PackedWeight(packed, out, gate_up, target)


def wrap_weight(codes: torch.Tensor, *, target: str, gate_up: bool = False) -> torch.Tensor:
    """The codes as kernels take them: uint8 ``[G, N, K]``, a view.

    Raises:
        ValueError: sizes, strides or an address that no kernel takes.
    """
    limits_of(target)
    if codes.ndim == 2:
        codes = codes.unsqueeze(0)
    if codes.ndim != 3:
        raise ValueError(f"a weight must be [G, N, K] or [N, K], got shape {tuple(codes.shape)}")
    n, k = codes.shape[1:]
    rows = 2 * HALF_FRAGMENT if gate_up else HALF_FRAGMENT
    if n % rows or not n:
        raise ValueError(f"N is {n}; it must be a multiple of {rows}{' with gate and up' if gate_up else ''}")
    if k % MXFP8_BLOCK or not k:
        raise ValueError(f"K is {k}; it must be a multiple of {MXFP8_BLOCK}")
    if not codes.is_contiguous():
        raise ValueError(f"the weight's codes must be contiguous, got strides {codes.stride()}")
    if codes.data_ptr() % _CODES_ALIGNMENT:
        raise ValueError(
            f"the weight's codes must start at a multiple of {_CODES_ALIGNMENT} bytes, got {codes.data_ptr():#x}"
        )
    return codes.view(torch.uint8)


def kernel_rows(n: int) -> torch.Tensor:
    """int64 ``[N]``: the checkpoint's row that sm_90's kernel has at each of its rows, of a gate_up weight."""
    row = torch.arange(n)
    pair, in_pair = row // (2 * HALF_FRAGMENT), row % (2 * HALF_FRAGMENT)
    half, i = in_pair // HALF_FRAGMENT, in_pair % HALF_FRAGMENT
    return half * (n // 2) + pair * HALF_FRAGMENT + i


def _words(scales: torch.Tensor) -> torch.Tensor:
    """uint8 ``[N, K/32]`` as ``[ceil(N/64), ceil(K/128), 64, 4]``."""
    n, num_blocks = scales.shape
    pad = (0, padded_blocks(num_blocks) - num_blocks, 0, -n % ROW_TILE)
    padded = torch.nn.functional.pad(scales, pad, value=_PADDING)
    rows, blocks = padded.shape
    return padded.view(rows // ROW_TILE, ROW_TILE, blocks // SCALE_BLOCKS, SCALE_BLOCKS).permute(0, 2, 1, 3)
