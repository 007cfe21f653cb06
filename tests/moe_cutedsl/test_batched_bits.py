"""The PTX that prepares batched tokens, run on the CPU: every byte that it writes, and no other."""

import functools
import tempfile

import pytest
import route_cases as cases
import torch
from grid_machine import Machine, Memory
from sm100_host import launch_of
from test_dispatch_bits import POISON_WORD, scale_starts

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm.tokens import pack_tokens
from vllm_rose_plugin.kernels.jit import compile as jit
from vllm_rose_plugin.kernels.moe_batched import kernel as batched_kernel
from vllm_rose_plugin.kernels.moe_batched.config import LayerShape, tokens_config
from vllm_rose_plugin.kernels.mxfp8_quantize.config import widest_load
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import e8m0_to_float, quantize_mxfp8
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import untile_scales

FP32, PERMUTED, TILED = TokenFormat.MXFP8_FP32_SCALES, TokenFormat.BF16_PERMUTED, TokenFormat.MXFP8_TCGEN05


@functools.cache
def made(config, target: str) -> cases.Made:
    with tempfile.TemporaryDirectory() as folder:
        compiled = jit._run_compiler(config, batched_kernel.build, target, keep=folder)
        return cases.Made(compiled, compiled.artifacts.PTX, compiled.artifacts.CUBIN)


