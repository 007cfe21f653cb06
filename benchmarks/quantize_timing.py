"""What bench_mxfp8_quantize.py and bench_swiglu_quantize.py share: timing, the limit, an empty kernel, the CSV file.

A provider is timed as the replay of a CUDA graph that holds many calls, over buffers that rotate beyond L2 unless a
case says otherwise; providers take turns, and the median of the turns counts.
"""

import csv
import datetime
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cutlass
import cutlass.cute as cute
import torch
from columns import COLUMNS, commit, versions
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from vllm_rose_plugin.kernels.jit.compile import compile

RESULTS = Path(__file__).parent / "results"
TURNS = 15
ROTATION_BYTES = 240e6
"""Touched between two uses of the same buffer: four times the L2 of an H200."""
Calls = Callable[[int], object]
"""Call i of a provider, on buffer set i."""


@dataclass(frozen=True)
class EmptyConfig:
    """A kernel that does nothing but take part in programmatic dependent launch, or not even that."""

    blocks: int
    threads: int
    pdl: bool


class _Empty:
    def __init__(self, config: EmptyConfig):
        self.config = config

    @cute.jit
    def __call__(self, anything: cute.Tensor, stream):  # a tensor tells which device's stream is meant
        self.kernel().launch(
            grid=(self.config.blocks, 1, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
            use_pdl=self.config.pdl,
        )

    @cute.kernel
    def kernel(self):
        if self.config.pdl:
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()


def build_empty(config: EmptyConfig):
    """For jit.compile."""
    anything = make_fake_tensor(cutlass.Uint8, (cute.sym_int64(),), (1,), assumed_align=1)
    return _Empty(config), (anything, make_fake_stream(use_tvm_ffi_env_stream=True))


def empty_kernels(*, blocks: int, threads: int) -> dict[str, Calls]:
    """Providers that launch nothing: with and without programmatic dependent launch, as many threads as ours."""
    providers: dict[str, Calls] = {}
    anything = torch.zeros(1, dtype=torch.uint8, device="cuda")
    for name, pdl in (("empty_kernel", False), ("empty_kernel_pdl", True)):
        kernel = compile(family="empty", config=EmptyConfig(blocks, threads, pdl), build=build_empty)
        providers[name] = lambda i, kernel=kernel: kernel(anything)
    return providers


def buffer_sets(bytes_of_one: float, *, rotate: bool) -> int:
    """How many sets of buffers a case needs; at most 256, so the smallest cases stay in L2 all the same."""
    return max(2, min(256, -(-int(ROTATION_BYTES) // int(bytes_of_one)))) if rotate else 1


def times(providers: dict[str, Calls], *, sets: int, calls: int) -> dict[str, float]:
    """Microseconds of a call for each provider that runs; what fails to is named and left out."""
    graphs = {}
    for name, call in providers.items():
        try:
            graphs[name] = _graph(call, sets=sets, calls=calls)
        except Exception as error:
            torch.cuda.synchronize()
            print(f"left out: {name}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
    measured: dict[str, list[float]] = {name: [] for name in graphs}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(TURNS + 2):
        for name, graph in graphs.items():
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 2:
                measured[name].append(start.elapsed_time(end) * 1e3 / calls)
    del graphs
    return {name: statistics.median(values) for name, values in measured.items()}


def _graph(call: Calls, *, sets: int, calls: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(min(2, sets)):
            call(i)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            call(i % sets)
    return graph


def copy_calls(total_bytes: float, *, sets: int) -> Calls:
    """Copies that read and write `total_bytes` together."""
    half = int(total_bytes) // 2
    pairs = [torch.randint(0, 255, (2, half), dtype=torch.uint8, device="cuda").unbind(0) for _ in range(sets)]
    return lambda i: pairs[i][1].copy_(pairs[i][0])


def copy_limit() -> tuple[float, int]:
    """GB/s of the fastest device-to-device copy, reads and writes counted, and the bytes that it moves.

    Several sizes, since copies of gigabytes are slower than copies of some hundred megabytes on some machines.
    """
    rates = {}
    for moved in (2**27, 2**29, 2**30, 2**32):
        calls = max(4, 2**32 // moved)
        us = times({"copy": copy_calls(moved, sets=2)}, sets=2, calls=calls)["copy"]
        rates[moved] = moved / us / 1e3
    best = max(rates, key=rates.__getitem__)
    return rates[best], best


class Table:
    """Rows of one area's CSV file; those of earlier runs that this one doesn't measure again stay.

    Args:
        area: whose file it is.
        limit: GB/s that shares are of, and the bytes that were moved to measure it.
        path: of the file, benchmarks/results/<area>.csv by default.
    """

    def __init__(self, area: str, limit: tuple[float, int], *, path: Path | None = None):
        self.area, (self.limit, moved) = area, limit
        self.path = path or RESULTS / f"{area}.csv"
        self._said = 0
        self.common = {
            "area": area,
            "tflop_per_s": "",
            "device": torch.cuda.get_device_name(),
            "versions": versions("nvidia-cutlass-dsl", "vllm", "flashinfer-python"),
            "commit": commit(),
            "date": datetime.date.today().isoformat(),
        }
        self.rows: list[dict] = []
        self.add(case="limit", provider="torch_copy", shape=f"bytes={moved}", us=moved / self.limit / 1e3, moved=moved)

    def add(self, *, case: str, provider: str, shape: str, us: float, moved: float | None) -> None:
        """One measurement; `moved` is what the call must read and write in bytes, None where that means nothing."""
        speed = moved / us / 1e3 if moved else None
        self.rows.append(
            {
                **self.common,
                "case": case,
                "provider": provider,
                "shape": shape,
                "us": f"{us:.3f}",
                "gb_per_s": f"{speed:.1f}" if speed else "",
                "share_of_limit": f"{speed / self.limit:.3f}" if speed else "",
            }
        )

    def write(self) -> None:
        """To the file, in one step, and what is new as a short table to the terminal; after every case, so that a run
        that is cut off leaves what it has."""
        rows = {_key(row): row for row in self.rows}
        if self.path.exists():
            with self.path.open() as file:
                rows = {_key(row): row for row in csv.DictReader(file)} | rows
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".part")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows.values())
        partial.replace(self.path)
        if not self._said:
            print(f"{self.path.name}: copy limit {self.limit:.0f} GB/s")
        for row in self.rows[self._said :]:
            print("  ".join(f"{row[c]:<{w}}" for c, w in zip(COLUMNS[1:5], (26, 18, 22, 9), strict=True)), end="  ")
            print(row["gb_per_s"], row["share_of_limit"], flush=True)
        self._said = len(self.rows)


def _key(row: dict) -> tuple[str, ...]:
    """What a row replaces; the number of blocks may have changed."""
    return row["case"], row["provider"], row["shape"].partition(";blocks=")[0]


# ---- checks ----


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, *, offset: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """(a tensor of 0xA5 bytes, all of the memory around it), on the GPU."""
    size = torch.empty(0, dtype=dtype).element_size()
    count = size
    for extent in shape:
        count *= extent
    around = torch.full((count + 4096 + offset,), 0xA5, dtype=torch.uint8, device="cuda")
    inside = around[2048 + offset : 2048 + offset + count]
    return inside.view(dtype).view(shape), around


def check_fence(around: torch.Tensor, *, count: int, offset: int = 32) -> None:
    """Raises where memory beside the tensor of :func:`poisoned` was written."""
    for part in (around[: 2048 + offset], around[2048 + offset + count :]):
        if not bool((part == 0xA5).all()):
            raise AssertionError("memory beside the result was written")


def check_replays(call: Callable[[], list[torch.Tensor]], *, replays: int = 1000) -> None:
    """Raises unless that many replays of a graph with the call give the same bytes each time."""
    results = _bytes(call())
    expected = [r.clone() for r in results]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _bytes(call())
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(replays):
        for result in results:
            result.fill_(0xA5)
        graph.replay()
        for result, first in zip(results, expected, strict=True):
            differing += (result != first).sum()
    if int(differing):
        raise AssertionError(f"{int(differing)} bytes changed over {replays} replays")


def _bytes(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.view(torch.uint8) for t in tensors]
