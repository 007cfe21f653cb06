"""The sm_90 GEMM's config, as it follows from a call's shapes. Imports neither torch nor cutlass."""

from dataclasses import replace

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm.config import (
    FOUR_GROUPS_TOKENS,
    MAX_GROUPS,
    SCALE_K,
    W8A8_TILES,
    WARPGROUP_ROWS,
    Epilogue,
    GemmConfig,
    token_tile_for,
    with_stages,
    with_tile,
)
from vllm_rose_plugin.kernels.gemm.crowding import crowded_tokens, roomy_tokens, tokens_to_hold
from vllm_rose_plugin.kernels.gemm.estimate import quickest

_SPLIT_TOKENS = 64
_SHORT_K = 2048
_GUESSED_TOKENS = 3
"""Of a group on average: where tokens spread at random, 5 % of the groups have none."""
_ROOM_FROM = 14
"""Tokens of a group on average from which a tile has room for a crowded group, at the price of code for two widths."""
_LEAST_W8A16_TILE = 48
"""Of those: one of 32 has fewer consumers, and takes longer than a narrow one of 48."""
_FEW_GROUPS = 32
"""With more, further tiles of crowded groups fill the device well, and cost less than larger tiles for all: 128 groups
at a mean of 32 take 15 % longer in tiles of 64 where tokens spread at random, 16 groups 28 % less where they are
skewed. Numbers between were not measured."""
_CLOSE = 0.05
"""Differences in the share of useful work that other reasons outweigh."""


def choose_token_format(*, activation: Activation, num_groups: int, num_rows: int) -> TokenFormat:
    """The format in which sm_90's GEMMs want their tokens: of w13, and of w2 behind it.

    Args:
        activation: BF16 leaves no choice.
        num_groups, num_rows: G, and S over all groups.
    """
    if activation is Activation.BF16 or crowded_tokens(num_groups=num_groups, num_rows=num_rows) > W8A8_TILES[-1]:
        return TokenFormat.BF16_PERMUTED
    return TokenFormat.MXFP8_FP32_SCALES


