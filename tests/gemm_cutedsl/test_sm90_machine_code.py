"""What the compiler makes of the sm_90 GEMM's configs. Needs no GPU."""

import functools
import re
from dataclasses import replace

import pytest

from vllm_rose_plugin.kernels.contracts import Activation, TokenFormat
from vllm_rose_plugin.kernels.gemm.choose import choose_config, choose_token_format
from vllm_rose_plugin.kernels.gemm.config import Epilogue, GemmConfig, with_stages
from vllm_rose_plugin.kernels.gemm.sm90 import build, consumer_registers
from vllm_rose_plugin.kernels.jit.compile import compile_to_artifacts
from vllm_rose_plugin.kernels.jit.sass import resource_usage, sass

MXFP8, BF16 = TokenFormat.MXFP8_FP32_SCALES, TokenFormat.BF16_PERMUTED
WAIT = "WARPGROUP.DEPBAR"


@functools.cache
def compiled(config: GemmConfig) -> tuple[list[str], dict[str, int]]:
    cubin = compile_to_artifacts(family="gemm", config=config, build=build, target="sm_90a").cubin
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", sass(cubin), re.MULTILINE)
    return [re.sub(r"^@!?U?P\d+ ", "", line).strip() for line in found], resource_usage(cubin)


def count(code: list[str], start: str) -> int:
    return sum(line.startswith(start) for line in code)


def chosen(*, tokens: int, groups: int = 8, n: int = 3072, k: int = 4096, swiglu: bool = False, **how) -> GemmConfig:
    rows = tokens * groups
    token_format = choose_token_format(activation=Activation.MXFP8, num_groups=groups, num_rows=rows)
    return choose_config(
        num_groups=groups,
        n=n,
        k=k,
        num_rows=rows,
        token_format=token_format,
        epilogue=Epilogue.SWIGLU if swiglu else Epilogue.PLAIN,
        **how,
    )


CASES = {
    f"{name} m={tokens}": chosen(tokens=tokens, **shape)
    for name, shape in {
        "w13": dict(swiglu=True),
        "w2": dict(n=4096, k=1536),
        "qkv": dict(groups=1, n=9216),
        "qkv of TP4": dict(groups=1, n=2304, bias=True, out_dtype="float16"),
        "o_proj": dict(groups=1, n=4096, k=8192),
        "partial": dict(groups=3, n=1856, k=2688),
    }.items()
    for tokens in (8, 24, 32, 64, 128, 2048)
}


@pytest.mark.parametrize("name", CASES)
def test_chosen_configs(name):
    check(CASES[name])


def check(config: GemmConfig) -> None:
    code, usage = compiled(config)
    assert usage["stack"] == 0 and not count(code, "STL") and not count(code, "LDL"), "spills"
    assert usage["registers"] * config.threads * config.blocks_per_sm <= 65536
    assert count(code, "ACQBULK") and count(code, "PREEXIT"), "programmatic launch"
    wide = "QGMMA" if config.w8a8 else "HGMMA"
    found = [line for line in code if line.startswith(wide)]
    widths = [config.token_tile, config.narrow_tokens] if config.narrow_tokens else [config.token_tile]
    instructions = config.k_tile // (32 if config.w8a8 else 16) * config.stages_per_pass
    for width in widths:
        assert sum(f".64x{width}x" in line for line in found) == instructions
    assert len(found) == len(widths) * instructions
    # One wait for each batch of them. Where the compiler can't tell that their registers are left alone, or has none to
    # spare, it waits after every single one.
    batches = config.pass_k // (32 if config.w8a8 else 64)
    assert count(code, WAIT) == batches * len(widths), "serialized matrix instructions"
    first_wait = next(i for i, line in enumerate(code) if line.startswith(WAIT))
    started = sum(line.startswith(wide) for line in code[:first_wait])
    assert started == (min(config.in_flight, 4) if config.w8a8 else 8)
    wait = next(i for i, line in enumerate(code) if line.startswith("ACQBULK"))
    guessed = [i for i, line in enumerate(code) if line.startswith("UTMAPF")]
    assert len(guessed) == (2 if config.guesses and config.domains == 1 else 0), "weights and scales of the first tile"
    assert all(i < wait for i in guessed), "behind the wait they are of no use"
    changes = [line for line in code if line.startswith("USETMAXREG")]
    assert len(changes) == (2 if consumer_registers(config) else 0)
    multicast = config.cluster > 1 and not config.split_k
    loads = [line for line in code if line.startswith("UTMALDG")]
    assert any("MULTICAST" in line for line in loads) == multicast
    dimensions = {line.split(".")[1][:2] for line in loads}
    assert ("5D" in dimensions) == (config.epilogue is Epilogue.SWIGLU), "gate and up rows by turns"


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize(
    ("rows", "narrow"), [(20, 16), (32, 32), (40, 48), (64, 32), (70, 64), (100, 96), (128, 64), (300, 64), (300, 192)]
)
def test_narrow_tiles_have_a_main_loop_of_their_own(rows, narrow, swiglu):
    how = dict(swiglu=True) if swiglu else dict(n=4096, k=1536)
    check(with_stages(replace(chosen(tokens=rows, **how), narrow_tokens=narrow)))


