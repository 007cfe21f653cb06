"""What the compiler makes of the kernels, for every target; multimem is read here and never run."""

import re

import pytest
from ranks_machine import artifacts

from vllm_rose_plugin.kernels.all_reduce.config import (
    ITEM_BYTES,
    PEERS_AT_ONCE,
    Access,
    Algorithm,
    AllReduceConfig,
    Tuning,
    choose_plan,
)
from vllm_rose_plugin.kernels.jit.sass import resource_usage, sass
from vllm_rose_plugin.kernels.jit.targets import FAMILY_TARGET, TARGETS

pytestmark = pytest.mark.slow
ALL_TARGETS = sorted({*TARGETS.values(), FAMILY_TARGET})
ONE, TWO = Algorithm.ONE_SHOT, Algorithm.TWO_SHOT
PEERS, MULTIMEM = Access.PEERS, Access.MULTIMEM
SMALL, LARGE = 8192, 2**26


def config_of(target, size=2, algorithm=ONE, access=PEERS, num_bytes=SMALL, *, zero_copy=False, **changes):
    return choose_plan(
        **{
            "num_bytes": num_bytes,
            "dtype": "bfloat16",
            "group_size": size,
            "access": access,
            "zero_copy_in": zero_copy,
            "zero_copy_out": zero_copy,
            "alignment": 32,
            "target": target,
            "sm_count": 132,
            "tuning": Tuning(algorithm, 4 if num_bytes == SMALL else 33),
            **changes,
        }
    ).config


def compiled(config: AllReduceConfig, target: str) -> tuple[str, list[str]]:
    """(PTX, instructions); whatever it is, it must not spill, read stale values or mix up the accesses."""
    made = artifacts(config, target)
    found = re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(.*?);", sass(made.cubin), re.MULTILINE)
    code = [re.sub(r"^@!?U?P\d+ ", "", line).strip() for line in found]
    usage = resource_usage(made.cubin)
    assert usage["stack"] == 0 and not any(line.startswith(("STL", "LDL")) for line in code), "spills"
    assert usage["registers"] <= 65536 // config.threads
    assert not any("CONSTANT" in line for line in code), "a load that may be stale"
    has_multimem = "multimem." in made.ptx or any(line.startswith("LDGMC") for line in code)
    assert has_multimem == (config.access is MULTIMEM)
    return made.ptx, code


def positions(code, pattern):
    return [i for i, line in enumerate(code) if re.match(pattern, line)]


@pytest.mark.parametrize("target", ALL_TARGETS)
@pytest.mark.parametrize("algorithm", [ONE, TWO])
@pytest.mark.parametrize("access", [PEERS, MULTIMEM])
def test_flags_are_released_and_acquired_over_the_whole_system(target, algorithm, access):
    ptx, code = compiled(config_of(target, 4, algorithm, access), target)
    waits = 1 if algorithm is ONE else 2
    # A flag for each wait, and the word on the host.
    assert ptx.count("st.release.sys.global.b64") == 2 * waits
    assert "ld.acquire.sys.global.b64" in ptx and "ld.acquire.sys.global.b32" not in ptx
    flags = positions(code, r"STG\.E\.64\.STRONG\.SYS")
    polls = positions(code, r"LDG\.E\.64\.STRONG\.SYS")
    assert len(flags) == 2 * waits and len(polls) == 2 * waits
    for flag in flags:
        assert any(line.startswith("MEMBAR.ALL.SYS") for line in code[flag - 4 : flag]), "not a release"
    for poll in polls:
        assert any(line.startswith("CCTL.IVALL") for line in code[poll : poll + 4]), "not an acquire"
    barriers = positions(code, r"BAR\.SYNC")
    assert len(barriers) == 1 + 2 * waits
    for wait in range(waits):
        before, after = barriers[1 + 2 * wait], barriers[2 + 2 * wait]
        inside = [i for i in flags + polls if before < i < after]
        assert len(inside) == 4, "flags speak for the block only between two barriers"
        assert min(i for i in flags if i > before) < min(i for i in polls if i > before), "waits before it tells"
    assert any("SR_GLOBALTIMER" in line for line in code)
    wait = positions(code, "ACQBULK")[0]
    assert wait < positions(code, "PREEXIT")[0] and wait < min(positions(code, "LDG"))


