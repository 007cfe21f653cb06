"""Linear layers on bf16 tokens as they lie, on an H100 or H200: beside permuted tokens, and against float64.

Sums that fp32 holds exactly must have the same bits in both (see ``test_rows_run.py``). By area: ``-k sizes``,
``strides``, ``linear``, ``cuts``, ``replays``, ``front``.
"""

from contextlib import contextmanager
from dataclasses import replace

import gemm_calls as calls
import gemm_oracle as oracle
import pytest
import torch
from gemm_calls import POISON, poisoned
from test_rows_run import exact_operands
from test_stream_k_gpu import bits, cut, name_of

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor, TokenFormat
from vllm_rose_plugin.kernels.gemm import launch
from vllm_rose_plugin.kernels.gemm.choose import choose_config
from vllm_rose_plugin.kernels.gemm.config import with_stages
from vllm_rose_plugin.kernels.gemm.one_run import one_run
from vllm_rose_plugin.kernels.gemm.plan import compile_config
from vllm_rose_plugin.kernels.gemm.rows import as_rows
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight, pack_weight
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and calls.on_hopper()), reason="W8A16 is sm_90's"),
]
BF16, FP16 = torch.bfloat16, torch.float16
ROWS, PERMUTED = TokenFormat.BF16_ROWS, TokenFormat.BF16_PERMUTED
SIZES = [(9216, 4096), (2304, 4096), (4096, 2048), (1856, 2688), (32, 32), (40, 192), (136, 224), (200, 928)]


def operands(num_tokens: int, n: int, k: int) -> tuple[torch.Tensor, PackedWeight]:
    """Whose sums fp32 holds exactly, where K is below 8192."""
    x, weight = exact_operands(num_tokens, n, k, seed=n + k)
    return x.cuda(), pack_weight(Mxfp8Tensor(weight.codes.cuda(), weight.scales.cuda()), target=calls.target())


def linear(x: torch.Tensor, weight: PackedWeight, *, plain_rows: bool = True, **how) -> torch.Tensor:
    return launch.linear(x, weight, activation="bf16", plain_rows=plain_rows, **how)


def apart(x: torch.Tensor, *, before: int, behind: int) -> torch.Tensor:
    """x as some columns of longer rows, NaN in the others."""
    wide = torch.full((x.shape[0], before + x.shape[1] + behind), float("nan"), dtype=x.dtype, device=x.device)
    wide[:, before : before + x.shape[1]] = x
    return wide[:, before : before + x.shape[1]]


@pytest.mark.parametrize("n, k", SIZES)
def test_sizes_have_the_bits_of_permuted_tokens(n, k):
    """Every config of the heuristic up to 4096 tokens, and ends inside of tiles."""
    x, weight = operands(4096, n, k)
    for m in (1, 2, 15, 16, 17, 33, 64, 65, 96, 130, 192, 257, 512, 1000, 2048, 4096):
        expected = linear(x[:m], weight, plain_rows=False)
        assert torch.equal(bits(linear(x[:m], weight)), bits(expected)), f"M = {m}"


@pytest.mark.parametrize("before, behind", [(0, 8), (8, 0), (64, 4096), (1, 7), (0, 1), (8, 3)])
def test_strides_do_not_show(before, behind):
    """Those that the kernel reads, and those that are copied first."""
    for m in (1, 64, 700):
        x, weight = operands(m, 136, 224)
        expected = linear(x, weight)
        assert torch.equal(bits(linear(apart(x, before=before, behind=behind), weight)), bits(expected)), f"M = {m}"


@pytest.mark.parametrize("dtype, bias_dtype", [(BF16, None), (BF16, BF16), (FP16, FP16), (BF16, torch.float32)])
def test_linear_against_float64(dtype, bias_dtype):
    weight = oracle.random_operand(1, 136, 160, seed=60, device="cuda", spread=2)
    packed = calls.pack(weight)
    for num_tokens in (1, 5, 40, 300):
        x = apart((torch.randn(num_tokens, 160, device="cuda") * 0.5).to(BF16), before=8, behind=8)
        bias = None if bias_dtype is None else (torch.randn(136, device="cuda") * 300).to(bias_dtype)
        exact = oracle.exact_product(oracle.Operand(x), weight.group(0), bias)
        out = linear(x, packed, bias=bias, out_dtype=dtype)
        assert out.dtype == dtype and oracle.faults(out, exact, fp8=False) == []


def test_linear_of_no_tokens():
    _, weight = operands(1, 136, 160)
    assert linear(torch.empty(0, 160, dtype=BF16, device="cuda"), weight).shape == (0, 136)


