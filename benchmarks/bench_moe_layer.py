"""Speed of a whole MoE layer, router output to combined output, beside vLLM's expert layers.

    python benchmarks/bench_moe_layer.py [--models qwen3-235b,qwen3-30b,qwen3.5-397b] [--experts 128,32,16,8]
        [--tokens 1,…,4096] [--cases layer,move,bandwidth,launches] [--only WORD,…] [--quick] [--check] [--no-timing]

Adds to benchmarks/results/moe_layer.csv after every shape. All M tokens meet top_k of the local experts, balanced.

| case | what a call is | providers |
|---|---|---|
| `layer` | all of it, bf16 in and out | `rose`; vLLM's `marlin`, `humming_*`, and others in other formats |
| `move` | what isn't a matrix product: route + dispatch, and combine | `rose`; vLLM's permute, unpermute, moe_sum |
| `bandwidth` | dispatch alone and combine alone, at prefill sizes | `rose_dispatch`, `rose_combine` |
| `launches` | each kernel of one layer and the gap in front of it, of a replayed graph | `rose/<kernel>`, `rose/gap` |

The limit of `layer` is that of bench_gemm_grouped.py; of `move` and `bandwidth`, the bytes at the measured copy
bandwidth. A gap is the time from the end of a kernel to the beginning of the next one: negative where programmatic
dependent launch lets them overlap. `launches` fails where a decode layer is more than four launches.

Bars: `move` at most 12 µs up to M = 128; `bandwidth` at least 0.85 of copying at M >= 4096; `layer` faster than every
peer at every M.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import bench_gemm_grouped as grouped
import gemm_peers as peers
import gemm_timing as timing
import torch
from gemm_peers import MoeWeights, Routing

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.moe_combine.launch import combine_tokens
from vllm_rose_plugin.kernels.moe_dispatch import launch as dispatch
from vllm_rose_plugin.kernels.moe_dispatch.config import needs_scale_rows
from vllm_rose_plugin.kernels.moe_experts import config as experts_config
from vllm_rose_plugin.kernels.moe_experts import launch as experts
from vllm_rose_plugin.kernels.moe_experts import memory
from vllm_rose_plugin.kernels.moe_route import launch as route
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts

TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 4096)
QUICK_TOKENS = (1, 32, 128)
PREFILL = 4096
MOVE_BAR_US, MOVE_BAR_TOKENS, BANDWIDTH_BAR = 12.0, 128, 0.85
DECODE_LAUNCHES = 4
DECODE_TOKENS = 128


@dataclass(frozen=True)
class Model:
    """A model's expert layers."""

    hidden_size: int
    intermediate_size: int
    top_k: int
    local_experts: tuple[int, ...]


MODELS = {
    "qwen3-235b": Model(4096, 1536, 8, (128, 32, 16, 8)),
    "qwen3-30b": Model(2048, 768, 8, (128,)),
    "qwen3.5-397b": Model(4096, 1024, 10, (512,)),
}


class Layer:
    """Ours as vLLM's layer calls it: packed scales, one workspace, nothing allocated in a call."""

    def __init__(self, weights: MoeWeights, *, most_tokens: int):
        self.target = device_facts(torch.cuda.current_device()).target
        self.w13 = pack_weight(Mxfp8Tensor(weights.w13, weights.w13_scales), target=self.target, gate_up=True)
        self.w2 = pack_weight(Mxfp8Tensor(weights.w2, weights.w2_scales), target=self.target)
        device = weights.w13.device
        self.route_workspace = route.route_workspace(num_local_experts=weights.num_experts, device=device)
        size = memory.workspace_bytes(
            num_tokens=most_tokens,
            top_k=weights.top_k,
            num_local_experts=weights.num_experts,
            hidden_size=weights.hidden_size,
            intermediate_size=weights.intermediate_size,
            token_formats=experts_config.token_formats_of(self.target, Activation.MXFP8),
        )
        self.workspace = torch.empty(size, dtype=torch.uint8, device=device)

    def __call__(self, r: Routing, out: torch.Tensor) -> torch.Tensor:
        experts.moe_experts(
            r.x,
            topk_ids=r.topk_ids,
            topk_weights=r.topk_weights,
            w13=self.w13,
            w2=self.w2,
            out=out,
            workspace=self.workspace,
            route_workspace=self.route_workspace,
        )
        return out


