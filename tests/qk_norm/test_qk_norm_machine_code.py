"""The kernel's machine code on every target: widest accesses, no spills, few registers, nothing read too early."""

import re
from collections import Counter

import pytest
import torch

from vllm_rose_plugin.kernels.jit.compile import compile_to_artifacts
from vllm_rose_plugin.kernels.jit.sass import resource_usage, sass
from vllm_rose_plugin.kernels.jit.targets import LIMITS
from vllm_rose_plugin.kernels.qk_norm.config import choose_config
from vllm_rose_plugin.kernels.qk_norm.kernel import build

TARGETS = sorted(LIMITS)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DECODE, PREFILL = 8, 1 << 20

# (changes to the Qwen3-235B case, registers allowed with 128-bit accesses, with 256-bit accesses)
CASES = {
    "decode": ({"num_tokens": DECODE}, 32, 40),
    "prefill": ({}, 64, 72),
    "prefill fp16 64": ({"head_dim": 64, "dtype": FP16, "weight_dtype": FP16}, 64, 72),
    "prefill 256": ({"head_dim": 256}, 64, 72),
    "prefill gemma": ({"head_dim": 256, "weight_dtype": FP32, "weight_offset": 1.0}, 80, 88),
    "decode rope": ({"num_tokens": DECODE, "rotary_dim": 128, "cos_sin_dtype": BF16}, 40, 64),
    "prefill rope": ({"rotary_dim": 128, "cos_sin_dtype": BF16}, 80, 96),
    "prefill rope fp32 cache": ({"rotary_dim": 128, "cos_sin_dtype": FP32}, 80, 104),
    "prefill rope interleaved": ({"rotary_dim": 128, "cos_sin_dtype": FP32, "interleaved": True}, 80, 88),
    "prefill rope qwen3-next": (
        {"head_dim": 256, "rotary_dim": 64, "cos_sin_dtype": BF16, "weight_offset": 1.0},
        88,
        96,
    ),
}


def compiled(target: str, changes: dict):
    arguments = {
        "num_tokens": PREFILL,
        "num_q_heads": 64,
        "num_kv_heads": 4,
        "head_dim": 128,
        "dtype": BF16,
        "weight_dtype": BF16,
        "eps": 1e-6,
        "weight_offset": 0.0,
        "alignment": 32,
        "widest_load_bits": LIMITS[target].widest_access,
        "sm_count": LIMITS[target].sm_count,
    }
    config = choose_config(**{**arguments, **changes})
    made = compile_to_artifacts(family="qk_norm", config=config, build=build, target=target)
    return config, sass(made.cubin), resource_usage(made.cubin)


def accesses(code: str) -> Counter:
    return Counter(re.findall(r"\b((?:LDG|STG)\.E[\w.]*) ", code))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_widest_accesses_no_spills_few_registers(target, case):
    changes, narrow_limit, wide_limit = CASES[case]
    config, code, usage = compiled(target, changes)
    wide = LIMITS[target].widest_access == 256
    assert usage["registers"] <= (wide_limit if wide else narrow_limit)
    assert usage["stack"] == 0 and not re.search(r"\b(STL|LDL)\b", code)

    suffix = "ENL2.256" if wide else "128"
    found = accesses(code)
    assert found[f"STG.E.{suffix}"] == config.heads_per_lane
    assert {name for name in found if name.startswith("STG")} == {f"STG.E.{suffix}"}
    assert found[f"LDG.E.{suffix}"] >= config.heads_per_lane

    # The sum of squares: one butterfly per halving of a group, per head.
    steps = config.lanes_per_head.bit_length() - 1
    assert len(re.findall(r"SHFL\.BFLY", code)) == steps * config.heads_per_lane
    assert not re.search(r"\bBAR\b", code)  # heads never wait for each other

    # Everything is read after the wait, the next kernel is let go, and the weights are on their way to L2 before.
    first_load, wait = code.index("LDG"), code.index("ACQBULK")
    assert wait < first_load and "PREEXIT" in code
    assert code.index("CCTL.E.PF2") < wait


@pytest.mark.parametrize("alignment, suffix, times", [(2, "U16", 8), (4, "", 4), (8, "64", 2), (16, "128", 1)])
@pytest.mark.parametrize("target", ["sm_90a", "sm_100f"])
def test_unaligned_heads_get_narrower_accesses(target, alignment, suffix, times):
    _, code, usage = compiled(target, {"num_tokens": DECODE, "alignment": alignment, "head_dim": 64})
    assert usage["stack"] == 0
    found = accesses(code)
    assert found[f"STG.E.{suffix}".rstrip(".")] == times
    assert sum(count for name, count in found.items() if name.startswith("STG")) == times
    # Besides the weights, in one load.
    assert sum(count for name, count in found.items() if name.startswith("LDG")) == times + 1


def test_all_loads_are_issued_before_the_first_result_is_needed():
    config, code, _ = compiled("sm_90a", {})
    first_use = code.index("SHFL")
    assert len(re.findall(r"LDG\.E\.128", code[:first_use])) >= config.heads_per_lane
