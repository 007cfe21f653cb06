"""The dispatch on the device: each token is read and quantized once, and written to the rows that its slots name.

In one launch with the routing, block 0 routes and lets the others know through the workspace's flag; they have read and
quantized their tokens by then. The flag is the number of blocks that still have to see it, so it is back at zero when
the launch ends, however many blocks there were: a replayed graph finds it as the first run did. Block 0 waits for
nobody, and all blocks fit on a part of the device, so no order in which blocks start can stop it.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, TokenFormat
from vllm_rose_plugin.kernels.moe_dispatch.config import DispatchConfig
from vllm_rose_plugin.kernels.moe_dispatch.padding import fill_up
from vllm_rose_plugin.kernels.moe_route import block as routing
from vllm_rose_plugin.kernels.moe_route.config import FLAG_WORD, RouteConfig
from vllm_rose_plugin.kernels.moe_route.kernel import fake_ids, fake_workspace
from vllm_rose_plugin.kernels.mxfp8_quantize import block as mx
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import FP32_COLUMNS, ROW_GROUP, TILE_ROWS
from vllm_rose_plugin.kernels.ptx.memory_order import load_acquire, red_add_release
from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next, pdl_wait
from vllm_rose_plugin.kernels.ptx.wide import load_global, store_global

TYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32, "mxfp8": Uint8}


class Dispatch:
    """The kernel for one config."""

    def __init__(self, config: DispatchConfig):
        self.config = config
        self.route: Any = config.route

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (T, H); uint8 codes where they arrive quantized
        x_scales,  # (T, H/32) uint8, or None
        topk_weights,  # (T * top_k,) float32, or None
        ids,  # (P,), or None where another launch has routed
        expert_map,  # (E_global,) int32, or None
        workspace,  # (W,) int32, or None
        expert_counts: cute.Tensor,  # (E,) int32
        expert_offsets: cute.Tensor,  # (E + 1,) int32
        slots: cute.Tensor,  # (P,) int32
        scale_rows,  # (P,) int32, or None
        y: cute.Tensor,  # (S, row bytes) uint8
        scales: cute.Tensor,  # flat uint8, or (H/32, columns) float32; not touched where there are none
        stream,
    ):
        config = self.config
        num_tokens = Int32(x.shape[0])
        copy_blocks = Int32((Int64(num_tokens) * config.row_vectors + (config.threads - 1)) // config.threads)
        grid = copy_blocks
        if cutlass.const_expr(config.route is not None):
            self.storage = routing.shared_memory(self.route)
            grid = grid + 1
        if cutlass.const_expr(config.pads):
            grid = grid + cutlass.min(num_tokens * config.top_k, config.num_experts)
        self.kernel(
            x,
            x_scales,
            topk_weights,
            ids,
            expert_map,
            workspace,
            expert_counts,
            expert_offsets,
            slots,
            scale_rows,
            y,
            scales,
            copy_blocks,
        ).launch(grid=(grid, 1, 1), block=(config.threads, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        x_scales,
        topk_weights,
        ids,
        expert_map,
        workspace,
        expert_counts: cute.Tensor,
        expert_offsets: cute.Tensor,
        slots: cute.Tensor,
        scale_rows,
        y: cute.Tensor,
        scales: cute.Tensor,
        copy_blocks: Int32,
    ):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        pdl_wait()
        # Only now, so that whoever starts early may count on everything before us having ended.
        pdl_launch_next()
        flag = None
        if cutlass.const_expr(config.route is not None):
            flag = workspace.iterator + FLAG_WORD
            storage = cutlass.memory.SmemAllocator().allocate(self.storage)
            block = block - 1
            if block < 0:
                routing.route_alone(
                    storage,
                    ids,
                    expert_map,
                    expert_counts,
                    expert_offsets,
                    slots,
                    scale_rows,
                    thread,
                    config.route,
                )
                cute.arch.sync_threads()
                if thread == 0:
                    red_add_release(flag, Int32(cute.arch.grid_dim()[0]) - 1, scope="gpu")
        if block >= 0 and block < copy_blocks:
            copy_vectors(
                x, x_scales, topk_weights, slots, scale_rows, y, scales, flag, block * config.threads + thread, config
            )
        if cutlass.const_expr(config.pads):
            number = block - copy_blocks
            if number >= 0:
                if cutlass.const_expr(config.route is not None):
                    wait_for_slots(flag)
                fill_up(expert_counts, expert_offsets, y, scales, number, thread, config)


@cute.jit
def copy_vectors(
    x: cute.Tensor,
    x_scales,
    topk_weights,
    slots: cute.Tensor,
    scale_rows,
    y: cute.Tensor,
    scales: cute.Tensor,
    flag,
    index: Int32,
    config: cutlass.Constexpr[DispatchConfig],
):
    """Reads the vector of that number, counted through the rows of all tokens, and writes it to its token's rows."""
    num_tokens = Int32(x.shape[0])
    token, vector = Int32(Uint32(index) // config.row_vectors), Int32(Uint32(index) % config.row_vectors)
    inside = token < num_tokens
    pair = cutlass.min(token, num_tokens - 1) * config.top_k

    fragment, code = load_vector(x, x_scales, token, vector, inside, config)
    weights = [None] * config.top_k
    if cutlass.const_expr(config.weighted):
        weights = [topk_weights[pair + k] for k in range(config.top_k)]
    rows: Any = None
    tiled_rows: Any = None
    if cutlass.const_expr(config.route is None):
        rows, tiled_rows = load_slots(slots, scale_rows, pair, config)
    result, scale = None, None
    if cutlass.const_expr(not config.weighted):
        result, scale = quantize(fragment, code, None, index, config)
    if cutlass.const_expr(config.route is not None):
        wait_for_slots(flag)
        rows, tiled_rows = load_slots(slots, scale_rows, pair, config)

    for k in cutlass.range_constexpr(config.top_k):
        if cutlass.const_expr(config.weighted):
            result, scale = quantize(fragment, code, weights[k], index, config)
        row = rows[k]
        here = inside and row >= 0
        tiled_row = tiled_rows[k]
        store_vector(result, scale, y, scales, row, tiled_row, vector, here, k, config)


@cute.jit
def load_vector(
    x: cute.Tensor,
    x_scales,
    token: Int32,
    vector: Int32,
    inside,
    config: cutlass.Constexpr[DispatchConfig],
):
    """(elements of x in registers, the scale code where they arrive quantized), zeros where not `inside`."""
    count = cutlass.const_expr(config.vector)
    # Rows and blocks that fill up a tile have scale 0; permuted elements past the end are 0.
    fragment = cute.make_rmem_tensor((count,), x.element_type)
    fragment.fill(0)
    code = Int32(0)
    if inside and vector < config.vectors:
        source = x.iterator + (Int64(token) * Int64(x.stride[0]) + Int64(vector * count))
        pointer = cute.make_ptr(x.element_type, source.toint(), cute.AddressSpace.gmem, assumed_align=config.load_bytes)
        fragment.store(load_global(pointer, count, max_bits=config.load_bytes * 8).load())
        if cutlass.const_expr(config.dtype == "mxfp8"):
            blocks = cutlass.const_expr(config.hidden_size // MXFP8_BLOCK)
            code = Int32(x_scales[Int64(token) * blocks + vector // config.lanes_per_block])
    return fragment, code


@cute.jit
def store_vector(
    result,
    scale,
    y: cute.Tensor,
    scales: cute.Tensor,
    row: Int32,
    tiled_row: Int32,
    vector: Int32,
    here,
    k: cutlass.Constexpr[int],
    config: cutlass.Constexpr[DispatchConfig],
):
    """Writes what :func:`quantize` gave to a row, and its scale, where `here`.

    Args:
        tiled_row: row of the tiled scales.
        k: which of the token's rows it is.
    """
    written = vector
    if cutlass.const_expr(config.token_format is TokenFormat.BF16_PERMUTED):
        written = mx.permuted_vector(vector)
    turn = Uint32(vector) % 8
    if here and (vector < config.vectors or config.token_format is TokenFormat.BF16_PERMUTED):
        target = y.iterator + (Int64(row) * config.row_bytes + Int64(written) * 16)
        words = cute.recast_tensor(result, Uint32)
        store_global(cute.make_ptr(Uint32, target.toint(), cute.AddressSpace.gmem, assumed_align=16), words)
    # All lanes of a block know its scale, all lanes of a tile's row the four of it: they take turns.
    if cutlass.const_expr(config.token_format is TokenFormat.MXFP8_FP32_SCALES):
        if here and turn % config.lanes_per_block == k % config.lanes_per_block:
            scales[Int64(vector // config.lanes_per_block), Int64(row)] = mx.scale_value(scale)
    elif cutlass.const_expr(config.tiled):
        tiled = Uint32(tiled_row)  # unsigned: quotients and remainders are a shift and a mask then
        if here and turn == k % 8:
            inner = tiled % ROW_GROUP * 4 + tiled % TILE_ROWS // ROW_GROUP
            tile = Int64(tiled // TILE_ROWS) * config.k_tiles + Int64(vector // 8)
            word = cute.make_ptr(
                Uint32,
                scales.iterator.toint() + (tile * 128 + Int64(inner)) * 4,
                cute.AddressSpace.gmem,
                assumed_align=4,
            )
            word.store(scale)


def load_slots(slots: cute.Tensor, scale_rows, pair, config: DispatchConfig) -> tuple:
    """(rows of a token, its rows in the tiled scales), top_k Int32 each.

    Plain loads: where another block of this launch has written them, `wait_for_slots` comes before.
    """

    def load(tensor) -> list:
        words = config.slot_words
        found = []
        for first in range(0, config.top_k, words):
            pointer = cute.make_ptr(
                Int32, (tensor.iterator + (pair + first)).toint(), cute.AddressSpace.gmem, assumed_align=4 * words
            )
            piece = load_global(pointer, words, max_bits=32 * words)
            found += [piece[i] for i in range(words)]
        return found

    rows = load(slots)
    return rows, load(scale_rows) if config.scale_rows else rows


@cute.jit
def wait_for_slots(flag: cute.Pointer):
    """Waits until block 0 has routed, and takes one off the number of those that wait. All threads of a block."""
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        waiting = load_acquire(flag, Int32, scope="gpu")
        while waiting == 0:
            waiting = load_acquire(flag, Int32, scope="gpu")
        cute.arch.red(flag, Int32(-1), op="add", dtype=Int32, sem="relaxed", scope="gpu")
    cute.arch.sync_threads()


def quantize(fragment, code, weight, lane, config: DispatchConfig) -> tuple:
    """(register tensor of 16 bytes to be written, its scale), all lanes taking part.

    The scale is a code, or where scales are tiled a word of four: those of the 128 elements that eight lanes hold.

    Args:
        fragment: elements of x, or codes.
        code: their scale, where they are codes.
        weight: Float32 to multiply them by, or None.
        lane: whose last bits are the lane.
    """
    if config.dtype == "mxfp8" and config.token_format is TokenFormat.BF16_PERMUTED:
        return mx.permuted(mx.dequantized_bf16_of(fragment, code), lane), None
    if config.dtype == "mxfp8":
        return fragment, _with_neighbours(code, lane) if config.tiled else code
    if weight is not None:
        fragment = _weighted(fragment, weight, config)
    values = mx.values_of(fragment)
    if config.activation is Activation.BF16:
        return mx.permuted(mx.bf16_of(values), lane), None
    largest = mx.magnitude_of(fragment)
    amax = mx.block_amax(largest, dtype=fragment.element_type, lanes=config.lanes_per_block)
    code, factor = mx.scale_of(amax, rounding=config.rounding)
    if config.token_format is TokenFormat.BF16_PERMUTED:
        return mx.permuted(mx.quantized_bf16_of(values, code, factor), lane), None
    return mx.elements_of(values, factor), _with_neighbours(code, lane) if config.tiled else code


def _weighted(fragment, weight, config: DispatchConfig):
    """Products in float32; rounded to x's dtype where nothing quantizes them."""
    products = [value * weight for value in mx.values_of(fragment)]
    result = cute.make_rmem_tensor((config.vector,), Float32)
    for i in range(config.vector):
        result[i] = products[i]
    if config.activation is Activation.BF16 and fragment.element_type is not Float32:
        rounded = cute.make_rmem_tensor((config.vector,), fragment.element_type)
        rounded.store(result.load().to(fragment.element_type))
        return rounded
    return result


def _with_neighbours(code, lane):
    """The scales of four blocks that eight lanes hold, as a word in each of them."""
    word = Uint32(code) << Uint32(lane % 8 // 2 * 8)
    for distance in (2, 4):
        word = word | cute.arch.shuffle_sync_bfly(word, distance)
    return word


def build(config: DispatchConfig):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`: the arguments of `Dispatch.__call__`, T >= 1."""
    size = config.hidden_size
    tokens, rows = cute.sym_int64(symbol="T"), cute.sym_int64(symbol="S")
    dtype = TYPES[config.dtype]
    stride = cute.sym_int64(divisibility=max(1, config.load_bytes * 8 // dtype.width), symbol="ldx")

    def flat(dtype, symbol, align):
        return make_fake_tensor(dtype, (cute.sym_int64(symbol=symbol),), (1,), assumed_align=align)

    # Everything that routing reads or writes looks the same, whichever launch does it.
    route = config.route or RouteConfig(
        num_experts=config.num_experts,
        alignment=config.alignment,
        id_dtype="int32",
        has_map=False,
        scale_rows=config.scale_rows,
        items=1,
        threads=config.threads,
    )
    ids, expert_map, counts, offsets, slots, scale_rows = fake_ids(route)
    if config.token_format is TokenFormat.MXFP8_FP32_SCALES:
        columns = cute.sym_int64(divisibility=FP32_COLUMNS, symbol="S4")
        scales = make_fake_tensor(Float32, (size // MXFP8_BLOCK, columns), (columns, 1), assumed_align=16)
    else:
        scales = flat(Uint8, "B", 16)
    return Dispatch(config), (
        make_fake_tensor(dtype, (tokens, size), (stride, 1), assumed_align=config.load_bytes),
        flat(Uint8, "N", 1) if config.dtype == "mxfp8" else None,
        flat(Float32, "W", 4) if config.weighted else None,
        ids if config.route else None,
        expert_map if config.route else None,
        fake_workspace() if config.route else None,
        counts,
        offsets,
        slots,
        scale_rows,
        make_fake_tensor(Uint8, (rows, config.row_bytes), (config.row_bytes, 1), assumed_align=32),
        scales,
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
