"""The host half of the GEMM on CPU tensors: quantizers and kernels are replaced by torch, which reads what they read.

An emulated kernel gets the arguments of the compiled one. It undoes each format by itself, from the words of the
kernels' contracts, so that a launch that hands over something else gives a wrong product.
"""

import contextlib
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm import checks, launch, one_run, plan, workspace
from vllm_rose_plugin.kernels.gemm.config import MAX_DOMAINS, Epilogue
from vllm_rose_plugin.kernels.gemm.domain_queue import counter_words
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens, pack_tokens, unpack_tokens
from vllm_rose_plugin.kernels.jit import chosen
from vllm_rose_plugin.kernels.mxfp8_quantize.family import ROSE
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DeviceFacts
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import untile_scales
from vllm_rose_plugin.kernels.swiglu_quantize.reference import swiglu_quantize


@dataclass
class Emulation:
    """What ran."""

    target: str
    configs: list = field(default_factory=list)
    grids: list = field(default_factory=list)
    flags: list = field(default_factory=list)
    """Of stream-K launches."""
    counters: list = field(default_factory=list)
    """Of launches on a weight in parts."""
    capturing: bool = False
    """Whether a CUDA graph is being captured; set it."""
    stream: int = 7
    """The current stream; set it."""


def weights_of(config, target: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 [G, N, K]: what a kernel multiplies, in the checkpoint's row order."""
    groups, n, k = config.num_groups, config.n, config.k
    assert codes.dtype == scales.dtype == torch.uint8 and codes.shape == (groups, n, k)
    gate_up = config.epilogue is Epilogue.SWIGLU
    plain = torch.empty(groups, n, k // 32, dtype=torch.uint8)
    if target.startswith("sm_90"):
        assert scales.shape == (groups * -(-n // 64), -(-k // 128) * 256)
        words = scales.view(groups, -(-n // 64), -(-k // 128), 64, 4)
        for r in range(n):
            row = r
            if gate_up:  # 8 rows of gate, 8 of up
                row = r // 16 * 8 + r % 8 + (n // 2 if r % 16 >= 8 else 0)
            plain[:, row] = words[:, r // 64, :, r % 64].reshape(groups, -1)[:, : k // 32]
    else:
        assert scales.ndim == 1
        parts = 2 if gate_up else 1
        each = scales.view(groups, parts, -1)
        for g in range(groups):
            found = [untile_scales(part, num_rows=n // parts, num_blocks=k // 32) for part in each[g]]
            plain[g] = torch.cat(found)
    return dequantize_mxfp8(codes.view(torch.float8_e4m3fn), plain).double()


def kernel_of(config, target: str, seen: Emulation):
    def kernel(*arguments):
        count = 2 * MAX_DOMAINS if config.domains > 1 else 2  # codes and scales of each part
        operands, (data, token_scales, offsets, counts, bias, out, out_scales, *rest) = (
            arguments[:count],
            arguments[count:],
        )
        *memory, grid = rest
        seen.configs.append(config)
        seen.grids.append(grid)
        if getattr(config, "stream_k", False):
            partials, flags = memory
            assert partials.shape == (grid, config.row_tile * config.token_tile) and partials.dtype == torch.float32
            assert flags.shape == (grid,) and flags.dtype == torch.int32 and not flags.any()
            seen.flags.append(flags)
        elif config.domains > 1:
            sm_domains, counters = memory
            assert sm_domains.ndim == 1 and sm_domains.dtype == counters.dtype == torch.int32
            assert counters.shape == (counter_words(config.domains),) and not counters.any()
            seen.counters.append(counters)
        else:
            assert not memory
        sm90 = target.startswith("sm_90")
        token_format = config.token_format if sm90 else TokenFormat.MXFP8_TCGEN05
        if token_format is not TokenFormat.BF16_PERMUTED:
            assert data.dtype == torch.uint8 and data.shape[1] == config.k
            data = data.view(torch.float8_e4m3fn)
        x = unpack_tokens(PackedTokens(token_format, data, token_scales, config.k)).double()
        part = replace(config, n=config.n // config.domains, domains=1)
        parts = [weights_of(part, target, *operands[2 * d : 2 * d + 2]) for d in range(config.domains)]
        halves = 2 if config.epilogue is Epilogue.SWIGLU else 1
        weights = torch.cat([each.chunk(halves, 1)[h] for h in range(halves) for each in parts], 1)
        assert offsets.shape == (config.num_groups + 1,) and offsets.dtype == counts.dtype == torch.int32
        for g, (start, count) in enumerate(zip(offsets.tolist(), counts.tolist(), strict=False)):
            rows = slice(start, start + count)
            y = x[rows] @ weights[g].T
            if config.epilogue is Epilogue.PLAIN:
                if config.bias:
                    y = y + bias.view(config.num_groups, config.n)[g]
                assert str(out.dtype) == f"torch.{config.out_dtype}"
                out[rows] = y.to(out.dtype)
                continue
            product = swiglu_quantize(y.float(), activation="bf16", limit=config.limit)
            out_format = config.out_format if sm90 else TokenFormat.MXFP8_TCGEN05
            activation = config.activation if sm90 else Activation.MXFP8
            packed = pack_tokens(product, token_format=out_format, activation=activation, rounding=config.rounding)
            if out_format is TokenFormat.BF16_PERMUTED:
                out[rows] = packed.data
                continue
            out[rows] = packed.data.view(torch.uint8)
            if out_format is TokenFormat.MXFP8_FP32_SCALES:
                out_scales[:, rows] = packed.scales[:, :count]
            else:
                assert start % 128 == 0, "this emulation wants padded runs"
                size = len(packed.scales)
                at = start // 128 * (-(-config.n // 2 // 128) * 512)
                out_scales[at : at + size] = packed.scales

    return kernel


@contextlib.contextmanager
def emulated(monkeypatch, target: str = "sm_90a"):
    """Within, launches accept CPU tensors and run in torch as if on a device of `target`."""
    seen = Emulation(target)

    def permute_tokens(x, *, activation, rounding):
        return pack_tokens(x, token_format=TokenFormat.BF16_PERMUTED, activation=activation, rounding=rounding).data

    def quantize(x, *, rounding, layout):
        token_format = next(f for f, of in launch.LAYOUT_OF.items() if of is layout)
        packed = pack_tokens(x, token_format=token_format, rounding=Rounding(rounding))
        return Mxfp8Tensor(packed.data, packed.scales, layout)

    with monkeypatch.context() as patch:
        patch.setattr(launch, "device_facts", lambda index: DeviceFacts(target, 132))
        patch.setattr(one_run, "device_facts", lambda index: DeviceFacts(target, 132))
        patch.setattr(launch, "check_rows", lambda x, what: None)
        patch.setattr(launch, "check_on_gpu", lambda what, x: None)
        patch.setattr(checks, "check_on_gpu", lambda what, x: None)
        patch.setattr(launch, "permute_tokens", permute_tokens)
        patch.setattr(launch, "quantize_mxfp8", quantize)
        patch.setattr(launch.torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(launch.torch.cuda, "is_current_stream_capturing", lambda: seen.capturing)
        patch.setattr(one_run, "_tables", {})
        patch.setattr(workspace, "_flags", {})
        patch.setattr(workspace, "_counters", {})
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=seen.stream))
        patch.setattr(checks, "_SCALES_ALIGNMENT", 64)  # of torch on the CPU
        patch.setattr(chosen, "provider", lambda family, x: ROSE if family == "mxfp8_linear" else chosen.REFERENCE)
        patch.setattr(plan, "compile_config", lambda config, *, target: kernel_of(config, target, seen))
        launch._kernel.cache_clear()
        yield seen
    launch._kernel.cache_clear()
