"""Every byte of K and V arrives exactly once, for 4 KV heads (and others) at any tensor parallel size on both sides."""

import itertools

import pytest

from vllm_rose_plugin.recipes.check import kv_heads
from vllm_rose_plugin.recipes.check.kv_heads import coverage_problem, held_heads, reads

HEAD_BYTES = 2 * 3 * 4 * 2  # K and V of 3 tokens with 4 dims of 2 bytes
SIZES = range(1, 17)


def copied(prefill_ranks, decode_ranks, heads):
    """Decode blocks after all copies: for each byte the list of (head, byte) pairs that were written there."""
    blocks = []
    sources = [
        [(head, byte) for head in held_heads(ranks=prefill_ranks, rank=rank, heads=heads) for byte in range(HEAD_BYTES)]
        for rank in range(prefill_ranks)
    ]
    for rank in range(decode_ranks):
        block = [[] for _ in range(len(held_heads(ranks=decode_ranks, rank=rank, heads=heads)) * HEAD_BYTES)]
        for read in reads(
            prefill_ranks=prefill_ranks, decode_ranks=decode_ranks, rank=rank, heads=heads, head_bytes=HEAD_BYTES
        ):
            for offset in range(read.length):
                block[read.start + offset].append(sources[read.source_rank][read.source_start + offset])
        blocks.append(block)
    return blocks


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_all_pairs_of_sizes_up_to_16(heads):
    possible = 0
    for prefill_ranks, decode_ranks in itertools.product(SIZES, SIZES):
        problem = coverage_problem(
            prefill_ranks=prefill_ranks, decode_ranks=decode_ranks, heads=heads, head_bytes=HEAD_BYTES
        )
        divides = max(prefill_ranks, decode_ranks) % min(prefill_ranks, decode_ranks) == 0
        dealt = all(max(ranks, heads) % min(ranks, heads) == 0 for ranks in (prefill_ranks, decode_ranks))
        assert (problem is None) == (divides and dealt), (prefill_ranks, decode_ranks, problem)
        if problem is None:
            possible += 1
            for rank, block in enumerate(copied(prefill_ranks, decode_ranks, heads)):
                held = held_heads(ranks=decode_ranks, rank=rank, heads=heads)
                assert block == [[(head, byte)] for head in held for byte in range(HEAD_BYTES)]
    assert possible >= 25, "1, 2, 4, 8 and 16 on both sides at least"


def test_every_head_is_on_some_rank():
    for ranks in (1, 2, 4, 8, 16):
        held = [held_heads(ranks=ranks, rank=rank, heads=4) for rank in range(ranks)]
        assert {head for heads in held for head in heads} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "wrong, text",
    [
        (lambda read: {"start": read.start + 1}, "are written never"),
        (lambda read: {"length": read.length - 1}, "are written never"),
        (lambda read: {"source_start": read.source_start + HEAD_BYTES}, "reads beyond the block"),
        (lambda read: {"source_rank": 3 - read.source_rank}, "gets byte 0 of head"),
    ],
)
def test_a_wrong_copy_is_seen(monkeypatch, wrong, text):
    def spoiled(**sizes):
        return [kv_heads.Read(**{**vars(read), **wrong(read)}) for read in reads(**sizes)]

    monkeypatch.setattr(kv_heads, "reads", spoiled)
    problem = coverage_problem(prefill_ranks=4, decode_ranks=2, heads=4, head_bytes=HEAD_BYTES)
    assert problem is not None and text in problem