class Mover:
    """Our route + dispatch and combine, without the products between them."""

    def __init__(self, model: Model, num_experts: int, num_tokens: int):
        target = device_facts(torch.cuda.current_device()).target
        shape = experts_config.LayerShape(
            target=target,
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            num_local_experts=num_experts,
            num_experts=num_experts,
            top_k=model.top_k,
            activation=Activation.MXFP8,
        )
        self.step = experts_config.step_of(shape, num_tokens)
        self.num_experts = num_experts
        self.workspace = route.route_workspace(num_local_experts=num_experts, device=torch.device("cuda"))
        routing = {"num_tokens": num_tokens, "top_k": model.top_k, "num_local_experts": num_experts}
        scale_rows = needs_scale_rows(token_format=self.step.token_format, alignment=1)
        words = torch.empty(route.routed_size(**routing), dtype=torch.int32, device="cuda")
        self.routed = route.routed_views(words, with_scale_rows=scale_rows, **routing)
        rows = {
            "num_rows": self.step.num_rows,
            "hidden_size": model.hidden_size,
            "num_local_experts": num_experts,
            "token_format": self.step.token_format,
        }
        self.tokens_bytes = dispatch.tokens_bytes(**rows)
        self.tokens = dispatch.tokens_views(torch.empty(self.tokens_bytes, dtype=torch.uint8, device="cuda"), **rows)
        self.y = torch.randn(self.step.num_rows, model.hidden_size, device="cuda").to(torch.bfloat16)
        self.out = torch.empty(num_tokens, model.hidden_size, dtype=torch.bfloat16, device="cuda")

    def scatter(self, r: Routing) -> None:
        """Route and dispatch."""
        dispatch.route_and_dispatch(
            r.x,
            r.topk_ids,
            num_local_experts=self.num_experts,
            workspace=self.workspace,
            token_format=self.step.token_format,
            routed=self.routed,
            out=self.tokens,
        )

    def dispatch(self, r: Routing) -> None:
        """Dispatch alone, behind an earlier :meth:`scatter`."""
        dispatch.dispatch_tokens(r.x, routed=self.routed, token_format=self.step.token_format, out=self.tokens)

    def combine(self, r: Routing) -> torch.Tensor:
        """The weighted sum."""
        return combine_tokens(self.y, slots=self.routed.slots, topk_weights=r.topk_weights, out=self.out)


@dataclass
class Session:
    """What a run shares."""

    table: timing.Table
    only: list[str]
    with_vllm: bool
    check: bool
    timed: bool
    faults: list[str]


# ---- the whole layer ----


