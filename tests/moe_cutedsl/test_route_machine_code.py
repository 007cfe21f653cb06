"""What the compiler makes of routing and dispatch for every target."""

import functools
import re

import pytest
import route_cases as cases

from vllm_rose_plugin.kernels.contracts import Activation, Rounding, TokenFormat
from vllm_rose_plugin.kernels.jit.sass import resource_usage, sass
from vllm_rose_plugin.kernels.moe_dispatch import config as dispatch
from vllm_rose_plugin.kernels.moe_route import config as route
from vllm_rose_plugin.kernels.mxfp8_quantize.config import widest_load

FORMATS = {"sm_90a": (TokenFormat.MXFP8_FP32_SCALES, TokenFormat.BF16_PERMUTED)}
THREADS_PER_SM = 2048
REGISTERS_PER_SM = 65536


@functools.cache
def instructions(cubin: bytes) -> list[str]:
    found = re.findall(r"^\s+/\*[0-9a-f]{4}\*/\s+(.*?);", sass(cubin), re.MULTILINE)
    return [re.sub(r"^@!?U?P\d+ ", "", line).strip() for line in found]


def code_of(config, target: str, *, most_registers: int) -> list[str]:
    """Instructions, once it is sure that nothing spills and that the kernel waits before it reads."""
    made = cases.made(config, target)
    code, usage = instructions(made.cubin), resource_usage(made.cubin)
    assert usage["stack"] == 0 and not any(line.startswith(("STL", "LDL")) for line in code), "spills"
    assert usage["registers"] <= most_registers, usage
    waits, triggers, loads = (
        next(i for i, line in enumerate(code) if line.startswith(name)) for name in ("ACQBULK", "PREEXIT", "LDG")
    )
    assert waits < triggers < loads, "the next kernel must not start, nor a value be read, before the wait"
    assert not any("CONSTANT" in line for line in code), "a load that may be stale"
    return code


def places(code: list[str], *names: str) -> list[int]:
    return [i for i, line in enumerate(code) if line.startswith(names)]


def model(target: str, token_format: TokenFormat, num_tokens: int, **how) -> dispatch.DispatchConfig:
    """Qwen3-235B on four ranks."""
    how = {"dtype": "bfloat16", "alignment": 1, "weighted": False, "activation": Activation.MXFP8, **how}
    return dispatch.choose_config(
        num_tokens=num_tokens,
        hidden_size=4096,
        top_k=8,
        num_experts=32,
        token_format=token_format,
        rounding=Rounding.RCEIL,
        load_alignment=widest_load(target),
        id_dtype="int32",
        has_map=True,
        sm_count=cases.SM_COUNT,
        **how,
    )


@pytest.mark.parametrize("id_dtype", route.ID_DTYPES)
@pytest.mark.parametrize("target", cases.TARGETS)
def test_route(target, id_dtype):
    config = route.choose_config(
        num_pairs=65536,
        num_experts=128,
        alignment=1,
        id_dtype=id_dtype,
        has_map=True,
        scale_rows=target != "sm_90a",
        sm_count=cases.SM_COUNT,
    )
    code = code_of(config, target, most_registers=64)
    matches = places(code, "MATCH.ANY")
    assert len(matches) == config.items
    weak = [i for i in places(code, "LDG") if "STRONG" not in code[i]]
    assert len(weak) == 2 * config.items and max(weak) < min(matches), "ids and map are all under way at once"
    assert sum(code[i].startswith("LDG.E.64") for i in weak) == (config.items if id_dtype == "int64" else 0)
    atomic = places(code, "ATOMG.E.ADD.STRONG.GPU")
    assert len(atomic) == 1 and any(i < atomic[0] for i in places(code, "MEMBAR.ALL.GPU"))
    sums = [i for i in places(code, "LDG.E.STRONG.GPU") if i > places(code, "BAR.SYNC")[3]]
    assert len(sums) == 8, "the blocks' counts, eight loads at a time"
    assert not any(line.startswith(("BRA", "BSSY")) for line in code[sums[0] : sums[-1]]), "they wait for each other"


