"""The grouped GEMM for sm_90a: MXFP8 weights x MXFP8 or bf16 tokens, exact 1 x 32 scales.

Weights take the side of the matrix instruction that is always 64 rows, tokens the one that may be as small as 8. A
block is persistent: one producer warp brings stages of k through TMA, consumer warpgroups of 64 rows each multiply.
The producer also finds the tiles (scheduler.py) and writes their coordinates beside the first stage of each.

Programmatic dependent launch: the kernel behind this one in the stream may start once all blocks have waited for the
one in front, so whatever was written two launches back or earlier can be read before the wait. Where counts and
offsets are that old (``GemmConfig.early_counts``), a block's first weights are on their way before the wait.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float16, Float32, Int32, Uint8, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, TokenFormat
from vllm_rose_plugin.kernels.gemm.config import (
    MAX_DOMAINS,
    PRODUCER_REGISTERS,
    SCALE_BYTES,
    SCALE_K,
    Epilogue,
    GemmConfig,
    consumer_registers,
)
from vllm_rose_plugin.kernels.gemm.domain_queue import counter_words
from vllm_rose_plugin.kernels.gemm.parts_arguments import PartsArguments
from vllm_rose_plugin.kernels.gemm.sm90_domains import DomainProducer
from vllm_rose_plugin.kernels.gemm.sm90_epilogue import Plain, Swiglu
from vllm_rose_plugin.kernels.gemm.sm90_load import Producer
from vllm_rose_plugin.kernels.gemm.sm90_mainloop import W8A8, W8A16, Ring
from vllm_rose_plugin.kernels.gemm.sm90_split import Exchange
from vllm_rose_plugin.kernels.gemm.sm90_stream_k import HandOver, StreamKProducer

_DTYPES = {"bfloat16": BFloat16, "float16": Float16}


class Sm90Gemm:
    """The kernel for one config."""

    def __init__(self, config: GemmConfig):
        self.config = config
        self.producer = Producer(config)
        self.token_dtype = Float8E4M3FN if config.w8a8 else BFloat16
        self.widths = (config.token_tile, config.narrow_tokens) if config.narrow_tokens else (config.token_tile,)

    @cute.jit
    def __call__(
        self,
        weight_codes: cute.Tensor,  # (G, N, K) uint8
        weight_scales: cute.Tensor,  # (G * ceil(N/64), ceil(K/128) * 256) uint8
        token_codes: cute.Tensor,  # (S, K) uint8 or (S, ceil(K/64) * 64) bf16
        token_scales: cute.Tensor,  # (K/32, S4) float32; W8A16 doesn't read it
        expert_offsets: cute.Tensor,  # (G + 1) int32
        expert_counts: cute.Tensor,  # (G) int32
        bias: cute.Tensor,  # (G * N) float32
        out: cute.Tensor,  # (S, N), or what SWIGLU writes
        out_scales: cute.Tensor,  # (I/32, S4) float32
        grid: Int32,
        stream,
    ):
        operands = (weight_codes, weight_scales, token_codes, token_scales)
        self.start(operands, (expert_offsets, expert_counts), bias, (out, out_scales), (), grid, stream)

    def start(
        self, operands: tuple, runs: tuple, bias, outputs: tuple, workspace: tuple, grid, stream, further: tuple = ()
    ) -> None:
        """The launch, on the host.

        Args:
            further: (codes, scales) of further parts of the weight.
        """
        weight_codes, weight_scales, token_codes, token_scales = operands
        config = self.config
        rows, tokens, k_tile = config.row_tile, config.token_tile, config.k_tile
        weights = self.weight_view(weight_codes)
        further_weights = [(self.weight_view(codes), with_many_rows(scales)) for codes, scales in further]
        codes = cute.recast_tensor(token_codes, self.token_dtype)
        weight_scales = with_many_rows(weight_scales)
        if cutlass.const_expr(config.w8a8):
            token_scales = with_many_rows(token_scales)
        tiled_mmas = [self.tiled_mma(width) for width in self.widths]
        kinds = warpgroup.SmemLayoutAtomKind
        kind = kinds.K_SW128 if cutlass.const_expr(k_tile == 128) else kinds.K_SW64
        weight_layout = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(kind, Float8E4M3FN), (rows, k_tile, config.stages), order=(0, 1, 2)
        )
        if cutlass.const_expr(not config.w8a8):
            kind = kinds.K_SW128
        token_layout = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(kind, self.token_dtype), (tokens, k_tile, config.stages), order=(0, 1, 2)
        )
        groups = config.row_groups
        scale_layout = cute.make_layout(
            (groups, SCALE_BYTES, config.stages), stride=(SCALE_BYTES, 1, groups * SCALE_BYTES)
        )
        token_scale_layout = cute.make_layout(
            (4, config.scale_columns, config.stages), stride=(config.scale_columns, 1, config.scale_pitch)
        )

        load = cpasync.CopyBulkTensorTileG2SOp()
        shared = cpasync.CopyBulkTensorTileG2SMulticastOp() if cutlass.const_expr(self.producer.multicast > 1) else load
        first = (None, None, 0)
        loads: tuple = (
            cpasync.make_tiled_tma_atom(load, weights, cute.slice_(weight_layout, first), (rows, k_tile)),
            cpasync.make_tiled_tma_atom(load, weight_scales, cute.slice_(scale_layout, first), (groups, SCALE_BYTES)),
            cpasync.make_tiled_tma_atom(
                shared, codes, cute.slice_(token_layout, first), (tokens, k_tile), num_multicast=self.producer.multicast
            ),
        )
        if cutlass.const_expr(config.w8a8):
            loads += (
                cpasync.make_tiled_tma_atom(
                    load, token_scales, cute.slice_(token_scale_layout, first), (4, config.scale_columns)
                ),
            )
        for part, scales in further_weights:
            loads += (
                cpasync.make_tiled_tma_atom(load, part, cute.slice_(weight_layout, first), (rows, k_tile)),
                cpasync.make_tiled_tma_atom(load, scales, cute.slice_(scale_layout, first), (groups, SCALE_BYTES)),
            )

        stages = config.stages
        exchanged, staged = max(config.exchange_bytes // 4, 4), max(config.staged_bytes // 4, 4)
        sent_values = config.sent_bytes // 4 if cutlass.const_expr(config.split_k) else 4

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[cutlass.Int64, stages]
            empty: cute.struct.MemRange[cutlass.Int64, stages]
            tiles: cute.struct.Align[cute.struct.MemRange[Int32, config.schedule_words * stages], 16]
            table: cute.struct.MemRange[Int32, self.producer.schedule.words]
            sums: cute.struct.MemRange[cutlass.Int64, 2]
            sent: cute.struct.Align[cute.struct.MemRange[Float32, sent_values], 16]
            exchange: cute.struct.Align[cute.struct.MemRange[Uint32, exchanged], 16]
            staging: cute.struct.Align[cute.struct.MemRange[Uint32, staged], 128]
            weight_scales: cute.struct.Align[cute.struct.MemRange[Uint8, cute.cosize(scale_layout)], 128]
            token_scales: cute.struct.Align[
                cute.struct.MemRange[Float32, config.scale_pitch * stages if config.w8a8 else 4], 128
            ]
            weights: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(weight_layout)], 1024]
            tokens: cute.struct.Align[cute.struct.MemRange[self.token_dtype, cute.cosize(token_layout)], 1024]

        self.storage = Storage
        self.kernel(
            tuple(tiled_mmas),
            loads,
            (weight_layout, scale_layout, token_layout, token_scale_layout),
            *runs,
            bias,
            *outputs,
            workspace,
        ).launch(
            grid=(grid, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.cluster, 1, 1) if config.cluster > 1 else None,
            min_blocks_per_mp=config.blocks_per_sm,
            preferred_smem_carveout=100,  # several blocks per SM would make the compiler ask a driver otherwise
            stream=stream,
            use_pdl=True,
        )

    def tiled_mma(self, num_tokens: int) -> cute.TiledMma:
        """The matrix instructions of all consumers on so many tokens."""
        config = self.config
        return hopper.make_trivial_tiled_mma(
            self.token_dtype,
            self.token_dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (config.row_groups, 1, 1),
            tiler_mn=(64, num_tokens),
            a_source=warpgroup.OperandSource.SMEM if config.w8a8 else warpgroup.OperandSource.RMEM,
        )

    def weight_view(self, weight_codes: cute.Tensor) -> cute.Tensor:
        """(rows, K, G) in the order that a tile takes them: 8 gate and 8 up rows by turns before SWIGLU."""
        config = self.config
        n, k, groups = config.part_n, config.k, config.num_groups
        if config.epilogue is Epilogue.SWIGLU:
            half = n // 2
            shape: tuple = ((8, 2, half // 8), k, groups)
            stride: tuple = ((k, half * k, 8 * k), 1, n * k)
        else:
            shape, stride = (n, k, groups), (k, 1, n * k)
        pointer = cute.recast_ptr(weight_codes.iterator, dtype=Float8E4M3FN)
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))

    @cute.kernel
    def kernel(
        self,
        tiled_mmas: tuple,
        loads: tuple,
        layouts: tuple,
        expert_offsets: cute.Tensor,
        expert_counts: cute.Tensor,
        bias: cute.Tensor,
        out: cute.Tensor,
        out_scales: cute.Tensor,
        workspace: tuple,
    ):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32)
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        weight_layout, scale_layout, token_layout, token_scale_layout = layouts
        stages: tuple = (
            storage.weights.get_tensor(weight_layout.outer, swizzle=weight_layout.inner),
            storage.weight_scales.get_tensor(scale_layout),
            storage.tokens.get_tensor(token_layout.outer, swizzle=token_layout.inner),
        )
        if cutlass.const_expr(config.w8a8):
            stages += (storage.token_scales.get_tensor(token_scale_layout),)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        tiles = storage.tiles.get_tensor(cute.make_layout((config.schedule_words, config.stages)))

        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(config.stages):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, 4 * config.row_groups * self.producer.multicast)
                if cutlass.const_expr(config.split_k):
                    for i in cutlass.range_constexpr(2):
                        warps = 4 * config.row_groups * (config.cluster - 1)
                        cute.arch.mbarrier_init(storage.sums.data_ptr() + i, warps)
        cute.arch.mbarrier_init_fence()
        rank = Int32(0)
        if cutlass.const_expr(config.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
            rank = cute.arch.block_idx_in_cluster()
        else:
            cute.arch.sync_threads()

        consumers = cutlass.const_expr(4 * config.row_groups)
        registers = cutlass.const_expr(consumer_registers(config))
        if warp >= consumers:
            if cutlass.const_expr(registers):
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == consumers:
                table = storage.table.get_tensor(
                    cute.make_layout(
                        (3, self.producer.schedule.chunks * 32), stride=(self.producer.schedule.chunks * 32, 1)
                    )
                )
                self.producer.run(
                    loads, stages, tiles, full, empty, table, expert_counts, expert_offsets, rank, workspace
                )
        else:
            if cutlass.const_expr(registers):
                cute.arch.setmaxregister_increase(registers)
            ring = Ring(full, empty, config)
            main_loops = [
                self.main_loop(tiled_mma, width, ring, stages, storage, warp)
                for tiled_mma, width in zip(tiled_mmas, self.widths, strict=True)
            ]
            if cutlass.const_expr(config.epilogue is Epilogue.SWIGLU):
                magnitudes = storage.exchange.get_tensor(cute.make_layout((4, config.token_tile, config.row_groups)))
                staged = storage.staging.get_tensor(
                    cute.make_layout((32, config.staged_tokens, max(config.row_groups // 2, 1)))
                )
                epilogue: Plain | Swiglu = Swiglu(config, out, out_scales, magnitudes, staged)
            else:
                staged = storage.staging.get_tensor(cute.make_layout((32, config.staged_tokens, config.row_groups)))
                epilogue = Plain(config, out, bias, staged)
            exchange: Exchange | HandOver | None = None
            if cutlass.const_expr(config.split_k):
                exchange = self.exchange(storage)
            elif cutlass.const_expr(config.stream_k):
                partials, flags = workspace
                exchange = HandOver(config, partials, flags, cute.arch.thread_idx()[0])
            self.consume(ring, main_loops, exchange, epilogue, tiles, warp)
        if cutlass.const_expr(config.cluster > 1):
            # No block leaves while another may still send to it.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def exchange(self, storage) -> Exchange:
        """What split-K needs of shared memory."""
        config = self.config
        threads = 128 * config.row_groups
        values = config.sent_bytes // 4 // threads // (config.cluster - 1)
        buffer = storage.sent.get_tensor(
            cute.make_layout((threads, values, config.cluster - 1), stride=(1, threads, threads * values))
        )
        barriers = storage.sums.data_ptr()
        return Exchange(config, buffer, barriers, barriers + 1, cute.arch.thread_idx()[0])

    def main_loop(self, tiled_mma, num_tokens: int, ring: Ring, stages: tuple, storage, warp):
        """The main loop of one consumer warp, on the first num_tokens of a tile."""
        config = self.config
        thread = tiled_mma.get_slice(cute.make_layout(config.row_groups, stride=128)(warp // 4))
        row = warp * 16 + cute.arch.lane_idx() // 4
        rows = config.row_tile
        weight_words = cute.make_tensor(
            cute.recast_ptr(storage.weight_scales.data_ptr(), dtype=Uint32),
            cute.make_layout((rows, config.stages), stride=(1, rows)),
        )
        tokens = stages[2]
        if num_tokens < config.token_tile:
            tokens = cute.local_tile(tokens, (num_tokens, config.k_tile), (0, 0, None))
        tokens = tiled_mma.make_fragment_B(thread.partition_B(tokens))
        if config.w8a8:
            weights = tiled_mma.make_fragment_A(thread.partition_A(stages[0]))
            q = cute.arch.lane_idx() % 4
            token_scales = cute.make_tensor(
                storage.token_scales.data_ptr() + 2 * q,
                cute.make_layout(
                    (config.scale_columns, 4, config.stages), stride=(1, config.scale_columns, config.scale_pitch)
                ),
            )
            return W8A8(config, ring, tiled_mma, num_tokens, (weights, tokens), weight_words, token_scales, row)
        pitch = config.k_tile // 4
        weight_codes = cute.make_tensor(
            cute.recast_ptr(storage.weights.data_ptr(), dtype=Uint32),
            cute.make_layout((4, pitch // 4, rows, config.stages), stride=(1, 4, pitch, rows * pitch)),
        )
        return W8A16(config, ring, tiled_mma, num_tokens, tokens, weight_codes, weight_words, row)

    @cute.jit
    def consume(
        self,
        ring: cutlass.Constexpr,
        main_loops: cutlass.Constexpr,
        exchange: cutlass.Constexpr,
        epilogue: cutlass.Constexpr,
        tiles: cute.Tensor,
        warp: Int32,
    ):
        """A consumer warpgroup: its rows of one tile after another."""
        config = self.config
        acc = main_loops[0].accumulators()
        stage, phase, sums = Int32(0), Int32(0), Int32(0)
        more = Boolean(True)
        while more:
            ring.wait(stage, phase)
            tile = tiles[None, stage].load()
            more = tile[0] >= 0
            if more:
                acc.fill(0.0)
                passes = tile[4] if cutlass.const_expr(config.stream_k) else config.passes
                if cutlass.const_expr(config.narrow_tokens):
                    if tile[3] <= config.narrow_tokens:
                        narrow = main_loops[1].part_of(acc)
                        for _ in cutlass.range(passes, unroll=1):
                            stage, phase = main_loops[1].run(narrow, stage, phase, tile[2])
                    else:
                        for _ in cutlass.range(passes, unroll=1):
                            stage, phase = main_loops[0].run(acc, stage, phase, tile[2])
                else:
                    for _ in cutlass.range(passes, unroll=1):
                        stage, phase = main_loops[0].run(acc, stage, phase, tile[2])
                row_tile = tile[1]
                if cutlass.const_expr(self.producer.multicast > 1):
                    row_tile = row_tile * config.cluster + cute.arch.block_idx_in_cluster()
                first_row, first_token, num_tokens = self.first_row(row_tile), tile[2], tile[3]
                whole = Boolean(True)
                if cutlass.const_expr(config.stream_k):
                    whole = exchange.whole(acc, tile[5])
                if cutlass.const_expr(config.split_k):
                    held = exchange.sum(acc, sums)
                    sums ^= 1
                    rank = cute.arch.block_idx_in_cluster()
                    skipped = exchange.first_token(rank)
                    first_row += exchange.first_row(rank)
                    first_token, num_tokens = first_token + skipped, num_tokens - skipped
                else:
                    held = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, config.token_tile // 8)))
                if whole:
                    epilogue.write(held, (tile[0], first_row, first_token, num_tokens), warp)

    def first_row(self, row_tile: Int32) -> Int32:
        """Of a row tile, counted through all parts of the weight, the first of which begins a tile in each."""
        config = self.config
        if config.domains == 1:
            return row_tile * config.row_tile
        part = row_tile // config.part_row_tiles
        return part * config.part_n + (row_tile - part * config.part_row_tiles) * config.row_tile


class StreamKGemm(Sm90Gemm):
    """The kernel for a config with stream_k, which takes two tensors more."""

    def __init__(self, config: GemmConfig):
        super().__init__(config)
        self.producer = StreamKProducer(config)

    @cute.jit
    def __call__(
        self,
        weight_codes: cute.Tensor,
        weight_scales: cute.Tensor,
        token_codes: cute.Tensor,
        token_scales: cute.Tensor,
        expert_offsets: cute.Tensor,
        expert_counts: cute.Tensor,
        bias: cute.Tensor,
        out: cute.Tensor,
        out_scales: cute.Tensor,
        partials: cute.Tensor,  # (blocks, row_tile * token_tile) float32
        flags: cute.Tensor,  # (blocks) int32, zero between launches
        grid: Int32,
        stream,
    ):
        operands = (weight_codes, weight_scales, token_codes, token_scales)
        workspace = (partials, flags)
        self.start(operands, (expert_offsets, expert_counts), bias, (out, out_scales), workspace, grid, stream)


class DomainGemm(PartsArguments, Sm90Gemm):
    """The kernel for a config with several domains, which takes as many weights, a table of SMs, and counters."""

    def __init__(self, config: GemmConfig):
        super().__init__(config)
        self.producer = DomainProducer(config)


def with_many_rows(tensor: cute.Tensor) -> cute.Tensor:
    """The tensor; a single row would otherwise leave its tensor map without rows, and a box of several wouldn't fit."""
    pitch = tensor.stride[0]
    if cutlass.const_expr(tensor.shape[0] == 1):
        pitch = tensor.shape[1]
    layout = cute.make_layout((Int32(tensor.shape[0]), tensor.shape[1]), stride=(pitch, 1))
    return cute.make_tensor(tensor.iterator, layout)


