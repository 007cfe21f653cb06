"""Whether a linear layer is faster with its weight in parts: checked against the whole weight's kernel, and timed.

Parts are computed by one launch alone. A fork and a join, which is the other way, cost a linear layer more than its
share of near memory can gain. Times, and the verdict, are the self-check's (``jit``).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vllm_rose_plugin.kernels.gemm.column_split import ColumnSplit, split_packed
from vllm_rose_plugin.kernels.gemm.domains import linear_domains
from vllm_rose_plugin.kernels.gemm.family import (
    LinearShape,
    by_rose,
    compare,
    config_of,
    make_inputs,
    plan_of,
    quantizer_call,
)
from vllm_rose_plugin.kernels.gemm.tuned import digest
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight
from vllm_rose_plugin.kernels.jit.providers import Family, Provider, Timer, choose, time_in_graph, time_on_gpu
from vllm_rose_plugin.kernels.moe_experts.compare_ways import WHOLE, Comparison
from vllm_rose_plugin.kernels.moe_experts.make_ways import SINGLE_LAUNCH
from vllm_rose_plugin.kernels.mxfp8_quantize import launch as quantize
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts
from vllm_rose_plugin.memory.domain_memory import DomainMemory
from vllm_rose_plugin.memory.driver import round_up

FAMILY = "linear_locality"
_ALIGNMENT = 256
_TURNS = 16
"""Calls of a graph that is timed, at least."""
_MOST_COPIES = 64


@dataclass(frozen=True)
class Place:
    """Where a weight's parts go, and which SMs lie beside them."""

    split: ColumnSplit
    allocate: Callable[[list[int]], DomainMemory]
    """(bytes of each part) -> memory, all of it or none."""
    sm_domains: torch.Tensor  # (SMs) int32
    forced: bool
    """Whether the domains are none, but equal shares of the SMs and memory anywhere."""


def compare_split(
    *,
    shape_of: Callable[[int], LinearShape],
    tokens: Sequence[int],
    place: Place,
    captured: bool,
    checked: Sequence[int] = (),
    timer: Timer | None = None,
) -> Comparison:
    """Check and time parts at the shapes of a layer, on random weights; the outcome is kept on disk.

    Each call that is timed goes to another copy of the weight, so that it comes from memory and not from the L2 cache.
    That needs memory of four times that cache, or three layers.

    Args:
        shape_of: number of tokens to the layer's call.
        tokens: numbers of tokens to check and time at, ascending.
        place: of the parts.
        captured: whether calls are captured into CUDA graphs.
        checked: numbers of tokens to check at besides, so that no kernel serves that wasn't checked.
        timer: of a call; None: the self-check's, or one of a graph of calls where they are captured.

    Raises:
        NoProviderError: whole weights raised too.
    """
    timed = tuple(map(shape_of, tokens))
    shapes = tuple(map(shape_of, sorted({*tokens, *checked})))

    def time(call: Any) -> float:
        by_turns = ByTurns(call)
        if timer is not None:
            return timer(by_turns)
        calls = max(_TURNS, by_turns.copies)
        return time_in_graph(by_turns, calls=calls) if captured else time_on_gpu(by_turns, calls=calls)

    verdict = choose(family=family_of(place), shapes=shapes, timed=timed, timer=time).verdict
    return Comparison(tuple(tokens), verdict.microseconds, verdict.failed)


def family_of(place: Place) -> Family:
    """Parts as the candidate beside the whole weight. Its configs are those of the parts' kernels too.

    Bits may differ: the whole weight's kernel may share K among blocks, which parts' doesn't. So results are compared
    as the self-check compares a linear layer's with the reference's.
    """

    def configs(shape: LinearShape, target: str, sm_count: int) -> Any:
        return (config_of(shape, target, sm_count), _plan(shape, place, target, sm_count).config)

    return Family(
        name=FAMILY,
        reference=Provider(WHOLE, _everywhere, by_rose),
        providers=(Provider(SINGLE_LAUNCH, _everywhere, partial(_OnParts, place)),),
        make_inputs=make_inputs,
        compare=compare,
        config_of=configs,
        state=lambda: f"forced={place.forced}, {place.split}; {digest()}",
    )


