"""EPLB in both versions: vLLM's own balancer moves the experts of a Qwen3-Next block, whose result must stay.

On a CPU vLLM neither allows EPLB nor maps ids, so the probe sets the flag past vLLM's check and maps ids as its Triton
kernel does; the block, the balancer, the state and what moves are vLLM's. The block has a shared expert behind a gate.
"""

import pytest

from vllm_rose_plugin.seams.mxfp8_moe import METHODS

pytestmark = pytest.mark.slow
WAYS = ("reference", "sm_90a", "sm_100a")


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture
def result(probe, version, way):
    return probe(version, "expert_balance", way, "1")


@pytest.fixture(params=("reference", "sm_90a"))
def two_ranks(probe, version, request):
    return probe(version, "expert_balance", request.param, "2")


def test_results_stay_while_experts_move(result, way):
    assert result["experts"] == "RoseCuteDslExperts"
    assert result["far"] == [0, 0, 0, 0]
    assert result["stale"] == [40, 40, 40], "experts didn't move"
    assert result["in_place"] and result["sent"] == 0
    if way == "reference":
        assert set(result["calls"]["grouped_gemm"]) == {"reference"}
    else:
        assert result["calls"] == {"moe_experts": ["rose"]}
        assert result["launches"] == ["combine", "route_and_dispatch", "w13", "w2"]


def test_replicas_share_the_tokens(result):
    """Physical experts 1, 2, 7 and 8 hold logical expert 0 first."""
    loads = result["loads"][0]
    assert sum(loads) == 40 * 2 and all(loads[i] > 0 for i in (1, 2, 7, 8))


def test_the_packed_scales_move_too(result, way):
    """A balancer that leaves them behind spoils every row."""
    shapes = [shape[:2] for shape in result["moved"]]
    weights = [[9, 2 * 64 * 96], [9, 96 * 64], [9, 2 * 64 * 3], [9, 96 * 2]]
    assert shapes[:4] == weights
    assert len(shapes) == (4 if way == "reference" else 6) and all(shape[0] == 9 for shape in shapes)
    assert result["parameters_only"] == (0 if way == "reference" else 40)


def test_experts_move_between_two_ranks(two_ranks):
    """TP2 and EP2: experts that are needed on the other rank are sent there, packed scales with them."""
    assert two_ranks["others"] == [0] and two_ranks["sent"] >= len(two_ranks["moved"])
    assert two_ranks["far"] == [0, 0, 0, 0] and two_ranks["stale"] == [40, 40, 40]
    assert two_ranks["expert_map"] == [0, 1, 2, 3, 4, -1, -1, -1, -1, -1] and two_ranks["in_place"]
    on_gpu = two_ranks["calls"] == {"moe_experts": ["rose"]}
    assert [shape[0] for shape in two_ranks["moved"]] == [5] * (6 if on_gpu else 4)
    assert two_ranks["parameters_only"] == (40 if on_gpu else 0)


def test_the_shared_expert_is_added_by_vllm(result):
    assert result["without_shared"] == 40


def test_the_block_is_that_of_qwen3_5(probe, version):
    assert probe(version, "expert_balance", "reference", "1")["qwen3_5"] is True


def test_every_method_may_be_balanced_with_our_experts_only(probe, version):
    supports = probe(version, "expert_balance", "reference", "1")["supports"]
    assert set(supports) == {key for key, (_, _, versions) in METHODS.items() if version in versions}
    for key, (ours, others) in supports.items():
        assert ours and others == (key in ("online", "quark")), key  # which vLLM allows for all its experts


def test_no_cuda_context(result):
    assert result["cuda_starts"] == 0
