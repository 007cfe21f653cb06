"""Experts' weights in parts, one in each locality domain: what each way to launch them costs beside the plain kernel.

    python benchmarks/bench_locality.py [--tokens 1,…,1024] [--only WORD,…] [--deadline S] [--quick] [--no-timing]
        [--out FILE]

Adds to benchmarks/results/locality.csv after every shape. Shapes are those of model_locality.py: Qwen3-235B and a
MiniMax-like layer with TP2, TP4, EP2 and EP4; T tokens of which every one meets 8 experts, T * 8 / EP of these meetings
on this rank. A call is w13 with SwiGLU and then w2, on tokens that are routed and quantized.

| provider | what a call is |
|---|---|
| `rose` | the plain kernels on whole weights: two launches |
| `rose_single_launch` | weights in parts, a launch for each product; tiles from the domains' queues |
| `rose_forked` | weights in parts, a launch for each part on its own SMs, one fork and one join for both products |

The case `fork_join` times what the third has beside kernels: rounds of one tiny kernel on each stream, less the same
kernels in a row (`rose_tiny` and `rose_forked_tiny`: microseconds of a round).

On a GPU of one domain the domains are forced: equal shares of the SMs, memory anywhere. So nothing can be gained there,
and what is measured is the cost. The case `fc1_fc2` has the layout of the published figure, microseconds of both
products for each strategy, with default and backfill mode: on a GPU of one domain its rows say that it wasn't measured.
There, on a Rubin, it is the same command. Pictures of the table are drawn at the end (plot_locality.py).

`--only` filters shapes by parts of their names (`Qwen3-235B TP2 T=16`), `--no-timing` compiles all kernels and stops,
with no GPU too. Every way's result is compared with the plain kernels', bit for bit, before it's timed.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gemm_timing as timing
import plot_locality
import torch
from model_locality import MODELS, STRATEGIES, Model

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding
from vllm_rose_plugin.kernels.gemm import launch
from vllm_rose_plugin.kernels.gemm.call import Call
from vllm_rose_plugin.kernels.gemm.column_split import plan_split, split_packed
from vllm_rose_plugin.kernels.gemm.config import Epilogue
from vllm_rose_plugin.kernels.gemm.plan import build_of, config_of, token_format_of
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight, pack_weight
from vllm_rose_plugin.kernels.jit.parallel import Wanted, compile_ahead
from vllm_rose_plugin.kernels.moe_experts.make_ways import BACKFILL, DEFAULT, SINGLE_LAUNCH, Domains
from vllm_rose_plugin.kernels.moe_experts.ways import Way, products
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts
from vllm_rose_plugin.memory.domain_memory import DomainMemory
from vllm_rose_plugin.memory.driver import Driver
from vllm_rose_plugin.memory.locality import look_at_locality

TOKENS = (1, 4, 16, 64, 256, 1024)
QUICK_TOKENS = (1, 64)
DOMAINS = 2
BF16 = torch.bfloat16
SINGLE, FORKED = "rose_single_launch", "rose_forked"


@dataclass(frozen=True)
class Shape:
    """One rank's part of a layer."""

    model: Model
    strategy: str
    tp: int
    ep: int
    tokens: int

    @property
    def name(self) -> str:
        """For --only, and for people."""
        return f"{self.model.name} {self.strategy} T={self.tokens}"

    @property
    def groups(self) -> int:
        """Experts here."""
        return self.model.num_experts // self.ep

    @property
    def size(self) -> int:
        """Intermediate size here."""
        return self.model.intermediate_size // self.tp

    @property
    def rows(self) -> int:
        """Meetings of a token and an expert here."""
        return self.tokens * self.model.top_k // self.ep

    @property
    def text(self) -> str:
        """For the file."""
        return f"T={self.tokens};E={self.groups};H={self.model.hidden_size};I={self.size}"

    def calls(self, target: str, sm_count: int) -> list[Call]:
        """Of the plain kernels."""
        token_format = token_format_of(
            target=target, activation=Activation.MXFP8, num_groups=self.groups, num_rows=self.rows
        )
        common = dict(target=target, sm_count=sm_count, num_groups=self.groups, token_format=token_format)
        hidden = self.model.hidden_size
        w13 = Call(**common, n=2 * self.size, k=hidden, epilogue=Epilogue.SWIGLU, out_format=token_format)
        return [w13, Call(**common, n=hidden, k=self.size, early_counts=True)]


def shapes(tokens: list[int], only: list[str]) -> Iterator[Shape]:
    """Those of all models and strategies, weights in common next to each other."""
    for model in MODELS:
        for strategy, tp, ep in STRATEGIES:
            for count in tokens:
                shape = Shape(model, strategy, tp, ep, count)
                if timing.wanted(shape.name, only):
                    yield shape


