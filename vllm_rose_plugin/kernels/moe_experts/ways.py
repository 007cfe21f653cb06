"""How a layer whose weights lie in parts is launched: which way for how many tokens, and the two products.

A layer's way is found by name, since an op takes no objects: names are made of what was chosen, so that processes that
chose alike share compiled graphs. Whoever registers a name keeps what its ways use alive as long as the process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_rose_plugin.kernels.contracts import Activation, Rounding
from vllm_rose_plugin.kernels.gemm import launch as gemm
from vllm_rose_plugin.kernels.gemm.call import Call
from vllm_rose_plugin.kernels.gemm.domains import grouped_gemm_domains, grouped_gemm_swiglu_domains
from vllm_rose_plugin.kernels.gemm.forked_gemm import Forked, gemm_launches, swiglu_launches
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight


@dataclass(frozen=True)
class OneLaunch:
    """One launch over all SMs, whose blocks take tiles of their own domain's part first."""

    sm_domains: torch.Tensor  # (SMs) int32, the domain of each

    def part_of(self, parts: int) -> Callable[[Call], Call]:
        """The call on a weight in so many parts, from that on the whole."""
        return lambda whole: replace(whole, domains=parts)


Way = Forked | OneLaunch


@dataclass(frozen=True)
class Ways:
    """The way for each number of tokens."""

    names: tuple[str, ...]
    """Of the ways below."""
    ways: tuple[Way, ...]
    up_to: tuple[int, ...] = ()
    """Most tokens that take each way but the last, ascending."""

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.ways) == len(self.up_to) + 1 or list(self.up_to) != sorted(self.up_to):
            raise ValueError(f"{len(self.ways)} ways named {self.names} can't be told apart by {self.up_to}")

    def at(self, num_tokens: int) -> Way:
        """The way for a call of so many tokens."""
        return self.ways[sum(num_tokens > most for most in self.up_to)]


_registered: dict[str, Ways] = {}


def register(name: str, ways: Ways) -> None:
    """Let layers be launched in these ways under a name; the first registration of a name stays."""
    _registered.setdefault(name, ways)


def registered(name: str) -> Ways:
    """What :func:`register` was given.

    Raises:
        ValueError: nothing of that name.
    """
    if name not in _registered:
        raise ValueError(f"no ways are registered as {name!r}; there are {', '.join(_registered) or 'none'}")
    return _registered[name]


def products(
    tokens: PackedTokens,
    w13: Sequence[PackedWeight],
    w2: Sequence[PackedWeight],
    *,
    way: Way,
    intermediate: PackedTokens,
    out: torch.Tensor,
    activation: Activation,
    rounding: Rounding,
    expected_rows: int,
    expert_offsets: torch.Tensor,
    expert_counts: torch.Tensor,
) -> None:
    """w13 with SwiGLU, then w2: the bits of the plain kernels, see ``forked_gemm``.

    Args:
        tokens: S rows of H.
        w13, w2: parts in the order of their columns; a single one isn't split, and takes the plain kernel.
        way: of the parts.
        intermediate: where S rows of I go.
        out: ``[S, H]``.
        (others): as in ``launch.grouped_gemm_swiglu``.
    """
    runs: dict[str, Any] = {"expert_offsets": expert_offsets, "expert_counts": expert_counts}
    runs["expected_rows"] = expected_rows
    # Counts come from the kernel in front of w13's.
    first: dict[str, Any] = {"out": intermediate, "activation": activation, "rounding": rounding, "early_counts": False}
    second: dict[str, Any] = {"out": out, "early_counts": True}
    if isinstance(way, Forked):
        rounds = []
        if len(w13) > 1:
            rounds.append(swiglu_launches(tokens, w13, forked=way, **first, **runs))
        else:
            gemm.grouped_gemm_swiglu(tokens, w13[0], **first, **runs)
        if len(w2) > 1:
            rounds.append(gemm_launches(intermediate, w2, forked=way, **second, **runs))
        way.streams.run(*rounds)
        if len(w2) == 1:
            gemm.grouped_gemm(intermediate, w2[0], out_dtype=out.dtype, **second, **runs)
        return
    grouped_gemm_swiglu_domains(tokens, w13, sm_domains=way.sm_domains, **first, **runs)
    grouped_gemm_domains(intermediate, w2, sm_domains=way.sm_domains, out_dtype=out.dtype, **second, **runs)
