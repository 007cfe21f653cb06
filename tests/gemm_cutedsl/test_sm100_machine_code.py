"""What the compiler makes of the tcgen05 GEMM for each target. None of it was ever run on a device."""

import functools
import re
from collections import Counter

import cutlass.cute as cute
import pytest
import torch
from sm100_cases import artifacts, make_config, parameters
from sm100_host import aligned, launch_of
from sm100_units import Global, TensorMap

from vllm_rose_plugin.kernels.gemm import sm100
from vllm_rose_plugin.kernels.gemm.config import MAX_DOMAINS, Epilogue
from vllm_rose_plugin.kernels.gemm.config_sm100 import K_TILE, THREADS, Sm100Config
from vllm_rose_plugin.kernels.gemm.domain_queue import counter_words
from vllm_rose_plugin.kernels.jit.sass import resource_usage, sass
from vllm_rose_plugin.kernels.jit.targets import limits_of

EXPERTS = {"num_groups": 16, "n": 3072, "k": 4096}
SWIGLU = EXPERTS | {"epilogue": Epilogue.SWIGLU}
QKV = {"n": 9216, "k": 4096, "bias": True, "out_dtype": "float16"}
LARGEST = {"sm_107a": 256}
"""Token tile of a plain pair, 192 elsewhere; with SWIGLU half as large."""
MOST_REGISTERS = {Epilogue.PLAIN: 72, Epilogue.SWIGLU: 168}
MOST_REGISTERS_SPLIT = 80
"""Where blocks share the k: the first one adds up the others' sums."""


@functools.cache
def instructions(cubin: bytes) -> list[str]:
    found = re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(.*?);", sass(cubin), re.MULTILINE)
    return [re.sub(r"^@!?U?P\S+ ", "", line).strip().split()[0] for line in found]