def build(config: GemmConfig):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`.

    Takes, in this order, all contiguous and 16-byte aligned unless said otherwise:
        weight_codes: uint8 ``[G, N, K]``, as in the checkpoint.
        weight_scales: uint8 ``[G * ceil(N/64), ceil(K/128) * 256]``, packed by ``weights.py``. With several domains,
            codes and scales of ``MAX_DOMAINS`` parts of N / domains rows by turns; any such part where there are fewer.
        token_codes: uint8 ``[S, K]`` (W8A8), or bf16 ``[S, ceil(K/64) * 64]`` permuted (W8A16).
        token_scales: float32 ``[K/32, S4]``, S4 a multiple of 4; W8A16 doesn't read it, and takes any 2-D tensor.
        expert_offsets, expert_counts: int32 ``[G + 1]``, ``[G]``.
        bias: float32 ``[G * N]``; any 1-D tensor without ``config.bias``.
        out: PLAIN ``[S, N]`` of ``config.out_dtype``; SWIGLU uint8 ``[S, I]``, or bf16 ``[S, ceil(I/64) * 64]``. With
            ``config.out_columns``, so many columns of longer rows.
        out_scales: SWIGLU to MXFP8 float32 ``[I/32, S4]``; else any 2-D tensor.
        partials, flags: with ``config.stream_k`` only: float32 ``[grid, config.handed_over]``, and int32 ``[grid]``,
            zero before the launch and again after it.
        sm_domains, counters: with several domains only: int32 ``[SMs]``, and int32 ``[counter_words(domains)]``, zero
            before the launch and again after it.
        grid: ``config.grid(sm_count)``.
    """
    n, k, groups = config.n, config.k, config.num_groups
    rows = cute.sym_int32(symbol="S")

    def scales(blocks):
        return make_fake_tensor(
            Float32, (blocks, pitch := cute.sym_int32(divisibility=4)), (pitch, 1), assumed_align=16
        )

    def contiguous(dtype, *shape, align=16):
        strides = [1]
        for size in shape[:0:-1]:
            strides.insert(0, strides[0] * size)
        return make_fake_tensor(dtype, shape, tuple(strides), assumed_align=align)

    def rows_of(dtype, columns, pitch):
        return make_fake_tensor(dtype, (rows, columns), (pitch, 1), assumed_align=16)

    padded_k = -(-k // 64) * 64
    if config.epilogue is Epilogue.SWIGLU:
        size = config.intermediate_size
        mxfp8 = config.out_format is TokenFormat.MXFP8_FP32_SCALES
        if mxfp8:
            out = rows_of(Uint8, size, config.out_pitch)
        else:
            out = rows_of(BFloat16, -(-size // 64) * 64, -(-config.out_pitch // 64) * 64)
        out_scales = scales(size // MXFP8_BLOCK if mxfp8 else cute.sym_int32())
    else:
        out = rows_of(_DTYPES[config.out_dtype], n, config.out_pitch)
        out_scales = scales(cute.sym_int32())
    blocks = cute.sym_int32(symbol="blocks")
    workspace: tuple = ()
    if config.stream_k:
        workspace = (contiguous(Float32, blocks, config.handed_over), contiguous(Int32, blocks, align=4))
    elif config.domains > 1:
        sms = cute.sym_int32(symbol="SMs")
        workspace = (contiguous(Int32, sms, align=4), contiguous(Int32, counter_words(config.domains), align=4))
    weight = (
        contiguous(Uint8, groups, config.part_n, k),
        contiguous(Uint8, groups * -(-config.part_n // 64), -(-k // SCALE_K) * SCALE_BYTES),
    )
    arguments = (
        *weight * (MAX_DOMAINS if config.domains > 1 else 1),
        contiguous(Uint8, rows, k) if config.w8a8 else contiguous(BFloat16, rows, padded_k),
        scales(k // MXFP8_BLOCK if config.w8a8 else cute.sym_int32()),
        contiguous(Int32, groups + 1, align=4),
        contiguous(Int32, groups, align=4),
        contiguous(Float32, groups * n if config.bias else cute.sym_int32(), align=4),
        out,
        out_scales,
        *workspace,
        Int32(132),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    kernel = StreamKGemm if config.stream_k else DomainGemm if config.domains > 1 else Sm90Gemm
    return kernel(config), arguments
