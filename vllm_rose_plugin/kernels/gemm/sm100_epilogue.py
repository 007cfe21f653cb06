"""The four warps that take finished tiles out of tensor memory: rounded with a bias, or through SwiGLU to MXFP8.

Warp w reads lanes 32w to 32w + 31 and no others. A lane is a weight row, so a thread holds one column of the result for
a chunk of tokens. The chunk is turned round in shared memory, from where 16-byte stores go out, a token's columns side
by side. Two such buffers take turns, so one barrier per chunk is enough.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.nvgpu import tcgen05

from vllm_rose_plugin.kernels.gemm.config import Epilogue
from vllm_rose_plugin.kernels.gemm.config_sm100 import EPILOGUE_THREADS, ROWS, SCALE_ROWS, SCALE_TILE_BYTES, Sm100Config
from vllm_rose_plugin.kernels.gemm.sm100_mma import Barriers, fence_after, fence_before
from vllm_rose_plugin.kernels.gemm.sm100_ring import LAST, next_place, part_of, read, ticket_of
from vllm_rose_plugin.kernels.gemm.sm100_schedule import WARP, Tile, find_tile, make_schedule
from vllm_rose_plugin.kernels.mxfp8_quantize import block as mx
from vllm_rose_plugin.kernels.ptx.pdl import pdl_wait
from vllm_rose_plugin.kernels.ptx.wide import store_global
from vllm_rose_plugin.kernels.swiglu_quantize.kernel import swiglu

_VECTOR = 16
"""Bytes of a store."""
_BARRIER = 1
_LANE_STRIDE = 1 << 16
"""Tensor memory addresses hold the lane above the column."""


@cute.jit
def store_tiles(
    staging: cute.Pointer,  # two buffers
    partials: cute.Pointer,  # float32 (split - 1, token tile / 4, 128, 4)
    tmem: cute.Pointer,
    barriers: Barriers,
    offsets: cute.Tensor,
    counts: cute.Tensor,
    bias: cute.Tensor,
    out: cute.Tensor,
    out_scales: cute.Tensor,
    thread: Int32,
    first: Int32,
    step: Int32,
    rank: Int32,
    ring: tuple,
    config: cutlass.Constexpr[Sm100Config],
):
    """Goes through tiles first, first + step, …, or those of the ring; `rank` is this block's place in its cluster."""
    pdl_wait()
    schedule = make_schedule(counts, cute.arch.lane_idx(), config)
    at = (Int32(0), Int32(0), Int32(0), Int32(0))
    memory = (staging, partials, tmem, offsets, counts, bias, out, out_scales)
    if cutlass.const_expr(config.domains > 1):
        place, turn = Int32(0), Int32(0)
        word = read(ring, place, turn)
        while word != LAST:
            tile = find_tile(schedule, ticket_of(word), config)
            at = store_tile(memory, barriers, tile, part_of(word), thread, rank, at, config)
            place, turn = next_place(place, turn, config)
            word = read(ring, place, turn)
    else:
        for index in cutlass.range(first, schedule.tiles, step, unroll=1):
            tile = find_tile(schedule, index, config)
            at = store_tile(memory, barriers, tile, Int32(0), thread, rank, at, config)


