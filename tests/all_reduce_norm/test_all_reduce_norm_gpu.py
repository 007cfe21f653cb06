"""The fused kernel on two GPUs, a process for each, over file descriptor handles. No multicast object."""

import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "memory"))
sys.path.insert(0, str(Path(__file__).parents[1] / "all_reduce"))
from test_all_reduce_gpu import MIB, bits, digest, on_two_gpus, reducing

from vllm_rose_plugin.kernels.all_reduce.config import Algorithm, Tuning
from vllm_rose_plugin.kernels.all_reduce.reference import all_reduce
from vllm_rose_plugin.kernels.all_reduce_norm.launch import all_reduce_norm
from vllm_rose_plugin.kernels.all_reduce_norm.reference import all_reduce_norm as reference
from vllm_rose_plugin.kernels.all_reduce_norm.tune import tune_norm, warm_norm
from vllm_rose_plugin.kernels.contracts import Activation, TokenFormat
from vllm_rose_plugin.kernels.gemm.tokens import pack_tokens
from vllm_rose_plugin.layers.group_norm import GroupNorm

pytestmark = pytest.mark.multi_gpu

EPS = 1e-6
SHAPES = ((1, 4096), (64, 4096), (133, 7168), (1000, 5120), (4096, 4096))
KINDS = (Tuning(Algorithm.ONE_SHOT, 1), Tuning(Algorithm.ONE_SHOT, 48), Tuning(Algorithm.TWO_SHOT, 33), None)


def inputs(num_rows, hidden_size, seed, dtype=torch.bfloat16):
    """(one x for each rank, residual, weight), the same on both ranks."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    spread = torch.exp2(torch.randint(-6, 6, (num_rows, 1), device="cuda", generator=generator).float())
    xs = [(normal(num_rows, hidden_size) * spread).to(dtype) for _ in range(2)]
    return xs, (normal(num_rows, hidden_size) * spread).to(dtype), (normal(hidden_size) + 1).to(dtype)


def fault_of(out, residual_out, xs, residual, weight):
    """What is wrong with a result, against the reference's residual and the norm in float64; empty if nothing is."""
    exact, _ = reference(xs, residual, weight, eps=EPS, exact=True)
    _, expected = reference(xs, residual, weight, eps=EPS)
    if not torch.equal(bits(residual_out), bits(expected)):
        return f"{int((bits(residual_out) != bits(expected)).sum())} elements of the residual differ"
    unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[out.dtype]
    far = (out.double() - exact).abs() > exact.abs() * 2.1 * unit + torch.finfo(out.dtype).smallest_normal
    return f"{int(far.sum())} elements are further from float64 than two roundings" if far.any() else ""


def _any_size(rank, store, dtype):
    faults, digests = [], []
    with reducing(rank, store) as reduce:
        for seed, shape in enumerate(SHAPES):
            of_kinds = []
            for tuning in KINDS:
                xs, residual, weight = inputs(*shape, seed, dtype)
                given, kept = xs[rank].clone(), residual.clone()
                how = {"residual": residual, "weight": weight, "eps": EPS, "tuning": tuning}
                out, new = all_reduce_norm(reduce, given, **how)
                faults.append((shape, tuning, fault_of(out, new, xs, kept, weight)))
                faults.append((shape, tuning, "" if torch.equal(bits(given), bits(xs[rank])) else "input written"))
                again, same = all_reduce_norm(reduce, given, residual_out=residual, **how)
                faults.append((shape, tuning, "" if torch.equal(bits(again), bits(out)) else "in place"))
                faults.append((shape, tuning, "" if torch.equal(bits(same), bits(new)) else "residual in place"))
                of_kinds.append(digest(out))
            faults.append((shape, "" if len({*of_kinds}) == 1 else "algorithms differ"))
            digests += of_kinds
        reduce.check()
    return [fault for fault in faults if fault[-1]], digests


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_size_in_place_and_out_of_place(dtype):
    first, second = on_two_gpus(_any_size, dtype)
    assert first[0] == second[0] == []
    assert first[1] == second[1], "the ranks' bits differ"


