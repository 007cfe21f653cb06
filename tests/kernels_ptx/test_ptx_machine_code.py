"""Every device function compiles for every target, and its instruction is in the machine code."""

import re

import pytest
from ptx_kernels import PtxCase, build

from vllm_rose_plugin.kernels.jit.compile import compile_to_artifacts
from vllm_rose_plugin.kernels.jit.sass import resource_usage, sass
from vllm_rose_plugin.kernels.jit.targets import LIMITS
from vllm_rose_plugin.kernels.ptx.grid_barrier import barrier_blocks
from vllm_rose_plugin.kernels.ptx.reduce import warp_sum
from vllm_rose_plugin.kernels.ptx.wide import access_bits

TARGETS = sorted(LIMITS)
SMALL = 24
"""Registers of any of these kernels: they do one thing each."""


def compiled(target: str, kernel: str, *arguments) -> tuple[str, str]:
    """PTX and disassembly."""
    made = compile_to_artifacts(family="ptx", config=PtxCase(kernel, arguments), build=build, target=target)
    usage = resource_usage(made.cubin)
    assert usage["stack"] == 0 and usage["registers"] <= SMALL
    code = sass(made.cubin)
    assert not re.search(r"\b(STL|LDL)\b", code)
    return made.ptx, code


def in_order(code: str, *patterns: str) -> bool:
    return re.search(r"\b.*?\b".join(patterns), code, re.S) is not None


@pytest.mark.parametrize("scope", ["gpu", "sys"])
@pytest.mark.parametrize("target", TARGETS)
def test_release_and_acquire(target, scope):
    strong = scope.upper()
    writes = {
        "store": (f"st.release.{scope}", rf"STG\.E\.STRONG\.{strong}"),
        "red": (f"red.release.{scope}", rf"REDG\.E\.ADD\.S32\.STRONG\.{strong}"),
        "add": ("acq_rel", rf"ATOMG\.E\.ADD\S*\.STRONG\.{strong}"),
    }
    for flag, (instruction, machine) in writes.items():
        ptx, code = compiled(target, "message", scope, flag)
        assert instruction in ptx and f"ld.acquire.{scope}" in ptx and f"ld.relaxed.{scope}" in ptx
        # Release: the data, a fence, the flag. Acquire: the flag, then nothing from a stale L1.
        assert in_order(code, r"STG\.E ", rf"MEMBAR\.\w+\.{strong}", machine)
        assert in_order(code, rf"LDG\.E\.STRONG\.{strong}", r"CCTL\.IVALL")


@pytest.mark.parametrize("target", TARGETS)
def test_multimem(target):
    """Read, never run: it needs a multicast mapping."""
    sums = "F32ADD" if target == "sm_90a" else "HPADD"
    loads = {
        "bf16": rf"LDGMC\.E\.{sums}\.BF16x8",
        "fp16": rf"LDGMC\.E\.{sums}\.F16x8",
        "fp32": r"LDGMC\.E\.ADD\.F32x4",
    }
    reds = {"bf16": r"REDG\.E\.ADD\.BF16x8", "fp16": r"REDG\.E\.ADD\.F16x8", "fp32": r"REDG\.E\.ADD\.F32x4"}
    for dtype, load in loads.items():
        scope = "gpu" if dtype == "fp16" else "sys"
        ptx, code = compiled(target, "multimem", dtype, scope)
        assert re.search(load, code) and re.search(reds[dtype], code)
        assert "multimem.st.weak.global.v4" in ptx and "STG.E.128" in code
        assert f"multimem.red.release.{scope}.global.add" in ptx
        assert in_order(code, rf"MEMBAR\.\w+\.{scope.upper()}", rf"REDG\.E\.ADD\.S32\.STRONG\.{scope.upper()}")


@pytest.mark.parametrize("target", TARGETS)
def test_wide_accesses_and_hints(target):
    marks = {"NORMAL": "", "EVICT_FIRST": r"\.EF", "EVICT_LAST": r"\.EL", "NO_ALLOCATE": r"\.NA"}
    wide = LIMITS[target].widest_access
    for hint, mark in marks.items():
        _, code = compiled(target, "copy", 128, hint, hint)
        assert re.search(rf"LDG\.E{mark}\.128 ", code) and re.search(rf"STG\.E{mark}\.128 ", code)
        assert "CCTL.E.PF2" in code
        _, code = compiled(target, "copy", 256, hint, hint)
        width, times = (r"\.ENL2\.256", 1) if wide == 256 else (r"\.128", 2)
        assert len(re.findall(rf"LDG\.E{mark}{width} ", code)) == times
        assert len(re.findall(rf"STG\.E{mark}{width} ", code)) == times


@pytest.mark.parametrize("target", TARGETS)
def test_reductions_shuffle_within_their_group(target):
    for lanes in (32, 16, 8):
        _, code = compiled(target, "reduce", lanes)
        offsets = [int(offset, 16) for offset in re.findall(r"SHFL\.BFLY PT, R\d+, R\d+, (0x\w+),", code)]
        expected = [1 << i for i in range(lanes.bit_length() - 1)]
        assert sorted(offsets) == sorted(expected * 2)  # a sum and a maximum
        assert len(re.findall(r"SHFL\.IDX", code)) == 1


@pytest.mark.parametrize("target", TARGETS)
def test_grid_barrier(target):
    _, code = compiled(target, "rounds", 3, 8)
    arrive = (r"BAR\.SYNC", r"MEMBAR\.\w+\.GPU", r"ATOMG\.E\.ADD\S*\.STRONG\.GPU")
    assert in_order(code, *arrive, r"LDG\.E\.STRONG\.GPU", r"BAR\.SYNC")


@pytest.mark.parametrize("target", TARGETS)
def test_pdl(target):
    ptx, code = compiled(target, "chain")
    assert "griddepcontrol.wait" in ptx and "griddepcontrol.launch_dependents" in ptx
    assert in_order(code, "PREEXIT", "ACQBULK", r"LDG\.E")  # nothing is read before the wait


@pytest.mark.parametrize("target", TARGETS)
def test_deadline_is_looked_at_in_every_round(target):
    _, code = compiled(target, "patience")
    loop = re.search(r"^\.(L_x_\d+):((?:(?!^\.L_x_).)*?BRA[^\n]*`\(\.\1\))", code, re.S | re.M)
    assert loop, code
    assert "LDG.E.STRONG.SYS" in loop[2] and "SR_GLOBALTIMERLO" in loop[2]


def test_values_that_are_refused():
    assert barrier_blocks(wanted=500, sm_count=132) == 132
    assert barrier_blocks(wanted=500, sm_count=132, blocks_per_sm=2) == 264
    assert barrier_blocks(wanted=5, sm_count=132) == 5
    with pytest.raises(ValueError, match="at least 1"):
        barrier_blocks(wanted=0, sm_count=132)
    with pytest.raises(ValueError, match="power of two up to 32"):
        warp_sum(1.0, lanes=12)
    with pytest.raises(ValueError, match="16, 32, 64, 128 or 256"):
        access_bits(4, 32, 512)
    with pytest.raises(ValueError, match="power of two"):
        access_bits(3, 32, 128)
    assert access_bits(16, 16, 256) == 256 and access_bits(8, 16, 256) == 128 and access_bits(8, 32, 16) == 32
    with pytest.raises(ValueError, match="scope"):
        compile_to_artifacts(family="ptx", config=PtxCase("message", ("cta", "store")), build=build, target=TARGETS[0])
