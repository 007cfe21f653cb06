"""Where things lie, who does what, which launch serves which call: the host's half of all-reduce."""

from collections import Counter

import pytest
import torch

from vllm_rose_plugin.kernels.all_reduce.config import ITEM_BYTES, Access, Algorithm, Tuning, choose_plan
from vllm_rose_plugin.kernels.all_reduce.layout import (
    MAX_BLOCKS,
    MAX_RANKS,
    PHASES,
    WORD,
    ZERO_COPY_BYTES,
    Heap,
    Layout,
    flag_offset,
    part_of,
    state_offset,
)
from vllm_rose_plugin.kernels.all_reduce.reference import all_reduce
from vllm_rose_plugin.kernels.jit.fingerprint import config_text

KIB, MIB = 2**10, 2**20


def choose(num_bytes=8 * KIB, **changes):
    return choose_plan(
        **{
            "num_bytes": num_bytes,
            "dtype": "bfloat16",
            "group_size": 2,
            "access": Access.PEERS,
            "zero_copy_in": False,
            "zero_copy_out": False,
            "alignment": 32,
            "target": "sm_90a",
            "sm_count": 132,
            **changes,
        }
    )


@pytest.mark.parametrize("algorithm", Algorithm)
@pytest.mark.parametrize("access", Access)
def test_where_all_ranks_must_have_the_same_bits_none_asks_the_switch_for_itself(algorithm, access):
    for tuning in (Tuning(algorithm, 4), None):
        for num_bytes in (16, 8 * KIB, 64 * MIB):
            call = {"num_bytes": num_bytes, "group_size": 8, "access": access, "target": "sm_100a", "tuning": tuning}
            free, same = choose(**call).config, choose(**call, same_bits=True).config
            assert (same.algorithm, free.access) == (free.algorithm, access)
            if free.algorithm is Algorithm.ONE_SHOT:
                assert same == choose(**{**call, "access": Access.PEERS}).config
            else:
                assert same == free


