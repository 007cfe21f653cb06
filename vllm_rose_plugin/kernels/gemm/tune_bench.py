"""A call of the GEMM with random operands on torch's current device, to check and time configs."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, TokenFormat
from vllm_rose_plugin.kernels.gemm import family, tuned
from vllm_rose_plugin.kernels.gemm.call import Call, heuristic
from vllm_rose_plugin.kernels.gemm.candidates import Config
from vllm_rose_plugin.kernels.gemm.checks import tiled_bytes
from vllm_rose_plugin.kernels.gemm.config import Epilogue
from vllm_rose_plugin.kernels.gemm.launch import empty_tokens, run_kernel
from vllm_rose_plugin.kernels.gemm.one_run import prepare_device
from vllm_rose_plugin.kernels.gemm.plan import build_of, plan_of
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens, permute_k, unpack_tokens
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight, packed_shape
from vllm_rose_plugin.kernels.jit.parallel import Wanted, compile_ahead
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import (
    fp32_pitch,
    padded_blocks,
    padded_rows,
    untile_scales,
)

_SWIGLU_ROW_ERROR = 3e-2
"""Of a row, relative: results that fall to the other side of a rounding boundary move it by up to 1.5 %."""
_CHUNK = 4096
"""Rows that are compared at a time."""
_CODE_BITS = 0xBF
"""E4M3 codes below 2 in magnitude, none of them NaN."""
_NAN_CODE = 0x7F
_TIMES_L2 = 4
"""Bytes of the weights that calls rotate through, against those of the cache."""
_MOST_SETS = 64
_GRAPH_US = 1000.0
"""What a graph should last: then replaying it costs little beside it."""
_TURNS = 9


def compile_all(needed: Sequence[tuple[Call, Config]]) -> None:
    """Bring the kernels of many configs onto the disk, in worker processes."""
    compile_ahead([Wanted("gemm", config, build_of(config), call.target) for call, config in needed])


@dataclass(frozen=True)
class _Operands:
    """Of some number of rows: tokens, and as many runs of them as calls rotate through."""

    tokens: PackedTokens
    runs: list[tuple[PackedWeight, torch.Tensor, torch.Tensor]]
    """(weight, expert_offsets, expert_counts)."""
    counts: list[int]
    """Of the first of the runs."""
    out: torch.Tensor | PackedTokens


class DeviceBench:
    """Random operands of a call. Calls rotate through weights that the L2 cache can't hold.

    Args:
        call: what is computed.
        most_rows: over all groups, among which they spread at random; where there are fewer than groups, calls take
            turns with these.
    """

    def __init__(self, call: Call, most_rows: int) -> None:
        self._call, self._most_rows = call, most_rows
        self._device = _current_device()
        prepare_device(self._device, max_rows=most_rows)
        self._generator = torch.Generator(self._device).manual_seed(most_rows)
        least = tuned.bucket(call.num_groups, most_rows)[0]
        sets = -(-self._sets(least) // self._windows(least))
        self._weights = [self._weight() for _ in range(sets)]
        self._bias = self._random(call.num_groups, call.n) if call.bias else None
        self._operands: dict[int, _Operands] = {}
        self._expected: torch.Tensor | None = None

    def fault(self, config: Config) -> str:
        """What is wrong with a config's result, by itself or beside one without stream-K; empty: nothing."""
        if self._expected is None:
            self._expected = self._result(heuristic(replace(self._call, batch_invariant=True), self._most_rows))
        result = self._result(config)
        if not result.isfinite().all():
            return f"{(~result.isfinite()).sum()} elements are not finite"
        for some, expected in zip(result.split(_CHUNK), self._expected.split(_CHUNK), strict=True):
            if self._call.epilogue is Epilogue.PLAIN:
                fault = family.compare(some, expected)
            else:
                off = (some - expected).norm(dim=-1) > _SWIGLU_ROW_ERROR * expected.norm(dim=-1)
                fault = f"{off.sum()} rows are off by more than {_SWIGLU_ROW_ERROR:.0%}" if off.any() else ""
            if fault:
                return fault
        return ""

    def times(self, configs: Sequence[Config], rows: int) -> list[float]:
        """Microseconds of each with that many rows: the median of replays of CUDA graphs, which take turns."""
        sets = len(self._of(rows).runs)
        stream, graphs, calls = torch.cuda.Stream(self._device), [], 0
        stream.wait_stream(torch.cuda.current_stream(self._device))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            for config in configs:
                self._run(config, rows, 0)  # loads it onto the device
                if not calls:
                    start.record()
                    self._run(config, rows, 0)
                    end.record()
                    end.synchronize()
                    wanted = int(_GRAPH_US / max(start.elapsed_time(end) * 1e3, 1.0))
                    calls = sets * max(1, -(-wanted // sets))
        for config in configs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for i in range(calls):
                    self._run(config, rows, i % sets)
            graphs.append(graph)
        measured: list[list[float]] = [[] for _ in graphs]
        for turn in range(_TURNS + 1):
            for graph, times in zip(graphs, measured, strict=True):
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                if turn:
                    times.append(start.elapsed_time(end) * 1e3 / calls)
        return [statistics.median(times) for times in measured]

    def _run(self, config: Config, rows: int, index: int) -> None:
        made, operands = plan_of(self._call, config, num_rows=rows), self._of(rows)
        weight, offsets, counts = operands.runs[index]
        run = (operands.tokens, weight, offsets, counts, self._bias, operands.out)
        run_kernel(made.compile(), config, made.grid, *run)

    def _result(self, config: Config) -> torch.Tensor:
        """Of the first runs: ``[S, N]``, or float32 ``[S, I]``. What the kernel doesn't write is NaN."""
        operands = self._of(self._most_rows)
        if isinstance(operands.out, torch.Tensor):
            operands.out.fill_(float("nan"))
            self._run(config, self._most_rows, 0)
            return operands.out.clone()
        data = operands.out.data
        if data.dtype == torch.bfloat16:
            data.fill_(float("nan"))
        else:
            data.view(torch.uint8).fill_(_NAN_CODE)
        self._run(config, self._most_rows, 0)
        return _values(operands.out, operands.counts)

    def _of(self, rows: int) -> _Operands:
        if rows not in self._operands:
            self._operands[rows] = self._make(rows)
        return self._operands[rows]

    def _make(self, rows: int) -> _Operands:
        call, tokens, runs = self._call, self._tokens(rows), []
        first: list[int] = []
        for i in range(self._sets(rows)):
            weight = self._weights[i // self._windows(rows) % len(self._weights)]
            counts = self._counts(rows, i)
            first = first or counts
            run = torch.tensor([0, *counts], dtype=torch.int32, device=self._device)
            runs.append((weight, run.cumsum(0, dtype=torch.int32), run[1:].clone()))
        if call.epilogue is Epilogue.PLAIN:
            dtype = getattr(torch, call.out_dtype)
            out: torch.Tensor | PackedTokens = torch.empty((rows, call.n), dtype=dtype, device=self._device)
        else:
            out = empty_tokens(tokens, self._weights[0], call.out_format or call.token_format)
        return _Operands(tokens, runs, first, out)

    def _counts(self, rows: int, turn: int) -> list[int]:
        """Tokens of each group: as a router spreads them, or one each of other groups in every turn."""
        groups = self._call.num_groups
        if rows >= groups > 1:
            generator = torch.Generator().manual_seed(turn)
            return torch.bincount(torch.randint(groups, (rows,), generator=generator), minlength=groups).tolist()
        return [int((group - turn * rows) % groups < rows) for group in range(groups)] if groups > 1 else [rows]

    def _sets(self, rows: int) -> int:
        """How many calls read other weights before the first are read again."""
        touched = min(self._call.num_groups, rows) * self._call.n * self._call.k
        return min(1 + _TIMES_L2 * _l2_bytes(self._device) // touched, _MOST_SETS)

    def _windows(self, rows: int) -> int:
        """How many calls can read other groups of the same weight."""
        return max(1, self._call.num_groups // rows)

    def _weight(self) -> PackedWeight:
        call, gate_up = self._call, self._call.epilogue is Epilogue.SWIGLU
        codes = self._bytes(call.num_groups, call.n, call.k).bitwise_and_(_CODE_BITS)
        shape = packed_shape(num_groups=call.num_groups, n=call.n, k=call.k, target=call.target, gate_up=gate_up)
        one = 127 - (call.k - 1).bit_length() // 2  # rows have norms of about 1
        return PackedWeight(codes, self._bytes(*shape, low=one - 1, high=one + 2), gate_up, call.target)

    def _tokens(self, rows: int) -> PackedTokens:
        k, token_format = self._call.k, self._call.token_format
        if token_format is TokenFormat.BF16_PERMUTED:
            return PackedTokens(token_format, permute_k(self._random(rows, k).to(torch.bfloat16)), None, k)
        codes = self._bytes(rows, k).bitwise_and_(_CODE_BITS).view(torch.float8_e4m3fn)
        if token_format is TokenFormat.MXFP8_TCGEN05:
            size = tiled_bytes(rows, k, num_groups=self._call.num_groups)
            return PackedTokens(token_format, codes, self._bytes(size, low=126, high=129), k)
        powers = self._bytes(k // MXFP8_BLOCK, fp32_pitch(rows), low=126, high=129)
        return PackedTokens(token_format, codes, torch.exp2(powers.float() - 127), k)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float32, device=self._device, generator=self._generator)

    def _bytes(self, *shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        made = torch.empty(*shape, dtype=torch.uint8, device=self._device)
        return made.random_(low, high, generator=self._generator)


def _current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _l2_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size


def _values(tokens: PackedTokens, counts: Sequence[int]) -> torch.Tensor:
    """float32 ``[S, K]``. Tiled scales of each run begin at the first free tile."""
    if tokens.token_format is not TokenFormat.MXFP8_TCGEN05:
        return unpack_tokens(tokens)
    assert tokens.scales is not None
    blocks, row, at, found = tokens.k // MXFP8_BLOCK, 0, 0, []
    for count in filter(None, counts):
        size = padded_rows(count) * padded_blocks(blocks)
        scales = untile_scales(tokens.scales[at : at + size], num_rows=count, num_blocks=blocks)
        found.append(dequantize_mxfp8(tokens.data[row : row + count], scales))
        row, at = row + count, at + size
    return torch.cat(found)
