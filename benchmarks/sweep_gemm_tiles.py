"""Times tiles of tokens of the grouped GEMM on sm_90a beside each other: which ones the heuristic should choose.

    python benchmarks/sweep_gemm_tiles.py [--experts 16,128] [--tokens 32,…,4096] [--routing balanced,random,skewed]
        [--only WORD,…] [--out FILE] [--compile]

A row is w13 with SwiGLU, then w2, on tokens that are routed and quantized, as `rose` of bench_gemm_grouped.py; routings
are those of that benchmark, and `most` is the fullest expert's number of tokens. Providers are named by main loop and
tile, `w8a16_96_narrow_32` by the tile and by the width of matrix instructions where a tile has no more tokens. Every
result is compared with that of the first tile. Adds to benchmarks/results/gemm_tiles.csv after every shape; prints how
far the heuristic's tile is behind the best. With --compile kernels are compiled and nothing runs: no GPU is needed.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gemm_timing as timing
import torch
from bench_gemm_grouped import (
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    ROUTINGS,
    TARGET,
    Routed,
    calls,
    compile_gemms,
    numbers,
    route,
    routed,
)
from gemm_peers import TOP_K, MoeWeights, copied, random_experts

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, TokenFormat
from vllm_rose_plugin.kernels.gemm.call import Call, heuristic
from vllm_rose_plugin.kernels.gemm.candidates import free_fields, with_free_fields
from vllm_rose_plugin.kernels.gemm.choose import choose_token_format
from vllm_rose_plugin.kernels.gemm.config import W8A8_TILES, W8A16_TILES, GemmConfig
from vllm_rose_plugin.kernels.gemm.plan import plan_of

W8A8, W8A16 = TokenFormat.MXFP8_FP32_SCALES, TokenFormat.BF16_PERMUTED
EXPERTS, TOKENS = (16, 128), (32, 64, 128, 256, 512, 1024, 2048, 4096)
MOST_W8A8_TOKENS = 64
"""Of an expert on average; its products cost more than bandwidth beyond."""
ROW_ERROR = 3e-2
"""Between rows of the two main loops: SwiGLU's results may fall on either side of a rounding boundary."""


@dataclass(frozen=True)
class Tiles:
    """How tokens are cut."""

    token_format: TokenFormat
    tile: int
    narrow: int = 0

    @property
    def name(self) -> str:
        """As a provider."""
        narrow = f"_narrow_{self.narrow}" if self.narrow else ""
        return f"{'w8a8' if self.token_format is W8A8 else 'w8a16'}_{self.tile}{narrow}"

    def configs(self, num_experts: int, num_rows: int) -> tuple[GemmConfig, GemmConfig]:
        """Of w13 and w2.

        Raises:
            ValueError: no kernel can be made with them.
        """
        return tuple(self._config(call, num_rows) for call in calls(num_experts, self.token_format))  # type: ignore[return-value]

    def _config(self, call: Call, num_rows: int) -> GemmConfig:
        config = heuristic(call, num_rows, token_tile=self.tile)
        return with_free_fields(config, free_fields(config) | {"narrow_tokens": self.narrow}, target=TARGET)  # type: ignore[return-value]


def all_tiles(mean: int) -> Iterator[Tiles]:
    """Those that a shape may want: neither much smaller nor much larger than its experts' tokens."""
    for token_format, widths in ((W8A8, W8A8_TILES), (W8A16, W8A16_TILES)):
        if token_format is W8A8 and mean > MOST_W8A8_TOKENS:
            continue
        for tile in widths:
            if 4 * tile < min(mean, widths[-1]) or tile > max(4 * mean, widths[0]):
                continue
            yield Tiles(token_format, tile)
            for narrow in widths:
                if tile // 4 <= narrow < tile and tile >= 32:
                    yield Tiles(token_format, tile, narrow)


