"""One small kernel per device function. They live in a file of their own because the DSL reads its source."""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from vllm_rose_plugin.kernels.ptx.deadline import deadline_after, wait_until_reached
from vllm_rose_plugin.kernels.ptx.grid_barrier import grid_barrier
from vllm_rose_plugin.kernels.ptx.memory_order import (
    add_acq_rel,
    load_acquire,
    load_relaxed,
    red_add_release,
    store_release,
)
from vllm_rose_plugin.kernels.ptx.multimem import (
    multimem_load_sum,
    multimem_red_add,
    multimem_signal,
    multimem_store,
)
from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next, pdl_wait
from vllm_rose_plugin.kernels.ptx.reduce import lane_exchange, warp_max, warp_sum
from vllm_rose_plugin.kernels.ptx.wide import CacheHint, load_global, prefetch_l2, store_global

MULTIMEM_TYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}


def int_tensor(dtype=Int32, align: int = 32):
    return make_fake_compact_tensor(dtype, (cute.sym_int32(),), assumed_align=align)


def stream():
    return make_fake_stream(use_tvm_ffi_env_stream=True)


class Message:
    """Block 1 waits for block 0's flag with acquire loads and copies what block 0 wrote before releasing it."""

    def __init__(self, scope: str, flag: str) -> None:
        self.scope, self.flag = scope, flag

    @cute.jit
    def __call__(self, data: cute.Tensor, flags: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        self.kernel(data, flags, out).launch(grid=[2, 1, 1], block=[32, 1, 1], stream=stream, cooperative=True)

    @cute.kernel
    def kernel(self, data: cute.Tensor, flags: cute.Tensor, out: cute.Tensor):
        lane, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if block == 0:
            data[lane] = lane * 3 + 1
            cute.arch.sync_threads()
            if lane == 0:
                if cutlass.const_expr(self.flag == "store"):
                    store_release(flags.iterator, Int32(1), scope=self.scope)
                elif cutlass.const_expr(self.flag == "red"):
                    red_add_release(flags.iterator, Int32(1), scope=self.scope)
                else:
                    flags[1] = add_acq_rel(flags.iterator, Int32(1), scope=self.scope)
        else:
            seen = load_relaxed(flags.iterator, Int32, scope=self.scope)
            while seen == 0:
                seen = load_acquire(flags.iterator, Int32, scope=self.scope)
            out[lane] = data[lane]

    def example(self):
        return self, (int_tensor(), int_tensor(), int_tensor(), stream())


class Multimem:
    """Never launched: it needs a multicast mapping."""

    def __init__(self, dtype: str, scope: str) -> None:
        self.dtype, self.scope = MULTIMEM_TYPES[dtype], scope

    @cute.jit
    def __call__(self, source: cute.Tensor, target: cute.Tensor, flag: cute.Tensor, stream: cuda.CUstream):
        self.kernel(source, target, flag).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, source: cute.Tensor, target: cute.Tensor, flag: cute.Tensor):
        lane, _, _ = cute.arch.thread_idx()
        words = multimem_load_sum(source.iterator + lane * 4, self.dtype)
        multimem_store(target.iterator + lane * 4, words)
        multimem_red_add(target.iterator + 128 + lane * 4, words, self.dtype)
        multimem_signal(flag.iterator, scope=self.scope)

    def example(self):
        return self, (int_tensor(), int_tensor(), int_tensor(), stream())