def test_linear_in_batch_invariant_mode_gives_a_row_the_same_bits_in_any_batch():
    weight = calls.pack(oracle.random_operand(1, 2304, 4096, seed=1, device="cuda", spread=2))
    x = apart(torch.randn(1100, 4096, device="cuda").to(BF16), before=0, behind=1)
    whole = bits(linear(x, weight, batch_invariant=True))
    for count in (1, 7, 64, 65, 512, 1000):
        for first in (0, 5, 100):
            rows = x[first : first + count]
            for given in (rows, rows.contiguous()):
                assert torch.equal(bits(linear(given, weight, batch_invariant=True)), whole[first : first + count])


@contextmanager
def forced(token_format: TokenFormat, num_rows: int, *, n: int, k: int, change: dict):
    """Every launch inside takes the heuristic's config with some fields changed."""
    config = choose_config(num_groups=1, n=n, k=k, num_rows=num_rows, token_format=token_format, early_counts=True)
    config = with_stages(replace(config, **change))
    grid = config.grid(device_facts(torch.cuda.current_device()).sm_count)
    chosen = launch._kernel
    launch._kernel = lambda *_: (compile_config(config, target=calls.target()), config, grid)
    try:
        yield
    finally:
        launch._kernel = chosen


WHOLE = {"stream_k": False}
CUTS = [cut(*tile) for tile in ((1, 16), (2, 64), (3, 64), (2, 96), (2, 128), (2, 192), (2, 256))]
CUTS += [cut(*tile, **WHOLE) for tile in ((1, 16), (3, 32), (4, 64), (3, 128), (2, 192), (2, 256))]
CUTS += [cut(2, tile, cluster=blocks, split_k=True, **WHOLE) for tile in (48, 96) for blocks in (2, 4)]
CUTS += [cut(2, tile, cluster=2, **WHOLE) for tile in (64, 256)] + [cut(1, 48, blocks_per_sm=3, **WHOLE)]


def cut_name(change: dict) -> str:
    return f"{name_of(change)}-{change['cluster']}{'k' * change['split_k']}{'s' * change['stream_k']}"


@pytest.mark.parametrize("n, k", [(200, 928), (64, 64), (2304, 4096)])
@pytest.mark.parametrize("change", CUTS, ids=cut_name)
def test_cuts_have_the_bits_of_permuted_tokens(change, n, k):
    """All ways to share the work, on tokens that end inside a tile; nothing beside the result is written."""
    tile = change["token_tile"]
    x, weight = operands(9 * tile + 1, n, k)
    for m in (1, tile - 1, tile + 1, 2 * tile + 3, len(x)):
        found = {}
        for token_format in (PERMUTED, ROWS):
            tokens = launch.quantize_tokens(x[:m], token_format=token_format, activation="bf16")
            with forced(token_format, m, n=n, k=k, change=change):
                out, fence = poisoned((m, n), BF16)
                gemm(tokens, weight, out)
            fence.check()
            found[token_format] = bits(out)
        assert torch.equal(found[ROWS], found[PERMUTED]), f"M = {m}"


def gemm(tokens: PackedTokens, weight: PackedWeight, out: torch.Tensor) -> None:
    offsets, counts = one_run(weight.codes.device, tokens.num_rows)
    launch.grouped_gemm(tokens, weight, expert_offsets=offsets, expert_counts=counts, out_dtype=BF16, out=out)


@pytest.mark.parametrize("m", [1, 16, 64, 512, 2048])
def test_replays_of_a_graph_are_equal(m):
    weight = calls.pack(oracle.random_operand(1, 2304, 4096, seed=3, device="cuda", spread=2))
    x = torch.randn(m, 4096, device="cuda").to(BF16)
    expected = bits(linear(x, weight))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [linear(x, weight) for _ in range(10)]
    for _ in range(100):
        for out in outs:
            out.view(torch.int16).fill_(POISON)
        graph.replay()
        assert all(torch.equal(bits(out), expected) for out in outs)


@pytest.mark.parametrize("m", [1, 64, 2048])
def test_what_the_kernel_in_front_wrote_is_read(m):
    """Each layer's tokens are the result of the layer before, whose kernel lets its successor start early."""
    weight = calls.pack(oracle.random_operand(1, 1024, 1024, seed=5, device="cuda", spread=2))
    x = torch.randn(m, 1024, device="cuda").to(BF16)

    def chain(*, wait: bool) -> torch.Tensor:
        y = x
        for _ in range(8):
            y = linear(y, weight)
            y = y / y.float().norm(dim=1, keepdim=True).clamp(min=1e-6).to(BF16)
            y = linear(y, weight)
            if wait:
                torch.cuda.synchronize()
        return bits(y)

    expected = chain(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(wait=False)
    for _ in range(50):
        graph.replay()
        assert torch.equal(y, expected)


def test_rows_are_not_copied_when_they_need_not_be():
    x = torch.randn(64, 4096 + 8, device="cuda").to(BF16)
    assert as_rows(x[:, :4096]).data.data_ptr() == x.data_ptr()
    assert as_rows(x[:, 4:4100]).data.data_ptr() != x.data_ptr()
