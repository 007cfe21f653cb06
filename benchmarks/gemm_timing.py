"""What bench_gemm_grouped.py and bench_gemm_dense.py share: timing, the limits, the floor of a call, the CSV file.

Needs neither the DSL nor vLLM, so that peers are measured where ours can't be built and the other way round.

A provider is timed as the replay of a CUDA graph that holds many calls; providers take turns, and the median of the
turns counts. Weights and tokens rotate over sets of at least 300 MB together, five times the L2 of an H200.
"""

import csv
import datetime
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from columns import COLUMNS, commit, versions

RESULTS = Path(__file__).parent / "results"
TURNS = 15
ROTATION_BYTES = 300e6
Calls = Callable[[int], object]
"""Call i of a provider, on set i of weights and tokens."""
FP8_BLOCK_BYTES = 33 / 32
"""Bytes of an MXFP8 element with its share of a scale."""


def sets_beyond_l2(bytes_of_one: float, *, least: int = 1) -> int:
    """How many sets of weights are as large as ROTATION_BYTES together."""
    return max(least, -(-int(ROTATION_BYTES) // int(bytes_of_one)))


def times(providers: dict[str, Calls], *, sets: int, calls: int, turns: int = TURNS) -> dict[str, float]:
    """Microseconds of a call for each provider that runs; what fails to is named and left out.

    All providers run before the first is captured: vLLM's share a workspace, and one that grows it leaves the graphs
    captured before with memory that is no longer theirs.
    """
    stream = torch.cuda.Stream()
    ready = {
        name: call
        for name, call in providers.items()
        if attempt(name, lambda call=call: _warm_up(call, stream, sets=sets))
    }
    graphs = {}
    for name, call in ready.items():
        graph = attempt(name, lambda call=call: _capture(call, stream, sets=sets, calls=calls))
        if graph is not None:
            graphs[name] = graph
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    measured: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(turns + 2):
        for name, graph in graphs.items():
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 2:
                measured[name].append(start.elapsed_time(end) * 1e3 / calls)
    return {name: statistics.median(values) for name, values in measured.items()}


def _warm_up(call: Calls, stream: torch.cuda.Stream, *, sets: int) -> bool:
    """Every set once, outside of a graph: compiles, tunes, makes workspaces."""
    with torch.cuda.stream(stream):
        for i in range(sets):
            call(i)
    stream.synchronize()
    return True


def _capture(call: Calls, stream: torch.cuda.Stream, *, sets: int, calls: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            call(i % sets)
    return graph


def attempt(name: str, build: Callable[[], Any]) -> Any:
    """What `build` gives, or None; then the reason is printed."""
    try:
        result = build()
        torch.cuda.synchronize()
        return result
    except Exception as error:
        print(f"left out: {name}: {describe(error)}", flush=True)
        torch.cuda.synchronize()  # an error of the device itself ends the run here, since nothing can follow
        torch.cuda.empty_cache()
        return None


def describe(error: BaseException) -> str:
    """One line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


# ---- limits ----


@dataclass(frozen=True)
class Limits:
    """Measured on this device, in this run."""

    read: float  # GB/s
    copy: float  # GB/s, reads and writes counted
    bf16: float  # TFLOP/s
    fp8: float  # TFLOP/s; 0 where torch has no FP8 product

    def floor_us(self, *, read: float, written: float = 0.0, flops: float, fp8: bool) -> float:
        """No call can be faster: its bytes, or its operations at the rate of the faster format."""
        rate = self.fp8 if fp8 and self.fp8 else self.bf16
        return max(read / self.read / 1e3 + written / self.copy / 1e3, flops / rate / 1e6)


def measure_limits(*, quick: bool = False) -> Limits:
    """Bandwidths of a large reduction and a large copy, rates of large matrix products, on random data."""
    turns = 5 if quick else 11
    read, copy = _bandwidths(turns)
    torch.cuda.empty_cache()
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * size**3
    bf16 = flops / times({"bf16": lambda i: a @ b.t()}, sets=1, calls=4, turns=turns)["bf16"] / 1e6
    a8, b8 = (x.to(torch.float8_e4m3fn) for x in (a, b))
    one = torch.ones((), device="cuda")
    fp8_us = times(
        {
            "fp8_matmul": lambda i: torch._scaled_mm(
                a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        },
        sets=1,
        calls=4,
        turns=turns,
    ).get("fp8_matmul")
    return Limits(read, copy, bf16, flops / fp8_us / 1e6 if fp8_us else 0.0)


def _bandwidths(turns: int) -> tuple[float, float]:
    """GB/s of reading, and of copying with reads and writes counted."""
    words = torch.randint(0, 2**31 - 1, (3 << 28,), dtype=torch.int32, device="cuda")  # 3 GiB
    read = times({"read": lambda i: torch.sum(words, dtype=torch.int32)}, sets=1, calls=4, turns=turns)["read"]
    copies = []
    for size in (2**27, 2**29, 2**30):  # copies of gigabytes are slower than copies of some hundred megabytes
        count = size // 8
        parts = [words[2 * i * count : 2 * (i + 1) * count].view(2, count) for i in range(2)]
        copy = times({"copy": lambda i, p=parts: p[i][1].copy_(p[i][0])}, sets=2, calls=8, turns=turns)["copy"]
        copies.append(size / copy / 1e3)
    return words.numel() * 4 / read / 1e3, max(copies)


# ---- the file ----

VERSIONS = ("nvidia-cutlass-dsl", "vllm", "humming-kernels", "triton")
_KEY = ("case", "provider", "shape")


class Table:
    """Rows of one area's CSV file; written after every case, so that a run that is cut off leaves what it measured.

    Rows of the file that a run doesn't measure again stay, so a table can be filled by several short runs. Shares are
    of the limits of a row's own run.
    """

    def __init__(self, area: str, limits: Limits, *, path: Path | None = None):
        self.area, self.limits = area, limits
        self.path = path or RESULTS / f"{area}.csv"
        self.common = {
            "area": area,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "versions": versions(*VERSIONS),
            "commit": commit(),
            "date": datetime.date.today().isoformat(),
        }
        self.rows: dict[tuple, dict] = {}
        if self.path.exists():
            with self.path.open() as file:
                self.rows = {tuple(row[c] for c in _KEY): row for row in csv.DictReader(file)}
        for name, rate in (("read", limits.read), ("copy", limits.copy)):
            self._put(case="limit", provider=name, shape="large", gb_per_s=f"{rate:.1f}")
        for name, rate in (("bf16_matmul", limits.bf16), ("fp8_matmul", limits.fp8)):
            self._put(case="limit", provider=name, shape="M=8192;N=8192;K=8192", tflop_per_s=f"{rate:.1f}")

    def add(
        self, *, case: str, provider: str, shape: str, us: float, moved: float, flops: float, floor_us: float
    ) -> None:
        """One measurement.

        Args:
            moved: bytes that the call must read and write, in the provider's own format.
            floor_us: of the case, the same for all its providers; the share of the limit is floor_us / us.
        """
        self._put(
            case=case,
            provider=provider,
            shape=shape,
            us=f"{us:.3f}",
            gb_per_s=f"{moved / us / 1e3:.1f}",
            tflop_per_s=f"{flops / us / 1e6:.1f}",
            share_of_limit=f"{floor_us / us:.3f}",
        )
        print(
            f"{case:<16} {provider:<26} {shape:<36} {us:10.2f} us {moved / us / 1e3:7.0f} GB/s "
            f"{flops / us / 1e6:7.1f} TFLOP/s  {floor_us / us:6.3f} of limit",
            flush=True,
        )

    def add_unmeasured(self, *, case: str, provider: str, shape: str, why: str) -> None:
        """A row without a measurement, which says so in the place of the device."""
        self._put(case=case, provider=provider, shape=shape, device=f"not measured: {why}")

    def _put(self, **row: str) -> None:
        empty = dict.fromkeys(COLUMNS, "")
        self.rows[tuple(row[c] for c in _KEY)] = {**empty, **self.common, **row}

    def write(self) -> None:
        """To the area's file, limits first, then cases as they came; replaced in one step."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = sorted(self.rows.values(), key=lambda row: row["case"] != "limit")
        partial = self.path.with_suffix(".part")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        partial.replace(self.path)


def verdicts(table: Table) -> Iterator[str]:
    """For every case and shape that has both: our time, as the heuristic chooses, beside the best peers' times.

    Once beside those that take MXFP8 weights, once beside all.
    """
    by_shape: dict[tuple, dict[str, float]] = {}
    for row in table.rows.values():
        if row["us"] and row["case"] != "limit":
            by_shape.setdefault((row["case"], row["shape"]), {})[row["provider"]] = float(row["us"])
    for (case, shape), found in by_shape.items():
        ours = found.get("rose")
        others = {name: us for name, us in found.items() if not name.startswith("rose")}
        if ours is None or not others:
            continue
        line = f"{case:<12} {shape:<28} rose {ours:.1f}"
        mxfp8 = {name: us for name, us in others.items() if not name.startswith(("bf16", "fp8"))}
        for kind, peers in (("MXFP8", mxfp8), ("any", others)):
            if peers:
                best = min(peers, key=peers.__getitem__)
                ratio = ours / peers[best]
                line += f" | {kind}: {best} {peers[best]:.1f}, ratio {ratio:.2f}{' SLOWER' if ratio > 1 else ''}"
        yield line


def wanted(name: str, only: Sequence[str]) -> bool:
    """Whether `name` holds one of the words of --only (all do where there are none)."""
    return not only or any(word in name for word in only)


@contextmanager
def profiled() -> Iterator[None]:
    """What a profiler started with --profile-from-start off looks at."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
