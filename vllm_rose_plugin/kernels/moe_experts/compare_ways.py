"""Whether a layer is faster with its weights in parts, and which way of launching them is: each is checked and timed.

Whole weights are the reference: a way must give their bits. Times, and the verdict, are the self-check's (``jit``).
"""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vllm_rose_plugin.kernels.gemm.column_split import ColumnSplit, split_packed
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight
from vllm_rose_plugin.kernels.jit.providers import Family, Provider, Timer, choose, time_in_graph, time_on_gpu
from vllm_rose_plugin.kernels.jit.verdicts import Verdict
from vllm_rose_plugin.kernels.moe_experts.config import product_configs
from vllm_rose_plugin.kernels.moe_experts.family import (
    ExpertsShape,
    Inputs,
    by_rose,
    layer_of,
    make_inputs,
    run_kernels,
)
from vllm_rose_plugin.kernels.moe_experts.family import state as experts_state
from vllm_rose_plugin.kernels.moe_experts.make_ways import Domains
from vllm_rose_plugin.kernels.moe_experts.ways import Way, Ways
from vllm_rose_plugin.memory.domain_memory import DomainMemory
from vllm_rose_plugin.memory.driver import round_up

FAMILY = "moe_locality"
WHOLE = "whole"
"""What ways are compared with."""
TOKENS = (1, 8, 64, 512)
"""Of a step, and the most that it can have."""
GAIN = 1.02
"""By which parts must be faster, over all token counts: less may be chance."""
_ALIGNMENT = 256
_TURNS = 16
"""Calls until one goes to the same experts again."""


@dataclass(frozen=True)
class Comparison:
    """What was measured."""

    tokens: tuple[int, ...]
    microseconds: dict[str, list[float]]
    """Way, or WHOLE, to the time at each number of tokens; those that failed are missing."""
    failed: dict[str, str]
    """Way to what is wrong with it."""

    def best(self) -> tuple[str, ...]:
        """The fastest way at each number of tokens; empty where none passed, or nothing is known to compare it with."""
        ways = [name for name in self.microseconds if name != WHOLE]
        if not ways or WHOLE not in self.microseconds:
            return ()
        return tuple(min(ways, key=lambda name: self.microseconds[name][i]) for i in range(len(self.tokens)))

    def gain(self, names: Sequence[str]) -> float:
        """How much faster these ways are than whole weights: geometric mean over the numbers of tokens.

        Args:
            names: a way for each number of tokens.
        """
        whole = self.microseconds[WHOLE]
        ratios = [whole[i] / self.microseconds[name][i] for i, name in enumerate(names)]
        return math.exp(statistics.fmean(map(math.log, ratios)))


def compare_ways(
    *,
    shape_of: Callable[[int], ExpertsShape],
    tokens: Sequence[int],
    ways: Mapping[str, Way],
    splits: tuple[ColumnSplit, ColumnSplit],
    domains: Domains,
    checked: Sequence[int] = (),
    timer: Timer | None = None,
) -> Comparison:
    """Check and time each way at the shapes of a layer, on random weights; the outcome is kept on disk.

    Needs memory for a layer of experts three times.

    Args:
        shape_of: number of tokens to the layer's call.
        tokens: numbers of tokens to check and time at, ascending.
        ways: name to way.
        splits: of w13 and w2.
        domains: where the parts go.
        checked: numbers of tokens to check at besides, so that no kernel serves that wasn't checked.
        timer: of a call that goes to other experts each time. None: the self-check's, or :func:`time_in_graph` where
            calls are captured, since it is the host that makes forks and joins dear.

    Raises:
        NoProviderError: whole weights raised too.
    """
    timed = tuple(map(shape_of, tokens))
    shapes = tuple(map(shape_of, sorted({*tokens, *checked})))
    if timer is None:
        timer = time_in_graph if timed[0].captured else time_on_gpu
    of_one = timer
    family = family_of(ways=ways, splits=splits, domains=domains)
    verdict: Verdict = choose(
        family=family, shapes=shapes, timed=timed, timer=lambda call: of_one(_ByTurns(call))
    ).verdict
    return Comparison(tuple(tokens), verdict.microseconds, verdict.failed)