def wanted_kernels(shape: Shape, *, target: str, sm_count: int, parts: int, partition: int) -> Iterator[Wanted]:
    """The GEMMs of all ways.

    Args:
        parts: domains.
        partition: SMs of a partition.
    """
    for call in shape.calls(target, sm_count):
        split = plan_split(n=call.n, parts=parts, target=target, gate_up=call.epilogue is Epilogue.SWIGLU)
        wanted = [call]
        if split.parts > 1:
            wanted += [replace(call, domains=parts), call.part(n=split.part_n, sm_count=partition)]
        for each in wanted:
            config = config_of(each, shape.rows)
            yield Wanted("gemm", config, build_of(config), target)


def counts_of(shape: Shape, seed: int) -> torch.Tensor:
    """int32 [G] on the CPU: tokens of each expert; a token's experts differ."""
    generator = torch.Generator().manual_seed(seed)
    each = max(1, shape.model.top_k // shape.ep)
    drawn = [torch.randperm(shape.groups, generator=generator)[:each] for _ in range(-(-shape.rows // each))]
    return torch.bincount(torch.cat(drawn)[: shape.rows], minlength=shape.groups).int()


@dataclass(frozen=True)
class Inputs:
    """Routed and quantized tokens, and where results go."""

    tokens: PackedTokens
    offsets: torch.Tensor
    counts: torch.Tensor
    hit: int
    """Experts that have tokens."""

    @classmethod
    def of(cls, shape: Shape, seed: int) -> "Inputs":
        """Other experts for every seed."""
        counts = counts_of(shape, seed)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        x = torch.randn(shape.rows, shape.model.hidden_size, device="cuda", dtype=torch.float32).to(BF16)
        facts = device_facts(torch.cuda.current_device())
        token_format = shape.calls(facts.target, facts.sm_count)[0].token_format
        tokens = launch.quantize_tokens(x, token_format=token_format)
        return cls(tokens, offsets.cuda(), counts.cuda(), int((counts > 0).sum()))


@dataclass(frozen=True)
class Weights:
    """Whole, and in parts; w13 or w2 that isn't split is its only part."""

    w13: PackedWeight
    w2: PackedWeight
    w13_parts: list[PackedWeight]
    w2_parts: list[PackedWeight]
    kept: list[DomainMemory]
    """Memory of the parts."""

    def free(self) -> None:
        """Give the parts' memory back; nothing may use it any more."""
        self.w13_parts.clear()
        self.w2_parts.clear()
        gc.collect()
        for memory in self.kept:
            memory.free()

    @property
    def is_split(self) -> bool:
        """Either of them."""
        return max(len(self.w13_parts), len(self.w2_parts)) > 1


def make_weights(shape: Shape, domains: Domains) -> Weights:
    """Random ones."""
    import gemm_peers as peers

    target = device_facts(torch.cuda.current_device()).target
    made = peers.random_experts(shape.groups, shape.model.hidden_size, shape.size, seed=shape.groups)
    w13 = pack_weight(Mxfp8Tensor(made.w13, made.w13_scales), target=target, gate_up=True)
    w2 = pack_weight(Mxfp8Tensor(made.w2, made.w2_scales), target=target)
    kept: list[DomainMemory] = []
    return Weights(w13, w2, parts_of(w13, domains, kept), parts_of(w2, domains, kept), kept)


def parts_of(weight: PackedWeight, domains: Domains, kept: list[DomainMemory]) -> list[PackedWeight]:
    """A weight's parts in their domains' memory, which `kept` holds on to."""
    split = plan_split(n=weight.n, parts=domains.count, target=weight.target, gate_up=weight.gate_up)
    if split.parts == 1:
        print(split.reason, flush=True)
        return [weight]
    if domains.forced:
        return split_packed(split, weight, lambda part, shape, dtype: torch.empty(shape, dtype=dtype, device="cuda"))
    codes, scales = (tensor.numel() // split.parts + 4096 for tensor in (weight.codes, weight.scales))
    memory = domains.allocate([codes + scales] * split.parts)
    kept.append(memory)
    used = [0] * split.parts

    def make(part: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = memory.tensor(part, shape=shape, dtype=dtype, offset=used[part])
        used[part] += -(-made.numel() * made.element_size() // 256) * 256
        return made

    return split_packed(split, weight, make)


class Layer:
    """One shape's calls in every way, each with its own results."""

    def __init__(self, shape: Shape, weights: Weights, ways: dict[str, Way], *, sets: int):
        self.shape, self.weights, self.ways = shape, weights, ways
        self.inputs = [Inputs.of(shape, seed=1000 * i + shape.tokens) for i in range(sets)]
        first = self.inputs[0].tokens
        names = ["rose", *ways]
        self.middles = {name: launch.empty_tokens(first, weights.w13, first.token_format) for name in names}
        self.outs = {name: torch.empty(shape.rows, weights.w2.n, dtype=BF16, device="cuda") for name in names}

    def run(self, name: str, i: int) -> torch.Tensor:
        """Both products."""
        x, way, weights = self.inputs[i], self.ways.get(name), self.weights
        runs = {"expert_offsets": x.offsets, "expert_counts": x.counts}
        middle, out = self.middles[name], self.outs[name]
        if way is not None:
            products(
                x.tokens, weights.w13_parts, weights.w2_parts, way=way, intermediate=middle, out=out,
                activation=Activation.MXFP8, rounding=Rounding.RCEIL, expected_rows=self.shape.rows, **runs,
            )  # fmt: skip
            return out
        launch.grouped_gemm_swiglu(x.tokens, weights.w13, out=middle, expected_rows=self.shape.rows, **runs)
        return launch.grouped_gemm(
            middle, weights.w2, out_dtype=BF16, out=out, expected_rows=self.shape.rows, early_counts=True, **runs
        )

    def calls(self) -> dict[str, Callable[[int], torch.Tensor]]:
        """Of every way that works."""
        return {name: lambda i, name=name: self.run(name, i) for name in self.outs}

    def faults(self) -> list[str]:
        """Ways whose result isn't the plain kernels', bit for bit."""
        found = []
        for i in range(min(2, len(self.inputs))):
            expected = self.run("rose", i).clone()
            for name in self.ways:
                self.outs[name].fill_(float("nan"))
                result = timing.attempt(name, lambda name=name, i=i: self.run(name, i))
                if result is None:
                    found.append(f"{self.shape.name}: {name} failed")
                elif not torch.equal(result.view(torch.int16), expected.view(torch.int16)):
                    found.append(f"{self.shape.name}: {name} has other bits than the plain kernels")
        return found


def measure(table: timing.Table, layer: Layer, case: str) -> dict[str, float]:
    """A row for each way; gives each way's time as a share of the plain kernels'."""
    shape, sets = layer.shape, len(layer.inputs)
    expert = 3 * shape.model.hidden_size * shape.size
    hit = sum(each.hit for each in layer.inputs) / sets
    read, through = hit * expert * timing.FP8_BLOCK_BYTES, shape.rows * shape.model.hidden_size * 3
    flops = 2 * shape.rows * expert
    floor = table.limits.floor_us(read=read, written=through, flops=flops, fp8=True)
    found = timing.times(layer.calls(), sets=sets, calls=max(sets, 16))
    for name, us in found.items():
        table.add(case=case, provider=name, shape=shape.text, us=us, moved=read + through, flops=flops, floor_us=floor)
    table.write()
    plain = found.pop("rose", None)
    if plain is None:
        return {}
    for name, us in found.items():
        print(f"{shape.name:<28} {name:<20} {us - plain:+7.2f} us, {us / plain:.4f} of plain", flush=True)
    return {name: us / plain for name, us in found.items()}


def summary(shares: dict[str, dict[str, float]]) -> Iterator[str]:
    """For each way: mean and extremes of its shares of the plain kernels' time.

    Args:
        shares: by shape, by way.
    """
    for name in dict.fromkeys(name for found in shares.values() for name in found):
        of = {shape: found[name] for shape, found in shares.items() if name in found}
        best, worst = min(of, key=of.__getitem__), max(of, key=of.__getitem__)
        yield (
            f"{name}: mean {sum(of.values()) / len(of):.4f} of plain over {len(of)} shapes, "
            f"best {of[best]:.4f} ({best}), worst {of[worst]:.4f} ({worst})"
        )


def measure_fork_join(table: timing.Table, way: Any) -> None:
    """What forking and joining costs beside kernels: rounds of one tiny kernel for each stream."""
    tiny = torch.zeros(len(way.streams.streams), 32, device="cuda")

    def in_a_row(i: int) -> None:
        for row in tiny:
            row.add_(1)

    def forked(i: int) -> None:
        way.streams.run([lambda row=row: row.add_(1) for row in tiny])

    found = timing.times({"rose_tiny": in_a_row, "rose_forked_tiny": forked}, sets=1, calls=64)
    for name, us in found.items():
        table.add(
            case="fork_join", provider=name, shape=f"ranks={len(tiny)}", us=us, moved=0.0, flops=0.0, floor_us=0.0
        )
    table.write()


def not_measured(table: timing.Table, chosen: list[Shape], reason: str) -> None:
    """Rows of the published figure's layout, for a GPU that has domains."""
    for shape in chosen:
        for mode in (DEFAULT, BACKFILL, SINGLE_LAUNCH):
            table.add_unmeasured(case=figure_case(shape), provider=f"rose_{mode}", shape=shape.text, why=reason)
    table.write()


def figure_case(shape: Shape) -> str:
    """Of a bar in the figure's layout."""
    return f"fc1_fc2 {shape.model.name} {shape.strategy}"


def compile_all(chosen: list[Shape], *, target: str, sm_count: int, parts: int, partition: int) -> None:
    """All kernels onto the disk."""
    begin = time.perf_counter()
    wanted = [
        each
        for shape in chosen
        for each in wanted_kernels(shape, target=target, sm_count=sm_count, parts=parts, partition=partition)
    ]
    kernels = list(dict.fromkeys(wanted))
    compile_ahead(kernels)
    print(f"{len(kernels)} kernels for {len(chosen)} shapes in {time.perf_counter() - begin:.1f} s", flush=True)


def numbers(text: str) -> list[int]:
    """Of a comma-separated list."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=numbers, help="T, separated by commas")
    parser.add_argument("--only", default="", help="shapes whose names hold one of these words, separated by commas")
    parser.add_argument("--quick", action="store_true", help="few tokens, quick limits")
    parser.add_argument("--no-timing", action="store_true", help="compile all kernels, then stop")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which no further shape begins")
    parser.add_argument("--out", type=Path, help="the CSV file, benchmarks/results/locality.csv by default")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    tokens = arguments.tokens or list(QUICK_TOKENS if arguments.quick else TOKENS)
    chosen = list(shapes(tokens, [word for word in arguments.only.split(",") if word]))
    if not torch.cuda.is_available():
        if not arguments.no_timing:
            raise SystemExit("no GPU: --no-timing compiles for an H200")
        compile_all(chosen, target="sm_90a", sm_count=132, parts=DOMAINS, partition=64)
        return
    facts = device_facts(torch.cuda.current_device())
    torch.zeros(1, device="cuda")  # the primary context, which green contexts retain
    driver = Driver(device=torch.cuda.current_device())
    locality = look_at_locality(driver)
    forced = bool(locality.reason)
    domains = Domains(driver, DOMAINS if forced else locality.domains, forced)
    names = {SINGLE: SINGLE_LAUNCH, FORKED: DEFAULT}
    if not forced:
        names = {f"rose_{mode}": mode for mode in (DEFAULT, BACKFILL, SINGLE_LAUNCH)}
    ways = {name: domains.way(way) for name, way in names.items()}
    partition = min(min(way.sm_counts) for way in ways.values() if hasattr(way, "sm_counts"))
    print(f"{domains.count} domains{f', forced: {locality.reason}' if forced else ''}", flush=True)
    compile_all(chosen, target=facts.target, sm_count=facts.sm_count, parts=domains.count, partition=partition)
    if arguments.no_timing:
        return
    limits = timing.measure_limits(quick=arguments.quick)
    print(f"limits: {limits}", flush=True)
    table = timing.Table("locality", limits, path=arguments.out)
    if forced:
        not_measured(table, chosen, locality.reason)
    measure_fork_join(table, ways[FORKED if forced else f"rose_{DEFAULT}"])
    faults: list[str] = []
    shares: dict[str, dict[str, float]] = {}
    built: tuple[Any, Weights | None] = (None, None)
    layer: Layer | None = None
    for shape in chosen:
        if time.perf_counter() - begin > arguments.deadline:
            print(f"deadline: {shape.name} and what follows was not measured", flush=True)
            break
        key = (shape.model, shape.strategy)
        if built[0] != key:
            if built[1] is not None:
                layer = None
                built[1].free()
            built = (None, None)
            torch.cuda.empty_cache()
            built = (key, make_weights(shape, domains))
        weights = built[1]
        assert weights is not None
        if not weights.is_split:
            print(f"{shape.name}: nothing is split", flush=True)
            continue
        layer = Layer(shape, weights, ways, sets=8 if shape.tokens <= 64 else 4)
        faults += layer.faults()
        case = f"moe {shape.model.name} {shape.strategy}" if forced else figure_case(shape)
        shares[shape.name] = measure(table, layer, case)
    for line in summary(shares):
        print(line)
    print(*plot_locality.draw(table.path), sep="\n")
    print(f"took {time.perf_counter() - begin:.1f} s")
    if faults:
        raise SystemExit("check failed:\n" + "\n".join(faults))


if __name__ == "__main__":
    main()
