"""Stream-K on an H100 or H200: against float64, and whether launches that share flags leave each other alone.

Sums handed over go to memory that is full of NaN, flags are looked at after every launch. A lost flag hangs the GPU:
run this file with a time limit. By area: ``-k sizes``, ``counts``, ``linear``, ``replays``, ``layers``, ``streams``.
"""

import gemm_calls as calls
import gemm_oracle as oracle
import pytest
import torch
from gemm_calls import POISON, poisoned, poisoned_allocations
from gemm_oracle import Runs

from vllm_rose_plugin.kernels.contracts import TokenFormat
from vllm_rose_plugin.kernels.gemm import launch, one_run, workspace
from vllm_rose_plugin.kernels.gemm.choose import choose_config
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and calls.on_hopper()), reason="stream-K is sm_90's"),
]
BF16, FP16 = torch.bfloat16, torch.float16


def cut(row_groups: int, token_tile: int, **how) -> dict:
    """A config's fields, as the heuristic sets them for a tile."""
    long = token_tile > 64
    usual = {
        "k_tile": 64 if token_tile > 128 else 128,
        "pass_k": 256 if long else 128,
        "blocks_per_sm": 1,
        "cluster": 1,
        "split_k": False,
        "stream_k": True,
    }
    return {"row_groups": row_groups, "token_tile": token_tile, **usual, **how}


W8A16 = [("w8a16", cut(*tile)) for tile in ((2, 64), (3, 64), (4, 64), (2, 96), (2, 128), (2, 192), (2, 256))]
W8A16 += [("w8a16", cut(*tile)) for tile in ((1, 16), (2, 16), (1, 32), (2, 48))]  # tuning alone may take them
W8A8 = [
    ("w8a8", cut(2, 8, k_tile=128, pass_k=128)),
    ("w8a8", cut(1, 16, pass_k=256)),
    ("w8a8", cut(2, 32, in_flight=2)),
]
CONFIGS = [*W8A16, *W8A8, ("w8a16", cut(2, 128, early_counts=True))]


def name_of(value) -> str:
    if isinstance(value, dict):
        return f"{value['row_groups']}x{value['token_tile']}" + ("-early" if value.get("early_counts") else "")
    return str(value)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)


def assert_flags_are_down() -> None:
    torch.cuda.synchronize()
    assert workspace._flags, "no launch had flags"
    assert not any(bool(made.rows.any()) for made in workspace._flags.values()), "a flag is still raised"


def is_chosen(*, n: int, k: int, num_tokens: int) -> bool:
    """Whether the heuristic takes stream-K on this device."""
    facts = device_facts(torch.cuda.current_device())
    config = choose_config(
        num_groups=1,
        n=n,
        k=k,
        num_rows=num_tokens,
        token_format=TokenFormat.BF16_PERMUTED,
        sm_count=facts.sm_count,
    )
    return config.stream_k


# ---- one launch ----


@pytest.mark.parametrize("n, k", [(200, 928), (64, 64), (32, 8192), (1856, 2688), (9216, 4096)])
@pytest.mark.parametrize("name, change", CONFIGS, ids=name_of)
def test_sizes_around_tiles(name, change, n, k):
    """Fewer units than blocks, tiles over many blocks, many tiles to a block; rows and tokens that end inside tiles."""
    weight = oracle.random_operand(1, n, k, seed=n, device="cuda")
    packed_weight, tile = calls.pack(weight), change["token_tile"]
    for m in sorted({1, tile - 1, tile, tile + 1, 2 * tile + 3, 4 * tile, 9 * tile + 1}):
        runs = Runs.of([m], gaps=[m % 3], spare=2)
        tokens = oracle.random_operand(runs.num_rows, k, seed=m, device="cuda")
        oracle.poison_rows(tokens, runs.outside("cuda"))
        packed, results = calls.tokens(tokens, runs, name), []
        with calls.forced(name, runs, n=n, k=k, change=change), poisoned_allocations():
            for _ in range(3):
                out, fence = poisoned((runs.num_rows, n), BF16)
                calls.plain(packed_weight, packed, runs, out=out)
                fence.check()
                results.append(out)
        assert_flags_are_down()
        found = oracle.grouped_faults(results[0], tokens, weight, runs, fp8=calls.is_fp8(name), outside=POISON)
        assert not found, f"M = {m}: " + "\n".join(found)
        assert all(torch.equal(bits(r), bits(results[0])) for r in results), f"M = {m} differs from run to run"


