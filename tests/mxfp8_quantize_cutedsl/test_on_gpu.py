"""The kernels on a GPU against the references, and what only a device shows: replays, fences, empty calls."""

import cutedsl_cases as cases
import pytest
import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, ScaleLayout, TokenFormat
from vllm_rose_plugin.kernels.gemm.tokens import fp32_scales, pack_tokens
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import permute_tokens, quantize_mxfp8
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8 as reference
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import scale_shape, tile_scales
from vllm_rose_plugin.kernels.swiglu_quantize.launch import swiglu_quantize
from vllm_rose_plugin.kernels.swiglu_quantize.reference import swiglu_quantize as swiglu_reference

pytestmark = pytest.mark.gpu


def assert_bits(result: Mxfp8Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    if result.layout is ScaleLayout.TCGEN05_128X4:
        scales = tile_scales(scales)
    found = result.scales
    if result.layout is ScaleLayout.FP32_K_MAJOR:  # columns that are no token's hold anything
        found, scales = (x[:, : len(codes)].contiguous().view(torch.int32) for x in (found, fp32_scales(scales)))
    assert torch.equal(found.cpu(), scales.cpu())
    assert torch.equal(result.codes.view(torch.uint8).cpu(), codes.view(torch.uint8).cpu())


@pytest.mark.parametrize("values", cases.special_values())
@pytest.mark.parametrize("layout", ScaleLayout)
def test_all_inputs_give_the_bits_of_the_cpu_reference(values, layout):
    x = cases.special_values()[values]
    for rounding in ("rceil", "floor"):
        result = quantize_mxfp8(x.cuda(), rounding=rounding, layout=layout)
        assert_bits(result, *reference(x, rounding=rounding))


@pytest.mark.parametrize("layout", ScaleLayout)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 129, 3001])
def test_shapes_strides_and_fences(num_rows, layout):
    for hidden_size, gap in ((192, 0), (768, 1), (7168, 8)):
        x = torch.randn(num_rows, hidden_size + gap, device="cuda").to(torch.bfloat16)[:, :hidden_size]
        memory = torch.full((num_rows * hidden_size + 8192,), 0xA5, dtype=torch.uint8, device="cuda")
        codes = memory[4096 : 4096 + num_rows * hidden_size].view(torch.float8_e4m3fn).view(num_rows, hidden_size)
        scales = torch.empty(
            scale_shape(num_rows=num_rows, hidden_size=hidden_size, layout=layout),
            dtype=torch.float32 if layout is ScaleLayout.FP32_K_MAJOR else torch.uint8,
            device="cuda",
        )
        result = quantize_mxfp8(x, layout=layout, out=Mxfp8Tensor(codes, scales, layout))
        assert_bits(result, *reference(x))
        assert (memory[:4096] == 0xA5).all() and (memory[4096 + codes.numel() :] == 0xA5).all()


def test_replays_repeat():
    x = torch.randn(777, 4096, device="cuda", dtype=torch.bfloat16)
    quantize_mxfp8(x)
    swiglu_quantize(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [quantize_mxfp8(x), swiglu_quantize(x)]
    graph.replay()
    expected = [(r.codes.view(torch.uint8).clone(), r.scales.clone()) for r in results]
    for _ in range(100):
        for result in results:
            result.codes.view(torch.uint8).fill_(0xA5)
            result.scales.fill_(0xA5)
        graph.replay()
        for result, (codes, scales) in zip(results, expected, strict=True):
            assert torch.equal(result.codes.view(torch.uint8), codes) and torch.equal(result.scales, scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_swiglu(dtype):
    for num_rows, limit in ((0, None), (1, None), (3001, None), (257, 1.5)):
        x = (torch.randn(num_rows, 3072, device="cuda") * 3).to(dtype)
        result = swiglu_quantize(x, limit=limit)
        expected = swiglu_reference(x, limit=limit)
        assert (result.scales != expected.scales).sum() <= result.scales.numel() * 1e-4
        differing = result.codes.view(torch.uint8) != expected.codes.view(torch.uint8)
        assert differing.sum() <= max(1, differing.numel() * 1e-4)
        plain = swiglu_quantize(x, activation="bf16", limit=limit)
        tolerance = 4e-7 if dtype is torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(
            plain, swiglu_reference(x, activation="bf16", limit=limit), rtol=tolerance, atol=1e-30
        )


def assert_permuted(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(result.isnan().cpu(), expected.isnan().cpu())
    assert torch.equal(result.nan_to_num().cpu().view(torch.int16), expected.nan_to_num().cpu().view(torch.int16))


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("values", cases.special_values())
def test_permuted_inputs_give_the_bits_of_the_cpu_reference(values, activation):
    x = cases.special_values()[values]
    result = permute_tokens(x.cuda(), activation=activation, rounding="floor")
    how = {"token_format": TokenFormat.BF16_PERMUTED, "activation": activation, "rounding": "floor"}
    assert_permuted(result, pack_tokens(x, **how).data)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("num_rows", [0, 1, 129, 3001])
def test_permuted_shapes_strides_and_fences(num_rows, activation):
    for hidden_size, gap in ((96, 0), (768, 1), (7168, 8)):
        x = torch.randn(num_rows, hidden_size + gap, device="cuda").to(torch.bfloat16)[:, :hidden_size]
        width = -(-hidden_size // 64) * 64
        memory = torch.full((num_rows * width + 4096,), 7.0, dtype=torch.bfloat16, device="cuda")
        out = memory[2048 : 2048 + num_rows * width].view(num_rows, width)
        assert permute_tokens(x, activation=activation, out=out) is out
        expected = pack_tokens(x, token_format=TokenFormat.BF16_PERMUTED, activation=activation).data
        assert_permuted(out, expected)
        assert (memory[:2048] == 7).all() and (memory[2048 + num_rows * width :] == 7).all()


@pytest.mark.parametrize("activation", Activation)
def test_swiglu_permuted(activation):
    for num_rows, size in ((0, 1536), (1, 96), (3001, 1536)):
        x = (torch.randn(num_rows, 2 * size, device="cuda") * 3).to(torch.bfloat16)
        result = swiglu_quantize(x, activation=activation, permuted=True)
        product = swiglu_reference(x.float(), activation="bf16")
        expected = pack_tokens(product, token_format=TokenFormat.BF16_PERMUTED, activation=activation).data
        step = 2.0**-7 if activation is Activation.BF16 else 2.0**-3
        torch.testing.assert_close(result, expected, rtol=step, atol=1e-30)
        assert (result != expected).sum() <= max(1, result.numel() * 1e-3)
