"""What the sm_90 GEMM is compiled for, and how that follows from a call's shapes. Imports neither torch nor cutlass."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm.stream_k import MOST_UNITS, share_of
from vllm_rose_plugin.kernels.jit.targets import limits_of

WARPGROUP_ROWS = 64
"""Weight rows of one consumer warpgroup: the M of wgmma."""
SCALE_K = 128
"""k that the four scale bytes of a row in one packed word cover."""
SCALE_BYTES = 256
"""Packed scales of 64 rows, 128 k."""
SCALE_ALIGNMENT = 4
"""Token scales, of float32, start at a multiple of these in global memory: where a run doesn't, more are read."""
MAX_GROUPS = 512
PRODUCER_REGISTERS = 24
"""Of a thread of the producer's warpgroup, once it gave up the others."""

W8A8_TILES = (8, 16, 32)
W8A16_TILES = (16, 32, 48, 64, 96, 128, 192, 256)
_STREAM_K_TILES = ((2, 256), (2, 128), (2, 192), (2, 96), (2, 64), (3, 64))
"""(row_groups, token_tile): few, since every config that some number of tokens needs is compiled before the first."""
_SMALL_STREAM_K_TILES = tuple((row_groups, tile) for tile in (48, 32, 16) for row_groups in (2, 1))
"""Only for tuning: the estimate says little of them."""
_HAND_OVER_RATE, _HAND_OVER_LATENCY = 40.0, 800.0
"""Bytes in a cycle and cycles: of writing a block's sums, and of reading them."""
_STREAM_K_SAVES = 1.02
"""It must promise that much: where it ties by estimate, as from 4096 tokens on, whole tiles measured faster."""
_FOUR_GROUPS_TOKENS = 64
"""The largest token tile whose sums the registers hold with four consumer warpgroups."""
_SPLIT_TOKENS = 64
_SHORT_K = 2048
_MOST_STAGES = 24
_GUESSED_TOKENS = 3
"""Of a group on average: where tokens spread at random, 5 % of the groups have none."""
_STREAM_K_BYTES = 60 * 10**6
"""Of weights and tokens. With stream-K the blocks are all over both at any time; where these don't stay in L2 (50 MB on
an H200), whole tiles in order are faster: 413 against 497 us for o_proj at M = 4096, of 101 MB, and as fast for its TP4
shard of QKV, of 43 MB (benchmarks/results/gemm_candidates.csv)."""
_CLOSE = 0.05
"""Differences in the share of useful work that other reasons outweigh."""

MAX_DOMAINS = 4
"""Parts of a weight that one launch takes."""

_RESERVED = 1024 + 1024
"""Shared memory that the system takes of each block, and what aligning the stages can lose."""


class Epilogue(StrEnum):
    """What becomes of the products."""

    PLAIN = "plain"
    """Rounded to ``out_dtype``, with a bias if there is one."""
    SWIGLU = "swiglu"
    """Gate and up rows of w13 become ``silu(gate) * up``, in the format that w2's GEMM reads."""


