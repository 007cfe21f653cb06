"""What the tcgen05 GEMM is compiled for, and how that follows from a call's shapes. Imports neither torch nor cutlass.

Nothing here was measured: the choices follow from counting bytes, columns and stages. Measure before believing them.
"""

from dataclasses import dataclass

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Rounding
from vllm_rose_plugin.kernels.gemm.config import MAX_DOMAINS, Epilogue
from vllm_rose_plugin.kernels.gemm.crowding import tokens_to_hold
from vllm_rose_plugin.kernels.jit.targets import limits_of

ROWS = 128
"""Weight rows of one block: the lanes of tensor memory."""
K_TILE = 128
"""k of a stage: four blocks of 32, one tile of scales."""
SCALE_ROWS = 128
SCALE_TILE_BYTES = 512
SCALE_TILE_COLUMNS = 4
"""Columns of tensor memory that one tile of scales takes."""
EPILOGUE_THREADS = 128
THREADS = EPILOGUE_THREADS + 64
"""Four warps empty tensor memory, one feeds the matrix unit, one feeds shared memory."""
MAX_GROUPS = 512
MAX_SPLIT = 4
TOKEN_TILES = (8, 16, 32, 64, 96, 128, 192, 256)

_CHUNK = 32
_BARRIERS = 1024
"""Shared memory in front of the stages."""
_ALIGNMENT = 1024
"""Of the stages, and so the grain of the whole."""
_MAX_PREFETCH = 6
COMPUTED_SM100 = (
    "num_groups",
    "n",
    "k",
    "epilogue",
    "out_dtype",
    "bias",
    "rounding",
    "limit",
    "out_columns",
    "domains",
)
"""Fields of Sm100Config that say what is computed."""
_SPLIT_TOKENS = 32
"""Largest token tile of which blocks share the k."""
_SPLIT_STAGES = 4
"""The least of k tiles that each of them should have."""
_PAIR_TOKENS = 192
"""Tokens of a group from which on two blocks share a tile's tokens."""