class Copy:
    """Each thread copies `bits` bits with cache hints."""

    def __init__(self, bits: int, load_hint: str, store_hint: str) -> None:
        self.bits, self.load_hint, self.store_hint = bits, CacheHint[load_hint], CacheHint[store_hint]

    @cute.jit
    def __call__(self, source: cute.Tensor, target: cute.Tensor, stream: cuda.CUstream):
        blocks = source.shape[0] // (128 * self.bits // 32)
        self.kernel(source, target).launch(grid=[blocks, 1, 1], block=[128, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, source: cute.Tensor, target: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        count = self.bits // 32
        index = (block * 128 + thread) * count
        prefetch_l2(source.iterator + index)
        align = self.bits // 8
        source_pointer = (source.iterator + index).align(align)
        words = load_global(source_pointer, count, max_bits=self.bits, hint=self.load_hint)
        store_global((target.iterator + index).align(align), words, max_bits=self.bits, hint=self.store_hint)

    def example(self):
        return self, (int_tensor(), int_tensor(), stream())


class Reduce:
    """Sum, maximum and neighbour's value within groups of lanes."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes

    @cute.jit
    def __call__(
        self,
        source: cute.Tensor,
        sums: cute.Tensor,
        maxima: cute.Tensor,
        next_: cute.Tensor,
        stream: cuda.CUstream,
    ):
        self.kernel(source, sums, maxima, next_).launch(grid=[1, 1, 1], block=[64, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, source: cute.Tensor, sums: cute.Tensor, maxima: cute.Tensor, next_: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        sums[thread] = warp_sum(source[thread], lanes=self.lanes)
        maxima[thread] = warp_max(source[thread], lanes=self.lanes)
        fragment = cute.make_rmem_tensor((1,), Float32)
        fragment[0] = source[thread]
        lane = thread % self.lanes
        next_[thread] = lane_exchange(fragment, lane=lane, source=lane + 1, lanes=self.lanes)[0]

    def example(self):
        return self, (*(int_tensor(Float32) for _ in range(4)), stream())


class Rounds:
    """Every block adds 1 to its own cell and reads its neighbour's after a barrier, several times over."""

    def __init__(self, rounds: int, blocks: int) -> None:
        self.rounds, self.blocks = rounds, blocks

    @cute.jit
    def __call__(self, state: cute.Tensor, cells: cute.Tensor, wrong: cute.Tensor, stream: cuda.CUstream):
        self.kernel(state, cells, wrong).launch(
            grid=[self.blocks, 1, 1], block=[64, 1, 1], stream=stream, cooperative=True
        )

    @cute.kernel
    def kernel(self, state: cute.Tensor, cells: cute.Tensor, wrong: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        neighbour = (block + 1) % self.blocks
        start = cells[block * 64 + thread]
        # Everyone has read its start before anyone adds.
        grid_barrier(state.iterator)
        for i in cutlass.range(self.rounds):
            cells[block * 64 + thread] = start + i + 1
            grid_barrier(state.iterator)
            # Threads reversed: the value comes from another warp of another block.
            seen = load_relaxed(cells.iterator + neighbour * 64 + 63 - thread, Int32, scope="gpu")
            if seen != start + i + 1:
                cute.arch.atomic_add(wrong.iterator, Int32(1))
            grid_barrier(state.iterator)

    def example(self):
        return self, (int_tensor(Uint32), int_tensor(), int_tensor(), stream())


class Chain:
    """Adds 1 to a number with programmatic dependent launch: a chain of them counts without losing one."""

    @cute.jit
    def __call__(self, number: cute.Tensor, stream: cuda.CUstream):
        self.kernel(number).launch(grid=[4, 1, 1], block=[32, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, number: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        pdl_launch_next()
        pdl_wait()
        number[block * 32 + thread] = number[block * 32 + thread] + 1

    def example(self):
        return self, (int_tensor(), stream())


class Patience:
    """Waits for a flag with a deadline and reports whether it came, and how long that took."""

    @cute.jit
    def __call__(self, flag: cute.Tensor, epoch: Int32, nanoseconds: Int64, out: cute.Tensor, stream: cuda.CUstream):
        self.kernel(flag, epoch, nanoseconds, out).launch(grid=[1, 1, 1], block=[1, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, flag: cute.Tensor, epoch: Int32, nanoseconds: Int64, out: cute.Tensor):
        start = Int64(cute.arch.globaltimer())
        reached = wait_until_reached(flag.iterator, epoch, deadline_after(nanoseconds))
        out[0] = Int64(reached)
        out[1] = Int64(cute.arch.globaltimer()) - start

    def example(self):
        return self, (int_tensor(), Int32(1), Int64(1), int_tensor(Int64), stream())


KERNELS = {
    "message": Message,
    "multimem": Multimem,
    "copy": Copy,
    "reduce": Reduce,
    "rounds": Rounds,
    "chain": Chain,
    "patience": Patience,
}


@dataclass(frozen=True)
class PtxCase:
    """Which kernel, and the arguments of its class."""

    kernel: str
    arguments: tuple = ()


def build(config: PtxCase) -> tuple:
    return KERNELS[config.kernel](*config.arguments).example()
