"""From a warpgroup's accumulators to memory. They hold (2 tokens, 2 rows, tokens / 8) of a thread; see sm90_mainloop.

A matrix of 8 rows x 8 tokens is transposed between the registers of a warp (`movmatrix`), so that each thread writes
neighbouring rows of one token.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, TokenFormat
from vllm_rose_plugin.kernels.gemm.config import GemmConfig
from vllm_rose_plugin.kernels.gemm.sm90_mainloop import LoopConstant
from vllm_rose_plugin.kernels.mxfp8_quantize import block as mx
from vllm_rose_plugin.kernels.swiglu_quantize.kernel import swiglu

_BARRIER_OF_WARPGROUP = 1
"""Named barrier of the first consumer warpgroup; 0 is the block's."""


def barrier_of_warpgroup(warp) -> None:
    """All threads of one consumer warpgroup meet."""
    cute.arch.barrier(barrier_id=_BARRIER_OF_WARPGROUP + warp // 4, number_of_threads=128)


def barrier_of_consumers(row_groups: int) -> None:
    """All consumer threads meet; not beside :func:`barrier_of_pair`, whose first barrier it takes."""
    cute.arch.barrier(barrier_id=_BARRIER_OF_WARPGROUP + row_groups, number_of_threads=128 * row_groups)


def barrier_of_pair(warp, row_groups: int) -> None:
    """All threads of two neighbouring consumer warpgroups meet."""
    cute.arch.barrier(barrier_id=_BARRIER_OF_WARPGROUP + row_groups + warp // 8, number_of_threads=256)


def store_transposed(place, words: list) -> None:
    """One, two or four matrices of 8 x 8 elements of 16 bits to shared memory, transposed.

    Args:
        place: of 16 bytes; lanes 0 to 7 give those of the first matrix's columns, 8 to 15 the second's, and so on.
        words: a lane's two elements of each, as in :func:`transposed`.
    """
    registers = ", ".join(f"{{$r{i + 1}}}" for i in range(len(words)))
    cute.arch.inline_ptx(
        f"stmatrix.sync.aligned.m8n8.x{len(words)}.trans.shared.b16 [{{$r0}}], {{{registers}}};",
        read_only_args=[place, *words],
    )


def transposed(word):
    """8 x 8 elements of 16 bits: lane l had (l / 4, 2 (l % 4) and the next), gets the same of the transpose."""
    return cute.arch.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[word]
    )


def rounded(low, high, dtype: str):
    """Two Float32 as bf16 or fp16 in a word; beyond the range they become inf."""
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r1}}, {{$r0}};", write_only_types=[Uint32], read_only_args=[low, high]
    )


def element_pair(low, high):
    """E4M3 codes of two Float32, rounded to nearest even, saturated, in the lower bytes of both halves of a word."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 codes; .reg .b32 wide; cvt.rn.satfinite.e4m3x2.f32 codes, {$r1}, {$r0}; cvt.u32.u16 wide, codes; "
        "prmt.b32 {$w0}, wide, 0, 0x4140; }",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


def joined_bytes(word):
    """The lower bytes of both halves of a word."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 joined; prmt.b32 joined, {$r0}, 0, 0x4420; cvt.u16.u32 {$w0}, joined; }",
        write_only_types=[Uint16],
        read_only_args=[word],
    )


