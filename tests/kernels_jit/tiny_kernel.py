"""The smallest kernel that can be compiled, cached and run: x *= factor."""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream


@dataclass(frozen=True)
class TinyConfig:
    factor: float = 3.0
    threads: int = 128


@cute.kernel
def scale_kernel(x: cute.Tensor, factor: cutlass.Constexpr):  # x: (rows, threads) fp32
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    x[row, thread] = x[row, thread] * factor


@cute.jit
def scale(x: cute.Tensor, factor: cutlass.Constexpr, threads: cutlass.Constexpr, stream: cuda.CUstream):
    scale_kernel(x, factor).launch(grid=(x.shape[0], 1, 1), block=(threads, 1, 1), stream=stream)


def build(config: TinyConfig):
    rows = cute.sym_int32()
    x = make_fake_compact_tensor(cutlass.Float32, (rows, config.threads), stride_order=(1, 0), assumed_align=16)
    return scale, (x, config.factor, config.threads, make_fake_stream(use_tvm_ffi_env_stream=True))
