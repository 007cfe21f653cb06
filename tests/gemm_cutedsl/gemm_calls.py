"""The GEMM's host functions on the oracle's operands, and poisoned memory for what they write."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import gemm_oracle as oracle
import torch
from gemm_oracle import BLOCK, Operand, Runs

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, ScaleLayout, TokenFormat
from vllm_rose_plugin.kernels.gemm import launch
from vllm_rose_plugin.kernels.gemm.choose import choose_config
from vllm_rose_plugin.kernels.gemm.config import with_stages
from vllm_rose_plugin.kernels.gemm.plan import compile_config
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens, pack_tokens, unpermute_k
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight, pack_weight
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import padded_blocks, tile_scales, untile_scales

POISON = 0x7F51
"""Bits of a NaN in bf16, of one in fp16 too."""
_FENCE = 2048


def target() -> str:
    """Compile target of this device."""
    return device_facts(torch.cuda.current_device()).target


def on_hopper() -> bool:
    """Whether there are two token formats."""
    return target().startswith("sm_90")


def token_format(name: str) -> TokenFormat:
    """Of "w8a8" or "w8a16"; from sm_100 on both name the only one."""
    if not on_hopper():
        return TokenFormat.MXFP8_TCGEN05
    return {"w8a8": TokenFormat.MXFP8_FP32_SCALES, "w8a16": TokenFormat.BF16_PERMUTED}[name]


def is_fp8(name: str) -> bool:
    """Whether both operands meet in FP8."""
    return token_format(name) is not TokenFormat.BF16_PERMUTED


# ---- poisoned memory ----


@dataclass(frozen=True)
class Fence:
    """Memory before and after a tensor."""

    around: torch.Tensor  # int16
    count: int  # elements inside

    def check(self) -> None:
        """Raises where memory beside the tensor was written."""
        for part in (self.around[:_FENCE], self.around[_FENCE + self.count :]):
            assert bool((part == POISON).all()), "memory beside the result was written"


def poisoned(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, Fence]:
    """(a 16-bit tensor full of poison, its fence), on the GPU."""
    count = shape[0] * shape[1]
    around = torch.full((count + 2 * _FENCE,), POISON, dtype=torch.int16, device="cuda")
    return around[_FENCE : _FENCE + count].view(dtype).view(shape), Fence(around, count)


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """torch.empty gives memory full of NaN, or of the largest integers."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


# ---- operands ----


def pack(weight: Operand, *, gate_up: bool = False) -> PackedWeight:
    """``[G, N, K]`` for this device."""
    return pack_weight(Mxfp8Tensor(weight.data, weight.scales), target=target(), gate_up=gate_up)


def tokens(operand: Operand, runs: Runs, name: str) -> PackedTokens:
    """``[S, K]``: MXFP8, or plain bf16 for W8A16 with unquantized activations."""
    wanted = token_format(name)
    if operand.scales is None:
        return pack_tokens(operand.data, token_format=wanted, activation=Activation.BF16)
    plain = Mxfp8Tensor(operand.data, operand.scales)
    if wanted is not TokenFormat.MXFP8_TCGEN05:
        return pack_tokens(plain, token_format=wanted)
    tiled = tiled_scales(operand.scales, runs)
    return PackedTokens(wanted, operand.data, tiled, operand.data.shape[1])


