"""What the compiler makes of a weight in parts on sm_90: the plain kernel's main loop, and tickets around it."""

import re
from dataclasses import replace

import cutlass.cute as cute
import pytest
import torch
from sm100_host import aligned, launch_of
from sm100_units import Global, TensorMap
from test_sm90_machine_code import CASES, check, chosen, compiled, count

from vllm_rose_plugin.kernels.gemm.config import MAX_DOMAINS, PRODUCER_REGISTERS, consumer_registers
from vllm_rose_plugin.kernels.gemm.domain_queue import counter_words
from vllm_rose_plugin.kernels.gemm.sm90 import build
from vllm_rose_plugin.kernels.jit.compile import compile_to_artifacts

DRAW = "ATOMG.E.ADD.STRONG.GPU"


CHOSEN = {name: CASES[name] for name in ("w13 m=8", "w13 m=128", "w2 m=32", "w2 m=64")}
CHOSEN["w13 of 128 experts"] = chosen(tokens=16, groups=128, n=1536, swiglu=True)
CHOSEN["w2 of 256 experts"] = chosen(tokens=4, groups=256, n=3072, k=768)
CHOSEN["qkv m=8"] = chosen(tokens=8, groups=1, n=9216, domains=2)
CHOSEN["qkv of TP4 m=64"] = chosen(tokens=64, groups=1, n=2304, bias=True, out_dtype="float16", domains=2)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", CHOSEN)
def test_two_domains(name, early):
    config = replace(CHOSEN[name], domains=2, early_counts=early)
    check(config)
    code, _ = compiled(config)
    draws = [i for i, line in enumerate(code) if line.startswith(DRAW)]
    assert len(draws) == 4, "the first ticket, the next one, one of another queue, the count of blocks"
    assert any("SR_VIRTUALSMID" in line for line in code)
    first_wait = next(i for i, line in enumerate(code) if line.startswith("ACQBULK"))
    assert draws[0] < first_wait, "the first ticket's way isn't hidden behind the kernel in front"
    if consumer_registers(config):
        given = next(i for i, line in enumerate(code) if line.startswith("USETMAXREG.DEALLOC"))
        taken = next(i for i, line in enumerate(code) if line.startswith("USETMAXREG.TRY_ALLOC"))
        producer = "\n".join(code[given:taken])
        assert max(map(int, re.findall(r"\bR(\d+)\b", producer))) < PRODUCER_REGISTERS


def test_four_domains():
    config = replace(CASES["w2 m=8"], domains=4)
    check(config)
    code, _ = compiled(config)
    assert count(code, DRAW) == 4


def test_one_domain_has_nothing_of_it():
    code, _ = compiled(CASES["w2 m=8"])
    assert not count(code, "ATOM") and not any("SMID" in line for line in code)


def test_launch():
    """What the host function makes of its arguments: a tensor map for codes and scales of each part."""
    config = replace(CASES["w2 m=8"], domains=3, n=3072)
    function, arguments = build(config)
    compiled_function = cute.compile(function, *arguments, options="--enable-tvm-ffi --gpu-arch sm_90a")
    rows, part = 77, (config.num_groups, config.part_n, config.k)
    scales = (config.num_groups * -(-config.part_n // 64), -(-config.k // 128) * 256)
    parts = [aligned(shape, torch.uint8) for _ in range(MAX_DOMAINS) for shape in (part, scales)]
    counters = aligned((counter_words(3),), torch.int32)
    others = [
        aligned((rows, config.k), torch.uint8),
        aligned((config.k // 32, 80), torch.float32),
        aligned((config.num_groups + 1,), torch.int32),
        aligned((config.num_groups,), torch.int32),
        aligned((4,), torch.float32),
        aligned((rows, config.n), torch.bfloat16),
        aligned((1, 4), torch.float32),
        aligned((132,), torch.int32),
        counters,
    ]
    ptx = compile_to_artifacts(family="gemm", config=config, build=build, target="sm_90a").ptx
    sizes = [int(size) for size in re.findall(r"_param_\d+\[(\d+)\]", ptx[: ptx.index("\n{")])]
    launch = launch_of(compiled_function, [*parts, *others, 132], sizes)
    assert launch.grid == (132, 1, 1) and launch.block == (config.threads, 1, 1) and launch.pdl
    maps = [TensorMap(param, Global()) for param in launch.params if len(param) == 128]
    assert len(maps) == 4 + 2 * 2
    expected = [parts[0], parts[1], others[0], others[1], *parts[2:6]]
    assert [each.address for each in maps] == [tensor.data_ptr() for tensor in expected]
    assert [each.sizes for each in maps[4:]] == [maps[0].sizes, maps[1].sizes] * 2
    assert launch.params[-1][:8] == counters.data_ptr().to_bytes(8, "little")
