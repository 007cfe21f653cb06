"""The pair of primitives that the algorithms are written in: read the sum over all ranks, store to all ranks.

`reduce_load(offsets)` gives, for each byte offset into the symmetric buffer, the vector summed over the ranks in
float32 and rounded once to the dtype. `broadcast_store(offset, vector)` stores a vector at an offset of every rank.
Either may be used only where the flags say that the peers' data is there, or their memory free. Both take `memory`, a
tuple of the kernel's (base, stride, rank, multicast).
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32

from vllm_rose_plugin.kernels.all_reduce.config import PEERS_AT_ONCE, Access, AllReduceConfig
from vllm_rose_plugin.kernels.ptx.multimem import multimem_load_sum, multimem_store
from vllm_rose_plugin.kernels.ptx.wide import load_global, pointer_to, store_global, zero_after

DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}


class Peers:
    """Ordinary loads and stores; the ranks' parts lie `stride` bytes apart, so any number of ranks needs no table."""

    def __init__(self, config: AllReduceConfig):
        self.config, self.dtype = config, DTYPES[config.dtype]

    @cute.jit
    def reduce_load(self, memory, offsets):
        size = self.config.group_size
        sums = [cute.make_rmem_tensor((self.config.count,), Float32) for _ in offsets]
        at_once = min(size, PEERS_AT_ONCE)
        self.add(memory, sums, offsets, Int32(0), at_once, True)
        # Code for 72 ranks would be long; the order is that of the ranks all the same.
        for i in cutlass.range(1, size // at_once, unroll=1):
            self.add(memory, sums, offsets, i * at_once, at_once, False)
        if cutlass.const_expr(size % at_once):
            self.add(memory, sums, offsets, Int32(size - size % at_once), size % at_once, False)
        return [self.rounded(total) for total in sums]

    @cute.jit
    def add(self, memory, sums, offsets, first: Int32, ranks: cutlass.Constexpr, fresh: cutlass.Constexpr):
        """Adds the vectors of neighbouring ranks; all loads come before the first addition."""
        base, stride, rank, _ = memory
        loads = []
        for i in cutlass.range_constexpr(ranks):
            part = base + Int64(first + i) * stride
            loads.append([self.load(part + offset) for offset in offsets])
        zero = zero_after([value for values in loads for value in values], rank)
        for value in loads[0]:
            words = cute.recast_tensor(value, Uint32)
            for i in cutlass.range_constexpr(cute.size(words)):
                words[i] = words[i] ^ zero
        for i in cutlass.range_constexpr(ranks):
            for total, value in zip(sums, loads[i], strict=True):
                widened = value.load().to(Float32)
                if cutlass.const_expr(fresh and i == 0):
                    total.store(widened)
                else:
                    total.store(total.load() + widened)

    def load(self, address):
        pointer = pointer_to(self.dtype, address, self.config.vector_bytes)
        return load_global(pointer, self.config.count, max_bits=self.config.vector_bytes * 8)

    def rounded(self, total):
        value = cute.make_rmem_tensor((self.config.count,), self.dtype)
        value.store(total.load().to(self.dtype))
        return value

    @cute.jit
    def broadcast_store(self, memory, offset: Int64, value: cute.Tensor):
        base, stride, rank, _ = memory
        # From the own part on, so that the ranks don't all store to the same one at once.
        for i in cutlass.range(self.config.group_size, unroll=4):
            peer = rank + i
            if peer >= self.config.group_size:
                peer = peer - self.config.group_size
            pointer = pointer_to(self.dtype, base + Int64(peer) * stride + offset, self.config.vector_bytes)
            store_global(pointer, value, max_bits=self.config.vector_bytes * 8)


class Multimem:
    """NVLS, through the multicast mapping of the buffer."""

    def __init__(self, config: AllReduceConfig):
        self.dtype = DTYPES[config.dtype]

    def reduce_load(self, memory, offsets):
        values = []
        for offset in offsets:
            words = cute.make_rmem_tensor((4,), Int32)
            for i, word in enumerate(multimem_load_sum(_multicast(memory, offset), self.dtype)):
                words[i] = Int32(word)
            values.append(cute.recast_tensor(words, self.dtype))
        return values

    def broadcast_store(self, memory, offset, value):
        words = cute.recast_tensor(value, Int32)
        multimem_store(_multicast(memory, offset), [words[i].ir_value() for i in range(4)])


def _multicast(memory, offset):
    return pointer_to(Int32, memory[3] + offset, 16)


ACCESS: dict[Access, Any] = {Access.PEERS: Peers, Access.MULTIMEM: Multimem}
