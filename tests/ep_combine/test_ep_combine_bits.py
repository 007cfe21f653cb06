"""The fused kernel's PTX, run for all ranks of a group on the CPU, against the reference: every bit."""

from dataclasses import replace

import pytest
import torch
from ep_ranks import EpRanks, RankBlock, assert_bits, assert_fences, ep_plan, fenced, operands

from vllm_rose_plugin.kernels.all_reduce.config import Access, Algorithm
from vllm_rose_plugin.kernels.all_reduce.reference import all_reduce
from vllm_rose_plugin.kernels.ep_combine.config import EpCombinePlan
from vllm_rose_plugin.kernels.ep_combine.reference import ep_combine

pytestmark = pytest.mark.slow


def expected_of(given, *, weighted=True, shared=False, out_dtype=None):
    return ep_combine(
        given.ys,
        slots=given.slots,
        topk_weights=given.weights if weighted else None,
        shared=given.shared if shared else None,
        out_dtype=out_dtype,
    )


def run(
    num_tokens, hidden_size, top_k, *, size=2, seed=0, dtype=torch.bfloat16, out_dtype=None, shared=False,
    weighted=True, change=None, **how,
):  # fmt: skip
    """All ranks' results, which must be the reference's; nothing else may have changed."""
    given = operands(seed, size=size, num_tokens=num_tokens, top_k=top_k, hidden_size=hidden_size, dtype=dtype)
    out_dtype = out_dtype or dtype
    plan = ep_plan(
        num_tokens,
        hidden_size,
        top_k,
        size=size,
        dtype=str(dtype).removeprefix("torch."),
        out_dtype=str(out_dtype).removeprefix("torch."),
        weighted=weighted,
        shared_dtype=str(dtype).removeprefix("torch.") if shared else None,
        **how,
    )
    if change:
        plan = EpCombinePlan(change(plan.config), plan.blocks)
    ranks = EpRanks(size, max_bytes=num_tokens * hidden_size * 2, seed=seed, target=how.get("target", "sm_90a"))
    outs = []
    for rank in range(size):
        out, whole = fenced((num_tokens, hidden_size), out_dtype)
        outs.append((out, whole, ranks.copies(given, rank)))
        ranks.add_combine(rank, plan, outs[-1][2], out)
    ranks.run()
    expected = expected_of(given, weighted=weighted, shared=shared, out_dtype=out_dtype)
    for rank, (out, whole, tensors) in enumerate(outs):
        assert_bits(out, expected)
        assert_fences(out, whole)
        for tensor, before in zip(tensors, (given.ys[rank], given.slots[rank], given.weights), strict=False):
            assert torch.equal(tensor, before), "an input was written"
    assert not ranks.report.any()
    return plan


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("num_tokens", "hidden_size", "top_k"), [(1, 4096, 8), (3, 96, 2), (5, 2688, 6), (4, 64, 16)])
def test_any_size(size, shared, num_tokens, hidden_size, top_k):
    run(num_tokens, hidden_size, top_k, size=size, shared=shared, seed=num_tokens)


@pytest.mark.parametrize("target", ["sm_100a", "sm_107a"])
def test_256_bits(target):
    plan = run(3, 512, 8, size=3, shared=True, target=target)
    assert plan.config.vector_bytes == 32


@pytest.mark.parametrize("blocks", [1, 3])
def test_more_vectors_than_threads(blocks):
    """Several turns of both loops, with several vectors at a time, the last turn in part."""
    plan = run(45, 256, 2, size=2, shared=True, blocks=blocks, seed=blocks)
    assert plan.blocks == blocks and (plan.config.threads, plan.config.combine.unroll, plan.config.sums) == (
        (512, 4, 4) if blocks == 1 else (512, 1, 1)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [True, False])
def test_dtypes_and_no_weights(dtype, out_dtype, weighted):
    run(3, 96, 4, size=3, dtype=dtype, out_dtype=out_dtype, weighted=weighted, shared=True)


@pytest.mark.parametrize("size", [4, 9])
def test_any_number_of_ranks(size):
    run(4, 128, 8, size=size, seed=size)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_multimem_as_the_manual_describes_it(target):
    plan = run(4, 256, 4, size=3, shared=True, access=Access.MULTIMEM, target=target)
    assert plan.config.vector_bytes == 16


def test_it_is_what_combine_and_all_reduce_give_one_after_the_other():
    """A token with all its experts on one rank, and one with none there: what a rank adds is rounded before."""
    given = operands(3, size=2, num_tokens=4, top_k=4, hidden_size=64)
    from vllm_rose_plugin.kernels.moe_combine.reference import combine_tokens

    parts = [combine_tokens(y, slots=s, topk_weights=given.weights) for y, s in zip(given.ys, given.slots, strict=True)]
    assert_bits(expected_of(given), all_reduce(parts))
    assert (parts[1][1] == 0).all() and (parts[0][2] == 0).all()


def test_the_machine_sees_a_wrong_config():
    """The check itself can fail."""
    with pytest.raises(AssertionError):
        run(3, 96, 2, change=lambda config: replace(config, combine=replace(config.combine, weighted=False)))


