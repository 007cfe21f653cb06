"""The router's PTX, run on the CPU with its blocks side by side, against the reference."""

from dataclasses import replace

import pytest
import route_cases as cases
import torch

from vllm_rose_plugin.kernels.moe_route import config as route
from vllm_rose_plugin.kernels.moe_route.reference import route_tokens


def config_for(ids, num_experts, *, alignment=1, expert_map=None, scale_rows=False, threads=128, items=1):
    """Small blocks, so that there are many."""
    chosen = route.choose_config(
        num_pairs=max(1, ids.numel()),
        num_experts=num_experts,
        alignment=alignment,
        id_dtype=str(ids.dtype).removeprefix("torch."),
        has_map=expert_map is not None,
        scale_rows=scale_rows,
        sm_count=cases.SM_COUNT,
    )
    return replace(chosen, threads=threads, items=items)


def expected_scale_rows(expected, ids_shape) -> torch.Tensor:
    """Each run begins a tile of 128 scale rows."""
    tiles = -(-expected.expert_counts // 128)
    starts = (tiles.cumsum(0) - tiles) * 128
    out = torch.full(ids_shape, -1, dtype=torch.int32)
    for e, (first, count) in enumerate(
        zip(expected.expert_offsets.tolist(), expected.expert_counts.tolist(), strict=False)
    ):
        here = (expected.slots >= first) & (expected.slots < first + count)
        out[here] = (expected.slots - first + starts[e]).to(torch.int32)[here]
    return out


def check(config, ids, expert_map, *, target="sm_90a", seed=0, workspace=None):
    out, launch = cases.run_route(config, target, ids, expert_map, seed=seed, workspace=workspace)
    expected = route_tokens(
        ids, num_local_experts=config.num_experts, expert_map=expert_map, alignment=config.alignment
    )
    assert torch.equal(out.counts, expected.expert_counts)
    assert torch.equal(out.offsets, expected.expert_offsets)
    assert torch.equal(out.slots, expected.slots)
    if config.scale_rows:
        assert torch.equal(out.scale_rows, expected_scale_rows(expected, ids.shape))
    assert launch.cooperative and launch.grid[0] == config.blocks(ids.numel())
    return out


def random_ids(num_tokens, top_k, num_ids, *, seed=0, dtype=torch.int32, strange=True):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, num_ids, (num_tokens, top_k), generator=g)
    if strange:
        odd = torch.rand(num_tokens, top_k, generator=g) < 0.15
        values = torch.tensor([-1, num_ids, num_ids + 1000, -(2**31), 2**31 - 1])
        ids[odd] = values[torch.randint(0, len(values), (int(odd.sum()),), generator=g)]
    return ids.to(dtype)


@pytest.mark.parametrize("num_experts", [1, 3, 8, 31, 32, 33, 128, 160, 512])
@pytest.mark.parametrize("alignment", [1, 64])
def test_any_number_of_experts(num_experts, alignment):
    ids = random_ids(97, 8, num_experts, seed=num_experts)
    check(config_for(ids, num_experts, alignment=alignment, threads=512), ids, None)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_blocks_and_warps(seed):
    ids = random_ids(61, 5, 17, seed=seed, dtype=torch.int64)
    config = config_for(ids, 17, alignment=8, threads=64 * (1 + seed % 2), items=1 + seed % 3, scale_rows=True)
    check(config, ids, None, seed=seed)


@pytest.mark.parametrize("top_k", [1, 2, 3, 6, 7, 10, 16])
def test_any_top_k(top_k):
    for num_tokens in (1, 2, 33):
        ids = random_ids(num_tokens, top_k, 20, seed=top_k)
        check(config_for(ids, 20, alignment=3), ids, None)


def test_ids_of_64_bits_are_compared_in_64_bits():
    ids = random_ids(40, 4, 12, dtype=torch.int64, strange=False)
    ids[3, 1], ids[7, 0], ids[9, 2], ids[11, 3] = 2**32 + 3, -(2**40), 2**62, -(2**32) + 5
    expert_map = torch.arange(12, dtype=torch.int32)
    check(config_for(ids, 12), ids, None)
    check(config_for(ids, 12, expert_map=expert_map), ids, expert_map)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_expert_map(dtype):
    expert_map = torch.full((128,), -1, dtype=torch.int32)
    expert_map[torch.randperm(128, generator=torch.Generator().manual_seed(5))[:16]] = torch.arange(
        16, dtype=torch.int32
    )
    expert_map[5], expert_map[7] = 16, 2**30  # name no expert of this rank
    expert_map[6] = -3
    ids = random_ids(120, 8, 128, dtype=dtype)
    check(config_for(ids, 16, expert_map=expert_map, scale_rows=True), ids, expert_map)


def test_everything_to_one_expert_and_nothing_here():
    for value in (0, 6, -1, 7):
        ids = torch.full((50, 8), value, dtype=torch.int32)
        out = check(config_for(ids, 7, alignment=128, scale_rows=True), ids, None)
        assert out.counts.sum() == (0 if value in (-1, 7) else 400)


@pytest.mark.parametrize("load", [0, 1, 31, 32, 33, 127, 128, 129])
def test_loads_around_warps_and_tiles(load):
    ids = torch.full((160, 2), 9, dtype=torch.int32).view(-1)
    ids[:load] = 4
    ids = ids[torch.randperm(320, generator=torch.Generator().manual_seed(load))].view(160, 2)
    for alignment in (1, 128):
        check(config_for(ids, 12, alignment=alignment, scale_rows=alignment == 1), ids, None)


def test_a_token_may_name_an_expert_twice():
    ids = torch.tensor([[3, 3, 1, 3], [1, 1, 1, 1]], dtype=torch.int32)
    out = check(config_for(ids, 4), ids, None)
    assert out.slots.tolist() == [[5, 6, 0, 7], [1, 2, 3, 4]]


def test_one_workspace_serves_launches_of_any_size_in_turn():
    workspace = cases.new_workspace(24)
    for step, num_tokens in enumerate((40, 3, 90, 1, 90, 41)):
        ids = random_ids(num_tokens, 4, 24, seed=step)
        check(config_for(ids, 24), ids, None, seed=step, workspace=workspace)


@pytest.mark.parametrize("target", cases.TARGETS)
def test_the_configs_of_calls_on_every_target(target):
    ids = random_ids(700, 8, 128, dtype=torch.int64)
    expert_map = torch.arange(128, dtype=torch.int32).roll(3) % 64
    config = config_for(ids, 64, expert_map=expert_map, scale_rows=True, alignment=1, threads=512, items=8)
    assert config == route.choose_config(
        num_pairs=5600,
        num_experts=64,
        alignment=1,
        id_dtype="int64",
        has_map=True,
        scale_rows=True,
        sm_count=cases.SM_COUNT,
    )
    check(config, ids, expert_map, target=target)
