"""Speed of MXFP8 linear layers: Qwen3-235B's qkv and o_proj, whole and as shards of TP4, beside vLLM's kernels.

    python benchmarks/bench_gemm_dense.py [--layers qkv,o_proj,qkv_tp4,o_proj_tp4] [--tokens 1,…,8192] [--only WORD,…]
        [--quick] [--check] [--no-timing] [--profile LAYER,M]

Adds to benchmarks/results/gemm_dense.csv after every shape.

| provider | what a call is |
|---|---|
| `rose` | bf16 to bf16: quantization of the tokens, then the GEMM, two launches |
| `rose_gemm` | the GEMM alone, on tokens that are quantized already |
| `rose_w8a8`, `rose_w8a16` | `rose` with the main loop that the heuristic doesn't take |
| `rose_bf16` | activations stay bf16: a launch permutes the tokens, then the GEMM in W8A16 (Hopper only) |
| `rose_bf16_gemm` | of that the GEMM alone |
| `marlin`, `humming` | vLLM's MXFP8 linear kernels, bf16 to bf16; the script says which of them is vLLM's default |
| `bf16_cublas`, `fp8_*` | the same weights in other formats, quantization of the tokens included |

The limit of a shape is the larger of two times: weights read at the measured read bandwidth, with tokens and results at
copy bandwidth; or the operations at the measured FP8 rate.

Runs of at most 150 s: one layer each, or with `--only`; rows of earlier runs stay in the file.

What bounds the kernel:

    ncu --profile-from-start off --clock-control none --set full -o gemm_dense \
        python benchmarks/bench_gemm_dense.py --profile qkv,64
    ncu --import gemm_dense.ncu-rep --page details --print-summary per-kernel
"""

import argparse
import time
from pathlib import Path

import gemm_peers as peers
import gemm_timing as timing
import torch
from bench_gemm_grouped import check_results, numbers

from vllm_rose_plugin.kernels.contracts import TokenFormat
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8, quantize_mxfp8

LAYERS = {"qkv": (9216, 4096), "o_proj": (4096, 8192), "qkv_tp4": (2304, 4096), "o_proj_tp4": (4096, 2048)}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
QUICK_TOKENS = (1, 16, 64, 512, 4096)
ROSE = ("rose", "rose_gemm", "rose_w8a8", "rose_w8a16", "rose_bf16", "rose_bf16_gemm")


class Layer:
    """Sets of one layer's weights, and the peers built from them, one for each set."""

    def __init__(self, name: str, *, only: list[str], with_vllm: bool, with_peers: bool = True):
        self.name, (self.n, self.k) = name, LAYERS[name]
        generator = torch.Generator("cuda").manual_seed(self.n)
        plain = torch.randn(self.n, self.k, generator=generator, device="cuda", dtype=torch.float32) * 0.02
        codes, scales = quantize_mxfp8(plain.to(torch.bfloat16))
        sets = timing.sets_beyond_l2(self.n * self.k, least=2)
        self.weights = [(codes.clone(), scales.clone()) for _ in range(sets)]
        self.peers: dict[str, list[peers.LinearCall]] = {}
        if not with_peers:
            return
        names = peers.MXFP8_LINEAR + peers.OTHER_LINEAR if with_vllm else peers.NEEDS_NO_VLLM
        if with_vllm and timing.wanted("vllm_default", only):
            default = timing.attempt("vllm_default", lambda: peers.default_linear_name(self.n, self.k)) or ""
            print(f"{name}: vLLM's default is {default or 'unknown'}", flush=True)
            if any(known in default.lower() for known in ("marlin", "humming")):
                names = tuple(n for n in names if n != "vllm_default")  # measured under its own name
        for peer in names:
            if not timing.wanted(peer, only):
                continue
            begin = time.perf_counter()
            built = timing.attempt(peer, lambda peer=peer: [peers.build_linear(peer, *w) for w in self.weights])
            if built:
                self.peers[peer] = built
                print(f"built {peer} for {name} in {time.perf_counter() - begin:.1f} s", flush=True)


def our_calls(layer: Layer, inputs: list[torch.Tensor], only: list[str]) -> dict[str, timing.Calls]:
    """Ours by provider's name."""
    import gemm_ours as ours

    linears = [ours.Linear(codes, scales) for codes, scales in layer.weights]
    chosen = ours.choose_format(1, inputs[0].shape[0])
    theirs = {"rose_w8a8": ours.W8A8, "rose_w8a16": ours.W8A16}
    found: dict[str, timing.Calls] = {}
    for name in ROSE:
        if not timing.wanted(name, only) or theirs.get(name) == chosen:
            continue
        if name not in ("rose", "rose_gemm") and not ours.on_hopper():
            continue
        call = timing.attempt(name, lambda name=name: our_call(name, linears, inputs, theirs.get(name, chosen)))
        if call is not None:
            found[name] = call
    return found