def test_ranks_differ_in_shared_and_alignment_of_slots():
    """Only blocks, threads and vectors have to be the same."""
    given = operands(5, size=2, num_tokens=3, top_k=8, hidden_size=256)
    ranks = EpRanks(2, max_bytes=3 * 256 * 2)
    plans = [ep_plan(3, 256, 8, shared_dtype="bfloat16", shared_alignment=8), ep_plan(3, 256, 8, slot_alignment=4)]
    outs = []
    for rank in range(2):
        out, _ = fenced((3, 256), torch.bfloat16)
        outs.append(out)
        ranks.add_combine(rank, plans[rank], ranks.copies(given, rank), out)
    ranks.run()
    zero = torch.zeros_like(given.shared[1])
    expected = ep_combine(given.ys, slots=given.slots, topk_weights=given.weights, shared=[given.shared[0], zero])
    for out in outs:
        assert_bits(out, expected)


@pytest.mark.parametrize("seed", range(3))
def test_launch_after_launch_with_plain_all_reduces_between(seed):
    """Both kernels share epochs, flags and staging buffers; ranks lag; inputs are written anew before each launch."""
    from test_all_reduce_bits import padded, plan_for

    size, rounds, num_tokens, hidden_size, top_k = 3, 9, 5, 256, 4
    ranks = EpRanks(size, max_bytes=num_tokens * hidden_size * 2, seed=seed)
    kinds = [ep_plan(num_tokens, hidden_size, top_k, size=size, blocks=blocks) for blocks in (1, 2)]
    plain = [
        plan_for(900, size=size, algorithm=a, blocks=b) for a, b in ((Algorithm.TWO_SHOT, 3), (Algorithm.ONE_SHOT, 1))
    ]
    order = [ranks.random.randrange(4) for _ in range(rounds)]
    # Every round's rows have slots of their own, below the fewest rows of a round.
    given = [
        operands(100 * seed + i, size=size, num_tokens=num_tokens, top_k=top_k, hidden_size=hidden_size)
        for i in range(rounds)
    ]
    most = max(len(y) for one in given for y in one.ys)
    for one in given:
        one.ys[:] = [torch.cat([y, torch.zeros(most - len(y), hidden_size).to(y.dtype)]) for y in one.ys]
    xs = [[torch.randn(900).bfloat16() for _ in range(size)] for _ in range(rounds)]
    calls = [[ranks.copies(given[0], rank) for _ in kinds] for rank in range(size)]
    outs = [[fenced((num_tokens, hidden_size), torch.bfloat16)[0] for _ in kinds] for _ in range(size)]
    flat = [[padded(torch.zeros(900).bfloat16())[0] for _ in range(2)] for _ in range(size)]
    for rank in range(size):
        made: dict = {}
        for kind in order:
            if kind in made:
                ranks.queues[rank].append(made[kind])  # as a graph would
            elif kind < 2:
                made[kind] = ranks.add_combine(rank, kinds[kind], calls[rank][kind], outs[rank][kind])
            else:
                made[kind] = ranks.add(rank, plain[kind - 2], *flat[rank])
    kept: list[list] = [[] for _ in range(size)]

    def keep(rank, number):
        kind = order[number]
        kept[rank].append((flat[rank][1] if kind > 1 else outs[rank][kind]).clone())

    def before(rank, number):
        if number:
            keep(rank, number - 1)
        kind, one = order[number], given[number]
        if kind > 1:
            flat[rank][0].copy_(xs[number][rank])
        else:
            for tensor, value in zip(calls[rank][kind], (one.ys[rank], one.slots[rank], one.weights), strict=False):
                tensor.copy_(value)

    ranks.run(before=before)
    for rank in range(size):
        keep(rank, rounds - 1)
        for number, one in enumerate(given):
            expected = all_reduce(xs[number]) if order[number] > 1 else expected_of(one)
            assert_bits(kept[rank][number], expected)
    assert ranks.ended == [rounds] * size


def test_a_dead_rank_is_reported_and_nobody_hangs():
    given = operands(1, size=3, num_tokens=3, top_k=2, hidden_size=256)
    ranks = EpRanks(3, max_bytes=3 * 256 * 2)
    plan = ep_plan(3, 256, 2, size=3, blocks=1)
    for number in range(3):
        for rank in range(3):
            if number == 0 or rank != 2:
                out, _ = fenced((3, 256), torch.bfloat16)
                ranks.add_combine(rank, plan, ranks.copies(given, rank), out, nanoseconds=20_000)
    ranks.run(pace=[1.0] * 3)
    for rank in range(2):
        word = int(ranks.report[rank])
        assert (word & 0xFF) - 1 == 2 and word >> 8 & 0xFF == 0 and word >> 16 == 2, "peer, phase, epoch"
    assert not ranks.report[2]
    looks = RankBlock.clock
    for rank in range(2):
        out, _ = fenced((3, 256), torch.bfloat16)
        ranks.add_combine(rank, plan, ranks.copies(given, rank), out, nanoseconds=20_000)
    ranks.run(pace=[1.0] * 3)
    assert RankBlock.clock == looks, "a rank that has given up waits again"
