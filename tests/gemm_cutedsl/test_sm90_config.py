"""The sm_90 GEMM's heuristics: legal everywhere, and as the measurements say where it matters."""

import collections
import random
from dataclasses import replace

import pytest

from vllm_rose_plugin.kernels.contracts import Activation, TokenFormat
from vllm_rose_plugin.kernels.gemm.choose import choose_config, choose_token_format
from vllm_rose_plugin.kernels.gemm.config import Epilogue
from vllm_rose_plugin.kernels.gemm.sm90 import consumer_registers
from vllm_rose_plugin.kernels.jit.targets import LIMITS

MXFP8, BF16 = TokenFormat.MXFP8_FP32_SCALES, TokenFormat.BF16_PERMUTED
COUNTS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 48, 64, 65, 100, 128, 129, 256, 300, 1000, 2048, 8192)
SHAPES = ((3072, 4096), (4096, 1536), (9216, 4096), (2304, 4096), (4096, 8192), (4096, 2048), (192, 96), (1856, 2688))


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("groups", [1, 8, 128, 512])
@pytest.mark.parametrize("token_format", [MXFP8, BF16])
def test_every_choice_fits(token_format, groups, n, k):
    for tokens in COUNTS:
        for epilogue in Epilogue:
            config = choose_config(
                num_groups=groups, n=n, k=k, num_rows=tokens * groups, token_format=token_format, epilogue=epilogue
            )
            used = config.stages * config.stage_bytes + config.fixed_bytes + 1024
            assert used <= (LIMITS["sm_90a"].shared_memory + 1024) // config.blocks_per_sm
            assert 3 <= config.stages <= 24 and config.token_tile % 8 == 0 and config.token_tile <= 256
            assert config.k_stages * config.k_tile * (config.cluster if config.split_k else 1) >= k
            assert config.row_tiles * config.row_tile * (1 if config.split_k else config.cluster) >= n
            assert config.grid(132) % config.cluster == 0 and config.grid(132) <= 132 * config.blocks_per_sm
            held = consumer_registers(config) or 248
            accumulators = config.token_tile // 2 * (1 + (config.in_flight if config.w8a8 else 0))
            assert accumulators + 40 <= held, "registers"
            if config.split_k:
                assert config.epilogue is Epilogue.PLAIN
                assert config.cluster == 2 or (config.cluster == 4 and config.token_tile >= 16)
            elif config.cluster > 1:
                assert config.token_tile % (8 * config.cluster) == 0, "each block sends its part of the tokens"


def test_format_follows_the_tokens_of_a_group():
    def of(tokens, **how):
        return choose_token_format(activation=Activation.MXFP8, num_groups=16, num_rows=tokens * 16, **how)

    assert of(1) is of(24) is MXFP8 and of(25) is of(2048) is BF16, "24 and one and a half times its root are 32"
    assert choose_token_format(activation=Activation.BF16, num_groups=16, num_rows=16) is BF16


def test_a_tile_has_room_for_crowded_groups_and_is_narrow_for_those_of_the_mean():
    """As measured with 16 and 128 groups at means of 8, 16, 32 and 64 (benchmarks/results/gemm_tiles.csv)."""

    def of(mean, token_format, groups=16):
        config = choose_config(num_groups=groups, n=3072, k=4096, num_rows=mean * groups, token_format=token_format)
        return config.token_tile, config.narrow_tokens

    assert [of(mean, MXFP8) for mean in (8, 13, 14, 16, 17, 24)] == [
        *((16, 0), (24, 0), (32, 16), (32, 16), (32, 24), (32, 24))
    ]
    assert [of(mean, BF16) for mean in (13, 14, 16, 17, 24, 25, 32, 33, 48, 49, 64, 128)] == [
        *((32, 0), (48, 16), (48, 16), (48, 32), (48, 32), (48, 32), (64, 32), (64, 48), (64, 0)),
        *((64, 0), (64, 0), (128, 0)),
    ]
    assert [of(mean, MXFP8, 128) for mean in (8, 16, 24)] == [(16, 0), (32, 16), (32, 24)]
    assert [of(mean, BF16, 128) for mean in (16, 25, 32, 48, 64)] == [(48, 16), (48, 32), (48, 0), (64, 0), (64, 0)]
    one = choose_config(num_groups=1, n=3072, k=4096, num_rows=16, token_format=MXFP8)
    assert one.narrow_tokens == 0, "a single group has as many tokens as the host says"


