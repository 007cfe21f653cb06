"""A weight in parts on a GPU of one domain, with tables that pretend others: bit for bit the whole weight's result.

Results lie in memory that is full of NaN, counters are looked at after every test. A lost ticket leaves a tile undone,
a counter that isn't put back shows in the next launch. By area: ``-k sizes``, ``tables``, ``replays``, ``graphs``,
``streams``, ``probe``.
"""

import random
from dataclasses import dataclass

import gemm_calls as calls
import gemm_oracle as oracle
import pytest
import torch
from gemm_calls import POISON, Routing, poisoned, poisoned_allocations
from gemm_oracle import Runs

from vllm_rose_plugin.kernels.contracts import TokenFormat
from vllm_rose_plugin.kernels.gemm import launch, workspace
from vllm_rose_plugin.kernels.gemm.column_split import plan_split, split_packed
from vllm_rose_plugin.kernels.gemm.domains import grouped_gemm_domains, grouped_gemm_swiglu_domains
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts
from vllm_rose_plugin.kernels.sm_domain_probe.launch import forced_sm_domains, learn_sm_domains
from vllm_rose_plugin.memory.driver import Driver
from vllm_rose_plugin.memory.sm_partitions import partition_equally

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
BF16 = torch.bfloat16
FORMATS = ["w8a8", "w8a16"]


def sms() -> int:
    return device_facts(torch.cuda.current_device()).sm_count


def halves(domains: int = 2) -> torch.Tensor:
    return forced_sm_domains(sms(), domains, device="cuda")


def tables(domains: int) -> dict[str, torch.Tensor]:
    drawn = random.Random(domains)
    count = sms()
    return {
        "halves": halves(domains),
        "by turns": torch.arange(count, dtype=torch.int32, device="cuda") % domains,
        "all in the last": torch.full((count,), domains - 1, dtype=torch.int32, device="cuda"),
        "one SM in the last": (torch.arange(count, device="cuda") == 5).int() * (domains - 1),
        "unknown": torch.full((count,), -1, dtype=torch.int32, device="cuda"),
        "at random": torch.tensor([drawn.randint(-1, domains) for _ in range(count)], device="cuda").int(),
        "short": torch.zeros(7, dtype=torch.int32, device="cuda"),
    }


def in_parts(weight: PackedWeight, parts: int) -> list[PackedWeight]:
    split = plan_split(n=weight.n, parts=parts, target=weight.target, gate_up=weight.gate_up)
    assert split.parts == parts, split.reason
    return split_packed(split, weight, lambda part, shape, dtype: torch.empty(shape, dtype=dtype, device="cuda"))


def assert_counters_are_back() -> None:
    torch.cuda.synchronize()
    assert workspace._counters, "no launch had counters"
    assert not any(bool(made.rows.any()) for made in workspace._counters.values()), "a counter was left"


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def same_tokens(a: PackedTokens, b: PackedTokens, runs: Runs) -> bool:
    inside = ~runs.outside("cuda")
    if not same(a.data[inside], b.data[inside]):
        return False
    if a.scales is None or b.scales is None:
        return a.scales is b.scales
    if a.token_format is TokenFormat.MXFP8_FP32_SCALES:
        columns = torch.zeros(a.scales.shape[1], dtype=torch.bool, device="cuda")
        columns[: len(inside)] = inside
        return same(a.scales[:, columns], b.scales[:, columns])
    return same(a.scales, b.scales)


@dataclass
class Layer:
    """w13 and w2 of some experts, whole and in parts, and tokens."""

    w13: PackedWeight
    w2: PackedWeight
    w13_parts: list[PackedWeight]
    w2_parts: list[PackedWeight]
    name: str

    @classmethod
    def of(cls, *, groups: int, hidden: int, size: int, parts: int, name: str, seed: int = 1) -> "Layer":
        w13 = calls.pack(oracle.random_operand(groups, 2 * size, hidden, seed=seed, device="cuda"), gate_up=True)
        w2 = calls.pack(oracle.random_operand(groups, hidden, size, seed=seed + 1, device="cuda"))
        return cls(w13, w2, in_parts(w13, parts), in_parts(w2, parts), name)

    def tokens(self, runs: Runs, seed: int = 3) -> PackedTokens:
        operand = oracle.random_operand(runs.num_rows, self.w13.k, seed=seed, device="cuda")
        return calls.tokens(operand, runs, self.name)

    def whole(self, tokens: PackedTokens, routing: Routing, out: torch.Tensor, *, early: bool = False) -> PackedTokens:
        how = dict(expert_offsets=routing.offsets, expert_counts=routing.counts, early_counts=early)
        with poisoned_allocations():
            middle = launch.grouped_gemm_swiglu(tokens, self.w13, batch_invariant=False, **how)
        launch.grouped_gemm(middle, self.w2, out_dtype=BF16, out=out, **how)
        return middle

    def parted(
        self,
        tokens: PackedTokens,
        routing: Routing,
        out: torch.Tensor,
        table: torch.Tensor,
        *,
        early: bool = False,
        middle: PackedTokens | None = None,
    ) -> PackedTokens:
        how = dict(sm_domains=table, expert_offsets=routing.offsets, expert_counts=routing.counts, early_counts=early)
        with poisoned_allocations():
            found = grouped_gemm_swiglu_domains(tokens, self.w13_parts, out=middle, **how)
        grouped_gemm_domains(found, self.w2_parts, out_dtype=BF16, out=out, **how)
        return found

    def check(self, runs: Runs, table: torch.Tensor, *, early: bool = False) -> None:
        tokens, routing = self.tokens(runs), Routing.of(runs)
        expected, _ = poisoned((runs.num_rows, self.w2.n), BF16)
        out, fence = poisoned((runs.num_rows, self.w2.n), BF16)
        middle = self.whole(tokens, routing, expected, early=early)
        for _ in range(3):
            out.view(torch.int16).fill_(POISON)
            found = self.parted(tokens, routing, out, table, early=early)
            fence.check()
            assert same_tokens(found, middle, runs), "w13 differs from the whole weight's"
            assert same(out, expected), "w2 differs from the whole weight's"
        assert_counters_are_back()