def test_counts_of_nothing():
    change = cut(2, 128)
    runs = Runs.of([0], spare=9)
    weight = calls.pack(oracle.random_operand(1, 200, 928, seed=1, device="cuda"))
    packed = calls.tokens(oracle.random_operand(9, 928, seed=2, device="cuda"), runs, "w8a16")
    out, _ = poisoned((9, 200), BF16)
    with calls.forced("w8a16", runs, n=200, k=928, change=change):
        calls.plain(weight, packed, runs, out=out)
    assert bool((bits(out) == POISON).all())


@pytest.mark.parametrize("early", [False, True])
def test_counts_that_change_on_the_device(early):
    """One graph; every replay has another number of tokens, so other cuts and other blocks that wait."""
    n, k, most = 2304, 4096, 700
    counts = [1, 700, 127, 0, 128, 129, 513, 3, 256, 699]
    weight = oracle.random_operand(1, n, k, seed=3, device="cuda")
    tokens = oracle.random_operand(most, k, seed=4, device="cuda")
    runs = Runs.of([most], spare=0)
    packed, packed_weight = calls.tokens(tokens, runs, "w8a16"), calls.pack(weight)
    out = torch.empty(most, n, dtype=BF16, device="cuda")
    table = torch.tensor([[0, m] for m in counts], dtype=torch.int32, device="cuda")
    routing = calls.Routing(table[0].clone(), table[0, 1:].clone())
    expected = []
    with calls.forced("w8a16", runs, n=n, k=k, change=cut(2, 128, early_counts=early)), poisoned_allocations():
        for row, m in enumerate(counts):
            routing.offsets.copy_(table[row])
            routing.counts.copy_(table[row, 1:])
            out.view(torch.int16).fill_(POISON)
            calls.plain(packed_weight, packed, routing, out=out)
            expected.append(bits(out).clone())
            found = oracle.grouped_faults(
                out, tokens, weight, Runs([m], [0], most), fp8=calls.is_fp8("w8a16"), outside=POISON
            )
            assert not found, f"M = {m}: " + "\n".join(found)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls.plain(packed_weight, packed, routing, out=out)
    differing = torch.zeros(len(counts), dtype=torch.int64, device="cuda")
    for i in range(1000):
        row = i * 7 % len(counts)
        routing.offsets.copy_(table[row])
        routing.counts.copy_(table[row, 1:])
        out.view(torch.int16).fill_(POISON)
        graph.replay()
        differing[row] += (bits(out) != expected[row]).sum()
    assert differing.tolist() == [0] * len(counts)
    assert_flags_are_down()


# ---- linear layers, where the heuristic takes it ----


@pytest.mark.parametrize("dtype, bias_dtype", [(BF16, None), (BF16, BF16), (FP16, FP16), (BF16, torch.float32)])
def test_linear_with_bias_in_both_dtypes(dtype, bias_dtype):
    n, k, taken = 9216, 4096, 0
    weight = oracle.random_operand(1, n, k, seed=60, device="cuda", spread=2)
    weight = oracle.Operand(weight.data, weight.scales - 6)
    packed = calls.pack(weight)
    bias = None if bias_dtype is None else (torch.randn(n, device="cuda") * 300).to(bias_dtype)
    for num_tokens in (100, 128, 250, 384, 512, 1000):
        taken += is_chosen(n=n, k=k, num_tokens=num_tokens)
        x = torch.randn(num_tokens, k, device="cuda").to(dtype)
        with poisoned_allocations():
            out = calls.linear(x, packed, bias=bias, dtype=dtype)
        exact = oracle.exact_product(oracle.quantize(x), weight.group(0), bias)
        assert out.dtype == dtype and oracle.faults(out, exact, fp8=False) == []
    assert taken, "stream-K was never taken"
    assert_flags_are_down()


