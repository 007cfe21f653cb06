"""The tcgen05 GEMM of sm_100a, sm_100f, sm_103a and sm_107a: host function and kernel. Compiled and read, never run.

MXFP8 x MXFP8 with exact 1x32 scaling in the matrix unit. Weights take its 128-row side and tokens its columns, so that
a few tokens cost a few columns. One block per SM goes through its tiles (``sm100_schedule``), its warps in three roles:
one loads stages of 128 k by TMA (``sm100_load``), one issues matrix instructions and the copies of scales into tensor
memory (``sm100_mma``), four take finished tiles out of tensor memory and store them (``sm100_epilogue``).

With SWIGLU a tile has two accumulators in the same lanes, one of gate rows and one of up rows: a thread holds gate and
up of one element for all tokens, and the 32 lanes of a warp hold exactly one block of the MXFP8 result. So weights need
no reordering. With `pair`, two blocks share the instruction: 256 rows, half of the tokens in each block's memory. With
`split`, blocks share a tile's k, for a call of few tiles, and the first adds up their sums in a fixed order.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float8E8M0FNU, Float32, Int32, Int64, Uint8, Uint16
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from vllm_rose_plugin.kernels.gemm.config import MAX_DOMAINS, Epilogue
from vllm_rose_plugin.kernels.gemm.config_sm100 import (
    EPILOGUE_THREADS,
    K_TILE,
    ROWS,
    THREADS,
    Sm100Config,
)
from vllm_rose_plugin.kernels.gemm.domain_queue import counter_words
from vllm_rose_plugin.kernels.gemm.parts_arguments import PartsArguments
from vllm_rose_plugin.kernels.gemm.sm100_domains import load_parts
from vllm_rose_plugin.kernels.gemm.sm100_epilogue import store_tiles
from vllm_rose_plugin.kernels.gemm.sm100_layouts import (
    SCALE_WORDS,
    make_tiled_mma,
    operand_layouts,
    scale_tiles,
    tma_layout,
)
from vllm_rose_plugin.kernels.gemm.sm100_load import Operand, load_stages
from vllm_rose_plugin.kernels.gemm.sm100_mma import Barriers, issue_products
from vllm_rose_plugin.kernels.gemm.sm100_ring import Ring, init_ring
from vllm_rose_plugin.kernels.gemm.sm100_schedule import WARP
from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next

_MMA_WARP = EPILOGUE_THREADS // WARP
_LOAD_WARP = _MMA_WARP + 1


class Sm100Gemm:
    """The kernel for one config."""

    def __init__(self, config: Sm100Config):
        self.config = config

    @cute.jit
    def __call__(
        self,
        weight_codes: cute.Tensor,  # (G, N, K) uint8
        weight_scales: cute.Tensor,  # flat uint8: (G, halves, row tiles, k tiles, 512)
        token_codes: cute.Tensor,  # (S, K) uint8
        token_scales: cute.Tensor,  # flat uint8: (scale tiles of all groups, k tiles, 512)
        offsets: cute.Tensor,  # (G + 1,) int32
        counts: cute.Tensor,  # (G,) int32
        bias: cute.Tensor,  # flat float32: (G, N)
        out: cute.Tensor,  # (S, N) bf16 or fp16; SWIGLU: (S, I) uint8; may be columns of longer rows
        out_scales: cute.Tensor,  # SWIGLU: flat uint8, as token_scales for K = I
        grid: Int32,
        stream,
    ):
        operands = (weight_codes, weight_scales, token_codes, token_scales)
        self.start(operands, (offsets, counts), bias, (out, out_scales), (), grid, stream)

    def start(
        self, operands: tuple, runs: tuple, bias, outputs: tuple, workspace: tuple, grid, stream, further: tuple = ()
    ) -> None:
        """The launch, on the host.

        Args:
            further: (codes, scales) of further parts of the weight.
        """
        weight_codes, weight_scales, token_codes, token_scales = operands
        config = self.config
        group = tcgen05.CtaGroup.TWO if config.pair else tcgen05.CtaGroup.ONE
        tiled_mma = make_tiled_mma(config)
        a_layout, b_layout, scale_layout, tmem_scale_layout = operand_layouts(tiled_mma, config)

        weights = self.weight_view(weight_codes)
        tokens = cute.recast_tensor(token_codes, Float8E4M3FN)
        load = cpasync.CopyBulkTensorTileG2SOp(group)
        a_tma, a_coords = cpasync.make_tiled_tma_atom(load, weights, tma_layout(ROWS), (ROWS, K_TILE))
        b_tma, b_coords = cpasync.make_tiled_tma_atom(
            load, tokens, tma_layout(config.block_tokens), (config.block_tokens, K_TILE)
        )
        box = cute.make_layout((SCALE_WORDS, 1))
        sfa_tma, sfa_coords = cpasync.make_tiled_tma_atom(load, scale_tiles(weight_scales), box, (SCALE_WORDS, 1))
        parts: tuple = ()
        for codes, scales in further:
            parts += (
                cpasync.make_tiled_tma_atom(load, self.weight_view(codes), tma_layout(ROWS), (ROWS, K_TILE)),
                cpasync.make_tiled_tma_atom(load, scale_tiles(scales), box, (SCALE_WORDS, 1)),
            )
        # With a pair both blocks need the scales of all tokens: each loads half of every tile, for both.
        shared_load = cpasync.CopyBulkTensorTileG2SMulticastOp(group) if config.pair else load
        sfb_tma, sfb_coords = cpasync.make_tiled_tma_atom(
            shared_load, scale_tiles(token_scales), box, (SCALE_WORDS, 1), num_multicast=config.row_blocks
        )

        stages, halves = config.stages, config.halves

        fields = {
            "full": cute.struct.MemRange[Int64, stages],
            "empty": cute.struct.MemRange[Int64, stages],
            "early": cute.struct.MemRange[Int64, max(config.prefetch, 1)],
            "done": cute.struct.MemRange[Int64, config.accumulators],
            "drained": cute.struct.MemRange[Int64, config.accumulators],
            "partial": Int64,
            "taken": Int64,
        }
        if config.domains > 1:
            fields |= {
                "told": cute.struct.MemRange[Int64, config.ring],
                "mail": cute.struct.MemRange[Int64, config.ring],
                "words": cute.struct.MemRange[Int32, config.ring],
                "letters": cute.struct.MemRange[Int32, config.ring],
            }
        fields |= {
            "tmem": Int32,
            "a": cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(a_layout)], 1024],
            "b": cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(b_layout)], 1024],
            "sfa": cute.struct.Align[cute.struct.MemRange[Uint16, SCALE_WORDS * stages * halves], 128],
            "sfb": cute.struct.Align[
                cute.struct.MemRange[Uint16, SCALE_WORDS * stages * config.token_scale_tiles], 128
            ],
            # Behind sfb, since a copy of scales may read up to 384 bytes past its tile (see sm100_mma).
            "staging": cute.struct.Align[cute.struct.MemRange[Uint8, 2 * config.staging_bytes], 512],
            "partials": cute.struct.Align[cute.struct.MemRange[Float32, max(config.partial_bytes // 4, 4)], 16],
        }
        Storage = cute.struct(type("Storage", (), {"__annotations__": fields}))

        self.storage = Storage
        self.kernel(
            tiled_mma,
            Operand(a_tma, a_coords),
            Operand(b_tma, b_coords),
            Operand(sfa_tma, sfa_coords),
            Operand(sfb_tma, sfb_coords),
            *runs,
            bias,
            *outputs,
            a_layout,
            b_layout,
            scale_layout,
            tmem_scale_layout,
            parts,
            workspace,
        ).launch(
            grid=(grid, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(config.blocks, 1, 1) if config.blocks > 1 else None,
            stream=stream,
            use_pdl=True,
        )

    def weight_view(self, weight_codes: cute.Tensor) -> cute.Tensor:
        """(rows of a half, K, G * halves) of the weight, or of a part."""
        config = self.config
        rows = config.part_columns
        layout = cute.make_layout(
            (rows, config.k, config.num_groups * config.halves), stride=(config.k, 1, rows * config.k)
        )
        return cute.make_tensor(cute.recast_ptr(weight_codes.iterator, dtype=Float8E4M3FN), layout)

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        a: Operand,
        b: Operand,
        sfa: Operand,
        sfb: Operand,
        offsets: cute.Tensor,
        counts: cute.Tensor,
        bias: cute.Tensor,
        out: cute.Tensor,
        out_scales: cute.Tensor,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        scale_layout: cute.Layout,
        tmem_scale_layout: cute.Layout,
        parts: tuple,
        workspace: tuple,
    ):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if config.blocks > 1 else Int32(0)
        first, step = block // config.blocks, blocks // config.blocks

        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        barriers = Barriers(
            storage.full.data_ptr(),
            storage.empty.data_ptr(),
            storage.early.data_ptr(),
            storage.done.data_ptr(),
            storage.drained.data_ptr(),
            storage.partial.ptr,
            storage.taken.ptr,
        )
        ring: Any = ()
        if cutlass.const_expr(config.domains > 1):
            ring = Ring(
                storage.told.data_ptr(), storage.words.data_ptr(), storage.mail.data_ptr(), storage.letters.data_ptr()
            )
        if warp == _LOAD_WARP:
            with cute.arch.elect_one():
                if cutlass.const_expr(config.domains > 1):
                    init_ring(ring, config)
                for i in range(config.stages):
                    cute.arch.mbarrier_init(barriers.full + i, 1)
                    cute.arch.mbarrier_init(barriers.empty + i, 1)
                for i in range(config.prefetch):
                    cute.arch.mbarrier_init(barriers.early + i, 1)
                for i in range(config.accumulators):
                    cute.arch.mbarrier_init(barriers.done + i, 1)
                    cute.arch.mbarrier_init(barriers.drained + i, config.row_blocks * EPILOGUE_THREADS // WARP)
                cute.arch.mbarrier_init(barriers.partial, 1)
                cute.arch.mbarrier_init(barriers.taken, EPILOGUE_THREADS // WARP)
            for operand in (a, b, sfa, sfb):
                cpasync.prefetch_descriptor(operand.tma)
            for atom, _ in parts:
                cpasync.prefetch_descriptor(atom)
        if warp == _MMA_WARP:
            cute.arch.alloc_tmem(config.tmem_columns, storage.tmem.ptr, config.pair, arch=_tmem_arch(config))
            cute.arch.relinquish_tmem_alloc_permit(config.pair)
        cute.arch.mbarrier_init_fence()
        _sync(config)
        if cutlass.const_expr(config.domains == 1):
            pdl_launch_next()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem.ptr)

        if warp == _LOAD_WARP:
            weights = tma_layout(ROWS, config.stages * config.halves)
            tokens = tma_layout(config.block_tokens, config.stages)
            places = (
                storage.a.get_tensor(weights.outer, swizzle=weights.inner),
                storage.b.get_tensor(tokens.outer, swizzle=tokens.inner),
                storage.sfa.get_tensor(cute.make_layout((SCALE_WORDS, 1, config.stages * config.halves))),
                storage.sfb.get_tensor(cute.make_layout((SCALE_WORDS, 1, config.stages * config.token_scale_tiles))),
            )
            if cutlass.const_expr(config.domains > 1):
                atoms = ([a.tma, *(part[0] for part in parts[::2])], [sfa.tma, *(part[0] for part in parts[1::2])])
                load_parts(
                    (a, b, sfa, sfb), atoms, places, barriers, ring, workspace, offsets, counts, step, rank, config
                )
            else:
                load_stages(a, b, sfa, sfb, *places, barriers, offsets, counts, first, step, rank, config)
        elif warp == _MMA_WARP:
            issue_products(
                tiled_mma,
                storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner),
                storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner),
                cute.recast_ptr(storage.sfa.data_ptr(), dtype=Float8E8M0FNU),
                cute.recast_ptr(storage.sfb.data_ptr(), dtype=Float8E8M0FNU),
                scale_layout,
                tmem_scale_layout,
                tmem,
                barriers,
                counts,
                first,
                step,
                rank,
                ring,
                config,
            )
        else:
            store_tiles(
                storage.staging.data_ptr(),
                storage.partials.data_ptr(),
                tmem,
                barriers,
                offsets,
                counts,
                bias,
                out,
                out_scales,
                thread,
                first,
                step,
                rank,
                ring,
                config,
            )

        # Nobody leaves while the other block may still signal here, nor gives up tensor memory that is being read.
        _sync(config)
        if warp == _MMA_WARP:
            cute.arch.dealloc_tmem(tmem, config.tmem_columns, config.pair, arch=_tmem_arch(config))


class DomainGemm(PartsArguments, Sm100Gemm):
    """The kernel for a config with several domains, which takes as many weights, a table of SMs, and counters."""


def _sync(config: Sm100Config) -> None:
    """Waits for all threads of the cluster."""
    if config.blocks > 1:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


def _tmem_arch(config: Sm100Config) -> str:
    """For the bounds that the DSL checks."""
    return "sm_107" if config.tmem_columns > 512 else "sm_100"


def build(config: Sm100Config):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`; arguments as in ``Sm100Gemm.__call__``."""
    rows = cute.sym_int32(symbol="S")
    swiglu = config.epilogue is Epilogue.SWIGLU
    out_dtype = Uint8 if swiglu else {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.out_dtype]

    def flat(dtype, size, align):
        return make_fake_tensor(dtype, (size,), (1,), assumed_align=align)

    def matrix(dtype, columns, pitch=0):
        return make_fake_tensor(dtype, (rows, columns), (pitch or columns, 1), assumed_align=16)

    codes_shape = (config.num_groups, config.n // config.domains, config.k)
    pitch = config.n // config.domains * config.k
    weight = (
        make_fake_tensor(Uint8, codes_shape, (pitch, config.k, 1), assumed_align=16),
        flat(Uint8, cute.sym_int64(symbol="W"), 128),
    )
    workspace: tuple = ()
    if config.domains > 1:
        workspace = (flat(Int32, cute.sym_int32(symbol="SMs"), 4), flat(Int32, counter_words(config.domains), 4))
    kernel = DomainGemm if config.domains > 1 else Sm100Gemm
    return kernel(config), (
        *weight * (MAX_DOMAINS if config.domains > 1 else 1),
        matrix(Uint8, config.k),
        flat(Uint8, cute.sym_int64(symbol="X"), 128),
        flat(Int32, config.num_groups + 1, 4),
        flat(Int32, config.num_groups, 4),
        flat(Float32, cute.sym_int64(symbol="B"), 4),
        matrix(out_dtype, config.columns, config.out_pitch),
        flat(Uint8, cute.sym_int64(symbol="Y"), 4),
        *workspace,
        Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
