"""The kernels' PTX, run on the CPU, against the references."""

import re

import cutedsl_cases as cases
import numpy as np
import pytest
import torch

from vllm_rose_plugin.kernels.contracts import Activation, Rounding, ScaleLayout, TokenFormat
from vllm_rose_plugin.kernels.gemm.tokens import fp32_scales, pack_tokens
from vllm_rose_plugin.kernels.mxfp8_quantize import config as quantize
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import tile_scales
from vllm_rose_plugin.kernels.swiglu_quantize import config as swiglu
from vllm_rose_plugin.kernels.swiglu_quantize.reference import swiglu_quantize

SPECIAL = cases.special_values()
POISON = 0xABABABAB
MANY = 10**6
"""As many rows make the launch shape that takes several vectors a thread."""


def quantize_config(x: torch.Tensor, *, target: str, rounding="rceil", layout=ScaleLayout.ROW_MAJOR, bulk=False, **how):
    return quantize.choose_config(
        dtype=str(x.dtype).removeprefix("torch."),
        num_rows=MANY if bulk else x.shape[0],
        hidden_size=x.shape[1],
        layout=layout,
        rounding=Rounding(rounding),
        **{"alignment": quantize.widest_load(target), "sm_count": cases.SM_COUNT, **how},
    )


def assert_reference(config, target: str, x: torch.Tensor, **how) -> None:
    codes, scales = cases.run(config, target, x, **how)
    expected_codes, expected_scales = quantize_mxfp8(x, rounding=config.rounding)
    assert_scales(scales, expected_scales, config.layout)
    np.testing.assert_array_equal(codes, expected_codes.view(torch.uint8).numpy())


def assert_scales(scales: np.ndarray, expected: torch.Tensor, layout: ScaleLayout) -> None:
    """That a kernel wrote these row-major scales in `layout`, and nothing into columns that are no token's."""
    if layout is not ScaleLayout.FP32_K_MAJOR:
        expected = tile_scales(expected) if layout is ScaleLayout.TCGEN05_128X4 else expected
        np.testing.assert_array_equal(scales, expected.flatten().numpy())
        return
    num_rows = len(expected)
    np.testing.assert_array_equal(
        scales[:, :num_rows], fp32_scales(expected)[:, :num_rows].view(torch.int32).numpy().view(np.uint32)
    )
    assert (scales[:, num_rows:] == POISON).all()


@pytest.mark.parametrize(
    ("target", "layout"),
    [
        ("sm_90a", ScaleLayout.ROW_MAJOR),
        ("sm_100f", ScaleLayout.ROW_MAJOR),
        ("sm_90a", ScaleLayout.FP32_K_MAJOR),
    ],
)
@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("values", SPECIAL)
def test_all_inputs_give_the_bits_of_the_reference(values, rounding, target, layout):
    x = SPECIAL[values]
    assert_reference(quantize_config(x, target=target, rounding=rounding, layout=layout), target, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ScaleLayout)
def test_from_sm_100_on_the_ptx_is_the_same(layout, dtype):
    """So that running the PTX of one of these targets is running that of all."""
    found = {}
    for bulk in (False, True):
        for target in set(cases.TARGETS) - {"sm_90a"}:
            config = quantize_config(torch.zeros(131, 768, dtype=dtype), target=target, layout=layout, bulk=bulk)
            text = re.sub(r"^\.(target|version) .*$|//.*$", "", cases.artifacts(config, target).ptx, flags=re.MULTILINE)
            assert "st.global" in text
            assert found.setdefault(bulk, text) == text, target
    assert found[True] != found[False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ScaleLayout)
