"""The oracle passes what is right (the torch reference, accumulators as short as Hopper's) and fails what is not."""

import math

import gemm_oracle as oracle
import pytest
import torch
from gemm_oracle import Operand, Runs

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.gemm.reference import grouped_gemm, mxfp8_linear
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8
from vllm_rose_plugin.kernels.swiglu_quantize.reference import swiglu_quantize

BF16, FP16 = torch.bfloat16, torch.float16


def test_tables():
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).double()
    assert torch.equal(oracle.e4m3_table().nan_to_num(777), values.nan_to_num(777))
    scales = oracle.e8m0_table()
    assert scales[255].isnan() and all(scales[c] == math.ldexp(1.0, c - 127) for c in range(255))


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_quantization_has_the_bits_of_the_reference(rounding):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(64, 96, generator=g) * torch.exp2(torch.randint(-140, 120, (64, 1), generator=g).float())
    x[5, 40], x[6], x[7, 64:] = float("nan"), 0, float("inf")
    x[8, :32] = torch.tensor([448.0, 449.0, 464.0, 512.0]).repeat(8)
    codes, scales = quantize_mxfp8(x, rounding=rounding)
    found = oracle.quantize(x, rounding=rounding)
    assert torch.equal(found.scales, scales)
    assert torch.equal(found.data.float().nan_to_num(777), codes.float().nan_to_num(777))


# ---- what is right passes ----


@pytest.mark.parametrize("n, k", [(9216, 32), (1856, 96), (192, 4096), (96, 2688), (32, 1536), (64, 192), (40, 768)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_reference_passes(n, k, dtype):
    tokens, weight = oracle.random_operand(9, k, seed=k), oracle.random_operand(n, k, seed=n, spread=3)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(3)) * 10
    size = 2.0**-6  # fp16 ends at 65504
    tokens = Operand(tokens.data, tokens.scales - 6) if dtype is FP16 else tokens
    out = mxfp8_linear(_mx(tokens), _mx(weight), bias=bias * size, out_dtype=dtype)
    exact = oracle.exact_product(tokens, weight, bias * size)
    for fp8 in (False, True):
        assert oracle.faults(out, exact, fp8=fp8) == []
    assert oracle.relative_error(out, exact) < oracle.HALF_ULP[dtype] * 0.6


@pytest.mark.parametrize("k", [32, 96, 1536, 4096])
@pytest.mark.parametrize("seed", range(2))
def test_accumulators_as_short_as_hoppers_pass(k, seed):
    tokens, weight = oracle.random_operand(6, k, seed=seed), oracle.random_operand(96, k, seed=seed + 50)
    exact = oracle.exact_product(tokens, weight)
    assert oracle.faults(_fp8_tensor_core(tokens, weight).to(BF16), exact, fp8=True) == []
    plain = Operand(tokens.values().to(BF16))
    exact = oracle.exact_product(plain, weight)
    assert oracle.faults(_bf16_tensor_core(plain, weight).to(BF16), exact, fp8=False) == []


@pytest.mark.parametrize("fp8", [True, False])
def test_cancellation_passes(fp8):
    tokens, weight = oracle.cancelling(20, 64, 1024, seed=5)
    exact = oracle.exact_product(tokens, weight)
    ordinary = (exact.value.abs() < exact.magnitude * 1e-3).float().mean()
    assert ordinary > 0.8
    device = _fp8_tensor_core(tokens, weight) if fp8 else _bf16_tensor_core(Operand(tokens.values().to(BF16)), weight)
    assert oracle.faults(device.to(BF16), exact, fp8=fp8) == []


def _fp8_tensor_core(tokens: Operand, weight: Operand, *, bits: int = 13) -> torch.Tensor:
    """fp32: 32 products at a time, aligned to the largest and cut off; blocks scaled and added in fp32."""
    table = oracle.e4m3_table()
    a, w = (table[x.data.view(torch.uint8).long()].unflatten(-1, (-1, 32)) for x in (tokens, weight))
    total = torch.zeros(a.shape[0], w.shape[0])
    for block in range(a.shape[1]):
        products = a[:, None, block] * w[None, :, block]  # (M, N, 32)
        step = oracle.power_of_two(torch.frexp(products.abs().amax(-1, keepdim=True))[1] - 1 - bits)
        sums = ((products / step).trunc() * step).sum(-1).float()
        scales = oracle.e8m0_table()
        total += (
            sums * (scales[tokens.scales[:, block].long()][:, None] * scales[weight.scales[:, block].long()]).float()
        )
    return total


def _bf16_tensor_core(tokens: Operand, weight: Operand) -> torch.Tensor:
    """fp32: 16 products and the accumulator at a time, cut off at 24 bits of the largest."""
    a, w = (x.values().unflatten(-1, (-1, 16)) for x in (tokens, weight))
    total = torch.zeros(a.shape[0], w.shape[0], dtype=torch.float64)
    for block in range(a.shape[1]):
        parts = torch.cat([a[:, None, block] * w[None, :, block], total.unsqueeze(-1)], -1)
        step = oracle.power_of_two(torch.frexp(parts.abs().amax(-1, keepdim=True))[1] - 24)
        total = ((parts / step).trunc() * step).sum(-1)
    return total.float()


def _mx(operand: Operand) -> Mxfp8Tensor:
    return Mxfp8Tensor(operand.data, operand.scales)


# ---- extremes of the scales ----


@pytest.mark.parametrize("exponent, codes", [(-12, range(256)), (60, range(186))])
def test_all_scale_codes(exponent, codes):
    weight = Operand(
        (oracle.small_integers(256, 64, seed=1) / 4).to(torch.float8_e4m3fn),
        torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, 2),
    )
    tokens = Operand((oracle.small_integers(5, 64, seed=2) * 2.0**exponent).to(BF16))
    exact = oracle.exact_product(tokens, weight)
    out = mxfp8_linear(tokens.data, _mx(weight), activation="bf16")
    assert oracle.faults(out, exact, fp8=False) == []
    assert not exact.unsettled[:, list(codes)].any() and exact.value[:, 255].isnan().all()
    if exponent > 0:  # else the results of scale code 0 are below bf16's range
        broken = out.clone()
        broken[:, 0] = 0  # 2**-127 read as an empty exponent field
        assert any("column" in f for f in oracle.faults(broken, exact, fp8=False))
    broken = out.clone()
    broken[:, 255] = float("inf")
    assert "NaN" in oracle.faults(broken, exact, fp8=False)[0]