def our_call(name: str, linears: list, inputs: list[torch.Tensor], token_format: TokenFormat) -> timing.Calls:
    """One of ours, compiled.

    Args:
        linears: of each set of weights.
        token_format: of tokens that are quantized.
    """
    import gemm_ours as ours

    num_rows, n = inputs[0].shape[0], linears[0].weight.n
    offsets, counts = ours.one_run(num_rows)
    unquantized = name.startswith("rose_bf16")

    def tokens_of(x: torch.Tensor):
        return ours.unquantized(x) if unquantized else ours.quantize(x, token_format)

    tokens = [tokens_of(x) for x in inputs]
    outs = [x.new_empty(num_rows, n) for x in inputs]

    def linear(i: int) -> torch.Tensor:
        if name in ("rose", "rose_bf16"):
            return linears[i](inputs[i], unquantized=unquantized)
        packed = tokens[i] if name.endswith("_gemm") else tokens_of(inputs[i])
        return linears[i].gemm(packed, offsets, counts, outs[i])

    linear(0)
    return linear


def measure(
    table: timing.Table, layer: Layer, num_tokens: int, only: list[str], *, check: bool, timed: bool
) -> list[str]:
    """All providers on one shape; returns what the check found wrong."""
    shape = f"M={num_tokens};N={layer.n};K={layer.k}"
    inputs = [
        torch.randn(num_tokens, layer.k, device="cuda", dtype=torch.float32).to(torch.bfloat16) for _ in layer.weights
    ]
    calls = timing.attempt("rose", lambda: our_calls(layer, inputs, only)) or {}
    for name, built in layer.peers.items():
        calls[name] = lambda i, built=built: built[i](inputs[i])
    faults = []
    if check:
        weight, x = dequantize_mxfp8(*layer.weights[0]).double(), inputs[0]
        exact = {True: dequantize_mxfp8(*quantize_mxfp8(x)).double() @ weight.T, False: x.double() @ weight.T}
        faults = [f"{shape}: {fault}" for fault in check_results(calls, exact)]
    if not timed:
        return faults
    flops = 2 * num_tokens * layer.n * layer.k
    through = num_tokens * (layer.k + layer.n) * 2
    floor_us = table.limits.floor_us(
        read=peers.linear_bytes("rose", layer.n, layer.k), written=through, flops=flops, fp8=True
    )
    sets = len(layer.weights)
    count = sets if num_tokens > 512 else -(-32 // sets) * sets
    for name, us in timing.times(calls, sets=sets, calls=count).items():
        moved = peers.linear_bytes(name, layer.n, layer.k) + through
        table.add(case=layer.name, provider=name, shape=shape, us=us, moved=moved, flops=flops, floor_us=floor_us)
    table.write()
    return faults


def profile(name: str, num_tokens: int) -> None:
    """One call of ours for a profiler, after the ones that compile."""
    import gemm_ours as ours

    layer = Layer(name, only=[], with_vllm=False, with_peers=False)
    linear = ours.Linear(*layer.weights[0])
    x = torch.randn(num_tokens, layer.k, device="cuda", dtype=torch.float32).to(torch.bfloat16)
    for _ in range(3):
        linear(x)
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda").zero_()  # what is in L2 from the calls before
    with timing.profiled():
        linear(x)
    print(f"profiled {name} M={num_tokens} {ours.choose_format(1, num_tokens)}, {flush.numel()} bytes flushed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default=",".join(LAYERS), help="some of " + ", ".join(LAYERS))
    parser.add_argument("--tokens", type=numbers, help="M, separated by commas")
    parser.add_argument("--only", default="", help="providers whose names hold one of these words")
    parser.add_argument("--quick", action="store_true", help="few shapes, quick limits")
    parser.add_argument("--check", action="store_true", help="compare every provider with float64 first")
    parser.add_argument("--no-timing", action="store_true", help="stop after the check")
    parser.add_argument("--profile", metavar="LAYER,M", help="one shape of ours between profiler marks")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which no further shape begins")
    parser.add_argument("--out", type=Path, help="the CSV file, benchmarks/results/gemm_dense.csv by default")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    if arguments.profile:
        name, num_tokens = arguments.profile.split(",")
        profile(name, int(num_tokens))
        return
    names = arguments.layers.split(",")
    if unknown := [name for name in names if name not in LAYERS]:
        parser.error(f"--layers: {unknown[0]} is none of {', '.join(LAYERS)}")
    tokens = arguments.tokens or (QUICK_TOKENS if arguments.quick else TOKENS)
    only = [word for word in arguments.only.split(",") if word]
    limits = timing.measure_limits(quick=arguments.quick)
    print(f"limits: {limits}", flush=True)
    table = timing.Table("gemm_dense", limits, path=arguments.out)
    faults: list[str] = []
    with peers.vllm_session() as with_vllm:
        for name in names:
            if time.perf_counter() - begin > arguments.deadline:
                print(f"deadline: {name} was not measured", flush=True)
                continue
            layer = Layer(name, only=only, with_vllm=with_vllm)
            for num_tokens in tokens:
                if time.perf_counter() - begin > arguments.deadline:
                    print(f"deadline: {name} M={num_tokens} and what follows was not measured", flush=True)
                    break
                faults += measure(table, layer, num_tokens, only, check=arguments.check, timed=not arguments.no_timing)
            del layer
            torch.cuda.empty_cache()
    for line in timing.verdicts(table):
        print(line)
    print(f"took {time.perf_counter() - begin:.1f} s")
    if faults:
        raise SystemExit("check failed:\n" + "\n".join(faults))


if __name__ == "__main__":
    main()
