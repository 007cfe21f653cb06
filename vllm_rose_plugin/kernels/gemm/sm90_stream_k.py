"""Stream-K on sm_90: the producer's walk over a block's share of the work, and sums handed over through memory.

stream_k.py says who has what. A block that doesn't have a tile's last pass writes its accumulators to its own slot of
`partials` and raises its flag; the block that has it waits for the flags, lowers them, and adds, always in the same
order: its own sums, then those of the others by index.

Why no launch meets another's flag or slot: launches that share flags follow each other in a stream (launch.py), and
nothing here touches either before tokens have come, which are read after `griddepcontrol.wait`, when every launch
before has ended and its stores are visible, lowered flags too. A flag is raised once in a launch and lowered after it
was seen raised, so all are down at the end.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from vllm_rose_plugin.kernels.gemm import stream_k
from vllm_rose_plugin.kernels.gemm.config import GemmConfig
from vllm_rose_plugin.kernels.gemm.sm90_epilogue import barrier_of_consumers
from vllm_rose_plugin.kernels.gemm.sm90_load import Producer
from vllm_rose_plugin.kernels.gemm.sm90_mainloop import LoopConstant
from vllm_rose_plugin.kernels.gemm.tile_order import place_of
from vllm_rose_plugin.kernels.ptx.memory_order import load_acquire, store_release
from vllm_rose_plugin.kernels.ptx.wide import load_global, store_global

_WIDE = 4
"""float32 of one access."""
_AT_ONCE = 8
"""Loads under way in a thread: as many registers as there are to spare beside the accumulators."""


class PartOfTile(NamedTuple):
    """What consumers read of a part, then what only the producer needs."""

    group: Int32
    row_tile: Int32
    first_token: Int32
    num_tokens: Int32
    passes: Int32
    others: Int32
    """Blocks whose sums are to be added; negative: this block's are to be handed over."""
    skipped: Int32
    """Stages of k before the part."""


class StreamKProducer(Producer):
    """As its base, for parts of tiles in the order of :mod:`stream_k`."""

    def __init__(self, config: GemmConfig):
        super().__init__(config)
        self.words = 6

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
        """See :meth:`Producer.run`."""
        config = self.config
        self.prepare(loads)
        count, offset = Int32(expert_counts[0]), Int32(expert_offsets[0])
        token_tiles = cute.ceil_div(count, config.token_tile)
        units = token_tiles * (config.row_tiles * config.passes)
        share = stream_k.share_of(units=units, blocks=cute.arch.grid_dim()[0])
        block = cute.arch.block_idx()[0]
        first, end = stream_k.range_of(block=block, share=share, units=units, minimum=cutlass.min)
        stage, phase = Int32(0), Int32(1)  # empty slots pass at first
        waited = Boolean(not config.early_counts)
        while end > first:
            part = stream_k.last_part(
                first=first, end=end, block=block, share=share, passes=config.passes, minimum=cutlass.min
            )
            end -= part.num_passes
            row_tile, token = place_of(
                part.tile, row_tiles=config.row_tiles, token_tiles=token_tiles, minimum=cutlass.min
            )
            done = token * config.token_tile
            others = Int32(cutlass.select_(part.ends_early(config.passes), Int32(-1), part.others))
            skipped = part.first_pass * config.stages_per_pass
            found = PartOfTile(Int32(0), row_tile, offset + done, count - done, part.num_passes, others, skipped)
            stage, phase, waited = self.bring(loads, stages, tiles, full, empty, found, rank, stage, phase, waited)
        self.finish(tiles, full, empty, stage, phase, waited)

    def k_stages_of(self, tile: Any) -> Any:
        return tile.passes * self.config.stages_per_pass

    def ahead_of(self, k_stages: Any) -> Any:
        return cutlass.min(self.config.stages, k_stages)

    def skipped_of(self, tile: Any, rank: Any) -> Any:
        return tile.skipped


class HandOver(LoopConstant):
    """Sums that blocks hand over, as one consumer thread sees them."""

    def __init__(self, config: GemmConfig, partials, flags, thread):
        self.config = config
        self.partials = partials  # (blocks, row_tile * token_tile) float32
        self.flags = flags  # (blocks) int32
        self.thread = thread
        self.pieces = config.token_tile // 2 // _WIDE  # of a thread's accumulators
        self.pitch = 128 * config.row_groups * _WIDE  # from one of them to the next, in the slot

    @cute.jit
    def whole(self, acc: cute.Tensor, others: Int32) -> Boolean:
        """Hands over the sums of a part, or completes them; whether they are the tile's now.

        Args:
            others: see :class:`PartOfTile`.
        """
        if others < 0:
            self.give(acc)
        if others > 0:
            self.take(acc, others)
        return others >= 0

    @cute.jit
    def give(self, acc: cute.Tensor):
        """This block's sums, to whoever has the tile's last pass."""
        block = cute.arch.block_idx()[0]
        sums, slot = self.pieces_of(acc), self.slot_of(block)
        for i in cutlass.range_constexpr(self.pieces):
            store_global(slot + i * self.pitch, sums[None, i])
        barrier_of_consumers(self.config.row_groups)  # one thread then speaks for all
        if self.thread == 0:
            store_release(self.flags.iterator + block, Int32(1), scope="gpu")

    @cute.jit
    def take(self, acc: cute.Tensor, others: Int32):
        """Adds what the blocks right in front of this one hand over."""
        block = cute.arch.block_idx()[0]
        if self.thread == 0:
            for other in cutlass.range(block - others, block, unroll=1):
                flag = self.flags.iterator + other
                raised = load_acquire(flag, Int32, scope="gpu")
                while raised == 0:
                    raised = load_acquire(flag, Int32, scope="gpu")
                self.flags[other] = Int32(0)  # nobody else reads it in this launch, nor raises it again
        barrier_of_consumers(self.config.row_groups)
        sums = self.pieces_of(acc)
        for other in cutlass.range(block - others, block, unroll=1):
            slot = self.slot_of(other)
            for start in cutlass.range_constexpr(0, self.pieces, _AT_ONCE):
                count = cutlass.const_expr(min(_AT_ONCE, self.pieces - start))
                found = [load_global(slot + (start + i) * self.pitch, _WIDE) for i in range(count)]
                for i in cutlass.range_constexpr(count):
                    for v in cutlass.range_constexpr(_WIDE):
                        sums[v, start + i] = sums[v, start + i] + found[i][v]

    def pieces_of(self, acc: cute.Tensor) -> cute.Tensor:
        """The accumulators as (values of one access, accesses)."""
        return cute.make_tensor(acc.iterator, cute.make_layout((_WIDE, self.pieces)))

    def slot_of(self, block):
        """Where this thread's first access to a block's slot goes. Neighbouring threads' lie side by side."""
        slot = self.partials.iterator + (block * self.config.handed_over + self.thread * _WIDE)
        return slot.align(16)  # once: it rounds, and what is added to it afterwards becomes part of the instruction
