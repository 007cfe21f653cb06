"""The W8A16 kernel on tokens as they lie: its PTX run on the CPU (``sm90_machine``) beside the one on permuted tokens.

In what order a matrix instruction adds up is another: 16 k in order here, four from each 16 of 64 there. Operands whose
products and sums are exact in fp32 must give the same bits; others agree with float64.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sm90_machine import POISON, run
from test_stream_k_run import config_of, ptx_of, random_operand

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor, TokenFormat
from vllm_rose_plugin.kernels.gemm.config import Epilogue, GemmConfig
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens, pack_tokens
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8

ROWS = TokenFormat.BF16_ROWS
WHOLE = dict(stream_k=False)


def exact_operands(num_tokens: int, n: int, k: int, *, seed: int = 1) -> tuple[torch.Tensor, Mxfp8Tensor]:
    """Integers of four bits, blocks of weights times 2, 4 or 8: sums of a thousand products need 18 bits."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-8, 9, (num_tokens, k), generator=generator).to(torch.bfloat16)
    codes = torch.randint(-8, 9, (n, k), generator=generator).to(torch.float8_e4m3fn)
    return x, Mxfp8Tensor(codes, torch.randint(128, 131, (n, k // 32), generator=generator).to(torch.uint8))


def in_rows(config: GemmConfig) -> GemmConfig:
    return replace(config, token_format=ROWS, out_format=ROWS)


def wide(x: torch.Tensor, beyond: int) -> torch.Tensor:
    """x as some columns of longer rows, NaN in the others."""
    rows = torch.full((x.shape[0], x.shape[1] + beyond), float("nan"), dtype=x.dtype)
    rows[:, : x.shape[1]] = x
    return rows[:, : x.shape[1]]


def products(config: GemmConfig, tokens: PackedTokens, weight: Mxfp8Tensor, **how) -> torch.Tensor:
    """Bits of a launch on all tokens, checked to have no poison left; flags of stream-K end as they began."""
    generator = torch.Generator().manual_seed(2)
    bias = torch.randint(-9, 10, (config.n,), generator=generator).float() if config.bias else torch.zeros(4)
    count, grid = how.pop("count", tokens.num_rows), how.pop("grid", 3)
    flags = np.zeros(4 * grid, np.uint8)
    launch = dict(offsets=[0, count], counts=[count], bias=bias, grid=grid, together=config.stream_k, seed=3) | how
    out = run(ptx_of(config), config, [pack_weight(weight, target="sm_90a")], tokens, flags=flags, **launch)
    assert not flags.any()
    assert (out[count:].view(torch.uint8) == POISON).all(), "rows that are no tokens were written"
    return out[:count]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row_groups", "token_tile", "n", "k", "num_tokens", "beyond", "how"),
    [
        (1, 16, 136, 160, 37, 0, WHOLE),
        (1, 16, 64, 32, 1, 8, WHOLE),
        (3, 32, 200, 288, 33, 24, WHOLE | dict(bias=True, out_dtype="float16")),
        (2, 64, 128, 416, 65, 0, WHOLE | dict(early_counts=False)),
        (2, 128, 136, 672, 70, 8, WHOLE | dict(bias=True)),
        (2, 256, 136, 160, 20, 24, WHOLE | dict(k_tile=64)),
        (1, 16, 136, 416, 33, 24, {}),
        (2, 64, 200, 288, 70, 8, dict(bias=True)),
        (2, 256, 64, 544, 9, 0, dict(k_tile=64)),
    ],
)
def test_the_bits_of_permuted_tokens(row_groups, token_tile, n, k, num_tokens, beyond, how):
    """K, N and tokens that end inside tiles; rows that follow each other, and rows apart with NaN between them."""
    config = config_of(row_groups, token_tile, n=n, k=k, **how)
    x, weight = exact_operands(num_tokens, n, k)
    permuted = pack_tokens(x, token_format=config.token_format, activation="bf16")
    expected = products(config, permuted, weight)
    out = products(in_rows(config), PackedTokens(ROWS, wide(x, beyond), None, k), weight)
    assert torch.equal(out.view(torch.int16), expected.view(torch.int16))
    assert len(out.unique()) > min(100, out.numel() // 4), "no test of which k meet"


@pytest.mark.slow
@pytest.mark.parametrize("k_tile", [64, 128])
def test_against_float64(k_tile):
    """On numbers that are rounded, and with each half of a pass under scales of its own."""
    token_tile = 256 if k_tile == 64 else 32
    config = in_rows(config_of(1, token_tile, n=72, k=416, k_tile=k_tile, **WHOLE))
    weight = random_operand(72, 416, seed=4)
    x = torch.randn(21, 416, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    out = products(config, PackedTokens(ROWS, x, None, 416), weight).double()
    expected = x.double() @ dequantize_mxfp8(weight.codes, weight.scales).double().T
    assert ((out - expected).norm(dim=1) / expected.norm(dim=1)).max() < 3e-3


@pytest.mark.slow
def test_scales_from_the_smallest_to_nan():
    """One block of a row has an unusual scale, each of the four of a word in turn; NaN spoils that row alone."""
    config = config_of(1, 16, n=72, k=160, **WHOLE)
    x, weight = exact_operands(9, 72, 160)
    scales = weight.scales.clone()
    for row, code in enumerate((0, 1, 7, 127, 134, 135, 140, 200, 240, 255)):
        for block in range(5):
            scales[5 * row + block] = 127 if code == 255 else code
            scales[5 * row + block, block] = code
    weight = Mxfp8Tensor(weight.codes, scales)
    permuted = pack_tokens(x, token_format=config.token_format, activation="bf16")
    expected = products(config, permuted, weight)
    out = products(in_rows(config), PackedTokens(ROWS, x, None, 160), weight)
    spoiled = (scales == 255).any(dim=1)
    assert spoiled.sum() == 5 and torch.equal(expected.isnan().all(dim=0), spoiled)
    assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out[:, ~spoiled], expected[:, ~spoiled])


@pytest.mark.slow
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_token_spoils_its_row_alone(bad):
    """Also where its last k share a stage with what lies beyond K."""
    config = in_rows(config_of(1, 16, n=64, k=160, **WHOLE))
    x, weight = exact_operands(18, 64, 160)
    clean = products(config, PackedTokens(ROWS, x, None, 160), weight)
    x[7, 159] = bad
    out = products(config, PackedTokens(ROWS, wide(x, 8), None, 160), weight)
    others = torch.arange(18) != 7
    assert not out[7].isfinite().all() and torch.equal(out[others], clean[others])


@pytest.mark.slow
def test_no_tokens_and_fewer_than_there_are_rows():
    x, weight = exact_operands(20, 64, 96)
    for how in (WHOLE, {}):
        config = in_rows(config_of(1, 16, n=64, k=96, **how))
        assert products(config, PackedTokens(ROWS, x, None, 96), weight, count=0).numel() == 0
        whole = products(config, PackedTokens(ROWS, x, None, 96), weight)
        assert torch.equal(products(config, PackedTokens(ROWS, x, None, 96), weight, count=17), whole[:17])


def test_what_is_refused():
    config = config_of(1, 16, n=64, k=96, **WHOLE)
    for change in (dict(num_groups=2), dict(epilogue=Epilogue.SWIGLU)):
        with pytest.raises(ValueError, match="BF16_ROWS are for a single weight without SwiGLU"):
            replace(in_rows(config), **change)
