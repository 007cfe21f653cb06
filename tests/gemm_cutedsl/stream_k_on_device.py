"""stream_k.py with the DSL's numbers, as a function that runs on the CPU."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from vllm_rose_plugin.kernels.gemm.stream_k import last_part, range_of, share_of


@cute.jit
def first_parts(out: cute.Tensor, units: Int32, blocks: Int32, passes: cutlass.Constexpr[int]):
    """Row b of out (blocks, 8): a block's units, the part its walk begins with, whether that ends early."""
    share = share_of(units=units, blocks=blocks)
    for block in cutlass.range(blocks):
        first, end = range_of(block=block, share=share, units=units, minimum=cutlass.min)
        out[block, 0] = first
        out[block, 1] = end
        if end > first:
            part = last_part(first=first, end=end, block=block, share=share, passes=passes, minimum=cutlass.min)
            for i in cutlass.range_constexpr(4):
                out[block, 2 + i] = part[i]
            out[block, 6] = Int32(part.ends_early(passes))