@pytest.mark.parametrize("target", ["sm_90a", "sm_107a"])
def test_both_launch_shapes_and_ragged_ends(target, layout, dtype):
    for num_rows, hidden_size in ((1, 192), (131, 768), (259, 96)):
        x = torch.randn(num_rows, hidden_size, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
        for bulk in (False, True):
            assert_reference(quantize_config(x, target=target, layout=layout, bulk=bulk), target, x)


@pytest.mark.parametrize(("hidden_size", "num_rows"), [(1536, 3), (4096, 5), (7168, 2)])
@pytest.mark.parametrize("layout", ScaleLayout)
def test_hidden_sizes_of_models(hidden_size, num_rows, layout):
    x = torch.randn(num_rows, hidden_size, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16)
    assert_reference(quantize_config(x, target="sm_90a", layout=layout, bulk=True), "sm_90a", x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("gap", "offset"), [(64, 0), (16, 32), (8, 16), (4, 8), (2, 4), (1, 2)])
def test_rows_apart_and_out_of_line(gap, offset, dtype):
    if dtype is torch.float32:
        offset *= 2
    x = torch.randn(21, 192, generator=torch.Generator().manual_seed(4)).to(dtype)
    row_stride = 192 + gap
    for target in ("sm_90a", "sm_100f"):
        limit = quantize.widest_load(target)
        alignment = quantize.alignment_of(pointer=offset, row_bytes=row_stride * dtype.itemsize, limit=limit)
        config = quantize_config(x, target=target, alignment=alignment, bulk=True)
        assert_reference(config, target, x, row_stride=row_stride, offset=offset)


# ---- permuted ----


def canonical(bits: np.ndarray) -> np.ndarray:
    """bf16 patterns with one NaN: its payload isn't promised."""
    return np.where((bits & 0x7FFF) > 0x7F80, 0x7FC0, bits)


def assert_permuted(config, target: str, x: torch.Tensor, **how) -> None:
    raw, scales = cases.run(config, target, x, **how)
    assert scales.size == 0
    expected = pack_tokens(
        x, token_format=TokenFormat.BF16_PERMUTED, activation=config.activation, rounding=config.rounding
    ).data
    np.testing.assert_array_equal(
        canonical(raw.view(np.uint16)), canonical(expected.view(torch.int16).numpy().view(np.uint16))
    )


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("values", SPECIAL)
def test_permuted_inputs_give_the_bits_of_the_reference(values, activation):
    x = SPECIAL[values]
    for rounding in Rounding if activation is Activation.MXFP8 else ("rceil",):
        config = quantize_config(x, target="sm_90a", rounding=rounding, activation=activation, permuted=True)
        assert_permuted(config, "sm_90a", x)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("target", ["sm_90a", "sm_107a"])
def test_permuted_rows_of_every_size(target, dtype, activation):
    for num_rows, hidden_size in ((1, 32), (131, 768), (37, 672)):
        x = torch.randn(num_rows, hidden_size, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
        for bulk in (False, True):
            assert_permuted(
                quantize_config(x, target=target, activation=activation, permuted=True, bulk=bulk), target, x
            )
    x = torch.randn(21, 96, generator=torch.Generator().manual_seed(4)).to(dtype)
    config = quantize_config(x, target=target, activation=activation, permuted=True, alignment=4)
    assert_permuted(config, target, x, row_stride=98, offset=4)


# ---- SwiGLU ----


def swiglu_config(x, *, target, activation="mxfp8", layout=ScaleLayout.ROW_MAJOR, limit=None, bulk=False, **how):
    size = x.shape[1] // 2
    row_bytes = size * x.element_size()
    return swiglu.choose_config(
        dtype=str(x.dtype).removeprefix("torch."),
        num_rows=MANY if bulk else x.shape[0],
        intermediate_size=size,
        activation=Activation(activation),
        layout=layout,
        rounding=Rounding.RCEIL,
        limit=limit,
        **{"alignment": min(quantize.widest_load(target), row_bytes & -row_bytes), "sm_count": cases.SM_COUNT, **how},
    )


def ordinal(codes: np.ndarray) -> np.ndarray:
    codes = codes.astype(int)
    return np.where(codes >= 128, 128 - codes, codes)


def compare_swiglu(config, target: str, x: torch.Tensor, **how) -> float:
    """Share of codes that aren't the reference's; fails where one is more than one step off, or a scale differs."""
    codes, scales = cases.run(config, target, x, **how)
    expected = swiglu_quantize(x, limit=config.limit)
    assert_scales(scales, expected.scales, config.layout)
    expected_codes = expected.codes.view(torch.uint8).numpy()
    assert np.abs(ordinal(codes) - ordinal(expected_codes)).max() <= 1
    return (codes != expected_codes).mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ScaleLayout)
@pytest.mark.parametrize("target", ["sm_90a", "sm_100f"])
def test_swiglu(target, layout, dtype):
    for num_rows, limit, bulk in ((131, None, True), (64, 1.5, False)):
        x = torch.randn(num_rows, 384, generator=torch.Generator().manual_seed(num_rows)).mul(3).to(dtype)
        config = swiglu_config(x, target=target, layout=layout, limit=limit, bulk=bulk)
        assert compare_swiglu(config, target, x) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limit", [None, 7.0])
def test_swiglu_of_every_gate(dtype, limit):
    gates = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 64)
    for up in (1.0, -200.0):
        x = torch.cat([gates, torch.full_like(gates, up)], -1)
        assert compare_swiglu(swiglu_config(x, target="sm_90a", limit=limit), "sm_90a", x) < 1e-3