def check(config: Sm100Config, target: str) -> None:
    made = artifacts(config, target)
    usage, code = resource_usage(made.cubin), instructions(made.cubin)
    names = Counter(code)

    def count(start: str, *parts: str) -> int:
        return sum(n for name, n in names.items() if name.startswith(start) and all(part in name for part in parts))

    assert usage["stack"] == 0 and count("STL") == count("LDL") == 0, "spills"
    assert usage["registers"] <= (MOST_REGISTERS_SPLIT if config.split > 1 else MOST_REGISTERS[config.epilogue])
    assert f".reqntid {THREADS}, 1, 1" in made.ptx
    both = ".2CTA" if config.pair else ""
    assert set(n for n in names if n.startswith("UTCQMMA")) == {f"UTCQMMA{both}"}
    assert count("UTCQMMA") == config.halves * K_TILE // (64 if target == "sm_107a" else 32)
    assert count("UTCCP", "4x32dp128bit", both) == count("UTCCP") == config.stage_scale_tiles
    loads = (config.prefetch + 1) * config.halves
    weights = "UTMALDG.3D" if config.num_groups * config.halves > 1 else "UTMALDG.2D"
    tokens = (1 + config.token_scale_tiles) * (2 if config.prefetch else 1)
    assert count("UTMALDG") == 2 * loads + tokens, "each box of weights has its scales"
    assert count(weights) >= loads
    assert count("UTMALDG", "MULTICAST") == (config.token_scale_tiles if config.pair else 0)
    assert count("UTMALDG", both) == count("UTMALDG")
    assert count("UTCBAR", both) == count("UTCBAR") == 2
    assert count("LDTM.x" + str(config.chunk)) == count("LDTM") == config.halves * config.token_tile // config.chunk
    vector_stores = config.token_tile * 128 * (1 if config.halves == 2 else 2) // 16 // 128
    assert count("STG.E.128") == max(vector_stores, 1)
    assert count("STG") - count("STG.E.128") == (config.token_tile // config.chunk if config.halves == 2 else 0)
    before_wait = made.ptx[: made.ptx.index("griddepcontrol.wait")]
    assert before_wait.count("cp.async.bulk.tensor") == 2 * config.prefetch * config.halves, (
        "weights are asked for early"
    )
    assert count("ACQBULK") == 3 and count("PREEXIT") == 1, "every role waits for the previous kernel"
    assert count("ATOMG") == count("REDG") == count("RED.") == 0, "results by atomics"


@pytest.mark.parametrize(
    "name, tile, how, shape",
    [
        ("decode", 8, {}, EXPERTS),
        ("bias", 64, {}, QKV),
        ("split", 16, {"split": 4}, EXPERTS),
        ("swiglu", 32, {}, SWIGLU),
        ("prefill", 0, {"pair": True}, EXPERTS),
        ("swiglu prefill", 0, {"pair": True}, SWIGLU),
    ],
)
@pytest.mark.parametrize("target", ["sm_100f", "sm_107a"])
def test_every_kind(target, name, tile, how, shape):
    halves = 2 if shape is SWIGLU else 1
    tile = tile or LARGEST.get(target, 192) // halves
    check(make_config(target, tile, **how, **shape), target)


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
def test_the_other_targets(target):
    check(make_config(target, 32, pair=True, **SWIGLU), target)


@pytest.mark.parametrize(
    "target, tile, how",
    [
        ("sm_100f", 64, {"pair": True, "num_groups": 2, "n": 392}),
        ("sm_107a", 16, {"num_groups": 3, "n": 448, "epilogue": Epilogue.SWIGLU}),
        ("sm_107a", 8, {"split": 4, "n": 520}),
        ("sm_107a", 16, {"domains": 2, "num_groups": 3, "n": 1024, "epilogue": Epilogue.SWIGLU}),
        ("sm_100f", 64, {"domains": 3, "pair": True, "n": 768}),
    ],
)
def test_launch(target, tile, how):
    """What the host function launches: grid, cluster, memory, and the parameters that ``test_sm100_run`` makes up."""
    config = make_config(target, tile, k=1184, **how)
    function, arguments = sm100.build(config)
    compiled = cute.compile(function, *arguments, options=f"--enable-tvm-ffi --gpu-arch {target}")
    rows, weight_tiles, token_tiles = (
        77,
        config.num_groups * config.halves * config.part_row_blocks * config.k_tiles,
        40,
    )
    parts = [
        (
            aligned((config.num_groups, config.n // config.domains, config.k), torch.uint8),
            aligned((weight_tiles * 512,), torch.uint8),
        )
        for _ in range(config.domains)
    ]
    tensors = {
        "tokens": aligned((rows, config.k), torch.uint8),
        "token_scales": aligned((token_tiles * 512,), torch.uint8),
        "offsets": aligned((config.num_groups + 1,), torch.int32),
        "counts": aligned((config.num_groups,), torch.int32),
        "bias": aligned((4,), torch.float32),
        "out": aligned((rows, config.columns), torch.uint8 if config.halves == 2 else torch.bfloat16),
        "out_scales": aligned((4096,), torch.uint8),
    }
    if config.domains > 1:
        tensors["sm_domains"] = aligned((212,), torch.int32)
        tensors["counters"] = aligned((counter_words(config.domains),), torch.int32)
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    places["parts"] = [(codes.data_ptr(), scales.data_ptr()) for codes, scales in parts]
    wanted = parameters(config, places, rows, weight_tiles, token_tiles, 212)
    filled = parts + parts[-1:] * (MAX_DOMAINS - len(parts)) if config.domains > 1 else parts
    operands = [tensor for part in filled for tensor in part]
    grid = config.grid(sm_count=100, num_rows=rows)
    launch = launch_of(compiled, [*operands, *tensors.values(), grid], [len(p) for p in wanted])
    assert launch.grid == (grid, 1, 1) and launch.block == (THREADS, 1, 1) and launch.pdl
    assert launch.cluster == ((config.blocks, 1, 1) if config.blocks > 1 else None)
    assert launch.shared == config.shared_bytes <= limits_of(target).shared_memory
    for mine, theirs in zip(wanted, launch.params, strict=True):
        if len(mine) == 128:
            a, b = TensorMap(mine, Global()), TensorMap(theirs, Global())
            assert (a.address, a.item, a.swizzle) == (b.address, b.item, b.swizzle)
            assert (a.strides, a.sizes, a.boxes) == (b.strides, b.sizes, b.boxes)
        else:
            assert mine[:8] == theirs[:8]
    columns = re.search(r"mov\.b32 \t%r\d+, (\d+);\n\ttcgen05\.alloc", artifacts(config, target).ptx)
    assert int(columns[1]) == config.tmem_columns <= limits_of(target).tmem_columns
