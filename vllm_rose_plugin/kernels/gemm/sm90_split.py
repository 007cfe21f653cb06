"""Split-K: the blocks of a cluster work on one tile, each on its share of K, and add up through each other's memory.

A block ends up with a part of the tile: with two blocks, one of a thread's two rows; with four, half of the tokens too.
It adds what the others send in an order that is fixed for each element.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from vllm_rose_plugin.kernels.gemm.config import GemmConfig
from vllm_rose_plugin.kernels.gemm.sm90_mainloop import LoopConstant


class Exchange(LoopConstant):
    """The sums of one cluster, as one consumer thread sees them."""

    def __init__(self, config: GemmConfig, buffer, arrived, free, thread):
        self.config = config
        self.buffer = buffer  # (consumer threads, held values, blocks - 1) float32, in shared memory
        self.arrived = arrived  # barrier: everything for this tile is in the buffer
        self.free = free  # barrier: the others have read what this block sent them
        self.thread = thread
        self.pieces = config.token_tile // 8 // (config.cluster // 2)  # of eight tokens, that a block holds

    @cute.jit
    def sum(self, acc: cute.Tensor, phase: Int32) -> cute.Tensor:
        """This block's part of the tile: (2 tokens, 1 row, pieces).

        Args:
            phase: 0 for the first tile, then 1, 0 …
        """
        blocks = cutlass.const_expr(self.config.cluster)
        rank = cute.arch.block_idx_in_cluster()
        a = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, self.config.token_tile // 8)))
        wait_for_cluster(self.free, phase ^ 1)
        for target in cutlass.range_constexpr(blocks):
            if rank != target:
                slot = (rank - target - 1) & (blocks - 1)
                for v in cutlass.range_constexpr(2 * self.pieces):
                    place = self.buffer.iterator + self.buffer.layout((self.thread, v, slot))
                    store_remote(place, Int32(target), self.part(a, target, v))
        self.signal(self.arrived)
        held = cute.make_rmem_tensor((2, 1, self.pieces), Float32)
        for v in cutlass.range_constexpr(2 * self.pieces):
            value = self.part(a, 0, v)
            for r in cutlass.range_constexpr(1, blocks):
                value = Float32(cutlass.select_(rank == r, self.part(a, r, v), value))
            held[v % 2, 0, v // 2] = value
        wait_for_cluster(self.arrived, phase)
        for slot in cutlass.range_constexpr(blocks - 1):
            for v in cutlass.range_constexpr(2 * self.pieces):
                held[v % 2, 0, v // 2] = held[v % 2, 0, v // 2] + self.buffer[self.thread, v, slot]
        self.signal(self.free)
        return held

    def part(self, a, target: int, v: int):
        """The v-th value that block `target` will hold."""
        return a[v % 2, target % 2, v // 2 + target // 2 * self.pieces]

    @cute.jit
    def signal(self, barrier):
        """A warp's arrival at the same barrier of every other block."""
        blocks = cutlass.const_expr(self.config.cluster)
        rank, lane = cute.arch.block_idx_in_cluster(), cute.arch.lane_idx()
        cute.arch.sync_warp()
        if lane < blocks and lane != rank:
            cute.arch.fence_acq_rel_cluster()
            cute.arch.mbarrier_arrive(barrier, peer_cta_rank_in_cluster=lane)

    def first_row(self, rank):
        """Of this block's part, from the first row of the tile on."""
        return rank % 2 * 8

    def first_token(self, rank):
        """As first_row."""
        return rank // 2 * (self.pieces * 8)


def store_remote(place, block, value) -> None:
    """A Float32, to where another block of the cluster has `place`."""
    cute.arch.inline_ptx(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, {$r0}, {$r1}; st.shared::cluster.f32 [there], {$r2}; }",
        read_only_args=[place, block, value],
    )


def wait_for_cluster(barrier, phase) -> None:
    """As mbarrier_wait, for what other blocks of the cluster wrote."""
    cute.arch.inline_ptx(
        "{ .reg .pred done; WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1}; "
        "@!done bra WAIT; }",
        read_only_args=[barrier, phase],
    )