# ---- sizes ----


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_small_sizes(name, parts, early):
    """Odd numbers of tiles, parts that end inside one, empty groups, rows of nobody."""
    layer = Layer.of(groups=5, hidden=384 * parts, size=128 * parts, parts=parts, name=name)
    for counts in ([1, 0, 7, 0, 3], [0, 0, 0, 0, 1], [33, 64, 0, 9, 200], [0] * 5, [300, 1, 0, 17, 129]):
        layer.check(Runs.of(counts, gaps=[0, 3, 1]), halves(parts), early=early)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("groups", "hidden", "size"), [(128, 4096, 768), (64, 4096, 1536), (128, 3072, 768)], ids=str)
def test_sizes_of_models(name, groups, hidden, size):
    """Qwen3-235B with TP2 and EP2, MiniMax-like with EP2 and TP2."""
    layer = Layer.of(groups=groups, hidden=hidden, size=size, parts=2, name=name)
    drawn = random.Random(groups)
    for mean in (0.06, 1, 5, 40):
        counts = [int(drawn.expovariate(1 / mean)) if mean < 1 or drawn.random() < 0.8 else 0 for _ in range(groups)]
        counts[3] = max(counts[3], 1)
        layer.check(Runs.of(counts), halves())


def test_sizes_of_a_linear_layer():
    """Against the kernel whose tiles have K to themselves: the heuristic's may share it among blocks."""
    n, k = 9216, 4096
    weight = calls.pack(oracle.random_operand(1, n, k, seed=5, device="cuda"))
    parts, bias = in_parts(weight, 2), torch.randn(1, n, device="cuda")
    change = dict(cluster=1, split_k=False, stream_k=False, bias=True) if calls.on_hopper() else {}
    for m in (1, 17, 128, 700):
        runs = Runs.of([m], spare=0)
        packed = calls.tokens(oracle.random_operand(m, k, seed=m, device="cuda"), runs, "w8a16")
        routing = Routing.of(runs)
        how = dict(expert_offsets=routing.offsets, expert_counts=routing.counts, out_dtype=BF16, bias=bias)
        with calls.forced("w8a16", runs, n=n, k=k, change=change):
            expected = launch.grouped_gemm(packed, weight, **how)
        out = grouped_gemm_domains(packed, parts, sm_domains=halves(), **how)
        if change:
            assert same(out, expected)
        else:
            assert float((out.float() - expected.float()).norm() / expected.float().norm()) < 3e-3
    assert_counters_are_back()


# ---- tables ----


@pytest.mark.parametrize("name", FORMATS)
def test_tables(name):
    """Domains without SMs, SMs of no domain, of one that isn't there, beyond the table."""
    layer = Layer.of(groups=9, hidden=768, size=384, parts=2, name=name)
    for table in tables(2).values():
        layer.check(Runs.of([40, 0, 1, 1, 70, 3, 0, 0, 12]), table)


# ---- graphs ----


