"""The two main loops of the sm_90 GEMM: a few stages of k, from shared memory into the accumulators of a warpgroup.

No matrix instruction stays under way over a loop's back edge: the compiler would serialize them all.

A thread holds rows ``row`` and ``row + 8`` of its warp's 16, and tokens 2q and 2q + 1 of every 8, q its place among
four lanes. Accumulators are (2 tokens, 2 rows, tokens / 8).
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK
from vllm_rose_plugin.kernels.gemm.config import SCALE_ALIGNMENT, GemmConfig

_SMALLEST = 1 << 22
"""Bits of 2**-127."""
_E4M3_SHIFT = 120
"""An E4M3 code moved to where bf16 has its exponent is 2**-120 times its value: the biases differ by that."""
_LARGEST = 134
"""The largest scale code that makes up for the shift in one multiplication: 2**127."""
_LARGEST_FACTOR = 254


def scale_of_byte(word, byte: int):
    """2**(code - 127) of one E8M0 code in a word, as Float32; NaN for 255. 0 gives a subnormal."""
    shift = 23 - 8 * byte
    moved = word << shift if shift >= 0 else word >> -shift
    bits = cutlass.max(Int32(moved & Uint32(0x7F800000)), Int32(_SMALLEST))
    value = Uint32(bits).bitcast(Float32)
    # inf, which 255 has become, times 0 is NaN; for any other it adds 0.
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, 0f00000000, {$r0};", write_only_types=[Float32], read_only_args=[value]
    )


def mul_bf16x2(a, b):
    """Two products of bf16, rounded, subnormals kept."""
    return cute.arch.inline_ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def widened(word):
    """Bytes 1 and 3 of a word of E4M3 codes as two bf16, 2**-120 times their value.

    NaN codes become 2**-120 * 480: where a block has one, its packed scale is NaN (see ``weights.py``).
    """
    return (word & Uint32(0x80008000)) | ((word & Uint32(0x7F007F00)) >> 4)


class LoopConstant:
    """An object that a loop on the device may use: nothing in it changes from turn to turn."""

    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list) -> "LoopConstant":
        return self


class Ring(LoopConstant):
    """The stages as a warpgroup sees them."""

    def __init__(self, full, empty, config: GemmConfig):
        self.full, self.empty, self.config = full, empty, config

    def wait(self, stage, phase) -> None:
        """Until the stage's bytes have come."""
        cute.arch.mbarrier_wait(self.full + stage, phase)

    @cute.jit
    def next(self, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """The stage after this one, and its phase."""
        stage += 1
        if stage == self.config.stages:
            stage, phase = Int32(0), phase ^ 1
        return stage, phase

    @cute.jit
    def release(self, stage):
        """Every warp: this stage may be overwritten, in every block that its tokens went to."""
        cute.arch.sync_warp()
        if cutlass.const_expr(self.config.cluster > 1 and not self.config.split_k):
            lane = cute.arch.lane_idx()
            if lane < self.config.cluster:
                cute.arch.mbarrier_arrive(self.empty + stage, peer_cta_rank_in_cluster=lane)
        else:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(self.empty + stage)


class MainLoop(LoopConstant):
    """What both have in common."""

    config: GemmConfig
    tiled_mma: cute.TiledMma
    num_tokens: int
    """Of a tile, as it is multiplied: token_tile, or narrow_tokens."""

    def accumulators(self) -> cute.Tensor:
        """New registers for the sums of one warpgroup."""
        return cute.make_rmem_tensor(self.shape(), Float32)

    def part_of(self, acc: cute.Tensor) -> cute.Tensor:
        """The first sums, where a wider loop holds more."""
        return cute.make_tensor(acc.iterator, cute.make_layout(self.shape()))

    def shape(self):
        """Of the sums of one warpgroup."""
        return self.tiled_mma.partition_shape_C((self.config.row_tile, self.num_tokens))


class W8A8(MainLoop):
    """FP8 matrix instructions, a fresh accumulator for each block of 32, then times both scales in fp32."""

    def __init__(
        self, config: GemmConfig, ring: Ring, tiled_mma, num_tokens, fragments, weight_words, token_scales, row
    ):
        self.config, self.ring, self.tiled_mma, self.num_tokens = config, ring, tiled_mma, num_tokens
        self.weights, self.tokens = fragments  # smem descriptors, (…, k-blocks, stages)
        self.weight_words = weight_words  # (row_tile, stages) uint32
        self.token_scales = token_scales  # (tokens from 2q on, 4, stages) float32
        self.row = row
        self.blocks = config.k_tile // MXFP8_BLOCK
        self.under_way = min(config.in_flight, self.blocks * config.stages_per_pass)
        self.partial = [self.accumulators() for _ in range(self.under_way)]
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)

    @cute.jit
    def run(self, acc: cute.Tensor, stage: Int32, phase: Int32, first_token: Int32) -> tuple[Int32, Int32]:
        """One pass over stages_per_pass stages; gives the stage and phase after them."""
        skipped = first_token % SCALE_ALIGNMENT  # TMA starts at multiples of 16 bytes
        total = cutlass.const_expr(self.blocks * self.config.stages_per_pass)
        at = [(stage, phase)]
        for _ in cutlass.range_constexpr(self.config.stages_per_pass):
            at.append(self.ring.next(at[-1][0], at[-1][1]))
        words: list = []
        for i in cutlass.range_constexpr(total + self.under_way):
            if cutlass.const_expr(i >= self.under_way):
                done = cutlass.const_expr(i - self.under_way)
                u = cutlass.const_expr(done // self.blocks)
                b = cutlass.const_expr(done % self.blocks)
                # Before the wait: this work hides behind the matrix instruction.
                rows = (scale_of_byte(words[u][0], b), scale_of_byte(words[u][1], b))
                tokens = [
                    self.token_scales[skipped + (8 * j + i), b, at[u][0]]
                    for j in range(self.num_tokens // 8)
                    for i in range(2)
                ]
                warpgroup.wait_group(min(self.under_way - 1, total - 1 - done))
                self.add(acc, self.partial[done % self.under_way], rows, tokens)
                if cutlass.const_expr(b == self.blocks - 1):
                    self.ring.release(at[u][0])
            if cutlass.const_expr(i < total):
                u = cutlass.const_expr(i // self.blocks)
                b = cutlass.const_expr(i % self.blocks)
                if cutlass.const_expr(b == 0):
                    self.ring.wait(at[u][0], at[u][1])
                    words.append((self.weight_words[self.row, at[u][0]], self.weight_words[self.row + 8, at[u][0]]))
                self.issue(self.partial[i % self.under_way], b, at[u][0])
        return at[-1]

    @cute.jit
    def issue(self, partial: cute.Tensor, b: cutlass.Constexpr[int], stage: Int32):
        """One block of 32 k into its own accumulator."""
        warpgroup.fence()
        cute.gemm(
            self.tiled_mma, partial, self.weights[None, None, b, stage], self.tokens[None, None, b, stage], partial
        )
        warpgroup.commit_group()

    @cute.jit
    def add(self, acc: cute.Tensor, partial: cute.Tensor, rows: tuple, tokens: list):
        """acc += partial * (token scale * row scale)."""
        pieces = cutlass.const_expr(self.num_tokens // 8)
        layout = cute.make_layout((2, 2, pieces))
        a, p = cute.make_tensor(acc.iterator, layout), cute.make_tensor(partial.iterator, layout)
        for j in cutlass.range_constexpr(pieces):
            for i in cutlass.range_constexpr(2):
                for h in cutlass.range_constexpr(2):
                    a[i, h, j] = a[i, h, j] + p[i, h, j] * (tokens[i + 2 * j] * rows[h])


class W8A16(MainLoop):
    """Weights become bf16 in the registers that feed the matrix instructions; tokens come as bf16.

    While the matrix instructions of 64 k run, the weights of the next 64 are widened.
    """

    def __init__(self, config: GemmConfig, ring: Ring, tiled_mma, num_tokens, tokens, weight_codes, weight_words, row):
        self.config, self.ring, self.tiled_mma, self.num_tokens = config, ring, tiled_mma, num_tokens
        self.tokens = tokens  # smem descriptors, (…, k16 steps, stages)
        self.weight_codes = weight_codes  # (4 words, 16-byte pieces of a row, row_tile, stages) uint32
        self.weight_words = weight_words  # (row_tile, stages) uint32
        self.row = row
        self.q = cute.arch.lane_idx() % 4
        self.halves = config.k_tile // 64
        shape = tiled_mma.partition_shape_A((config.row_tile, 64))
        self.operand = [cute.make_rmem_tensor(shape, BFloat16) for _ in range(2)]
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)

    @cute.jit
    def run(self, acc: cute.Tensor, stage: Int32, phase: Int32, first_token: Int32) -> tuple[Int32, Int32]:
        """One pass over stages_per_pass stages; gives the stage and phase after them."""
        total = cutlass.const_expr(self.halves * self.config.stages_per_pass)
        at = [(stage, phase)]
        for _ in cutlass.range_constexpr(self.config.stages_per_pass):
            at.append(self.ring.next(at[-1][0], at[-1][1]))
        words: list = []
        codes: list = []
        for i in cutlass.range_constexpr(total + 2):
            u = cutlass.const_expr(i // self.halves)
            half = cutlass.const_expr(i % self.halves)
            if cutlass.const_expr(i < total and half == 0):
                # Loaded while matrix instructions are under way.
                self.ring.wait(at[u][0], at[u][1])
                words = [self.weight_words[self.row, at[u][0]], self.weight_words[self.row + 8, at[u][0]]]
                codes = [self.codes_of(h, at[u][0]) for h in range(self.halves)]
            if cutlass.const_expr(i >= 2):
                warpgroup.wait_group(1 if i < total + 1 else 0)
                if cutlass.const_expr((i - 2) % self.halves == self.halves - 1):
                    self.ring.release(at[(i - 2) // self.halves][0])
            if cutlass.const_expr(i < total):
                self.widen(self.operand[i % 2], codes[half], i % 2, words)
                warpgroup.fence()
                for step in cutlass.range_constexpr(4):
                    cute.gemm(
                        self.tiled_mma,
                        acc,
                        self.operand[i % 2][None, None, step],
                        self.tokens[None, None, half * 4 + step, at[u][0]],
                        acc,
                    )
                warpgroup.commit_group()
        return at[-1]

    def codes_of(self, half: int, stage) -> tuple:
        """64 k of two rows. Lane q takes bytes 16q to 16q + 15 (see ``gemm/tokens.py``)."""
        swizzle = self.row & 7 if self.halves == 2 else (self.row >> 1) & 3  # rows of 128 or 64 bytes
        piece = (half * 4 + self.q) ^ swizzle
        return (
            self.weight_codes[None, piece, self.row, stage].load(),
            self.weight_codes[None, piece, self.row + 8, stage].load(),
        )

    @cute.jit
    def widen(self, operand: cute.Tensor, rows: tuple, word_half: cutlass.Constexpr[int], words: list):
        """What :meth:`codes_of` gave, times the scales.

        Args:
            word_half: of the 128 k that a word of scales covers.
        """
        shift = Uint32(16 * word_half + 8 * (self.q >> 1))
        codes = [Int32((word >> shift) & Uint32(0xFF)) for word in words]
        # 2**(code - 7) in both halves of a word
        factors = [Uint32(cutlass.min(code + _E4M3_SHIFT, _LARGEST_FACTOR)) * Uint32(0x00800080) for code in codes]
        out = cute.make_tensor(cute.recast_ptr(operand.iterator, dtype=Uint32), cute.make_layout((16,)))
        for j in cutlass.range_constexpr(4):
            for h in cutlass.range_constexpr(2):
                out[4 * j + h] = mul_bf16x2(widened(rows[h][j] << 8), factors[h])
                out[4 * j + 2 + h] = mul_bf16x2(widened(rows[h][j]), factors[h])
        if codes[0] > _LARGEST or codes[1] > _LARGEST:
            self.multiply_again(out, codes)

    @cute.jit
    def multiply_again(self, out: cute.Tensor, codes: list):
        """What scales above 2**7 still lack, for the rare thread that has one."""
        for h in cutlass.range_constexpr(2):
            rest = Uint32(cutlass.max(codes[h] - _LARGEST, 0) + 127) * Uint32(0x00800080)
            rest = Uint32(cutlass.select_(codes[h] == 255, Uint32(0x7FC07FC0), rest))
            for j in cutlass.range_constexpr(8):
                out[2 * j + h] = mul_bf16x2(out[2 * j + h], rest)