def batch(counts, each, hidden_size, dtype=torch.bfloat16, *, seed=0):
    """Tokens [E, M, H], NaN past the counts; before them one is zero, one NaN, one inf where there are a few."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(len(counts), each, hidden_size, generator=g)
    x *= torch.exp2(torch.randint(-9, 5, (len(counts), each, 1), generator=g).float())
    for expert, count in enumerate(counts):
        if count > 4:
            x[expert, 1], x[expert, 2, 5], x[expert, 3, -1] = 0.0, float("nan"), float("-inf")
        x[expert, count:] = float("nan")
    return cases.placed(x.to(dtype))


def run(config, target, x, counts, *, seed):
    """(rows, scales, offsets) after a launch on memory full of noise."""
    quantized = isinstance(x, Mxfp8Tensor)
    plain = cases.placed(x.codes.view(torch.uint8)) if quantized else x
    experts, each, _ = plain.shape
    num_rows = experts * each
    rows, scales = cases.poisoned((num_rows, config.row_bytes), torch.uint8), cases.scale_buffer(config, num_rows)
    offsets, lengths = cases.poisoned((experts + 1,), torch.int32), cases.placed(counts)
    tensors = {
        "x": plain.view(num_rows, -1),
        "x_scales": cases.placed(x.scales).view(-1) if quantized else None,
        "counts": lengths,
        "offsets": offsets,
        "rows": rows,
        "scales": scales,
    }
    kernel = made(config, target)
    launch = launch_of(kernel.compiled, list(tensors.values()), kernel.param_sizes)
    memory = Memory({name: t for name, t in tensors.items() if t is not None}, {"offsets", "rows", "scales"})
    machine = Machine(kernel.ptx, memory, launch.params, grid=launch.grid[0], shared=max(launch.shared, 16), seed=seed)
    assert launch.block == (config.threads, 1, 1) and launch.pdl and not launch.cooperative
    shown = [cases.late(plain), cases.late(lengths)]
    machine.run(ended=lambda: [show() for show in shown])
    assert all(written.max() <= 1 for written in machine.written.values()), "a byte is stored to twice"
    return rows, scales, offsets


def check(counts, each, hidden_size, *, target, token_format, dtype=torch.bfloat16, quantized=False, seed=0, **how):
    how = {"activation": Activation.MXFP8, "rounding": Rounding.RCEIL, **how}
    shape = LayerShape(target, hidden_size, 64, len(counts), how["activation"])
    x = batch(counts, each, hidden_size, dtype, seed=seed)
    if quantized:
        x = Mxfp8Tensor(*quantize_mxfp8(x))
    config = tokens_config(
        shape,
        dtype="mxfp8" if quantized else str(dtype).removeprefix("torch."),
        token_format=token_format,
        rounding=how["rounding"],
        load_alignment=widest_load(target),
    )
    lengths = torch.tensor(counts, dtype=torch.int32)
    rows, scales, offsets = run(config, target, x, lengths, seed=seed)
    assert torch.equal(offsets, torch.arange(len(counts) + 1, dtype=torch.int32) * each)
    valid = (torch.arange(each) < lengths.unsqueeze(1)).flatten()
    wanted = torch.full_like(rows, cases.POISON)
    if token_format is PERMUTED:
        packed = pack_tokens(x.flatten(0, 1), token_format=PERMUTED, **how)
        wanted[valid] = packed.data.view(torch.uint8)[valid]
        mine, theirs = rows.view(torch.bfloat16), wanted.view(torch.bfloat16)
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert torch.equal(mine.nan_to_num(0).view(torch.int16), theirs.nan_to_num(0).view(torch.int16))
        return
    codes, codes_scales = (x.codes, x.scales) if quantized else quantize_mxfp8(x, rounding=how["rounding"])
    codes, codes_scales = codes.view(torch.uint8).flatten(0, 1), codes_scales.flatten(0, 1)
    wanted[valid] = codes[valid]
    assert torch.equal(rows, wanted)
    if token_format is FP32:
        right = torch.full(scales.shape, POISON_WORD, dtype=torch.int32)
        right[:, : len(valid)][:, valid] = e8m0_to_float(codes_scales[valid]).t().contiguous().view(torch.int32)
        assert torch.equal(scales.view(torch.int32), right)
        return
    padded = config.k_tiles * 4
    num_rows = len(scales) // padded
    right = torch.full((num_rows, padded), cases.POISON, dtype=torch.uint8)
    for expert, (first, count) in enumerate(zip(scale_starts(lengths).tolist(), counts, strict=True)):
        right[first : first + -(-count // 128) * 128] = 0
        right[first : first + count, : hidden_size // 32] = codes_scales[expert * each : expert * each + count]
    assert torch.equal(untile_scales(scales, num_rows=num_rows, num_blocks=padded), right)


def formats(target):
    return (FP32, PERMUTED) if target == "sm_90a" else (TILED,)


@pytest.mark.parametrize("target", cases.TARGETS)
def test_formats(target):
    for token_format in formats(target):
        check([3, 0, 7, 9], 9, 96, target=target, token_format=token_format)


@pytest.mark.parametrize("token_format", TokenFormat)
@pytest.mark.parametrize("counts", [[0], [0, 0, 0], [1, 0, 0, 2], [40] * 3, [5] + [0] * 39 + [6, 40]])
def test_counts(token_format, counts):
    """None, few, all, and more experts than a warp has lanes."""
    target = "sm_100a" if token_format is TILED else "sm_90a"
    check(counts, 40, 64, target=target, token_format=token_format, seed=len(counts))


def test_more_tokens_than_a_tile_of_scales_has_rows():
    check([127, 128, 129, 3, 260], 260, 64, target="sm_100a", token_format=TILED, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("hidden_size", [32, 160, 2688, 4096])
@pytest.mark.parametrize("token_format", TokenFormat)
def test_hidden_sizes(token_format, hidden_size):
    target = "sm_100f" if token_format is TILED else "sm_90a"
    check([2, 0, 1, 3], 3, hidden_size, target=target, token_format=token_format, seed=hidden_size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("token_format", TokenFormat)
def test_dtypes_and_rounding(token_format, dtype):
    target = "sm_103a" if token_format is TILED else "sm_90a"
    check([6, 1], 7, 96, target=target, token_format=token_format, dtype=dtype, rounding=Rounding.FLOOR)


def test_unquantized_activations():
    check([6, 0, 7], 7, 96, target="sm_90a", token_format=PERMUTED, activation=Activation.BF16)


@pytest.mark.parametrize(("target", "token_format"), [("sm_90a", FP32), ("sm_100a", TILED)])
def test_tokens_that_arrive_quantized(target, token_format):
    check([6, 0, 129, 1], 130, 96, target=target, token_format=token_format, quantized=True)