@dataclass(frozen=True)
class GemmConfig:
    """Everything the sm_90 kernel depends on, besides the addresses, S and what lies on the device.

    A block works on tiles of ``row_tile`` weight rows x ``token_tile`` tokens, one after another.
    """

    num_groups: int
    """G: experts, or 1 for a linear layer; at most MAX_GROUPS."""
    n: int
    """Rows of a group's weight, a multiple of 8; with SWIGLU gate and up together, a multiple of 64."""
    k: int
    """Columns of a weight, a multiple of 32."""
    token_format: TokenFormat
    """MXFP8_FP32_SCALES (W8A8) or BF16_PERMUTED (W8A16)."""
    epilogue: Epilogue
    out_dtype: str
    """PLAIN: "bfloat16" or "float16"."""
    bias: bool
    """PLAIN: float32 [G, N] is added."""
    out_format: TokenFormat
    """SWIGLU: what is written."""
    activation: Activation
    """SWIGLU to BF16_PERMUTED: whether the product passes through MXFP8 first."""
    rounding: Rounding
    """SWIGLU: of the quantization."""
    limit: float | None
    """SWIGLU: vLLM's swiglu_limit."""
    early_counts: bool
    """Counts and offsets were written before the kernel in front of this one in the stream started its last part (see
    sm90.py): then tiles are known, and weights on their way, before that kernel ends."""
    guesses: bool
    """Where counts come late, a block fetches into L2 the weights of the tile that is its first if every group has
    tokens, and no more than one tile of them. Without effect on a weight in parts, whose tiles are drawn."""

    row_groups: int
    """Consumer warpgroups: row_tile / 64."""
    token_tile: int
    """Tokens of a tile, a multiple of 8 up to 256."""
    k_tile: int
    """k of a stage: 128, with W8A16 also 64."""
    pass_k: int
    """k that the main loop's body covers: a multiple of 128, in which matrix instructions and other work overlap."""
    stages: int
    in_flight: int
    """W8A8: matrix instructions under way, each with accumulators of its own."""
    blocks_per_sm: int
    cluster: int
    """Blocks that work together: 1, 2 or 4."""
    split_k: bool
    """The blocks of a cluster share a tile's k. Otherwise they take neighbouring row tiles and share the tokens."""
    stream_k: bool
    """PLAIN with a single weight: all blocks take the same number of passes, whichever tiles these belong to (see
    stream_k.py). Where tiles are cut, and so how sums are rounded, depends on the number of tokens."""
    out_columns: int = 0
    """Columns of the rows that the result is a slice of, where this weight is a part of one; 0: as many as it has."""
    domains: int = 1
    """Parts that the weight is in, by columns of the result (see column_split.py). With several, each has a queue of
    tiles, from which blocks on that locality domain's SMs take first (see domain_queue.py)."""

    def __post_init__(self) -> None:
        if not 1 <= self.domains <= MAX_DOMAINS:
            raise ValueError(f"domains is {self.domains}; it must be 1 to {MAX_DOMAINS}")
        if self.domains > 1 and (self.split_k or self.stream_k or self.cluster > 1):
            raise ValueError(
                f"a weight in {self.domains} parts is for blocks that have whole tiles to themselves, got "
                f"split_k={self.split_k}, stream_k={self.stream_k}, cluster={self.cluster}"
            )
        columns = self.n // 2 if self.epilogue is Epilogue.SWIGLU else self.n
        if self.domains > 1 and columns % (self.domains * WARPGROUP_ROWS):
            raise ValueError(
                f"{columns} columns can't be {self.domains} parts of whole tiles of {WARPGROUP_ROWS}: see plan_split()"
            )
        if self.w8a8 and self.k_tile != SCALE_K:
            raise ValueError(f"k_tile is {self.k_tile}; W8A8 takes the {SCALE_K} k that a word of weight scales covers")
        if self.stream_k and (self.num_groups > 1 or self.epilogue is not Epilogue.PLAIN):
            raise ValueError(
                f"stream_k is for a single weight without SwiGLU, got {self.num_groups} with {self.epilogue}"
            )
        if self.stream_k and (self.cluster > 1 or self.blocks_per_sm > 1):
            raise ValueError(
                f"stream_k is for single blocks, one on each SM, got cluster={self.cluster}, "
                f"blocks_per_sm={self.blocks_per_sm}"
            )

    @property
    def row_tile(self) -> int:
        """Weight rows of a tile."""
        return self.row_groups * WARPGROUP_ROWS

    @property
    def w8a8(self) -> bool:
        """Whether tokens are MXFP8."""
        return self.token_format is TokenFormat.MXFP8_FP32_SCALES

    @property
    def scale_columns(self) -> int:
        """W8A8: token scales of a stage, for each block of k."""
        return self.token_tile + SCALE_ALIGNMENT

    @property
    def scale_pitch(self) -> int:
        """W8A8: float32 from stage to stage; TMA writes to multiples of 128 bytes."""
        return -(-self.scale_columns * 4 // 32) * 32

    @property
    def threads(self) -> int:
        """Of a block: consumers, and a warpgroup whose first warp is the producer."""
        return (self.row_groups + 1) * 128

    @property
    def part_n(self) -> int:
        """Rows of a group of one part; N where there is one."""
        return self.n // self.domains

    @property
    def part_row_tiles(self) -> int:
        """Of a group of one part, those of a whole cluster."""
        rows = self.row_tile * (1 if self.split_k else self.cluster)
        return -(-self.part_n // rows)

    @property
    def row_tiles(self) -> int:
        """Of a group, those of a whole cluster."""
        return self.part_row_tiles * self.domains

    @property
    def k_stages(self) -> int:
        """Stages that cover K, in whole passes of the main loop, of each block that shares K."""
        shares = self.cluster if self.split_k else 1
        return -(-self.k // (self.pass_k * shares)) * self.stages_per_pass

    @property
    def stages_per_pass(self) -> int:
        """Of the main loop's body."""
        return self.pass_k // self.k_tile

    @property
    def passes(self) -> int:
        """Of the main loop over a tile's k."""
        return self.k_stages // self.stages_per_pass

    @property
    def schedule_words(self) -> int:
        """Shared memory beside each stage, in words: a tile's coordinates, with stream-K also which part of it."""
        return 8 if self.stream_k else 4

    @property
    def handed_over(self) -> int:
        """Stream-K: float32 that a block hands over at most."""
        return self.row_tile * self.token_tile if self.stream_k else 0

    @property
    def intermediate_size(self) -> int:
        """I of w13."""
        return self.n // 2

    @property
    def columns(self) -> int:
        """Columns of the result: N, or I."""
        return self.intermediate_size if self.epilogue is Epilogue.SWIGLU else self.n

    @property
    def out_pitch(self) -> int:
        """Elements from one row of the output to the next, before k is permuted."""
        return self.out_columns or self.columns

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage."""
        tokens = self.token_tile * self.k_tile * (1 if self.w8a8 else 2)
        scales = 4 * self.scale_pitch if self.w8a8 else 0
        beside = SCALE_BYTES * self.row_groups + 4 * self.schedule_words + 16
        return self.row_tile * self.k_tile + tokens + scales + beside

    @property
    def fixed_bytes(self) -> int:
        """Shared memory besides the stages."""
        groups = -(-self.num_groups // 32) * 32
        return 3 * 4 * groups + self.exchange_bytes + self.staged_bytes + self.sent_bytes + 512

    @property
    def exchange_bytes(self) -> int:
        """SWIGLU: magnitudes that warps tell each other."""
        return 4 * 4 * self.token_tile * self.row_groups if self.epilogue is Epilogue.SWIGLU else 0

    @property
    def paired(self) -> bool:
        """SWIGLU: whether two warpgroups write 64 permuted intermediates together."""
        permuted = self.epilogue is Epilogue.SWIGLU and self.out_format is TokenFormat.BF16_PERMUTED
        return permuted and self.row_groups % 2 == 0

    @property
    def staged_bytes(self) -> int:
        """What passes through shared memory at a time on its way out."""
        if self.epilogue is Epilogue.PLAIN:
            return 2 * self.row_tile * self.staged_tokens
        return self.row_tile * self.staged_tokens if self.paired else 0

    @property
    def staged_tokens(self) -> int:
        """Tokens that the epilogue writes at a time."""
        return next(tokens for tokens in (32, 16, 8) if self.token_tile % tokens == 0)

    @property
    def sent_bytes(self) -> int:
        """Split-K: what the other blocks of a cluster send to one."""
        return self.row_tile * self.token_tile * 4 * (self.cluster - 1) // self.cluster if self.split_k else 0

    def check_units(self, num_rows: int) -> None:
        """Stream-K counts its work in 32 bits.

        Raises:
            ValueError: there is too much.
        """
        units = self.row_tiles * -(-num_rows // self.token_tile) * self.passes
        if units > MOST_UNITS:
            raise ValueError(f"{num_rows} tokens are {units} passes; it must be at most {MOST_UNITS}: split the call")

    def grid(self, sm_count: int) -> int:
        """Blocks of a launch: as many as run at once, but no more than one for each tile of the fullest case."""
        whole = sm_count * self.blocks_per_sm
        if self.cluster == 4:
            # Clusters of four don't fit on every part of the chip: one that waits for its turn doubles the time.
            whole = min(whole, sm_count * 10 // 11)
        return whole // self.cluster * self.cluster


def choose_token_format(*, activation: Activation, num_groups: int, num_rows: int) -> TokenFormat:
    """The format in which sm_90's GEMMs want their tokens: of w13, and of w2 behind it.

    Args:
        activation: BF16 leaves no choice.
        num_groups, num_rows: G, and S over all groups.
    """
    if activation is Activation.BF16 or num_rows > W8A8_TILES[-1] * num_groups:
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

    Raises:
        ValueError: sizes that the kernel doesn't take; the message names them.
    """
    _check(num_groups=num_groups, n=n, k=k, token_format=token_format, epilogue=epilogue, out_dtype=out_dtype)
    tokens = -(-num_rows // num_groups)
    tile = _token_tile(tokens, token_format)
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
        domains=domains,
    )
    config = with_tile(config, tile)
    if num_groups == 1 and epilogue is Epilogue.PLAIN and domains == 1:
        if not config.w8a8:
            return _quickest(config, tokens=tokens, sm_count=sm_count, batch_invariant=batch_invariant)
        split = _split(config, sm_count=sm_count) if tokens <= _SPLIT_TOKENS else None
        if split is not None:
            return with_stages(split)
    groups = min(num_groups, num_rows)  # that have tokens, if these spread well
    return with_stages(_most_even(_shapes(config), groups=groups, tokens=tokens, sm_count=sm_count))


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


def _quickest(config: GemmConfig, *, tokens: int, sm_count: int, batch_invariant: bool) -> GemmConfig:
    """W8A16 with a single weight: rows, tokens and ways to share K whose estimated time is the least."""
    shares = not batch_invariant and _operand_bytes(config, tokens) <= _STREAM_K_BYTES
    found = _estimated(config, _STREAM_K_TILES if shares else (), tokens=tokens, sm_count=sm_count)
    if batch_invariant:
        # Four blocks add up in an order that depends on which of them has the element; the sum of two has one order.
        found = [each for each in found if each[1].cluster <= 2]
    return with_stages(min(found, key=lambda each: each[0] * (_STREAM_K_SAVES if each[1].stream_k else 1))[1])


def _operand_bytes(config: GemmConfig, tokens: int) -> int:
    """Of the weight's codes and the tokens, in bf16."""
    return config.k * (config.n + 2 * tokens)


def by_estimate(config: GemmConfig, *, tokens: int, sm_count: int) -> list[tuple[float, GemmConfig]]:
    """W8A16 with a single weight: other rows, tokens and ways to share K, those of the least estimated time first.

    Args:
        config: of a call with that many tokens; what it computes.
        tokens, sm_count: of the call, and of the device.

    Returns:
        (estimated cycles, config).
    """
    plain = replace(config, in_flight=4, blocks_per_sm=1, cluster=1, split_k=False, stream_k=False)
    plain = with_tile(plain, _token_tile(tokens, config.token_format))
    found = _estimated(plain, _STREAM_K_TILES + _SMALL_STREAM_K_TILES, tokens=tokens, sm_count=sm_count)
    return [(cycles, with_stages(cut)) for cycles, cut in sorted(found, key=lambda each: each[0])]


def _estimated(
    config: GemmConfig, stream_k_tiles: tuple[tuple[int, int], ...], *, tokens: int, sm_count: int
) -> list[tuple[float, GemmConfig]]:
    """(cycles, config without stages); where several are as quick, the first is to be taken."""
    return [
        (_cycles(cut, tokens=tokens, sm_count=sm_count), cut)
        for cut in _cuts(config, stream_k_tiles)
        if _stages_that_fit(cut) >= 4
    ]


def _cuts(config: GemmConfig, stream_k_tiles: tuple[tuple[int, int], ...]) -> Iterator[GemmConfig]:
    least = min(config.token_tile, 64)
    for tile in W8A16_TILES:
        if not least <= tile <= config.token_tile:
            continue
        cut = with_tile(config, tile)
        for row_groups, most_tokens in ((2, 256), (1, 128), (3, 128), (4, _FOUR_GROUPS_TOKENS)):
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


def _token_tile(tokens: int, token_format: TokenFormat) -> int:
    """Tokens of a tile, for groups of that many on average: a tile half empty costs up to half of the time."""
    tiles = W8A8_TILES if token_format is TokenFormat.MXFP8_FP32_SCALES else W8A16_TILES
    return next((tile for tile in tiles if tile >= tokens), tiles[-1])


def with_tile(config: GemmConfig, tile: int) -> GemmConfig:
    """With another token tile, and what follows from it: smaller stages, and longer passes of the main loop."""
    long = tile > 64 and config.k > SCALE_K
    return replace(
        config, token_tile=tile, k_tile=64 if tile > 128 else SCALE_K, pass_k=2 * SCALE_K if long else SCALE_K
    )


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
        if 32 < tile <= _FOUR_GROUPS_TOKENS:
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


def consumer_registers(config: GemmConfig) -> int:
    """Registers of a consumer thread, once the producer's warpgroup gave up its own; 0: what it has is enough."""
    at_launch = min(65536 // (config.threads * config.blocks_per_sm) // 8 * 8, 255)
    if at_launch == 255:
        return 0
    pool = (config.row_groups + 1) * at_launch
    return min((pool - PRODUCER_REGISTERS) // config.row_groups // 8 * 8, 240)


def with_stages(config: GemmConfig) -> GemmConfig:
    """The config with as many stages as shared memory holds.

    Raises:
        ValueError: fewer than three fit.
    """
    stages = _stages_that_fit(config)
    if stages < 3:
        raise ValueError(f"only {stages} stages fit into shared memory, at least 3 are needed: {config}")
    return replace(config, stages=stages)


def _stages_that_fit(config: GemmConfig) -> int:
    room = (limits_of("sm_90a").shared_memory + 1024) // config.blocks_per_sm - _RESERVED - config.fixed_bytes
    return min(room // config.stage_bytes, _MOST_STAGES)


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
        raise ValueError(f"sm_90 reads {TokenFormat.MXFP8_FP32_SCALES} or {TokenFormat.BF16_PERMUTED}")
    if out_dtype not in ("bfloat16", "float16"):
        raise ValueError(f'out_dtype is {out_dtype!r}; it must be "bfloat16" or "float16"')