def family_of(*, ways: Mapping[str, Way], splits: tuple[ColumnSplit, ColumnSplit], domains: Domains) -> Family:
    """The ways as candidates beside whole weights. Its configs are those of the parts' products.

    Args: as in :func:`compare_ways`.
    """

    def config_of(shape: ExpertsShape, target: str, sm_count: int) -> Any:
        how: dict[str, Any] = {"sm_count": sm_count, "dtype": shape.dtype, "rounding": shape.rounding}
        return tuple(
            product_configs(layer_of(shape, target), shape.num_tokens, parts_of=parts_of, **how) for parts_of in by_way
        )

    w13, w2 = (split.parts for split in splits)
    by_way = [(way.part_of(w13) if w13 > 1 else None, way.part_of(w2) if w2 > 1 else None) for way in ways.values()]
    providers = tuple(
        Provider(name, _everywhere, partial(_OnParts, way, splits, domains), version=_kind(way))
        for name, way in ways.items()
    )
    return Family(
        name=FAMILY,
        reference=Provider(WHOLE, _everywhere, by_rose),
        providers=providers,
        make_inputs=make_inputs,
        compare=_bits_differ,
        config_of=config_of,
        state=lambda: f"{domains.count} domains, forced={domains.forced}, {splits}; {experts_state()}",
    )


def ways_of(names: Sequence[str], tokens: Sequence[int], ways: Mapping[str, Way]) -> Ways:
    """The way for any number of tokens: that of the next measured number.

    Args:
        names: a way for each of the numbers.
        tokens: numbers of tokens, ascending.
        ways: name to way.
    """
    ends = [i for i in range(len(names)) if i == len(names) - 1 or names[i] != names[i + 1]]
    chosen = tuple(names[i] for i in ends)
    return Ways(chosen, tuple(ways[name] for name in chosen), tuple(tokens[i] for i in ends[:-1]))


def _everywhere(shape: Any, target: str | None) -> bool:
    return True


def _kind(way: Way) -> str:
    sm_counts = getattr(way, "sm_counts", ())
    return f"on {' + '.join(map(str, sm_counts))} SMs" if sm_counts else ""


def _bits_differ(result: torch.Tensor, expected: torch.Tensor) -> str:
    a, b = (tensor.view(torch.int16) for tensor in (result, expected))
    return (
        "" if torch.equal(a, b) else f"{(a != b).sum()} of {a.numel()} elements have other bits than whole weights give"
    )


class _ByTurns:
    """A call that goes to other experts each time, as one layer of a model follows another.

    Few tokens would find the same experts in the L2 cache, and near memory would be as far as any.
    """

    def __init__(self, call: Any):
        """Args: call: a ``functools.partial`` of a kernel and its :class:`Inputs`."""
        self.func, given = call.func, Inputs(*call.args)
        ids, experts = given.topk_ids, len(given.w13.codes if given.expert_map is None else given.expert_map)
        somewhere = (ids >= 0) & (ids < experts)
        turned = (torch.where(somewhere, (ids + turn * ids.shape[1]) % experts, ids) for turn in range(_TURNS))
        self._inputs = itertools.cycle([given._replace(topk_ids=each) for each in turned])

    def __call__(self) -> torch.Tensor:
        result: torch.Tensor = self.func(*next(self._inputs))
        return result


class _OnParts:
    """A call of the kernels on parts; weights are brought there at the first call with them."""

    def __init__(self, way: Way, splits: tuple[ColumnSplit, ColumnSplit], domains: Domains, shape: ExpertsShape):
        self.way, self.splits, self.domains, self.shape = way, splits, domains, shape
        self.memory: DomainMemory | None = None
        self.weights: tuple[list[PackedWeight], ...] = ()
        self.of: torch.Tensor | None = None

    def __call__(self, *inputs: Any) -> torch.Tensor:
        given = Inputs(*inputs)
        if self.of is not given.w13.codes:
            self.place(given)
        return run_kernels(self.shape, given, *self.weights, way=self.way)

    def place(self, given: Inputs) -> None:
        """Copy the packed weights into parts."""
        self.free()
        assert given.packed is not None
        sizes = [0] * self.domains.count
        for packed, split in zip(given.packed, self.splits, strict=True):
            if split.parts > 1:
                for tensor in (packed.codes, packed.scales):
                    sizes = [size + round_up(tensor.numel() // split.parts, _ALIGNMENT) for size in sizes]
        memory = self.memory = self.domains.allocate(sizes)
        ends = [0] * self.domains.count

        def make(part: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            tensor = memory.tensor(part, shape=shape, dtype=dtype, offset=ends[part])
            ends[part] += round_up(tensor.nbytes, _ALIGNMENT)
            return tensor

        self.weights = tuple(
            split_packed(split, packed, make) if split.parts > 1 else [packed]
            for packed, split in zip(given.packed, self.splits, strict=True)
        )
        self.of = given.w13.codes

    def free(self) -> None:
        """Give the parts back."""
        self.weights, self.of = (), None
        memory, self.memory = self.memory, None
        if memory is not None:
            torch.cuda.synchronize()
            memory.free()

    def __del__(self) -> None:
        self.free()
