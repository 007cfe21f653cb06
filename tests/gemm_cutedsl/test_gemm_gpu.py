"""The GEMM on a GPU against float64, with poison around everything it may not read or write.

By area: ``-k shapes``, ``groups``, ``scales``, ``nan``, ``epilogue``, ``replays``, ``chain``, ``rows``, ``large``,
``linear``, ``configs``.
Every kernel is compiled on first use; most of the time of a first run is that. Out-of-range reads:

    compute-sanitizer --tool memcheck python -m pytest -m gpu tests/gemm_cutedsl -k shapes
"""

from dataclasses import replace

import gemm_calls as calls
import gemm_oracle as oracle
import pytest
import torch
from gemm_calls import POISON, poisoned
from gemm_oracle import Operand, Runs

from vllm_rose_plugin.kernels.gemm import one_run
from vllm_rose_plugin.kernels.gemm.choose import choose_config
from vllm_rose_plugin.kernels.gemm.config import W8A8_TILES, W8A16_TILES, Epilogue
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16
FORMATS = ["w8a8", "w8a16"]
"""Of sm_90. From sm_100 on there is one, and both names mean it."""
SHAPES = [(9216, 4096), (1856, 2688), (192, 1536), (96, 768), (32, 32), (40, 192), (96, 96), (2304, 64), (136, 224)]
"""(N, K): multiples of nothing that a tile could be."""


def check(
    out: torch.Tensor, tokens: Operand, weight: Operand, runs: Runs, name: str, bias: torch.Tensor | None = None
) -> None:
    """Every run near float64, every other row as it was."""
    found = oracle.grouped_faults(out, tokens, weight, runs, fp8=calls.is_fp8(name), bias=bias, outside=POISON)
    assert not found, "\n".join(found)


def tokens_for(runs: Runs, k: int, *, seed: int) -> Operand:
    """Random MXFP8 tokens; rows outside the runs are NaN."""
    tokens = oracle.random_operand(runs.num_rows, k, seed=seed, device="cuda")
    oracle.poison_rows(tokens, runs.outside("cuda"))
    return tokens


def run(
    tokens: Operand,
    weight: Operand,
    runs: Runs,
    name: str,
    *,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = BF16,
    expected_rows: int | None = None,
) -> torch.Tensor:
    """The kernel's result in poisoned memory, whose surroundings are checked."""
    out, fence = poisoned((runs.num_rows, weight.data.shape[1]), dtype)
    packed = calls.tokens(tokens, runs, name)
    calls.plain(calls.pack(weight), packed, runs, out=out, bias=bias, expected_rows=expected_rows)
    fence.check()
    return out


# ---- shapes and groups ----


@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_shapes(n, k, name):
    runs = Runs.of([5, 0, 70], gaps=[1, 0, 2])
    weight = oracle.random_operand(3, n, k, seed=n + k, device="cuda")
    tokens = tokens_for(runs, k, seed=1)
    check(run(tokens, weight, runs, name), tokens, weight, runs, name)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 17, 33, 64, 65, 129, 200, 257, 1000])
