"""EPLB in both versions: vLLM's own balancer moves the experts of a Qwen3-Next block, whose result must stay.

On a CPU vLLM neither allows EPLB nor maps ids, so the probe sets the flag past vLLM's check and maps ids as its Triton
kernel does; the block, the balancer, the state and what moves are vLLM's. The block has a shared expert behind a gate.
"""

import pytest
from vllm_probe import VERSIONS

from vllm_rose_plugin.seams.mxfp8_moe import METHODS

pytestmark = pytest.mark.slow
WAYS = ("reference", "sm_90a", "sm_100a")


@pytest.fixture(scope="module", params=VERSIONS)
def version(request):
    return request.param


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture
def result(probe, version, way):
    return probe(version, "expert_balance", way)


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


def test_the_shared_expert_is_added_by_vllm(result):
    assert result["without_shared"] == 40


def test_every_method_may_be_balanced_with_our_experts_only(probe, version):
    supports = probe(version, "expert_balance", "reference")["supports"]
    assert set(supports) == {key for key, (_, _, versions) in METHODS.items() if version in versions}
    for key, (ours, others) in supports.items():
        assert ours and others == (key in ("online", "quark")), key  # which vLLM allows for all its experts


def test_no_cuda_context(result):
    assert result["cuda_starts"] == 0
