"""Speed of the grouped MXFP8 GEMM: w13 with SwiGLU, then w2, over local experts, beside vLLM's expert layers.

    python benchmarks/bench_gemm_grouped.py [--experts 8,16,32,128] [--tokens 1,…,4096] [--only WORD,…] [--quick]
        [--check] [--no-timing] [--cases moe,parts] [--routing balanced,random,skewed] [--profile E,M] [--compile]

Adds to benchmarks/results/gemm_grouped.csv after every shape. Shapes are those of Qwen3-235B: H = 4096, I = 1536, M
tokens of which every one meets 8 of the local experts. Which ones is `--routing`: `balanced`, all experts get as many
tokens; `random`, every token draws its own, all alike; `skewed`, the expert of rank r in proportion to r**-0.6, so that
the most popular of 128 gets seven times the mean.

| provider | what a call is |
|---|---|
| `rose` | the two launches w13 + SwiGLU + quantization, then w2, on tokens that are routed and quantized |
| `rose_quantize` | the same with the quantization of the routed tokens before it, three launches |
| `rose_w8a8`, `rose_w8a16` | `rose` with the main loop that the heuristic doesn't take |
| `marlin`, `humming_*` | vLLM's MXFP8 experts from bf16 to bf16, with routing and weighted sum |
| `bf16_triton`, `fp8_*` | the same of weights in other formats: what giving up MXFP8 would bring |

The limit of a shape is the larger of two times: weights of the experts that get tokens, read at the measured read
bandwidth, with tokens and results at copy bandwidth; or the operations at the measured FP8 rate. The case `parts` times
w13 and w2 alone.

Runs of at most 150 s: `--experts 16 --tokens 1,16,64`, `--experts 16 --tokens 256,4096 --only rose,marlin` and so on
(peers compile on first use: humming takes 15-30 s a shape). Rows of earlier runs stay in the file. `--only` filters
providers by parts of their names. Our kernels are compiled beside each other first, with `--compile` nothing else
happens: no GPU is needed, and a compile cache can be brought along.

What bounds a kernel (decode, 16 tokens an expert, and prefill):

    ncu --profile-from-start off --clock-control none --set full -o gemm_grouped \
        python benchmarks/bench_gemm_grouped.py --profile 16,32
    ncu --import gemm_grouped.ncu-rep --page details --print-summary per-kernel
"""

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import gemm_peers as peers
import gemm_timing as timing
import torch
from gemm_peers import MoeWeights, Routing

from vllm_rose_plugin.kernels.contracts import TokenFormat
from vllm_rose_plugin.kernels.gemm.call import Call
from vllm_rose_plugin.kernels.gemm.config import Epilogue, GemmConfig
from vllm_rose_plugin.kernels.gemm.config_sm100 import Sm100Config
from vllm_rose_plugin.kernels.gemm.plan import build_of, config_of
from vllm_rose_plugin.kernels.jit.parallel import Wanted, compile_ahead
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts

TARGET, SM_COUNT = "sm_90a", 132
"""Of --compile."""
HIDDEN_SIZE, INTERMEDIATE_SIZE = 4096, 1536
EXPERTS = (8, 16, 32, 128)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 4096)
QUICK_EXPERTS, QUICK_TOKENS = (16,), (1, 16, 64, 256)
ROSE = ("rose", "rose_quantize", "rose_w8a8", "rose_w8a16")
SKEWS = {"random": 0.0, "skewed": 0.6}
ROUTINGS = ("balanced", *SKEWS)


@dataclass(frozen=True)
class Routed:
    """Tokens in one run per expert."""

    rows: torch.Tensor  # [M * 8, H] bf16
    counts: torch.Tensor  # [E] int32
    offsets: torch.Tensor  # [E + 1] int32
    place: torch.Tensor  # [M, 8]: the row of (token, k)