@cute.jit
def store_tile(
    memory: tuple,
    barriers: Barriers,
    tile: Tile,
    part: Int32,
    thread: Int32,
    rank: Int32,
    at: tuple,
    config: cutlass.Constexpr[Sm100Config],
) -> tuple:
    """Takes one tile out of tensor memory; gives `at` after it.

    Args:
        memory: as :func:`store_tiles` takes it.
        part: of the weight; the tile's rows are counted in it.
        at: accumulator, its phase, buffer of staging, and parity of the exchange of sums.
    """
    staging, partials, tmem, offsets, counts, bias, out, out_scales = memory
    accumulator, phase, buffer, turn = at
    row_tile = tile.row_tile * config.row_blocks
    if cutlass.const_expr(config.pair):
        row_tile = row_tile + rank
    tokens = counts[tile.group] - tile.first  # of the group, from this tile on
    if cutlass.const_expr(config.domains > 1):
        if cutlass.const_expr(config.part_row_blocks % config.row_blocks > 0):  # noqa: SIM102  at compile time
            if row_tile >= config.part_row_blocks:
                tokens = Int32(0)  # these rows are another part's
        row_tile = part * config.part_row_blocks + row_tile
    column = row_tile * ROWS
    out_row = offsets[tile.group] + tile.first
    added = None
    if cutlass.const_expr(config.bias):
        added = Float32(0)
        if column + thread < config.columns:
            added = bias[tile.group * config.columns + column + thread]
    cute.arch.mbarrier_wait(barriers.done + accumulator, phase)
    fence_after()
    if cutlass.const_expr(config.split > 1):
        expect_partials(barriers, tokens, thread, rank, turn, config)
    results = tmem + accumulator * (config.halves * config.token_tile)
    for i in cutlass.range_constexpr(config.token_tile // config.chunk):
        start = cutlass.const_expr(i * config.chunk)
        if start < tokens:
            place = staging + buffer * config.staging_bytes
            values = take(results + start, thread, config)
            if cutlass.const_expr(config.epilogue is Epilogue.SWIGLU):
                others = take(results + config.token_tile + start, thread, config)
                cute.arch.fence_view_async_tmem_load()
                stage_quantized(values, others, place, thread, config)
                cute.arch.barrier(barrier_id=_BARRIER, number_of_threads=EPILOGUE_THREADS)
                store_codes(
                    out, Int64(out_row + start) * config.out_pitch, place, thread, tokens - start, column, config
                )
                store_scales(
                    out_scales, place, thread, tokens - start, tile.scale_tile, tile.first + start, row_tile, config
                )
            else:
                cute.arch.fence_view_async_tmem_load()
                if cutlass.const_expr(config.split > 1):
                    exchange(values, partials, barriers, thread, rank, turn, start, config)
                if rank == 0 or cutlass.const_expr(config.pair):
                    stage_rounded(values, added, place, thread, out.element_type)
                    cute.arch.barrier(barrier_id=_BARRIER, number_of_threads=EPILOGUE_THREADS)
                    store_rounded(
                        out,
                        Int64(out_row + start) * config.out_pitch,
                        place,
                        thread,
                        tokens - start,
                        column,
                        config,
                    )
            buffer = buffer ^ 1
    fence_before()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        if cutlass.const_expr(config.pair):
            cute.arch.mbarrier_arrive(barriers.drained + accumulator, 0)
        else:
            cute.arch.mbarrier_arrive(barriers.drained + accumulator)
    if cutlass.const_expr(config.split > 1):
        give_back_partials(barriers, rank, config)
        turn = turn ^ 1
    accumulator += 1
    if accumulator == config.accumulators:
        accumulator = Int32(0)
        phase = phase ^ 1
    return accumulator, phase, buffer, turn


def take(columns, thread, config: Sm100Config):
    """This thread's lane of `chunk` columns. Not there before ``fence_view_async_tmem_load``."""
    chunk = config.chunk
    source = cute.make_tensor(columns, cute.make_layout((ROWS, chunk), stride=(_LANE_STRIDE, 1)))
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(chunk)), Float32)
    copy = tcgen05.make_tmem_copy(atom, source)
    part = copy.get_slice(thread)
    lane = part.partition_S(source)
    values = cute.make_rmem_tensor(part.partition_D(cute.make_identity_tensor((ROWS, chunk))).shape, Float32)
    cute.copy(copy, lane, values)
    return cute.make_tensor(values.iterator, cute.make_layout((chunk,)))


@cute.jit
def expect_partials(barriers: Barriers, tokens, thread, rank, turn, config: cutlass.Constexpr[Sm100Config]):
    """Before sums are exchanged: says how many bytes the first block gets, or waits until it has read the last ones."""
    if rank == 0:
        if thread == 0:
            chunks = cute.ceil_div(cutlass.min(tokens, config.token_tile), config.chunk)
            size = cutlass.const_expr((config.split - 1) * config.chunk * ROWS * 4)
            cute.arch.mbarrier_arrive_and_expect_tx(barriers.partial, chunks * size)
    else:
        cute.arch.mbarrier_wait(barriers.taken, turn ^ 1)