@pytest.mark.parametrize("ready", [True, False])
def test_replays_on_changing_tokens(ready, monkeypatch):
    """A thousand, bit for bit. Without flags ready at the capture, every replay zeroes its own."""
    n, k, num_tokens = 9216, 4096, 512
    assert is_chosen(n=n, k=k, num_tokens=num_tokens)
    weight = calls.pack(oracle.random_operand(1, n, k, seed=62, device="cuda"))
    inputs = [torch.randn(num_tokens, k, device="cuda").to(BF16) for _ in range(4)]
    expected = []
    for values in inputs:
        expected.append(bits(calls.linear(values, weight, dtype=BF16)).clone())
        torch.cuda.synchronize()
    if not ready:
        monkeypatch.setattr(workspace, "_flags", {})
    x, graph = inputs[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = calls.linear(x, weight, dtype=BF16)
    assert bool(workspace._flags) == ready
    differing = torch.zeros(4, dtype=torch.int64, device="cuda")
    for i in range(1000):
        x.copy_(inputs[i % 4])
        out.view(torch.int16).fill_(POISON)
        graph.replay()
        differing[i % 4] += (bits(out) != expected[i % 4]).sum()
    assert differing.tolist() == [0] * 4


# ---- launches that share flags ----


@pytest.mark.parametrize("captured", [False, True])
def test_layers_by_turns_on_one_stream(captured):
    """Two layers with other tiles and other blocks that hand over, launches as close as they get, cuts of many M."""
    layers = [(9216, 4096, 512), (4096, 8192, 256), (9216, 4096, 128)]
    assert all(is_chosen(n=n, k=k, num_tokens=m) for n, k, m in layers)
    weights = [calls.pack(oracle.random_operand(1, n, k, seed=n + k, device="cuda")) for n, k, _ in layers]
    inputs = [torch.randn(m, k, device="cuda").to(BF16) for _, k, m in layers]
    packed = [calls.quantize(x, "w8a16") for x in inputs]
    turns = [0, 1, 2, 0, 0, 1, 1, 2, 1, 0, 2, 2] * 2

    def gemm(layer: int) -> torch.Tensor:
        m = layers[layer][2]
        offsets, counts = one_run.one_run(packed[layer].data.device, m)
        return launch.grouped_gemm(
            packed[layer],
            weights[layer],
            expert_offsets=offsets,
            expert_counts=counts,
            out_dtype=BF16,
            early_counts=True,
        )

    expected = []
    for layer in range(3):
        expected.append(bits(gemm(layer)).clone())
        torch.cuda.synchronize()

    def all_turns() -> list[torch.Tensor]:
        return [gemm(layer) for layer in turns]

    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            outs = all_turns()
    differing = torch.zeros(len(turns), dtype=torch.int64, device="cuda")
    for _ in range(50):
        if captured:
            for out in outs:
                out.view(torch.int16).fill_(POISON)
            graph.replay()
        else:
            outs = all_turns()
        for i, (layer, out) in enumerate(zip(turns, outs, strict=True)):
            differing[i] += (bits(out) != expected[layer]).sum()
    assert differing.tolist() == [0] * len(turns)
    assert_flags_are_down()


def test_streams_at_the_same_time():
    """Blocks of two launches mix on the SMs, and those of one don't all run at once; nobody waits for ever."""
    n, k, num_tokens = 9216, 4096, 512
    assert is_chosen(n=n, k=k, num_tokens=num_tokens)
    weight = calls.pack(oracle.random_operand(1, n, k, seed=63, device="cuda"))
    inputs = [torch.randn(num_tokens, k, device="cuda").to(BF16) for _ in range(3)]
    expected = [bits(calls.linear(x, weight, dtype=BF16)).clone() for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    outs: list[list[torch.Tensor]] = [[] for _ in inputs]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs[i].append(calls.linear(inputs[i], weight, dtype=BF16))
    torch.cuda.synchronize()
    for found, right in zip(outs, expected, strict=True):
        assert all(torch.equal(bits(out), right) for out in found)
    assert_flags_are_down()
