"""What the compiler makes of a weight in parts on sm_90: the plain kernel's main loop, and tickets around it."""

import re
from dataclasses import replace

import pytest
from test_sm90_machine_code import CASES, check, compiled, count

from vllm_rose_plugin.kernels.gemm.config import PRODUCER_REGISTERS, consumer_registers

DRAW, SM = "ATOMG.E.ADD.STRONG.GPU", "S2R"


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", ["w13 m=8", "w13 m=128", "w2 m=32", "w2 m=64"])
def test_two_domains(name, early):
    config = replace(CASES[name], domains=2, early_counts=early)
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