def test_results_out_of_range_are_infinite():
    one = torch.ones(1, 32).to(torch.float8_e4m3fn)
    tokens, weight = Operand(one, torch.tensor([[190]]).byte()), Operand(one, torch.tensor([[185]]).byte())
    exact = oracle.exact_product(tokens, weight)  # 2**63 * 2**58 * 32 = 2**126
    assert oracle.faults(torch.full((1, 1), 2.0**126, dtype=BF16), exact, fp8=True) == []
    assert oracle.faults(torch.full((1, 1), torch.inf, dtype=BF16), exact, fp8=True)
    exact = oracle.exact_product(tokens, Operand(one, torch.tensor([[187]]).byte()))  # 2**128
    assert oracle.faults(torch.full((1, 1), torch.inf, dtype=BF16), exact, fp8=True) == []
    for wrong in (-torch.inf, torch.nan, 3e38):
        assert oracle.faults(torch.full((1, 1), wrong, dtype=BF16), exact, fp8=True)


# ---- what is wrong fails ----


def _chunked(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Products added in a narrow dtype, 32 at a time."""
    return x.unflatten(-1, (-1, 32)).sum(-1).to(dtype)


def _mutations() -> dict:
    """name → function of (tokens, weight), operands as a faulty kernel would read them, or the faulty result itself."""

    def roll(x: Operand, *, scales=(0, 0), data=(0, 0)) -> Operand:
        codes = x.data.view(torch.uint8).roll(data, (0, 1)).view(torch.float8_e4m3fn)
        return Operand(codes, x.scales.roll(scales, (0, 1)))

    def without(x: Operand, k) -> Operand:
        data = x.data.clone()
        data.view(torch.uint8)[:, k] = 0
        return Operand(data, x.scales)

    def code(x: Operand, **change) -> Operand:
        return Operand(x.data, (x.scales.int() + change["add"]).byte())

    def swap(x: Operand) -> Operand:
        order = torch.arange(x.data.shape[0]).unflatten(0, (-1, 2, 8)).flip(1).flatten()
        return Operand(x.data[order], x.scales[order])

    return {
        "the last block of k is lost": lambda a, w: (without(a, slice(-32, None)), w),
        "one k is lost": lambda a, w: (without(a, 1234), w),
        "one k of one column is lost": lambda a, w: (a, _one_row(w, lambda x: without(x, 77))),
        "weight scales of the block beside": lambda a, w: (a, roll(w, scales=(0, 1))),
        "weight scales of the row beside": lambda a, w: (a, roll(w, scales=(1, 0))),
        "token scales of the row beside": lambda a, w: (roll(a, scales=(1, 0)), w),
        "token scales of the block beside": lambda a, w: (roll(a, scales=(0, 1)), w),
        "token scales are left out": lambda a, w: (Operand(a.data, torch.full_like(a.scales, 120)), w),
        "rows r and r + 8 change places": lambda a, w: (a, swap(w)),
        "tokens of the row beside": lambda a, w: (roll(a, data=(1, 0), scales=(1, 0)), w),
        "k of the tokens are off by one": lambda a, w: (roll(a, data=(0, 1)), w),
        "one scale code is one too large": lambda a, w: (a, _one_row(w, lambda x: code(x, add=1))),
        "one block is counted twice": lambda a, w: (
            a.values() @ w.values().T + a.values()[:, :32] @ w.values()[:, :32].T
        ),
        "the result is half a percent off": lambda a, w: a.values() @ w.values().T * 1.005,
        "bf16 accumulation": lambda a, w: _chunked(a.values()[:, None] * w.values(), BF16).sum(-1),
        "a neighbouring tile's rows": lambda a, w: (a.values() @ w.values().T).roll(16, 1),
        "one element is stale": lambda a, w: _stale(a.values() @ w.values().T),
        "a NaN of another run leaks": lambda a, w: a.values() @ w.values().T + torch.tensor([0.0] * 63 + [torch.nan]),
    }


def _one_row(x: Operand, change) -> Operand:
    changed = change(x)
    data, scales = x.data.clone(), x.scales.clone()
    data.view(torch.uint8)[5], scales[5] = changed.data.view(torch.uint8)[5], changed.scales[5]
    return Operand(data, scales)


def _stale(out: torch.Tensor) -> torch.Tensor:
    out = out.clone()
    out[3, 40] = -31.0
    return out


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("mutation", _mutations())
def test_a_faulty_kernel_fails(mutation, fp8):
    # Scales close together, so that a wrong one makes no glaring difference.
    tokens, weight = (
        oracle.random_operand(7, 4096, seed=11, spread=1),
        oracle.random_operand(64, 4096, seed=12, spread=1),
    )
    exact = oracle.exact_product(tokens, weight)
    good = (tokens.values() @ weight.values().T).to(BF16)
    assert oracle.faults(good, exact, fp8=fp8) == []
    result = _mutations()[mutation](tokens, weight)
    out = result[0].values() @ result[1].values().T if isinstance(result, tuple) else result
    assert oracle.faults(out.to(BF16), exact, fp8=fp8)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_bias_forgotten_or_added_to_the_wrong_column_fails(dtype):
    tokens, weight = oracle.random_operand(8, 768, seed=21, spread=1), oracle.random_operand(64, 768, seed=22, spread=1)
    bias = torch.randn(64, generator=torch.Generator().manual_seed(23)) * 100
    product = tokens.values() @ weight.values().T
    scale = 1.0 if dtype is BF16 else 2.0**-8
    if dtype is FP16:
        weight = Operand(weight.data, weight.scales - 8)
    exact = oracle.exact_product(tokens, weight, bias)
    assert oracle.faults((product * scale + bias).to(dtype), exact, fp8=True) == []
    assert oracle.faults((product * scale).to(dtype), exact, fp8=True)
    assert oracle.faults((product * scale + bias.roll(1)).to(dtype), exact, fp8=True)


# ---- groups ----


@pytest.mark.parametrize("case", oracle.COUNT_CASES)
@pytest.mark.parametrize("gaps", [None, [3, 0, 1]])
def test_grouped_reference_passes_and_rows_outside_are_watched(case, gaps):
    runs = Runs.of(oracle.COUNT_CASES[case], gaps=gaps)
    groups = len(runs.counts)
    weight, tokens = oracle.random_operand(groups, 40, 64, seed=1), oracle.random_operand(runs.num_rows, 64, seed=2)
    outside = runs.outside("cpu")
    assert int(outside.sum()) == runs.num_rows - sum(runs.counts)
    oracle.poison_rows(tokens, outside)
    out = grouped_gemm(
        _mx(tokens),
        _mx(weight),
        expert_offsets=runs.expert_offsets("cpu"),
        expert_counts=runs.expert_counts("cpu"),
        out_dtype=BF16,
    )
    out.view(torch.int16)[outside] = 0x7F51
    assert oracle.grouped_faults(out, tokens, weight, runs, fp8=True, outside=0x7F51) == []
    if sum(runs.counts) > 8:
        other = out.clone()
        other[runs.starts[[c > 0 for c in runs.counts].index(True)]] *= 1.02
        assert oracle.grouped_faults(other, tokens, weight, runs, fp8=True)
        wrong = Operand(weight.data.view(torch.uint8).roll(1, 0).view(torch.float8_e4m3fn), weight.scales.roll(1, 0))
        assert oracle.grouped_faults(out, tokens, wrong, runs, fp8=True)
    out[outside.nonzero()[0]] = 0
    assert "outside" in oracle.grouped_faults(out, tokens, weight, runs, fp8=True, outside=0x7F51)[-1]


# ---- SwiGLU ----


def _first_gemm(seed: int) -> tuple[Operand, Operand]:
    """Tokens and a w13 whose results are of SwiGLU's size."""
    tokens = oracle.random_operand(9, 256, seed=seed, spread=1)
    return tokens, Operand(*_shifted(oracle.random_operand(128, 256, seed=seed + 1, spread=1), -2))


def _shifted(x: Operand, exponent: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x.data, (x.scales.int() + exponent).byte()


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("fp8", [True, False])
def test_the_swiglu_reference_passes(rounding, limit, fp8):
    tokens, w13 = _first_gemm(31)
    tokens.scales[4, 2] = 255
    exact = oracle.exact_product(tokens, w13)
    product, bound = oracle.exact_swiglu(exact, limit=limit, fp8=fp8)
    h = mxfp8_linear(_mx(tokens), _mx(w13), out_dtype=torch.float32)
    assert 0.1 < h[0].abs().mean() < 30
    result = swiglu_quantize(h, rounding=rounding, limit=limit)
    values = _values(result)
    assert oracle.swiglu_faults(values, product, bound, scales=result.scales, rounding=rounding) == []
    assert oracle.swiglu_faults(values, product, bound, rounding=rounding) == []
    plain = swiglu_quantize(h.to(torch.float32), activation="bf16", limit=limit).to(BF16)
    assert oracle.plain_swiglu_faults(plain, product, bound) == []
    plain[2, 3] *= 1.02
    assert oracle.plain_swiglu_faults(plain, product, bound)


def _values(result: Mxfp8Tensor) -> torch.Tensor:
    return Operand(result.codes, result.scales).values()


def _swiglu_mutations() -> dict:
    def halves(h):
        return h.chunk(2, -1)

    def late(result):
        result.codes.view(torch.uint8)[3, 17] ^= 2
        return result

    def scaled(result):
        result.scales[2, 1] += 1
        return result

    def moved(result):
        return Mxfp8Tensor(result.codes, result.scales.roll(1, 0))

    return {
        "gate and up change places": lambda h: swiglu_quantize(torch.cat(halves(h)[::-1], -1), rounding="rceil"),
        "no gate": lambda h: Mxfp8Tensor(*quantize_mxfp8(halves(h)[0] * halves(h)[1])),
        "another rounding": lambda h: swiglu_quantize(h, rounding="floor"),
        "a limit nobody asked for": lambda h: swiglu_quantize(h, limit=0.5),
        "bf16 between GEMM and SwiGLU": lambda h: swiglu_quantize(h.to(BF16)),
        "bf16 before the quantization": lambda h: Mxfp8Tensor(
            *quantize_mxfp8(swiglu_quantize(h, activation="bf16").to(BF16))
        ),
        "one code is off": lambda h: late(swiglu_quantize(h)),
        "one scale is off": lambda h: scaled(swiglu_quantize(h)),
        "scales of the row beside": lambda h: moved(swiglu_quantize(h)),
        "up of the element beside": lambda h: swiglu_quantize(torch.cat([halves(h)[0], halves(h)[1].roll(1, -1)], -1)),
        "the sign of silu is lost": lambda h: swiglu_quantize(torch.cat([halves(h)[0].abs(), halves(h)[1]], -1)),
    }


@pytest.mark.parametrize("mutation", _swiglu_mutations())
def test_a_faulty_epilogue_fails(mutation):
    tokens, w13 = _first_gemm(41)
    exact = oracle.exact_product(tokens, w13)
    product, bound = oracle.exact_swiglu(exact, fp8=False)
    result = _swiglu_mutations()[mutation](exact.value.float())
    assert oracle.swiglu_faults(_values(result), product, bound, scales=result.scales)
    assert oracle.swiglu_faults(_values(result), product, bound)
