"""Routing against the loop in the oracle."""

import kernel_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rose_plugin.kernels.moe_route.reference import route_tokens


def assert_matches_oracle(topk_ids, num_local_experts, expert_map, alignment, dtype=torch.int64) -> None:
    top_k = len(topk_ids[0]) if topk_ids else 2
    ids = torch.tensor(topk_ids, dtype=dtype).view(len(topk_ids), top_k)
    map_tensor = None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32)
    routing = route_tokens(ids, num_local_experts=num_local_experts, expert_map=map_tensor, alignment=alignment)
    assert all(part.dtype == torch.int32 for part in routing)
    assert routing.slots.shape == ids.shape
    expected = oracle.route(topk_ids, num_local_experts, expert_map, alignment)
    assert tuple(part.tolist() for part in routing) == expected


@st.composite
def routings(draw):
    num_local = draw(st.integers(1, 6))
    num_global = num_local if draw(st.booleans()) else draw(st.integers(num_local, 12))
    expert_map = None
    if num_global != num_local or draw(st.booleans()):
        local = draw(st.permutations([*range(num_local), *([-1] * (num_global - num_local))]))
        expert_map = list(local)
    top_k = draw(st.integers(1, 4))
    wild = st.one_of(
        st.integers(0, num_global - 1), st.sampled_from([-1, -2, num_global, num_global + 1, 2**31 - 1, -(2**31)])
    )
    ids = draw(st.lists(st.lists(wild, min_size=top_k, max_size=top_k), max_size=12))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return ids, num_local, expert_map, draw(st.sampled_from([1, 2, 3, 32, 128])), dtype


@settings(deadline=None, max_examples=200)
@given(routings())
def test_any_routing(case):
    assert_matches_oracle(*case)


@pytest.mark.parametrize("alignment", [1, 32, 128])
def test_run_lengths_around_the_tile(alignment):
    lengths = [0, 1, 31, 32, 33, 127, 128, 129]
    experts = torch.repeat_interleave(torch.arange(8), torch.tensor(lengths))
    shuffled = experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(1))]
    assert_matches_oracle(shuffled.view(-1, 1).tolist(), 8, None, alignment)
    routing = route_tokens(shuffled.view(-1, 1), num_local_experts=8, alignment=alignment)
    assert routing.expert_counts.tolist() == lengths


@pytest.mark.parametrize(
    "topk_ids",
    [
        [],
        [[2, 0]],
        [[-1, -1]] * 3,
        [[-1, 2], [0, -1], [-1, -1], [2, 0]],
        [[1, 1]] * 5,  # all to one expert, and twice each
        [[0, 0], [0, 3], [3, 3]],
        [[4, 99], [-7, 2]],
    ],
)
def test_hard_rows(topk_ids):
    for expert_map in (None, [-1, 1, -1, 0], [3, 2, 1, 0], [-1, -1, -1, -1]):
        assert_matches_oracle(topk_ids, 4, expert_map, 32)
        assert_matches_oracle(topk_ids, 4, expert_map, 1, torch.int32)


def test_an_empty_map_and_a_wrong_local_index_route_nowhere():
    ids = torch.tensor([[0, 1]])
    empty = torch.empty(0, dtype=torch.int32)
    assert route_tokens(ids, num_local_experts=2, expert_map=empty).slots.tolist() == [[-1, -1]]
    too_large = torch.tensor([5, 0], dtype=torch.int32)
    assert route_tokens(ids, num_local_experts=2, expert_map=too_large).slots.tolist() == [[-1, 0]]


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match="at least 1 row, got 0"):
        route_tokens(torch.zeros(1, 1, dtype=torch.int64), num_local_experts=1, alignment=0)
    with pytest.raises(ValueError, match="T, top_k"):
        route_tokens(torch.zeros(3, dtype=torch.int64), num_local_experts=1)
