"""The fused kernel's PTX, run for all ranks of a group on the CPU, against the reference and the packers of tokens."""

from dataclasses import replace

import pytest
import torch
from norm_ranks import EPS, FP32_SCALES, TILED, NormRanks, RankBlock, norm_plan

from vllm_rose_plugin.kernels.all_reduce.config import Access, Algorithm
from vllm_rose_plugin.kernels.all_reduce_norm.config import NormPlan
from vllm_rose_plugin.kernels.all_reduce_norm.reference import all_reduce_norm
from vllm_rose_plugin.kernels.contracts import Activation, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm.tokens import pack_tokens

pytestmark = pytest.mark.slow
ONE, TWO = Algorithm.ONE_SHOT, Algorithm.TWO_SHOT
PERMUTED = TokenFormat.BF16_PERMUTED


def inputs(num_rows, hidden_size, size, *, seed=0, dtype=torch.bfloat16):
    """(one x for each rank, residual, weight): rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    spread = torch.exp2(torch.randint(-6, 6, (num_rows, 1), generator=generator).float())
    xs = [(normal(num_rows, hidden_size) * spread).to(dtype) for _ in range(size)]
    return xs, (normal(num_rows, hidden_size) * spread).to(dtype), (normal(hidden_size) + 1).to(dtype)


def bits(x):
    return x.view(torch.int16)


def steps_apart(x, y):
    """How many representable numbers lie between, element by element."""
    ordered = [torch.where(bits(t) < 0, -(bits(t).int() & 0x7FFF), bits(t).int()) for t in (x, y)]
    return (ordered[0] - ordered[1]).abs()


def assert_close(result, xs, residual, weight):
    """To the reference, whose sums of squares are added in another order; and to float64."""
    expected, _ = all_reduce_norm(xs, residual, weight, eps=EPS)
    apart = steps_apart(result, expected)
    assert apart.max() <= 2 and (apart > 0).float().mean() < 0.02
    exact, _ = all_reduce_norm(xs, residual, weight, eps=EPS, exact=True)
    unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[result.dtype]
    tiny = torch.finfo(result.dtype).smallest_normal
    assert ((result.double() - exact).abs() <= exact.abs() * 2.1 * unit + tiny).all()


def run(
    num_rows, hidden_size, *, size=2, seed=0, in_place=False, zero_copy=False, dtype=torch.bfloat16, rows=None, **how
):
    """The calls of all ranks and what they were made from; every rank has the same bits, and nothing else changed."""
    xs, residual, weight = inputs(num_rows, hidden_size, size, seed=seed, dtype=dtype)
    num_bytes = xs[0].nbytes
    target = how.get("target", "sm_90a")
    ranks = NormRanks(size, max_bytes=num_bytes, heap_bytes=num_bytes if zero_copy else 0, seed=seed, target=target)
    plan = norm_plan(
        num_rows, hidden_size, size=size, zero_copy_in=zero_copy, dtype=str(dtype).removeprefix("torch."), **how
    )
    if zero_copy:  # the heuristic would copy something so small
        plan = NormPlan(replace(plan.config, algorithm=TWO, copy_in=False), plan.blocks)
    if rows is not None:
        plan = NormPlan(replace(plan.config, rows=rows), plan.blocks)
    calls = []
    for rank, x in enumerate(xs):
        if zero_copy:
            x = ranks.heap(rank, 0, x.numel(), dtype).view(x.shape).copy_(x)
        calls.append(ranks.tensors_of(plan, x, residual, weight, in_place=in_place))
        ranks.add_norm(rank, plan, calls[-1])
    ranks.run()
    _, expected = all_reduce_norm(xs, residual, weight, eps=EPS)
    for call, x in zip(calls, xs, strict=True):
        call.assert_fences()
        assert torch.equal(bits(call.x), bits(x)), "the input was written"
        assert torch.equal(bits(call.residual_out), bits(expected)), "the residual isn't the rounded sum's"
        assert torch.equal(call.out.view(torch.uint8), calls[0].out.view(torch.uint8)), "the ranks' bits differ"
        assert torch.equal(call.scales.view(torch.uint8), calls[0].scales.view(torch.uint8))
    assert not ranks.report.any()
    return calls, xs, residual, weight


@pytest.mark.parametrize("algorithm", [ONE, TWO])
@pytest.mark.parametrize(("num_rows", "hidden_size", "blocks"), [(1, 1280, 1), (2, 128, 2), (5, 384, 2), (9, 4224, 4)])
def test_any_size(algorithm, num_rows, hidden_size, blocks):
    calls, *given = run(num_rows, hidden_size, algorithm=algorithm, blocks=blocks, seed=num_rows)
    assert_close(calls[0].out, *given)


@pytest.mark.parametrize("size", [3, 4, 9])
def test_one_shot_and_two_shot_have_the_same_bits_for_any_number_of_ranks(size):
    results = []
    for algorithm, rows in ((ONE, 1), (ONE, 2), (TWO, 1), (TWO, 4)):
        calls, *given = run(7, 256, size=size, algorithm=algorithm, blocks=2, rows=rows, seed=size)
        results.append(bits(calls[0].out))
    assert_close(calls[0].out, *given)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("algorithm", [ONE, TWO])
def test_the_residual_in_place(algorithm):
    calls, *given = run(6, 512, size=3, algorithm=algorithm, blocks=2, in_place=True)
    assert_close(calls[0].out, *given)


@pytest.mark.parametrize("access", Access)
def test_zero_copy(access):
    calls, *given = run(6, 512, size=3, blocks=2, algorithm=TWO, zero_copy=True, access=access)
    assert_close(calls[0].out, *given)


@pytest.mark.parametrize("algorithm", [ONE, TWO])
def test_multimem_as_the_manual_describes_it(algorithm):
    calls, *given = run(5, 384, size=3, algorithm=algorithm, blocks=2, access=Access.MULTIMEM)
    assert_close(calls[0].out, *given)


@pytest.mark.parametrize("algorithm", [ONE, TWO])
def test_fp16_and_256_bits(algorithm):
    calls, *given = run(5, 384, algorithm=algorithm, blocks=2, dtype=torch.float16, target="sm_100a")
    assert_close(calls[0].out, *given)


@pytest.mark.parametrize("algorithm", [ONE, TWO])
@pytest.mark.parametrize(
    ("token_format", "activation", "target"),
    [
        (TILED, Activation.MXFP8, "sm_100a"),
        (FP32_SCALES, Activation.MXFP8, "sm_90a"),
        (PERMUTED, Activation.MXFP8, "sm_90a"),
        (PERMUTED, Activation.BF16, "sm_90a"),
    ],
)
def test_formats_hold_what_the_packer_makes_of_the_plain_result(algorithm, token_format, activation, target):
    for num_rows, rounding in ((1, Rounding.RCEIL), (6, Rounding.FLOOR)):
        how = {"size": 2, "algorithm": algorithm, "blocks": 2, "target": target, "seed": num_rows}
        plain, *_ = run(num_rows, 640, **how)
        (call, *_), *_ = run(num_rows, 640, token_format=token_format, activation=activation, rounding=rounding, **how)
        expected = pack_tokens(plain[0].out, token_format=token_format, activation=activation, rounding=rounding)
        assert torch.equal(call.out.view(torch.uint8), expected.data.view(torch.uint8))
        if token_format is FP32_SCALES:
            assert torch.equal(call.scales[:, :num_rows], expected.scales[:, :num_rows])
        elif token_format is TILED:
            assert torch.equal(call.scales, expected.scales), "rows that fill up a tile have scale 0"


def test_a_row_of_nan_stays_alone():
    xs, residual, weight = inputs(4, 256, 2)
    xs[1][2, 7] = float("nan")
    ranks = NormRanks(2, max_bytes=xs[0].nbytes)
    plan = norm_plan(4, 256, blocks=2, token_format=TILED, target="sm_90a")
    calls = [ranks.tensors_of(plan, x, residual, weight) for x in xs]
    for rank, call in enumerate(calls):
        ranks.add_norm(rank, plan, call)
    ranks.run()
    values = calls[0].out.view(torch.float8_e4m3fn).float()
    assert values[2].isnan().all() and not values[[0, 1, 3]].isnan().any()


@pytest.mark.parametrize("seed", range(3))
def test_launch_after_launch_with_plain_all_reduces_between(seed):
    """Both kernels share epochs, flags and staging buffers; ranks lag; inputs are written anew before each launch."""
    from test_all_reduce_bits import assert_bits, padded, plan_for

    from vllm_rose_plugin.kernels.all_reduce.reference import all_reduce

    size, rounds, shape = 3, 9, (7, 256)
    ranks = NormRanks(size, max_bytes=7 * 256 * 2, seed=seed)
    kinds = [norm_plan(*shape, size=size, algorithm=a, blocks=b) for a, b in ((ONE, 3), (TWO, 2), (ONE, 1))]
    plain = [plan_for(900, size=size, algorithm=a, blocks=b) for a, b in ((TWO, 3), (ONE, 1))]
    order = [ranks.random.randrange(5) for _ in range(rounds)]
    given = [inputs(*shape, size, seed=100 * seed + i) for i in range(rounds)]
    calls = [
        [ranks.tensors_of(kind, torch.zeros(shape).bfloat16(), *given[0][1:]) for kind in kinds] for _ in range(size)
    ]
    flat = [[padded(torch.zeros(900).bfloat16())[0] for _ in range(2)] for _ in range(size)]
    for rank in range(size):
        made: dict = {}
        for kind in order:
            if kind in made:
                ranks.queues[rank].append(made[kind])  # as a graph would
            elif kind < 3:
                made[kind] = ranks.add_norm(rank, kinds[kind], calls[rank][kind])
            else:
                made[kind] = ranks.add(rank, plain[kind - 3], *flat[rank])
    kept: list[list] = [[] for _ in range(size)]

    def keep(rank, number):
        kind = order[number]
        kept[rank].append(
            flat[rank][1].clone()
            if kind > 2
            else (calls[rank][kind].out.clone(), calls[rank][kind].residual_out.clone())
        )

    def before(rank, number):
        if number:
            keep(rank, number - 1)
        kind, (xs, residual, weight) = order[number], given[number]
        if kind > 2:
            flat[rank][0].copy_(xs[rank].flatten()[:900])
        else:
            for tensor, value in zip(calls[rank][kind], (xs[rank], residual, weight), strict=False):
                tensor.copy_(value)

    ranks.run(before=before)
    for rank in range(size):
        keep(rank, rounds - 1)
        for number, (xs, residual, weight) in enumerate(given):
            if order[number] > 2:
                assert_bits(kept[rank][number], all_reduce([x.flatten()[:900] for x in xs]))
                continue
            out, residual_out = kept[rank][number]
            assert torch.equal(bits(residual_out), bits(all_reduce_norm(xs, residual, weight, eps=EPS)[1]))
            assert_close(out, xs, residual, weight)
    assert ranks.ended == [rounds] * size


@pytest.mark.parametrize("algorithm", [ONE, TWO])
def test_a_dead_rank_is_reported_and_nobody_hangs(algorithm):
    xs, residual, weight = inputs(5, 256, 3)
    ranks = NormRanks(3, max_bytes=xs[0].nbytes)
    plan = norm_plan(5, 256, size=3, algorithm=algorithm, blocks=2)
    for number in range(3):
        for rank in range(3):
            if number == 0 or rank != 2:
                call = ranks.tensors_of(plan, xs[rank], residual, weight)
                ranks.add_norm(rank, plan, call, nanoseconds=20_000)
    ranks.run(pace=[1.0] * 3)
    for rank in range(2):
        word = int(ranks.report[rank])
        assert (word & 0xFF) - 1 == 2 and word >> 8 & 0xFF == 0 and word >> 16 == 2, "peer, phase, epoch"
    assert not ranks.report[2]
    looks = RankBlock.clock
    for rank in range(2):
        ranks.add_norm(rank, plan, ranks.tensors_of(plan, xs[rank], residual, weight), nanoseconds=20_000)
    ranks.run(pace=[1.0] * 3)
    assert RankBlock.clock == looks, "a rank that has given up waits again"
