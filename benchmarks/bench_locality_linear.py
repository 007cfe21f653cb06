"""A linear layer's weight in parts, one in each locality domain: one launch on all parts beside the plain kernel.

    python benchmarks/bench_locality_linear.py [--layers NAME,…] [--tokens 1,…,1024] [--deadline S] [--quick]
        [--no-timing] [--out FILE]

Adds to benchmarks/results/locality_linear.csv after every shape. Layers are qkv and o_proj of Qwen3-235B, whole and of
TP4; T bf16 tokens are quantized in the call, as the linear backend does it.

| provider | what a call is |
|---|---|
| `rose` | the whole weight's kernel, which may share K among blocks |
| `rose_single_launch` | the weight in parts, in one launch; tiles from the domains' queues |

On a GPU of one domain the domains are forced: equal shares of the SMs, memory anywhere. So nothing can be gained there,
and what is measured is the cost. On a Rubin it is the same command. Each result is checked against the reference first,
row by row and column by column. `--no-timing` compiles all kernels and stops, with no GPU too.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import gemm_peers as peers
import gemm_timing as timing
import torch
from bench_gemm_dense import LAYERS
from bench_gemm_grouped import numbers
from bench_locality import DOMAINS, QUICK_TOKENS, SINGLE, TOKENS, summary

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding
from vllm_rose_plugin.kernels.gemm import launch, reference
from vllm_rose_plugin.kernels.gemm.column_split import plan_split
from vllm_rose_plugin.kernels.gemm.domains import linear_domains, prepare_domains
from vllm_rose_plugin.kernels.gemm.family import LinearShape, compare, plan_of
from vllm_rose_plugin.kernels.gemm.one_run import prepare_device
from vllm_rose_plugin.kernels.gemm.plan import build_of
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight, pack_weight
from vllm_rose_plugin.kernels.jit.parallel import Wanted, compile_ahead
from vllm_rose_plugin.kernels.linear_split.compare import place_parts
from vllm_rose_plugin.kernels.moe_experts.make_ways import SINGLE_LAUNCH, Domains
from vllm_rose_plugin.kernels.moe_experts.ways import OneLaunch
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8
from vllm_rose_plugin.memory.domain_memory import DomainMemory
from vllm_rose_plugin.memory.driver import Driver
from vllm_rose_plugin.memory.locality import look_at_locality


def shape_of(name: str, tokens: int) -> LinearShape:
    """The layer's call."""
    n, k = LAYERS[name]
    return LinearShape(tokens, n, k, "bfloat16", False, Activation.MXFP8, Rounding.RCEIL, False)


def compile_all(names: list[str], tokens: list[int], *, target: str, sm_count: int, parts: int) -> int:
    """All GEMMs onto the disk; gives their number."""
    configs = {
        plan_of(shape_of(name, count), target, sm_count, domains=domains).config
        for name in names
        for count in tokens
        for domains in (1, parts)
    }
    compile_ahead([Wanted("gemm", config, build_of(config), target) for config in configs])
    return len(configs)


class Layer:
    """Sets of one layer's weights, whole and in parts, more than the L2 cache holds."""

    def __init__(self, name: str, domains: Domains, sm_domains: torch.Tensor):
        self.name, (self.n, self.k), self.sm_domains = name, LAYERS[name], sm_domains
        target = device_facts(torch.cuda.current_device()).target
        split = plan_split(n=self.n, parts=domains.count, target=target, name=name)
        if split.parts == 1:
            raise SystemExit(split.reason)
        self.weights: list[Mxfp8Tensor] = []
        self.whole: list[PackedWeight] = []
        self.parts: list[list[PackedWeight]] = []
        self.memories: list[DomainMemory] = []
        generator = torch.Generator("cuda").manual_seed(self.n)
        for _ in range(timing.sets_beyond_l2(self.n * self.k, least=2)):
            plain = torch.randn(self.n, self.k, generator=generator, device="cuda", dtype=torch.float32) * 0.02
            weight = Mxfp8Tensor(*quantize_mxfp8(plain.to(torch.bfloat16)))
            packed = pack_weight(weight, target=target)
            memory, parts = place_parts(split, packed, domains.allocate)
            self.weights.append(weight)
            self.whole.append(packed)
            self.parts.append(parts)
            self.memories.append(memory)

    def calls(self, inputs: list[torch.Tensor]) -> dict[str, Callable[[int], torch.Tensor]]:
        """By provider."""
        return {
            "rose": lambda i: launch.linear(inputs[i], self.whole[i]),
            SINGLE: lambda i: linear_domains(inputs[i], self.parts[i], sm_domains=self.sm_domains),
        }

    def free(self) -> None:
        """Give the parts' memory back."""
        torch.cuda.synchronize()
        self.parts.clear()
        for memory in self.memories:
            memory.free()