def compile_kernels(shapes: Sequence[LinearShape], place: Place) -> None:
    """Make the kernels of these calls on parts, before any graph is captured."""
    facts = device_facts(torch.cuda.current_device())
    for shape in shapes:
        quantize.warm_up(**quantizer_call(shape, facts.target))
        _plan(shape, place, facts.target, facts.sm_count).compile()


def _plan(shape: LinearShape, place: Place, target: str, sm_count: int) -> Any:
    return plan_of(shape, target, sm_count, domains=place.split.parts)


def _everywhere(shape: Any, target: str | None) -> bool:
    return True


def place_parts(
    split: ColumnSplit, weight: PackedWeight, allocate: Callable[[list[int]], DomainMemory]
) -> tuple[DomainMemory, list[PackedWeight]]:
    """A packed weight, copied into parts.

    Raises:
        RuntimeError: a domain has no room; nothing stays allocated.
    """
    each = [round_up(tensor.numel() // split.parts, _ALIGNMENT) for tensor in (weight.codes, weight.scales)]
    memory = allocate([sum(each)] * split.parts)
    ends = [0] * split.parts

    def make(part: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = memory.tensor(part, shape=shape, dtype=dtype, offset=ends[part])
        ends[part] += round_up(tensor.nbytes, _ALIGNMENT)
        return tensor

    return memory, split_packed(split, weight, make)


class ByTurns:
    """A call that goes to another copy of the weight each time, as one layer of a model follows another."""

    def __init__(self, call: Any):
        """Args: call: a ``functools.partial`` of a kernel and what ``make_inputs`` made."""
        *first, x, weight, packed, bias = call.args  # a partial of a partial has the arguments of both
        size = packed.codes.numel() + packed.scales.numel()
        cache = torch.cuda.get_device_properties(packed.codes.device).L2_cache_size if packed.codes.is_cuda else 0
        self.copies = min(_MOST_COPIES, 1 + -(-2 * cache // size))
        self._call: Callable[..., torch.Tensor] = partial(call.func, *first) if first else call.func
        packed_copies = [
            PackedWeight(packed.codes.clone(), packed.scales.clone(), packed.gate_up, packed.target)
            for _ in range(self.copies)
        ]
        self._inputs = itertools.cycle([(x, weight, each, bias) for each in packed_copies])

    def __call__(self) -> torch.Tensor:
        return self._call(*next(self._inputs))


class _OnParts:
    """A call of the kernel on parts; weights are brought there at the first call with each."""

    def __init__(self, place: Place, shape: LinearShape):
        self.place, self.shape = place, shape
        self._placed: dict[int, tuple[torch.Tensor, list[PackedWeight]]] = {}
        """Address of a weight to the weight, so that it stays there, and its parts."""
        self._memories: list[DomainMemory] = []
        compile_kernels((shape,), place)

    def __call__(self, *inputs: Any) -> torch.Tensor:
        x, _, packed, bias = inputs
        if packed.codes.data_ptr() not in self._placed:
            memory, parts = place_parts(self.place.split, packed, self.place.allocate)
            self._memories.append(memory)
            self._placed[packed.codes.data_ptr()] = packed.codes, parts
        return linear_domains(
            x,
            self._placed[packed.codes.data_ptr()][1],
            sm_domains=self.place.sm_domains,
            bias=bias,
            activation=self.shape.activation,
            rounding=self.shape.rounding,
            batch_invariant=self.shape.batch_invariant,
        )

    def __del__(self) -> None:
        memories = getattr(self, "_memories", [])
        self._placed = {}
        if memories:
            torch.cuda.synchronize()
        for memory in memories:
            memory.free()