@pytest.mark.parametrize("target", ALL_TARGETS)
@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_peers_read_the_widest_vectors_all_at_once(target, dtype):
    for size in (2, 9, 72) if dtype == "bfloat16" else (8,):
        for algorithm, num_bytes in ((ONE, SMALL), (ONE, LARGE), (TWO, LARGE)):
            config = config_of(target, size, algorithm, num_bytes=num_bytes, dtype=dtype)
            assert config.vector_bytes == (16 if target == "sm_90a" else 32)
            _, code = compiled(config, target)
            wide = r"LDG\.E\.128" if config.vector_bytes == 16 else r"LDG\.E\.ENL2\.256"
            start = positions(code, r"BAR\.SYNC")[2]
            adds = positions(code, r"FADD|F?HADD2|HFMA2\.MMA|HFMA2\.BF16|HFMA2 .*BF16")
            first = min(i for i in adds if i > start)
            at_once = [i for i in positions(code, wide) if start < i < first]
            # Of nine ranks the ninth may come along.
            assert len(at_once) >= min(size, PEERS_AT_ONCE) * config.unroll, (size, algorithm, num_bytes)


@pytest.mark.parametrize("target", ALL_TARGETS)
def test_multimem_lets_the_switch_add(target):
    add = {"bfloat16": "BF16x8", "float16": "F16x8", "float32": "F32x4"}
    for dtype, form in add.items():
        for algorithm in (ONE, TWO):
            for num_bytes in (SMALL, LARGE) if dtype == "bfloat16" else (LARGE,):
                config = config_of(target, 8, algorithm, MULTIMEM, num_bytes, dtype=dtype)
                ptx, code = compiled(config, target)
                loads = positions(code, r"LDGMC")
                rest = 1 if algorithm is ONE else 0  # the vector of which the tensor has only a part
                assert len(loads) == config.unroll + rest
                assert all(form in code[i] for i in loads)
                if dtype != "float32":
                    assert ptx.count(".acc::f32.") == len(loads), "sums of 16 bits"
                assert ptx.count("multimem.st.") == (config.unroll if algorithm is TWO else 0)
                assert ptx.count("fence.proxy.alias") == (1 if algorithm is ONE else 2)
                assert not positions(code, "FADD|F?HADD2")


@pytest.mark.parametrize("target", ALL_TARGETS)
@pytest.mark.parametrize("access", [PEERS, MULTIMEM])
def test_zero_copy_copies_nothing(target, access):
    config = config_of(target, 4, TWO, access, LARGE, zero_copy=True)
    assert not config.copy_in and not config.copy_out and config.algorithm is TWO
    _, code = compiled(config, target)
    loads = positions(code, r"LDG\.E\.128|LDG\.E\.ENL2|LDGMC")
    barriers = positions(code, r"BAR\.SYNC")
    assert loads and all(barriers[2] < i < barriers[3] for i in loads)
    assert not positions(code, r"\S+\.U16")


@pytest.mark.parametrize("alignment", [2, 4, 8])
def test_unaligned_tensors_are_read_in_narrower_pieces_and_the_buffer_is_not(alignment):
    config = config_of("sm_90a", 2, num_bytes=LARGE, alignment=alignment)
    _, code = compiled(config, "sm_90a")
    start = positions(code, r"BAR\.SYNC")[1]
    name = {2: r"LDG\.E\.U16", 4: r"LDG\.E ", 8: r"LDG\.E\.64 "}[alignment]
    assert len([i for i in positions(code, name) if i < start]) >= config.unroll * 16 // alignment
    assert len([i for i in positions(code, r"LDG\.E\.128") if i > start]) >= 2 * config.unroll