@pytest.mark.parametrize("group_size", [2, 3, 4, 7, 8, 16, 71, 72])
@pytest.mark.parametrize("vector_bytes", [16, 32])
def test_every_vector_is_reduced_by_exactly_one_rank(group_size, vector_bytes):
    line = 128 // vector_bytes
    for vectors in (1, 2, 3, line - 1, line, line + 1, group_size * line - 1, group_size * line, 1000, 4097):
        parts = [part_of(owner, vectors, group_size, vector_bytes) for owner in range(group_size)]
        covered = [first + i for first, count in parts for i in range(count)]
        assert covered == list(range(vectors))
        assert all(first * vector_bytes % 128 == 0 for first, count in parts if count), "two ranks share a line"
        assert max(count for _, count in parts) <= -(-vectors // group_size) + line


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_every_vector_is_one_threads_and_one_blocks_of_all_ranks(blocks):
    """Block b copies in what block b of the part's rank reads, and copies out what that one has stored."""
    threads, group_size = 4, 3
    for vectors in (1, 8, 95, 96, 97):
        seen = Counter()
        for block in range(blocks):
            for thread in range(threads):
                for owner in range(group_size):
                    first, count = part_of(owner, vectors, group_size, 16)
                    seen.update((first + j) for j in range(block * threads + thread, count, blocks * threads))
        assert seen == dict.fromkeys(range(vectors), 1)


@pytest.mark.parametrize("group_size", [2, 8, 72])
def test_each_flag_is_a_word_of_its_own(group_size):
    offsets = [
        flag_offset(phase, block, peer, group_size)
        for phase in range(len(PHASES))
        for block in range(MAX_BLOCKS)
        for peer in range(group_size)
    ]
    assert len({*offsets}) == len(offsets) and all(offset % WORD == 0 for offset in offsets)
    assert max(offsets) + WORD <= state_offset(group_size)


def test_nothing_of_a_part_overlaps():
    for group_size in (2, 5, 72):
        for max_bytes, heap_bytes in ((0, 0), (1, 1), (MIB + 3, 5 * KIB)):
            layout = Layout(group_size, max_bytes, heap_bytes)
            assert state_offset(group_size) + (MAX_BLOCKS + 1) * WORD <= layout.staging
            assert layout.capacity >= max(max_bytes, ZERO_COPY_BYTES) and layout.capacity % 256 == 0
            assert layout.heap == layout.staging + 2 * layout.capacity
            assert layout.size >= layout.heap + heap_bytes and layout.staging % 256 == 0


def test_heap_gives_the_same_places_for_the_same_requests():
    layout = Layout(2, 0, 1000)
    heaps = [Heap(layout) for _ in range(2)]
    places = [[heap.take(size) for size in (1, 128, 129, 0)] for heap in heaps]
    assert places[0] == places[1] == [layout.heap + offset for offset in (0, 128, 256, 512)]
    with pytest.raises(MemoryError, match=r"500 bytes .* 384 of heap_bytes=1000 are left: .* at least 1128"):
        heaps[0].take(500)
    assert heaps[0].take(384) == layout.heap + 640, "a refusal takes nothing"


def test_algorithm_by_size_and_ranks():
    one, two = Algorithm.ONE_SHOT, Algorithm.TWO_SHOT

    def largest_one_shot(**how):
        sizes = [2**i for i in range(4, 31)]
        kinds = [choose(size, **how).config.algorithm for size in sizes]
        assert kinds == sorted(kinds, key=[one, two].index), "it goes to and fro"
        return sizes[kinds.count(one) - 1]

    assert largest_one_shot() == 2**30, "two ranks move the same bytes either way"
    assert [largest_one_shot(group_size=n) for n in (4, 8, 72)] == [256 * KIB, 128 * KIB, 8 * KIB]
    nvls = [largest_one_shot(group_size=n, access=Access.MULTIMEM) for n in (2, 8, 72)]
    assert nvls == [MIB, 128 * KIB, 8 * KIB], "a GPU sends the bytes once for every rank, through the switch as well"
    assert largest_one_shot(zero_copy_in=True) == ZERO_COPY_BYTES


def test_zero_copy_is_two_shots():
    small, large = (choose(size, zero_copy_in=True, zero_copy_out=True).config for size in (KIB, MIB))
    assert small.copy_in and small.algorithm is Algorithm.ONE_SHOT
    assert not large.copy_in and not large.copy_out and large.vector_bytes == 16
    assert choose(MIB, zero_copy_in=True).config.copy_out
    into_heap = choose(MIB, group_size=8, zero_copy_out=True).config
    assert into_heap.copy_in and not into_heap.copy_out


def test_launches_fit():
    for group_size in (2, 3, 8, 72):
        for access in Access:
            for target, sm_count in (("sm_90a", 132), ("sm_107a", 212), ("sm_90a", 2)):
                for num_bytes in (2, 30, 8 * KIB, MIB, 64 * MIB + 2):
                    plan = choose(num_bytes, group_size=group_size, access=access, target=target, sm_count=sm_count)
                    config = plan.config
                    assert config_text(config)
                    assert 1 <= plan.blocks <= min(MAX_BLOCKS, max(1, sm_count // 4))
                    # A thread for every rank, and enough for all copies of the epoch.
                    assert config.threads >= MAX_RANKS and config.threads * plan.blocks >= MAX_BLOCKS
                    assert config.vector_bytes == (32 if target == "sm_107a" and access is Access.PEERS else 16)
                    assert config.parts_at_once * config.unroll * config.vector_bytes <= 256
    assert choose(8 * KIB).blocks == 4 and choose(8 * KIB).config.threads == 128


def test_measured_numbers_win_where_they_apply():
    tuning = Tuning(Algorithm.TWO_SHOT, 7)
    plan = choose(MIB, tuning=tuning)
    assert plan.config.algorithm is Algorithm.TWO_SHOT and plan.blocks == 7
    assert choose(KIB, tuning=tuning, zero_copy_in=True).config.algorithm is Algorithm.ONE_SHOT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float64"}, "dtype is float64; it must be one of bfloat16, float16, float32"),
        ({"group_size": 1}, "a group of 1 ranks; it must be 2 to 72"),
        ({"group_size": 73}, "a group of 73 ranks"),
        ({"num_bytes": 2**32}, "it must be 1 to 2146435072 elements in one launch"),
        ({"num_bytes": 0}, "0 bytes of bfloat16"),
    ],
)
def test_what_no_kernel_takes_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        choose(**changes)


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in ITEM_BYTES])
def test_reference_adds_in_float32_in_the_order_of_ranks_and_rounds_once(dtype):
    generator = torch.Generator().manual_seed(1)
    xs = list((torch.randn(8, 1000, generator=generator) * 100).to(dtype))
    result = all_reduce(xs)
    exact = torch.stack(xs).double().sum(0)
    size = torch.stack(xs).double().abs().sum(0)
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 0}[dtype]
    assert result.dtype == dtype
    assert ((result.double() - exact).abs() <= exact.abs() * rounding * 1.001 + size * 2**-21).all()
    assert torch.equal(all_reduce([torch.tensor([-0.0]).to(dtype)] * 3).signbit(), torch.tensor([True]))
