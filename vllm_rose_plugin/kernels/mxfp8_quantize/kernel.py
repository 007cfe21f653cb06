"""The quantizer on the device: one pass, every input read once, every result written once."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from vllm_rose_plugin.kernels.contracts import Activation
from vllm_rose_plugin.kernels.mxfp8_quantize import block as mx
from vllm_rose_plugin.kernels.mxfp8_quantize.config import ITEM_BYTES, QuantizeConfig
from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next, pdl_wait
from vllm_rose_plugin.kernels.ptx.wide import load_global, store_global


class Quantize:
    """The kernel for one config."""

    def __init__(self, config: QuantizeConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (T, H)
        y: cute.Tensor,  # (T, H) uint8 codes, or (T, ceil(H/64) * 64) bf16 where permuted
        scales: cute.Tensor,  # flat uint8, or (H/32, columns) float32; not touched where permuted
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
        vectors = cutlass.const_expr(config.hidden_size // count)  # of a row, without padding
        x = cute.make_tensor(x.iterator, cute.make_layout((num_rows, vectors, count), stride=(x.stride[0], count, 1)))
        written = cutlass.const_expr(config.row_vectors if config.permuted else vectors)
        y = cute.make_tensor(y.iterator, cute.make_layout((num_rows, written, count), stride=(y.stride[0], count, 1)))
        pdl_launch_next()
        pdl_wait()

        fragments = []
        for u in cutlass.range_constexpr(config.unroll):
            row, vector = mx.unit_of(thread, block, u, config)
            fragment = cute.make_rmem_tensor((count,), x.element_type)
            fragment.fill(0)  # rows and blocks that fill up a tile have scale 0; permuted elements past the end are 0
            if row < num_rows and vector < vectors:
                source = x[Int64(row), vector, None]
                fragment.store(load_global(source.iterator, count, max_bits=config.load_bytes * 8).load())
            fragments.append(fragment)
        mx.wait_for_all(fragments, num_rows, load_bytes=config.load_bytes)

        scale_codes = []
        for u in cutlass.range_constexpr(config.unroll):
            row, vector = mx.unit_of(thread, block, u, config)
            if cutlass.const_expr(config.activation is Activation.MXFP8):
                largest = mx.magnitude_of(fragments[u])
                amax = mx.block_amax(largest, dtype=x.element_type, lanes=config.lanes_per_block)
                code, factor = mx.scale_of(amax, rounding=config.rounding)
                scale_codes.append(code)
            values = mx.values_of(fragments[u])
            if cutlass.const_expr(not config.permuted):
                result = mx.elements_of(values, factor)
            else:
                if cutlass.const_expr(config.activation is Activation.MXFP8):
                    result = mx.quantized_bf16_of(values, code, factor)
                else:
                    result = mx.bf16_of(values)
                result = mx.permuted(result, thread)
                vector = mx.permuted_vector(vector)
            if row < num_rows and vector < written:
                store_global(y[Int64(row), vector, None].iterator, result)
        if cutlass.const_expr(not config.permuted):
            mx.store_scales(scales, scale_codes, thread, block, num_rows, config)


def build(config: QuantizeConfig):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`: takes x, the result and its scales; codes as uint8."""
    dtype = getattr(cutlass, {"bfloat16": "BFloat16", "float16": "Float16", "float32": "Float32"}[config.dtype])
    item_bytes = ITEM_BYTES[config.dtype]
    rows, hidden_size = cute.sym_int64(symbol="T"), config.hidden_size
    row_stride = cute.sym_int64(divisibility=max(1, config.load_bytes // item_bytes), symbol="ldx")
    x = make_fake_tensor(dtype, (rows, hidden_size), (row_stride, 1), assumed_align=config.load_bytes)
    return Quantize(config), (x, *mx.fake_result(config, rows), make_fake_stream(use_tvm_ffi_env_stream=True))
