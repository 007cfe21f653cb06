"""Which launch serves which call, and the reference: the fused kernel's host half."""

import itertools
from collections import Counter

import pytest
import torch

from vllm_rose_plugin.kernels.all_reduce.config import Access, Algorithm, Tuning
from vllm_rose_plugin.kernels.all_reduce.layout import MAX_BLOCKS, MAX_RANKS
from vllm_rose_plugin.kernels.all_reduce_norm.config import choose_norm_plan
from vllm_rose_plugin.kernels.all_reduce_norm.reference import all_reduce_norm
from vllm_rose_plugin.kernels.contracts import Activation, TokenFormat
from vllm_rose_plugin.kernels.jit.fingerprint import config_text

ONE, TWO = Algorithm.ONE_SHOT, Algorithm.TWO_SHOT


def choose(num_rows=1, hidden_size=4096, **changes):
    return choose_norm_plan(
        **{
            "num_rows": num_rows,
            "hidden_size": hidden_size,
            "dtype": "bfloat16",
            "group_size": 2,
            "access": Access.PEERS,
            "zero_copy_in": False,
            "alignment": 32,
            "target": "sm_90a",
            "sm_count": 132,
            **changes,
        }
    )


def test_launches_fit():
    for group_size, access, (target, sm_count), num_rows, hidden_size in itertools.product(
        (2, 3, 8, 72),
        Access,
        (("sm_90a", 132), ("sm_107a", 212), ("sm_90a", 2)),
        (1, 7, 4096),
        (128, 4096, 7168, 8192),
    ):
        plan = choose(num_rows, hidden_size, group_size=group_size, access=access, target=target, sm_count=sm_count)
        config = plan.config
        assert config_text(config)
        assert 1 <= plan.blocks <= min(MAX_BLOCKS, max(1, sm_count // 2), num_rows)
        assert config.threads % 32 == 0 and MAX_RANKS <= config.threads <= 512
        assert config.threads * plan.blocks >= MAX_BLOCKS, "a copy of the epoch that nobody writes"
        assert config.per_thread * config.threads >= config.row_vectors > (config.per_thread - 1) * config.threads
        assert config.rows >= 1 and config.at_once >= 1
    assert choose().config.threads == 512 and choose(target="sm_100a").config.vector_bytes == 32


def test_where_all_ranks_must_have_the_same_bits_none_asks_the_switch_for_itself():
    for rows in (1, 7, 4096):
        call = {"num_rows": rows, "group_size": 8, "access": Access.MULTIMEM, "target": "sm_100a"}
        free, same = choose(**call), choose(**call, same_bits=True)
        assert free.config.access is Access.MULTIMEM and same.config.algorithm is free.config.algorithm
        assert same == (choose(**{**call, "access": Access.PEERS}) if free.config.algorithm is ONE else free)


@pytest.mark.parametrize(("group_size", "blocks"), [(2, 1), (2, 3), (7, 2)])
def test_every_row_is_one_ranks_and_one_blocks(group_size, blocks):
    """The block that copies a row in, reduces it and normalizes it has one number on all ranks."""
    for num_rows in (1, 6, 7, 50):
        seen: Counter = Counter()
        for block in range(blocks):
            for group in range(block, -(-num_rows // group_size), blocks):
                for rank in range(group_size):
                    row = group * group_size + rank
                    if row < num_rows:
                        assert (row % group_size, row // group_size % blocks) == (rank, block)
                        seen[row] += 1
        assert seen == dict.fromkeys(range(num_rows), 1)


def test_algorithm_blocks_and_rows_follow_from_the_size():
    assert choose(4096).config.algorithm is ONE, "two ranks move the same bytes either way"
    assert [choose(n, group_size=8).config.algorithm for n in (18, 19)] == [ONE, TWO]
    assert [choose(n).blocks for n in (1, 5, 4096)] == [1, 5, 66]
    assert [choose(n).config.rows for n in (1, 66, 67)] == [1, 1, 4]
    assert choose(64, group_size=8, tuning=Tuning(TWO, 128)).blocks == 8
    plan = choose(100, tuning=Tuning(TWO, 7))
    assert plan.config.algorithm is TWO and plan.blocks == 7
    assert choose(64, zero_copy_in=True).config.copy_in is False and choose(1, zero_copy_in=True).config.copy_in


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "dtype is float32; it must be one of bfloat16, float16"),
        ({"group_size": 73}, "a group of 73 ranks; it must be 2 to 72"),
        ({"hidden_size": 4100}, "hidden_size is 4100; it must be a multiple of 128 up to 8192"),
        ({"hidden_size": 8320}, "hidden_size is 8320"),
        ({"num_rows": 0}, "0 rows; it must be 1 to"),
        ({"alignment": 8}, "start at a multiple of 8 bytes; it must be 16: copy them"),
        (
            {"token_format": TokenFormat.MXFP8_TCGEN05, "activation": Activation.BF16},
            "holds quantized tokens only, got activation='bf16'",
        ),
    ],
)
def test_what_no_kernel_takes_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        choose(**changes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reference_against_float64_and_vllms_order_of_roundings(dtype):
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(50, 512, generator=generator).to(dtype) for _ in range(3)]
    residual = (torch.randn(50, 512, generator=generator) * 4).to(dtype)
    weight = torch.randn(512, generator=generator).to(dtype)
    out, new = all_reduce_norm(xs, residual, weight, eps=1e-6)
    exact, wide = all_reduce_norm(xs, residual, weight, eps=1e-6, exact=True)
    unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert out.dtype == new.dtype == dtype
    assert ((out.double() - exact).abs() <= exact.abs() * 2.01 * unit + 2**-24).all()
    assert ((new.double() - wide).abs() <= wide.abs() * 1.001 * unit).all()
    total = (xs[0].float() + xs[1].float() + xs[2].float()).to(dtype)
    assert torch.equal(new, (total.float() + residual.float()).to(dtype)), "the sum is rounded before the residual"