def _formats(rank, store):
    faults = []
    with reducing(rank, store) as reduce:
        for token_format in TokenFormat:
            for activation in Activation:
                if activation is Activation.BF16 and token_format is not TokenFormat.BF16_PERMUTED:
                    continue
                for shape in ((1, 4096), (130, 4096), (1000, 1280)):
                    for tuning in KINDS[1:3]:
                        xs, residual, weight = inputs(*shape, 7)
                        how = {"residual": residual, "weight": weight, "eps": EPS, "tuning": tuning}
                        plain, _ = all_reduce_norm(reduce, xs[rank], **how)
                        packed, _ = all_reduce_norm(
                            reduce, xs[rank], token_format=token_format, activation=activation, **how
                        )
                        expected = pack_tokens(plain, token_format=token_format, activation=activation)
                        same = torch.equal(packed.data.view(torch.uint8), expected.data.view(torch.uint8))
                        if expected.scales is not None:
                            columns = slice(shape[0]) if expected.scales.ndim == 2 else slice(None)
                            same &= torch.equal(packed.scales[..., columns], expected.scales[..., columns])
                        faults += [] if same else [(token_format.value, activation.value, shape, tuning)]
        reduce.check()
    return faults


def test_formats_hold_what_the_packer_makes_of_the_plain_result():
    assert on_two_gpus(_formats) == [[], []]


def _replays(rank, store):
    shapes = ((1, 4096), (32, 4096), (700, 4096))
    with reducing(rank, store, heap_bytes=16 * MIB) as reduce:
        given = [inputs(*shape, seed) for seed, shape in enumerate(shapes)]
        heap = reduce.empty(shapes[-1], torch.bfloat16)
        heap.copy_(given[-1][0][rank])
        plain = given[1][0][rank].clone()

        def run(heap):
            results = []
            for (xs, residual, weight), kind in zip(given, KINDS, strict=False):
                results += all_reduce_norm(reduce, xs[rank], residual=residual, weight=weight, eps=EPS, tuning=kind)
                results.append(reduce(plain))  # plain launches share the epochs
            xs, residual, weight = given[-1]
            results += all_reduce_norm(reduce, heap, residual=residual, weight=weight, eps=EPS)  # zero copy
            return results

        expected = [result.clone() for result in run(heap)]
        fault = fault_of(*expected[-2:], *given[-1])
        assert torch.equal(bits(expected[2]), bits(all_reduce(given[1][0])))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run(heap)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for turn in range(1000):
            for result in results:
                result.fill_(float("nan"))
            graph.replay()
            for result, right in zip(results, expected, strict=True):
                wrong += (bits(result) != bits(right)).sum()
            if turn % 100 == 0:
                run(heap)
        torch.cuda.synchronize()
        reduce.check()
        del heap
        return fault, int(wrong)


def test_a_thousand_replays_among_plain_launches_are_equal():
    assert on_two_gpus(_replays) == [("", 0), ("", 0)]


def _timed(rank, store, directory):
    os.environ["ROSE_CACHE_DIR"] = directory
    hidden_size, most_rows, faults = 4096, 256, []

    def unfused(x, residual, weight, eps):
        rows = reduce(x)
        return torch.nn.functional.rms_norm(rows + residual, (hidden_size,), weight, eps)

    shape = {"hidden_size": hidden_size, "dtype": torch.bfloat16, "most_rows": most_rows}
    with reducing(rank, store) as reduce:
        table = tune_norm(reduce, unfused=unfused, unfused_name="torch", **shape)
        again = tune_norm(reduce, unfused=None, unfused_name="torch", **shape)  # from the disk, or None is called
        kernels = warm_norm(reduce, table=table, **shape)
        norm = GroupNorm(reduce=reduce, table=table, **shape)
        for rows in (1, 2, 3, 64, 255, 256):
            xs, residual, weight = inputs(rows, hidden_size, rows)
            tuning = norm.takes(xs[rank], residual, weight)
            if tuning is not None:
                out, new = norm(xs[rank], residual=residual, weight=weight, eps=EPS, tuning=tuning)
                faults.append(fault_of(out, new, xs, residual, weight))
        torch.cuda.synchronize()
        reduce.check()
        return [fault for fault in faults if fault], [size for size, _ in table.rows], table == again, kernels, norm.why


def test_ranks_agree_for_which_rows_one_launch_is_faster():
    with tempfile.TemporaryDirectory() as directory:
        first, second = on_two_gpus(_timed, directory)
    assert first == second
    faults, sizes, same, kernels, why = first
    print(f"\n{kernels} kernels, {why}")
    assert faults == [] and same and sizes == [2**i * 8192 for i in range(9)]
    assert (kernels > 0) == bool(why)
