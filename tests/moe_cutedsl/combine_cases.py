"""What the tests of the weighted sum compile, and its PTX run on the CPU."""

import functools
import re
import struct
import sys
from pathlib import Path

import numpy as np
import torch

from vllm_rose_plugin.kernels.jit.compile import Artifacts, compile_to_artifacts
from vllm_rose_plugin.kernels.jit.targets import FAMILY_TARGET
from vllm_rose_plugin.kernels.jit.targets import TARGETS as OF_DEVICE
from vllm_rose_plugin.kernels.moe_combine.config import CombineConfig
from vllm_rose_plugin.kernels.moe_combine.kernel import build

sys.path.insert(0, str(Path(__file__).parents[1] / "mxfp8_quantize_cutedsl"))
import ptx_machine

TARGETS = sorted({*OF_DEVICE.values(), FAMILY_TARGET})
SM_COUNT = 132
NAN = float("nan")


class Machine(ptx_machine._Machine):
    """Where a pair is made of a register that nobody wrote, the other half alone counts: here it holds poison."""

    def move_halves(self, width, operands, active):
        for operand in re.findall(r"%r\d+", operands[1]):
            if operand not in self.registers:
                self.registers[operand] = np.full(self.count, 0xDEADBEEF, np.uint64)
        super().move_halves(width, operands, active)


@functools.cache
def artifacts(config: CombineConfig, target: str) -> Artifacts:
    return compile_to_artifacts(family="moe_combine", config=config, build=build, target=target)


def run(
    config: CombineConfig,
    target: str,
    y: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    *,
    shared_gap: int = 0,
    offset: int = 0,
) -> torch.Tensor:
    """The kernel's result for these tensors; `offset` moves slots and weights, `shared_gap` elements part its rows."""
    num_tokens, top_k = slots.shape
    size = y.shape[1]

    def data(tensor: torch.Tensor) -> bytes:
        return tensor.contiguous().view(torch.uint8).numpy().tobytes()

    memory = ptx_machine.Memory()
    y_at = memory.place(data(y))
    slots_at = memory.place(data(slots), offset=offset)
    weights_at = slots_at if weights is None else memory.place(data(weights), offset=offset)
    shared_at, stride = y_at, size
    if shared is not None:
        stride = size + shared_gap
        laid_out = torch.full((num_tokens, stride), NAN, dtype=shared.dtype)
        laid_out[:, :size] = shared
        shared_at = memory.place(data(laid_out), offset=config.shared_bytes % 32)
    out_at = memory.place(num_tokens * size * 2, writable=True)
    pairs = num_tokens * top_k
    params = [
        struct.pack("<QQ", y_at, len(y)),
        struct.pack("<QQ", slots_at, pairs),
        struct.pack("<QQ", weights_at, pairs),
        struct.pack("<QQQ", shared_at, num_tokens, stride),
        struct.pack("<QQ", out_at, num_tokens),
    ]
    grid = -(-num_tokens * config.row_vectors // config.block_vectors)
    Machine(grid, config.threads, params, memory).run(artifacts(config, target).ptx)
    bits = torch.from_numpy(memory.read(out_at, num_tokens * size * 2))
    return bits.view(getattr(torch, config.out_dtype)).view(num_tokens, size)


def operands(seed: int, *, num_tokens: int, top_k: int, hidden_size: int, dtype=torch.bfloat16):
    """(y, slots, router weights, shared): a row of y for each (token, k), some slots -1, NaN and inf among rows."""
    g = torch.Generator().manual_seed(seed)
    pairs = num_tokens * top_k
    y = torch.randn(pairs, hidden_size, generator=g) * torch.exp2(
        torch.randint(-20, 8, (pairs, 1), generator=g).float()
    )
    slots = torch.randperm(pairs, generator=g).to(torch.int32).view(num_tokens, top_k)
    weights = torch.rand(num_tokens, top_k, generator=g)
    gone = torch.rand(num_tokens, top_k, generator=g) < 0.3
    slots[gone] = -1
    weights[gone & (weights > 0.5)] = NAN
    if pairs > 4:
        y[1, 3], y[2, ::5] = NAN, float("inf")
    if num_tokens > 2:
        slots[1] = -1
    return y.to(dtype), slots, weights, torch.randn(num_tokens, hidden_size, generator=g).to(dtype)


def assert_bits(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits, but for the payload of a NaN."""
    assert result.dtype == expected.dtype and result.shape == expected.shape
    assert torch.equal(result.isnan(), expected.isnan())
    plain = [x.masked_fill(expected.isnan(), 0).view(torch.int16) for x in (result, expected)]
    wrong = (plain[0] != plain[1]).nonzero()
    assert not len(wrong), f"{len(wrong)} elements differ, the first is {wrong[0].tolist()}"
