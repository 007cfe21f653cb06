"""What tuning may try: legal for every call, near the heuristic, and it compiles without spills."""

import functools
from dataclasses import replace

import pytest

from vllm_rose_plugin.kernels.contracts import TokenFormat
from vllm_rose_plugin.kernels.gemm.call import Call, heuristic
from vllm_rose_plugin.kernels.gemm.candidates import MOST, candidates, free_fields, with_free_fields
from vllm_rose_plugin.kernels.gemm.config import W8A8_TILES, W8A16_TILES, Epilogue, GemmConfig, consumer_registers
from vllm_rose_plugin.kernels.gemm.config_sm100 import check
from vllm_rose_plugin.kernels.gemm.plan import build_of, plan_of
from vllm_rose_plugin.kernels.jit.compile import compile_to_artifacts
from vllm_rose_plugin.kernels.jit.fingerprint import config_text
from vllm_rose_plugin.kernels.jit.sass import resource_usage, sass
from vllm_rose_plugin.kernels.jit.targets import LIMITS

W8A8, W8A16, TCGEN05 = TokenFormat.MXFP8_FP32_SCALES, TokenFormat.BF16_PERMUTED, TokenFormat.MXFP8_TCGEN05
COUNTS = (1, 2, 7, 8, 16, 24, 32, 48, 64, 96, 128, 200, 256, 384, 1000, 8192)
SHAPES = ((3072, 4096), (4096, 1536), (9216, 4096), (2304, 4096), (4096, 8192), (192, 96), (64, 32), (1856, 2688))


def call_of(target: str, token_format: TokenFormat, groups: int, n: int, k: int, epilogue: Epilogue) -> Call:
    swiglu = epilogue is Epilogue.SWIGLU
    return Call(
        target=target,
        sm_count=LIMITS[target].sm_count,
        num_groups=groups,
        n=n,
        k=k,
        token_format=token_format,
        epilogue=epilogue,
        out_format=token_format if swiglu else None,
        early_counts=not swiglu,
    )


def calls_of(target: str):
    for token_format in (W8A8, W8A16) if target == "sm_90a" else (TCGEN05,):
        for groups in (1, 8, 32, 128, 512):
            for n, k in SHAPES:
                for epilogue in Epilogue:
                    yield call_of(target, token_format, groups, n, k, epilogue)


def check_sm90(config: GemmConfig) -> None:
    used = config.stages * config.stage_bytes + config.fixed_bytes + 1024
    assert used <= (LIMITS["sm_90a"].shared_memory + 1024) // config.blocks_per_sm
    assert 3 <= config.stages <= 24 and config.token_tile in (*W8A8_TILES, *W8A16_TILES)
    assert config.k_stages * config.k_tile * (config.cluster if config.split_k else 1) >= config.k
    assert config.k_tile == (64 if config.token_tile > 128 else 128)
    assert config.threads <= 1024 and config.threads * config.blocks_per_sm <= 2048
    held = consumer_registers(config) or 248
    assert config.token_tile // 2 * (1 + (config.in_flight if config.w8a8 else 0)) + 40 <= held, "registers"
    if config.stream_k:
        assert config.epilogue is Epilogue.PLAIN and config.num_groups == config.cluster == config.blocks_per_sm == 1
    if config.split_k:
        assert config.epilogue is Epilogue.PLAIN and config.cluster > 1 and config.token_tile <= 128
        assert config.cluster == 2 or config.token_tile % 16 == 0, "pieces of eight tokens"
    elif config.cluster > 1:
        assert config.epilogue is Epilogue.PLAIN and config.token_tile % (8 * config.cluster) == 0


@pytest.mark.parametrize("target", LIMITS)
def test_every_candidate_is_legal_and_the_first_is_the_heuristics(target):
    several = 0
    for call in calls_of(target):
        for tokens in COUNTS:
            rows = tokens * call.num_groups
            found = candidates(call, rows)
            assert found[0] == heuristic(call, rows) and len(found) <= MOST
            assert len(set(found)) == len({config_text(config) for config in found}) == len(found)
            assert found == candidates(call, rows), "the order is always the same"
            several += len(found) > 3
            for config in found:
                if isinstance(config, GemmConfig):
                    check_sm90(config)
                else:
                    check(config)
                    assert config.shared_bytes <= LIMITS[target].shared_memory and config.stages >= 3
                    assert config.tmem_columns <= LIMITS[target].tmem_columns
                blocks = config.cluster if isinstance(config, GemmConfig) else config.blocks
                assert plan_of(call, config, num_rows=rows).grid % blocks == 0
                computed = {name: getattr(config, name) for name in ("num_groups", "n", "k", "epilogue", "bias")}
                assert all(getattr(found[0], name) == value for name, value in computed.items())
                if isinstance(config, GemmConfig):
                    assert config.token_format is call.token_format and config.early_counts == call.early_counts
                assert with_free_fields(found[0], free_fields(config), target=target) == config
    assert several > 500


def test_fewer_tokens_than_groups():
    call = call_of("sm_90a", W8A8, 128, 3072, 4096, Epilogue.SWIGLU)
    assert all(len(candidates(call, rows)) > 3 for rows in (1, 8, 100))