def possible(num_experts: int, num_tokens: int, only: list[str]) -> dict[Tiles, tuple[GemmConfig, GemmConfig]]:
    """Tiles that a kernel can be made with, and their configs."""
    num_rows, found = num_tokens * TOP_K, {}
    for tiles in all_tiles(-(-num_rows // num_experts)):
        if timing.wanted(tiles.name, only):
            try:
                found[tiles] = tiles.configs(num_experts, num_rows)
            except ValueError as error:
                print(f"left out: {tiles.name}: {error}", flush=True)
    return found


def chosen(num_experts: int, num_rows: int) -> str:
    """The heuristic's, by name."""
    token_format = choose_token_format(activation=Activation.MXFP8, num_groups=num_experts, num_rows=num_rows)
    config = heuristic(calls(num_experts, token_format)[0], num_rows)
    assert isinstance(config, GemmConfig)
    return Tiles(token_format, config.token_tile, config.narrow_tokens).name


def compile_all(shapes: list[tuple[int, int]], only: list[str]) -> int:
    """All kernels; how many there are."""
    pairs = (pair for shape in shapes for pair in possible(*shape, only).values())
    return compile_gemms((config for pair in pairs for config in pair), TARGET)


def layer_call(
    configs: tuple[GemmConfig, GemmConfig], weights: list, inputs: list[Routed], token_format: TokenFormat
) -> timing.Calls:
    """Both launches; a call returns w2's rows."""
    from vllm_rose_plugin.kernels.gemm import launch

    num_rows = inputs[0].rows.shape[0]
    both = zip(calls(len(inputs[0].counts), token_format), configs, strict=True)
    plans = [plan_of(call, config, num_rows=num_rows) for call, config in both]
    kernels = [plan.compile() for plan in plans]
    tokens = [launch.quantize_tokens(r.rows, token_format=token_format) for r in inputs]
    between = launch.empty_tokens(tokens[0], weights[0][0], token_format)
    out = torch.full((num_rows, HIDDEN_SIZE), float("nan"), dtype=torch.bfloat16, device="cuda")

    def call(i: int) -> torch.Tensor:
        r, (w13, w2) = inputs[i], weights[i % len(weights)]
        operands = ((tokens[i], w13, between), (between, w2, out))
        for kernel, plan, (x, weight, y) in zip(kernels, plans, operands, strict=True):
            launch.run_kernel(kernel, plan.config, plan.grid, x, weight, r.offsets, r.counts, None, y)
        return out

    return call


def rows_off(out: torch.Tensor, expected: torch.Tensor) -> int:
    """Rows that differ by more than ROW_ERROR, NaN among them."""
    error = (out.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    return int((~(error <= ROW_ERROR)).sum())


def sweep(table: timing.Table, weights: list, num_experts: int, num_tokens: int, routing: str, only: list[str]) -> None:
    """All tiles on one shape."""
    count = -(-4 // len(weights)) * len(weights)
    steps = [route(routing, num_tokens, num_experts, seed=1000 * i + num_tokens) for i in range(count)]
    inputs = [routed(step, num_experts) for step in steps]
    found: dict[str, timing.Calls] = {}
    expected: torch.Tensor | None = None
    for tiles, configs in possible(num_experts, num_tokens, only).items():
        call = timing.attempt(tiles.name, lambda c=configs, t=tiles: layer_call(c, weights, inputs, t.token_format))
        out = call and timing.attempt(tiles.name, lambda call=call: call(0).clone())
        if out is None:
            continue
        expected = out if expected is None else expected
        if off := rows_off(out, expected):
            print(f"left out: {tiles.name}: {off} rows differ from those of {next(iter(found), 'itself')}", flush=True)
            continue
        found[tiles.name] = call
    most = max(int(r.counts.max()) for r in inputs)
    shape = f"M={num_tokens};E={num_experts};H={HIDDEN_SIZE};I={INTERMEDIATE_SIZE};most={most}"
    one = num_experts * 3 * HIDDEN_SIZE * INTERMEDIATE_SIZE
    moved, flops = one * timing.FP8_BLOCK_BYTES, 2 * num_tokens * TOP_K * 3 * HIDDEN_SIZE * INTERMEDIATE_SIZE
    floor_us = table.limits.floor_us(read=moved, flops=flops, fp8=True)
    times = timing.times(found, sets=count, calls=4 * count if num_tokens <= 512 else count)
    for name, us in times.items():
        table.add(case=routing, provider=name, shape=shape, us=us, moved=moved, flops=flops, floor_us=floor_us)
    table.write()
    ours = times.get(chosen(num_experts, num_tokens * TOP_K))
    if ours is not None:
        best = min(times, key=times.__getitem__)
        print(f"{routing} {shape}: {ours / times[best]:.3f} of the best, {best}", flush=True)


def packed(weights: MoeWeights) -> tuple:
    """w13 and w2 as the kernels read them."""
    from vllm_rose_plugin.kernels.gemm.weights import pack_weight

    w13 = pack_weight(Mxfp8Tensor(weights.w13, weights.w13_scales), target=TARGET, gate_up=True)
    return w13, pack_weight(Mxfp8Tensor(weights.w2, weights.w2_scales), target=TARGET)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=numbers, default=list(EXPERTS), help="local experts, separated by commas")
    parser.add_argument("--tokens", type=numbers, default=list(TOKENS), help="M, separated by commas")
    parser.add_argument("--routing", default=",".join(ROUTINGS), help=f"of {', '.join(ROUTINGS)}, separated by commas")
    parser.add_argument("--only", default="", help="providers whose names hold one of these words")
    parser.add_argument("--out", type=Path, help="another file for the results")
    parser.add_argument("--compile", action="store_true", help="compile the kernels, run nothing")
    args = parser.parse_args()
    routings, only = args.routing.split(","), [word for word in args.only.split(",") if word]
    if unknown := set(routings) - set(ROUTINGS):
        parser.error(f"--routing has {', '.join(sorted(unknown))}; it takes {', '.join(ROUTINGS)}")
    shapes = [(experts, tokens) for experts in args.experts for tokens in args.tokens]
    if args.compile:
        print(f"{compile_all(shapes, only)} kernels for {TARGET}")
        return
    compile_all(shapes, only)
    table = timing.Table("gemm_tiles", timing.measure_limits(quick=True), path=args.out)
    for experts in args.experts:
        one = random_experts(experts, HIDDEN_SIZE, INTERMEDIATE_SIZE, seed=experts)
        size = experts * 3 * HIDDEN_SIZE * INTERMEDIATE_SIZE
        sets = timing.sets_beyond_l2(size)
        weights = [packed(one), *(packed(copied(one)) for _ in range(sets - 1))]
        for tokens in args.tokens:
            for routing in routings:
                sweep(table, weights, experts, tokens, routing, only)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
