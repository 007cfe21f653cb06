"""All-reduce, residual and RMS norm on the device: all-reduce's protocol, with whole rows to a block and a norm behind.

Epochs, flags, staging buffers and deadlines are those of ``all_reduce/kernel.py``, which also says why nothing is
overwritten that is still read; launches of both may follow each other. Here a block's share is whole rows, since the
norm needs a row's sum of squares before the first element of it can be written:

- one-shot: row r is block r % blocks'. It reduces the row, and its registers hold it until it is normalized.
- two-shot: row r is reduced by rank r % ranks, which stores the sum to all ranks; every rank normalizes all rows from
  its own staging buffer. Sending normalized rows instead would send the residual as well, twice the bytes. Block
  (r // ranks) % blocks of every rank does it, so that blocks still wait only for those of their number.

Both round the sum before they go on, so they give the same bits with the loop over peers.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from vllm_rose_plugin.kernels.all_reduce.access import DTYPES
from vllm_rose_plugin.kernels.all_reduce.config import ITEM_BYTES
from vllm_rose_plugin.kernels.all_reduce.kernel import AllReduce
from vllm_rose_plugin.kernels.all_reduce.layout import MAX_BLOCKS, state_offset
from vllm_rose_plugin.kernels.all_reduce_norm.config import AllReduceNormConfig
from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, TokenFormat
from vllm_rose_plugin.kernels.mxfp8_quantize import block as mx
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import FP32_COLUMNS, TILE_ROWS
from vllm_rose_plugin.kernels.ptx.memory_order import load_relaxed
from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next, pdl_wait
from vllm_rose_plugin.kernels.ptx.reduce import WARP, warp_sums
from vllm_rose_plugin.kernels.ptx.wide import pointer_to, store_global


class AllReduceNorm(AllReduce):
    """The kernel for one config."""

    config: Any

    def __init__(self, config: AllReduceNormConfig):
        super().__init__(config)  # type: ignore[arg-type]  # it has what the protocol asks of one
        self.row_bytes = config.hidden_size * ITEM_BYTES[config.dtype]
        self.owners = config.group_size if self.two_shot else 1
        self.warps = config.threads // WARP
        self.even = config.per_thread * config.threads == config.row_vectors

    @cute.jit
    def __call__(  # type: ignore[override]
        self,
        x: cute.Tensor,  # (T, H); not touched where it isn't copied
        residual: cute.Tensor,  # (T, H)
        weight: cute.Tensor,  # (H,)
        out: cute.Tensor,  # (T, H) in dtype or uint8 codes
        scales: cute.Tensor,  # flat uint8, or (H/32, columns) float32; not touched where there are none
        residual_out: cute.Tensor,  # (T, H), may be residual
        eps: Float32,
        blocks: Int32,
        rank: Int32,
        base: Int64,  # from here on as in all_reduce
        stride: Int64,
        multicast: Int64,
        source: Int64,
        source_step: Int64,
        target: Int64,
        target_step: Int64,
        nanoseconds: Int64,
        report: Int64,
        stream,
    ):
        self.kernel(
            x, residual, weight, out, scales, residual_out, eps,
            rank, base, stride, multicast, source, source_step, target, target_step, nanoseconds, report,
        ).launch(
            grid=(blocks, 1, 1),
            block=(self.config.threads, 1, 1),
            min_blocks_per_mp=1,  # else the compiler spills some registers to have room for two
            stream=stream,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(  # type: ignore[override]
        self,
        x: cute.Tensor,
        residual: cute.Tensor,
        weight: cute.Tensor,
        out: cute.Tensor,
        scales: cute.Tensor,
        residual_out: cute.Tensor,
        eps: Float32,
        rank: Int32,
        base: Int64,
        stride: Int64,
        multicast: Int64,
        source: Int64,
        source_step: Int64,
        target: Int64,
        target_step: Int64,
        nanoseconds: Int64,
        report: Int64,
    ):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        allocator = cutlass.memory.SmemAllocator()
        gone = allocator.allocate_array(Int32, 1)
        partial = allocator.allocate_array(Float32, self.most_rows() * self.warps)
        own = base + Int64(rank) * stride
        state = pointer_to(Int64, own + state_offset(config.group_size), 8)
        memory = (base, stride, rank, multicast)
        if thread == 0:
            gone.store(Int32(0))
        cute.arch.sync_threads()
        pdl_wait()
        pdl_launch_next()  # after the wait: see early_counts in gemm/launch.py

        epoch = (state + block).load() + 1
        abandoned = load_relaxed(self.abandoned(state), Int32, scope="gpu")
        source = source + (epoch & 1) * source_step
        target = target + (epoch & 1) * target_step
        num_rows = Int32(x.shape[0])
        weights = [
            self.load(weight.iterator.toint() + self.bytes_of(self.vector(thread, j))) for j in range(config.per_thread)
        ]
        norm = (thread, num_rows, weights, eps, partial, residual, out, scales, residual_out)

        if abandoned != 0:
            gone.store(Int32(1))
        elif cutlass.const_expr(config.copy_in):
            self.copy_rows(x, own + source, num_rows, thread, block, blocks)
        self.meet(0, own, base, stride, rank, block, thread, epoch, nanoseconds, report, state, gone)
        if gone.load() == 0:
            first = block
            while first * self.owners < num_rows:
                rows = [(first + u * blocks) * self.owners for u in range(config.rows)]
                if cutlass.const_expr(self.two_shot):
                    rows = [row + rank for row in rows]
                    sums = self.reduce_rows(memory, source, rows, num_rows, thread)
                    for u in cutlass.range_constexpr(config.rows):
                        for j in cutlass.range_constexpr(config.per_thread):
                            if self.inside(rows[u], num_rows, thread, j):
                                place = self.place(rows[u], self.vector(thread, j))
                                self.access.broadcast_store(memory, target + place, sums[u][j])
                else:
                    residuals = self.load_rows(residual.iterator.toint(), rows, num_rows, thread)
                    sums = self.reduce_rows(memory, source, rows, num_rows, thread)
                    self.normalize(norm, rows, sums, residuals)
                first += config.rows * blocks
        if cutlass.const_expr(self.two_shot):
            self.meet(1, own, base, stride, rank, block, thread, epoch, nanoseconds, report, state, gone)
            if gone.load() == 0:
                together = cutlass.const_expr(self.together())
                first = block
                while first * self.owners < num_rows:
                    for i in cutlass.range(self.owners // together, unroll=1):
                        rows = [first * self.owners + i * together + u for u in range(together)]
                        residuals = self.load_rows(residual.iterator.toint(), rows, num_rows, thread)
                        sums = self.load_rows(own + target, rows, num_rows, thread)
                        self.normalize(norm, rows, sums, residuals)
                    first += blocks
        if cutlass.const_expr(config.token_format is TokenFormat.MXFP8_TCGEN05):
            self.fill_tiles(scales, num_rows, thread, block, blocks)

        # As in all_reduce: all copies of the epoch.
        if block + thread * blocks < MAX_BLOCKS:
            (state + (block + thread * blocks)).store(epoch)

    @cute.jit
    def copy_rows(self, x: cute.Tensor, address: Int64, num_rows: Int32, thread: Int32, block: Int32, blocks: Int32):
        """Moves this block's share of the input into this rank's part of the symmetric buffer."""
        config = self.config
        together = cutlass.const_expr(self.together())
        groups = cutlass.const_expr(config.rows // together)
        first = block
        while first * self.owners < num_rows:
            for i in cutlass.range(self.owners // together, unroll=1):
                starts = [(first + u * blocks) * self.owners + i * together for u in range(groups)]
                rows = [start + k for start in starts for k in range(together)]
                values = self.load_rows(x.iterator.toint(), rows, num_rows, thread)
                for u in cutlass.range_constexpr(len(rows)):
                    for j in cutlass.range_constexpr(config.per_thread):
                        if self.inside(rows[u], num_rows, thread, j):
                            self.store(address + self.place(rows[u], self.vector(thread, j)), values[u][j])
            first += groups * blocks

    @cute.jit
    def reduce_rows(self, memory, source: Int64, rows, num_rows: Int32, thread: Int32):
        """The thread's vectors of the sums of rows: [row][j], rounded."""
        config = self.config
        offsets = [
            source + self.place(cutlass.min(row, num_rows - 1), self.vector(thread, j))
            for row in rows
            for j in range(config.per_thread)
        ]
        sums = []
        for start in cutlass.range_constexpr(0, len(offsets), config.at_once):
            sums += self.access.reduce_load(memory, offsets[start : start + config.at_once])
        return [sums[u * config.per_thread : (u + 1) * config.per_thread] for u in range(len(rows))]

    @cute.jit
    def normalize(self, norm, rows, sums, residuals):
        """Adds the residual to summed rows, stores it, and stores the norm of that in the result's format."""
        config = self.config
        thread, num_rows, weights, eps, partial, _, out, scales, residual_out = norm
        widened, squares = [], []
        for u in cutlass.range_constexpr(len(rows)):
            total = Float32(0.0)
            of_row = []
            for j in cutlass.range_constexpr(config.per_thread):
                z = cute.make_rmem_tensor((config.count,), Float32)
                z.store(sums[u][j].load().to(Float32) + residuals[u][j].load().to(Float32))
                of_row.append(z)
                if self.inside(rows[u], num_rows, thread, j):
                    address = residual_out.iterator.toint() + self.place(rows[u], self.vector(thread, j))
                    self.store(address, self.rounded(z))
                added = Float32(0.0)
                for e in cutlass.range_constexpr(config.count):
                    added = added + z[e] * z[e]
                if cutlass.const_expr(not self.even):
                    added = cutlass.select_(self.within(thread, j), added, Float32(0.0))
                total = total + added
            widened.append(of_row)
            squares.append(total)
        totals = self.block_sums(squares, partial, thread)
        for u in cutlass.range_constexpr(len(rows)):
            scale = cute.math.rsqrt(totals[u] * (1.0 / config.hidden_size) + eps, fastmath=True)
            for j in cutlass.range_constexpr(config.per_thread):
                y = cute.make_rmem_tensor((config.count,), self.dtype)
                scaled = (widened[u][j].load() * scale).to(self.dtype).to(Float32)
                y.store((scaled * weights[j].load().to(Float32)).to(self.dtype))
                self.store_result(out, scales, y, rows[u], num_rows, thread, j)

    @cute.jit
    def block_sums(self, values, partial: cute.Pointer, thread: Int32):
        """Sums over the block of one number for each row, in an order that never changes."""
        values = warp_sums(values)
        warps = cutlass.const_expr(self.warps)
        if thread % WARP == 0:
            for u in cutlass.range_constexpr(len(values)):
                (partial + (u * warps + thread // WARP)).store(values[u])
        cute.arch.sync_threads()
        totals = []
        for u in cutlass.range_constexpr(len(values)):
            total = (partial + u * warps).load()
            for warp in cutlass.range_constexpr(1, warps):
                total = total + (partial + (u * warps + warp)).load()
            totals.append(total)
        cute.arch.sync_threads()  # before the next rows' sums come there
        return totals

    @cute.jit
    def store_result(
        self,
        out: cute.Tensor,
        scales: cute.Tensor,
        y: cute.Tensor,
        row: Int32,
        num_rows: Int32,
        thread: Int32,
        j: cutlass.Constexpr,
    ):
        """One vector of a normalized row; all lanes come here."""
        config = self.config
        vector = j * config.threads + thread
        if cutlass.const_expr(config.token_format is None):
            if self.inside(row, num_rows, thread, j):
                self.store(out.iterator.toint() + self.place(row, vector), y)
        else:
            if cutlass.const_expr(config.activation is Activation.MXFP8):
                largest = mx.magnitude_of(y)
                amax = mx.block_amax(largest, dtype=self.dtype, lanes=config.lanes_per_block)
                code, factor = mx.scale_of(amax, rounding=config.rounding)
            values = mx.values_of(y)
            if cutlass.const_expr(config.token_format is TokenFormat.BF16_PERMUTED):
                if cutlass.const_expr(config.activation is Activation.MXFP8):
                    result = mx.quantized_bf16_of(values, code, factor)
                else:
                    result = mx.bf16_of(values)
                result = mx.permuted(result, thread)
                if self.inside(row, num_rows, thread, j):
                    place = self.place(row, mx.permuted_vector(vector))
                    pointer = pointer_to(cutlass.BFloat16, out.iterator.toint() + place, config.vector_bytes)
                    store_global(pointer, result)
            else:
                codes = mx.elements_of(values, factor)
                if self.inside(row, num_rows, thread, j):
                    address = out.iterator.toint() + Int64(row) * config.hidden_size + Int64(vector) * config.count
                    store_global(pointer_to(Uint8, address, config.count), codes)
                    if thread % config.lanes_per_block == 0:
                        scale_block = vector // config.lanes_per_block
                        if cutlass.const_expr(config.token_format is TokenFormat.MXFP8_FP32_SCALES):
                            scales[(Int64(scale_block), Int64(row))] = mx.scale_value(code)
                        else:
                            blocks = config.hidden_size // MXFP8_BLOCK
                            scales[mx.tiled_offset(row, scale_block, blocks=blocks)] = code.to(Uint8)

    @cute.jit
    def fill_tiles(self, scales: cute.Tensor, num_rows: Int32, thread: Int32, block: Int32, blocks: Int32):
        """Scales of the rows that fill up the last tile: 0."""
        in_row = cutlass.const_expr(self.config.hidden_size // MXFP8_BLOCK)
        row = num_rows + block
        while row < cute.ceil_div(num_rows, TILE_ROWS) * TILE_ROWS:
            at = thread
            while at < in_row:
                scales[mx.tiled_offset(row, at, blocks=in_row)] = Uint8(0)
                at += self.config.threads
            row += blocks

    # ---- where things are ----

    def most_rows(self) -> int:
        """Rows that are normalized together."""
        return self.together() if self.two_shot else self.config.rows

    def together(self) -> int:
        """Neighbouring rows of a group that are under way together: a divisor of how many there are."""
        return max(n for n in range(1, self.config.rows + 1) if self.owners % n == 0)

    def load_rows(self, address, rows, num_rows, thread):
        """The thread's vectors of rows: [row][j]. Past the end the last row is loaded, as in `AllReduce.copy_some`."""
        return [
            [
                self.load(address + self.place(cutlass.min(row, num_rows - 1), self.vector(thread, j)))
                for j in range(self.config.per_thread)
            ]
            for row in rows
        ]

    def load(self, address):
        return self.load_own(address)

    def store(self, address, value):
        self.store_own(address, value)

    def rounded(self, z):
        value = cute.make_rmem_tensor((self.config.count,), self.dtype)
        value.store(z.load().to(self.dtype))
        return value

    def place(self, row, vector):
        """Byte offset of a vector of a row."""
        return Int64(row) * self.row_bytes + self.bytes_of(vector)

    def vector(self, thread, j: int):
        """The thread's j-th vector of a row; past the end the last one."""
        index = j * self.config.threads + thread
        return index if self.even else cutlass.min(index, self.config.row_vectors - 1)

    def within(self, thread, j: int):
        return j * self.config.threads + thread < self.config.row_vectors

    def inside(self, row, num_rows, thread, j: int):
        """Whether there is such a vector."""
        return row < num_rows if self.even else (row < num_rows) & self.within(thread, j)


def build(config: AllReduceNormConfig):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`: takes the tensors of `AllReduceNorm.__call__`, eps,
    blocks and what :meth:`vllm_rose_plugin.kernels.all_reduce.launch.AllReduce.numbers` gives; codes as uint8."""
    dtype, align, size = DTYPES[config.dtype], config.vector_bytes, config.hidden_size
    rows = cute.sym_int64(symbol="T")

    def matrix(kind=dtype):
        return make_fake_tensor(kind, (rows, size), (size, 1), assumed_align=align)

    weight = make_fake_tensor(dtype, (size,), (1,), assumed_align=align)
    quantized = config.token_format in (TokenFormat.MXFP8_FP32_SCALES, TokenFormat.MXFP8_TCGEN05)
    permuted = config.token_format is TokenFormat.BF16_PERMUTED
    out = matrix(Uint8 if quantized else cutlass.BFloat16 if permuted else dtype)
    if config.token_format is TokenFormat.MXFP8_FP32_SCALES:
        columns = cute.sym_int64(divisibility=FP32_COLUMNS, symbol="S4")
        scales = make_fake_tensor(Float32, (size // MXFP8_BLOCK, columns), (columns, 1), assumed_align=16)
    else:
        scales = make_fake_tensor(Uint8, (cute.sym_int64(symbol="S"),), (1,), assumed_align=1)
    numbers = (Float32(0.0), Int32(1), Int32(0), *(Int64(0) for _ in range(9)))
    tensors = (matrix(), matrix(), weight, out, scales, matrix())
    return AllReduceNorm(config), (*tensors, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))