def test_a_batch_invariant_call_has_one():
    call = replace(call_of("sm_90a", W8A16, 1, 9216, 4096, Epilogue.PLAIN), batch_invariant=True)
    for rows in (64, 128, 512):
        (only,) = candidates(call, rows)
        assert only == heuristic(call, rows) and not only.stream_k


def kind(config: GemmConfig) -> str:
    if config.stream_k or config.split_k:
        return "stream_k" if config.stream_k else "split_k"
    return "plain" if config.cluster == config.blocks_per_sm == 1 else "other"


@pytest.mark.parametrize("n, k", [shape for shape in SHAPES if shape[1] > 2048])
def test_w8a16_of_a_single_weight_tries_every_way_to_share_the_work(n, k):
    call = call_of("sm_90a", W8A16, 1, n, k, Epilogue.PLAIN)
    for rows in COUNTS:
        found = candidates(call, rows)
        kinds = [kind(config) for config in found]
        assert 2 <= kinds.count("stream_k") <= 4 and {"plain", "split_k", "other"} <= set(kinds), f"{rows} rows"
        assert MOST - 1 <= len(found) <= MOST, f"{rows} rows: less only where the rest is hopeless"
        shared = [config.token_tile for config in found if config.stream_k]
        assert rows <= 64 or len(set(shared)) >= 2, "of different tiles"
        assert heuristic(call, rows) in found


def test_only_w8a16_of_a_single_weight_tries_stream_k():
    for call in (*calls_of("sm_90a"), *calls_of("sm_100a")):
        if call.num_groups > 1 or call.epilogue is not Epilogue.PLAIN or call.token_format is not W8A16:
            for tokens in (1, 64, 512):
                found = candidates(call, tokens * call.num_groups)
                assert not any(getattr(config, "stream_k", False) for config in found)


@pytest.mark.parametrize("target, token_format", [("sm_90a", W8A16), ("sm_100a", TCGEN05)])
def test_fields_that_no_kernel_has_are_refused(target, token_format):
    call = call_of(target, token_format, 8, 3072, 4096, Epilogue.SWIGLU)
    config = heuristic(call, 512)
    right = free_fields(config)
    shares = {"cluster": 2, "split_k": True} if target == "sm_90a" else {"split": 2}
    for wrong in (
        {},
        right | {"stages": 9},
        right | {"token_tile": 64.0},
        right | {"token_tile": True},
        right | shares,
    ):
        with pytest.raises(ValueError):
            with_free_fields(config, wrong, target=target)


def test_stream_k_is_refused_where_no_kernel_can_do_it():
    single = heuristic(call_of("sm_90a", W8A16, 1, 9216, 4096, Epilogue.PLAIN), 512)
    fields = free_fields(single)
    assert fields["stream_k"] is True and with_free_fields(single, fields, target="sm_90a") == single
    before = {name: value for name, value in fields.items() if name != "stream_k"}
    for wrong in (before, fields | {"stream_k": 1}, fields | {"cluster": 2, "split_k": True}, fields | {"cluster": 2}):
        with pytest.raises(ValueError):
            with_free_fields(single, wrong, target="sm_90a")
    for groups, epilogue in ((1, Epilogue.SWIGLU), (8, Epilogue.PLAIN)):
        config = heuristic(call_of("sm_90a", W8A16, groups, 9216, 4096, epilogue), 512 * groups)
        with pytest.raises(ValueError, match="single weight"):
            with_free_fields(config, fields, target="sm_90a")


# ---- what the compiler makes of them ----

COMPILED = {
    f"{target} {token_format.name} {epilogue} m={tokens}": (
        call_of(target, token_format, groups, n, k, epilogue),
        tokens * groups,
    )
    for target, token_format, epilogue, groups, n, k, tokens in (
        ("sm_90a", W8A8, Epilogue.PLAIN, 1, 2304, 4096, 16),
        ("sm_90a", W8A8, Epilogue.SWIGLU, 8, 3072, 4096, 32),
        ("sm_90a", W8A16, Epilogue.PLAIN, 1, 4096, 8192, 16),
        ("sm_90a", W8A16, Epilogue.PLAIN, 1, 9216, 4096, 48),
        ("sm_90a", W8A16, Epilogue.PLAIN, 1, 4096, 8192, 64),
        ("sm_90a", W8A16, Epilogue.PLAIN, 1, 9216, 4096, 512),
        ("sm_90a", W8A16, Epilogue.SWIGLU, 8, 3072, 4096, 64),
        ("sm_90a", W8A16, Epilogue.PLAIN, 8, 4096, 1536, 256),
        ("sm_100a", TCGEN05, Epilogue.PLAIN, 1, 2304, 4096, 16),
        ("sm_100a", TCGEN05, Epilogue.SWIGLU, 8, 3072, 4096, 64),
    )
}


@functools.cache
def usage(config, target: str) -> dict[str, int]:
    cubin = compile_to_artifacts(family="gemm", config=config, build=build_of(config), target=target).cubin
    code = sass(cubin)
    return resource_usage(cubin) | {"spills": code.count("STL") + code.count("LDL")}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_candidates_compile_without_spills(name):
    call, rows = COMPILED[name]
    found = candidates(call, rows)
    assert len(found) > 3
    for config in found:
        used = usage(config, call.target)
        assert used["stack"] == 0 and not used["spills"], config
        if isinstance(config, GemmConfig):
            assert used["registers"] * config.threads * config.blocks_per_sm <= 65536