def tiled_scales(scales: torch.Tensor, runs: Runs) -> torch.Tensor:
    """sm_100's: every run begins a tile of 128 rows; what belongs to no run is NaN."""
    num_rows, num_blocks = scales.shape
    parts = [tile_scales(scales[s : s + c]) for s, c in zip(runs.starts, runs.counts, strict=True) if c]
    size = (num_rows // 128 + min(len(runs.counts), num_rows)) * 128 * padded_blocks(num_blocks)
    out = torch.full((size,), oracle.NAN_SCALE, dtype=torch.uint8, device=scales.device)
    whole = torch.cat(parts) if parts else out[:0]
    out[: whole.numel()] = whole
    return out


@dataclass(frozen=True)
class Routing:
    """A routing's tensors on the device, which stay while their contents change."""

    offsets: torch.Tensor  # [G + 1] int32
    counts: torch.Tensor  # [G] int32

    @classmethod
    def of(cls, runs: Runs) -> "Routing":
        return cls(runs.expert_offsets("cuda"), runs.expert_counts("cuda"))


# ---- calls ----


def plain(
    weight: PackedWeight,
    packed: PackedTokens,
    routing: Routing | Runs,
    *,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    expected_rows: int | None = None,
    early: bool = False,
) -> None:
    """Products of all runs, into `out`."""
    routing = Routing.of(routing) if isinstance(routing, Runs) else routing
    if bias is not None:
        bias = bias.float().view(weight.num_groups, weight.n)
    result = launch.grouped_gemm(
        packed,
        weight,
        expert_offsets=routing.offsets,
        expert_counts=routing.counts,
        out_dtype=out.dtype,
        bias=bias,
        out=out,
        expected_rows=expected_rows,
        early_counts=early,
    )
    assert result.data_ptr() == out.data_ptr()


def swiglu(
    weight: PackedWeight,
    packed: PackedTokens,
    routing: Routing | Runs,
    *,
    out_format: str,
    limit: float | None = None,
    rounding: str = "rceil",
    expected_rows: int | None = None,
    early: bool = False,
    poison: bool = True,
) -> PackedTokens:
    """w13 with SwiGLU; `out_format` is "w8a8", "w8a16", or "plain" for unquantized bf16."""
    routing = Routing.of(routing) if isinstance(routing, Runs) else routing

    def call() -> PackedTokens:
        return launch.grouped_gemm_swiglu(
            packed,
            weight,
            expert_offsets=routing.offsets,
            expert_counts=routing.counts,
            activation=Activation.BF16 if out_format == "plain" else Activation.MXFP8,
            rounding=rounding,
            limit=limit,
            out_format=TokenFormat.BF16_PERMUTED if out_format == "plain" else token_format(out_format),
            expected_rows=expected_rows,
            early_counts=early,
        )

    if not poison:
        return call()
    with poisoned_allocations():
        return call()


def run_of(packed: PackedTokens, runs: Runs, group: int) -> tuple[torch.Tensor, torch.Tensor | None, Operand]:
    """(values float64 [count, K], scale codes where the format has any, the operand) of a run."""
    start, count = runs.starts[group], runs.counts[group]
    rows = slice(start, start + count)
    if packed.token_format is TokenFormat.BF16_PERMUTED:
        data = packed.data[rows]
        values = unpermute_k(data, k=packed.k)
        beyond = unpermute_k(data, k=data.shape[1])[:, packed.k :]
        assert bool((beyond == 0).all()), "what fills up the last 64 elements is not zero: NaN there would spoil rows"
        return values.double(), None, Operand(values)
    if packed.token_format is TokenFormat.MXFP8_FP32_SCALES:
        scales = scale_codes(packed.scales[:, rows])
    else:
        at = sum(-(-c // 128) for c in runs.counts[:group]) * 128 * padded_blocks(packed.k // BLOCK)
        size = -(-count // 128) * 128 * padded_blocks(packed.k // BLOCK)
        scales = untile_scales(packed.scales[at : at + size], num_rows=count, num_blocks=packed.k // BLOCK)
    operand = Operand(packed.data[rows], scales)
    return operand.values(), scales, operand


def scale_codes(scales: torch.Tensor) -> torch.Tensor:
    """uint8 ``[S, K/32]`` of float32 ``[K/32, S]``, which must be powers of two."""
    table = oracle.e8m0_table(scales.device)[:255].float()
    codes = torch.searchsorted(table, scales.t().contiguous()).clamp(max=254)
    exact = table[codes] == scales.t()
    assert bool((exact | scales.t().isnan()).all()), "a float32 scale is no power of two"
    return torch.where(scales.t().isnan(), oracle.NAN_SCALE, codes).byte()


def touched_outside(packed: PackedTokens, runs: Runs) -> list[str]:
    """Rows outside the runs that are no longer NaN (or zero, where the memory began as zeros)."""
    outside = runs.outside("cuda")
    data = packed.data.view(torch.uint8)[outside].view(packed.data.dtype).float()
    kept = data.isnan().all(-1) | ((data == 0).all(-1) if packed.data.shape[1] != packed.k else False)
    found = [] if bool(kept.all()) else [f"{int((~kept).sum())} rows outside the runs were written"]
    if packed.token_format is TokenFormat.MXFP8_FP32_SCALES:
        columns = torch.ones(packed.scales.shape[1], dtype=torch.bool, device="cuda")
        columns[: runs.num_rows] = outside
        if not bool(packed.scales[:, columns].isnan().all()):
            found.append("scales outside the runs were written")
    return found


@contextmanager
def forced(name: str, runs: Runs, *, n: int, k: int, change: dict[str, Any]) -> Iterator[None]:
    """Every launch inside takes the heuristic's sm_90 config with some fields changed; without changes, its own."""
    if not change:
        yield
        return
    groups, format_ = len(runs.counts), token_format(name)
    config = choose_config(num_groups=groups, n=n, k=k, num_rows=runs.num_rows, token_format=format_)
    config = with_stages(replace(config, **{"early_counts": False, "narrow_tokens": 0, **change}))
    grid = config.grid(device_facts(torch.cuda.current_device()).sm_count)
    chosen = launch._kernel
    launch._kernel = lambda *_: (compile_config(config, target=target()), config, grid)
    try:
        yield
    finally:
        launch._kernel = chosen


def linear(
    x: torch.Tensor | Operand,
    weight: PackedWeight,
    *,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """A linear layer, as the backend calls it."""
    if isinstance(x, Operand):
        x = Mxfp8Tensor(x.data, x.scales, ScaleLayout.ROW_MAJOR)
    return launch.linear(x, weight, bias=bias, out_dtype=dtype, batch_invariant=batch_invariant)


def quantize(x: torch.Tensor, name: str) -> PackedTokens:
    """In one launch."""
    return launch.quantize_tokens(x, token_format=token_format(name))