def layer_case(
    session: Session, name: str, model: Model, layers: list[Layer], built: grouped.Built, num_tokens: int
) -> None:
    """All providers on one shape."""
    num_experts = built.weights[0].num_experts
    shape = f"M={num_tokens};E={num_experts};H={model.hidden_size};I={model.intermediate_size}"
    count = 8 if num_tokens <= 64 else 4 if num_tokens <= 512 else 2
    count = -(-count // len(layers)) * len(layers)
    routings = [
        peers.balanced_routing(
            num_tokens, num_experts, model.hidden_size, seed=1000 * i + num_tokens, top_k=model.top_k
        )
        for i in range(count)
    ]
    outs = [torch.empty_like(r.x) for r in routings]
    calls: dict[str, timing.Calls] = {}
    if timing.wanted("rose", session.only):
        calls["rose"] = lambda i: layers[i % len(layers)](routings[i], outs[i])
    for peer, built_layers in built.peers.items():
        calls[peer] = lambda i, c=built_layers: c[i % len(c)](routings[i])
    if session.check:
        exact = {q: grouped.exact_layer(built.weights[0], routings[0], quantized=q) for q in (True, False)}
        session.faults += [f"{name} {shape}: {fault}" for fault in grouped.check_results(calls, exact)]
    if not session.timed:
        return
    hit = sum(r.experts_hit for r in routings) / len(routings)
    flops = 2 * num_tokens * model.top_k * 3 * model.hidden_size * model.intermediate_size
    through = num_tokens * model.hidden_size * 2 * 2
    floor_us = session.table.limits.floor_us(
        read=hit * peers.expert_bytes("rose", built.weights[0]), written=through, flops=flops, fp8=True
    )
    rounds = count * max(1, 16 // count) if num_tokens <= 512 else count
    for provider, us in timing.times(calls, sets=count, calls=rounds).items():
        moved = hit * peers.expert_bytes(provider, built.weights[0]) + through
        session.table.add(
            case=f"layer {name}", provider=provider, shape=shape, us=us, moved=moved, flops=flops, floor_us=floor_us
        )
    session.table.write()


# ---- what isn't a matrix product ----


def vllm_moves(r: Routing, num_experts: int, y: torch.Tensor) -> dict[str, timing.Calls]:
    """vLLM's own permutations of bf16 tokens, and its sum over top_k. They quantize nothing and pad differently."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
    from vllm.model_executor.layers.fused_moe.moe_permute_unpermute import moe_permute, moe_unpermute

    out = torch.empty_like(r.x)
    top_k = r.topk_ids.shape[1]
    by_token = y.view(len(r.x), top_k, -1)

    def permute(i: int) -> None:
        permuted, _, offsets, inverse, *_ = moe_permute(r.x, None, r.topk_ids, num_experts)
        moe_unpermute(out, y[: permuted.shape[0]], r.topk_weights, inverse, offsets)

    def align(i: int) -> None:
        moe_align_block_size(r.topk_ids, 64, num_experts)
        ops.moe_sum(by_token, out)

    return {"vllm_permute_unpermute": permute, "vllm_align_and_sum": align}


def move_case(session: Session, name: str, model: Model, num_experts: int, num_tokens: int) -> None:
    """Route + dispatch + combine, and at prefill sizes dispatch and combine alone."""
    sets = 4 if num_tokens <= 512 else 2
    routings = [
        peers.balanced_routing(num_tokens, num_experts, model.hidden_size, seed=i, top_k=model.top_k)
        for i in range(sets)
    ]
    movers = [Mover(model, num_experts, num_tokens) for _ in range(sets)]
    for mover, r in zip(movers, routings, strict=True):
        mover.scatter(r)

    def both(i: int) -> None:
        movers[i].scatter(routings[i])
        movers[i].combine(routings[i])

    shape = f"M={num_tokens};E={num_experts};H={model.hidden_size}"
    rows = num_tokens * model.top_k
    scattered = num_tokens * model.hidden_size * 2 + movers[0].tokens_bytes
    combined = (rows + num_tokens) * model.hidden_size * 2
    copy = session.table.limits.copy * 1e3
    calls: dict[str, timing.Calls] = {"rose": both}
    if session.with_vllm:
        theirs = timing.attempt("vllm moves", lambda: vllm_moves(routings[0], num_experts, movers[0].y)) or {}
        calls |= {provider: call for provider, call in theirs.items() if timing.wanted(provider, session.only)}
    for provider, us in timing.times(calls, sets=sets, calls=4 * sets).items():
        moved = scattered + combined
        session.table.add(
            case=f"move {name}", provider=provider, shape=shape, us=us, moved=moved, flops=0, floor_us=moved / copy
        )
        if provider == "rose" and num_tokens <= MOVE_BAR_TOKENS and us > MOVE_BAR_US:
            print(f"bar: {name} {shape}: route + dispatch + combine {us:.1f} us, above {MOVE_BAR_US}", flush=True)
    session.table.write()
    if num_tokens < PREFILL:
        return
    alone: dict[str, timing.Calls] = {
        "rose_dispatch": lambda i: movers[i].dispatch(routings[i]),
        "rose_combine": lambda i: movers[i].combine(routings[i]),
    }
    for provider, us in timing.times(alone, sets=sets, calls=4 * sets).items():
        moved = scattered if provider == "rose_dispatch" else combined
        session.table.add(
            case=f"bandwidth {name}", provider=provider, shape=shape, us=us, moved=moved, flops=0, floor_us=moved / copy
        )
        if moved / copy / us < BANDWIDTH_BAR:
            print(f"bar: {name} {shape}: {provider} at {moved / copy / us:.2f} of copying", flush=True)
    session.table.write()


# ---- launches and gaps ----


def kernels_of(call, *, repeats: int = 20) -> list[list[tuple[str, float, float]]]:
    """(name, begin, end) in µs of every kernel of a call, for each of several in one replayed graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as alone:
        call()
        torch.cuda.synchronize()
    per_call = len(_device_events(alone))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            call()
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    events = _device_events(profile)
    if not per_call or len(events) != per_call * repeats:
        raise RuntimeError(f"the profiler saw {len(events)} kernels of {repeats} calls with {per_call} each")
    return [events[i : i + per_call] for i in range(0, len(events), per_call)]


def _device_events(profile: torch.profiler.profile) -> list[tuple[str, float, float]]:
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sorted(((e.name, e.time_range.start, e.time_range.end) for e in events), key=lambda e: e[1])


def describe_kernels(calls: list[list[tuple[str, float, float]]]) -> tuple[list[str], list[float], list[float]]:
    """(names, median times, median gaps in front of each) of calls that follow each other.

    The gap of a call's first kernel is that behind the call before; the first call has none.
    """
    names = [short_name(name) for name, _, _ in calls[0]]
    times, gaps = [], []
    flat = [event for call in calls for event in call]
    for k in range(len(names)):
        at = range(k, len(flat), len(names))
        times.append(statistics.median(flat[i][2] - flat[i][1] for i in at))
        gaps.append(statistics.median(flat[i][1] - flat[i - 1][2] for i in at if i))
    return names, times, gaps


def short_name(kernel: str) -> str:
    """The family in a kernel's mangled name."""
    for family in ("moe_route", "moe_dispatch", "moe_combine", "gemm"):
        if family in kernel:
            return family
    return kernel[:40]


def launches_case(session: Session, name: str, model: Model, layer: Layer, num_experts: int, num_tokens: int) -> None:
    """One layer's kernels: how many, how long, and what lies between them."""
    r = peers.balanced_routing(num_tokens, num_experts, model.hidden_size, seed=3, top_k=model.top_k)
    out = torch.empty_like(r.x)
    names, times, gaps = describe_kernels(kernels_of(lambda: layer(r, out)))
    shape = f"M={num_tokens};E={num_experts};H={model.hidden_size};I={model.intermediate_size}"
    for k, (kernel, us, gap) in enumerate(zip(names, times, gaps, strict=True)):
        print(f"launches {name} {shape}: {k + 1}. {kernel:<14} {us:8.2f} us, after a gap of {gap:6.2f} us", flush=True)
        for provider, value in ((f"rose/{k + 1}_{kernel}", us), (f"rose/{k + 1}_gap", gap)):
            session.table.add(
                case=f"launches {name}", provider=provider, shape=shape, us=value or 1e-3, moved=0, flops=0, floor_us=0
            )
    session.table.write()
    if num_tokens <= DECODE_TOKENS and len(names) > DECODE_LAUNCHES:
        session.faults.append(f"{name} {shape}: {len(names)} launches: {', '.join(names)}")


# ---- all of it ----


def build(session: Session, model: Model, num_experts: int, *, with_peers: bool) -> grouped.Built:
    """Sets of weights that are larger than L2 several times over, in every provider's format."""
    one = peers.random_experts(
        num_experts, model.hidden_size, model.intermediate_size, seed=num_experts, top_k=model.top_k
    )
    size = num_experts * peers.expert_bytes("rose", one)
    sets = timing.sets_beyond_l2(size, least=2 if size < 2 * timing.ROTATION_BYTES else 1)
    weights = [one, *(peers.copied(one) for _ in range(sets - 1))]
    built: dict[str, list[peers.MoeCall]] = {}
    for name in peers.MXFP8_EXPERTS + peers.OTHER_EXPERTS if with_peers and session.with_vllm else ():
        if not timing.wanted(name, session.only):
            continue
        begin = time.perf_counter()
        layers = timing.attempt(name, lambda name=name: [peers.build_experts(name, w) for w in weights])
        if layers:
            built[name] = layers
            print(f"built {name} for {num_experts} experts in {time.perf_counter() - begin:.1f} s", flush=True)
    return grouped.Built(weights, built)


def warm(layer: Layer, model: Model, num_experts: int, *, most_tokens: int) -> None:
    """Compile everything first, and say how long that took."""
    begin = time.perf_counter()
    experts.warm_up(
        device=torch.device("cuda", torch.cuda.current_device()),
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_local_experts=num_experts,
        num_experts=num_experts,
        top_k=model.top_k,
        max_tokens=most_tokens,
        dtype=torch.bfloat16,
        has_map=False,
        activation=Activation.MXFP8,
        rounding=Rounding.RCEIL,
    )
    print(f"compiled or loaded all kernels of {num_experts} experts in {time.perf_counter() - begin:.1f} s", flush=True)


def run(session: Session, arguments: argparse.Namespace, name: str, begin: float) -> None:
    """All shapes of one model."""
    model = MODELS[name]
    tokens = arguments.tokens or (QUICK_TOKENS if arguments.quick else TOKENS)
    cases = arguments.cases.split(",")
    for num_experts in arguments.experts or model.local_experts:
        if time.perf_counter() - begin > arguments.deadline:
            print(f"deadline: {name} E={num_experts} was not measured", flush=True)
            continue
        built = build(session, model, num_experts, with_peers="layer" in cases)
        layers = [Layer(w, most_tokens=max(tokens)) for w in built.weights]
        warm(layers[0], model, num_experts, most_tokens=max(tokens))
        for num_tokens in tokens:
            if time.perf_counter() - begin > arguments.deadline:
                print(f"deadline: {name} E={num_experts} M={num_tokens} and what follows was not measured", flush=True)
                break
            if "layer" in cases:
                layer_case(session, name, model, layers, built, num_tokens)
            if session.timed and ("move" in cases or "bandwidth" in cases):
                move_case(session, name, model, num_experts, num_tokens)
            if session.timed and "launches" in cases:
                launches_case(session, name, model, layers[0], num_experts, num_tokens)
        del built, layers
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="qwen3-235b", help=f"separated by commas; {', '.join(MODELS)}")
    parser.add_argument("--experts", type=grouped.numbers, help="local experts, separated by commas")
    parser.add_argument("--tokens", type=grouped.numbers, help="M, separated by commas")
    parser.add_argument("--cases", default="layer,move,launches", help="separated by commas; see above")
    parser.add_argument("--only", default="", help="providers whose names hold one of these words")
    parser.add_argument("--quick", action="store_true", help="few shapes, quick limits")
    parser.add_argument("--check", action="store_true", help="compare every provider with float64 first")
    parser.add_argument("--no-timing", action="store_true", help="stop after the check")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which no further shape begins")
    parser.add_argument("--out", type=Path, help="the CSV file, benchmarks/results/moe_layer.csv by default")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    limits = timing.measure_limits(quick=arguments.quick)
    print(f"limits: {limits}", flush=True)
    table = timing.Table("moe_layer", limits, path=arguments.out)
    only = [word for word in arguments.only.split(",") if word]
    with peers.vllm_session() as with_vllm:
        session = Session(table, only, with_vllm, arguments.check, not arguments.no_timing, [])
        for name in arguments.models.split(","):
            run(session, arguments, name, begin)
    for line in timing.verdicts(table):
        print(line)
    print(f"took {time.perf_counter() - begin:.1f} s")
    if session.faults:
        raise SystemExit("check failed:\n" + "\n".join(session.faults))


if __name__ == "__main__":
    main()
