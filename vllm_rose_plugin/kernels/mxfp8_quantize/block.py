"""Device functions of MXFP8 quantization: the scale of a block, its elements, and who writes which scale.

The same maths as ``reference.py``, on bits: nothing here flushes a subnormal, and no exp2 or log2 is involved.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.runtime import make_fake_tensor

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, Rounding, ScaleLayout
from vllm_rose_plugin.kernels.mxfp8_quantize.config import PERMUTED_VECTOR, UnitConfig
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import (
    FP32_COLUMNS,
    PERMUTED_K,
    ROW_GROUP,
    TILE_BLOCKS,
    TILE_ROWS,
    permuted_size,
)

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
    # `unroll` rows: ROW_GROUP apart in one tile, or one after another
    index = Uint32(block * config.threads + thread)
    slot, vector = Int32(index // config.row_vectors), Int32(index % config.row_vectors)
    if cutlass.const_expr(config.layout is ScaleLayout.FP32_K_MAJOR):
        return slot * config.unroll + u, vector
    group = slot // ROW_GROUP
    return (group * config.unroll + u) * ROW_GROUP + slot % ROW_GROUP, vector


@cute.jit
def num_blocks_of_grid(num_rows: Int32, config: cutlass.Constexpr[UnitConfig]) -> Int32:
    """Thread blocks that cover num_rows rows, or those that the tiles of their scales hold."""
    rows = num_rows
    if cutlass.const_expr(config.layout is ScaleLayout.TCGEN05_128X4):
        rows = cute.ceil_div(num_rows, TILE_ROWS) * TILE_ROWS
    elif cutlass.const_expr(config.layout is ScaleLayout.FP32_K_MAJOR):
        rows = cute.ceil_div(num_rows, config.unroll) * config.unroll
    # 64 bits for the sum that rounds up
    vectors = Int64(rows) * config.row_vectors
    per_block = config.threads * config.unroll
    return Int32((vectors + (per_block - 1)) // per_block)


def wait_for_all(fragments: list, num_rows, *, load_bytes: int) -> None:
    """Makes the first fragment depend on all loads of all fragments, without changing it.

    Else the compiler starts the last loads when their turn to be used comes, which saves registers, and they wait for
    memory one after another. It can't know that num_rows is never negative.
    """
    zero = Uint32(num_rows >> 31)
    words = [cute.recast_tensor(fragment, Uint32) for fragment in fragments]
    step = max(load_bytes, 16) // 4  # of narrower loads there are too many
    first, *others = ((tensor, i) for tensor in words for i in range(0, cute.size(tensor), step))
    if others:
        mixed = others[0][0][others[0][1]]
        for tensor, i in others[1:]:
            mixed = mixed ^ tensor[i]
        first = first[0]
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


def scale_value(code):
    """2**(code - 127) as Float32, NaN for 255; code 0 gives a subnormal. The inverse of the factor in `scale_of`."""
    bits = Uint32(cutlass.select_(code == 0, Uint32(1 << 22), Uint32(code << 23)))
    return Uint32(cutlass.select_(code == 255, Uint32(_NAN), bits)).bitcast(Float32)


def bf16_of(values: list):
    """Float32 values rounded to nearest even.

    Returns:
        Register tensor of BFloat16.
    """
    result = cute.make_rmem_tensor((len(values),), cutlass.BFloat16)
    words = cute.recast_tensor(result, Uint32)
    for i in range(len(values) // 2):
        words[i] = cute.arch.inline_ptx(
            "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
            write_only_types=[Uint32],
            read_only_args=[values[2 * i], values[2 * i + 1]],
        )
    return result


def quantized_bf16_of(values: list, code, factor):
    """What values are once they went through E4M3, in bf16: exact, but for subnormals and for 2**128, which is inf.

    Args:
        values: Float32 numbers, an even number of them.
        code, factor: of :func:`scale_of`.

    Returns:
        Register tensor of BFloat16.
    """
    scale = scale_value(code)
    result = cute.make_rmem_tensor((len(values),), cutlass.BFloat16)
    words = cute.recast_tensor(result, Uint32)
    for i in range(len(values) // 2):
        words[i] = cute.arch.inline_ptx(
            "{ .reg .b16 codes, low, high; .reg .b32 halves; .reg .f32 even, odd; "
            "cvt.rn.satfinite.e4m3x2.f32 codes, {$r1}, {$r0}; cvt.rn.f16x2.e4m3x2 halves, codes; "
            "mov.b32 {low, high}, halves; cvt.f32.f16 even, low; cvt.f32.f16 odd, high; "
            "mul.f32 even, even, {$r2}; mul.f32 odd, odd, {$r2}; cvt.rn.bf16x2.f32 {$w0}, odd, even; }",
            write_only_types=[Uint32],
            read_only_args=[values[2 * i] * factor, values[2 * i + 1] * factor, scale],
        )
    return result


def dequantized_bf16_of(codes, code):
    """What E4M3 codes stand for, in bf16: exact, but for subnormals and for 2**128, which is inf.

    Args:
        codes: register tensor of Uint8, a multiple of 4 of them.
        code: their scale.

    Returns:
        Register tensor of BFloat16.
    """
    scale = scale_value(code)
    result = cute.make_rmem_tensor((cute.size(codes),), cutlass.BFloat16)
    words, fours = cute.recast_tensor(result, Uint32), cute.recast_tensor(codes, Uint32)
    for i in range(cute.size(codes) // 2):
        words[i] = cute.arch.inline_ptx(
            "{ .reg .b16 low, high; .reg .b32 halves; .reg .f32 even, odd; mov.b32 {low, high}, {$r0}; "
            f"cvt.rn.f16x2.e4m3x2 halves, {'high' if i % 2 else 'low'}; "
            "mov.b32 {low, high}, halves; cvt.f32.f16 even, low; cvt.f32.f16 odd, high; "
            "mul.f32 even, even, {$r1}; mul.f32 odd, odd, {$r1}; cvt.rn.bf16x2.f32 {$w0}, odd, even; }",
            write_only_types=[Uint32],
            read_only_args=[fours[i // 2], scale],
        )
    return result


def permuted(elements, thread):
    """The eight bf16 that this lane writes, out of what eight lanes hold: k in the order of ``gemm/tokens.py``.

    Element e of lane l is k = 8l + e of 64, so lane q of ``source_of`` is lanes 2q and 2q + 1 here. Words of two
    elements are formed first; what is left is a 4 x 4 transposition of words among lanes that are two apart.

    Args:
        elements: register tensor of eight BFloat16; all 32 lanes take part.
        thread: thread index; its last bits are the lane.

    Returns:
        Register tensor of eight BFloat16, for :func:`permuted_vector`.
    """
    assert PERMUTED_VECTOR * 8 == PERMUTED_K
    pairs = cute.recast_tensor(elements, Uint32)
    result = cute.make_rmem_tensor((PERMUTED_VECTOR,), cutlass.BFloat16)
    words = cute.recast_tensor(result, Uint32)
    for step in range(2):
        first, second = pairs[2 * step], pairs[2 * step + 1]
        words[2 * step] = (first & Uint32(0xFFFF)) | (second << 16)
        words[2 * step + 1] = (first >> 16) | (second & Uint32(0xFFFF0000))
    for distance, swapped in ((2, ((0, 1), (2, 3))), (4, ((0, 2), (1, 3)))):
        upper = (thread & distance) != 0
        for low, high in swapped:
            sent = Uint32(cutlass.select_(upper, words[low], words[high]))
            came = cute.arch.shuffle_sync_bfly(sent, distance)
            words[low] = Uint32(cutlass.select_(upper, came, words[low]))
            words[high] = Uint32(cutlass.select_(upper, words[high], came))
    return result


def permuted_vector(vector):
    """Which vector of the row the lane that loaded `vector` writes."""
    return vector // 8 * 8 + vector % 2 * 4 + vector % 8 // 2


def tiled_offset(row, scale_block, *, blocks: int):
    """Where the scale of a row's block lies in `TCGEN05_128X4`; `blocks` is a multiple of TILE_BLOCKS."""
    tile = Int64(row // TILE_ROWS) * (blocks // TILE_BLOCKS) + scale_block // TILE_BLOCKS
    inside = row % ROW_GROUP * 16 + row % TILE_ROWS // ROW_GROUP * TILE_BLOCKS + scale_block % TILE_BLOCKS
    return tile * (TILE_ROWS * TILE_BLOCKS) + inside


@cute.jit
def store_scales(
    scales: cute.Tensor,  # flat uint8, or (K/32, columns) float32
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
    elif cutlass.const_expr(config.layout is ScaleLayout.FP32_K_MAJOR):
        offset = (Int64(scale_block), Int64(row))
        rows = num_rows
    else:
        offset = tiled_offset(row, scale_block, blocks=config.row_vectors // lanes)
        rows = cute.ceil_div(num_rows, TILE_ROWS) * TILE_ROWS
    if turn < config.unroll and row < rows:
        if cutlass.const_expr(config.layout is ScaleLayout.FP32_K_MAJOR):
            scales[offset] = scale_value(code)
        else:
            scales[offset] = code.to(Uint8)


def fake_result(config: UnitConfig, rows, *, plain_dtype=None, plain_align: int = 16) -> tuple:
    """The two tensors that a kernel writes: codes or elements, and scales. Without scales, the second isn't touched.

    Args:
        rows: T, symbolic.
        plain_dtype, plain_align: of a result that is neither quantized nor permuted.
    """
    size, dtype, align = config.hidden_size, Uint8, MXFP8_BLOCK
    if config.permuted:
        size, dtype = permuted_size(size), cutlass.BFloat16
    elif config.activation is Activation.BF16:
        dtype, align = plain_dtype, plain_align
    y = make_fake_tensor(dtype, (rows, size), (size, 1), assumed_align=align)
    if config.layout is ScaleLayout.FP32_K_MAJOR:
        columns = cute.sym_int64(divisibility=FP32_COLUMNS, symbol="S4")
        return y, make_fake_tensor(Float32, (size // MXFP8_BLOCK, columns), (columns, 1), assumed_align=16)
    return y, make_fake_tensor(Uint8, (cute.sym_int64(symbol="S"),), (1,), assumed_align=1)
