"""What the compiler makes of the kernels, for every target."""

import re

import pytest
from exchange_cases import shape_of
from exchange_machine import SM_COUNT, artifacts

from vllm_rose_plugin.kernels.dp_combine import config as combine
from vllm_rose_plugin.kernels.dp_dispatch import config as dispatch
from vllm_rose_plugin.kernels.dp_exchange.layout import Payload
from vllm_rose_plugin.kernels.jit.sass import resource_usage, sass
from vllm_rose_plugin.kernels.jit.targets import TARGETS

pytestmark = pytest.mark.slow
FEW, MANY = 8, 2048


def shape_for(size=2, **changes):
    return shape_of(size, **{"hidden_size": 4096, "top_k": 8, "experts_each": 64, "max_tokens": MANY, **changes})


def compiled(config, target: str) -> tuple[str, list[str]]:
    """(PTX, instructions); whatever it is, it must not spill nor read stale values."""
    made = artifacts(config, target)
    found = re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(.*?);", sass(made.cubin), re.MULTILINE)
    code = [re.sub(r"^@!?U?P\d+ ", "", line).strip() for line in found]
    usage = resource_usage(made.cubin)
    assert usage["stack"] == 0 and not any(line.startswith(("STL", "LDL")) for line in code), "spills"
    assert usage["registers"] <= 65536 // getattr(config, "send", config).threads
    assert not any("CONSTANT" in line for line in code), "a load that may be stale"
    return made.ptx, code


def positions(code, pattern):
    return [i for i, line in enumerate(code) if re.match(pattern, line)]


def assert_releases(code, count):
    flags = positions(code, r"STG?\.E\.64\.STRONG\.SYS")
    assert len(flags) == count
    for flag in flags:
        assert any(line.startswith("MEMBAR.ALL.SYS") for line in code[flag - 6 : flag]), "not a release"


def assert_acquires(code, waits):
    polls = positions(code, r"LDG?\.E\.64\.STRONG\.SYS")
    assert len(polls) == 2 * waits  # the first look, and those after it
    for poll in polls:
        assert any(line.startswith("CCTL.IVALL") for line in code[poll : poll + 4]), "not an acquire"
    assert any("SR_GLOBALTIMER" in line for line in code)


def assert_waits_first(code):
    wait = positions(code, "ACQBULK")[0]
    assert wait < positions(code, "PREEXIT")[0] and wait < min(positions(code, r"LDG?\.E"))


def assert_waits_before_it_writes(code):
    """Flags are looked at before; but for the word on the host, nothing is stored."""
    wait = positions(code, "ACQBULK")[0]
    assert wait < positions(code, "PREEXIT")[0]
    assert min(positions(code, r"LDG?\.E\.64\.STRONG\.SYS")) < wait, "doesn't start early"
    plain = [i for i in positions(code, r"STG?\.E") if "STRONG.SYS" not in code[i]]
    assert wait < min(plain)


@pytest.mark.parametrize("target", [*sorted(TARGETS.values()), "sm_100f"])
@pytest.mark.parametrize("num_tokens", [FEW, MANY])
def test_dispatch_sends_128_bits_and_releases_over_the_whole_system(target, num_tokens):
    for size, input, payload in (
        (2, "bfloat16", Payload.MXFP8),
        (72, "mxfp8", Payload.MXFP8),
        (2, "bfloat16", Payload.BF16),
    ):
        if size == 72 and num_tokens == FEW:
            continue
        shape = shape_for(size, payload=payload, experts_each=4 if size == 72 else 64)
        config, _ = dispatch.choose_send(num_tokens=num_tokens, shape=shape, input=input, sm_count=SM_COUNT)
        assert (config.team == 32) == (num_tokens == MANY)
        ptx, code = compiled(config, target)
        assert ptx.count("st.release.sys.global.b64") == 2, "a flag for plans, one for tokens"
        assert_releases(code, 2)
        assert_waits_first(code)
        stores = len(positions(code, r"STG?\.E\.128"))
        each = 2 if payload is Payload.BF16 else 1
        assert stores == config.unroll * each + 1, "codes of every vector, and four words of a plan"
        assert not positions(code, r"STG?\.E\.U8")
        loads = len(positions(code, r"LDG?\.E\.128"))
        assert loads == config.unroll * (1 if input == "mxfp8" else 2)


@pytest.mark.parametrize("target", [*sorted(TARGETS.values()), "sm_100f"])
@pytest.mark.parametrize("rows", [FEW, MANY])
def test_dispatch_receives_with_acquires_and_copies_128_bits(target, rows):
    for payload in Payload:
        config, _ = dispatch.choose_receive(total_rows=rows, shape=shape_for(payload=payload), sm_count=SM_COUNT)
        ptx, code = compiled(config, target)
        assert "ld.acquire.sys.global.b64" in ptx and "ld.acquire.sys.global.b32" not in ptx
        assert_acquires(code, 2)
        assert_releases(code, 2)  # the word on the host, of either wait
        assert_waits_before_it_writes(code)
        scales = 1 if payload is Payload.MXFP8 else 0
        assert len(positions(code, r"STG?\.E\.128")) == len(positions(code, r"LDG?\.E\.128")) == config.unroll + scales


@pytest.mark.parametrize("target", [*sorted(TARGETS.values()), "sm_100f"])
@pytest.mark.parametrize("rows", [FEW, MANY])
def test_combine_sends_and_adds_128_bits(target, rows):
    config, _ = combine.choose_send(total_rows=rows, shape=shape_for(), sm_count=SM_COUNT)
    _, code = compiled(config, target)
    assert_releases(code, 1)
    assert_waits_first(code)
    assert len(positions(code, r"STG?\.E\.128")) == len(positions(code, r"LDG?\.E\.128")) == config.unroll
    for size in (2, 72):
        shape = shape_for(size, experts_each=4)
        add, _ = combine.choose_receive(num_tokens=rows, shape=shape, sm_count=SM_COUNT)
        _, code = compiled(add, target)
        assert_acquires(code, 2)  # for the first token, and for those after it
        assert_waits_before_it_writes(code)
        loads = positions(code, r"LDG?\.E\.128")
        assert len(loads) == add.unroll * shape.slots
        first = min(i for i in positions(code, r"FADD|F?HADD2|HFMA2") if i > loads[0])
        assert len([i for i in loads if i < first]) == len(loads), "adds before all loads are under way"
        assert len(positions(code, r"STG?\.E\.128")) == add.unroll


@pytest.mark.parametrize("target", [*sorted(TARGETS.values()), "sm_100f"])
def test_both_halves_in_one_launch(target):
    for size, hidden_size in ((2, 4096), (72, 4096), (16, 7168)):
        shape = shape_for(size, experts_each=16 if size == 16 else 4, hidden_size=hidden_size)
        rows = {"num_tokens": 2, "total_rows": 2 * size, "shape": shape, "sm_count": SM_COUNT}
        config, _ = dispatch.choose_fused(input="bfloat16", **rows)
        _, code = compiled(config, target)
        assert_releases(code, 2 + 2)  # plans and tokens; the word on the host, of either wait
        assert_acquires(code, 2)
        assert_waits_first(code)
        assert len(positions(code, r"STG?\.E\.128")) == config.send.unroll + 1 + config.receive.unroll + 1
        config, _ = combine.choose_fused(**rows)
        _, code = compiled(config, target)
        assert_acquires(code, 2)
        assert_waits_first(code)
        assert len(positions(code, r"STG?\.E\.128")) == config.send.unroll + config.receive.unroll
