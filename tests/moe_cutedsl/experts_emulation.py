"""The chain of kernels of a layer of experts on CPU tensors: each is replaced by torch, which reads what it reads.

Emulated kernels get the arguments of the compiled ones, work in the caller's memory, and undo each token format by
themselves, run by run, from the words of the contracts.
"""

import contextlib
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, TokenFormat
from vllm_rose_plugin.kernels.gemm import checks, plan
from vllm_rose_plugin.kernels.gemm.config import MAX_DOMAINS, Epilogue
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens, pack_tokens, unpack_tokens
from vllm_rose_plugin.kernels.jit import chosen
from vllm_rose_plugin.kernels.moe_batched import family as batched_family
from vllm_rose_plugin.kernels.moe_batched import launch as batched
from vllm_rose_plugin.kernels.moe_combine import launch as combine
from vllm_rose_plugin.kernels.moe_combine.reference import combine_tokens
from vllm_rose_plugin.kernels.moe_dispatch import launch as dispatch
from vllm_rose_plugin.kernels.moe_experts import family, launch, ops
from vllm_rose_plugin.kernels.moe_route import launch as route
from vllm_rose_plugin.kernels.moe_route.reference import route_tokens
from vllm_rose_plugin.kernels.mxfp8_quantize.family import ROSE
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DeviceFacts
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import padded_blocks
from vllm_rose_plugin.kernels.swiglu_quantize.reference import swiglu_quantize

sys.path.insert(0, str(Path(__file__).parents[1] / "gemm_cutedsl"))
from launch_emulation import emulated as gemm_emulated
from launch_emulation import weights_of

SM_COUNT = 132


@dataclass
class Emulation:
    """What ran."""

    target: str
    launches: list = field(default_factory=list)
    """(kernel, config or token format, rows)"""
    stream: int | None = None
    """The current one of :class:`EmulatedStreams`; None: the caller's."""
    streams: list = field(default_factory=list)
    """Of each GEMM."""
    scales_at: set = field(default_factory=set)
    """Addresses of the weights' scales that were read."""

    def names(self) -> list[str]:
        return [name for name, _, _ in self.launches]


