"""Linear layers in parts, in both versions: vLLM's own are made, loaded, exported and reloaded, beside whole ones."""

import pytest

pytestmark = pytest.mark.slow
WAYS = ("reference", "sm_90a")
PARTS = {"column": None, "row": None, "merged": [2, 64], "qkv": [2, 128]}
"""A half of "column" or "row" would be no multiple of a tile."""
WHOLE = dict.fromkeys(PARTS)


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture
def result(probe, version, way):
    return probe(version, "linear_parts", way, "1")


def test_only_on_request(result):
    assert result["unasked"] == WHOLE and result["parts"] == PARTS


def test_parts_give_what_whole_weights_give(result, way):
    assert result["forward"] == dict.fromkeys(PARTS, True)
    assert result["calls"] == {"rose" if way == "sm_90a" else "reference": 2}
    assert result["no_tokens"] == [0, 256] and result["three_dimensions"] == [2, 3, 256]


def test_a_weight_in_parts_has_no_other_memory(result, way):
    assert result["devices"] == result["meta_again"] == {"column": "cpu", "row": "cpu", "merged": "meta", "qkv": "meta"}
    assert {"qkv.rose_part0_weight", "qkv.rose_part1_scale"} <= set(result["buffers"])
    if way == "sm_90a":
        assert result["domains"] == [[0] * 4, [1] * 4], "codes and scales of both layers, each beside its SMs"
        with_scales, without = result["handles"]
        assert with_scales - without == 8, "two parts of two layers of two models, once nobody has them"


def test_a_state_dict_holds_whole_weights_and_takes_them(result):
    assert result["state_dict"] and result["taken"] == dict.fromkeys(PARTS, True)


def test_weights_are_loaded_again_in_place(result):
    assert result["reloaded"] == result["changed"] == [True, True] and result["in_place"]
    assert "can't be loaded in place: load with vLLM's reload_weights" in result["in_place_load"]
    assert '"locality_linear": false' in result["in_place_load"]


def test_auto_splits_only_what_is_faster_and_right(probe, version):
    auto = probe(version, "linear_parts", "sm_90a", "1")["auto"]
    assert auto["faster"] == auto["faster, named"] == auto["as fast, named"] == PARTS
    assert auto["as fast"] == auto["wrong"] == auto["raising"] == auto["pinned"] == WHOLE
    assert "can't be had here: single_launch failed its check for N=128;K=96: 3 rows are off" in auto["wrong, named"]
    assert "no provider passed its self-check" in auto["raising, named"]
    assert "Set locality_linear to false" in auto["raising, named"]


def test_what_is_compared_and_said(probe, version):
    """Without a bias too: of a row-parallel layer one rank alone adds it."""
    result = probe(version, "linear_parts", "sm_90a", "1")
    tokens = [1, 8, 64, 512, 2048]
    assert result["compared"] == [
        [n, 96, bias, tokens, [1, 64, 2048], 2, False] for n in (128, 256) for bias in (False, True)
    ]
    assert set(result["decided"]) == {"N=128;K=96", "N=256;K=96"}
    assert all(each["split"] and each["gain"] == 5 for each in result["decided"].values())
    assert result["without_reference"] == {
        "mxfp8_linear": 'linear layers in parts: set --additional-config \'{"rose": {"locality_linear": false}}\''
    }


def test_refusals(result, way):
    refusals = result["refusals"]
    assert refusals["auto"] == PARTS, "the load format"
    for name, why in (
        ("tensorizer", "--load-format tensorizer fills parameters"),
        ("uva", "--cpu-offload-gb 2 moves parameters to the host"),
        ("sleep", "--enable-sleep-mode can't free or save memory in domains"),
        ("online", "--quantization mxfp8 makes the weights while it loads"),
    ):
        assert why in refusals[name] and "locality_linear=true with locality=single_launch" in refusals[name]
    if way == "reference":
        assert "the kernels run on NVIDIA GPUs" in refusals["no gpu"]
        return
    assert "the driver serves CUDA 13.0" in refusals["one domain"]
    assert '"locality_force_domains": 2' in refusals["one domain"]
    assert refusals["one domain, auto"] == WHOLE
    assert "CUDA_ERROR_OUT_OF_MEMORY" in refusals["no room"] and "in locality domain 1" in refusals["no room"]
    assert set(refusals["left by it"].values()) == {0}, "what was made in domain 0 is given back"
