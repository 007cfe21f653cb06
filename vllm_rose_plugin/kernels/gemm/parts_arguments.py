"""The arguments of a grouped GEMM on a weight in parts, one in each locality domain; the same on every target."""

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Int32


class PartsArguments:
    """A base before a target's kernel: takes ``MAX_DOMAINS`` parts and hands ``start`` those that are there."""

    config: Any  # of the target
    start: Callable[..., None]

    @cute.jit
    def __call__(
        self,
        codes_0: cute.Tensor,  # (G, N / domains, K) uint8, as codes_1 to codes_3; those beyond the last aren't read
        scales_0: cute.Tensor,
        codes_1: cute.Tensor,
        scales_1: cute.Tensor,
        codes_2: cute.Tensor,
        scales_2: cute.Tensor,
        codes_3: cute.Tensor,
        scales_3: cute.Tensor,
        token_codes: cute.Tensor,
        token_scales: cute.Tensor,
        expert_offsets: cute.Tensor,
        expert_counts: cute.Tensor,
        bias: cute.Tensor,
        out: cute.Tensor,
        out_scales: cute.Tensor,
        sm_domains: cute.Tensor,  # (SMs) int32
        counters: cute.Tensor,  # (counter_words) int32, zero between launches
        grid: Int32,
        stream,
    ):
        parts = ((codes_1, scales_1), (codes_2, scales_2), (codes_3, scales_3))
        self.start(
            (codes_0, scales_0, token_codes, token_scales),
            (expert_offsets, expert_counts),
            bias,
            (out, out_scales),
            (sm_domains, counters),
            grid,
            stream,
            parts[: self.config.domains - 1],
        )