@pytest.mark.parametrize("target", cases.TARGETS)
def test_prefill(target):
    for token_format in FORMATS.get(target, (TokenFormat.MXFP8_TCGEN05,)):
        config = model(target, token_format, 8192)
        assert config.route is None
        code = code_of(config, target, most_registers=48)  # five blocks to an SM
        loads = [i for i in places(code, "LDG") if i < places(code, "SHFL")[0]]
        assert len(loads) == {"sm_90a": 4}.get(target, 5) - (token_format is TokenFormat.BF16_PERMUTED)
        widest = "LDG.E.128" if target == "sm_90a" else "LDG.E.ENL2.256"
        assert any(code[i].startswith(widest) for i in loads)
        stores = places(code, "STG.E.128")
        copies = [i for i in stores if code[i].split()[-1] != "RZ"]
        assert len(copies) == config.top_k, "a row's part is one store"
        others = set(places(code, "STG")) - set(stores)
        per_row = 0 if token_format is TokenFormat.BF16_PERMUTED else 1
        fill = 3 if config.tiled else 0
        assert len(others) == config.top_k * per_row + fill and all(code[i].startswith("STG.E ") for i in others)
        conversions = sum(line.startswith("F2FP.SATFINITE.E4M3") for line in code)
        assert conversions == config.vector // 2, "a token is quantized once"


@pytest.mark.parametrize("target", cases.TARGETS)
def test_one_launch(target):
    for token_format in FORMATS.get(target, (TokenFormat.MXFP8_TCGEN05,)):
        config = model(target, token_format, 64)
        assert config.route is not None and config.route.items == 2
        code = code_of(config, target, most_registers=48)
        (flag,) = (i for i in places(code, "REDG", "RED") if "STRONG.GPU" in code[i] and is_release(code, i))
        assert any(places(code, "BAR.SYNC")[-1] > i for i in places(code, "LDG.E.STRONG.GPU"))
        polls = places(code, "LDG.E.STRONG.GPU")
        x_loads = [i for i in places(code, "LDG.E.128", "LDG.E.ENL2.256") if i < min(polls)]
        conversions = places(code, "F2FP.SATFINITE.E4M3")
        assert x_loads and max(conversions) < min(i for i in polls if i > min(conversions)), "quantized before the wait"
        assert flag not in polls
        copies = [i for i in places(code, "STG.E.128") if code[i].split()[-1] != "RZ"]
        assert len(copies) == config.top_k


@pytest.mark.parametrize("num_tokens", [64, 8192])
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_tokens_that_arrive_quantized(target, num_tokens):
    """Nothing is quantized; where the GEMM reads bf16, codes are converted once."""
    for token_format in FORMATS.get(target, (TokenFormat.MXFP8_TCGEN05,)):
        config = model(target, token_format, num_tokens, dtype="mxfp8")
        code = code_of(config, target, most_registers=48)
        assert not any(line.startswith("F2FP.SATFINITE.E4M3") for line in code)
        unpacked = sum(line.startswith("F2FP.F16.E4M3.UNPACK") for line in code)
        assert unpacked == (config.vector // 2 if token_format is TokenFormat.BF16_PERMUTED else 0)
        copies = [i for i in places(code, "STG.E.128") if code[i].split()[-1] != "RZ"]
        assert len(copies) == config.top_k


def is_release(code: list[str], at: int) -> bool:
    return any(line.startswith("MEMBAR.ALL.GPU") for line in code[max(0, at - 12) : at])


@pytest.mark.parametrize("target", cases.TARGETS)
def test_all_blocks_of_one_launch_fit_on_the_device(target):
    """The least favourable configs: as many blocks to an SM as the heuristic counts on."""
    for how in (
        {"dtype": "float32", "weighted": True},
        {"dtype": "bfloat16", "weighted": True, "alignment": 64},
        {"dtype": "mxfp8", "alignment": 128},
    ):
        token_format = TokenFormat.MXFP8_FP32_SCALES if target == "sm_90a" else TokenFormat.MXFP8_TCGEN05
        config = model(target, token_format, 200, **how)
        assert config.route is not None
        made = cases.made(config, target)
        registers = -(-resource_usage(made.cubin)["registers"] // 8) * 8
        blocks = min(REGISTERS_PER_SM // (registers * config.threads), THREADS_PER_SM // config.threads)
        assert blocks >= config.blocks_per_sm
        assert resource_usage(made.cubin)["stack"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90a", "sm_100f"])
@pytest.mark.parametrize("top_k", [10, 16])
def test_many_experts_to_a_token_do_not_spill(target, top_k):
    token_format = TokenFormat.MXFP8_FP32_SCALES if target == "sm_90a" else TokenFormat.MXFP8_TCGEN05
    for dtype, weighted in (("bfloat16", False), ("float32", True)):
        for num_tokens in (32, 20000):
            config = dispatch.choose_config(
                dtype=dtype,
                num_tokens=num_tokens,
                hidden_size=4096,
                top_k=top_k,
                num_experts=512,
                alignment=1,
                token_format=token_format,
                activation=Activation.MXFP8,
                rounding=Rounding.RCEIL,
                weighted=weighted,
                load_alignment=widest_load(target),
                id_dtype="int64",
                sm_count=cases.SM_COUNT,
            )
            code_of(config, target, most_registers=96 if weighted else 64)
