"""The time that sm_90's W8A16 GEMM takes with a single weight, estimated, and the cut of a call that is quickest by it.

Imports neither torch nor cutlass.
"""

from collections.abc import Iterator
from dataclasses import replace

from vllm_rose_plugin.kernels.gemm.config import (
    FOUR_GROUPS_TOKENS,
    SCALE_K,
    W8A16_TILES,
    GemmConfig,
    stages_that_fit,
    token_tile_for,
    with_stages,
    with_tile,
)
from vllm_rose_plugin.kernels.gemm.stream_k import share_of

_STREAM_K_TILES = ((2, 256), (2, 128), (2, 192), (2, 96), (2, 64), (3, 64))
"""(row_groups, token_tile): few, since every config that some number of tokens needs is compiled before the first."""
_SMALL_STREAM_K_TILES = tuple((row_groups, tile) for tile in (48, 32, 16) for row_groups in (2, 1))
"""Only for tuning: the estimate says little of them."""
_HAND_OVER_RATE, _HAND_OVER_LATENCY = 40.0, 800.0
"""Bytes in a cycle and cycles: of writing a block's sums, and of reading them."""
_STREAM_K_SAVES = 1.02
"""It must promise that much: where it ties by estimate, as from 4096 tokens on, whole tiles measured faster."""
_STREAM_K_BYTES = 60 * 10**6
"""Of weights and tokens. With stream-K the blocks are all over both at any time; where these don't stay in L2 (50 MB on
an H200), whole tiles in order are faster: 413 against 497 us for o_proj at M = 4096, of 101 MB, and as fast for its TP4
shard of QKV, of 43 MB (benchmarks/results/gemm_candidates.csv)."""


def quickest(config: GemmConfig, *, tokens: int, sm_count: int, batch_invariant: bool) -> GemmConfig:
    """W8A16 with a single weight: rows, tokens and ways to share K whose estimated time is the least."""
    shares = not batch_invariant and _operand_bytes(config, tokens) <= _STREAM_K_BYTES
    found = _estimated(config, _STREAM_K_TILES if shares else (), tokens=tokens, sm_count=sm_count)
    if batch_invariant:
        # Four blocks add up in an order that depends on which of them has the element; the sum of two has one order.
        found = [each for each in found if each[1].cluster <= 2]
    return with_stages(min(found, key=lambda each: each[0] * (_STREAM_K_SAVES if each[1].stream_k else 1))[1])


def by_estimate(config: GemmConfig, *, tokens: int, sm_count: int) -> list[tuple[float, GemmConfig]]:
    """W8A16 with a single weight: other rows, tokens and ways to share K, those of the least estimated time first.

    Args:
        config: of a call with that many tokens; what it computes.
        tokens, sm_count: of the call, and of the device.

    Returns:
        (estimated cycles, config).
    """
    plain = replace(config, in_flight=4, blocks_per_sm=1, cluster=1, split_k=False, stream_k=False)
    plain = with_tile(plain, token_tile_for(tokens, config.token_format))
    found = _estimated(plain, _STREAM_K_TILES + _SMALL_STREAM_K_TILES, tokens=tokens, sm_count=sm_count)
    return [(cycles, with_stages(cut)) for cycles, cut in sorted(found, key=lambda each: each[0])]


def _estimated(
    config: GemmConfig, stream_k_tiles: tuple[tuple[int, int], ...], *, tokens: int, sm_count: int
) -> list[tuple[float, GemmConfig]]:
    """(cycles, config without stages); where several are as quick, the first is to be taken."""
    return [
        (_cycles(cut, tokens=tokens, sm_count=sm_count), cut)
        for cut in _cuts(config, stream_k_tiles)
        if stages_that_fit(cut) >= 4
    ]


def _cuts(config: GemmConfig, stream_k_tiles: tuple[tuple[int, int], ...]) -> Iterator[GemmConfig]:
    least = min(config.token_tile, 64)
    for tile in W8A16_TILES:
        if not least <= tile <= config.token_tile:
            continue
        cut = with_tile(config, tile)
        for row_groups, most_tokens in ((2, 256), (1, 128), (3, 128), (4, FOUR_GROUPS_TOKENS)):
            for cluster in (1, 2, 4):
                if tile > most_tokens or (tile > 128 and cluster > 1):
                    continue
                yield replace(cut, row_groups=row_groups, cluster=cluster, split_k=cluster > 1)
    for row_groups, tile in stream_k_tiles:
        if least <= tile <= config.token_tile:
            yield replace(with_tile(config, tile), row_groups=row_groups, stream_k=True)


def _cycles(config: GemmConfig, *, tokens: int, sm_count: int) -> float:
    """Estimated time of W8A16 with a single weight, at 1.755 GHz.

    Without stream-K within 3 % of 16 times measured on an H200, M = 64 to 4096 (the rows `rose_gemm` of
    benchmarks/results/gemm_dense.csv), to which the numbers here were fitted; small M has the least to say in them.
    What handing over costs is fitted to 53 configs with stream-K of the same layers and their shards, M = 64 to 1024:
    within 9 % of them, root mean square (benchmarks/results/gemm_candidates.csv).
    """
    tiles = config.row_tiles * -(-tokens // config.token_tile)
    rows, tile = config.row_tile, config.token_tile
    blocks = config.grid(sm_count)
    slots = blocks // config.cluster
    busy = min(tiles * (config.passes if config.stream_k else 1), slots) * config.cluster / sm_count
    per_stage = max(  # of 128 k
        rows * tile / 16 / 0.89,  # matrix instructions
        rows * SCALE_K * busy / 15.6,  # a block's part of the memory bandwidth
        (rows * SCALE_K + tile * SCALE_K * 2) / 36.4,  # L2
        443.0 * config.row_groups,  # widening
    )
    per_pass = per_stage * config.pass_k / SCALE_K
    if config.stream_k:
        passes = config.passes
        share = share_of(units=tiles * passes, blocks=blocks)
        handed_over = 0.0
        if share % passes:
            others = passes // share - 1 if passes % share == 0 else -(-passes // share)
            once = 4 * config.handed_over / _HAND_OVER_RATE + _HAND_OVER_LATENCY
            handed_over = (1 + others) * once  # given to one, taken from others
        return share * per_pass + (share / passes + 1) * 900 + handed_over + 3800
    waves = -(-tiles // slots)
    exchange = 2500 + 0.073 * config.sent_bytes if config.split_k else 0
    return waves * (config.passes * per_pass + 900 + exchange) + 3800


def _operand_bytes(config: GemmConfig, tokens: int) -> int:
    """Of the weight's codes and the tokens, in bf16."""
    return config.k * (config.n + 2 * tokens)
