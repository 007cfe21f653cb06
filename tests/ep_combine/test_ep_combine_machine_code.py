"""What the compiler makes of the fused kernel, for every target."""

import re

import pytest
from ep_ranks import TARGETS, artifacts, ep_plan

from vllm_rose_plugin.kernels.all_reduce.config import Access
from vllm_rose_plugin.kernels.jit.sass import resource_usage, sass

pytestmark = pytest.mark.slow
PEERS, MULTIMEM = Access.PEERS, Access.MULTIMEM
CALLS = (
    # (tokens, H, top_k, shared dtype, ranks): decode of Qwen3-235B, Qwen3.5-397B, DeepSeek; few experts; many tokens
    (1, 4096, 8, None, 2),
    (64, 4096, 10, "bfloat16", 4),
    (8, 7168, 8, "bfloat16", 72),
    (2, 2688, 1, None, 3),
    (2048, 4096, 8, "bfloat16", 2),
    (2048, 4096, 2, None, 8),
    (64, 7168, 16, "bfloat16", 8),
)


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


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_widest_accesses_all_under_way_no_spills(call, target):
    num_tokens, hidden_size, top_k, shared_dtype, size = call
    plan = ep_plan(num_tokens, hidden_size, top_k, size=size, target=target, shared_dtype=shared_dtype)
    config = plan.config
    _, code = compiled(config, target)
    wide = {16: r"\.128", 32: r"\.ENL2\.256"}[config.vector_bytes]
    rows = positions(code, r"LDG\.E\.NA")
    assert len(rows) == (top_k + (shared_dtype is not None)) * config.combine.unroll
    assert rows == positions(code, rf"LDG\.E\.NA{wide} "), "rows of the experts are read in narrow pieces"
    # HFMA2 of -RZ and RZ puts a constant into a register.
    first_use = positions(code, r"F(ADD|MUL|FMA)|HADD|HMUL|HFMA(?!2(\.MMA)? R\d+, -RZ, RZ)")[0]
    assert rows[-1] < first_use, "a load of the experts' rows waits for work"
    assert not positions(code[: positions(code, r"LDG\.E\.64\.STRONG\.SYS")[0]], "FFMA"), "a product isn't rounded"
    # What the ranks have put there: not past 8 ranks at a time, all loads of a turn before its sums.
    of_ranks = [i for i in positions(code, rf"LDG\.E{wide} ") if i > first_use]
    assert len(of_ranks) >= min(size, 8) * config.sums
    assert len(positions(code, rf"STG\.E{wide} ")) == config.combine.unroll + config.sums


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("access", [PEERS, MULTIMEM])
def test_flags_are_released_and_acquired_over_the_whole_system(target, access):
    plan = ep_plan(64, 4096, 8, size=4, access=access, target=target, shared_dtype="bfloat16")
    ptx, code = compiled(plan.config, target)
    assert ptx.count("st.release.sys.global.b64") == 2  # a flag, and the word on the host
    flags, polls = (positions(code, rf"{name}\.E\.64\.STRONG\.SYS") for name in ("STG", "LDG"))
    assert len(flags) == len(polls) == 2
    assert all(any(line.startswith("MEMBAR.ALL.SYS") for line in code[i - 4 : i]) for i in flags), "not a release"
    assert all(any(line.startswith("CCTL.IVALL") for line in code[i : i + 4]) for i in polls), "not an acquire"
    wait = positions(code, "ACQBULK")[0]
    assert wait < positions(code, "PREEXIT")[0] and wait < min(positions(code, "LDG"))
    assert max(positions(code, r"LDG\.E\.NA")) < flags[0], "a rank says that its part is there while it still sums"
    if access is MULTIMEM:
        assert ptx.count("fence.proxy.alias") == 1
        assert ptx.count(".acc::f32.") == len(positions(code, "LDGMC")) == plan.config.sums
        assert "multimem.st" not in ptx
