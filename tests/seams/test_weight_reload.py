"""Weights loaded again in place, as vLLM's reload_weights does for training loops, in both versions of vLLM."""

import pytest

pytestmark = pytest.mark.slow
BUFFERS = {
    "experts": ["rose_route_workspace", "rose_w13_scale", "rose_w2_scale"],
    "linears": [f"{layer}.rose_weight_scale" for layer in ("column", "merged", "qkv", "row")],
}


@pytest.fixture
def result(probe, version):
    return probe(version, "weight_reload", "sm_90a", "1")  # arguments of the probe that it is made from


@pytest.mark.parametrize("layers", sorted(BUFFERS))
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_a_reload_has_the_bits_of_a_fresh_load(result, target, layers):
    """Outputs, and what graphs read that were captured before: packed scales, at the address that they had."""
    found = result[target][layers]
    assert found["as_fresh"] == [True, True] and found["changed"] == [True, True]
    assert found["buffers"] == BUFFERS[layers] and found["in_place"]
    assert found["in_state_dict"] == []


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_experts_read_the_scales_that_were_reloaded(result, target):
    assert result[target]["experts"]["read"]


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_a_reload_that_brings_nothing_changes_nothing(result, target):
    assert result[target]["experts"]["untouched"]