@pytest.mark.parametrize("name", FORMATS)
def test_shapes_of_a_linear_layer(num_tokens, name):
    runs = Runs.of([num_tokens], spare=0)
    weight = oracle.random_operand(1, 192, 544, seed=3, device="cuda")
    tokens = tokens_for(runs, 544, seed=num_tokens)
    check(run(tokens, weight, runs, name), tokens, weight, runs, name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", oracle.COUNT_CASES)
def test_groups_of_all_sizes(case, name):
    counts = oracle.COUNT_CASES[case]
    # Always 24 groups, so that cases share kernels; where the last counts matter, the empty ones come first.
    at_end = case in ("everything in the last", "empty at the front")
    counts = [0] * (24 - len(counts)) + counts if at_end else counts + [0] * (24 - len(counts))
    weight = oracle.random_operand(24, 96, 160, seed=5, device="cuda")
    for gaps, tile in ((None, 8), ([3, 0, 1, 0, 0], 8), (None, 16), ([0, 1], 32), (None, 64), ([0, 0, 0, 7], 128)):
        runs = Runs.of(counts, gaps=gaps, spare=5)
        # The tile is chosen for that many tokens in every group, whatever the groups then hold.
        runs = Runs(runs.counts, runs.starts, max(runs.num_rows, 24 * tile))
        tokens = tokens_for(runs, 160, seed=6)
        out = run(tokens, weight, runs, name, expected_rows=24 * tile)
        check(out, tokens, weight, runs, name)


@pytest.mark.parametrize("num_groups", [1, 8, 16, 32, 33, 128, 512])
@pytest.mark.parametrize("name", FORMATS)
def test_groups_of_all_numbers(num_groups, name):
    generator = torch.Generator().manual_seed(num_groups)
    weight = oracle.random_operand(num_groups, 72, 96, seed=7, device="cuda")
    for most in (2, 12):  # with two, a third of the groups is empty
        counts = torch.randint(0, most + 1, (num_groups,), generator=generator).tolist()
        runs = Runs.of(counts, gaps=[0, 0, 1])
        tokens = tokens_for(runs, 96, seed=8)
        check(run(tokens, weight, runs, name), tokens, weight, runs, name)


@pytest.mark.parametrize("busy", [0, 255, 511])
def test_groups_with_everything_in_one_of_512(busy):
    counts = [0] * 512
    counts[busy] = 300
    runs = Runs.of(counts)
    weight = oracle.random_operand(512, 72, 96, seed=9, device="cuda")
    tokens = tokens_for(runs, 96, seed=10)
    check(run(tokens, weight, runs, "w8a8"), tokens, weight, runs, "w8a8")


@pytest.mark.parametrize("name", FORMATS)
def test_groups_without_any_token_write_nothing(name):
    runs = Runs.of([0] * 24, spare=9)
    weight = oracle.random_operand(24, 96, 160, seed=5, device="cuda")
    out = run(tokens_for(runs, 160, seed=1), weight, runs, name)
    assert bool((out.view(torch.int16) == POISON).all())


# ---- configs that the heuristic may come to choose ----

CONFIGS = [
    ("w8a8", {"row_groups": 1, "token_tile": 8, "blocks_per_sm": 3}),
    ("w8a8", {"row_groups": 2, "token_tile": 16, "in_flight": 2, "blocks_per_sm": 2}),
    ("w8a8", {"row_groups": 3, "token_tile": 32}),
    ("w8a8", {"token_tile": 24}),
    ("w8a8", {"token_tile": 16, "pass_k": 256}),
    ("w8a8", {"token_tile": 64, "in_flight": 2}),
    ("w8a8", {"token_tile": 16, "cluster": 2}),
    ("w8a8", {"token_tile": 32, "cluster": 4}),
    ("w8a8", {"token_tile": 8, "cluster": 2, "split_k": True}),
    ("w8a8", {"token_tile": 16, "cluster": 4, "split_k": True}),
    ("w8a16", {"row_groups": 1, "token_tile": 16, "blocks_per_sm": 2}),
    ("w8a16", {"row_groups": 3, "token_tile": 64}),
    ("w8a16", {"token_tile": 128}),
    ("w8a16", {"row_groups": 1, "token_tile": 256}),
    ("w8a16", {"token_tile": 48, "k_tile": 64}),
    ("w8a16", {"token_tile": 32, "pass_k": 256}),
    ("w8a16", {"token_tile": 32, "cluster": 2}),
    ("w8a16", {"token_tile": 64, "cluster": 4}),
    ("w8a16", {"token_tile": 16, "cluster": 2, "split_k": True}),
    ("w8a16", {"token_tile": 32, "cluster": 4, "split_k": True}),
]


@pytest.mark.parametrize("k", [928, 64])
@pytest.mark.parametrize(
    "name, change", CONFIGS, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.items()))
)
def test_configs_of_sm_90(name, change, k):
    """Ragged runs through every kind of tile, cluster and split; the bits must repeat.

    K = 64 is less than one pass of the main loop, and leaves nothing for most blocks that share it.
    """
    change = change if calls.on_hopper() else {}
    weight = oracle.random_operand(6, 200, k, seed=70, device="cuda")
    packed_weight = calls.pack(weight)
    for counts, gaps in (
        ([1, 0, 40, 3, 0, 9], [1]),
        ([0, 300, 0, 0, 64, 65], None),
        ([0] * 6, None),
        ([700] + [0] * 5, [3]),
    ):
        runs = Runs.of(counts, gaps=gaps)
        tokens = tokens_for(runs, k, seed=71)
        packed = calls.tokens(tokens, runs, name)
        results = []
        with calls.forced(name, runs, n=200, k=k, change=change):
            for _ in range(3):
                out, fence = poisoned((runs.num_rows, 200), BF16)
                calls.plain(packed_weight, packed, runs, out=out)
                fence.check()
                results.append(out)
        check(results[0], tokens, weight, runs, name)
        assert all(torch.equal(bits(r), bits(results[0])) for r in results)


# ---- linear layers as the backend calls them ----


@pytest.mark.parametrize("dtype, bias_dtype", [(BF16, None), (BF16, BF16), (FP16, FP16), (BF16, torch.float32)])
def test_linear_quantizes_and_adds_a_bias(dtype, bias_dtype):
    weight = oracle.random_operand(1, 136, 160, seed=60, device="cuda", spread=2)
    weight = Operand(weight.data, weight.scales - 6)
    packed = calls.pack(weight)
    for num_tokens in (1, 5, 40, 41, 300):
        x = (torch.randn(num_tokens, 160 + 16, device="cuda") * 30).to(dtype)[:, :160]  # rows lie further apart
        bias = None if bias_dtype is None else (torch.randn(136, device="cuda") * 300).to(bias_dtype)
        exact = oracle.exact_product(oracle.quantize(x), weight.group(0), bias)
        for given in (x, oracle.quantize(x)):
            out = calls.linear(given, packed, bias=bias, dtype=dtype)
            assert out.dtype == dtype and oracle.faults(out, exact, fp8=True) == []


def test_linear_of_no_tokens():
    packed = calls.pack(oracle.random_operand(1, 136, 160, seed=61, device="cuda"))
    assert calls.linear(torch.empty(0, 160, dtype=BF16, device="cuda"), packed, dtype=BF16).shape == (0, 136)


