"""The weighted sum on the device: every row that a token got is read once, the sum is written once."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from vllm_rose_plugin.kernels.moe_combine.config import CombineConfig
from vllm_rose_plugin.kernels.mxfp8_quantize.block import bf16_of, values_of
from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next, pdl_wait
from vllm_rose_plugin.kernels.ptx.wide import CacheHint, load_global, store_global, zero_after

_WARP = 32
_DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


class Combine:
    """The kernel for one config."""

    def __init__(self, config: CombineConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        y: cute.Tensor,  # (S, H) the experts' results
        slots: cute.Tensor,  # (T * top_k) int32; -1: no row
        weights: cute.Tensor,  # (T * top_k) float32; not touched where sums aren't weighted
        shared: cute.Tensor,  # (T, H); not touched where there is none
        out: cute.Tensor,  # (T, H)
        stream,
    ):
        vectors = Int32(out.shape[0]) * self.config.row_vectors  # fits: config.py refuses more
        grid = (vectors + (self.config.block_vectors - 1)) // self.config.block_vectors
        self.kernel(y, slots, weights, shared, out).launch(
            grid=(grid, 1, 1), block=(self.config.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, y: cute.Tensor, slots: cute.Tensor, weights: cute.Tensor, shared: cute.Tensor, out: cute.Tensor):
        config = self.config
        count = cutlass.const_expr(config.vector)
        row_vectors = cutlass.const_expr(config.row_vectors)
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        num_tokens = Int32(out.shape[0])
        rows = [
            cute.make_tensor(t.iterator, cute.make_layout((n, row_vectors, count), stride=(t.stride[0], count, 1)))
            for t, n in ((y, Int32(y.shape[0])), (shared, num_tokens), (out, num_tokens))
        ]
        y, shared, out = rows
        pdl_wait()
        pdl_launch_next()  # after the wait: see early_counts in gemm/launch.py

        taken = []  # (token, vector in the row, its slots, its router weights)
        for u in cutlass.range_constexpr(config.unroll):
            warp = block * (config.threads // _WARP) + thread // _WARP
            index = Uint32(warp * (_WARP * config.unroll) + u * _WARP + thread % _WARP)
            token, vector = Int32(index // row_vectors), Int32(index % row_vectors)
            mine = cute.make_rmem_tensor((config.top_k,), Int32)
            factors = cute.make_rmem_tensor((config.top_k,), Float32)
            mine.fill(-1)  # past the last token
            factors.fill(1.0)
            if token < num_tokens:
                self.load_row(slots, token, mine)
                if cutlass.const_expr(config.weighted):
                    self.load_row(weights, token, factors)
            taken.append((token, vector, mine, factors))

        loads = []
        for u in cutlass.range_constexpr(config.unroll):
            token, vector, mine, _ = taken[u]
            parts = []
            for k in cutlass.range_constexpr(config.top_k):
                part = cute.make_rmem_tensor((count,), y.element_type)
                part.fill(0)
                if mine[k] >= 0:
                    source = y[Int64(mine[k]), vector, None]
                    part.store(load_global(source.iterator, count, max_bits=256, hint=CacheHint.NO_ALLOCATE).load())
                parts.append(part)
            if cutlass.const_expr(config.shared_dtype is not None):
                part = cute.make_rmem_tensor((count,), shared.element_type)
                part.fill(0)
                if token < num_tokens:
                    source = shared[Int64(token), vector, None]
                    part.store(
                        load_global(
                            source.iterator, count, max_bits=config.shared_bytes * 8, hint=CacheHint.NO_ALLOCATE
                        ).load()
                    )
                parts.append(part)
            loads.append(parts)
        waited = [part for parts in loads for part in parts]
        if cutlass.const_expr(config.weighted):
            waited += [factors for _, _, _, factors in taken]
        zero = zero_after(waited, num_tokens)

        for u in cutlass.range_constexpr(config.unroll):
            token, vector, mine, factors = taken[u]
            total = [zero.bitcast(Float32)] * count
            for k in cutlass.range_constexpr(config.top_k):
                values = values_of(loads[u][k])
                if cutlass.const_expr(config.weighted):
                    # What has no row is zero, whatever its weight is; it adds nothing to a sum that began with +0.
                    factor = Float32(cutlass.select_(mine[k] >= 0, factors[k], Float32(0.0)))
                    factor = (factor.bitcast(Uint32) ^ zero).bitcast(Float32)
                    values = [product(value, factor) for value in values]
                total = [sum_of(a, b) for a, b in zip(total, values, strict=True)]
            if cutlass.const_expr(config.shared_dtype is not None):
                total = [sum_of(a, b) for a, b in zip(total, values_of(loads[u][config.top_k]), strict=True)]
            result = rounded(total, config.out_dtype)
            if token < num_tokens:
                store_global(out[Int64(token), vector, None].iterator, result, max_bits=256)

    @cute.jit
    def load_row(self, source: cute.Tensor, token: Int32, target: cute.Tensor):
        """The top_k numbers of a token, in the widest loads that their places allow."""
        each = cutlass.const_expr(self.config.slot_bytes // 4)
        source = cute.make_tensor(
            source.iterator,
            cute.make_layout(
                (source.shape[0] // self.config.top_k, self.config.top_k // each, each),
                stride=(self.config.top_k, each, 1),
            ),
        )
        for i in cutlass.range_constexpr(self.config.top_k // each):
            piece = load_global(source[Int64(token), i, None].iterator, each)
            for j in cutlass.range_constexpr(each):
                target[i * each + j] = piece[j]


def product(a, b):
    """a * b in fp32, rounded by itself: as the reference forms it, never part of an FMA."""
    return cute.arch.inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def sum_of(a, b):
    """a + b in fp32, rounded by itself."""
    return cute.arch.inline_ptx("add.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def rounded(values: list, dtype: str):
    """Float32 values rounded to nearest even, as a register tensor."""
    if dtype == "bfloat16":
        return bf16_of(values)
    result = cute.make_rmem_tensor((len(values),), cutlass.Float16)
    words = cute.recast_tensor(result, Uint32)
    for i in range(len(values) // 2):
        words[i] = cute.arch.inline_ptx(
            "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};",
            write_only_types=[Uint32],
            read_only_args=[values[2 * i], values[2 * i + 1]],
        )
    return result


def build(config: CombineConfig):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`: takes y, slots, weights, shared and out."""
    size, width = config.hidden_size, config.vector * 2
    tokens, pairs = cute.sym_int64(symbol="T"), cute.sym_int64(symbol="P")
    y = make_fake_tensor(_DTYPES[config.dtype], (cute.sym_int64(symbol="S"), size), (size, 1), assumed_align=width)
    slots = make_fake_tensor(Int32, (pairs,), (1,), assumed_align=config.slot_bytes)
    weights = make_fake_tensor(
        Float32, (cute.sym_int64(symbol="W"),), (1,), assumed_align=config.slot_bytes if config.weighted else 4
    )
    shared = make_fake_tensor(
        _DTYPES[config.shared_dtype or config.dtype],
        (cute.sym_int64(symbol="R"), size),
        (cute.sym_int64(divisibility=max(1, config.shared_bytes // 2), symbol="ldr"), 1),
        assumed_align=config.shared_bytes,
    )
    out = make_fake_tensor(_DTYPES[config.out_dtype], (tokens, size), (size, 1), assumed_align=width)
    return Combine(config), (y, slots, weights, shared, out, make_fake_stream(use_tvm_ffi_env_stream=True))
