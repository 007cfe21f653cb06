"""The fused kernel on two GPUs, a process for each, over file descriptor handles. No multicast object."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "memory"))
sys.path.insert(0, str(Path(__file__).parents[1] / "all_reduce"))
from test_all_reduce_gpu import MIB, bits, digest, on_two_gpus, reducing

from vllm_rose_plugin.kernels.all_reduce.reference import all_reduce
from vllm_rose_plugin.kernels.ep_combine.launch import ep_combine
from vllm_rose_plugin.kernels.ep_combine.reference import ep_combine as reference

pytestmark = pytest.mark.multi_gpu

SHAPES = ((1, 4096, 8), (7, 2688, 6), (64, 4096, 10), (300, 7168, 8), (33, 96, 1), (20, 4096, 16))
"""(tokens, H, top_k)."""
WAYS = ({}, {"fused": True}, {"fused": True, "blocks": 1}, {"fused": False})


def inputs(num_tokens, hidden_size, top_k, seed, dtype=torch.bfloat16):
    """(ys, slots, weights, shared parts) of both ranks, the same on both."""
    g = torch.Generator("cuda").manual_seed(seed)
    owner = torch.randint(0, 2, (num_tokens, top_k), generator=g, device="cuda")
    ys, slots, shared = [], [], []
    for rank in range(2):
        mine = owner == rank
        rows = int(mine.sum())
        own = torch.full((num_tokens, top_k), -1, dtype=torch.int32, device="cuda")
        own[mine] = torch.randperm(rows, generator=g, device="cuda").to(torch.int32)
        scale = torch.exp2(torch.randint(-8, 8, (rows + 1, 1), generator=g, device="cuda").float())
        ys.append((torch.randn(rows + 1, hidden_size, generator=g, device="cuda") * scale).to(dtype))
        slots.append(own)
        shared.append(torch.randn(num_tokens, hidden_size, generator=g, device="cuda").to(dtype))
    return ys, slots, torch.rand(num_tokens, top_k, generator=g, device="cuda"), shared


def _any_size(rank, store, dtype):
    faults, digests = [], []
    with reducing(rank, store, heap_bytes=8 * MIB) as reduce:
        for seed, (num_tokens, hidden_size, top_k) in enumerate(SHAPES):
            ys, slots, weights, shared = inputs(num_tokens, hidden_size, top_k, seed, dtype)
            part = reduce.empty((num_tokens, hidden_size), dtype)
            for has_shared in (False, True):
                expected = reference(ys, slots=slots, topk_weights=weights, shared=shared if has_shared else None)
                for way in (*WAYS, {"fused": False, "part": part}):
                    out = ep_combine(
                        reduce,
                        ys[rank],
                        slots=slots[rank],
                        topk_weights=weights,
                        shared=shared[rank] if has_shared else None,
                        **way,
                    )
                    wrong = int((bits(out) != bits(expected)).sum())
                    faults += [(num_tokens, hidden_size, top_k, has_shared, sorted(way), wrong)] if wrong else []
                    digests.append(digest(out))
            del part, out, way  # which may lie in the buffer
        reduce.check()
    return faults, digests


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_size_in_one_launch_and_in_two(dtype):
    first, second = on_two_gpus(_any_size, dtype)
    assert first[0] == second[0] == []
    assert first[1] == second[1], "the ranks' bits differ"


def _replays(rank, store):
    shapes = ((1, 4096, 8), (64, 4096, 8), (700, 4096, 8))
    with reducing(rank, store) as reduce:
        given = [inputs(*shape, seed) for seed, shape in enumerate(shapes)]
        plain = given[1][3][rank].clone()

        def run():
            results = []
            for ys, slots, weights, shared in given:
                results.append(
                    ep_combine(reduce, ys[rank], slots=slots[rank], topk_weights=weights, shared=shared[rank])
                )
                results.append(reduce(plain))  # plain launches share the epochs
            return results

        expected = [result.clone() for result in run()]
        for result, (ys, slots, weights, shared) in zip(expected[::2], given, strict=True):
            assert torch.equal(bits(result), bits(reference(ys, slots=slots, topk_weights=weights, shared=shared)))
        assert torch.equal(bits(expected[1]), bits(all_reduce(given[1][3])))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for turn in range(1000):
            for result in results:
                result.fill_(float("nan"))
            graph.replay()
            for result, right in zip(results, expected, strict=True):
                wrong += (bits(result) != bits(right)).sum()
            if turn % 100 == 0:
                run()
        torch.cuda.synchronize()
        reduce.check()
        return int(wrong)


def test_a_thousand_replays_among_plain_launches_are_equal():
    assert on_two_gpus(_replays) == [0, 0]
