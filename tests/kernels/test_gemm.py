"""MXFP8 linear and grouped GEMM against the float64 oracle."""

import kernel_oracle as oracle
import numpy as np
import pytest
import torch

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor, ScaleLayout
from vllm_rose_plugin.kernels.gemm.reference import grouped_gemm, mxfp8_linear
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8

ALL_CODES = torch.arange(256, dtype=torch.uint8)


def random_mxfp8(*shape: int, seed: int) -> Mxfp8Tensor:
    return Mxfp8Tensor(*quantize_mxfp8(torch.randn(*shape, generator=torch.Generator().manual_seed(seed))))


def small_integers(*shape: int, seed: int) -> torch.Tensor:
    """fp32 integers from -4 to 4 without 0: exact in E4M3, and so are sums of a few hundred products."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(1, 5, shape, generator=g) * (torch.randint(0, 2, shape, generator=g) * 2.0 - 1)


def weight_with_all_scales(seed: int) -> Mxfp8Tensor:
    """[256, 64]; both blocks of row n have scale code n. Elements are at most 1: twice 2**127 would be inf in fp32."""
    codes = (small_integers(256, 64, seed=seed) / 4).to(torch.float8_e4m3fn)
    return Mxfp8Tensor(codes, ALL_CODES.unsqueeze(1).repeat(1, 2))


def assert_rows_close(out: torch.Tensor, expected: np.ndarray, magnitude: np.ndarray, tolerance: float) -> None:
    """Every row within `tolerance` of its own largest sum of magnitudes."""
    error = np.abs(oracle.to64(out) - expected).max(-1)
    bound = tolerance * magnitude.max(-1)
    assert (error <= bound).all(), f"rows {np.nonzero(error > bound)[0]}: {error.max()} > {bound.min()}"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_linear(seed, dtype, activation, rounding):
    g = torch.Generator().manual_seed(100 + seed)
    x = torch.randn(9, 96, generator=g).to(dtype)
    weight, bias = random_mxfp8(40, 96, seed=seed), torch.randn(40, generator=g).to(dtype)
    a = oracle.to64(x)
    if activation == "mxfp8":
        codes, scales = oracle.quantize(x, rounding)
        a = oracle.E4M3[codes] * np.repeat(oracle.E8M0[scales], 32, -1)
    w = oracle.dequantize(weight.codes, weight.scales)
    out = mxfp8_linear(x, weight, bias=bias, activation=activation, rounding=rounding)
    assert out.dtype == dtype
    expected = a @ w.T + oracle.to64(bias)
    half_ulp = torch.finfo(dtype).eps / 2
    assert_rows_close(out, expected, np.abs(a) @ np.abs(w.T) + np.abs(oracle.to64(bias)), half_ulp * 1.01 + 2e-6)


def test_linear_of_an_mxfp8_input_equals_that_of_the_plain_one():
    x, weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)), random_mxfp8(48, 64, seed=2)
    ready = Mxfp8Tensor(*quantize_mxfp8(x))
    assert torch.equal(mxfp8_linear(ready, weight, out_dtype=torch.float32), mxfp8_linear(x, weight))
    with pytest.raises(TypeError, match="out_dtype"):
        mxfp8_linear(ready, weight)


def test_bias_is_added_before_the_result_is_rounded():
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, :2] = torch.tensor([256.0, 1.0])
    weight = Mxfp8Tensor(*quantize_mxfp8(torch.ones(1, 32)))
    bias = torch.tensor([1.0], dtype=torch.bfloat16)
    # 256 + 1 is 256 in bf16, where steps are 2 wide there: a product rounded first would lose both ones.
    assert mxfp8_linear(x, weight, bias=bias, activation="bf16").item() == 258.0


@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
@pytest.mark.parametrize(("exponent", "codes"), [(-12, slice(0, 256)), (60, slice(0, 128))])
def test_all_scale_codes_through_linear(activation, exponent, codes):
    x = small_integers(6, 64, seed=11) * 2.0**exponent
    weight = weight_with_all_scales(seed=12)
    expected = oracle.to64(x) @ oracle.dequantize(weight.codes, weight.scales).T
    out = oracle.to64(mxfp8_linear(x, weight, activation=activation))[:, codes]
    np.testing.assert_array_equal(out, expected[:, codes])
    assert not np.isinf(out).any() and (np.isnan(out).all(0) == (ALL_CODES[codes] == 255).numpy()).all()


@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
def test_tiny_weights_survive_flushed_subnormals(activation, flush_denormal):
    x = small_integers(6, 64, seed=13) * 2.0**60
    weight = weight_with_all_scales(seed=14)
    expected = mxfp8_linear(x, weight, activation=activation)
    flush_denormal()
    out = mxfp8_linear(x, weight, activation=activation)
    assert torch.equal(out[:, :128], expected[:, :128]) and (out[:, :128] != 0).float().mean() > 0.9


def test_tiny_activations_survive_flushed_subnormals(flush_denormal):
    x = torch.ldexp(small_integers(6, 64, seed=15), torch.arange(-135, -123, 2).unsqueeze(1))
    weight = Mxfp8Tensor((small_integers(16, 64, seed=16)).to(torch.float8_e4m3fn), torch.full((16, 2), 227).byte())
    expected = mxfp8_linear(x, weight)
    exact = oracle.to64(x) @ oracle.dequantize(weight.codes, weight.scales).T
    np.testing.assert_array_equal(oracle.to64(expected), exact)
    flush_denormal()
    assert torch.equal(mxfp8_linear(x, weight), expected) and (expected != 0).float().mean() > 0.9


def test_a_large_row_beside_a_tiny_one_in_the_same_weight():
    x = small_integers(3, 64, seed=17)
    codes = small_integers(2, 64, seed=18).to(torch.float8_e4m3fn)
    weight = Mxfp8Tensor(codes, torch.tensor([[0, 227], [227, 0]]).byte())
    exact = oracle.to64(x) @ oracle.dequantize(weight.codes, weight.scales).T
    np.testing.assert_array_equal(mxfp8_linear(x, weight).numpy(), exact.astype(np.float32))


@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
def test_bad_values_spoil_their_rows_and_columns_alone(activation):
    x, weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(3)), random_mxfp8(24, 64, seed=4)
    clean = mxfp8_linear(x, weight, activation=activation)
    x[2] = float("nan")
    weight.scales[5, 1] = 255
    out = mxfp8_linear(x, weight, activation=activation)
    assert out[2].isnan().all() and out[:, 5].isnan().all()
    rows, columns = [0, 1, 3, 4, 5], [n for n in range(24) if n != 5]
    assert torch.equal(out[rows][:, columns], clean[rows][:, columns])


@pytest.mark.parametrize("tokens", [0, 1])
def test_linear_of_few_tokens(tokens):
    x, weight = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(5)), random_mxfp8(24, 64, seed=6)
    assert mxfp8_linear(x, weight).shape == (tokens, 24)


def test_another_scale_layout_is_refused():
    weight = random_mxfp8(128, 128, seed=7)
    with pytest.raises(ValueError, match="TCGEN05"):
        mxfp8_linear(torch.zeros(1, 128), Mxfp8Tensor(weight.codes, weight.scales, ScaleLayout.TCGEN05_128X4))


# ---- grouped ----


def runs(counts: list[int], alignment: int, spare: int = 3) -> tuple[torch.Tensor, torch.Tensor, int, np.ndarray]:
    """(counts, offsets, S, expert of each row or -1) with `spare` rows after the last run."""
    offsets, owner = [0], []
    for expert, count in enumerate(counts):
        padded = -(-count // alignment) * alignment
        owner += [expert] * count + [-1] * (padded - count)
        offsets.append(len(owner))
    owner += [-1] * spare
    as_int32 = (torch.tensor(counts, dtype=torch.int32), torch.tensor(offsets, dtype=torch.int32))
    return *as_int32, len(owner), np.array(owner, int)


@pytest.mark.parametrize("alignment", [1, 32, 128])
@pytest.mark.parametrize("quantized", [True, False])
def test_grouped_gemm_of_many_run_lengths(alignment, quantized, poisoned_memory):
    lengths = [0, 1, 31, 32, 33, 127, 128, 129, 0]
    counts, offsets, num_rows, owner = runs(lengths, alignment)
    weight = random_mxfp8(len(lengths), 24, 64, seed=21)
    x = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(22))
    x[torch.from_numpy(owner < 0)] = float("nan")  # what padding rows hold must not matter
    if quantized:
        tokens: torch.Tensor | Mxfp8Tensor = Mxfp8Tensor(*quantize_mxfp8(x))
        a = oracle.dequantize(tokens.codes, tokens.scales)
    else:
        tokens, a = x, oracle.to64(x)
    out = grouped_gemm(tokens, weight, expert_offsets=offsets, expert_counts=counts, out_dtype=torch.float32)
    w = oracle.dequantize(weight.codes, weight.scales)
    assert (out[torch.from_numpy(owner < 0)] == 0).all()
    for row, expert in enumerate(owner):
        if expert >= 0:
            error = np.abs(oracle.to64(out[row]) - w[expert] @ a[row])
            assert (error <= 2e-6 * (np.abs(w[expert]) @ np.abs(a[row]))).all(), f"row {row} of expert {expert}"


def test_all_scale_codes_through_grouped_gemm():
    counts, offsets, num_rows, owner = runs([3, 0, 5], 4)
    weights = [weight_with_all_scales(seed=31 + e) for e in range(3)]
    stacked = Mxfp8Tensor(
        torch.stack([w.codes.view(torch.uint8) for w in weights]).view(torch.float8_e4m3fn),
        torch.stack([w.scales for w in weights]),
    )
    x = small_integers(num_rows, 64, seed=35) * 2.0**-12
    tokens = Mxfp8Tensor(*quantize_mxfp8(x))
    for operand in (tokens, x):
        out = grouped_gemm(operand, stacked, expert_offsets=offsets, expert_counts=counts, out_dtype=torch.float32)
        for row, expert in enumerate(owner):
            if expert < 0:
                assert (out[row] == 0).all()
                continue
            w = oracle.dequantize(weights[expert].codes, weights[expert].scales)
            np.testing.assert_array_equal(oracle.to64(out[row]), w @ oracle.to64(x[row]))
            assert not out[row].isinf().any() and out[row].isnan().sum() == 1 and out[row, 255].isnan()


@pytest.mark.parametrize("code", [0, 1])
def test_dead_experts_give_zero(code):
    counts, offsets, num_rows, _ = runs([4, 4], 1, spare=0)
    weight = random_mxfp8(2, 16, 64, seed=41)
    weight.codes.view(torch.uint8)[1] = 0
    weight.scales[1] = code
    x = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(42)) * 1e30
    out = grouped_gemm(x, weight, expert_offsets=offsets, expert_counts=counts)
    assert (out[4:] == 0).all() and (out[:4] != 0).all()


def test_grouped_gemm_of_nothing():
    counts, offsets, _, _ = runs([0, 0], 32, spare=0)
    weight = random_mxfp8(2, 16, 64, seed=43)
    out = grouped_gemm(torch.zeros(0, 64), weight, expert_offsets=offsets, expert_counts=counts)
    assert out.shape == (0, 16)
    with pytest.raises(ValueError, match="2 experts need"):
        grouped_gemm(torch.zeros(0, 64), weight, expert_offsets=offsets, expert_counts=counts[:1])
