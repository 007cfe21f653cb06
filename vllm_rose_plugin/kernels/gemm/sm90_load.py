"""The producer warp of the sm_90 GEMM: finds tiles and brings their stages through TMA."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK
from vllm_rose_plugin.kernels.gemm.config import SCALE_ALIGNMENT, SCALE_BYTES, SCALE_K, WARPGROUP_ROWS, GemmConfig
from vllm_rose_plugin.kernels.gemm.scheduler import Schedule, Tile
from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next, pdl_wait


class Producer:
    """The producer for one config.

    ``loads`` are (TMA atom, coordinates) of the weights, their scales, the tokens and, with W8A8, their scales.
    """

    def __init__(self, config: GemmConfig):
        self.config = config
        self.schedule = Schedule(
            num_groups=config.num_groups, row_tiles=config.part_row_tiles, token_tile=config.token_tile
        )
        self.multicast = 1 if config.split_k else config.cluster
        """Blocks that a stage of tokens goes to."""
        self.row_blocks = -(-config.part_n // WARPGROUP_ROWS)  # of a group's packed scales
        self.words = 4
        """Of a tile, that consumers read."""

    @cute.jit
    def run(
        self,
        loads: tuple,
        stages: tuple,
        tiles: cute.Tensor,
        full,
        empty,
        table: cute.Tensor,
        expert_counts: cute.Tensor,
        expert_offsets: cute.Tensor,
        rank: Int32,
        workspace: tuple,
    ):
        """Stages of one tile after another, then a tile that says it was the last.

        Args:
            stages: shared memory of each load.
            tiles: (words, stages) int32: coordinates of the tile that a stage is the first of.
            full, empty: barriers of the stages.
            table: shared memory of the schedule.
            rank: of the block in its cluster.
            workspace: of the launch; not touched here.
        """
        config = self.config
        if cutlass.const_expr(config.guesses):
            self.fetch_guess(loads, stages, rank)
        self.prepare(loads)
        self.schedule.build(table, expert_counts, expert_offsets)
        tile = cute.arch.block_idx()[0] // config.cluster
        step = cute.arch.grid_dim()[0] // config.cluster
        stage, phase, chunk = Int32(0), Int32(1), Int32(0)  # empty slots pass at first
        waited = Boolean(not config.early_counts)
        more = Boolean(True)
        while more:
            found, chunk = self.schedule.find(table, tile, chunk)
            more = found.group >= 0
            tile += step
            if more:
                stage, phase, waited = self.bring(loads, stages, tiles, full, empty, found, rank, stage, phase, waited)
        self.finish(tiles, full, empty, stage, phase, waited)

    @cute.jit
    def fetch_guess(self, loads: tuple, stages: tuple, rank: Int32):
        """Weights and scales of the first tile into L2, as if every group had one tile of tokens."""
        config = self.config
        tile = cute.arch.block_idx()[0] // config.cluster
        group = tile // config.row_tiles
        if group < config.num_groups:
            guess = Tile(group, tile - group * config.row_tiles, Int32(0), Int32(0))
            parts = self.parts_of(loads, stages, guess, rank)
            for k in cutlass.range(min(config.stages, config.k_stages), unroll=1):
                cute.prefetch(loads[0][0], parts[0][1][None, k])
                cute.prefetch(loads[1][0], parts[1][1][None, k // (SCALE_K // config.k_tile)])

    @cute.jit
    def prepare(self, loads: tuple):
        """What comes before counts and offsets are read."""
        for load in loads:
            cpasync.prefetch_descriptor(load[0])
        if cutlass.const_expr(not self.config.early_counts):
            pdl_wait()
            pdl_launch_next()

    @cute.jit
    def bring(
        self,
        loads: tuple,
        stages: tuple,
        tiles: cute.Tensor,
        full,
        empty,
        found: Any,
        rank: Int32,
        stage: Int32,
        phase: Int32,
        waited: Boolean,
    ) -> tuple[Int32, Int32, Boolean]:
        """All stages of one tile; gives the stage and phase after them, and that the kernel in front has ended."""
        config = self.config
        parts = self.parts_of(loads, stages, found, rank)
        k_stages = self.k_stages_of(found)
        ahead = Int32(0)
        if cutlass.const_expr(config.early_counts):  # noqa: SIM102  at compile time
            if not waited:
                ahead = Int32(self.ahead_of(k_stages))
                for k in cutlass.range(ahead, unroll=1):
                    self.load_weights(loads, parts, tiles, found, full, k, k, rank)
                pdl_wait()
                pdl_launch_next()
                waited = Boolean(True)
        for k in cutlass.range(k_stages, unroll=1):
            if k >= ahead:
                cute.arch.mbarrier_wait(empty + stage, phase)
                self.load_weights(loads, parts, tiles, found, full, stage, k, rank)
            self.load_tokens(loads, parts, found, full, stage, k, rank)
            stage += 1
            if stage == config.stages:
                stage, phase = Int32(0), phase ^ 1
        return stage, phase, waited

    @cute.jit
    def finish(self, tiles: cute.Tensor, full, empty, stage: Int32, phase: Int32, waited: Boolean):
        """What comes after the last tile."""
        if not waited:
            pdl_wait()
            pdl_launch_next()
        cute.arch.mbarrier_wait(empty + stage, phase)
        with cute.arch.elect_one():
            tiles[0, stage] = Int32(-1)
            cute.arch.mbarrier_arrive(full + stage)

    def k_stages_of(self, tile: Any) -> Any:
        """How many stages a tile takes from this block."""
        return self.config.k_stages

    def ahead_of(self, k_stages: Any) -> Any:
        """How many of them there is room for before any is used."""
        return min(self.config.stages, k_stages)

    def skipped_of(self, tile: Any, rank: Any) -> Any:
        """Stages of k before those, if there can be any."""
        return rank * self.config.k_stages if self.config.split_k else None

    def map_of(self, loads: tuple, load: int, tile: Any) -> dict[str, Any]:
        """Where weights (0) or their scales (1) aren't loaded by the tensor map of their TMA atom: the other one."""
        return {}

    @cute.jit
    def parts_of(self, loads: tuple, stages: tuple, tile: Any, rank: Int32) -> tuple:
        """(shared memory by stage, global memory by stage of k) of each load for one tile."""
        config = self.config
        row_tile = tile.row_tile
        if cutlass.const_expr(self.multicast > 1):
            row_tile = row_tile * config.cluster + rank
        one = cute.make_layout(1)
        loads = tuple((atom, self.with_all_k(source, i)) for i, (atom, source) in enumerate(loads))
        weights = cute.local_tile(
            loads[0][1][None, None, tile.group], (config.row_tile, config.k_tile), (row_tile, None)
        )
        scales = cute.local_tile(
            cute.domain_offset((tile.group * self.row_blocks + row_tile * config.row_groups, 0), loads[1][1]),
            (config.row_groups, SCALE_BYTES),
            (0, None),
        )
        tokens = cute.local_tile(
            cute.domain_offset((tile.first_token, 0), loads[2][1]), (config.token_tile, config.k_tile), (0, None)
        )
        parts: Any = (
            partitioned(loads[0][0], stages[0], weights, 0, one),
            partitioned(loads[1][0], stages[1], scales, 0, one),
            partitioned(
                loads[2][0],
                stages[2],
                tokens,
                rank if cutlass.const_expr(self.multicast > 1) else 0,
                cute.make_layout(self.multicast),
            ),
        )
        if cutlass.const_expr(config.w8a8):
            token_scales = cute.local_tile(
                cute.domain_offset((0, tile.first_token // SCALE_ALIGNMENT * SCALE_ALIGNMENT), loads[3][1]),
                (4, config.scale_columns),
                (None, 0),
            )
            parts += (partitioned(loads[3][0], stages[3], token_scales, 0, one),)
        return parts

    def with_all_k(self, coordinates, load: int):
        """Coordinates of one load, of all stages of k, also those that lie past K.

        A tensor with a single tile of k would give its coordinates for any other tile too.
        """
        config = self.config
        stages = config.k_stages * (config.cluster if config.split_k else 1)
        k = stages * config.k_tile
        mode, size = ((1, k), (1, -(-k // SCALE_K) * SCALE_BYTES), (1, k), (0, k // MXFP8_BLOCK))[load]
        shape = list(coordinates.shape)
        shape[mode] = size
        return cute.make_tensor(coordinates.iterator, cute.make_layout(tuple(shape), stride=coordinates.stride))

    @cute.jit
    def load_weights(self, loads, parts, tiles, tile: Any, full, stage: Int32, k: Int32, rank: Int32):
        """Opens a stage: what its barrier waits for, the tile's coordinates, weights and their scales."""
        config = self.config
        token_bytes = config.token_tile * config.k_tile * (1 if config.w8a8 else 2)
        token_bytes += 4 * 4 * config.scale_columns if config.w8a8 else 0
        with cute.arch.elect_one():
            if k == 0:
                for word in cutlass.range_constexpr(self.words):
                    tiles[word, stage] = tile[word]
            cute.arch.mbarrier_arrive_and_expect_tx(
                full + stage, config.row_tile * config.k_tile + SCALE_BYTES * config.row_groups + token_bytes
            )
        skipped = self.skipped_of(tile, rank)
        if cutlass.const_expr(skipped is not None):
            k += skipped
        cute.copy(
            loads[0][0],
            parts[0][1][None, k],
            parts[0][0][None, stage],
            tma_bar_ptr=full + stage,
            **self.map_of(loads, 0, tile),
        )
        cute.copy(
            loads[1][0],
            parts[1][1][None, k // (SCALE_K // config.k_tile)],
            parts[1][0][None, stage],
            tma_bar_ptr=full + stage,
            **self.map_of(loads, 1, tile),
        )

    @cute.jit
    def load_tokens(self, loads, parts, tile: Any, full, stage: Int32, k: Int32, rank: Int32):
        """Fills a stage that :meth:`load_weights` opened."""
        config = self.config
        skipped = self.skipped_of(tile, rank)
        if cutlass.const_expr(skipped is not None):
            k += skipped
        source, target = parts[2][1][None, k], parts[2][0][None, stage]
        if cutlass.const_expr(self.multicast > 1):
            everyone = cutlass.Int16((1 << self.multicast) - 1)
            cute.copy(loads[2][0], source, target, tma_bar_ptr=full + stage, mcast_mask=everyone)
        else:
            cute.copy(loads[2][0], source, target, tma_bar_ptr=full + stage)
        if cutlass.const_expr(config.w8a8):
            cute.copy(loads[3][0], parts[3][1][None, k], parts[3][0][None, stage], tma_bar_ptr=full + stage)


def partitioned(atom, stages, source, rank, layout) -> tuple:
    """Of one TMA load: shared memory by stage, global memory by k."""
    return cpasync.tma_partition(atom, rank, layout, cute.group_modes(stages, 0, 2), cute.group_modes(source, 0, 2))
