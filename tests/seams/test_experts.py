"""The MoE backend as it serves on a GPU, on both versions of vLLM: kernels are emulated, everything else is real."""

import pytest

from vllm_rose_plugin.seams.mxfp8_moe import METHODS

pytestmark = pytest.mark.slow
TARGETS = ("sm_90a", "sm_100a")


@pytest.fixture
def result(probe, version):
    return probe(version, "experts")


@pytest.mark.parametrize("target", TARGETS)
def test_every_method_computes_and_keeps_its_parameters(result, version, target):
    found = result[target]["methods"]
    assert set(found) == {key for key, (_, _, versions) in METHODS.items() if version in versions}
    for key, method in {**found, "elsewhere": result[target]["elsewhere"]}.items():
        assert method["experts"] == "RoseCuteDslExperts"
        assert method["wrong"] == [] and method["checked"] >= 11, key
        assert method["state_dict"] == ["w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"]
        assert method["state_unchanged"] and method["in_place"], key
        assert method["buffers"] == ["rose_route_workspace", "rose_w13_scale", "rose_w2_scale"]
        assert 1 <= method["extra_share"] < 3  # small matrices; what fills up the tiles counts
        assert method["warmed"]["max_tokens"] == 200 and method["warmed"]["weighted"]
    assert result[target]["launches"] == ["combine", "route_and_dispatch", "w13", "w2"]


@pytest.mark.parametrize("target", TARGETS)
def test_experts_of_other_ranks(result, target):
    warmed = result[target]["elsewhere"]["warmed"]
    assert (warmed["num_local_experts"], warmed["num_experts"], warmed["has_map"]) == (4, 8, True)
    assert not result[target]["methods"]["modelopt"]["warmed"]["has_map"]


@pytest.mark.parametrize("target", TARGETS)
def test_router_weight_on_input_is_not_applied_again(result, target):
    found = result[target]["on_input"]
    assert found["wrong"] == [] and found["warmed"]["top_k"] == 1 and not found["warmed"]["weighted"]


@pytest.mark.parametrize("target", TARGETS)
def test_chunks_do_not_overwrite_each_other_in_vllms_buffers(result, target):
    assert result[target]["chunks"]["wrong"] is False
    assert result[target]["chunks"]["bytes"] < 64 * 1024


@pytest.mark.parametrize("target", TARGETS)
def test_our_kernels_and_no_others_run_and_are_checked(result, target):
    assert set(result[target]["calls"]) == {"moe_experts"}
    assert result[target]["calls"]["moe_experts"] == ["rose"]
    assert result[target]["needed"] == ["moe_experts"]
    shape = result[target]["shape"]
    assert (shape["num_tokens"], shape["hidden_size"], shape["intermediate_size"]) == (1, 96, 64)
    assert (shape["num_local_experts"], shape["num_experts"], shape["top_k"]) == (4, 4, 2)
    assert (shape["dtype"], shape["activation"], shape["captured"]) == ("bfloat16", "mxfp8", False)


@pytest.mark.parametrize("target", TARGETS)
def test_what_the_kernels_do_not_serve_is_named(result, target):
    refusals = {name: reason or "" for name, (_, reason) in result[target]["refusals"].items()}
    assert "serve with --dtype bfloat16" in refusals["dtype"]
    assert "top_k of 1 to 16, the model has 17" in refusals["top_k"]
    assert "up to 512 experts on a rank, here are 513: add --enable-expert-parallel" in refusals["experts"]
    assert ("activation=bf16 is served on sm_90 only" in refusals["activation"]) == (target != "sm_90a")


@pytest.mark.parametrize("target", TARGETS)
def test_the_experts_of_qwen3_5_are_served(result, target):
    found = result[target]["qwen3_5"]
    assert len(found) == 3 and all(case == [True, None] for case in found.values()), found


def test_cuda_graphs_are_refused_only_where_the_reference_serves(result):
    graphs = result["graphs"]
    assert graphs["graphs sm_90a"] == [True, None] and graphs["eager None"] == [True, None]
    accepted, reason = graphs["graphs None"]
    assert not accepted and "can't be captured in CUDA graphs; add --enforce-eager" in reason


def test_no_cuda_context(result):
    assert result["cuda_starts"] == 0
