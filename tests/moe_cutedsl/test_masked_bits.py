"""The PTX in front of masked GEMMs, run on the CPU: every byte that it writes, and no other; and its machine code."""

import functools
import tempfile

import pytest
import route_cases as cases
import torch
from grid_machine import Machine, Memory
from sm100_host import launch_of
from test_batched_bits import batch
from test_route_machine_code import instructions

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding
from vllm_rose_plugin.kernels.jit import compile as jit
from vllm_rose_plugin.kernels.jit.sass import resource_usage
from vllm_rose_plugin.kernels.moe_batched import flashinfer, masked
from vllm_rose_plugin.kernels.moe_batched.config import LayerShape
from vllm_rose_plugin.kernels.mxfp8_quantize.config import widest_load
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import untile_scales
from vllm_rose_plugin.kernels.swiglu_quantize.reference import swiglu_quantize

TARGETS = ("sm_100a", "sm_103a", "sm_107a")


@functools.cache
def made(config, target: str) -> cases.Made:
    with tempfile.TemporaryDirectory() as folder:
        compiled = jit._run_compiler(config, masked.build, target, keep=folder)
        return cases.Made(compiled, compiled.artifacts.PTX, compiled.artifacts.CUBIN)


def configs(target, hidden_size, intermediate_size, experts, *, dtype="bfloat16", rounding=Rounding.RCEIL):
    """(of tokens, of SwiGLU)."""
    shape = LayerShape(target, hidden_size, intermediate_size, experts, Activation.MXFP8)
    return (
        flashinfer._tokens_config(shape, dtype, rounding, widest_load(target)),
        flashinfer._swiglu_config(shape, rounding),
    )


def run(config, target, x, counts, *, seed):
    """(codes, row-major scales with what fills up tiles) [E, M, K] and [E, tiles * 128, blocks], after noise."""
    quantized = isinstance(x, Mxfp8Tensor)
    plain = cases.placed(x.codes.view(torch.uint8)) if quantized else x
    experts, each, _ = plain.shape
    down, across = -(-each // 128), config.rows.k_tiles
    rows = cases.poisoned((experts * each, config.rows.hidden_size), torch.uint8)
    scales = cases.poisoned((experts * down * across * 512,), torch.uint8)
    lengths = cases.placed(counts)
    tensors = {
        "x": plain.view(experts * each, -1),
        "x_scales": cases.placed(x.scales).view(-1) if quantized else None,
        "counts": lengths,
        "rows": rows,
        "scales": scales,
    }
    kernel = made(config, target)
    launch = launch_of(kernel.compiled, list(tensors.values()), kernel.param_sizes)
    memory = Memory({name: t for name, t in tensors.items() if t is not None}, {"rows", "scales"})
    machine = Machine(kernel.ptx, memory, launch.params, grid=launch.grid[0], shared=max(launch.shared, 16), seed=seed)
    assert launch.block == (config.rows.threads, 1, 1) and launch.pdl and not launch.cooperative
    shown = [cases.late(plain), cases.late(lengths)]
    machine.run(ended=lambda: [show() for show in shown])
    assert all(written.max() <= 1 for written in machine.written.values()), "a byte is stored to twice"
    plain_scales = untile_scales(scales, num_rows=experts * down * 128, num_blocks=across * 4)
    return rows.view(experts, each, -1), plain_scales.view(experts, down * 128, -1)


def check_tokens(counts, each, hidden_size, *, target="sm_100a", dtype=torch.bfloat16, quantized=False, seed=0, **how):
    x = batch(counts, each, hidden_size, dtype, seed=seed)
    if quantized:
        x = Mxfp8Tensor(*quantize_mxfp8(x))
    name = "mxfp8" if quantized else str(dtype).removeprefix("torch.")
    config, _ = configs(target, hidden_size, 128, len(counts), dtype=name, **how)
    codes, scales = run(config, target, x, torch.tensor(counts, dtype=torch.int32), seed=seed)
    right, right_scales = (x.codes, x.scales) if quantized else quantize_mxfp8(x, **how)
    compare(codes, scales, counts, right.view(torch.uint8), right_scales)


def compare(codes, scales, counts, right, right_scales):
    for expert, count in enumerate(counts):
        blocks = right_scales.shape[-1]
        assert torch.equal(codes[expert, :count], right[expert, :count])
        assert (codes[expert, count:] == cases.POISON).all(), "rows past the counts were written"
        assert torch.equal(scales[expert, :count, :blocks], right_scales[expert, :count])
        assert not scales[expert, :count, blocks:].any(), "what fills up a row's last tile is zero"
        assert (scales[expert, count:] == cases.POISON).all(), "scales past the counts were written"


@pytest.mark.parametrize("target", TARGETS)
def test_tokens(target):
    check_tokens([3, 0, 7, 9], 9, 96, target=target)


@pytest.mark.parametrize("counts", [[0], [0, 0, 0], [1, 0, 0, 2], [40] * 3, [5] + [0] * 39 + [6, 40]])
def test_counts(counts):
    check_tokens(counts, 40, 64, seed=len(counts))


def test_every_expert_has_the_tiles_of_all_its_rows():
    check_tokens([127, 128, 129, 3, 260], 260, 64, seed=3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes_and_rounding(dtype):
    check_tokens([6, 1], 7, 96, dtype=dtype, rounding=Rounding.FLOOR)


def test_tokens_that_arrive_quantized():
    check_tokens([6, 0, 129, 1], 130, 96, quantized=True)


@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize(("counts", "each"), [([3, 0, 7, 9], 9), ([129, 5], 130)])
def test_swiglu(counts, each, rounding):
    """Within one code, and only few of them: the reciprocal is approximate, as in ``swiglu_quantize``."""
    x = batch(counts, each, 256, torch.float32, seed=each)
    _, config = configs("sm_100a", 96, 128, len(counts), rounding=rounding)
    codes, scales = run(config, "sm_100a", x, torch.tensor(counts, dtype=torch.int32), seed=1)
    right = swiglu_quantize(x.flatten(0, 1), activation=Activation.MXFP8, rounding=rounding)
    theirs = right.codes.view(torch.uint8).view(*x.shape[:2], -1).clone()
    near = (codes.int() - theirs.int()).abs() == 1
    valid = torch.arange(each) < torch.tensor(counts).unsqueeze(1)
    assert near[valid].float().mean() < 1e-3
    compare(
        torch.where(near & valid.unsqueeze(-1), theirs, codes),
        scales,
        counts,
        theirs,
        right.scales.view(*x.shape[:2], -1),
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "mxfp8"])
def test_they_wait_before_they_read_and_do_not_spill(target, dtype):
    for config in configs(target, 4096, 1536, 8, dtype=dtype):
        cubin = made(config, target).cubin
        code, usage = instructions(cubin), resource_usage(cubin)
        assert usage["stack"] == 0 and not any(line.startswith(("STL", "LDL")) for line in code), "spills"
        assert usage["registers"] <= 64, usage
        waits, triggers, loads = (
            next(i for i, line in enumerate(code) if line.startswith(name)) for name in ("ACQBULK", "PREEXIT", "LDG")
        )
        assert waits < triggers < loads, "the next kernel must not start, nor a value be read, before the wait"
        assert not any("CONSTANT" in line for line in code), "a load that may be stale"
        assert any(line.startswith("STG") and ".128" in line for line in code)
