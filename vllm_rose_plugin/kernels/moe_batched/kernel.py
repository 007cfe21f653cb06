"""The tokens of batched experts on the device: valid rows are read, quantized once, and written in place of themselves.

Expert e's tokens are the first of its `M` rows, and its run begins at row ``e * M`` of the GEMMs' tokens. So nothing is
routed and nothing moves; rows past an expert's count are neither read nor written, whatever they hold. Only tiled
scales lie elsewhere: every run begins at the first free tile of 128 rows, as ``gemm/sm100_schedule.py`` finds it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, TokenFormat
from vllm_rose_plugin.kernels.moe_dispatch.config import DispatchConfig
from vllm_rose_plugin.kernels.moe_dispatch.kernel import TYPES, load_vector, quantize, store_vector
from vllm_rose_plugin.kernels.moe_dispatch.padding import fill_tiles
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import FP32_COLUMNS, TILE_ROWS
from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next, pdl_wait
from vllm_rose_plugin.kernels.ptx.reduce import WARP, warp_sums


class BatchedTokens:
    """The kernel for one config, which is that of a dispatch with top_k 1 behind a routing."""

    def __init__(self, config: DispatchConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (E * M, H); uint8 codes where they arrive quantized
        x_scales,  # (E * M, H/32) uint8, flat, or None
        expert_counts: cute.Tensor,  # (E,) int32, at most M each
        expert_offsets: cute.Tensor,  # (E + 1,) int32, written: e * M
        y: cute.Tensor,  # (E * M, row bytes) uint8
        scales: cute.Tensor,  # flat uint8, or (H/32, columns) float32; not touched where there are none
        stream,
    ):
        config = self.config
        each = Int32(x.shape[0]) // config.num_experts
        blocks = Int32((Int64(each) * config.row_vectors + (config.threads - 1)) // config.threads)
        grid = blocks * config.num_experts
        if cutlass.const_expr(config.tiled):
            grid = grid + config.num_experts
        self.kernel(x, x_scales, expert_counts, expert_offsets, y, scales, each, blocks).launch(
            grid=(grid, 1, 1), block=(config.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        x_scales,
        expert_counts: cute.Tensor,
        expert_offsets: cute.Tensor,
        y: cute.Tensor,
        scales: cute.Tensor,
        each: Int32,
        blocks: Int32,
    ):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        pdl_wait()
        # Only now, so that whoever starts early may count on everything before us having ended.
        pdl_launch_next()
        if block == 0:
            for expert in cutlass.range(thread, config.num_experts + 1, config.threads, unroll=1):
                expert_offsets[expert] = Int32(expert) * each
        expert, piece = Int32(Uint32(block) // Uint32(blocks)), Int32(Uint32(block) % Uint32(blocks))
        if expert < config.num_experts:
            count = expert_counts[expert]
            index = piece * config.threads + thread
            if Int32(Uint32(piece * config.threads) // config.row_vectors) < count:
                copy_valid(x, x_scales, expert_counts, y, scales, expert, count, index, each, config)
        if cutlass.const_expr(config.tiled):
            last = block - blocks * config.num_experts
            if last >= 0:
                count = expert_counts[last]
                if count > 0:
                    tile = tiles_before(expert_counts, last, thread % WARP, config)
                    fill_tiles(scales, tile, cute.ceil_div(count, TILE_ROWS), count, thread, config)


@cute.jit
def copy_valid(
    x: cute.Tensor,
    x_scales,
    expert_counts: cute.Tensor,
    y: cute.Tensor,
    scales: cute.Tensor,
    expert: Int32,
    count: Int32,
    index: Int32,
    each: Int32,
    config: cutlass.Constexpr[DispatchConfig],
):
    """One vector of the expert's rows, of that number; all threads of a block take part."""
    row, vector = Int32(Uint32(index) // config.row_vectors), Int32(Uint32(index) % config.row_vectors)
    inside = row < count
    place = expert * each + row
    fragment, code = load_vector(x, x_scales, place, vector, inside, config)
    result, scale = quantize(fragment, code, None, index, config)
    tiled_row = place
    if cutlass.const_expr(config.tiled):
        tiled_row = tiles_before(expert_counts, expert, index % WARP, config) * TILE_ROWS + row
    store_vector(result, scale, y, scales, place, tiled_row, vector, inside, 0, config)


def tiles_before(expert_counts: cute.Tensor, expert: Int32, lane: Int32, config: DispatchConfig) -> Int32:
    """Tiles of scales of the experts before one; all lanes of a warp take part."""
    tiles = Int32(0)
    for first in range(0, config.num_experts, WARP):
        other = first + lane
        count = expert_counts[cutlass.min(other, config.num_experts - 1)]
        tiles = tiles + Int32(cutlass.select_(other < expert, cute.ceil_div(count, TILE_ROWS), Int32(0)))
    (tiles,) = warp_sums([tiles])
    return tiles


def build(config: DispatchConfig):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`: the arguments of `BatchedTokens.__call__`, M >= 1."""
    size = config.hidden_size
    rows = cute.sym_int64(symbol="S")
    dtype = TYPES[config.dtype]
    stride = cute.sym_int64(divisibility=max(1, config.load_bytes * 8 // dtype.width), symbol="ldx")

    def flat(dtype, size, align):
        return make_fake_tensor(dtype, (size,), (1,), assumed_align=align)

    if config.token_format is TokenFormat.MXFP8_FP32_SCALES:
        columns = cute.sym_int64(divisibility=FP32_COLUMNS, symbol="S4")
        scales = make_fake_tensor(Float32, (size // MXFP8_BLOCK, columns), (columns, 1), assumed_align=16)
    else:
        scales = flat(Uint8, cute.sym_int64(symbol="B"), 16)
    return BatchedTokens(config), (
        make_fake_tensor(dtype, (rows, size), (stride, 1), assumed_align=config.load_bytes),
        flat(Uint8, cute.sym_int64(symbol="N"), 1) if config.dtype == "mxfp8" else None,
        flat(Int32, config.num_experts, 4),
        flat(Int32, config.num_experts + 1, 4),
        make_fake_tensor(Uint8, (rows, config.row_bytes), (config.row_bytes, 1), assumed_align=32),
        scales,
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