def tiles_before(counts: list[int], group: int) -> int:
    """Tiles of 128 rows of scales that the runs before one take."""
    return sum(-(-count // 128) for count in counts[:group])


def read_run(tokens: PackedTokens, rows: slice, counts: list[int], group: int) -> torch.Tensor:
    """float64 [count, K]: one run's values."""
    data, scales = tokens.data[rows], tokens.scales
    if tokens.token_format is TokenFormat.MXFP8_FP32_SCALES:
        scales = scales[:, rows].contiguous()
    elif tokens.token_format is TokenFormat.MXFP8_TCGEN05:
        each = 128 * padded_blocks(tokens.k // 32)
        begin = tiles_before(counts, group) * each
        scales = scales[begin : begin + -(-counts[group] // 128) * each]
    if tokens.token_format is TokenFormat.MXFP8_FP32_SCALES and data.shape[0] % 4:
        scales = torch.nn.functional.pad(scales, (0, -data.shape[0] % 4))
    return unpack_tokens(PackedTokens(tokens.token_format, data, scales, tokens.k)).double()


def write_run(
    tokens: PackedTokens, packed: PackedTokens, rows: slice, counts: list[int], group: int, *, out_columns: int = 0
) -> None:
    """One run's tokens into their place, which may be some columns of longer rows."""
    as_bytes = tokens.data.view(torch.uint8)
    as_bytes[rows] = packed.data.view(torch.uint8)
    if tokens.token_format is TokenFormat.MXFP8_FP32_SCALES:
        tokens.scales[:, rows] = packed.scales[:, : counts[group]]
    elif tokens.token_format is TokenFormat.MXFP8_TCGEN05:
        tiles, pitch = padded_blocks(tokens.k // 32) * 128, padded_blocks((out_columns or tokens.k) // 32) * 128
        for i, row_of_tiles in enumerate(packed.scales.view(-1, tiles)):
            begin = (tiles_before(counts, group) + i) * pitch
            tokens.scales[begin : begin + tiles] = row_of_tiles


def gemm_kernel(config, target: str, seen: Emulation):
    sm90 = target.startswith("sm_90")

    def kernel(*arguments):
        count = 2 * MAX_DOMAINS if config.domains > 1 else 2  # codes and scales of each part
        operands, rest = arguments[:count][: 2 * config.domains], arguments[count:]
        data, token_scales, offsets, counts, _, out, out_scales, *_ = rest
        name = "w13" if config.epilogue is Epilogue.SWIGLU else "w2"
        seen.launches.append((name, config, data.shape[0]))
        seen.streams.append(seen.stream)
        seen.scales_at.update(scales.data_ptr() for scales in operands[1::2])
        token_format = config.token_format if sm90 else TokenFormat.MXFP8_TCGEN05
        if token_format is not TokenFormat.BF16_PERMUTED:
            data = data.view(torch.float8_e4m3fn)
        tokens = PackedTokens(token_format, data, token_scales, config.k)
        part = replace(config, n=config.n // config.domains, domains=1)
        parts = [weights_of(part, target, *operands[2 * d : 2 * d + 2]) for d in range(config.domains)]
        halves = 2 if config.epilogue is Epilogue.SWIGLU else 1
        weights = torch.cat([each.chunk(halves, 1)[h] for h in range(halves) for each in parts], 1)
        lengths = counts.tolist()
        out_format = config.out_format if sm90 else TokenFormat.MXFP8_TCGEN05
        for group, (start, count) in enumerate(zip(offsets.tolist(), lengths, strict=False)):
            if not count:
                continue
            rows = slice(start, start + count)
            y = read_run(tokens, rows, lengths, group) @ weights[group].T
            if config.epilogue is Epilogue.PLAIN:
                out[rows] = y.to(out.dtype)
                continue
            product = swiglu_quantize(y.float(), activation="bf16")
            activation = config.activation if sm90 else Activation.MXFP8
            packed = pack_tokens(product, token_format=out_format, activation=activation, rounding=config.rounding)
            tokens_out = PackedTokens(out_format, out, out_scales, config.n // 2)
            write_run(tokens_out, packed, rows, lengths, group, out_columns=config.out_columns)

    return kernel


def route_and_dispatch_of(seen: Emulation):
    def route_and_dispatch(
        x,
        topk_ids,
        *,
        num_local_experts,
        workspace,
        token_format,
        expert_map=None,
        alignment=1,
        activation="mxfp8",
        rounding="rceil",
        topk_weights=None,
        routed=None,
        out=None,
    ):
        seen.launches.append(("route_and_dispatch", token_format, out.num_rows))
        assert workspace.dtype == torch.int32 and routed is not None and out is not None
        quantized = isinstance(x, Mxfp8Tensor)
        assert out.token_format is token_format and out.k == (x.codes if quantized else x).shape[1]
        routing = route_tokens(
            topk_ids, num_local_experts=num_local_experts, expert_map=expert_map, alignment=alignment
        )
        routed.expert_counts.copy_(routing.expert_counts)
        routed.expert_offsets.copy_(routing.expert_offsets)
        routed.slots.copy_(routing.slots)
        lengths, top_k = routing.expert_counts.tolist(), topk_ids.shape[1]
        place = routing.slots.flatten()
        for group, start in enumerate(routing.expert_offsets.tolist()[:-1]):
            rows = slice(start, start + lengths[group])
            inside = ((place >= rows.start) & (place < rows.stop)).nonzero()[:, 0]
            pairs = inside[place[inside].argsort()]
            if not len(pairs):
                continue
            tokens = pairs // top_k
            run = Mxfp8Tensor(x.codes[tokens], x.scales[tokens]) if quantized else x[tokens]
            if topk_weights is not None:
                run = run.float() * topk_weights.flatten()[pairs].unsqueeze(-1)
            packed = pack_tokens(run, token_format=token_format, activation=activation, rounding=rounding)
            write_run(out, packed, rows, lengths, group)
        return routed, out

    return route_and_dispatch


def combine_kernel_of(seen: Emulation):
    def kernel_of(config, target):
        def kernel(y, slots, weights, shared, out):
            seen.launches.append(("combine", config, len(y)))
            out.copy_(
                combine_tokens(
                    y,
                    slots=slots.view(-1, config.top_k),
                    topk_weights=weights.view(-1, config.top_k) if config.weighted else None,
                    shared=shared if config.shared_dtype else None,
                    out_dtype=out.dtype,
                )
            )

        return kernel

    return kernel_of


def batched_tokens_of(seen: Emulation):
    """The kernel that prepares batched tokens: it reads and writes valid rows only, and writes the offsets."""

    def compile_config(config, *, target):
        def kernel(rows, x_scales, counts, offsets, data, scales):
            seen.launches.append(("tokens", config.token_format, len(rows)))
            each, lengths = len(rows) // config.num_experts, counts.tolist()
            offsets.copy_(torch.arange(config.num_experts + 1) * each)
            if config.token_format is TokenFormat.BF16_PERMUTED:
                out = PackedTokens(config.token_format, data.view(torch.bfloat16), None, config.hidden_size)
            else:
                out = PackedTokens(config.token_format, data.view(torch.float8_e4m3fn), scales, config.hidden_size)
            for group, count in enumerate(lengths):
                place = slice(group * each, group * each + count)
                if not count:
                    continue
                x = rows[place]
                if config.dtype == "mxfp8":
                    codes_scales = x_scales.view(len(rows), -1)[place]
                    x = Mxfp8Tensor(x.view(torch.float8_e4m3fn).contiguous(), codes_scales.contiguous())
                how = {"activation": config.activation, "rounding": config.rounding}
                write_run(out, pack_tokens(x, token_format=config.token_format, **how), place, lengths, group)

        return kernel

    return compile_config


@contextlib.contextmanager
def emulated(monkeypatch, target: str = "sm_90a"):
    """Within, the layer's launches accept CPU tensors and run in torch as if on a device of `target`."""
    seen = Emulation(target)
    facts = DeviceFacts(target, SM_COUNT)
    with gemm_emulated(monkeypatch, target), monkeypatch.context() as patch:
        for module in (combine, launch, ops, family, route, batched, batched_family):
            patch.setattr(module, "device_facts", lambda index: facts)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        for module in (combine, launch, checks, batched):
            patch.setattr(module, "check_on_gpu", lambda what, x: None)
        patch.setattr(plan, "compile_config", lambda config, *, target: gemm_kernel(config, target, seen))
        patch.setattr(dispatch, "route_and_dispatch", route_and_dispatch_of(seen))
        patch.setattr(combine, "_kernel", combine_kernel_of(seen))
        patch.setattr(batched, "compile_config", batched_tokens_of(seen))
        ours = ("moe_experts", "moe_batched")
        patch.setattr(chosen, "provider", lambda name, x: ROSE if name in ours else chosen.REFERENCE)
        for module in (combine, batched):
            module._kernel_for.cache_clear()
        yield seen
    for module in (combine, batched):
        module._kernel_for.cache_clear()


class EmulatedStreams:
    """In place of ``ForkedStreams``: launches run one after another, and are told apart."""

    def __init__(self, count: int, seen: Emulation):
        self.streams, self.seen = tuple(range(count)), seen

    def run(self, *rounds) -> None:
        for launches in rounds:
            for self.seen.stream, launch_it in enumerate(launches):
                launch_it()
        self.seen.stream = None


def aligned_bytes(size: int, alignment: int = 256) -> torch.Tensor:
    """uint8, every byte 0xFF: NaN in every format."""
    around = torch.full((size + alignment,), 0xFF, dtype=torch.uint8)
    start = -around.data_ptr() % alignment
    return around[start : start + size]


def dequantized(weight: Mxfp8Tensor) -> torch.Tensor:
    from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8

    return dequantize_mxfp8(weight.codes, weight.scales).double()