def test_rescaling_is_two_operations():
    """Per product: its scale, and the sum. More would not hide behind memory at 32 tokens."""
    config = chosen(tokens=24)
    assert config.w8a8 and config.token_tile == 32
    code, _ = compiled(config)
    widths = (config.token_tile, config.narrow_tokens)
    assert widths == (32, 24), "a main loop for each"
    products = sum(widths) // 2 * config.k_tile // 32 * config.stages_per_pass
    scales = len(widths) * 2 * config.k_tile // 32 * config.stages_per_pass
    assert count(code, "FFMA") == products + scales
    assert count(code, "FMUL") == products


@pytest.mark.parametrize("out_format", [MXFP8, BF16])
@pytest.mark.parametrize("activation", Activation)
def test_swiglu_outputs(out_format, activation):
    if out_format is MXFP8 and activation is Activation.BF16:
        activation = Activation.MXFP8
    config = chosen(tokens=16, swiglu=True, out_format=out_format, activation=activation, limit=7.0)
    check(config)
    code, _ = compiled(config)
    conversions = sum(line.startswith("F2FP") and "E4M3" in line for line in code)
    pieces = config.token_tile // 8  # a thread holds two products of each
    passes = (1 if out_format is MXFP8 else 2) if activation is Activation.MXFP8 else 0  # and back again
    assert conversions == passes * pieces
    assert count(code, "MOVM.16.MT88") == (0 if config.paired else pieces)
    assert count(code, "STSM.16.MT88") == (config.token_tile // config.staged_tokens if config.paired else 0)
    assert count(code, "MUFU.EX2") == config.token_tile // 4


def test_four_blocks_share_k():
    config = with_stages(replace(chosen(tokens=64, groups=1, n=2304), cluster=4, split_k=True, row_groups=2))
    code, _ = compiled(config)
    check(config)
    assert config.token_tile // 2 * 3 // 4 <= count(code, "ST.E"), "sums for the other blocks"


STREAM_K = [(2, 256), (2, 128), (2, 192), (2, 96), (2, 64), (3, 64), (2, 48), (1, 48)]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("row_groups", "token_tile"), STREAM_K)
def test_stream_k_hands_over_in_wide_pieces(row_groups, token_tile, early):
    config = stream_k(row_groups, token_tile, early_counts=early)
    check(config)
    assert_hands_over(config)


@pytest.mark.parametrize(("row_groups", "token_tile", "in_flight"), [(1, 16, 4), (2, 8, 4), (2, 32, 2)])
def test_stream_k_of_w8a8(row_groups, token_tile, in_flight):
    config = chosen(tokens=token_tile, groups=1, n=9216)
    config = replace(config, row_groups=row_groups, token_tile=token_tile, in_flight=in_flight)
    config = with_stages(replace(config, cluster=1, split_k=False, blocks_per_sm=1, stream_k=True))
    assert config.w8a8
    check(config)
    assert_hands_over(config)


def stream_k(row_groups: int, token_tile: int, **how) -> GemmConfig:
    """What the heuristic would make of such a tile."""
    config = chosen(tokens=token_tile, groups=1, n=9216, **how)
    if config.w8a8:
        raise ValueError(f"{token_tile} tokens are W8A8")
    config = replace(config, row_groups=row_groups, token_tile=token_tile, k_tile=64 if token_tile > 128 else 128)
    return with_stages(replace(config, cluster=1, split_k=False, blocks_per_sm=1, stream_k=True))


def assert_hands_over(config: GemmConfig) -> None:
    """Sums go in accesses of 16 bytes whose places are parts of the instructions; the order around the flag holds."""
    code, _ = compiled(config)
    pieces, pitch = config.token_tile // 8, 16 * 128 * config.row_groups
    barrier = f"BAR.SYNC.DEFER_BLOCKING {hex(1 + config.row_groups)}, {hex(128 * config.row_groups)}"
    give, take = [i for i, line in enumerate(code) if line.startswith(barrier)]
    raised = next(i for i, line in enumerate(code) if line.startswith("STG.E.STRONG.GPU"))
    polled = [i for i, line in enumerate(code) if line.startswith("LDG.E.STRONG.GPU")]
    fence = [i for i, line in enumerate(code) if line.startswith("MEMBAR.ALL.GPU")]
    forgotten = [i for i, line in enumerate(code) if line.startswith("CCTL.IVALL")]
    lowered = [i for i, line in enumerate(code) if re.match(r"STG\.E desc.*, RZ$", line)]
    assert len(polled) == len(forgotten) == 2 and len(lowered) == len(fence) == 1
    assert give < fence[0] < raised, "everybody's sums, then the flag"
    assert max(polled) < max(forgotten) < take and max(polled) < lowered[0] < take, "the flag, then everybody reads"

    def places(lines: list[str]) -> list[int]:
        found = [re.search(r"\[R\d+\.64(?:\+(0x[0-9a-f]+))?\]", line) for line in lines]
        return sorted(int(match.group(1) or "0", 16) for match in found if match)

    wanted = [i * pitch for i in range(pieces)]
    wgmma = max(i for i, line in enumerate(code) if line.startswith(("HGMMA", "QGMMA")))
    assert places([line for line in code[wgmma:give] if line.startswith("STG.E.128")]) == wanted
    assert places([line for line in code[take:] if line.startswith("LDG.E.128")]) == wanted
    assert not any(line.startswith("LDG.E.128") for line in code[:take]), "sums read before the flag"
    assert count(code, "FADD") == config.token_tile // 2, "one addition for each"
