"""The self-check between a model's load and its first step, against both versions' warm-up code."""

import pytest
from vllm_probe import VERSIONS

pytestmark = pytest.mark.slow


@pytest.fixture(params=VERSIONS)
def result(probe, request):
    return probe(request.param, "self_check")


def test_layers_register_once_with_vllms_warm_up(result):
    assert result["registered"] == 1


def test_without_a_gpu_the_reference_serves_and_nothing_is_made(result):
    assert result["without_gpu"] == {"checked": [], "providers": {}, "made": []}


def test_a_family_is_checked_once_and_again_only_for_new_shapes(result):
    assert result["checked"] == [["doubling", [1, 64, 2048]], ["doubling", [1, 64, 2048, 3, 192, 6144]]]
    assert result["providers"] == {"doubling": "rose"}


def test_vllms_warm_up_makes_the_chosen_kernels(result):
    assert result["made"] == [1, 64, 2048]


def test_layers_without_a_fallback_end_start_up_where_the_reference_was_chosen(result):
    """Instead of the first request."""
    text = "plain: the self-check chose reference, which can't compute layers in parts: mend it so"
    assert result["no fallback"] == [text, text]


def test_a_family_that_nothing_passes_ends_start_up(result):
    assert result["error"] == "broken: none passed"


@pytest.mark.parametrize("version", VERSIONS)
def test_vllms_warm_up_checks_what_no_load_has_checked(probe, version):
    late = probe(version, "self_check", "unseen")
    checked = [["doubling", [1, 64, 2048]]]
    assert late == {"checked": checked, "providers": {"doubling": "rose"}, "made": [1, 64, 2048]}


def test_lines_of_the_kernels_reach_vllms_log(result):
    assert "a line of kernels/" in result["lines"]
    assert sum("kernels compiled in" in line for line in result["lines"]) == 3  # the budget, once for each check
