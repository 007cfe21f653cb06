"""What the sm_90 GEMM is compiled for; choose.py says how that follows from a call's shapes. Imports neither torch nor
cutlass.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from vllm_rose_plugin.kernels.contracts import Activation, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm.stream_k import MOST_UNITS
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

W8A8_TILES = (8, 16, 24, 32)
W8A16_TILES = (16, 32, 48, 64, 96, 128, 192, 256)
FOUR_GROUPS_TOKENS = 64
"""The largest token tile whose sums the registers hold with four consumer warpgroups."""
_MOST_STAGES = 24

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
    narrow_tokens: int = 0
    """A tile of no more tokens than that is multiplied as if tiles had so many: the last of a group, or its only one.
    A multiple of 8 below token_tile; 0: all tiles alike."""
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
        if self.narrow_tokens and (self.narrow_tokens % 8 or not 8 <= self.narrow_tokens < self.token_tile):
            raise ValueError(
                f"narrow_tokens is {self.narrow_tokens}; it must be 0, or a multiple of 8 below {self.token_tile}"
            )
        if self.narrow_tokens and (self.split_k or self.stream_k):
            raise ValueError(
                f"narrow_tokens is for tiles whose k isn't shared, got split_k={self.split_k}, stream_k={self.stream_k}"
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


def token_tile_for(tokens: int, token_format: TokenFormat) -> int:
    """Tokens of a tile, for groups of that many on average: a tile half empty costs up to half of the time."""
    tiles = W8A8_TILES if token_format is TokenFormat.MXFP8_FP32_SCALES else W8A16_TILES
    return next((tile for tile in tiles if tile >= tokens), tiles[-1])


def with_tile(config: GemmConfig, tile: int) -> GemmConfig:
    """With another token tile, and what follows from it: smaller stages, and longer passes of the main loop."""
    long = tile > 64 and config.k > SCALE_K
    return replace(
        config,
        token_tile=tile,
        k_tile=64 if tile > 128 else SCALE_K,
        pass_k=2 * SCALE_K if long else SCALE_K,
        narrow_tokens=config.narrow_tokens if config.narrow_tokens < tile else 0,
    )


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
    stages = stages_that_fit(config)
    if stages < 3:
        raise ValueError(f"only {stages} stages fit into shared memory, at least 3 are needed: {config}")
    return replace(config, stages=stages)


def stages_that_fit(config: GemmConfig) -> int:
    room = (limits_of("sm_90a").shared_memory + 1024) // config.blocks_per_sm - _RESERVED - config.fixed_bytes
    return min(room // config.stage_bytes, _MOST_STAGES)
