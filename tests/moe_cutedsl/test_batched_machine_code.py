"""What the compiler makes of the kernel that prepares batched tokens, for every target."""

import pytest
import route_cases as cases
from test_batched_bits import formats, made
from test_route_machine_code import instructions

from vllm_rose_plugin.kernels.contracts import Activation, Rounding
from vllm_rose_plugin.kernels.jit.sass import resource_usage
from vllm_rose_plugin.kernels.moe_batched.config import LayerShape, tokens_config
from vllm_rose_plugin.kernels.mxfp8_quantize.config import widest_load


@pytest.mark.parametrize("dtype", ["bfloat16", "mxfp8"])
@pytest.mark.parametrize("target", cases.TARGETS)
def test_it_waits_before_it_reads_and_does_not_spill(target, dtype):
    for token_format in formats(target):
        if dtype == "mxfp8" and token_format.value == "bf16_permuted":
            continue
        config = tokens_config(
            LayerShape(target, 4096, 1536, 8, Activation.MXFP8),
            dtype=dtype,
            token_format=token_format,
            rounding=Rounding.RCEIL,
            load_alignment=widest_load(target),
        )
        cubin = made(config, target).cubin
        code, usage = instructions(cubin), resource_usage(cubin)
        assert usage["stack"] == 0 and not any(line.startswith(("STL", "LDL")) for line in code), "spills"
        assert usage["registers"] <= 64, usage
        waits, triggers, loads = (
            next(i for i, line in enumerate(code) if line.startswith(name)) for name in ("ACQBULK", "PREEXIT", "LDG")
        )
        assert waits < triggers < loads, "the next kernel must not start, nor a value be read, before the wait"
        assert not any("CONSTANT" in line for line in code), "a load that may be stale"
        assert any(line.startswith("STG") and ".128" in line for line in code)
