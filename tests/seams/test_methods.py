"""Every MXFP8 MoE method and the linear kernel, run through the plugin in both versions on real vLLM code."""

import pytest

from vllm_rose_plugin.seams.mxfp8_moe import METHODS

pytestmark = pytest.mark.slow


@pytest.fixture
def result(probe, version):
    return probe(version, "methods")


def test_every_method_selects_our_experts_and_computes(result, version):
    assert set(result["methods"]) == {key for key, (_, _, versions) in METHODS.items() if version in versions}
    for key, method in result["methods"].items():
        assert method["experts"] == "RoseCuteDslExperts", key
        # Two roundings to bf16 (w2's rows, the sum) and none besides: 2**-9 each.
        assert method["row_error"] < 4e-3, key


def test_router_weight_on_input_is_not_applied_again(result):
    assert result["weight_on_input"]["row_error"] < 4e-3


def test_an_expert_map_may_change_in_place(result):
    assert len(result["expert_map"]) == 3 and max(result["expert_map"]) < 4e-3


def test_weights_hook_runs_once_for_each_kernel_that_the_method_makes(result):
    """ModelOpt and online guard against a second call; the others make a new kernel, which must be told too."""
    for key, method in result["methods"].items():
        assert set(method["weights_hook"]) == {"model.layers.7.mlp.experts"}, key
        assert len(method["weights_hook"]) == (1 if key in ("modelopt", "online") else 2), key


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("bias", "biases on experts"),
        ("lora", "LoRA"),
        ("activation", "GELU activation"),
        ("swiglu_limit", "swiglu_limit=7.0"),
        ("intermediate", "intermediate_size_per_partition=48 is not a multiple of 32"),
        ("swiglu_alpha", "swiglu_alpha=1.702"),
        ("swiglu_beta", "swiglu_beta=1.0"),
        ("swiglu_oai", "SWIGLUOAI activation"),
        ("elastic", "--enable-elastic-ep"),
        ("batch_invariant", "VLLM_BATCH_INVARIANT=1 can't be kept by the torch reference kernels"),
        ("all_to_all", "data_parallel_size=2"),
    ],
)
def test_what_is_not_supported_is_refused_in_a_sentence_that_says_what_is(result, case, reason):
    message = result["refusals"][case]
    assert message.startswith("--moe-backend rose_cutedsl can't serve this MoE layer: ")
    assert reason in message
    assert "rose_cutedsl serves MXFP8 models" in message


def test_linear_kernel_is_ours_where_it_is_named(result):
    assert result["linear"] == "RoseCuteDslMxfp8LinearKernel"
    assert "K=48 of the weight [96, 48] is not a multiple of 32" in result["linear_k48"]
    assert "has no kernel for a linear layer of this type" in result["linear_other"]


def test_auto_never_takes_ours(result):
    assert "RoseCuteDslMxfp8LinearKernel: needs --linear-backend rose_cutedsl" in result["linear_auto"]
    assert result["moe_auto"] == "Mxfp8EmulationTritonExperts"  # what stock vLLM's order comes to without a GPU
    assert "moe_backend='no_such_backend' is not supported for MXFP8 MoE" in result["moe_unknown"]


def test_unquantized_moe_beside_mxfp8_falls_back_to_vllms_choice(result):
    assert result["unquantized_moe_backend"] == "auto"


def test_no_cuda_context(result):
    assert (result["cuda_starts"], result["cuda_starts_are_seen"]) == (0, 1)
