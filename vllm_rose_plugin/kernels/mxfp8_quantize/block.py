"""Device functions of MXFP8 quantization: the scale of a block, its elements, and who writes which scale.

The same maths as ``reference.py``, on bits: nothing here flushes a subnormal, and no exp2 or log2 is involved.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32

from vllm_rose_plugin.kernels.contracts import Rounding, ScaleLayout
from vllm_rose_plugin.kernels.mxfp8_quantize.config import UnitConfig
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import ROW_GROUP, TILE_BLOCKS, TILE_ROWS

_WARP = 32
_INF = 0x7F800000
_NAN = 0x7FC00000
_ABOVE_448 = 0x1FFFFF
"""Added to the bits of an amax, it carries into the exponent where the mantissa is above that of 448."""


@cute.jit
def unit_of(
    thread: Int32, block: Int32, u: cutlass.Constexpr[int], config: cutlass.Constexpr[UnitConfig]
) -> tuple[Int32, Int32]:
    """(row, vector in the row) of this thread's `u`-th vector. Past the end, the row is not below the padded rows."""
    if cutlass.const_expr(config.layout is ScaleLayout.ROW_MAJOR):
        warp = block * (config.threads // _WARP) + thread // _WARP
        index = Uint32(warp * (_WARP * config.unroll) + u * _WARP + thread % _WARP)
        return Int32(index // config.row_vectors), Int32(index % config.row_vectors)
    # `unroll` rows that are ROW_GROUP apart in one tile
    index = Uint32(block * config.threads + thread)
    slot, vector = Int32(index // config.row_vectors), Int32(index % config.row_vectors)
    group = slot // ROW_GROUP
    return (group * config.unroll + u) * ROW_GROUP + slot % ROW_GROUP, vector


@cute.jit
def num_blocks_of_grid(num_rows: Int32, config: cutlass.Constexpr[UnitConfig]) -> Int32:
    """Thread blocks that cover num_rows rows, or those that the tiles of their scales hold."""
    rows = num_rows
    if cutlass.const_expr(config.layout is ScaleLayout.TCGEN05_128X4):
        rows = cute.ceil_div(num_rows, TILE_ROWS) * TILE_ROWS
    # 64 bits for the sum that rounds up
    vectors = Int64(rows) * config.row_vectors
    per_block = config.threads * config.unroll
    return Int32((vectors + (per_block - 1)) // per_block)


def wait_for_all(fragments: list, num_rows) -> None:
    """Makes the first fragment depend on the loads of all, without changing it.

    Else the compiler starts the last loads when their turn to be used comes, which saves registers, and they wait for
    memory one after another. It can't know that num_rows is never negative.
    """
    zero = Uint32(num_rows >> 31)
    first, *others = (cute.recast_tensor(fragment, Uint32) for fragment in fragments)
    if others:
        mixed = others[0][0]
        for other in others[1:]:
            mixed = mixed ^ other[0]
        for i in range(cute.size(first)):
            first[i] = first[i] ^ (mixed & zero)


def magnitude_of(fragment):
    """Bits of the largest magnitude among a thread's elements, NaN above inf above numbers.

    Args:
        fragment: register tensor of bf16, fp16 (an even number) or fp32.

    Returns:
        Uint32. fp32: its bits. 16-bit types: two maxima, of the even and of the odd elements.
    """
    words = cute.recast_tensor(fragment, Uint32)
    if fragment.element_type.width == 16:
        mask = Uint32(0x7FFF7FFF)
        largest = words[0] & mask
        for i in range(1, cute.size(words)):
            largest = _larger(largest, words[i] & mask, narrow=True)
        return largest
    # As fp32, whose maximum takes magnitudes without an instruction more. Without .ftz it keeps subnormals.
    largest = words[0] & Uint32(0x7FFFFFFF)
    for i in range(1, cute.size(words)):
        largest = cute.arch.inline_ptx(
            "{ .reg .f32 magnitude; abs.f32 magnitude, {$r1}; max.NaN.f32 {$w0}, {$r0}, magnitude; }",
            write_only_types=[Uint32],
            read_only_args=[largest, words[i]],
        )
    return largest


def values_of(fragment) -> list:
    """A thread's elements as Float32, in order. Exact, subnormals too."""
    if fragment.element_type is not cutlass.BFloat16:
        values = cute.make_rmem_tensor(fragment.layout, Float32)
        values.store(fragment.load().to(Float32))
        return [values[i] for i in range(cute.size(values))]
    words = cute.recast_tensor(fragment, Uint32)  # one instruction for each: bf16 is the upper half of fp32
    values = []
    for i in range(cute.size(words)):
        values += [(words[i] << 16).bitcast(Float32), (words[i] & Uint32(0xFFFF0000)).bitcast(Float32)]
    return values


def block_amax(largest, *, dtype, lanes: int):
    """Bits, as fp32, of the largest magnitude in a block whose elements lie in `lanes` neighbouring lanes.

    Args:
        largest: of :func:`magnitude_of`; all 32 lanes take part.
        dtype: what the magnitudes are of.
    """
    narrow = dtype.width == 16
    offset = lanes // 2
    while offset:
        largest = _larger(largest, cute.arch.shuffle_sync_bfly(largest, offset), narrow=narrow)
        offset //= 2
    if not narrow:
        return largest
    if dtype is cutlass.BFloat16:
        return _larger(largest << 16, largest & Uint32(0xFFFF0000), narrow=False)
    return cute.arch.inline_ptx(
        "{ .reg .b16 even, odd; mov.b32 {even, odd}, {$r0}; max.u16 even, even, odd; cvt.f32.f16 {$w0}, even; }",
        write_only_types=[Float32],
        read_only_args=[largest],
    ).bitcast(Uint32)


def _larger(a, b, *, narrow: bool):
    """Integer maximum of magnitudes, of both halves where they are 16 bits wide."""
    instruction = "max.u16x2" if narrow else "max.u32"
    return cute.arch.inline_ptx(
        f"{instruction} {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Uint32], read_only_args=[a, b]
    )


def scale_of(amax, *, rounding: Rounding):
    """The E8M0 code of a block, and what its elements are multiplied by before they become E4M3.

    Args:
        amax: of :func:`block_amax`.

    Returns:
        (code: Int32, factor: Float32 = 2**(127 - code)). 255 and NaN where amax is NaN or inf. The code of a finite
        amax is at most 247, so that the factor is a normal number always.
    """
    above = _ABOVE_448 if rounding is Rounding.RCEIL else 0
    exponent = Int32((amax + Uint32(above)) >> 23)
    code = cutlass.max(exponent - 8, 0)
    bad = amax >= Uint32(_INF)
    factor = Uint32(cutlass.select_(bad, Uint32(_NAN), Uint32((254 - code) << 23)))
    return Int32(cutlass.select_(bad, Int32(255), code)), factor.bitcast(Float32)


def elements_of(values: list, factor):
    """E4M3 codes of values times factor, rounded to nearest even, saturated, NaN as 0x7F.

    Args:
        values: Float32 numbers, a multiple of 4 of them.

    Returns:
        Register tensor of Uint8.
    """
    codes = cute.make_rmem_tensor((len(values),), Uint8)
    words = cute.recast_tensor(codes, Uint32)  # this way round: a single word has stride 0, which its bytes inherit
    for i in range(len(values) // 4):
        scaled = [value * factor for value in values[4 * i : 4 * i + 4]]
        words[i] = cute.arch.inline_ptx(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
            "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
            write_only_types=[Uint32],
            read_only_args=scaled,
        )
    return codes


@cute.jit
def store_scales(
    scales: cute.Tensor,  # flat uint8
    codes,  # one Int32 for each of the thread's vectors
    thread: Int32,
    block: Int32,
    num_rows: Int32,
    config: cutlass.Constexpr[UnitConfig],
):
    """Writes the scales of a warp's vectors. All lanes that share a block know its scale: each writes another one."""
    lanes = cutlass.const_expr(config.lanes_per_block)
    turn = thread % lanes
    row, vector = unit_of(thread, block, 0, config)
    code = codes[0]
    for u in cutlass.range_constexpr(1, config.unroll):
        mine = turn == u
        other_row, other_vector = unit_of(thread, block, u, config)
        code = Int32(cutlass.select_(mine, codes[u], code))
        row = Int32(cutlass.select_(mine, other_row, row))
        vector = Int32(cutlass.select_(mine, other_vector, vector))
    scale_block = vector // lanes
    if cutlass.const_expr(config.layout is ScaleLayout.ROW_MAJOR):
        blocks = cutlass.const_expr(config.row_vectors // lanes)
        offset = Int64(row) * blocks + scale_block
        rows = num_rows
    else:
        tiles = cutlass.const_expr(config.row_vectors // lanes // TILE_BLOCKS)
        tile = Int64(row // TILE_ROWS) * tiles + scale_block // TILE_BLOCKS
        inside = row % ROW_GROUP * 16 + row % TILE_ROWS // ROW_GROUP * TILE_BLOCKS + scale_block % TILE_BLOCKS
        offset = tile * (TILE_ROWS * TILE_BLOCKS) + inside
        rows = cute.ceil_div(num_rows, TILE_ROWS) * TILE_ROWS
    if turn < config.unroll and row < rows:
        scales[offset] = code.to(Uint8)
