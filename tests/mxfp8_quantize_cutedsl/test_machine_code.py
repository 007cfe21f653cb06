"""What the compiler makes of every config for every target."""

import functools
import re

import pytest
from cutedsl_cases import SM_COUNT, TARGETS, artifacts

from vllm_rose_plugin.kernels.contracts import Activation, Rounding, ScaleLayout
from vllm_rose_plugin.kernels.jit.sass import resource_usage, sass
from vllm_rose_plugin.kernels.mxfp8_quantize import config as quantize
from vllm_rose_plugin.kernels.swiglu_quantize import config as swiglu

MOST_REGISTERS = {"sm_107a": 64}
"""Four blocks of 256 threads fit on an SM with 64; the compiler uses them all for Rubin."""
MOST_REGISTERS_ELSEWHERE = 48
"""Five blocks."""


@functools.cache
def instructions(cubin: bytes) -> list[str]:
    found = re.findall(r"^\s+/\*[0-9a-f]{4}\*/\s+(.*?);", sass(cubin), re.MULTILINE)
    return [re.sub(r"^@!?U?P\d+ ", "", line).strip() for line in found]


def check(config, target: str, *, loads: int) -> None:
    cubin = artifacts(config, target).cubin
    code = instructions(cubin)
    usage = resource_usage(cubin)
    assert usage["stack"] == 0 and not any(line.startswith(("STL", "LDL")) for line in code), "spills"
    assert usage["registers"] <= MOST_REGISTERS.get(target, MOST_REGISTERS_ELSEWHERE)
    assert any(line.startswith("ACQBULK") for line in code) and any(line.startswith("PREEXIT") for line in code)
    quantized = config.activation is Activation.MXFP8
    widest = {8: "LDG.E.64", 16: "LDG.E.128", 32: "LDG.E.ENL2.256"}[config.load_bytes]
    at = [i for i, line in enumerate(code) if line.startswith("LDG")]
    assert len(at) == loads and all(code[i].startswith(widest) for i in at)
    if target == "sm_90a" or config.layout is not ScaleLayout.FP32_K_MAJOR:  # which only sm_90's GEMM reads
        before_last = code[: at[-1]]
        assert not any(x.startswith(("SHFL", "MUFU", "F2F", "STG")) for x in before_last), "loads wait for work"
    stores = [line for line in code if line.startswith("STG")]
    byte_stores = [line for line in stores if line.startswith("STG.E.U8")]
    elements = config.vector * config.unroll
    conversions = sum(line.startswith("F2FP.SATFINITE.E4M3") for line in code)
    exchanges = sum(line.startswith("SHFL") for line in code)
    if config.permuted:
        assert conversions == (elements // 2 if quantized else 0)
        assert len(stores) == config.unroll and all(line.startswith("STG.E.128") for line in stores)
        amax = 2 * config.unroll if quantized else 0  # four lanes share a block
        assert exchanges == 4 * config.unroll + amax, "four words of a vector are exchanged"
        assert sum(line.startswith("F2FP.F16.E4M3.UNPACK") for line in code) == conversions
    elif config.layout is ScaleLayout.FP32_K_MAJOR:
        assert conversions == elements // 2
        assert not byte_stores and len(stores) == config.unroll + 1, "each lane writes one scale"
    elif quantized:
        assert conversions == elements // 2
        assert len(byte_stores) == 1, "each lane writes one scale"
        assert len(stores) == config.unroll + 1, "a vector's codes are one store"
    else:
        assert conversions == 0 and not byte_stores
        assert len(stores) == config.unroll


def loads_of(config) -> int:
    """Of one input, in a thread."""
    return config.unroll * config.vector * quantize.ITEM_BYTES[config.dtype] // config.load_bytes


@pytest.mark.parametrize("dtype", quantize.ITEM_BYTES)
@pytest.mark.parametrize("target", TARGETS)
def test_quantize(target, dtype):
    for layout, rounding, hidden_size, permuted, activation in (
        (ScaleLayout.ROW_MAJOR, Rounding.RCEIL, 4096, False, Activation.MXFP8),
        (ScaleLayout.TCGEN05_128X4, Rounding.FLOOR, 192, False, Activation.MXFP8),
        (ScaleLayout.FP32_K_MAJOR, Rounding.RCEIL, 4096, False, Activation.MXFP8),
        (ScaleLayout.ROW_MAJOR, Rounding.RCEIL, 4096, True, Activation.MXFP8),
        (ScaleLayout.ROW_MAJOR, Rounding.RCEIL, 4096, True, Activation.BF16),
    ):
        for config in quantize.warm_configs(
            dtype=dtype,
            hidden_size=hidden_size,
            layout=layout,
            rounding=rounding,
            target=target,
            sm_count=SM_COUNT,
            permuted=permuted,
            activation=activation,
        ):
            check(config, target, loads=loads_of(config))


@pytest.mark.parametrize("dtype", quantize.ITEM_BYTES)
@pytest.mark.parametrize("target", TARGETS)
def test_swiglu(target, dtype):
    for activation, layout, limit, permuted in (
        (Activation.MXFP8, ScaleLayout.ROW_MAJOR, None, False),
        (Activation.MXFP8, ScaleLayout.TCGEN05_128X4, 7.0, False),
        (Activation.BF16, ScaleLayout.ROW_MAJOR, None, False),
        (Activation.MXFP8, ScaleLayout.FP32_K_MAJOR, None, False),
        (Activation.MXFP8, ScaleLayout.ROW_MAJOR, None, True),
        (Activation.BF16, ScaleLayout.ROW_MAJOR, None, True),
    ):
        for config in swiglu.warm_configs(
            dtype=dtype,
            intermediate_size=1536,
            activation=activation,
            layout=layout,
            rounding=Rounding.RCEIL,
            limit=limit,
            target=target,
            sm_count=SM_COUNT,
            permuted=permuted,
        ):
            check(config, target, loads=2 * loads_of(config))
            elements = config.vector * config.unroll
            code = instructions(artifacts(config, target).cubin)
            assert sum(line.startswith("MUFU.EX2") for line in code) == elements
            assert sum(line.startswith("MUFU.RCP") for line in code) == elements
            assert sum(line.startswith("MUFU") for line in code) == 2 * elements


@pytest.mark.parametrize("load_bytes", [2, 4, 8, 16])
def test_rows_that_are_not_aligned_get_narrower_loads(load_bytes):
    config = quantize.choose_config(
        dtype="bfloat16",
        num_rows=8192,
        hidden_size=4096,
        layout=ScaleLayout.ROW_MAJOR,
        rounding=Rounding.RCEIL,
        alignment=load_bytes,
        sm_count=SM_COUNT,
    )
    name = {2: "LDG.E.U16", 4: "LDG.E", 8: "LDG.E.64", 16: "LDG.E.128"}[load_bytes]
    for target in ("sm_90a", "sm_100f"):
        found = [line.split()[0] for line in instructions(artifacts(config, target).cubin) if line.startswith("LDG")]
        assert set(found) == {name} and len(found) == 16 // load_bytes * config.unroll