def routed(routing: Routing, num_experts: int) -> Routed:
    """Sorts tokens by expert, as a dispatch would."""
    ids = routing.topk_ids.flatten().long()
    order = ids.argsort(stable=True)
    counts = torch.bincount(ids, minlength=num_experts)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    rows = routing.x[order // peers.TOP_K].contiguous()
    return Routed(rows, counts.int(), offsets.int(), place.view_as(routing.topk_ids))


def combined(out: torch.Tensor, r: Routed, routing: Routing) -> torch.Tensor:
    """fp32 [M, H]: the weighted sum of a token's 8 results."""
    return (out.float()[r.place] * routing.topk_weights.unsqueeze(-1)).sum(1)


def exact_layer(weights: MoeWeights, routing: Routing, *, quantized: bool) -> torch.Tensor:
    """float64 [M, H] of the whole layer; `quantized`: tokens and SwiGLU's results pass through MXFP8."""
    from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8, quantize_mxfp8

    def through(x: torch.Tensor) -> torch.Tensor:
        return dequantize_mxfp8(*quantize_mxfp8(x.float())).double() if quantized else x.double()

    out = torch.zeros(routing.x.shape, dtype=torch.float64, device=routing.x.device)
    for expert in range(weights.num_experts):
        token, k = (routing.topk_ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        w13 = dequantize_mxfp8(weights.w13[expert], weights.w13_scales[expert]).double()
        w2 = dequantize_mxfp8(weights.w2[expert], weights.w2_scales[expert]).double()
        gate, up = (through(routing.x[token]) @ w13.T).chunk(2, -1)
        y = through(torch.nn.functional.silu(gate) * up) @ w2.T
        out.index_add_(0, token, y * routing.topk_weights[token, k].unsqueeze(-1).double())
    return out


def deviation(out: torch.Tensor, exact: torch.Tensor) -> float:
    """‖out - exact‖ / ‖exact‖; NaN counts as infinitely far."""
    error = ((out.double() - exact).norm() / exact.norm()).item()
    return error if error == error else float("inf")


def tolerance(provider: str) -> float:
    """How far a provider may be from the float64 layer on the operands that it multiplies.

    Ours against the layer with the same quantization: some SwiGLU results fall on the other side of a rounding
    boundary. Peers against the layer without quantized activations: W8A16 rounds to bf16 only, FP8 activations and
    requantized weights cost a few percent.
    """
    if provider.startswith("rose"):
        return 0.015
    return 0.01 if provider.startswith(("marlin", "humming", "bf16")) else 0.08


def check_outputs(provider: str, out: torch.Tensor, exact: torch.Tensor) -> str | None:
    """None, or what is wrong."""
    error = deviation(out, exact)
    print(f"check: {provider:<22} {error:.2e} from float64 (allowed {tolerance(provider):.0e})", flush=True)
    return None if error <= tolerance(provider) else f"{provider} is {error:.2e} from float64"


# ---- cases ----


@dataclass
class Session:
    """What a run shares."""

    table: timing.Table
    only: list[str]
    with_vllm: bool
    check: bool
    timed: bool
    faults: list[str]
    """Of ours; a peer that is off is only printed."""


def our_calls(weight_sets: list[MoeWeights], inputs: list[Routed], only: list[str]) -> dict[str, timing.Calls]:
    """Ours by provider's name; a call returns w2's result, one row for each row of the runs."""
    import gemm_ours as ours

    num_rows, num_experts = inputs[0].rows.shape[0], weight_sets[0].num_experts
    chosen = ours.choose_format(num_experts, num_rows)
    layers = [ours.Experts(w) for w in weight_sets]
    outs = [torch.empty(num_rows, HIDDEN_SIZE, dtype=torch.bfloat16, device="cuda") for _ in inputs]
    found: dict[str, timing.Calls] = {}
    for name in ROSE:
        if not timing.wanted(name, only):
            continue
        token_format = {"rose_w8a8": ours.W8A8, "rose_w8a16": ours.W8A16}.get(name, chosen)
        if name in ("rose_w8a8", "rose_w8a16") and (token_format == chosen or not ours.on_hopper()):
            continue

        def prepare(name: str = name, token_format=token_format) -> timing.Calls:
            tokens = [ours.quantize(r.rows, token_format) for r in inputs]

            def layer(i: int) -> torch.Tensor:
                r = inputs[i]
                packed = ours.quantize(r.rows, token_format) if name == "rose_quantize" else tokens[i]
                return layers[i % len(layers)].run(packed, r.offsets, r.counts, outs[i])

            layer(0)
            return layer

        call = timing.attempt(name, prepare)
        if call is not None:
            found[name] = call
    return found


def calls(
    num_experts: int, token_format: TokenFormat, *, target: str = TARGET, sm_count: int = SM_COUNT
) -> tuple[Call, Call]:
    """w13 and w2, with counts that were there long before."""
    shape = {"target": target, "sm_count": sm_count, "num_groups": num_experts, "token_format": token_format}
    w13 = Call(
        n=2 * INTERMEDIATE_SIZE,
        k=HIDDEN_SIZE,
        epilogue=Epilogue.SWIGLU,
        out_format=token_format,
        early_counts=True,
        **shape,  # type: ignore[arg-type]
    )
    return w13, Call(n=HIDDEN_SIZE, k=INTERMEDIATE_SIZE, early_counts=True, **shape)  # type: ignore[arg-type]


def compile_gemms(configs: Iterable[GemmConfig | Sm100Config], target: str) -> int:
    """In worker processes, each once; how many there are."""
    once = dict.fromkeys(configs)
    compile_ahead([Wanted("gemm", config, build_of(config), target) for config in once])
    return len(once)


def compile_all(experts: Sequence[int], tokens: Sequence[int], *, target: str, sm_count: int) -> int:
    """The GEMMs of all sizes; how many there are."""
    formats = (TokenFormat.MXFP8_TCGEN05,)
    if target.startswith("sm_90"):
        formats = (TokenFormat.MXFP8_FP32_SCALES, TokenFormat.BF16_PERMUTED)
    configs = (
        config_of(call, num_tokens * peers.TOP_K)
        for num_experts in experts
        for num_tokens in tokens
        for token_format in formats
        for call in calls(num_experts, token_format, target=target, sm_count=sm_count)
    )
    return compile_gemms(configs, target)


def route(routing: str, num_tokens: int, num_experts: int, *, seed: int) -> Routing:
    """One step's tokens; see --routing."""
    if routing == "balanced":
        return peers.balanced_routing(num_tokens, num_experts, HIDDEN_SIZE, seed=seed)
    return peers.drawn_routing(num_tokens, num_experts, HIDDEN_SIZE, seed=seed, skew=SKEWS[routing])


def moe_case(session: Session, num_experts: int, num_tokens: int, cache: "Built", routing: str) -> None:
    """All providers on one shape."""
    shape = f"M={num_tokens};E={num_experts};H={HIDDEN_SIZE};I={INTERMEDIATE_SIZE}"
    if routing != "balanced":
        shape += f";routing={routing}"
    weight_sets = cache.weights
    count = 8 if num_tokens <= 64 else 4 if num_tokens <= 512 else 2
    count = -(-count // len(weight_sets)) * len(weight_sets)
    routings = [route(routing, num_tokens, num_experts, seed=1000 * i + num_tokens) for i in range(count)]
    inputs = [routed(r, num_experts) for r in routings]
    calls: dict[str, timing.Calls] = {}
    results: dict[str, timing.Calls] = {}
    for name, call in (timing.attempt("rose", lambda: our_calls(weight_sets, inputs, session.only)) or {}).items():
        calls[name] = call
        results[name] = lambda i, call=call: combined(call(i), inputs[i], routings[i])
    for name, layers in cache.peers.items():
        calls[name] = results[name] = lambda i, c=layers: c[i % len(c)](routings[i])
    if session.check:
        exact = {q: exact_layer(weight_sets[0], routings[0], quantized=q) for q in (True, False)}
        session.faults += [f"{shape}: {f}" for f in check_results(results, exact)]
    if not session.timed:
        return
    hit = sum(r.experts_hit for r in routings) / len(routings)
    flops = 2 * num_tokens * peers.TOP_K * 3 * HIDDEN_SIZE * INTERMEDIATE_SIZE
    through = num_tokens * HIDDEN_SIZE * 2 * 2  # bf16 in and out
    floor_us = session.table.limits.floor_us(
        read=hit * peers.expert_bytes("rose", weight_sets[0]), written=through, flops=flops, fp8=True
    )
    rounds = count * max(1, 16 // count) if num_tokens <= 512 else count
    for name, us in timing.times(calls, sets=count, calls=rounds).items():
        moved = hit * peers.expert_bytes(name, weight_sets[0]) + through
        session.table.add(case="moe", provider=name, shape=shape, us=us, moved=moved, flops=flops, floor_us=floor_us)
    session.table.write()


def check_results(results: dict[str, timing.Calls], exact: dict[bool, torch.Tensor]) -> list[str]:
    """Every provider's result of the first inputs against float64.

    Args:
        exact: with and without quantized activations.

    Returns:
        What is wrong with ours; a peer that is off is only printed.
    """
    faults = []
    for name, result in results.items():
        ours = name.startswith("rose")
        quantized = ours and not name.startswith("rose_bf16")
        out = timing.attempt(name, lambda result=result: result(0))
        fault = f"{name} failed" if out is None else check_outputs(name, out, exact[quantized])
        if fault and ours:
            faults.append(fault)
        elif fault:
            print(f"check: a peer is off: {fault}", flush=True)
    return faults


def parts_case(session: Session, num_experts: int, num_tokens: int, weight_sets: list[MoeWeights]) -> None:
    """w13 and w2 alone, m tokens for every expert."""
    import gemm_ours as ours

    m = max(1, num_tokens * peers.TOP_K // num_experts)
    num_rows = m * num_experts
    counts = torch.full((num_experts,), m, dtype=torch.int32, device="cuda")
    offsets = torch.arange(0, num_rows + 1, m, dtype=torch.int32, device="cuda")
    layers = [ours.Experts(w) for w in weight_sets]
    for part, n, k in (("w13", 2 * INTERMEDIATE_SIZE, HIDDEN_SIZE), ("w2", HIDDEN_SIZE, INTERMEDIATE_SIZE)):
        sets = max(len(layers), timing.sets_beyond_l2(num_experts * n * k * timing.FP8_BLOCK_BYTES))
        sets = -(-sets // len(layers)) * len(layers)  # a part alone is smaller than a layer
        part_layers = layers + [ours.Experts(peers.copied(w)) for w in weight_sets * (sets // len(layers) - 1)]
        calls: dict[str, timing.Calls] = {}
        for name, token_format in (("rose_w8a8", ours.W8A8), ("rose_w8a16", ours.W8A16)):
            if not timing.wanted(name, session.only) or (token_format == ours.W8A16 and not ours.on_hopper()):
                continue

            def prepare(part=part, n=n, k=k, token_format=token_format, part_layers=part_layers) -> timing.Calls:
                rows = torch.randn(num_rows, k, device="cuda", dtype=torch.float32).to(torch.bfloat16)
                tokens = ours.quantize(rows, token_format)
                out = torch.empty(num_rows, n, device="cuda", dtype=torch.bfloat16)
                if part == "w13":
                    return lambda i: part_layers[i].first(tokens, offsets, counts)
                return lambda i: part_layers[i].second(tokens, offsets, counts, out)

            call = timing.attempt(f"{part} {name}", prepare)
            if call is not None:
                calls[name] = call
        flops = 2 * num_rows * n * k
        read = num_experts * n * k * timing.FP8_BLOCK_BYTES
        moved = read + num_rows * k + num_rows * (HIDDEN_SIZE * 2 if part == "w2" else INTERMEDIATE_SIZE)
        floor_us = session.table.limits.floor_us(read=read, written=moved - read, flops=flops, fp8=True)
        shape = f"T={num_rows};E={num_experts};N={n};K={k}"
        for name, us in timing.times(calls, sets=len(part_layers), calls=max(len(part_layers), 16)).items():
            session.table.add(case=part, provider=name, shape=shape, us=us, moved=moved, flops=flops, floor_us=floor_us)
    session.table.write()


@dataclass
class Built:
    """Weights of one number of experts, and the peers built from them, one layer for each set."""

    weights: list[MoeWeights]
    peers: dict[str, list[peers.MoeCall]]


def build(session: Session, num_experts: int, *, with_peers: bool) -> Built:
    """Sets of weights that are larger than L2 several times over, in every provider's format."""
    one = peers.random_experts(num_experts, HIDDEN_SIZE, INTERMEDIATE_SIZE, seed=num_experts)
    size = num_experts * peers.expert_bytes("rose", one)
    # Two of up to 600 MB, since calls of few tokens meet some experts again before the others have passed.
    sets = timing.sets_beyond_l2(size, least=2 if size < 2 * timing.ROTATION_BYTES else 1)
    weights = [one, *(peers.copied(one) for _ in range(sets - 1))]
    built: dict[str, list[peers.MoeCall]] = {}
    names = peers.MXFP8_EXPERTS + peers.OTHER_EXPERTS if with_peers and session.with_vllm else ()
    for name in names:
        if not timing.wanted(name, session.only):
            continue
        begin = time.perf_counter()
        layers = timing.attempt(name, lambda name=name: [peers.build_experts(name, w) for w in weights])
        if layers:
            built[name] = layers
            print(f"built {name} for {num_experts} experts in {time.perf_counter() - begin:.1f} s", flush=True)
    return Built(weights, built)


def profile(num_experts: int, num_tokens: int) -> None:
    """Our two launches for a profiler, after calls that compile them."""
    import gemm_ours as ours

    weights = peers.random_experts(num_experts, HIDDEN_SIZE, INTERMEDIATE_SIZE, seed=1)
    layer = ours.Experts(weights)
    r = routed(peers.balanced_routing(num_tokens, num_experts, HIDDEN_SIZE, seed=2), num_experts)
    token_format = ours.choose_format(num_experts, r.rows.shape[0])
    tokens, out = ours.quantize(r.rows, token_format), torch.empty_like(r.rows)
    for _ in range(3):
        layer.run(tokens, r.offsets, r.counts, out)
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda").zero_()  # what is in L2 from the calls before
    with timing.profiled():
        layer.run(tokens, r.offsets, r.counts, out)
    print(f"profiled E={num_experts} M={num_tokens} {token_format}, {flush.numel()} bytes flushed")


def numbers(text: str) -> list[int]:
    """Of a comma-separated list."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=numbers, help="local experts, separated by commas")
    parser.add_argument("--tokens", type=numbers, help="M, separated by commas")
    parser.add_argument("--only", default="", help="providers whose names hold one of these words")
    parser.add_argument("--cases", default="moe", help="moe, parts, or both")
    parser.add_argument("--routing", default="balanced", help="separated by commas: " + ", ".join(ROUTINGS))
    parser.add_argument("--quick", action="store_true", help="few shapes, quick limits")
    parser.add_argument("--check", action="store_true", help="compare every provider with float64 first")
    parser.add_argument("--no-timing", action="store_true", help="stop after the check")
    parser.add_argument("--compile", action="store_true", help="compile ours for sm_90a, run nothing")
    parser.add_argument("--profile", type=numbers, metavar="E,M", help="one shape of ours between profiler marks")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which no further shape begins")
    parser.add_argument("--out", type=Path, help="the CSV file, benchmarks/results/gemm_grouped.csv by default")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    if unknown := set(arguments.routing.split(",")) - set(ROUTINGS):
        parser.error(f"--routing: {', '.join(sorted(unknown))} isn't among {', '.join(ROUTINGS)}")
    if arguments.profile:
        profile(*arguments.profile)
        return
    experts = arguments.experts or (QUICK_EXPERTS if arguments.quick else EXPERTS)
    tokens = arguments.tokens or (QUICK_TOKENS if arguments.quick else TOKENS)
    only = [word for word in arguments.only.split(",") if word]
    cases = arguments.cases.split(",")
    if arguments.compile:
        print(f"{compile_all(experts, tokens, target=TARGET, sm_count=SM_COUNT)} kernels for {TARGET}")
        return
    if any(timing.wanted(name, only) for name in ROSE):
        facts = device_facts(torch.cuda.current_device())
        compile_all(experts, tokens, target=facts.target, sm_count=facts.sm_count)
    limits = timing.measure_limits(quick=arguments.quick)
    print(f"limits: {limits}", flush=True)
    table = timing.Table("gemm_grouped", limits, path=arguments.out)
    with peers.vllm_session() as with_vllm:
        session = Session(table, only, with_vllm, arguments.check, not arguments.no_timing, [])
        for num_experts in experts:
            if time.perf_counter() - begin > arguments.deadline:
                print(f"deadline: E={num_experts} was not measured", flush=True)
                continue
            built = build(session, num_experts, with_peers="moe" in cases)
            for num_tokens in tokens:
                if time.perf_counter() - begin > arguments.deadline:
                    print(f"deadline: E={num_experts} M={num_tokens} and what follows was not measured", flush=True)
                    break
                if "moe" in cases:
                    for routing in arguments.routing.split(","):
                        moe_case(session, num_experts, num_tokens, built, routing)
                if "parts" in cases and session.timed:
                    timing.attempt(
                        f"parts E={num_experts} M={num_tokens}",
                        lambda e=num_experts, m=num_tokens, b=built: parts_case(session, e, m, b.weights),
                    )
            del built
            torch.cuda.empty_cache()
    for line in timing.verdicts(table):
        print(line)
    print(f"took {time.perf_counter() - begin:.1f} s")
    if session.faults:
        raise SystemExit("check failed:\n" + "\n".join(session.faults))


if __name__ == "__main__":
    main()
