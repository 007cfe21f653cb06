"""Batched experts in both versions, behind vLLM's own DeepEP low-latency prepare and finalize.

DeepEP itself is a stand-in of one rank that fills every row that it sends nothing to with NaN; kernels are the torch
reference, or emulated by torch as on a GPU.
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
    return probe(version, "batched_experts", way)


def test_every_method_selects_them_and_computes(result, version, way):
    assert set(result["methods"]) == {key for key, (_, _, versions) in METHODS.items() if version in versions}
    for key, method in result["methods"].items():
        assert method["experts"] == "RoseCuteDslBatchedExperts", key
        assert method["finalize"] == "TopKWeightAndReduceDelegate"
        assert method["wrong"] == [0] * 7, key
        assert method["buffers"] == ([] if way == "reference" else ["rose_w13_scale", "rose_w2_scale"])


def test_our_kernels_run_and_are_checked(result, way):
    assert result["calls"] == {"moe_batched": ["reference" if way == "reference" else "rose"]}
    assert result["needed"] == ["moe_batched"]
    assert result["launches"] == ([] if way == "reference" else ["tokens", "w13", "w2"])
    few, many = result["shapes"]
    assert (few["max_tokens"], few["expected_rows"], few["num_local_experts"]) == (32, 4, 4)
    assert (many["max_tokens"], many["expected_rows"]) == (32, 64), "no more than a rank's 16 tokens"
    assert result["output"] == [4, 32, 2048]
    if way != "reference":
        assert result["warmed"]["most_rows"] == 64


def test_expected_rows_follow_what_vllm_knows_of_other_ranks(result):
    assert result["step"] == [32, 7, 32]


def test_tokens_may_arrive_quantized(result):
    assert result["quantized"] == [0, 0, 0]


def test_vllms_own_all_to_all_cannot_quantize_for_us(probe, version):
    """Why tokens are sent unquantized. Once this fails, vLLM can, and the experts may ask for MXFP8."""
    found = probe(version, "batched_experts", "reference")["vllm"]
    assert "does not support defer_input_quant" in found["defer"]
    assert found["mxfp8"].startswith("RuntimeError: shape '[4, -1,"), found["mxfp8"]
    methods = probe(version, "batched_experts", "reference")["methods"]
    assert {method["sent"] for method in methods.values()} == {"torch.bfloat16"}


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("limit", "swiglu_limit=7.0"),
        ("bias", "biases on experts"),
        ("lora", "LoRA"),
        ("other", "except with --all2all-backend deepep_low_latency or nixl_ep"),
    ],
)
def test_what_is_not_supported_is_named(probe, version, case, reason):
    message = probe(version, "batched_experts", "reference")["refusals"][case]
    assert message.startswith("--moe-backend rose_cutedsl can't serve this MoE layer: ") and reason in message


def test_no_cuda_context(result):
    assert result["cuda_starts"] == 0