def quantized_bf16_pair(values, factors, scales):
    """Two Float32 with scales of their own, as ``mxfp8_quantize.block.quantized_bf16_of`` does it for one scale."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 codes, low, high; .reg .b32 halves; .reg .f32 even, odd; "
        "cvt.rn.satfinite.e4m3x2.f32 codes, {$r1}, {$r0}; cvt.rn.f16x2.e4m3x2 halves, codes; "
        "mov.b32 {low, high}, halves; cvt.f32.f16 even, low; cvt.f32.f16 odd, high; "
        "mul.f32 even, even, {$r2}; mul.f32 odd, odd, {$r3}; cvt.rn.bf16x2.f32 {$w0}, odd, even; }",
        write_only_types=[Uint32],
        read_only_args=[values[0] * factors[0], values[1] * factors[1], scales[0], scales[1]],
    )


def store(pointer, value) -> None:
    """One word of 16 or 32 bits."""
    cute.make_tensor(cute.recast_ptr(pointer, dtype=type(value)), cute.make_layout((1,)))[0] = value


def end_of(config: GemmConfig, first, *, rows: int):
    """The end of the weight, or of the part of it in which a tile begins.

    Args:
        first: what the tile begins with.
        rows: rows of the weight to one of what is counted.
    """
    if config.domains == 1:
        return config.n // rows
    size = config.part_n // rows
    return (first // size + 1) * size


class Plain(LoopConstant):
    """Rounds the products, with a bias, and brings them into rows of the output by way of shared memory."""

    def __init__(self, config: GemmConfig, out, bias, staged):
        self.config, self.out, self.bias = config, out, bias
        self.staged = staged  # (words of 64 rows, staged_tokens, row_groups) uint32, in shared memory

    @cute.jit
    def write(self, a: cute.Tensor, tile: tuple, warp: Int32):
        """Args: a: (2 tokens, rows, tokens / 8). tile: of the scheduler, with a first row in place of the row tile.
        warp: of the consumers.
        """
        group, first_row, first_token, num_tokens = tile
        config = self.config
        lane = cute.arch.lane_idx()
        pieces = cutlass.const_expr(cute.size(a, mode=[2]))
        held = cutlass.const_expr(cute.size(a, mode=[1]))
        added = [Float32(0.0) for _ in range(held)]
        if cutlass.const_expr(config.bias):
            for h in cutlass.range_constexpr(held):
                row = first_row + warp * 16 + h * 8 + lane // 4
                if row < config.n:
                    added[h] = self.bias[group * config.n + row]
        round_pieces = cutlass.const_expr(math.gcd(config.staged_tokens // 8, pieces))
        for start in cutlass.range_constexpr(0, pieces, round_pieces):
            if start * 8 < num_tokens:
                for j in cutlass.range_constexpr(start, start + round_pieces):
                    words = []
                    for h in cutlass.range_constexpr(held):
                        low, high = a[0, h, j], a[1, h, j]
                        if cutlass.const_expr(config.bias):
                            low, high = low + added[h], high + added[h]
                        words.append(rounded(low, high, config.out_dtype))
                    self.stage(words, j - start, warp)
                barrier_of_warpgroup(warp)
                self.copy_out(first_row, first_token + start * 8, num_tokens - start * 8, round_pieces, held, warp)
                barrier_of_warpgroup(warp)

    @cute.jit
    def stage(self, words: list, piece: cutlass.Constexpr[int], warp: Int32):
        """Eight tokens of a warp's 8 or 16 rows. A token's rows are in pieces of 16 bytes, swizzled."""
        lane = cute.arch.lane_idx()
        token = piece * 8 + lane % 8
        if cutlass.const_expr(len(words) == 2):
            column = (warp % 4 * 2 + lane // 8 % 2) ^ (token % 8)
        else:
            column = (warp % 4) ^ (token % 8)
        store_transposed(self.staged.iterator + self.staged.layout((column * 4, token, warp // 4)), words)

    @cute.jit
    def copy_out(
        self,
        first_row: Int32,
        first_token: Int32,
        num_tokens: Int32,
        pieces: cutlass.Constexpr[int],
        held: cutlass.Constexpr[int],
        warp: Int32,
    ):
        """What a warpgroup staged: a thread writes eight rows of a token at a time."""
        config = self.config
        thread = warp % 4 * 32 + cute.arch.lane_idx()
        columns = cutlass.const_expr(4 * held)  # of eight rows; with half of the rows, every other eight
        column = thread % columns
        row = first_row + warp // 4 * 64 + column * (16 // held)
        end_row = end_of(config, first_row, rows=1)
        for step in cutlass.range_constexpr(-(-pieces * 8 * columns // 128)):
            token = thread // columns + step * (128 // columns)
            inside = token < num_tokens and row < end_row  # N is a multiple of 8
            if cutlass.const_expr(pieces * 8 * columns < 128):
                inside = inside and token < pieces * 8
            if inside:
                at = self.staged.iterator + self.staged.layout(((column ^ (token % 8)) * 4, token, warp // 4))
                words = cute.make_tensor(at.align(16), cute.make_layout((4,))).load()
                target = self.out.iterator + (Int64(first_token + token) * config.out_pitch + row)
                target = cute.recast_ptr(target, dtype=Uint32)
                cute.make_tensor(target.align(16), cute.make_layout((4,))).store(words)


class Swiglu(LoopConstant):
    """A warp's 16 rows are gate and up of 8 intermediates, a warpgroup's 64 those of one block of 32."""

    def __init__(self, config: GemmConfig, out, out_scales, exchange, staged):
        self.config, self.out, self.out_scales = config, out, out_scales
        self.exchange = exchange  # (4 warps, token_tile, row_groups) uint32, in shared memory
        self.staged = staged  # (words of 64 intermediates, staged_tokens, row_groups / 2) uint32, in shared memory
        self.quantized = config.out_format is TokenFormat.MXFP8_FP32_SCALES or config.activation is Activation.MXFP8

    @cute.jit
    def write(self, a: cute.Tensor, tile: tuple, warp: Int32):
        """As :meth:`Plain.write`."""
        _, first_row, first_token, num_tokens = tile
        config = self.config
        pieces = cutlass.const_expr(config.token_tile // 8)
        block = first_row // 64 + warp // 4
        for j in cutlass.range_constexpr(pieces):  # the products take the gates' place
            for i in cutlass.range_constexpr(2):
                a[i, 0, j] = swiglu(a[i, 0, j], a[i, 1, j], limit=config.limit)
        if cutlass.const_expr(self.quantized):
            self.exchange_magnitudes(a, warp)
        for start in cutlass.range_constexpr(0, pieces, config.staged_tokens // 8):
            if start * 8 < num_tokens:
                words = []
                for j in cutlass.range_constexpr(start, start + config.staged_tokens // 8):
                    if cutlass.const_expr(config.paired):
                        words.append(self.bf16_of(a, j, block, warp))
                    else:
                        self.write_piece(a, j, block, warp, first_token, num_tokens)
                if cutlass.const_expr(config.paired):
                    self.write_pair(words, block // 2, warp, first_token + start * 8, num_tokens - start * 8)
        if cutlass.const_expr(self.quantized):
            barrier_of_warpgroup(warp)  # the next tile writes magnitudes again

    @cute.jit
    def exchange_magnitudes(self, a: cute.Tensor, warp: Int32):
        """Leaves the factor and the scale of every token's block in shared memory; see :meth:`scales_of`."""
        pieces = cutlass.const_expr(self.config.token_tile // 8)
        lane = cute.arch.lane_idx()
        values = []
        for j in cutlass.range_constexpr(pieces):
            for i in cutlass.range_constexpr(2):
                values.append(a[i, 0, j].bitcast(Uint32) & Uint32(0x7FFFFFFF))
        first = Int32(0)  # of the values that this lane keeps
        for step in cutlass.range_constexpr(3):
            distance = cutlass.const_expr(16 >> step)
            if cutlass.const_expr(len(values) % 2 == 0):  # each of two lanes keeps one half of the values
                half = cutlass.const_expr(len(values) // 2)
                upper = (lane & distance) != 0
                kept = []
                for v in cutlass.range_constexpr(half):
                    sent = Uint32(cutlass.select_(upper, values[v], values[v + half]))
                    mine = Uint32(cutlass.select_(upper, values[v + half], values[v]))
                    kept.append(cutlass.max(mine, cute.arch.shuffle_sync_bfly(sent, distance)))
                values = kept
                first += Int32(cutlass.select_(upper, Int32(half), Int32(0)))
            else:  # both keep all of them
                values = [cutlass.max(value, cute.arch.shuffle_sync_bfly(value, distance)) for value in values]
        for v in cutlass.range_constexpr(len(values)):
            value = first + v  # 2j + i
            token = value // 2 * 8 + lane % 4 * 2 + value % 2
            self.exchange[warp % 4, token, warp // 4] = values[v]
        barrier_of_warpgroup(warp)
        for step in cutlass.range_constexpr(-(-self.config.token_tile // 128)):
            token = warp % 4 * 32 + lane + step * 128
            if token < self.config.token_tile:
                of = self.exchange[None, token, warp // 4].load()
                amax = cutlass.max(cutlass.max(of[0], of[1]), cutlass.max(of[2], of[3]))
                code, factor = mx.scale_of(amax, rounding=self.config.rounding)
                self.exchange[0, token, warp // 4] = factor.bitcast(Uint32)
                self.exchange[1, token, warp // 4] = mx.scale_value(code).bitcast(Uint32)
        barrier_of_warpgroup(warp)

    def scales_of(self, j: int, warp) -> tuple[list, list]:
        """Scales, and factors as of ``mxfp8_quantize.block.scale_of``, of this lane's two tokens among eight."""
        first = 8 * j + cute.arch.lane_idx() % 4 * 2
        pairs = [self.exchange[None, first + i, warp // 4] for i in range(2)]
        return [pair[1].bitcast(Float32) for pair in pairs], [pair[0].bitcast(Float32) for pair in pairs]

    @cute.jit
    def bf16_of(self, a: cute.Tensor, j: cutlass.Constexpr[int], block: Int32, warp: Int32) -> Uint32:
        """A lane's two products among eight tokens, 0 where I has ended."""
        values = (a[0, 0, j], a[1, 0, j])
        if cutlass.const_expr(self.quantized):
            scales, factors = self.scales_of(j, warp)
            word = quantized_bf16_pair(values, factors, scales)
        else:
            word = rounded(values[0], values[1], "bfloat16")
        return Uint32(cutlass.select_(block < self.end_block(block, warp), word, Uint32(0)))

    def end_block(self, block: Int32, warp: Int32):
        """Past the last block of 32 intermediates of the weight, or of the tile's part of it."""
        return end_of(self.config, block - warp // 4, rows=2 * MXFP8_BLOCK)

    def end_pair(self, block: Int32, warp: Int32):
        """The same of blocks of 64."""
        if self.config.domains == 1:
            return -(-self.config.intermediate_size // 64)
        return end_of(self.config, block - warp // 8, rows=2 * 64)

    @cute.jit
    def write_pair(self, words: list, block: Int32, warp: Int32, first_token: Int32, num_tokens: Int32):
        """Two warpgroups bring 64 intermediates of some tokens into the k order of ``gemm/tokens.py``.

        Args:
            words: of eight tokens each.
            block: of 64 intermediates.
        """
        config = self.config
        lane = cute.arch.lane_idx()
        pair = warp // 8
        token = lane % (8 * len(words))
        column = (warp % 8) ^ (token % 8)  # pieces of 16 bytes, swizzled
        store_transposed(self.staged.iterator + self.staged.layout((column * 4, token, pair)), words)
        barrier_of_pair(warp, config.row_groups)
        # A thread gathers eight slots: 8 half + 16 j on, of k 4j + half and 2 more in each of four 16.
        thread = warp % 8 * 32 + lane
        token, slots = thread // 8, thread % 8
        j, half = slots // 2, slots % 2
        inside = token < num_tokens and block < self.end_pair(block, warp)
        if cutlass.const_expr(config.staged_tokens < 32):
            inside = inside and token < config.staged_tokens
        if inside:
            gathered = cute.make_rmem_tensor((4,), Uint32)
            for quarter in cutlass.range_constexpr(4):
                column = (2 * quarter + j // 2) ^ (token % 8)
                at = self.staged.iterator + self.staged.layout((column * 4 + j % 2 * 2, token, pair))
                found = cute.make_tensor(at.align(8), cute.make_layout((2,))).load()
                even = (found[0] & Uint32(0xFFFF)) | (found[1] << 16)
                odd = ((found[0] >> 16) & Uint32(0xFFFF)) | (found[1] & Uint32(0xFFFF0000))
                gathered[quarter] = Uint32(cutlass.select_(half == 0, even, odd))
            pitch = cutlass.const_expr(-(-config.out_pitch // 64) * 64)
            target = self.out.iterator + (Int64(first_token + token) * pitch + (block * 64 + slots * 8))
            target = cute.recast_ptr(target, dtype=Uint32)
            cute.make_tensor(target.align(16), cute.make_layout((4,))).store(gathered.load())
        barrier_of_pair(warp, config.row_groups)

    @cute.jit
    def write_piece(
        self,
        a: cute.Tensor,
        j: cutlass.Constexpr[int],
        block: Int32,
        warp: Int32,
        first_token: Int32,
        num_tokens: Int32,
    ):
        """Eight tokens of one warp."""
        config = self.config
        lane = cute.arch.lane_idx()
        q = lane % 4
        inside = block < self.end_block(block, warp)
        token = 8 * j + lane // 4  # after the transposition
        written = inside and token < num_tokens
        row = Int64(first_token + token)
        if cutlass.const_expr(config.out_format is TokenFormat.MXFP8_FP32_SCALES):
            scales, factors = self.scales_of(j, warp)
            word = transposed(element_pair(a[0, 0, j] * factors[0], a[1, 0, j] * factors[1]))
            if written:
                offset = row * config.out_pitch + (block * MXFP8_BLOCK + warp % 4 * 8 + q * 2)
                store(self.out.iterator + offset, joined_bytes(word))
            for i in cutlass.range_constexpr(2):
                token = 8 * j + 2 * q + i  # as the scales lie
                if inside and token < num_tokens and warp % 4 == j % 4 and lane // 4 == i:
                    self.out_scales[block, first_token + token] = scales[i]
        else:
            word = self.bf16_of(a, j, block, warp)
            self.write_permuted(transposed(word), block, warp, row, written)

    @cute.jit
    def write_permuted(self, word: Uint32, block: Int32, warp: Int32, row: Int64, written):
        """Two intermediates of a token, in the k order of ``gemm/tokens.py``.

        A lane holds k 2q and 2q + 1 of 8. Slots of k and k + 2 are neighbours, so pairs of lanes swap one of theirs.
        """
        config = self.config
        q = cute.arch.lane_idx() % 4
        other = cute.arch.shuffle_sync_bfly(word, 1)
        odd = q % 2 != 0
        even_word = (word & Uint32(0xFFFF)) | (other << 16)
        odd_word = ((other >> 16) & Uint32(0xFFFF)) | (word & Uint32(0xFFFF0000))
        value = Uint32(cutlass.select_(odd, odd_word, even_word))
        # slot_of(k) with k = 32 (block % 2) + 8 warp + 4 (q / 2) + 2 (0 or 1) + odd
        slot = 16 * (warp % 2 * 2 + q // 2) + 8 * (q % 2) + 2 * (block % 2 * 2 + warp % 4 // 2)
        pitch = cutlass.const_expr(-(-config.out_pitch // 64) * 64)
        if written:
            pointer = self.out.iterator + (row * pitch + (block // 2 * 64 + slot))
            store(pointer, value)
            if cutlass.const_expr(config.intermediate_size % 64 != 0):  # noqa: SIM102  the first at compile time
                if block == config.intermediate_size // MXFP8_BLOCK - 1:  # k past the end
                    store(pointer + 4, Uint32(0))