@dataclass(frozen=True)
class Sm100Config:
    """Everything the kernel depends on, besides the addresses, S and what lies on the device.

    A block works on tiles of 128 weight rows (256 with SWIGLU: as many gate and up rows) x ``token_tile`` tokens.
    """

    num_groups: int
    """G: experts, or 1 for a linear layer; at most MAX_GROUPS."""
    n: int
    """Rows of a group's weight, a multiple of 8; with SWIGLU gate and up together, a multiple of 64."""
    k: int
    """Columns of a weight, a multiple of 32."""
    epilogue: Epilogue
    out_dtype: str
    """PLAIN: "bfloat16" or "float16"."""
    bias: bool
    """PLAIN: float32 [G, N] is added."""
    rounding: Rounding
    """SWIGLU: of the quantization."""
    limit: float | None
    """SWIGLU: vLLM's swiglu_limit."""

    wide_k: bool
    """sm_107a's matrix instruction of 64 k instead of 32."""
    pair: bool
    """Two blocks, a cluster, work on one tile of 256 weight rows: each holds half of the tokens in shared memory."""
    split: int
    """Blocks, a cluster, that share the k of a tile; the first one adds up their sums. PLAIN, no pair."""
    token_tile: int
    """Tokens of a tile, of TOKEN_TILES: the N of tcgen05.mma."""
    stages: int
    accumulators: int
    """Tiles in tensor memory: with two, one is emptied while the next is computed."""
    scale_slots: int
    """Stages whose scales tensor memory holds at a time, at most `stages`."""
    tmem_columns: int
    """To allocate: a power of two, or all of Rubin's 576."""
    prefetch: int
    """Stages of weights that are asked for before the previous kernel has ended; 0 with a pair."""
    out_columns: int = 0
    """Columns of the rows that the result is a slice of, where this weight is a part of one; 0: as many as it has."""
    domains: int = 1
    """Parts that the weight is in, by columns of the result (see column_split.py). With several, each has a queue of
    tiles, from which blocks on that locality domain's SMs take first (see domain_queue.py)."""

    def __post_init__(self):
        check(self)

    @property
    def blocks(self) -> int:
        """Thread blocks of a cluster."""
        return 2 if self.pair else self.split

    @property
    def row_blocks(self) -> int:
        """Blocks that share the rows and the tokens of a tile."""
        return 2 if self.pair else 1

    @property
    def halves(self) -> int:
        """Accumulators of a tile: 2 with SWIGLU, gate and up, of the same lanes."""
        return 2 if self.epilogue is Epilogue.SWIGLU else 1

    @property
    def columns(self) -> int:
        """Columns of the result: N, or I."""
        return self.n // self.halves

    @property
    def out_pitch(self) -> int:
        """Elements from one row of the output to the next."""
        return self.out_columns or self.columns

    @property
    def out_scale_tiles(self) -> int:
        """SWIGLU: tiles of 128 columns whose scales lie side by side in the output."""
        return -(-self.out_pitch // SCALE_ROWS)

    @property
    def part_columns(self) -> int:
        """Columns of the result that one part of the weight makes; all of them where there is one."""
        return self.columns // self.domains

    @property
    def part_row_blocks(self) -> int:
        """Tiles of 128 that cover a group's rows of one part."""
        return -(-self.part_columns // ROWS)

    @property
    def part_row_tiles(self) -> int:
        """The same counted by cluster."""
        return -(-self.part_columns // (ROWS * self.row_blocks))

    @property
    def row_tiles(self) -> int:
        """Tiles that cover a group's rows, counted by cluster."""
        return self.part_row_tiles * self.domains

    @property
    def ring(self) -> int:
        """Places for tiles that the loading warp has drawn and others still work on, with several domains.

        It is ahead of the matrix unit by as many tiles as there are stages, where a tile is a single stage, and one
        more that it is about to load; those that empty tensor memory are behind by the accumulators.
        """
        return self.stages + self.accumulators + 2 if self.domains > 1 else 0

    @property
    def scale_row_tiles(self) -> int:
        """Tiles of scales along a group's rows, or along those of one half."""
        return -(-self.columns // SCALE_ROWS)

    @property
    def k_tiles(self) -> int:
        """Stages of a tile."""
        return -(-self.k // K_TILE)

    @property
    def block_tokens(self) -> int:
        """Tokens of a tile that one block holds in shared memory."""
        return self.token_tile // self.row_blocks

    @property
    def token_scale_tiles(self) -> int:
        """Tiles of 128 scale rows that a tile's tokens can touch: it may begin amid the first."""
        starts = {start % SCALE_ROWS for start in range(0, SCALE_ROWS * self.token_tile, self.token_tile)}
        return max(-(-(start + self.token_tile) // SCALE_ROWS) for start in starts)

    @property
    def stage_scale_tiles(self) -> int:
        """Tiles of scales in a stage: those of the weights, then those of the tokens."""
        return self.halves + self.token_scale_tiles

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage in one block."""
        codes = (self.halves * ROWS + self.block_tokens) * K_TILE
        return codes + self.stage_scale_tiles * SCALE_TILE_BYTES

    @property
    def chunk(self) -> int:
        """Tokens that the epilogue takes out of tensor memory at a time."""
        return min(self.token_tile, _CHUNK)

    @property
    def staging_bytes(self) -> int:
        """Shared memory in which the epilogue turns one of its two chunks round."""
        if self.epilogue is Epilogue.SWIGLU:
            return self.chunk * (ROWS + 4)
        return self.chunk * ROWS * 2

    @property
    def partial_bytes(self) -> int:
        """Shared memory for the sums of the other blocks that share a tile's k."""
        return (self.split - 1) * self.token_tile * ROWS * 4

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory."""
        buffers = -(-2 * self.staging_bytes // 16) * 16 + max(self.partial_bytes, 16)
        return -(-(_BARRIERS + self.stages * self.stage_bytes + buffers) // _ALIGNMENT) * _ALIGNMENT

    @property
    def accumulator_columns(self) -> int:
        """Columns of tensor memory that hold results."""
        return self.accumulators * self.halves * self.token_tile

    @property
    def slot_columns(self) -> int:
        """Columns of tensor memory that hold the scales of a stage."""
        return self.stage_scale_tiles * SCALE_TILE_COLUMNS

    @property
    def used_columns(self) -> int:
        """Of tensor memory."""
        return self.accumulator_columns + self.scale_slots * self.slot_columns

    def grid(self, *, sm_count: int, num_rows: int) -> int:
        """Blocks to launch: one for each SM, fewer where there are fewer tiles.

        Args:
            sm_count: of the device, or those of a green context.
            num_rows: S, rows over all groups. Any grid is right; one too small leaves SMs idle.
        """
        token_tiles = num_rows // self.token_tile + min(self.num_groups, num_rows)
        return max(1, min(sm_count // self.blocks, self.row_tiles * token_tiles)) * self.blocks


def check(config: Sm100Config) -> None:
    """Refuse what the kernel can't do.

    Raises:
        ValueError: naming the value and what is legal.
    """
    rows = 64 if config.epilogue is Epilogue.SWIGLU else 8
    if config.n % rows or config.n < rows:
        raise ValueError(f"n = {config.n}; the {config.epilogue} epilogue needs a multiple of {rows}")
    if config.k % MXFP8_BLOCK or config.k < MXFP8_BLOCK:
        raise ValueError(f"k = {config.k} must be a multiple of {MXFP8_BLOCK}")
    if not 1 <= config.num_groups <= MAX_GROUPS:
        raise ValueError(f"num_groups = {config.num_groups} must be 1 to {MAX_GROUPS}")
    if config.token_tile not in TOKEN_TILES or (config.pair and config.token_tile % 16):
        raise ValueError(f"token_tile = {config.token_tile} must be one of {TOKEN_TILES}, no less than 16 with a pair")
    if config.used_columns > config.tmem_columns:
        raise ValueError(f"{config.used_columns} columns of tensor memory in use, {config.tmem_columns} allocated")
    if not 1 <= config.scale_slots <= config.stages:
        raise ValueError(f"scale_slots = {config.scale_slots} must be 1 to stages, {config.stages}")
    if config.prefetch > min(config.stages, config.k_tiles // config.split) or (config.pair and config.prefetch):
        raise ValueError(f"prefetch = {config.prefetch} exceeds the stages or k tiles, or there is a pair")
    if not 1 <= config.split <= min(MAX_SPLIT, config.k_tiles):
        raise ValueError(f"split = {config.split} must be 1 to {min(MAX_SPLIT, config.k_tiles)}")
    if not 1 <= config.domains <= MAX_DOMAINS:
        raise ValueError(f"domains = {config.domains} must be 1 to {MAX_DOMAINS}")
    if config.domains > 1 and config.split > 1:
        raise ValueError(
            f"a weight in {config.domains} parts is for tiles whose k isn't shared, got split={config.split}"
        )
    if config.domains > 1 and config.columns % (config.domains * ROWS):
        raise ValueError(
            f"{config.columns} columns can't be {config.domains} parts of whole tiles of {ROWS}: see plan_split()"
        )
    if config.split > 1 and (config.pair or config.epilogue is Epilogue.SWIGLU):
        raise ValueError(f"split = {config.split} goes with neither a pair nor the {Epilogue.SWIGLU} epilogue")


def choose_config_sm100(
    *,
    target: str,
    num_groups: int,
    n: int,
    k: int,
    num_rows: int,
    epilogue: Epilogue = Epilogue.PLAIN,
    out_dtype: str = "bfloat16",
    bias: bool = False,
    rounding: Rounding = Rounding.RCEIL,
    limit: float | None = None,
    sm_count: int | None = None,
    clusters: bool = True,
    out_columns: int = 0,
    domains: int = 1,
) -> Sm100Config:
    """The config for a call.

    Args:
        target: "sm_100a", "sm_100f", "sm_103a" or "sm_107a".
        num_rows: S, rows over all groups, or how many of them are likely to be tokens: the tile's size is guessed from
            it, and nothing else.
        sm_count: of the device, or of a green context; None: the target's usual number.
        clusters: False where they can't be launched, as in green contexts that backfill SMs of another locality domain.
        (others): as in :class:`Sm100Config`.
    """
    halves = 2 if epilogue is Epilogue.SWIGLU else 1
    mean = -(-num_rows // num_groups)
    pair = clusters and mean >= _PAIR_TOKENS and n // halves > ROWS
    columns = limits_of(target).tmem_columns
    sm_count = sm_count or limits_of(target).sm_count
    # The largest tile of which two fit beside the scales of a few stages. On Rubin that is a size more.
    largest = 256 if columns > 512 else 192
    held = tokens_to_hold(num_groups=num_groups, num_rows=num_rows)
    token_tile = min(next((tile for tile in TOKEN_TILES if tile >= held), TOKEN_TILES[-1]), largest // halves)
    # Few tiles leave SMs idle, so several share one; each still has a handful of stages to go through.
    split = 1
    if clusters and domains == 1 and halves == 1 and token_tile <= _SPLIT_TOKENS:
        tiles = num_groups * -(-n // ROWS) * -(-mean // token_tile)
        k_tiles = -(-k // K_TILE)
        while split < MAX_SPLIT and tiles * split * 2 <= sm_count and k_tiles >= 2 * split * _SPLIT_STAGES:
            split *= 2
    shape = {
        "num_groups": num_groups,
        "n": n,
        "k": k,
        "epilogue": epilogue,
        "out_dtype": out_dtype,
        "bias": bias,
        "rounding": rounding,
        "limit": limit,
        "out_columns": out_columns,
        "domains": domains,
    }
    return fill_up(shape, target=target, token_tile=token_tile, pair=pair, split=split)


def fill_up(shape: dict, *, target: str, token_tile: int, pair: bool = False, split: int = 1) -> Sm100Config:
    """A config that uses all of a target's shared and tensor memory.

    Args:
        shape: the fields of :class:`Sm100Config` that say what is computed.
        target, token_tile, pair, split: how.

    Raises:
        ValueError: not even three stages fit.
    """
    limits = limits_of(target)

    def config(stages: int, slots: int, columns: int, prefetch: int) -> Sm100Config:
        return Sm100Config(
            **shape,
            wide_k=target == "sm_107a",
            pair=pair,
            split=split,
            token_tile=token_tile,
            stages=stages,
            accumulators=2,
            scale_slots=slots,
            tmem_columns=columns,
            prefetch=prefetch,
        )

    one = config(1, 1, limits.tmem_columns, 0)
    # What rounding up costs is less than a stage.
    stages = 1 + (limits.shared_memory - one.shared_bytes) // one.stage_bytes
    if stages < 3:
        raise ValueError(f"{stages} stages of {one.stage_bytes} bytes fit into shared memory; the least is 3")
    slots = min(stages, (limits.tmem_columns - one.accumulator_columns) // one.slot_columns)
    used = one.accumulator_columns + slots * one.slot_columns
    columns = next((c for c in (32, 64, 128, 256, 512) if c >= used), limits.tmem_columns)
    return config(stages, slots, columns, 0 if pair else min(stages, one.k_tiles // split, _MAX_PREFETCH))
