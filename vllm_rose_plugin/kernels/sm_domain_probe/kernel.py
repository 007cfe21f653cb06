"""Which SMs a stream's blocks run on: each block writes down where it is, and stays a while."""

import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from vllm_rose_plugin.kernels.ptx.deadline import deadline_after, is_past
from vllm_rose_plugin.kernels.sm_domain_probe.config import ProbeConfig


class Probe:
    """The kernel for one config."""

    def __init__(self, config: ProbeConfig):
        self.config = config

    @cute.jit
    def __call__(self, seen: cute.Tensor, grid: Int32, stream):
        """Args: seen: (SMs) int32, set to 1 for each SM that a block ran on."""
        self.kernel(seen).launch(grid=(grid, 1, 1), block=(self.config.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, seen: cute.Tensor):
        if cute.arch.thread_idx()[0] == 0:
            end = deadline_after(self.config.nanoseconds)
            sm = cute.arch.smid()
            if sm < seen.shape[0]:
                seen[sm] = Int32(1)
            staying = Boolean(True)
            while staying:
                staying = not is_past(end)


def build(config: ProbeConfig):
    """For :func:`vllm_rose_plugin.kernels.jit.compile.compile`; arguments as in ``Probe.__call__``."""
    seen = make_fake_tensor(Int32, (cute.sym_int32(symbol="SMs"),), (1,), assumed_align=4)
    return Probe(config), (seen, Int32(0), make_fake_stream(use_tvm_ffi_env_stream=True))