@cute.jit
def exchange(
    values,
    partials: cute.Pointer,
    barriers: Barriers,
    thread,
    rank,
    turn,
    start: cutlass.Constexpr[int],
    config: cutlass.Constexpr[Sm100Config],
):
    """Adds a chunk's sums of all blocks, in the order of the blocks, to those of the first, whose memory they go to."""
    quads = cutlass.const_expr(config.token_tile // 4)
    first = cutlass.const_expr(start // 4)
    places = cute.make_tensor(
        partials, cute.make_layout((4, ROWS, quads, config.split - 1), stride=(1, 4, 4 * ROWS, 4 * ROWS * quads))
    )
    if rank == 0:
        cute.arch.mbarrier_wait(barriers.partial, turn)
        for other in cutlass.range_constexpr(config.split - 1):
            for i in cutlass.range_constexpr(config.chunk // 4):
                held = cute.make_rmem_tensor((4,), Float32)
                place = places[None, thread, first + i, other]
                cute.autovec_copy(cute.make_tensor(place.iterator.align(16), place.layout), held)
                for j in cutlass.range_constexpr(4):
                    values[4 * i + j] = values[4 * i + j] + held[j]
    else:
        for i in cutlass.range_constexpr(config.chunk // 4):
            words = tuple(values[4 * i + j].bitcast(Int32) for j in range(4))
            place = places[None, thread, first + i, rank - 1].iterator.align(16)
            cute.arch.store_async_dsmem(place, words, barriers.partial, 0)


@cute.jit
def give_back_partials(barriers: Barriers, rank, config: cutlass.Constexpr[Sm100Config]):
    """One warp of the first block has read what it needs."""
    if rank == 0:
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            for other in cutlass.range_constexpr(1, config.split):
                cute.arch.inline_ptx(
                    "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{$r0}];",
                    read_only_args=[cute.arch.map_dsmem_ptr(barriers.taken, other)],
                )


def stage_rounded(values, added, place, thread, dtype) -> None:
    """Column `thread` of (chunk, 128) in `dtype`."""
    count = cute.size(values)
    rounded = cute.make_rmem_tensor((count,), dtype)
    sums = values.load() if added is None else values.load() + added
    rounded.store(sums.to(dtype))
    target = cute.make_tensor(cute.recast_ptr(place, dtype=dtype) + thread, cute.make_layout((count,), stride=(ROWS,)))
    for token in range(count):
        target[token] = rounded[token]


@cute.jit
def store_rounded(out, base, place, thread, tokens, column, config: cutlass.Constexpr[Sm100Config]):
    """Stores the rows of a chunk that are tokens, as far as the result has columns."""
    each = cutlass.const_expr(_VECTOR // 2)
    _store_rows(cute.recast_ptr(place, dtype=out.element_type), out, base, thread, tokens, column, each, config)


@cute.jit
def store_codes(out, base, place, thread, tokens, column, config: cutlass.Constexpr[Sm100Config]):
    """Likewise, of MXFP8 codes."""
    _store_rows(place, out, base, thread, tokens, column, _VECTOR, config)


@cute.jit
def _store_rows(source, out, base, thread, tokens, column, each: cutlass.Constexpr[int], config: cutlass.Constexpr):
    vectors = cutlass.const_expr(ROWS // each)  # of a token
    for i in cutlass.range_constexpr(cute.ceil_div(config.chunk * vectors, EPILOGUE_THREADS)):
        number = i * EPILOGUE_THREADS + thread
        token, vector = number // vectors, number % vectors
        if token < cutlass.min(tokens, config.chunk) and column + vector * each < config.columns:
            held = cute.make_rmem_tensor((each,), out.element_type)
            place = cute.make_tensor((source + token * ROWS + vector * each).align(_VECTOR), cute.make_layout((each,)))
            cute.autovec_copy(place, held)
            target = out.iterator + (base + token * config.out_pitch + column + vector * each)
            store_global(target.align(_VECTOR), held)


def stage_quantized(gates, ups, place, thread, config: Sm100Config) -> None:
    """Column `thread` of (chunk, 128) codes, behind them (chunk, 4) scales, one from each warp."""
    count = cute.size(gates)
    lane, warp = thread % WARP, thread // WARP
    target = cute.make_tensor(place + thread, cute.make_layout((count,), stride=(ROWS,)))
    mine = Int32(0)
    scaled = []
    for token in range(count):
        product = swiglu(gates[token], ups[token], limit=config.limit)
        magnitude = product.bitcast(Uint32) & Uint32(0x7FFFFFFF)
        code, factor = mx.scale_of(cute.arch.warp_redux_sync(magnitude, "umax"), rounding=config.rounding)
        mine = Int32(cutlass.select_(lane == token, code, mine))
        scaled.append(product * factor)
    codes = mx.elements_of(scaled, Float32(1.0))
    for token in range(count):
        target[token] = codes[token]
    scales = cute.make_tensor(place + count * ROWS, cute.make_layout((count, ROWS // WARP), stride=(ROWS // WARP, 1)))
    _store_byte(scales, lane, warp, mine)


@cute.jit
def _store_byte(scales, lane, warp, code):
    if lane < scales.shape[0]:
        scales[lane, warp] = code.to(Uint8)


@cute.jit
def store_scales(out_scales, place, thread, tokens, scale_tile, row, row_tile, config: cutlass.Constexpr[Sm100Config]):
    """Four scales of a token are one word of TCGEN05_128X4: the tile's 128 columns are one k tile of the next GEMM.

    Args:
        row: the chunk's first token, counted in the group.
    """
    if thread < cutlass.min(tokens, config.chunk) and row_tile < config.scale_row_tiles:
        words = cute.make_tensor(
            cute.recast_ptr((place + config.chunk * ROWS).align(4), dtype=Uint32), cute.make_layout((config.chunk,))
        )
        offset = scale_word_offset(scale_tile, row + thread, row_tile, config.out_scale_tiles)
        target = cute.recast_ptr((out_scales.iterator + offset).align(4), dtype=Uint32)
        cute.make_tensor(target, cute.make_layout((1,)))[0] = words[thread]


def scale_word_offset(scale_tile, row, k_tile, k_tiles: int):
    """Byte in TCGEN05_128X4 where the scales of four blocks begin, which is 4-byte aligned.

    Args:
        scale_tile: where the group's scale rows begin, in tiles of 128.
        row: token, counted in the group.
        k_tile, k_tiles: of 128 columns: which, and how many there are.
    """
    tile = Int64(scale_tile + row // SCALE_ROWS) * k_tiles + k_tile
    return tile * SCALE_TILE_BYTES + row % 32 * 16 + row % SCALE_ROWS // 32 * 4
