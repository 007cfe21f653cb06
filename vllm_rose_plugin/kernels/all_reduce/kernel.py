"""All-reduce on the device.

Block b of every rank works with block b of every other and with no other block. Launches are counted by an epoch that
lies in device memory, so a graph replay needs no host. In epoch e

1. block b copies its share of the input into its own staging buffer, the one of e's parity;
2. it stores e into its flag at every rank (release), and waits until all ranks' flags here have reached e (acquire);
3. one-shot: it reads its share from all ranks and writes the sums to the output. Two-shot: it does so for its share of
   its rank's part and stores the sums to all ranks, into the place that only it has read; flags and waits as in 2;
   then it copies its share of all parts out.

Why nothing is overwritten that is still read: a rank writes its staging buffer in epoch e+2 after it has waited for all
ranks in e+1, and a rank that signals e+1 has ended e, with all of its blocks. In two-shot the sums go to ranks that
have signalled e, whose earlier launches have ended; what is read there belongs to this block alone. A zero-copy input
may be written again after the launch, since two-shot's second wait is for all who read it.

A wait that reaches its deadline leaves word on the host and sets `abandoned`; from then on launches of this rank end at
once, without waiting or signalling. Their outputs are undefined.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from vllm_rose_plugin.kernels.all_reduce.access import ACCESS, DTYPES
from vllm_rose_plugin.kernels.all_reduce.config import ITEM_BYTES, Access, Algorithm, AllReduceConfig
from vllm_rose_plugin.kernels.all_reduce.layout import (
    MAX_BLOCKS,
    WORD,
    flag_offset,
    part_of,
    part_vectors,
    state_offset,
)
from vllm_rose_plugin.kernels.peer_timeout import EPOCH_SHIFT, PHASE_SHIFT
from vllm_rose_plugin.kernels.ptx.deadline import deadline_after, wait_until_reached
from vllm_rose_plugin.kernels.ptx.memory_order import add_acq_rel, load_relaxed, store_release
from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next, pdl_wait
from vllm_rose_plugin.kernels.ptx.wide import load_global, pointer_to, store_global


class AllReduce:
    """The kernel for one config."""

    def __init__(self, config: AllReduceConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.access = ACCESS[config.access](config)
        self.two_shot = config.algorithm is Algorithm.TWO_SHOT
        self.multimem = config.access is Access.MULTIMEM

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (N); not touched where it isn't copied
        out: cute.Tensor,  # (N); not touched where the sums go elsewhere
        blocks: Int32,
        rank: Int32,
        base: Int64,  # address of rank 0's part of the symmetric buffer
        stride: Int64,  # bytes between the parts
        multicast: Int64,  # address of the multicast mapping; used with multimem only
        source: Int64,  # byte offset of the input in a part, in even epochs
        source_step: Int64,  # what is added to it in odd epochs
        target: Int64,  # byte offset of two-shot's sums
        target_step: Int64,
        nanoseconds: Int64,  # of a wait
        report: Int64,  # address of the word on the host
        stream,
    ):
        self.kernel(
            x, out, rank, base, stride, multicast, source, source_step, target, target_step, nanoseconds, report
        ).launch(grid=(blocks, 1, 1), block=(self.config.threads, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        out: cute.Tensor,
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
        gone = cutlass.memory.SmemAllocator().allocate_array(Int32, 1)
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
        mine, step = block * config.threads + thread, blocks * config.threads
        elements = Uint32(x.shape[0])  # fits: config.py refuses more
        whole = Int32(elements // config.count)  # vectors without what is left over
        vectors = Int32((elements + (config.count - 1)) // config.count)

        if abandoned != 0:
            gone.store(Int32(1))  # perhaps not seen by all threads, but by all after the next barrier
        elif cutlass.const_expr(config.copy_in):
            # Not where this rank gave up: what it left there is right for a peer that is only late.
            self.copy(x, own + source, whole, vectors, mine, step, True)
        self.meet(0, own, base, stride, rank, block, thread, epoch, nanoseconds, report, state, gone)
        if gone.load() == 0:
            if cutlass.const_expr(self.two_shot):
                first, count = part_of(rank, vectors, config.group_size, config.vector_bytes, cutlass.min)
                j = mine
                while j < count:
                    places = [(first + self.clamped(j, u, step, count)) for u in range(config.unroll)]
                    values = self.access.reduce_load(memory, [source + self.bytes_of(place) for place in places])
                    for u in cutlass.range_constexpr(config.unroll):
                        if j + u * step < count:
                            self.access.broadcast_store(memory, target + self.bytes_of(places[u]), values[u])
                    j += step * config.unroll
            else:
                j = mine
                while j < whole:
                    places = [self.clamped(j, u, step, whole) for u in range(config.unroll)]
                    values = self.access.reduce_load(memory, [source + self.bytes_of(place) for place in places])
                    for u in cutlass.range_constexpr(config.unroll):
                        if j + u * step < whole:
                            store_global(self.element(out, places[u]), values[u], max_bits=config.io_bytes * 8)
                    j += step * config.unroll
                if whole < vectors:  # noqa: SIM102  or the division is made for nothing
                    if Uint32(mine) == Uint32(whole) % Uint32(step):
                        (value,) = self.access.reduce_load(memory, [source + self.bytes_of(whole)])
                        self.store_rest(out, whole, value)
        if cutlass.const_expr(self.two_shot):
            self.meet(1, own, base, stride, rank, block, thread, epoch, nanoseconds, report, state, gone)
            if cutlass.const_expr(config.copy_out):  # noqa: SIM102  one is the compiler's, one the device's
                if gone.load() == 0:
                    self.copy(out, own + target, whole, vectors, mine, step, False)

        # All copies of the epoch, so that the next launch may have any number of blocks. A block reads its own alone.
        if block + thread * blocks < MAX_BLOCKS:
            (state + (block + thread * blocks)).store(epoch)

    @cute.jit
    def meet(
        self,
        phase: cutlass.Constexpr,
        own: Int64,
        base: Int64,
        stride: Int64,
        rank: Int32,
        block: Int32,
        thread: Int32,
        epoch: Int64,
        nanoseconds: Int64,
        report: Int64,
        state: cute.Pointer,
        gone: cute.Pointer,
    ):
        """Tells all ranks that this block has come so far, and waits for theirs; sets `gone` where one didn't come."""
        size = cutlass.const_expr(self.config.group_size)
        if cutlass.const_expr(self.multimem and phase == 1):
            cute.arch.fence_proxy("alias")  # the sums were stored by the multicast address, and are loaded by another
        cute.arch.sync_threads()
        if thread < size and gone.load() == 0:
            there = base + Int64(thread) * stride + Int64(flag_offset(phase, block, rank, size))
            here = own + Int64(flag_offset(phase, block, thread, size))
            store_release(pointer_to(Int64, there, WORD), epoch, scope="sys")
            if not wait_until_reached(pointer_to(Int64, here, WORD), epoch, deadline_after(nanoseconds)):
                # Only the first: who is missed later may have given up because of the same peer.
                if add_acq_rel(self.abandoned(state), Int32(1), scope="gpu") == 0:
                    word = (epoch << EPOCH_SHIFT) | (phase << PHASE_SHIFT) | Int64(thread + 1)
                    store_release(pointer_to(Int64, report, WORD), word, scope="sys")
                gone.store(Int32(1))
        cute.arch.sync_threads()
        if cutlass.const_expr(self.multimem and phase == 0):
            cute.arch.fence_proxy("alias")  # the inputs were stored by other addresses than the multicast one

    @cute.jit
    def copy(
        self,
        tensor: cute.Tensor,
        address: Int64,
        whole: Int32,
        vectors: Int32,
        mine: Int32,
        step: Int32,
        inward: cutlass.Constexpr,
    ):
        """Moves this block's share of all parts between a tensor and this rank's part of the symmetric buffer."""
        config = self.config
        owners = cutlass.const_expr(config.group_size if self.two_shot else 1)
        at_once = cutlass.const_expr(min(owners, config.parts_at_once))
        size = whole
        if cutlass.const_expr(self.two_shot):
            size = part_vectors(vectors, config.group_size, config.vector_bytes)
        limit = cutlass.min(size, whole)
        j = mine
        while j < limit:
            for i in cutlass.range(owners // at_once, unroll=1):
                self.copy_some(tensor, address, i * at_once * size, size, whole, j, step, at_once, inward)
            if cutlass.const_expr(owners % at_once):
                first = (owners - owners % at_once) * size
                self.copy_some(tensor, address, first, size, whole, j, step, owners % at_once, inward)
            j += step * config.unroll
        if whole < vectors:
            place = Uint32(whole)
            if cutlass.const_expr(self.two_shot):
                place = place % Uint32(size)
            if Uint32(mine) == place % Uint32(step):
                self.copy_rest(tensor, address, whole, inward)

    @cute.jit
    def copy_some(
        self,
        tensor: cute.Tensor,
        address: Int64,
        first: Int32,
        size: Int32,
        whole: Int32,
        j: Int32,
        step: Int32,
        owners: cutlass.Constexpr,
        inward: cutlass.Constexpr,
    ):
        """Vector j, and those that come `step` later, of neighbouring parts of `size` vectors."""
        config = self.config
        steps = [j + u * step for u in range(config.unroll)]
        places = [first + owner * size + at for owner in range(owners) for at in steps]
        # Past the end the last vector is loaded: loads behind a branch would wait for each other.
        loaded = [cutlass.min(place, whole - 1) for place in places]
        if cutlass.const_expr(inward):
            values = [load_global(self.element(tensor, p), config.count, max_bits=config.io_bytes * 8) for p in loaded]
        else:
            values = [self.load_own(address + self.bytes_of(p)) for p in loaded]
        for i in cutlass.range_constexpr(len(places)):
            if steps[i % config.unroll] < size and places[i] < whole:
                if cutlass.const_expr(inward):
                    self.store_own(address + self.bytes_of(places[i]), values[i])
                else:
                    store_global(self.element(tensor, places[i]), values[i], max_bits=config.io_bytes * 8)

    @cute.jit
    def copy_rest(self, tensor: cute.Tensor, address: Int64, place: Int32, inward: cutlass.Constexpr):
        """The last vector, of which the tensor has only the first elements."""
        config = self.config
        if cutlass.const_expr(inward):
            value = cute.make_rmem_tensor((config.count,), self.dtype)
            value.fill(0)
            for i in cutlass.range_constexpr(config.count):
                at = place * config.count + i
                if at < Int32(tensor.shape[0]):
                    value[i] = tensor[at]
            self.store_own(address + self.bytes_of(place), value)
        else:
            self.store_rest(tensor, place, self.load_own(address + self.bytes_of(place)))

    @cute.jit
    def store_rest(self, tensor: cute.Tensor, place: Int32, value: cute.Tensor):
        for i in cutlass.range_constexpr(self.config.count):
            at = place * self.config.count + i
            if at < Int32(tensor.shape[0]):
                tensor[at] = value[i]

    def abandoned(self, state):
        """How many waits of this rank have come to their deadline, in the word behind the epochs."""
        return pointer_to(Int32, state.toint() + MAX_BLOCKS * WORD, WORD)

    def load_own(self, address):
        pointer = pointer_to(self.dtype, address, self.config.vector_bytes)
        return load_global(pointer, self.config.count, max_bits=self.config.vector_bytes * 8)

    def store_own(self, address, value):
        pointer = pointer_to(self.dtype, address, self.config.vector_bytes)
        store_global(pointer, value, max_bits=self.config.vector_bytes * 8)

    def element(self, tensor, place):
        """Where a vector of the tensor starts."""
        config = self.config
        address = tensor.iterator.toint() + Int64(place) * config.vector_bytes
        return pointer_to(self.dtype, address, config.io_bytes)

    def bytes_of(self, place):
        return Int64(place) * self.config.vector_bytes

    def clamped(self, first, u: int, step, count):
        """The u-th vector from `first` on; past the end the last one, as in `copy_some`."""
        return first if u == 0 else cutlass.min(first + u * step, count - 1)


def build(config: AllReduceConfig):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`: takes x, out and `AllReduce.__call__`'s numbers."""
    size = cute.sym_int64(symbol="N")
    align = max(config.io_bytes, ITEM_BYTES[config.dtype])
    x, out = (make_fake_tensor(DTYPES[config.dtype], (size,), (1,), assumed_align=align) for _ in range(2))
    numbers = (Int32(1), Int32(0), *(Int64(0) for _ in range(9)))
    return AllReduce(config), (x, out, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))
