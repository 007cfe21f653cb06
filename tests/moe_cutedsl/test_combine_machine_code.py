"""What the compiler makes of every config: widest accesses, all loads under way at once, no spills."""

import re

import combine_cases as cases
import pytest

from vllm_rose_plugin.kernels.jit.sass import resource_usage, sass
from vllm_rose_plugin.kernels.moe_combine.config import warm_configs

pytestmark = pytest.mark.slow
SHAPES = {
    "qwen3-235b": (4096, 8, None),
    "qwen3.5-397b": (4096, 10, "bfloat16"),
    "deepseek": (7168, 8, "bfloat16"),
    "one": (2688, 1, None),
    "three": (96, 3, None),
    "sixteen": (7168, 16, "bfloat16"),
}


def instructions(cubin: bytes) -> list[str]:
    found = re.findall(r"^\s+/\*[0-9a-f]{4}\*/\s+(.*?);", sass(cubin), re.MULTILINE)
    return [re.sub(r"^@!?U?P\d+ ", "", line).strip() for line in found]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", cases.TARGETS)
def test_widest_accesses_all_under_way_no_spills(target, shape):
    hidden_size, top_k, shared_dtype = SHAPES[shape]
    for config in warm_configs(
        hidden_size=hidden_size,
        top_k=top_k,
        dtype="bfloat16",
        out_dtype="bfloat16",
        weighted=True,
        target=target,
        sm_count=cases.SM_COUNT,
        shared_dtype=shared_dtype,
    ):
        cubin = cases.artifacts(config, target).cubin
        code, usage = instructions(cubin), resource_usage(cubin)
        assert usage["stack"] == 0 and not any(line.startswith(("STL", "LDL")) for line in code), "spills"
        # With 64 registers four blocks of 256 threads fit on an SM; 256-bit vectors leave room for two.
        few = config.vector == 8 and top_k <= 10 and config.unroll == 1
        assert usage["registers"] <= (64 if few else 128)

        wide = {8: "LDG.E.NA.128", 16: "LDG.E.NA.ENL2.256"}[config.vector]
        parts = top_k + (shared_dtype is not None)
        rows = [i for i, line in enumerate(code) if line.startswith("LDG.E.NA")]
        assert len(rows) == parts * config.unroll and all(code[i].startswith(wide + " ") for i in rows)
        small = [i for i, line in enumerate(code) if line.startswith("LDG") and i not in rows]
        assert len(small) == 2 * config.unroll * (4 * top_k // config.slot_bytes)
        stores = [line for line in code if line.startswith("STG")]
        assert len(stores) == config.unroll
        assert all(line.startswith({8: "STG.E.128", 16: "STG.E.ENL2.256"}[config.vector]) for line in stores)

        last = max(rows + small)
        early = [line for line in code[:last] if re.match(r"F(ADD|MUL|FMA|2F)|STG", line)]
        assert not early, "loads wait for work"
        assert not any(line.startswith("FFMA") for line in code)

        wait = next(i for i, line in enumerate(code) if line.startswith("ACQBULK"))
        release = next(i for i, line in enumerate(code) if line.startswith("PREEXIT"))
        assert wait < release and wait < min(rows + small), "something is read, or let go, too early"


@pytest.mark.parametrize(("alignment", "name"), [(2, "LDG.E.NA.U16"), (8, "LDG.E.NA.64")])
def test_a_shared_output_out_of_line_is_read_in_narrower_pieces(alignment, name):
    from vllm_rose_plugin.kernels.moe_combine.config import choose_config

    config = choose_config(
        num_tokens=4,
        hidden_size=4096,
        top_k=8,
        dtype="bfloat16",
        out_dtype="bfloat16",
        weighted=True,
        shared_dtype="bfloat16",
        shared_alignment=alignment,
        target="sm_90a",
        sm_count=cases.SM_COUNT,
    )
    code = instructions(cases.artifacts(config, "sm_90a").cubin)
    narrow = [line for line in code if line.startswith(name)]
    assert len(narrow) == 16 // alignment
    assert sum(line.startswith("LDG.E.NA.128") for line in code) == 8