def measure(table: timing.Table, layer: Layer, tokens: int) -> tuple[dict[str, float], list[str]]:
    """A row for each provider; (share of the plain kernel's time by provider, what is wrong)."""
    sets = len(layer.weights)
    inputs = [torch.randn(tokens, layer.k, device="cuda").to(torch.bfloat16) for _ in range(sets)]
    calls, name = layer.calls(inputs), f"{layer.name} T={tokens}"
    expected = reference.mxfp8_linear(inputs[0], layer.weights[0])
    faults = [f"{name}: {each}: {fault}" for each, call in calls.items() if (fault := compare(call(0), expected))]
    flops, through = 2 * tokens * layer.n * layer.k, tokens * (layer.k + layer.n) * 2
    read = peers.linear_bytes("rose", layer.n, layer.k)
    floor = table.limits.floor_us(read=read, written=through, flops=flops, fp8=True)
    found = timing.times(calls, sets=sets, calls=-(-32 // sets) * sets)
    shape = f"M={tokens};N={layer.n};K={layer.k}"
    for provider, us in found.items():
        moved = read + through
        table.add(case=layer.name, provider=provider, shape=shape, us=us, moved=moved, flops=flops, floor_us=floor)
    table.write()
    plain = found.pop("rose", None)
    if plain is None:
        return {}, faults
    for provider, us in found.items():
        print(f"{name:<20} {provider:<20} {us - plain:+7.2f} us, {us / plain:.4f} of {plain:.1f} us", flush=True)
    return {provider: us / plain for provider, us in found.items()}, faults


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default=",".join(LAYERS), help="some of " + ", ".join(LAYERS))
    parser.add_argument("--tokens", type=numbers, help="T, separated by commas")
    parser.add_argument("--quick", action="store_true", help="few tokens, quick limits")
    parser.add_argument("--no-timing", action="store_true", help="compile all kernels, then stop")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which no further shape begins")
    parser.add_argument("--out", type=Path, help="the CSV file, benchmarks/results/locality_linear.csv by default")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    names = arguments.layers.split(",")
    if unknown := [name for name in names if name not in LAYERS]:
        parser.error(f"--layers: {unknown[0]} is none of {', '.join(LAYERS)}")
    tokens = arguments.tokens or list(QUICK_TOKENS if arguments.quick else TOKENS)
    if not torch.cuda.is_available():
        if not arguments.no_timing:
            raise SystemExit("no GPU: --no-timing compiles for an H200")
        print(f"{compile_all(names, tokens, target='sm_90a', sm_count=132, parts=DOMAINS)} kernels")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    facts = device_facts(device.index)
    torch.zeros(1, device=device)  # the primary context
    driver = Driver(device=device.index)
    locality = look_at_locality(driver)
    forced = bool(locality.reason)
    domains = Domains(driver, DOMAINS if forced else locality.domains, forced)
    print(f"{domains.count} domains{f', forced: {locality.reason}' if forced else ''}", flush=True)
    made = compile_all(names, tokens, target=facts.target, sm_count=facts.sm_count, parts=domains.count)
    print(f"{made} kernels in {time.perf_counter() - begin:.1f} s", flush=True)
    if arguments.no_timing:
        return
    way = domains.way(SINGLE_LAUNCH)
    assert isinstance(way, OneLaunch)
    prepare_device(device, max_rows=max(tokens))
    prepare_domains(device)
    limits = timing.measure_limits(quick=arguments.quick)
    print(f"limits: {limits}", flush=True)
    table = timing.Table("locality_linear", limits, path=arguments.out)
    shares: dict[str, dict[str, float]] = {}
    faults: list[str] = []
    for name in names:
        layer = Layer(name, domains, way.sm_domains)
        for count in tokens:
            if time.perf_counter() - begin > arguments.deadline:
                print(f"deadline: {name} T={count} and what follows was not measured", flush=True)
                break
            shares[f"{name} T={count}"], found = measure(table, layer, count)
            faults += found
        layer.free()
        torch.cuda.empty_cache()
    for line in summary(shares):
        print(line)
    print(f"took {time.perf_counter() - begin:.1f} s")
    if faults:
        raise SystemExit("check failed:\n" + "\n".join(faults))


if __name__ == "__main__":
    main()