@pytest.mark.parametrize("groups", [8, 16, 128])
@pytest.mark.parametrize("mean", [1, 2, 4, 6, 8, 12, 16, 20, 24])
def test_a_tile_holds_the_tokens_of_most_groups_when_they_spread_at_random(groups, mean):
    """Weights are read again for every further tile."""
    config = choose_config(num_groups=groups, n=3072, k=4096, num_rows=mean * groups, token_format=MXFP8)
    generator = random.Random(mean)
    drawn = [collections.Counter(generator.randrange(groups) for _ in range(mean * groups)) for _ in range(50)]
    crowded = sum(count > config.token_tile for step in drawn for count in step.values())
    assert crowded <= 0.1 * 50 * groups


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(k=100), "K is 100"),
        (dict(n=20), "N is 20"),
        (dict(n=36), "N is 36"),
        (dict(n=96, epilogue=Epilogue.SWIGLU), "N is 96"),
        (dict(num_groups=513), "num_groups is 513"),
        (dict(token_format=TokenFormat.MXFP8_TCGEN05), "sm_90 reads"),
        (dict(out_dtype="float32"), "out_dtype is 'float32'"),
    ],
)
def test_what_it_refuses(wrong, message):
    right = dict(num_groups=1, n=128, k=128, num_rows=8, token_format=MXFP8)
    choose_config(**right)
    with pytest.raises(ValueError, match=message):
        choose_config(**{**right, **wrong})


def test_w8a8_takes_stages_that_a_word_of_scales_covers():
    config = choose_config(num_groups=1, n=128, k=128, num_rows=8, token_format=MXFP8)
    with pytest.raises(ValueError, match="k_tile is 64"):
        replace(config, k_tile=64)


def test_where_the_first_tile_is_guessed():
    """Every group has tokens then, as a rule, and one tile of them; and nobody knows it yet."""

    def of(rows: int, groups: int = 16, **how) -> bool:
        token_format = choose_token_format(activation=Activation.MXFP8, num_groups=groups, num_rows=rows)
        return choose_config(num_groups=groups, n=3072, k=4096, num_rows=rows, token_format=token_format, **how).guesses

    assert next(rows for rows in range(1, 100) if of(rows)) == 33, "three of each on average, rounded up"
    assert of(16 * 256) and not of(16 * 257)
    assert not of(512, early_counts=True) and not of(512, groups=1)


BF16 = TokenFormat.BF16_PERMUTED
LINEAR_SHAPES = [(9216, 4096), (2304, 4096), (4096, 8192), (4096, 2048), (1856, 2688), (192, 768), (96, 192)]


@pytest.mark.parametrize("n, k", LINEAR_SHAPES)
def test_batch_invariant_sums_have_one_order(n, k):
    """Four blocks that share K add up in an order that depends on where in a tile a row stands (seen on an H200)."""
    for rows in (1, 16, 64, 200, 1000, 5000):
        shape = dict(num_groups=1, n=n, k=k, num_rows=rows, token_format=BF16)
        config = choose_config(**shape, batch_invariant=True)
        assert config.cluster <= 2 and not config.stream_k
    shape["num_rows"] = 64
    assert (n, k) != (2304, 4096) or choose_config(**shape).stream_k or choose_config(**shape).cluster == 4


def test_stream_k_where_operands_stay_in_l2():
    """Elsewhere its blocks, which are all over the operands at any time, read them from memory again and again."""

    def streams(n: int, k: int, rows: int) -> bool:
        return choose_config(num_groups=1, n=n, k=k, num_rows=rows, token_format=BF16).stream_k

    assert streams(9216, 4096, 1024) and streams(9216, 4096, 2048), "55 MB"
    assert not any(streams(n, k, rows) for n, k in ((9216, 4096), (4096, 8192)) for rows in (4096, 8192, 16384))
    assert streams(2304, 4096, 6144) and not streams(2304, 4096, 8192), "60 and 77 MB"