def graph_of(layer: Layer, runs: Runs, *, layers: int = 1, seed: int = 3):
    """(graph of w13 and w2 some times over, its result, what belongs there)."""
    tokens, routing, table = layer.tokens(runs, seed), Routing.of(runs), halves()
    expected, _ = poisoned((runs.num_rows, layer.w2.n), BF16)
    layer.whole(tokens, routing, expected, early=True)
    out, _ = poisoned((runs.num_rows, layer.w2.n), BF16)
    layer.parted(tokens, routing, out, table, early=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    middles = [launch.empty_tokens(tokens, layer.w13, tokens.token_format) for _ in range(layers)]
    with torch.cuda.graph(graph):
        for middle in middles:
            layer.parted(tokens, routing, out, table, early=True, middle=middle)
    return graph, out, expected, [tokens, routing, table, middles]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layers", [1, 3])
def test_replays(name, layers):
    """A thousand, results poisoned before each; launches of the same weights follow each other as close as they get."""
    layer = Layer.of(groups=16, hidden=1024, size=512, parts=2, name=name)
    graph, out, expected, kept = graph_of(layer, Runs.of([3, 0, 1, 9] * 4), layers=layers)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out.view(torch.int16).fill_(POISON)
        for middle in kept[3]:
            middle.data.view(torch.uint8).fill_(0x7F)
        graph.replay()
        differing += (out.view(torch.int16) != expected.view(torch.int16)).sum()
    assert int(differing) == 0
    assert_counters_are_back()


def test_graphs_by_turns():
    """Two graphs of other shapes, and calls outside of any between their replays; then one is destroyed."""
    first = Layer.of(groups=8, hidden=1024, size=512, parts=2, name="w8a8")
    second = Layer.of(groups=5, hidden=512, size=256, parts=2, name="w8a16", seed=9)
    a = graph_of(first, Runs.of([1, 0, 5, 30] * 2))
    b = graph_of(second, Runs.of([64, 0, 2, 7, 1]), layers=2)
    differing = torch.zeros(2, dtype=torch.int64, device="cuda")
    for turn in range(300):
        for i, (graph, out, expected, _) in enumerate((a, b) if turn < 200 else (b,)):
            out.view(torch.int16).fill_(POISON)
            graph.replay()
            differing[i] += (out.view(torch.int16) != expected.view(torch.int16)).sum()
        if turn % 50 == 0:
            first.check(Runs.of([2] * 8), halves())
        if turn == 200:
            graph = out = expected = a = None
            torch.cuda.synchronize()
    assert differing.tolist() == [0, 0]
    assert_counters_are_back()


def test_replays_with_counts_that_change_on_the_device():
    layer = Layer.of(groups=12, hidden=1024, size=512, parts=2, name="w8a16")
    drawn, most = random.Random(4), 60
    runs = Runs.of([most] * 12, spare=0)
    tokens, table = layer.tokens(runs), halves()
    kinds = [[drawn.choice((0, 1, 16, 17, most)) for _ in range(12)] for _ in range(6)] + [[0] * 12, [most] * 12]
    counts = torch.tensor(kinds, dtype=torch.int32, device="cuda")
    routing = Routing.of(runs)
    out, _ = poisoned((runs.num_rows, layer.w2.n), BF16)
    expected = []
    for row in counts:
        routing.counts.copy_(row)
        out.view(torch.int16).fill_(POISON)
        layer.whole(tokens, routing, out)
        expected.append(out.view(torch.int16).clone())
    layer.parted(tokens, routing, out, table)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.parted(tokens, routing, out, table)
    differing = torch.zeros(len(kinds), dtype=torch.int64, device="cuda")
    for i in range(1000):
        which = i * 5 % len(kinds)
        routing.counts.copy_(counts[which])
        out.view(torch.int16).fill_(POISON)
        graph.replay()
        differing[which] += (out.view(torch.int16) != expected[which]).sum()
    assert differing.tolist() == [0] * len(kinds)
    assert_counters_are_back()


# ---- streams ----


def test_streams_at_the_same_time():
    layer = Layer.of(groups=8, hidden=1024, size=512, parts=2, name="w8a8")
    runs = [Runs.of([count, 0, 3, 1] * 2) for count in (1, 20, 64)]
    inputs, routings = [layer.tokens(r) for r in runs], [Routing.of(r) for r in runs]
    expected = [poisoned((r.num_rows, 1024), BF16)[0] for r in runs]
    outs = [poisoned((r.num_rows, 1024), BF16)[0] for r in runs]
    for x, routing, out in zip(inputs, routings, expected, strict=True):
        layer.whole(x, routing, out)
    streams, table = [torch.cuda.Stream() for _ in runs], halves()
    torch.cuda.synchronize()
    for _ in range(100):
        for stream, x, routing, out in zip(streams, inputs, routings, outs, strict=True):
            with torch.cuda.stream(stream):
                layer.parted(x, routing, out, table)
    torch.cuda.synchronize()
    assert all(same(out, other) for out, other in zip(outs, expected, strict=True))
    assert_counters_are_back()


# ---- the probe ----


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_probe_of_equal_partitions(parts):
    """Every SM of a partition is seen, none twice; what was learned multiplies right."""
    torch.zeros(1, device="cuda")
    with partition_equally(driver=Driver(device=torch.cuda.current_device()), parts=parts) as made:
        table = learn_sm_domains(made)
        counts = [int((table == part).sum()) for part in range(parts)]
        assert counts == [partition.sm_count for partition in made.partitions]
        assert int((table == -1).sum()) == sms() - sum(counts)
        torch.cuda.synchronize()
    if parts > 1:
        layer = Layer.of(groups=4, hidden=512, size=128 * parts, parts=parts, name="w8a16")
        layer.check(Runs.of([5, 0, 40, 1]), table)
