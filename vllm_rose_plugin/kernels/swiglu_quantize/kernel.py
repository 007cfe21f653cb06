"""SwiGLU on the device: one pass over gate and up, the product quantized from fp32 or rounded to x's dtype."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from vllm_rose_plugin.kernels.contracts import Activation
from vllm_rose_plugin.kernels.mxfp8_quantize import block as mx
from vllm_rose_plugin.kernels.mxfp8_quantize.config import ITEM_BYTES
from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next, pdl_wait
from vllm_rose_plugin.kernels.ptx.wide import load_global, store_global
from vllm_rose_plugin.kernels.swiglu_quantize.config import SwigluConfig


class SwigluQuantize:
    """The kernel for one config."""

    def __init__(self, config: SwigluConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (T, 2 * I): gate, up
        y: cute.Tensor,  # (T, I) uint8 codes or x's dtype, or (T, ceil(I/64) * 64) bf16 where permuted
        scales: cute.Tensor,  # flat uint8, or (I/32, columns) float32; not touched where the result has none
        stream,
    ):
        grid = mx.num_blocks_of_grid(Int32(x.shape[0]), self.config)
        self.kernel(x, y, scales).launch(
            grid=(grid, 1, 1), block=(self.config.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, scales: cute.Tensor):
        config = self.config
        count = cutlass.const_expr(config.vector)
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        num_rows = Int32(x.shape[0])
        size = cutlass.const_expr(config.hidden_size)
        vectors = cutlass.const_expr(size // count)  # of a row of the result, without padding
        x = cute.make_tensor(
            x.iterator, cute.make_layout((num_rows, 2, vectors, count), stride=(x.stride[0], size, count, 1))
        )
        written = cutlass.const_expr(config.row_vectors if config.permuted else vectors)
        y = cute.make_tensor(y.iterator, cute.make_layout((num_rows, written, count), stride=(y.stride[0], count, 1)))
        pdl_launch_next()
        pdl_wait()

        gates, ups = [], []
        for u in cutlass.range_constexpr(config.unroll):
            row, vector = mx.unit_of(thread, block, u, config)
            gate = cute.make_rmem_tensor((count,), x.element_type)
            up = cute.make_rmem_tensor((count,), x.element_type)
            gate.fill(0)  # rows and blocks that fill up a tile have scale 0; permuted elements past the end are 0
            up.fill(0)
            if row < num_rows and vector < vectors:
                for part, fragment in ((0, gate), (1, up)):
                    source = x[Int64(row), part, vector, None]
                    fragment.store(load_global(source.iterator, count, max_bits=config.load_bytes * 8).load())
            gates.append(gate)
            ups.append(up)
        mx.wait_for_all([*gates, *ups], num_rows, load_bytes=config.load_bytes)

        scale_codes = []
        for u in cutlass.range_constexpr(config.unroll):
            row, vector = mx.unit_of(thread, block, u, config)
            product = cute.make_rmem_tensor((count,), Float32)
            for i, (gate, up) in enumerate(zip(mx.values_of(gates[u]), mx.values_of(ups[u]), strict=True)):
                product[i] = swiglu(gate, up, limit=config.limit)
            if cutlass.const_expr(config.activation is Activation.MXFP8):
                amax = mx.block_amax(mx.magnitude_of(product), dtype=Float32, lanes=config.lanes_per_block)
                code, factor = mx.scale_of(amax, rounding=config.rounding)
                scale_codes.append(code)
            values = [product[i] for i in range(count)]
            if cutlass.const_expr(config.permuted):
                if cutlass.const_expr(config.activation is Activation.MXFP8):
                    result = mx.quantized_bf16_of(values, code, factor)
                else:
                    result = mx.bf16_of(values)
                result = mx.permuted(result, thread)
                vector = mx.permuted_vector(vector)
            elif cutlass.const_expr(config.activation is Activation.MXFP8):
                result = mx.elements_of(values, factor)
            else:
                result = cute.make_rmem_tensor((count,), y.element_type)
                result.store(product.load().to(y.element_type))
            if row < num_rows and vector < written:
                store_global(y[Int64(row), vector, None].iterator, result, max_bits=256)
        if cutlass.const_expr(config.activation is Activation.MXFP8 and not config.permuted):
            mx.store_scales(scales, scale_codes, thread, block, num_rows, config)


def swiglu(gate, up, *, limit: float | None):
    """gate / (1 + exp(-gate)) * up of Float32 numbers, in the reference's order of operations.

    The reciprocal is approximate, so the result is within 3 ulp of exact arithmetic's.
    """
    if limit is not None:
        gate = cute.arch.fmin(gate, Float32(limit), nan=True)
        up = cute.arch.fmax(cute.arch.fmin(up, Float32(limit), nan=True), Float32(-limit), nan=True)
    # A quarter of both: the reciprocal of the largest finite denominator would be subnormal, and flushed.
    return (gate * 0.25) * cute.arch.rcp_approx(_quarter_denominator(gate)) * up


def _quarter_denominator(gate):
    """(1 + exp(-gate)) / 4 of a Float32.

    As CUDA's expf does, with y = -gate * log2(e) and i = floor(y): exp(-gate) = 2**i * 2**(y - i), where y - i is
    formed in two steps, so that it loses nothing to the size of y. i is kept at or above -124, where the 1 hides the
    rest, so that 2**(i - 2) is a normal number, and at or below 128, where only an overflow can follow.
    """
    return cute.arch.inline_ptx(
        "{ .reg .f32 t, n, i, f, p; .reg .b32 s; "
        "fma.rn.sat.f32 t, {$r0}, 0fBBBB989D, 0f3EFBEFBF; "  # (y + 124) / 252, within [0, 1]
        "fma.rm.f32 n, t, 0f437C0000, 0f4B400001; "  # i + 125 in the lowest bits
        "sub.f32 i, n, 0f4B40007D; "
        "neg.f32 i, i; "
        "fma.rn.f32 f, {$r0}, 0fBFB8AA3B, i; "
        "fma.rn.f32 f, {$r0}, 0fB2A57060, f; "
        "ex2.approx.ftz.f32 p, f; "
        "mov.b32 s, n; shl.b32 s, s, 23; mov.b32 n, s; "  # 2**(i - 2)
        "fma.rn.f32 {$w0}, p, n, 0f3E800000; }",
        write_only_types=[Float32],
        read_only_args=[gate],
    )


def build(config: SwigluConfig):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`: takes x, y and flat uint8 scales."""
    dtype = getattr(cutlass, {"bfloat16": "BFloat16", "float16": "Float16", "float32": "Float32"}[config.dtype])
    item_bytes = ITEM_BYTES[config.dtype]
    rows, size = cute.sym_int64(symbol="T"), config.hidden_size
    row_stride = cute.sym_int64(divisibility=max(1, config.load_bytes // item_bytes), symbol="ldx")
    x = make_fake_tensor(dtype, (rows, 2 * size), (row_stride, 1), assumed_align=config.load_bytes)
    result = mx.fake_result(config, rows, plain_dtype=dtype, plain_align=config.vector * item_bytes)
    return SwigluQuantize(config), (x, *result, make_fake_stream(use_tvm_ffi_env_stream=True))
