"""A barrier over all blocks of one cooperative launch.

The state is one 32-bit word in global memory, zero when it is allocated and never reset: block 0 adds 2^31 minus the
number of the others, every other block 1, so that each round flips the top bit and leaves the low bits zero. The top
bit is the epoch: a graph replay, or the next launch with any number of blocks, goes on where the last one stopped. One
word serves one launch at a time.

All blocks must be resident at once, or the barrier never opens: launch with `cooperative=True`, which refuses a grid
that doesn't fit, and take the number of blocks from `barrier_blocks`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from vllm_rose_plugin.kernels.ptx.memory_order import add_acq_rel, load_acquire

_EPOCH = 0x80000000


def barrier_blocks(*, wanted: int, sm_count: int, blocks_per_sm: int = 1) -> int:
    """Blocks of a cooperative launch: those wanted, but no more than fit on the device.

    Raises:
        ValueError: an argument under 1.
    """
    if min(wanted, sm_count, blocks_per_sm) < 1:
        raise ValueError(
            f"a grid barrier over {wanted} blocks on {sm_count} SMs, {blocks_per_sm} per SM; each must be at least 1"
        )
    return min(wanted, sm_count * blocks_per_sm)


@cute.jit
def grid_barrier(state: cute.Pointer):
    """Waits until every block has come here; what any of them wrote before is visible to all afterwards.

    Args:
        state: Uint32 word in global memory of this device, 0 at first. Called by all threads of all blocks of a
            one-dimensional grid.
    """
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    cute.arch.sync_threads()
    if thread == 0:
        amount = cutlass.select_(block == 0, Uint32(_EPOCH) - Uint32(blocks - 1), Uint32(1))
        before = add_acq_rel(state, amount, scope="gpu")
        now = load_acquire(state, Uint32, scope="gpu")
        while Int32(now ^ before) >= 0:
            now = load_acquire(state, Uint32, scope="gpu")
    cute.arch.sync_threads()
