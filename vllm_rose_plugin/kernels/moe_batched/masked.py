"""What runs in front of masked GEMMs on the device: valid rows are read, quantized, and written in place of themselves.

As in ``kernel.py``, but expert e's tiled scales begin at tile ``e * ceil(M / 128)`` whatever the counts are, and a row
may be gate and up, whose SwiGLU is quantized. Nothing fills up a tile: a row's scales only reach that row of a product.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from vllm_rose_plugin.kernels.moe_batched.config import MaskedConfig
from vllm_rose_plugin.kernels.moe_dispatch.kernel import TYPES, load_vector, quantize, store_vector
from vllm_rose_plugin.kernels.mxfp8_quantize.block import values_of
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import TILE_ROWS
from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next, pdl_wait
from vllm_rose_plugin.kernels.swiglu_quantize.kernel import swiglu


class MaskedTokens:
    """The kernel for one config."""

    def __init__(self, config: MaskedConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (E * M, K), or (E * M, 2 * K) with SwiGLU; uint8 codes where they arrive quantized
        x_scales,  # (E * M, K/32) uint8, flat, or None
        expert_counts: cute.Tensor,  # (E,) int32, at most M each
        y: cute.Tensor,  # (E * M, K) uint8
        scales: cute.Tensor,  # flat uint8
        stream,
    ):
        rows = self.config.rows
        each = Int32(x.shape[0]) // rows.num_experts
        blocks = Int32((Int64(each) * rows.row_vectors + (rows.threads - 1)) // rows.threads)
        self.kernel(x, x_scales, expert_counts, y, scales, each, blocks).launch(
            grid=(blocks * rows.num_experts, 1, 1), block=(rows.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        x_scales,
        expert_counts: cute.Tensor,
        y: cute.Tensor,
        scales: cute.Tensor,
        each: Int32,
        blocks: Int32,
    ):
        rows = self.config.rows
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        pdl_wait()
        # Only now, so that whoever starts early may count on everything before us having ended.
        pdl_launch_next()
        expert, piece = Int32(Uint32(block) // Uint32(blocks)), Int32(Uint32(block) % Uint32(blocks))
        count = expert_counts[expert]
        if Int32(Uint32(piece * rows.threads) // rows.row_vectors) < count:
            write_valid(x, x_scales, y, scales, expert, count, piece * rows.threads + thread, each, self.config)


@cute.jit
def write_valid(
    x: cute.Tensor,
    x_scales,
    y: cute.Tensor,
    scales: cute.Tensor,
    expert: Int32,
    count: Int32,
    index: Int32,
    each: Int32,
    config: cutlass.Constexpr[MaskedConfig],
):
    """One vector of the expert's rows, of that number; all threads of a block take part."""
    rows = config.rows
    row, vector = Int32(Uint32(index) // rows.row_vectors), Int32(Uint32(index) % rows.row_vectors)
    inside = row < count
    place = expert * each + row
    fragment, code = load_vector(x, x_scales, place, vector, inside, rows)
    if cutlass.const_expr(config.swiglu):
        right = cute.make_tensor(x.iterator + rows.hidden_size, x.layout)
        up, _ = load_vector(right, None, place, vector, inside, rows)
        product = cute.make_rmem_tensor((rows.vector,), Float32)
        for i, (a, b) in enumerate(zip(values_of(fragment), values_of(up), strict=True)):
            product[i] = swiglu(a, b, limit=None)
        fragment = product
    result, scale = quantize(fragment, code, None, index, rows)
    tiled_row = expert * (cute.ceil_div(each, TILE_ROWS) * TILE_ROWS) + row
    store_vector(result, scale, y, scales, place, tiled_row, vector, inside, 0, rows)


def build(config: MaskedConfig):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`: the arguments of `MaskedTokens.__call__`, M >= 1."""
    rows = config.rows
    size, dtype = rows.hidden_size, TYPES[rows.dtype]
    number = cute.sym_int64(symbol="S")
    stride = cute.sym_int64(divisibility=max(1, rows.load_bytes * 8 // dtype.width), symbol="ldx")

    def flat(dtype, size, align):
        return make_fake_tensor(dtype, (size,), (1,), assumed_align=align)

    width = 2 * size if config.swiglu else size
    return MaskedTokens(config), (
        make_fake_tensor(dtype, (number, width), (stride, 1), assumed_align=rows.load_bytes),
        flat(Uint8, cute.sym_int64(symbol="N"), 1) if rows.dtype == "mxfp8" else None,
        flat(Int32, rows.num_experts, 4),
        make_fake_tensor(Uint8, (number, rows.row_bytes), (rows.row_bytes, 1), assumed_align=32),
        flat(Uint8, cute.sym_int64(symbol="B"), 16),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