def choose_config(
    *,
    num_groups: int,
    n: int,
    k: int,
    num_rows: int,
    token_format: TokenFormat,
    epilogue: Epilogue = Epilogue.PLAIN,
    out_dtype: str = "bfloat16",
    bias: bool = False,
    activation: Activation = Activation.MXFP8,
    rounding: Rounding = Rounding.RCEIL,
    limit: float | None = None,
    out_format: TokenFormat | None = None,
    early_counts: bool = False,
    batch_invariant: bool = False,
    sm_count: int = 132,
    domains: int = 1,
    token_tile: int | None = None,
) -> GemmConfig:
    """The config for a call.

    Args:
        num_groups, n, k: of the weight ``[G, N, K]``.
        num_rows: S, tokens over all groups, which the host knows; how they spread over groups it doesn't.
        token_format: MXFP8_FP32_SCALES or BF16_PERMUTED; see :func:`choose_token_format`.
        epilogue, out_dtype, bias, activation, rounding, limit, early_counts: see :class:`GemmConfig`.
        out_format: what SWIGLU writes; the format of its own tokens by default.
        batch_invariant: no stream-K, and K shared by two blocks at most: a row's bits would depend on the number of
            rows, or on where in a tile it stands.
        sm_count: of the device.
        domains: parts of the weight; with several, a tile's K stays whole.
        token_tile: of several groups, to compare tiles; None: what follows from their tokens.

    Raises:
        ValueError: sizes that the kernel doesn't take; the message names them.
    """
    _check(num_groups=num_groups, n=n, k=k, token_format=token_format, epilogue=epilogue, out_dtype=out_dtype)
    tokens = -(-num_rows // num_groups)
    tile, narrow = (token_tile, 0) if token_tile else _tile(num_groups, num_rows, token_format)
    config = GemmConfig(
        num_groups=num_groups,
        n=n,
        k=k,
        token_format=token_format,
        epilogue=epilogue,
        out_dtype=out_dtype,
        bias=bias,
        out_format=out_format or token_format,
        activation=activation,
        rounding=rounding,
        limit=limit,
        early_counts=early_counts,
        guesses=not early_counts and num_groups > 1 and _GUESSED_TOKENS <= tokens <= tile,
        row_groups=2,
        token_tile=tile,
        k_tile=SCALE_K,
        pass_k=SCALE_K,
        stages=0,
        in_flight=4,
        blocks_per_sm=1,
        cluster=1,
        split_k=False,
        stream_k=False,
        narrow_tokens=narrow,
        domains=domains,
    )
    config = with_tile(config, tile)
    if num_groups == 1 and epilogue is Epilogue.PLAIN and domains == 1:
        if not config.w8a8:
            return quickest(config, tokens=tokens, sm_count=sm_count, batch_invariant=batch_invariant)
        split = _split(config, sm_count=sm_count) if tokens <= _SPLIT_TOKENS else None
        if split is not None:
            return with_stages(split)
    groups = min(num_groups, num_rows)  # that have tokens, if these spread well
    return with_stages(_most_even(_shapes(config), groups=groups, tokens=tokens, sm_count=sm_count))


def _tile(num_groups: int, num_rows: int, token_format: TokenFormat) -> tuple[int, int]:
    """(token_tile, narrow_tokens): a tile that nearly every group fits into, multiplied as the mean needs it."""
    usual = token_tile_for(tokens_to_hold(num_groups=num_groups, num_rows=num_rows), token_format)
    mean = -(-num_rows // num_groups)
    if num_groups == 1 or mean < _ROOM_FROM:
        return usual, 0
    least = W8A8_TILES[-1] if token_format is TokenFormat.MXFP8_FP32_SCALES else _LEAST_W8A16_TILE
    tile = max(token_tile_for(roomy_tokens(mean), token_format), least)
    if tile > (FOUR_GROUPS_TOKENS if num_groups <= _FEW_GROUPS else least):
        return usual, 0
    narrow = token_tile_for(mean, token_format)
    return tile, narrow if narrow < tile else 0


def _split(config: GemmConfig, *, sm_count: int) -> GemmConfig | None:
    """The smallest tiles, and K split, where a single weight doesn't keep every SM reading otherwise."""
    tiles = -(-config.n // WARPGROUP_ROWS)
    config = replace(config, row_groups=1)
    if tiles <= sm_count // 2 and config.token_tile == 8 and config.k <= _SHORT_K:
        return config  # adding up would cost more than it brings
    split = replace(config, cluster=2, split_k=True)
    if 2 * tiles <= sm_count:
        return split
    if 2 * tiles <= 3 * sm_count and config.token_tile <= 32:
        return replace(split, blocks_per_sm=3, in_flight=2 if config.token_tile == 32 else 4)
    return None


def _shapes(config: GemmConfig) -> list[GemmConfig]:
    """Ways to cut the rows, the best first where all of them fill the device equally well.

    W8A16: more rows to a block mean fewer reads of the tokens from L2. W8A8: more warps hide what rescaling costs.
    """
    tile = config.token_tile
    shapes: tuple[tuple[int, int, int], ...]
    if config.w8a8:
        shapes = ((2, 1, 4), (1, 3, 4)) if tile < 32 else ((2, 2, 2), (2, 1, 4), (1, 3, 2))
    elif tile > 128:
        shapes = ((2, 1, 4),)
    else:
        shapes = ((3, 1, 4), (2, 1, 4)) if tile > 32 else ((2, 1, 4), (1, 3, 4))
        if 32 < tile <= FOUR_GROUPS_TOKENS:
            shapes = ((4, 1, 4), *shapes)
    return [
        replace(config, row_groups=row_groups, blocks_per_sm=blocks, in_flight=in_flight)
        for row_groups, blocks, in_flight in shapes
    ]


def _most_even(configs: list[GemmConfig], *, groups: int, tokens: int, sm_count: int) -> GemmConfig:
    """The first whose share of useful work is within a few percent of the largest."""

    def share(config: GemmConfig) -> float:
        tiles = groups * config.row_tiles * -(-tokens // config.token_tile)
        slots = config.grid(sm_count) // (config.cluster if config.split_k else 1)
        rows = config.n / (config.row_tiles * config.row_tile)
        return rows * tiles / (-(-tiles // slots) * slots)

    best = max(map(share, configs))
    return next(config for config in configs if share(config) > best - _CLOSE)


def _check(*, num_groups: int, n: int, k: int, token_format: TokenFormat, epilogue: Epilogue, out_dtype: str) -> None:
    if not 1 <= num_groups <= MAX_GROUPS:
        raise ValueError(f"num_groups is {num_groups}; it must be 1 to {MAX_GROUPS}")
    if k < MXFP8_BLOCK or k % MXFP8_BLOCK:
        raise ValueError(f"K is {k}; it must be a multiple of {MXFP8_BLOCK}")
    if n < MXFP8_BLOCK or n % 8:
        raise ValueError(f"N is {n}; it must be a multiple of 8, at least {MXFP8_BLOCK}")
    if epilogue is Epilogue.SWIGLU and n % (2 * MXFP8_BLOCK):
        raise ValueError(
            f"N is {n}; with SwiGLU it must be a multiple of {2 * MXFP8_BLOCK}: gate and up of whole blocks"
        )
    if token_format is TokenFormat.MXFP8_TCGEN05:
        raise ValueError(
            f"sm_90 reads {TokenFormat.MXFP8_FP32_SCALES} or {TokenFormat.BF16_PERMUTED}, got {token_format}"
        )
    if out_dtype not in ("bfloat16", "float16"):
        raise ValueError(f'out_dtype is {out_dtype!r}; it must be "bfloat16" or "float16"')
