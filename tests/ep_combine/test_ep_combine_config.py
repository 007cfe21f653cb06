"""Which launch serves which call, and the reference: the fused kernel's host half."""

import itertools

import pytest
import torch

from vllm_rose_plugin.kernels.all_reduce.config import Access
from vllm_rose_plugin.kernels.all_reduce.layout import MAX_BLOCKS, MAX_RANKS
from vllm_rose_plugin.kernels.ep_combine.config import choose_ep_plan, in_one_launch
from vllm_rose_plugin.kernels.ep_combine.reference import ep_combine
from vllm_rose_plugin.kernels.jit.fingerprint import config_text
from vllm_rose_plugin.kernels.moe_combine.reference import combine_tokens

PEERS, MULTIMEM = Access.PEERS, Access.MULTIMEM


def choose(num_tokens=1, **changes):
    return choose_ep_plan(
        **{
            "num_tokens": num_tokens,
            "hidden_size": 4096,
            "top_k": 8,
            "dtype": "bfloat16",
            "out_dtype": "bfloat16",
            "weighted": True,
            "group_size": 2,
            "access": PEERS,
            "target": "sm_90a",
            "sm_count": 132,
            **changes,
        }
    )


def test_where_all_ranks_must_have_the_same_bits_none_asks_the_switch_for_itself():
    assert choose(access=MULTIMEM).config.access is MULTIMEM
    for tokens in (1, 64):
        assert choose(tokens, access=MULTIMEM, same_bits=True) == choose(tokens)


def test_launches_fit():
    for group_size, access, (target, sm_count), num_tokens, hidden_size, top_k in itertools.product(
        (2, 3, 8, 72),
        Access,
        (("sm_90a", 132), ("sm_107a", 212), ("sm_90a", 2)),
        (1, 7, 4096),
        (32, 96, 4096, 7168),
        (1, 8, 16),
    ):
        plan = choose(
            num_tokens,
            hidden_size=hidden_size,
            top_k=top_k,
            group_size=group_size,
            access=access,
            target=target,
            sm_count=sm_count,
        )
        config = plan.config
        assert config_text(config)
        assert 1 <= plan.blocks <= min(MAX_BLOCKS, max(1, sm_count // 2))
        assert config.threads % 32 == 0 and MAX_RANKS <= config.threads <= 512
        assert config.threads * plan.blocks >= MAX_BLOCKS, "a copy of the epoch that nobody writes"
        assert config.combine.row_vectors * config.vector_bytes == 2 * hidden_size
        assert config.vector_bytes == (32 if target == "sm_107a" and access is PEERS and top_k < 9 else 16)
        assert config.combine.unroll * top_k <= max(8, top_k) and config.sums >= 1


def test_blocks_and_threads_follow_from_the_tokens():
    assert [(choose(n).blocks, choose(n).config.threads) for n in (1, 16, 17, 64, 4096)] == [
        (4, 128),
        (64, 128),
        (66, 256),
        (66, 512),
        (66, 512),
    ]
    assert choose(64, top_k=16).config.threads == 256, "more rows in flight than registers of 512 threads hold"
    assert choose(64, blocks=7).blocks == 7 and choose(1, blocks=7).blocks == 7
    assert choose(64, blocks=500).blocks == 66


def test_what_ranks_must_share_follows_from_what_they_share():
    """Blocks, threads and vectors: not from where a rank's tensors lie, nor whether it has a shared part."""
    for num_tokens in (1, 64, 1000):
        plain = choose(num_tokens)
        for changes in ({"shared_dtype": "float16", "shared_alignment": 2}, {"slot_alignment": 4}):
            other = choose(num_tokens, **changes)
            assert (other.blocks, other.config.threads, other.config.vector_bytes) == (
                plain.blocks,
                plain.config.threads,
                plain.config.vector_bytes,
            )


def test_one_launch_for_decode_two_for_prefill():
    def largest(group_size):
        return max(n for n in range(1, 300) if in_one_launch(num_tokens=n, hidden_size=4096, group_size=group_size))

    assert [largest(size) for size in (2, 3, 8, 72)] == [128, 64, 18, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "y is float32"),
        ({"group_size": 73}, "a group of 73 ranks; it must be 2 to 72"),
        ({"group_size": 1}, "a group of 1 ranks"),
        ({"hidden_size": 100}, "H is 100; it must be a multiple of 32"),
        ({"top_k": 17}, "top_k is 17; it must be 1 to 16"),
        ({"num_tokens": 0}, "0 tokens; it must be 1 or more"),
    ],
)
def test_what_no_kernel_takes_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        choose(**changes)


def test_reference_is_the_sum_of_all_experts_within_roundings():
    """Experts over two ranks or over one: the sums differ by what is rounded between."""
    g = torch.Generator().manual_seed(1)
    y = torch.randn(40, 64, generator=g).bfloat16()
    slots = torch.randperm(40, generator=g).to(torch.int32).view(10, 4)
    weights = torch.rand(10, 4, generator=g)
    shared = [torch.randn(10, 64, generator=g).bfloat16() for _ in range(2)]
    mine = torch.rand(10, 4, generator=g) < 0.5
    split = [torch.where(mine, slots, -1), torch.where(mine, -1, slots)]
    result = ep_combine([y, y], slots=split, topk_weights=weights, shared=shared)
    exact = combine_tokens(y.double().float(), slots=slots, topk_weights=weights)
    exact = exact + shared[0].float() + shared[1].float()
    assert result.dtype == torch.bfloat16
    assert ((result.float() - exact).abs() <= 2**-8 * (exact.abs() + 8)).all()
    assert not torch.equal(result.float(), exact)
