"""How a call becomes a launch: shapes, alignment, refusals."""

from functools import partial

import pytest
import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding, ScaleLayout
from vllm_rose_plugin.kernels.jit.fingerprint import config_text
from vllm_rose_plugin.kernels.mxfp8_quantize import config as quantize
from vllm_rose_plugin.kernels.mxfp8_quantize import launch
from vllm_rose_plugin.kernels.swiglu_quantize import config as swiglu
from vllm_rose_plugin.kernels.swiglu_quantize.launch import swiglu_quantize


def choose(num_rows: int, *, alignment: int = 16, dtype: str = "bfloat16", layout=ScaleLayout.ROW_MAJOR, size=4096):
    return quantize.choose_config(
        dtype=dtype,
        num_rows=num_rows,
        hidden_size=size,
        layout=layout,
        rounding=Rounding.RCEIL,
        alignment=alignment,
        sm_count=132,
    )


@pytest.mark.parametrize(
    ("pointer", "row_bytes", "limit", "expected"),
    [
        (0x1000, 8192, 16, 16),
        (0x1000, 8192, 32, 32),
        (0x1010, 8192, 32, 16),
        (0x1000, 8200, 16, 8),
        (0x1004, 8192, 16, 4),
        (0x1000, 8194, 32, 2),
        (0x1000, 0, 32, 32),
    ],
)
def test_alignment(pointer, row_bytes, limit, expected):
    assert quantize.alignment_of(pointer=pointer, row_bytes=row_bytes, limit=limit) == expected


def test_a_thread_takes_one_vector_until_the_device_is_full():
    few, many = choose(128), choose(8192)
    assert (few.unroll, many.unroll) == (1, 4)
    full = 132 * 2048 * 8 // 4096
    assert choose(full).unroll == 1 and choose(full + 1).unroll == 4
    assert choose(8192, alignment=32).unroll == 2 and choose(8192, alignment=32, dtype="float32").unroll == 4
    # A single row fills tiles of 128 rows.
    assert choose(1, layout=ScaleLayout.TCGEN05_128X4, size=65536).unroll == 4


@pytest.mark.parametrize("dtype", quantize.ITEM_BYTES)
@pytest.mark.parametrize("layout", ScaleLayout)
@pytest.mark.parametrize("target", ["sm_90a", "sm_100f"])
def test_warm_configs_are_all_that_aligned_calls_need(target, layout, dtype):
    for size in (192, 4096, 7168):
        warm = quantize.warm_configs(
            dtype=dtype, hidden_size=size, layout=layout, rounding=Rounding.RCEIL, target=target, sm_count=132
        )
        for num_rows in (1, 2, 127, 1000, 2000, 70000):
            config = choose(num_rows, alignment=quantize.widest_load(target), dtype=dtype, layout=layout, size=size)
            assert config in warm
        assert len({config_text(config) for config in warm}) == 2
    for activation in Activation:
        warm = swiglu.warm_configs(
            dtype=dtype,
            intermediate_size=1536,
            activation=activation,
            layout=ScaleLayout.ROW_MAJOR,
            rounding=Rounding.RCEIL,
            limit=None,
            target=target,
            sm_count=132,
        )
        assert all(config.load_bytes == quantize.widest_load(target) for config in warm)


def test_too_large_a_call_is_refused():
    with pytest.raises(ValueError, match="quantize fewer rows at a time"):
        choose(2**23)
    assert choose(2**22 - 2**8).unroll == 4


def test_tensors_elsewhere_and_wrong_shapes_are_named():
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    for function in (launch.quantize_mxfp8, swiglu_quantize, partial(launch.permute_tokens, activation="bf16")):
        with pytest.raises(ValueError, match="x is on cpu"):
            function(x)
        with pytest.raises(TypeError, match="float64"):
            function(x.double())
        with pytest.raises(ValueError, match=r"must be \[T, H\], got shape \(64,\)"):
            function(x[0])


