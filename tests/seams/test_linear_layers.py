"""The linear backend as it serves on a GPU, on both versions of vLLM: kernels are emulated, everything else is real."""

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["", "1"], ids=["", "batch_invariant"])
def batch_invariant(request):
    return request.param


@pytest.fixture
def result(probe, version, batch_invariant):
    extra = {"VLLM_BATCH_INVARIANT": "1"} if batch_invariant else {}
    return probe(version, "linear", **extra)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_every_layer_of_a_modelopt_checkpoint(result, target, batch_invariant):
    found = result[target]
    assert set(found["layers"]) == {"column", "row", "merged", "qkv"}
    for name, layer in found["layers"].items():
        bias = name != "row"
        assert layer["kernel"] == "RoseCuteDslMxfp8LinearKernel"
        assert layer["state_dict"] == [*(["bias"] if bias else []), "weight", "weight_scale"]
        assert layer["state_unchanged"] and layer["packed_in_place"]
        assert 1 <= layer["extra_bytes_share"] < 4
        assert max(layer["errors"]) < 3e-3 and len(layer["errors"]) == 6, name
        assert (layer["configs"] == 1) == bool(batch_invariant), "one for every number of tokens"
        assert {shape["bias"] for shape in layer["asked"]} == {False, bias}, "checked with and without"
        assert {shape["batch_invariant"] for shape in layer["asked"]} == {bool(batch_invariant)}
        assert "takes activations that are" in layer["wrong_key"]
        assert layer["input_key_is_mxfp8"] == (target != "sm_90a")
        assert layer["input_key_is_none"] == (target == "sm_90a")
        assert not layer["pre_processed"], "packed scales aren't parameters"
    assert found["reference_calls"] == 0


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_other_methods(result, target):
    assert result[target]["compressed_tensors"] < 3e-3
    online = result[target]["online"]
    assert online["kernel"] == "RoseCuteDslMxfp8LinearKernel" and online["packed"] >= 64 * 96 // 32
    assert online["error"] < 3e-3 and online["weight_error"] < 4e-2, "as close to the bf16 weight as MXFP8 is"


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_two_ranks_are_one_whole_layer(result, target):
    """Through vLLM's loaders; a row-parallel layer's bias is added by the first rank alone."""
    errors = result[target]["ranks"]
    assert set(errors) == {"column", "merged", "qkv", "row"}
    assert max(errors[name] for name in ("column", "merged", "qkv")) < 3e-3
    assert errors["row"] < 5e-3, "both ranks round"


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_what_is_not_served_is_named(result, target):
    rows, few, dtype, activation = result[target]["refusals"]
    assert "N=60 of the weight [60, 96] is not a multiple of 8" in rows
    assert "N=24 of the weight [24, 96] is not a multiple of 8 from 32 on" in few
    assert "serve with --dtype bfloat16" in dtype
    assert ("activation=bf16 is served on sm_90 only" in activation) == (target != "sm_90a")


def test_without_a_gpu_it_is_the_reference(result, batch_invariant):
    if batch_invariant:
        assert "VLLM_BATCH_INVARIANT=1 can't be kept on a CPU" in result["cpu"]["refusal"]
        return
    assert result["cpu"] == {"equal": True, "buffers": [], "pre_processed": True, "input_key": "None"}