def test_swiglu_where_exp_leaves_the_range():
    gates = torch.linspace(-89.5, -86.0, 4096).view(-1, 64)
    x = torch.cat([gates, torch.full_like(gates, 2.0**40)], -1)
    x = torch.cat([x, torch.zeros(4, 128)])
    x[-3, :64], x[-3, 64:] = -1e30, 1e30
    x[-2, :64], x[-2, 64:] = 200.0, 2.0
    x[-1] = float("nan")
    codes, _ = cases.run(swiglu_config(x, target="sm_90a"), "sm_90a", x)
    assert compare_swiglu(swiglu_config(x, target="sm_90a"), "sm_90a", x) < 1e-2
    assert not (codes[-4] & 0x7F).any() and not (codes[-3] & 0x7F).any() and (codes[-1] == 0x7F).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [192, 100, 14])
def test_swiglu_unquantized(size, dtype):
    x = torch.randn(37, 2 * size, generator=torch.Generator().manual_seed(size)).mul(3).to(dtype)
    for target, bulk in (("sm_90a", True), ("sm_100f", False)):
        raw, scales = cases.run(swiglu_config(x, target=target, activation="bf16", bulk=bulk), target, x)
        assert scales.size == 0
        y = torch.from_numpy(raw).view(dtype)
        expected = swiglu_quantize(x, activation="bf16")
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(y, expected, rtol=4e-7 if dtype is torch.float32 else eps, atol=1e-30)
        assert dtype is torch.float32 or (y != expected).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [192, 96, 32])
def test_swiglu_permuted(size, dtype):
    x = torch.randn(37, 2 * size, generator=torch.Generator().manual_seed(size)).mul(3).to(dtype)
    product = swiglu_quantize(x.float(), activation="bf16")
    for target, bulk in (("sm_90a", True), ("sm_100f", False)):
        for activation in Activation:
            config = swiglu_config(x, target=target, activation=activation, permuted=True, bulk=bulk)
            raw, scales = cases.run(config, target, x)
            assert scales.size == 0
            y = torch.from_numpy(raw).view(torch.bfloat16)
            expected = pack_tokens(product, token_format=TokenFormat.BF16_PERMUTED, activation=activation).data
            step = 2.0**-7 if activation is Activation.BF16 else 2.0**-3
            torch.testing.assert_close(y, expected, rtol=step, atol=1e-30)
            assert (y != expected).float().mean() < 1e-3