@pytest.mark.parametrize("num_tokens", [1, 64, 3000])
@pytest.mark.parametrize("known", [True, False])
def test_linear_captured_into_a_graph(num_tokens, known, monkeypatch):
    """No graph is sent the number of tokens from the host, also where no call before had as many."""
    weight = calls.pack(oracle.random_operand(1, 136, 160, seed=62, device="cuda"))
    inputs = [torch.randn(num_tokens, 160, device="cuda").to(BF16) for _ in range(3)]
    calls.linear(inputs[0], weight, dtype=BF16)
    if not known:
        monkeypatch.setattr(one_run, "_tables", {})
    x, graph = inputs[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = calls.linear(x, weight, dtype=BF16)
    found = []
    for _ in range(40):
        for i, values in enumerate(inputs):
            x.copy_(values)
            out.view(torch.int16).fill_(POISON)
            graph.replay()
            found.append((i, bits(out).clone()))
    for i, got in found:
        assert torch.equal(got, bits(calls.linear(inputs[i], weight, dtype=BF16)))


@pytest.mark.parametrize("n, k", [(9216, 4096), (2304, 4096), (4096, 2048), (1856, 2688), (96, 192)])
@pytest.mark.parametrize("quantized", [False, True])
def test_linear_in_batch_invariant_mode_gives_a_row_the_same_bits_in_any_batch(n, k, quantized):
    """However many rows there are and wherever among them it stands; sizes at which the usual configs are many."""
    weight = calls.pack(oracle.random_operand(1, n, k, seed=n, device="cuda", spread=2))
    x = torch.randn(1100, k, generator=torch.Generator("cuda").manual_seed(k), device="cuda").to(BF16)
    bias = torch.randn(n, device="cuda").to(BF16)

    def rows(first: int, count: int) -> torch.Tensor:
        some = x[first : first + count]
        given = oracle.quantize(some) if quantized else some
        return bits(calls.linear(given, weight, bias=bias, dtype=BF16, batch_invariant=True))

    whole = rows(0, len(x))
    for count in (1, 2, 7, 16, 33, 64, 65, 128, 257, 512, 1000):
        for first in (0, 5, 100):
            assert torch.equal(rows(first, count), whole[first : first + count]), f"{count} rows from {first} on"


# ---- scales ----


def power_of_two_tokens(rows: int, k: int, code: int, *, seed: int) -> Operand:
    data = oracle.small_integers(rows, k, seed=seed, device="cuda").to(torch.float8_e4m3fn)
    return Operand(data, torch.full((rows, k // 32), code, dtype=torch.uint8, device="cuda"))


@pytest.mark.parametrize("token_code", [127, 187, 115])
@pytest.mark.parametrize("name", FORMATS)
def test_scales_of_weights_from_the_smallest_to_nan(token_code, name):
    """Row n has scale code n. Elements are at most 1, so twice 2**127 stays out of the way."""
    data = (oracle.small_integers(256, 64, seed=1, device="cuda") / 4).to(torch.float8_e4m3fn)
    weight = Operand(data, torch.arange(256, dtype=torch.uint8, device="cuda").unsqueeze(1).repeat(1, 2)[None])
    weight = Operand(weight.data[None], weight.scales)
    tokens, runs = power_of_two_tokens(5, 64, token_code, seed=2), Runs.of([5], spare=0)
    out = run(tokens, weight, runs, name)
    check(out, tokens, weight, runs, name)
    exact = oracle.exact_product(tokens, weight.group(0))
    assert bool(out[:, 255].isnan().all()) and not bool(out[:, :128].isnan().any())
    # Sums of small integers times one power of two: nothing is lost before the result is rounded.
    normal = (exact.value.abs() >= 2.0**-126) & (exact.magnitude < 2.0**127)
    assert bool((out.double() == exact.value.to(BF16).double())[normal].all())


@pytest.mark.parametrize("weight_code", [127, 187, 67])
@pytest.mark.parametrize("name", FORMATS)
def test_scales_of_tokens_from_the_smallest_to_nan(weight_code, name):
    data = (oracle.small_integers(256, 64, seed=3, device="cuda") / 4).to(torch.float8_e4m3fn)
    tokens = Operand(data, torch.arange(256, dtype=torch.uint8, device="cuda").unsqueeze(1).repeat(1, 2))
    weight = power_of_two_tokens(64, 64, weight_code, seed=4)
    weight = Operand(weight.data[None], weight.scales[None])
    runs = Runs.of([256], spare=0)
    out = run(tokens, weight, runs, name)
    check(out, tokens, weight, runs, name)
    assert bool(out[255].isnan().all()) and not bool(out[:128].isnan().any())


@pytest.mark.parametrize("name", FORMATS)
def test_scales_that_cancel(name):
    """Block b has 2**e in the weight and 2**-e in the tokens, for e from -127 to 127: every block counts the same."""
    codes = torch.arange(255, dtype=torch.int32, device="cuda")[:: 254 // 63][:64]
    order = torch.randperm(64, generator=torch.Generator().manual_seed(5)).cuda()
    codes = torch.cat([codes[:63], codes.new_tensor([254])])[order]
    k = 64 * 32
    a, w = (oracle.small_integers(rows, k, seed=rows, device="cuda") / 4 for rows in (9, 128))
    tokens = Operand(a.to(torch.float8_e4m3fn), (254 - codes).byte().expand(9, -1).contiguous())
    weight = Operand(w.to(torch.float8_e4m3fn)[None], codes.byte().expand(1, 128, -1).contiguous())
    runs = Runs.of([9], spare=0)
    out = run(tokens, weight, runs, name)
    assert torch.equal(out.double(), (a.double() @ w.double().T).to(BF16).double())


@pytest.mark.parametrize("name", FORMATS)
def test_scales_drawn_from_the_whole_range(name):
    """Rows whose blocks differ by hundreds of powers of two; a group beside has others."""
    g = torch.Generator("cuda").manual_seed(6)
    weight = oracle.random_operand(2, 128, 512, seed=7, device="cuda")
    weight = Operand(weight.data, torch.randint(0, 240, weight.scales.shape, generator=g, device="cuda").byte())
    tokens = Operand(oracle.small_integers(40, 512, seed=8, device="cuda").to(torch.float8_e4m3fn), None)
    scales = torch.randint(120, 130, (40, 16), generator=g, device="cuda").byte()
    tokens, runs = Operand(tokens.data, scales), Runs.of([21, 19], spare=0)
    check(run(tokens, weight, runs, name), tokens, weight, runs, name)


@pytest.mark.parametrize("name", FORMATS)
def test_scales_beyond_bf16_give_infinity(name):
    one = torch.ones(16, 64, device="cuda").to(torch.float8_e4m3fn)
    tokens = Operand(one, torch.full((16, 2), 200, dtype=torch.uint8, device="cuda"))  # 2**73
    weight = Operand(one.repeat(4, 1)[None], torch.full((1, 64, 2), 170, dtype=torch.uint8, device="cuda"))
    weight.scales[0, :, :] += torch.arange(64, device="cuda").clamp(max=11).byte().unsqueeze(1)  # 2**43 .. 2**54
    runs = Runs.of([16], spare=0)
    out = run(tokens, weight, runs, name)
    check(out, tokens, weight, runs, name)  # 2**(73+43+6) = 2**122, and six steps further 2**128
    assert bool((out == torch.inf).any()) and not bool(out.isnan().any())


@pytest.mark.parametrize("codes", ["random", "zero", "positive"])
@pytest.mark.parametrize("name", FORMATS)
def test_nan_scales_of_weights_spoil_their_columns_alone(name, codes):
    """Also where a scale read as infinity would give no NaN, since all products have one sign."""
    weight = oracle.random_operand(3, 192, 416, seed=9, device="cuda")
    runs = Runs.of([9, 4, 20])
    tokens = tokens_for(runs, 416, seed=10)
    if codes == "positive":
        tokens.data.view(torch.uint8).bitwise_and_(0x7F)
    clean = run(tokens, weight, runs, name)
    spoiled = [(0, 0, 0), (0, 191, 12), (1, 7, 3), (1, 8, 4), (1, 64, 0), (2, 63, 12), (2, 127, 5), (2, 128, 11)]
    for g, row, block in spoiled:
        weight.scales[g, row, block] = 255
        block_codes = weight.data.view(torch.uint8)[g, row, 32 * block : 32 * block + 32]
        if codes == "zero":  # 0 * NaN is NaN
            block_codes.zero_()
        elif codes == "positive":
            block_codes.bitwise_and_(0x7F).clamp_(min=1)
    out = run(tokens, weight, runs, name)
    check(out, tokens, weight, runs, name)
    for g, (start, count) in enumerate(zip(runs.starts, runs.counts, strict=True)):
        columns = [row for group, row, _ in spoiled if group == g]
        rows = slice(start, start + count)
        kept = torch.ones(192, dtype=torch.bool, device="cuda")
        kept[columns] = False
        assert bool(out[rows][:, columns].isnan().all())
        assert torch.equal(bits(out[rows][:, kept]), bits(clean[rows][:, kept]))


# ---- NaN ----


@pytest.mark.parametrize("bad", ["nan", "inf", "scale"])
@pytest.mark.parametrize("name", FORMATS)
def test_nan_tokens_spoil_their_rows_alone(name, bad):
    if bad == "inf" and calls.is_fp8(name):
        bad = "scale"  # a quantized infinity is a block with a NaN scale
    weight = oracle.random_operand(2, 96, 160, seed=11, device="cuda", spread=3)
    runs = Runs.of([33, 90])
    clean = tokens_for(runs, 160, seed=12)
    if bad == "inf":
        clean = Operand(clean.values().to(BF16))
    expected = run(clean, weight, runs, name)
    rows = [0, 7, 32, 33, 40, 122]
    tokens = Operand(clean.data.clone(), None if clean.scales is None else clean.scales.clone())
    for i, row in enumerate(rows):
        if bad == "inf":
            tokens.data[row, 31 * i] = torch.inf if i % 2 else -torch.inf
        elif bad == "nan":
            tokens.data.view(torch.uint8)[row, 31 * i] = 0x7F
        else:
            tokens.scales[row, i % 5] = 255
            tokens.data.view(torch.uint8)[row, 32 * (i % 5) : 32 * (i % 5) + 32] = 0
    out = run(tokens, weight, runs, name)
    check(out, tokens, weight, runs, name)
    assert not bool(out[rows].isfinite().all(1).any())
    others = [row for row in range(runs.num_rows) if row not in rows]
    assert torch.equal(bits(out[others]), bits(expected[others]))


@pytest.mark.parametrize("name", FORMATS)
def test_nan_in_all_other_runs_does_not_leak(name):
    counts = [5, 3, 0, 17, 64, 1]
    weight = oracle.random_operand(6, 96, 160, seed=13, device="cuda")
    runs = Runs.of(counts, spare=40)
    tokens = tokens_for(runs, 160, seed=14)
    clean = run(tokens, weight, runs, name)
    for g, (start, count) in enumerate(zip(runs.starts, counts, strict=True)):
        others = torch.ones(runs.num_rows, dtype=torch.bool, device="cuda")
        others[start : start + count] = False
        spoiled = Operand(tokens.data.clone(), tokens.scales.clone())
        oracle.poison_rows(spoiled, others)
        out = run(spoiled, weight, runs, name)
        assert torch.equal(bits(out[start : start + count]), bits(clean[start : start + count])), f"run {g}"


# ---- accuracy ----


@pytest.mark.parametrize("name", FORMATS)
def test_rows_that_cancel(name):
    tokens, weight = oracle.cancelling(40, 192, 4096, seed=15, device="cuda")
    weight, runs = Operand(weight.data[None], weight.scales[None]), Runs.of([40], spare=0)
    check(run(tokens, weight, runs, name), tokens, weight, runs, name)


@pytest.mark.parametrize("name", FORMATS)
def test_large_rms_error_is_that_of_bf16(name):
    weight = oracle.random_operand(1, 2304, 4096, seed=16, device="cuda", spread=2)
    runs = Runs.of([64], spare=0)
    tokens = tokens_for(runs, 4096, seed=17)
    error = oracle.relative_error(run(tokens, weight, runs, name), oracle.exact_product(tokens, weight.group(0)))
    assert error < 1.8e-3  # rounding alone gives 1.67e-3


@pytest.mark.parametrize("num_tokens", [512, 4096])
@pytest.mark.parametrize("name", FORMATS)
def test_large_linear_layers(num_tokens, name):
    weight = oracle.random_operand(1, 2304, 4096, seed=18, device="cuda")
    runs = Runs.of([num_tokens], spare=0)
    tokens = tokens_for(runs, 4096, seed=19)
    check(run(tokens, weight, runs, name), tokens, weight, runs, name)


@pytest.mark.parametrize("name", FORMATS)
def test_large_experts_with_skewed_runs(name):
    counts = [1500, 0, 300, 40, 8, 1, 0, 199]
    weight = oracle.random_operand(8, 3072, 4096, seed=20, device="cuda")
    runs = Runs.of(counts)
    tokens = tokens_for(runs, 4096, seed=21)
    check(run(tokens, weight, runs, name), tokens, weight, runs, name)


def test_rows_of_plain_bf16_tokens():
    """W8A16 without quantized activations."""
    if not calls.on_hopper():
        with pytest.raises(ValueError, match="activation"):
            calls.tokens(Operand(torch.zeros(1, 32, dtype=BF16, device="cuda")), Runs.of([1], spare=0), "w8a16")
        return
    weight = oracle.random_operand(2, 192, 1120, seed=22, device="cuda")
    runs = Runs.of([30, 3])
    g = torch.Generator("cuda").manual_seed(23)
    size = torch.exp2(torch.randint(-60, 60, (runs.num_rows, 1), generator=g, device="cuda").float())
    tokens = Operand((torch.randn(runs.num_rows, 1120, generator=g, device="cuda") * size).to(BF16))
    oracle.poison_rows(tokens, runs.outside("cuda"))
    check(run(tokens, weight, runs, "w8a16"), tokens, weight, runs, "w8a16")


# ---- independence ----


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_do_not_depend_on_each_other(name):
    weight = oracle.random_operand(3, 192, 544, seed=24, device="cuda")
    runs = Runs.of([40, 3, 150])
    tokens = tokens_for(runs, 544, seed=25)
    expected = run(tokens, weight, runs, name)
    for row in (0, 39, 40, 42, 43, 100, 192):
        other = tokens_for(runs, 544, seed=100 + row)
        other.data.view(torch.uint8)[row] = tokens.data.view(torch.uint8)[row]
        other.scales[row] = tokens.scales[row]
        assert torch.equal(bits(run(other, weight, runs, name)[row]), bits(expected[row])), f"row {row}"


@pytest.mark.parametrize("name", FORMATS)
def test_rows_may_change_places_and_their_bits_do_not(name):
    weight = oracle.random_operand(1, 192, 544, seed=26, device="cuda")
    runs = Runs.of([150], spare=0)
    tokens = tokens_for(runs, 544, seed=27)
    expected = run(tokens, weight, runs, name)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(28)).cuda()
    moved = Operand(tokens.data.view(torch.uint8)[order].view(torch.float8_e4m3fn), tokens.scales[order])
    assert torch.equal(bits(run(moved, weight, runs, name)), bits(expected[order]))


# ---- epilogues ----


@pytest.mark.parametrize("bias_dtype", [torch.float32, BF16])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", FORMATS)
def test_epilogue_with_bias_and_both_dtypes(name, dtype, bias_dtype):
    weight = oracle.random_operand(3, 136, 160, seed=29, device="cuda", spread=2)
    weight = Operand(weight.data, weight.scales - 6)
    runs = Runs.of([9, 0, 37], gaps=[2])
    tokens = oracle.random_operand(runs.num_rows, 160, seed=30, device="cuda", spread=2)
    oracle.poison_rows(tokens, runs.outside("cuda"))
    g = torch.Generator("cuda").manual_seed(31)
    bias = (torch.randn(3, 136, generator=g, device="cuda") * 300).to(bias_dtype)
    check(run(tokens, weight, runs, name, bias=bias, dtype=dtype), tokens, weight, runs, name, bias)
    check(run(tokens, weight, runs, name, dtype=dtype), tokens, weight, runs, name)


@pytest.mark.parametrize("name", FORMATS)
def test_epilogue_adds_the_bias_before_rounding(name):
    weight = oracle.random_operand(1, 136, 160, seed=32, device="cuda")
    runs = Runs.of([6], spare=0)
    tokens = oracle.random_operand(1, 160, seed=33, device="cuda")
    tokens = Operand(tokens.data.repeat(6, 1), tokens.scales.repeat(6, 1))
    bias = -oracle.exact_product(tokens, weight.group(0)).value[0].float()  # what is left is what float32 lost
    check(run(tokens, weight, runs, name, bias=bias), tokens, weight, runs, name, bias)


@pytest.mark.parametrize("name", FORMATS)
def test_epilogue_in_fp16_overflows_to_infinity(name):
    weight = oracle.random_operand(1, 136, 160, seed=34, device="cuda")
    weight = Operand(weight.data, weight.scales + 4)
    runs = Runs.of([11], spare=0)
    tokens = tokens_for(runs, 160, seed=35)
    out = run(tokens, weight, runs, name, dtype=FP16)
    check(out, tokens, weight, runs, name)
    assert bool(out.isinf().any())


SWIGLU = [
    # (I, K, limit, rounding)
    (1536, 4096, None, "rceil"),
    (768, 1536, None, "floor"),
    (96, 160, 1.5, "rceil"),
    (32, 32, None, "rceil"),
    (160, 96, 7.0, "floor"),
]


@pytest.mark.parametrize("intermediate_size, k, limit, rounding", SWIGLU)
@pytest.mark.parametrize("out_format", ["w8a8", "w8a16", "plain"])
@pytest.mark.parametrize("name", FORMATS)
def test_epilogue_swiglu(name, out_format, intermediate_size, k, limit, rounding):
    if not calls.on_hopper() and out_format != "w8a8":
        out_format = "w8a8"  # the only format there
    runs = Runs.of([9, 0, 37], gaps=[2, 0, 1])
    weight = swiglu_weight(3, intermediate_size, k, seed=36)
    tokens = oracle.random_operand(runs.num_rows, k, seed=37, device="cuda", spread=1)
    oracle.poison_rows(tokens, runs.outside("cuda"))
    tokens.scales[runs.starts[2] + 5, 0] = 255
    packed = calls.tokens(tokens, runs, name)
    result = calls.swiglu(
        calls.pack(weight, gate_up=True), packed, runs, out_format=out_format, limit=limit, rounding=rounding
    )
    found = calls.touched_outside(result, runs)
    for g, (start, count) in enumerate(zip(runs.starts, runs.counts, strict=True)):
        if not count:
            continue
        exact = oracle.exact_product(tokens.rows(start, count), weight.group(g))
        product, bound = oracle.exact_swiglu(exact, limit=limit, fp8=calls.is_fp8(name))
        values, scales, _ = calls.run_of(result, runs, g)
        if out_format == "plain":
            faults = oracle.plain_swiglu_faults(values, product, bound)
        else:
            faults = oracle.swiglu_faults(values, product, bound, scales=scales, rounding=rounding)
        found += [f"group {g}: {f}" for f in faults]
    assert not found, "\n".join(found)


def swiglu_weight(num_groups: int, intermediate_size: int, k: int, *, seed: int) -> Operand:
    """A w13 whose results are a few units large: gates on both sides of zero."""
    weight = oracle.random_operand(num_groups, 2 * intermediate_size, k, seed=seed, device="cuda", spread=1)
    shift = 2 + (k.bit_length() - 8) // 2
    return Operand(weight.data, (weight.scales.int() - shift).byte())


def check_swiglu(weight: Operand, tokens: Operand, runs: Runs, out_format: str, **how) -> None:
    result = calls.swiglu(
        calls.pack(weight, gate_up=True), calls.tokens(tokens, runs, out_format), runs, out_format=out_format, **how
    )
    found = calls.touched_outside(result, runs)
    for g, (start, count) in enumerate(zip(runs.starts, runs.counts, strict=True)):
        if count:
            exact = oracle.exact_product(tokens.rows(start, count), weight.group(g))
            product, bound = oracle.exact_swiglu(exact, fp8=calls.is_fp8(out_format))
            values, scales, _ = calls.run_of(result, runs, g)
            found += [f"group {g}: {f}" for f in oracle.swiglu_faults(values, product, bound, scales=scales)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("out_format", ["w8a8", "w8a16"])
@pytest.mark.parametrize("case", ["everything in one", "larger than any token tile", "one token each", "nothing"])
def test_epilogue_swiglu_of_all_group_sizes(case, out_format):
    counts = (oracle.COUNT_CASES[case] + [0] * 8)[:8]
    runs = Runs.of(counts, gaps=[1, 0])
    weight = swiglu_weight(8, 96, 160, seed=38)
    tokens = oracle.random_operand(runs.num_rows, 160, seed=39, device="cuda", spread=1)
    oracle.poison_rows(tokens, runs.outside("cuda"))
    check_swiglu(weight, tokens, runs, out_format if calls.on_hopper() else "w8a8")


@pytest.mark.parametrize(
    ("out_format", "tile"),
    [("w8a8", tile) for tile in W8A8_TILES] + [("w8a16", tile) for tile in W8A16_TILES],
)
def test_epilogue_swiglu_of_every_token_tile(out_format, tile):
    """The warps of a tile tell each other magnitudes: in another way for every number of tokens."""
    runs = Runs.of([300, 0, 1101, 7, 1], gaps=[0])
    weight = swiglu_weight(5, 256, 544, seed=48)
    tokens = oracle.random_operand(runs.num_rows, 544, seed=49, device="cuda", spread=1)
    rows = 5 * tile
    if calls.on_hopper():
        token_format = calls.token_format(out_format)
        how = dict(num_groups=5, n=512, k=544, token_format=token_format, epilogue=Epilogue.SWIGLU)
        chosen = (rows for rows in range(1, runs.num_rows) if choose_config(num_rows=rows, **how).token_tile == tile)
        rows = next(chosen)
    check_swiglu(weight, tokens, runs, out_format, expected_rows=rows)


# ---- replays ----


REPLAY_SHAPES = [([1] * 8, 3072, 4096), ([16] * 8, 4096, 1536), ([200, 0, 1, 90], 192, 544), ([100], 2304, 4096)]


@pytest.mark.parametrize("counts, n, k", REPLAY_SHAPES)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_replays_give_the_same_bits_a_thousand_times(counts, n, k, name, early):
    runs = Runs.of(counts, gaps=[1])
    weight = calls.pack(oracle.random_operand(len(counts), n, k, seed=40, device="cuda"))
    packed = calls.tokens(tokens_for(runs, k, seed=41), runs, name)
    out = torch.empty(runs.num_rows, n, dtype=BF16, device="cuda")
    routing = calls.Routing.of(runs)
    calls.plain(weight, packed, routing, out=out, early=early)
    outside = runs.outside("cuda")
    expected = bits(out).masked_fill(outside.unsqueeze(1), POISON)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.plain(weight, packed, routing, out=out, early=early)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out.view(torch.int16).fill_(POISON)
        graph.replay()
        differing += (bits(out) != expected).sum()
    assert int(differing) == 0


@pytest.mark.parametrize("inside, early", [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("name", FORMATS)
def test_replays_follow_counts_that_change_on_the_device(name, inside, early):
    """One graph, new routing between replays; `inside`, kernels in the graph right before ours write the counts.

    Those are torch's, without programmatic dependent launch, so ours may read the counts early even then.
    """
    num_groups, num_rows, n, k = 16, 300, 192, 544
    routings = [
        [1] * 16,
        [0] * 15 + [290],
        [290] + [0] * 15,
        [0] * 16,
        [18] * 16,
        [0, 7] * 8,
        [64, 65, 63, 0, 0, 1, 33, 17, 9, 8, 7, 0, 0, 0, 3, 2],
    ]
    weight = oracle.random_operand(num_groups, n, k, seed=42, device="cuda")
    packed_weight = calls.pack(weight)
    tokens = oracle.random_operand(num_rows, k, seed=43, device="cuda")
    all_runs = [Runs.of(c, gaps=[i % 3, 0], spare=0) for i, c in enumerate(routings)]
    all_runs = [Runs(r.counts, r.starts, num_rows) for r in all_runs]
    all_packed = [calls.tokens(tokens, runs, name) for runs in all_runs]  # from sm_100 on, runs move scales
    expected, table = [], []
    for runs, packed in zip(all_runs, all_packed, strict=True):
        out, fence = poisoned((num_rows, n), BF16)
        calls.plain(packed_weight, packed, runs, out=out)
        fence.check()
        check(out, tokens, weight, runs, name)
        expected.append(bits(out).clone())
        table.append(torch.cat([runs.expert_counts("cuda"), runs.expert_offsets("cuda")]))
    packed = all_packed[0]
    packed = packed if packed.scales is None else replace(packed, scales=packed.scales.clone())
    table, routing = torch.stack(table), calls.Routing.of(all_runs[0])
    step = torch.zeros(1, dtype=torch.int64, device="cuda")
    out = torch.empty(num_rows, n, dtype=BF16, device="cuda")

    def write_routing() -> None:
        chosen = table.index_select(0, step % len(all_runs))[0]
        routing.counts.copy_(chosen[:num_groups])
        routing.offsets.copy_(chosen[num_groups:])

    graph = torch.cuda.CUDAGraph()
    write_routing()
    calls.plain(packed_weight, packed, routing, out=out, early=early)
    with torch.cuda.graph(graph):
        if inside:
            write_routing()
        calls.plain(packed_weight, packed, routing, out=out, early=early)
    stacked = torch.stack(expected)
    differing = torch.zeros(len(all_runs), dtype=torch.int64, device="cuda")
    for i in range(1001):
        which = i * 3 % len(all_runs)
        step.fill_(which)
        if not inside:
            write_routing()
        if packed.scales is not None:
            packed.scales.copy_(all_packed[which].scales)
        out.view(torch.int16).fill_(POISON)
        graph.replay()
        differing[which] += (bits(out) != stacked[which]).sum()
    assert differing.tolist() == [0] * len(all_runs)


# ---- w13, then w2 ----


CHAINS = [
    ([1, 0, 2, 1, 0, 0, 3, 1], 1536, 4096),
    ([16] * 8, 1536, 4096),
    ([70, 0, 130, 5], 96, 160),
    ([64] * 8, 768, 1024),
]


@pytest.mark.parametrize("counts, intermediate_size, hidden_size", CHAINS)
@pytest.mark.parametrize("name", FORMATS)
def test_chain_is_right(counts, intermediate_size, hidden_size, name):
    """w2 of what w13 wrote, from memory that held NaN before."""
    runs = Runs.of(counts, gaps=[0, 1])
    w13 = swiglu_weight(len(counts), intermediate_size, hidden_size, seed=44)
    w2 = oracle.random_operand(len(counts), hidden_size, intermediate_size, seed=45, device="cuda")
    tokens = oracle.random_operand(runs.num_rows, hidden_size, seed=46, device="cuda", spread=1)
    oracle.poison_rows(tokens, runs.outside("cuda"))
    packed = calls.tokens(tokens, runs, name)
    middle = calls.swiglu(calls.pack(w13, gate_up=True), packed, runs, out_format=name)
    out, fence = poisoned((runs.num_rows, hidden_size), BF16)
    calls.plain(calls.pack(w2), middle, runs, out=out, early=True)
    fence.check()
    found = []
    for g, (start, count) in enumerate(zip(runs.starts, runs.counts, strict=True)):
        if count:
            exact = oracle.exact_product(calls.run_of(middle, runs, g)[2], w2.group(g))
            faults = oracle.faults(out[start : start + count], exact, fp8=calls.is_fp8(name))
            found += [f"group {g}: {f}" for f in faults]
    assert not found, "\n".join(found)
    assert bool((bits(out)[runs.outside("cuda")] == POISON).all())


@pytest.mark.parametrize("counts, intermediate_size, hidden_size", CHAINS[:3])
@pytest.mark.parametrize("name", FORMATS)
def test_chain_back_to_back_a_thousand_times(counts, intermediate_size, hidden_size, name):
    """Twenty-five chains in a graph, all through the same memory between w13 and w2, on different tokens.

    A kernel that reads before the one in front of it has written, or writes before the one in front has read, gives
    other bits than the same calls one at a time.
    """
    length = 25
    runs = Runs.of(counts, gaps=[0, 1])
    w13 = calls.pack(swiglu_weight(len(counts), intermediate_size, hidden_size, seed=47), gate_up=True)
    w2 = calls.pack(oracle.random_operand(len(counts), hidden_size, intermediate_size, seed=48, device="cuda"))
    packed = []
    for i in range(length):
        tokens = oracle.random_operand(runs.num_rows, hidden_size, seed=200 + i, device="cuda", spread=1)
        packed.append(calls.tokens(tokens, runs, name))
    routing = calls.Routing.of(runs)
    outs = torch.empty(length, runs.num_rows, hidden_size, dtype=BF16, device="cuda")

    def chain(i: int, between=lambda: None) -> PackedTokens:
        middle = calls.swiglu(w13, packed[i], routing, out_format=name, early=True, poison=False)
        between()
        calls.plain(w2, middle, routing, out=outs[i], early=True)
        return middle

    outs.view(torch.int16).fill_(POISON)
    for i in range(length):
        chain(i, torch.cuda.synchronize)
        torch.cuda.synchronize()
    expected = bits(outs).clone()
    rows = ~runs.outside("cuda")
    assert not torch.equal(expected[0][rows], expected[1][rows])
    graph, places = torch.cuda.CUDAGraph(), set()
    with torch.cuda.graph(graph):
        for i in range(length):
            middle = None  # its memory is free for the next one, whose chain writes what this one's still reads
            middle = chain(i)
            places.add(middle.data.data_ptr())
    assert len(places) <= 2
    differing = torch.zeros(length, dtype=torch.int64, device="cuda")
    for _ in range(1000 // length):
        outs.view(torch.int16).fill_(POISON)
        middle.data.view(torch.uint8).fill_(0x7F)
        graph.replay()
        differing += (bits(outs) != expected).sum((1, 2))
    assert differing.tolist() == [0] * length
    for _ in range(3):  # and without a graph, where launches follow each other less closely
        outs.view(torch.int16).fill_(POISON)
        for i in range(length):
            chain(i)
        differing += (bits(outs) != expected).sum((1, 2))
    assert differing.tolist() == [0] * length


@pytest.mark.parametrize("name", FORMATS)
def test_chain_after_the_quantizer_of_its_tokens(name):
    """Quantization, w13, w2 in a graph, the tokens changed between replays."""
    counts, intermediate_size, hidden_size = [3, 0, 20, 1], 768, 1024
    runs = Runs.of(counts, spare=0)
    w13 = calls.pack(swiglu_weight(4, intermediate_size, hidden_size, seed=49), gate_up=True)
    w2 = calls.pack(oracle.random_operand(4, hidden_size, intermediate_size, seed=50, device="cuda"))
    inputs = [torch.randn(runs.num_rows, hidden_size, device="cuda").to(BF16) * 50 for _ in range(8)]
    x, routing = inputs[0].clone(), calls.Routing.of(runs)
    out = torch.empty(runs.num_rows, hidden_size, dtype=BF16, device="cuda")

    def step(between=lambda: None) -> None:
        # From sm_100 on, scales of these runs lie elsewhere than the quantizer puts them; bits repeat all the same.
        tokens = calls.quantize(x, name)
        between()
        middle = calls.swiglu(w13, tokens, routing, out_format=name, early=True, poison=False)
        between()
        calls.plain(w2, middle, routing, out=out, early=True)

    expected = []
    for values in inputs:
        x.copy_(values)
        step(torch.cuda.synchronize)
        expected.append(bits(out).clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(1000):
        x.copy_(inputs[i % 8])
        graph.replay()
        differing += (bits(out) != expected[i % 8]).sum()
    assert int(differing) == 0
