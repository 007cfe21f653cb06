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
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        num_tokens = Int32(out.shape[0])
        y, shared, out = (
            self.vectors(y, Int32(y.shape[0])),
            self.vectors(shared, num_tokens),
            self.vectors(out, num_tokens),
        )
        pdl_wait()
        pdl_launch_next()  # after the wait: see early_counts in gemm/launch.py

        places = []
        for u in cutlass.range_constexpr(config.unroll):
            warp = block * (config.threads // _WARP) + thread // _WARP
            places.append(self.place(warp * (_WARP * config.unroll) + u * _WARP + thread % _WARP))
        results = self.sums((y, slots, weights, shared), places, num_tokens)
        for u in cutlass.range_constexpr(config.unroll):
            token, vector = places[u]
            if token < num_tokens:
                store_global(out[Int64(token), vector, None].iterator, results[u], max_bits=256)

    def vectors(self, tensor, rows):
        """A matrix as (rows, vectors of a row, elements of a vector)."""
        count = self.config.vector
        layout = cute.make_layout((rows, self.config.row_vectors, count), stride=(tensor.stride[0], count, 1))
        return cute.make_tensor(tensor.iterator, layout)

    def place(self, index):
        """(token, vector in its row) of a vector of the result."""
        return Int32(Uint32(index) // self.config.row_vectors), Int32(Uint32(index) % self.config.row_vectors)

    @cute.jit
    def sums(self, tensors, places, num_tokens: Int32):
        """The weighted sums at places, rounded; all loads of all of them are under way before the first is used.

        Args:
            tensors: (y, slots, weights, shared), y and shared as (rows, vectors of a row, elements of a vector).
            places: of :meth:`place`. Past the last token nothing is loaded.
            num_tokens: T.

        Returns:
            A register tensor for each place.
        """
        config = self.config
        count = cutlass.const_expr(config.vector)
        y, slots, weights, shared = tensors
        taken = []  # (a place's slots, its router weights)
        for u in cutlass.range_constexpr(len(places)):
            token, _ = places[u]
            mine = cute.make_rmem_tensor((config.top_k,), Int32)
            factors = cute.make_rmem_tensor((config.top_k,), Float32)
            mine.fill(-1)  # past the last token
            factors.fill(1.0)
            if token < num_tokens:
                self.load_row(slots, token, mine)
                if cutlass.const_expr(config.weighted):
                    self.load_row(weights, token, factors)
            taken.append((mine, factors))

        loads = []
        for u in cutlass.range_constexpr(len(places)):
            token, vector = places[u]
            mine, _ = taken[u]
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
            waited += [factors for _, factors in taken]
        zero = zero_after(waited, num_tokens)

        results = []
        for u in cutlass.range_constexpr(len(places)):
            mine, factors = taken[u]
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
            results.append(rounded(total, config.out_dtype))
        return results

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


def fake_operands(config: CombineConfig) -> tuple:
    """y, slots, weights, shared and out as the compiler is told of them."""
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
    return y, slots, weights, shared, out


def build(config: CombineConfig):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`: takes y, slots, weights, shared and out."""
    return Combine(config), (*fake_operands(config), make_fake_stream(use_tvm_ffi_env_stream=True))