def test_outputs_are_checked():
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    how = {"num_rows": 4, "hidden_size": 64, "layout": ScaleLayout.ROW_MAJOR}
    good = launch.quantized_like(x, out=None, **how)
    assert good.codes.shape == (4, 64) and good.scales.shape == (4, 2)
    assert launch.quantized_like(x, out=good, **how) is good
    tiled = launch.quantized_like(x, out=None, **{**how, "layout": ScaleLayout.TCGEN05_128X4})
    assert tiled.scales.shape == (512,) and tiled.layout is ScaleLayout.TCGEN05_128X4
    with pytest.raises(ValueError, match=r"out.scales must be torch.uint8 \(4, 2\)"):
        launch.quantized_like(x, out=Mxfp8Tensor(good.codes, good.scales[:, :1]), **how)
    with pytest.raises(ValueError, match=r"out.codes must be contiguous, got strides \(128, 1\)"):
        wide = torch.zeros(4, 128, dtype=torch.float8_e4m3fn)[:, :64]
        launch.quantized_like(x, out=Mxfp8Tensor(wide, good.scales), **how)
    with pytest.raises(ValueError, match="multiple of 32 bytes"):
        around = torch.zeros(300, dtype=torch.uint8)
        start = -around.data_ptr() % 32 + 8
        shifted = around[start : start + 256].view(torch.float8_e4m3fn).view(4, 64)
        launch.quantized_like(x, out=Mxfp8Tensor(shifted, good.scales), **how)
    with pytest.raises(ValueError, match="asked for were"):
        launch.quantized_like(x, out=tiled, **how)


def test_float32_scales_and_permuted_rows_have_their_own_outputs():
    x = torch.zeros(5, 96, dtype=torch.bfloat16)
    how = {"num_rows": 5, "hidden_size": 96, "layout": ScaleLayout.FP32_K_MAJOR}
    good = launch.quantized_like(x, out=None, **how)
    assert good.scales.shape == (3, 8) and good.scales.dtype == torch.float32 and good.layout is how["layout"]
    assert launch.quantized_like(x, out=good, **how) is good
    with pytest.raises(ValueError, match=r"out.scales must be torch.float32 \(3, 8\)"):
        launch.quantized_like(x, out=Mxfp8Tensor(good.codes, good.scales[:, :5], how["layout"]), **how)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        around = torch.zeros(40)
        start = (-around.data_ptr() % 16 + 4) // 4
        launch.quantized_like(
            x, out=Mxfp8Tensor(good.codes, around[start : start + 24].view(3, 8), how["layout"]), **how
        )
    plain = launch.plain_like(x, (5, 128), torch.bfloat16, None)
    assert plain.shape == (5, 128) and launch.plain_like(x, (5, 128), torch.bfloat16, plain) is plain
    with pytest.raises(ValueError, match=r"out must be contiguous torch.bfloat16 \(5, 128\)"):
        launch.plain_like(x, (5, 128), torch.bfloat16, plain.float())
    with pytest.raises(TypeError, match="the result is a tensor"):
        launch.plain_like(x, (5, 128), torch.bfloat16, good)


def test_permuted_rows_are_cut_into_vectors_of_eight():
    for size, expected in ((32, 8), (96, 16), (4096, 512)):
        for dtype in quantize.ITEM_BYTES:
            few, many = (
                quantize.choose_config(
                    dtype=dtype,
                    num_rows=num_rows,
                    hidden_size=size,
                    layout=ScaleLayout.ROW_MAJOR,
                    rounding=Rounding.RCEIL,
                    alignment=32,
                    sm_count=132,
                    activation=Activation.BF16,
                    permuted=True,
                )
                for num_rows in (1, 2**27 // size)
            )
            assert few.vector == many.vector == 8 and few.row_vectors == expected
            assert (few.unroll, many.unroll) == (1, 4)
            assert few.load_bytes == min(32, 8 * quantize.ITEM_BYTES[dtype])


def test_the_stride_of_a_single_row_does_not_matter():
    x = torch.zeros(1, 4097, dtype=torch.bfloat16)[:, :4096]
    assert launch.with_plain_stride(x).stride() == (4096, 1)
    x = torch.zeros(2, 4097, dtype=torch.bfloat16)[:, :4096]
    assert launch.with_plain_stride(x) is x and launch.row_alignment(x, limit=16) == 2
