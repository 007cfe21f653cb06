"""Experts in parts, in both versions: vLLM's own layer is made, loaded, balanced and reloaded, beside a whole one."""

import pytest

pytestmark = pytest.mark.slow
WAYS = ("reference", "sm_90a")
NOTHING = dict.fromkeys(("handles", "reservations", "mappings", "bindings", "contexts", "streams"), 0)


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture
def result(probe, version, way):
    return probe(version, "expert_parts", way, "1")


def test_parts_have_the_bits_of_whole_weights(result, way):
    assert result["experts"] == "RoseCuteDslExperts" and result["of_whole"]
    assert result["split"] == {"w13": [2, 256], "w2": [2, 128]} and result["bits"] == [True] * 3
    if way == "sm_90a":
        assert result["streams"] == [0, 1, 0, 1], "a launch for each part, w13's before w2's"
        assert result["ways"] == "E=9;H=256;I=256;top_k=2: default up to any tokens, 2 domains of GPU 0"
        assert result["warmed_parts"] == [2, 2]


def test_no_weight_is_ever_whole(result, way):
    """Codes have no memory but the parts', each in its own domain; the row-major scales stay as loaded."""
    kinds = {"w13_weight": "meta", "w2_weight": "meta", "w13_weight_scale": "cpu", "w2_weight_scale": "cpu"}
    assert result["device_of_parameters"] == kinds
    if way == "sm_90a":
        assert result["buffers"] == ["rose_route_workspace"], "packed scales lie in the parts"
        assert result["domains"] == [[0], [1]] and result["held"] == NOTHING | dict.fromkeys(list(NOTHING)[:3], 2)


def test_a_state_dict_holds_whole_weights_and_takes_them(result):
    assert result["state_dict"] and result["taken"]


def test_eplb_moves_experts_in_all_parts(result):
    scales, codes, small = (
        [[9, 4096], [9, 2048]],
        [[9, 65536]] * 2 + [[9, 32768]] * 2,
        [[9, 2048]] * 2 + [[9, 1024]] * 2,
    )
    assert result["moved"] == [True, True]
    assert result["moved_shapes"] == scales + codes + small, "scales as loaded; codes and scales of each part"


def test_weights_are_loaded_again_in_place(result):
    assert result["reloaded"] and result["reload_changed"] and result["in_place"]


def test_two_engines_in_one_process(result, way):
    """What one holds goes with it, and leaves the other's."""
    assert result["two"] == [True, True] and result["second_alone"]
    if way == "sm_90a":
        two, one, none = result["handles"]
        assert (two - one, one - none) == (2, 2)


def test_auto_splits_only_what_is_faster(probe, version):
    result = probe(version, "expert_parts", "sm_90a", "1")
    assert result["auto"]["faster"].startswith("E=9;H=256;I=256;top_k=2: backfill up to any tokens")
    assert result["auto"]["as fast"] is result["auto"]["raising"] is None
    assert result["auto"]["uva"] is result["auto"]["prefetch"] is None, "offloaders copy parameters that have memory"
    assert result["auto"]["pinned"] is None, "the reference computes whole weights only"
    assert result["compared"] == [["default"], [1, 8, 64, 512, 2048], [2, 2], 2, False]
    assert result["checked"] == [[1, 64, 2048], "torch.float32"], "in fp32, though vLLM loads with the model's dtype"
    (decided,) = result["decided"].values()
    assert decided["split"] and decided["gain"] == 5 and set(decided["ways"].values()) == {"default"}


def test_what_decides_kernels_is_measured_before_the_ways_are_checked(probe, version):
    """Else parts would be served by kernels that no check has seen. And on the host, unless a device is named."""
    measured = probe(version, "expert_parts", "sm_90a", "1")["measured"]
    assert measured == ["tune_experts on cpu", "ask_for_one_launch on cpu", "compare on cpu"]


def test_start_up_ends_where_nothing_computes_parts(probe, version):
    """Not the first forward pass: the reference takes whole weights only."""
    needs = probe(version, "expert_parts", "sm_90a", "1")["without_reference"]
    assert needs == {"moe_experts": 'experts in parts: set --additional-config \'{"rose": {"locality": "off"}}\''}


def test_refusals_on_a_gpu(probe, version):
    refusals = probe(version, "expert_parts", "sm_90a", "1")["refusals"]
    assert refusals["auto"] == "whole"
    one_domain = refusals["single_launch"]
    assert "locality=single_launch of rose_cutedsl can't be had here: the driver serves CUDA 13.0" in one_domain
    assert 'Set it to "auto" or "off"' in one_domain and '"locality_force_domains": 2' in one_domain
    assert "CUDA_ERROR_OUT_OF_MEMORY" in refusals["no room"] and "in locality domain 1" in refusals["no room"]
    assert refusals["left by it"] == NOTHING, "what was made in domain 0 is given back"


def test_refusals_without_a_gpu(probe, version):
    refusals = probe(version, "expert_parts", "reference", "1")["refusals"]
    assert refusals["auto"] == refusals["tile"] == "whole"
    assert "locality=backfill of rose_cutedsl can't be had here: the kernels run on NVIDIA GPUs" in refusals["no gpu"]
    for load_format in ("tensorizer", "ipc_cache", "modelexpress"):
        assert f"--load-format {load_format} fills parameters without" in refusals[load_format]
    assert "--enable-sleep-mode can't free or save" in refusals["sleep"]
    assert "--enable-sleep-mode can't free or save" in refusals["sleep of a draft"]
    assert "--cpu-offload-gb 2 moves parameters to the host" in refusals["uva"]
    assert "--offload-group-size 2 moves parameters to the host" in refusals["prefetch"]
    assert "--quantization mxfp8 makes the weights while it loads" in refusals["online"]
    assert "BatchedExperts reads whole weights" in refusals["batched"]
    assert "26 of 27 shards came through the layer's weight loader" in refusals["incomplete"]
    assert "loaded one by one, got [2, 4, 4]" in refusals["fused"]


def test_no_cuda_context(result):
    assert result["cuda_starts"] == 0
