"""What the compiler makes of the fused kernel, for every target."""

import re

import pytest
from norm_ranks import FP32_SCALES, TILED, artifacts, norm_plan

from vllm_rose_plugin.kernels.all_reduce.config import Access, Algorithm
from vllm_rose_plugin.kernels.contracts import TokenFormat
from vllm_rose_plugin.kernels.jit.sass import resource_usage, sass
from vllm_rose_plugin.kernels.jit.targets import LIMITS

pytestmark = pytest.mark.slow
ONE, TWO = Algorithm.ONE_SHOT, Algorithm.TWO_SHOT
PEERS, MULTIMEM = Access.PEERS, Access.MULTIMEM
PERMUTED = TokenFormat.BF16_PERMUTED
SIZES = ((2, 1, 4096), (2, 4096, 4096), (4, 4096, 7168), (8, 1, 4096), (8, 4096, 4096), (72, 4096, 8192))
"""Ranks, rows, hidden_size."""


def compiled(config, target: str) -> tuple[str, list[str]]:
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


@pytest.mark.parametrize(
    ("token_format", "target"),
    [(token_format, "sm_90a") for token_format in (None, FP32_SCALES, PERMUTED)]
    + [(token_format, target) for token_format in (None, TILED) for target in sorted({*LIMITS} - {"sm_90a"})],
)
@pytest.mark.parametrize("algorithm", [ONE, TWO])
def test_no_size_spills_and_loads_are_the_widest(algorithm, token_format, target):
    """In the formats that the target's linear layers read."""
    for size, num_rows, hidden_size in SIZES:
        plan = norm_plan(
            num_rows, hidden_size, size=size, algorithm=algorithm, blocks=66, target=target, token_format=token_format
        )
        config = plan.config
        assert config.vector_bytes == (16 if target == "sm_90a" else 32)
        _, code = compiled(config, target)
        wide = r"LDG\.E\.128" if config.vector_bytes == 16 else r"LDG\.E\.ENL2\.256"
        # A row of the input and of the weight, one of each rank, and the residual.
        assert len(positions(code, wide)) >= config.per_thread * (3 + min(size, 8)), (size, num_rows, hidden_size)


@pytest.mark.parametrize("target", sorted(LIMITS))
@pytest.mark.parametrize("algorithm", [ONE, TWO])
@pytest.mark.parametrize("access", [PEERS, MULTIMEM])
def test_flags_are_released_and_acquired_over_the_whole_system(target, algorithm, access):
    plan = norm_plan(4096, 4096, size=4, algorithm=algorithm, access=access, blocks=66, target=target)
    ptx, code = compiled(plan.config, target)
    waits = 1 if algorithm is ONE else 2
    assert ptx.count("st.release.sys.global.b64") == 2 * waits  # a flag for each wait, and the word on the host
    flags, polls = (positions(code, rf"{name}\.E\.64\.STRONG\.SYS") for name in ("STG", "LDG"))
    assert len(flags) == 2 * waits and len(polls) == 2 * waits
    assert all(any(line.startswith("MEMBAR.ALL.SYS") for line in code[i - 4 : i]) for i in flags), "not a release"
    assert all(any(line.startswith("CCTL.IVALL") for line in code[i : i + 4]) for i in polls), "not an acquire"
    wait = positions(code, "ACQBULK")[0]
    assert wait < positions(code, "PREEXIT")[0] and wait < min(positions(code, "LDG"))
    if access is MULTIMEM:
        assert ptx.count("fence.proxy.alias") == waits
        assert ptx.count(".acc::f32.") == len(positions(code, "LDGMC")) == plan.config.rows * plan.config.per_thread
        assert ptx.count("multimem.st.") == (plan.config.rows * plan.config.per_thread if algorithm is TWO else 0)


@pytest.mark.parametrize("target", sorted(LIMITS))
def test_one_shot_keeps_the_row_in_registers(target):
    """The sum goes from the ranks' memory to the result: nothing is stored between but the residual."""
    plan = norm_plan(1, 4096, size=2, blocks=1, target=target)
    _, code = compiled(plan.config, target)
    wide = r"STG\.E\.128" if plan.config.vector_bytes == 16 else r"STG\.E\.ENL2\.256"
    assert len(positions(code, wide)) == 3 * plan.config.per_thread  # the copy of the input, residual, result
    assert len(positions(code, r"MUFU\.RSQ")) == 1
