"""Which models a rose flag accepts, what it refuses and how, and that without one nothing changes; both versions."""

import model_configs
import pytest
from vllm_probe import run_probe

import vllm_rose_plugin

pytestmark = pytest.mark.slow
DRAFT = {"method": "draft_model", "num_speculative_tokens": 2, "moe_backend": "rose_cutedsl", "max_model_len": 512}
BOTH = {"moe_backend": "rose_cutedsl", "linear_backend": "rose_cutedsl"}
ALL2ALL = "rose_nvlink"
DATA_PARALLEL = {
    "all2all_backend": ALL2ALL,
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "enforce_eager": True,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    paths = {"bf16": model_configs.write(root / "bf16", model_configs.MOE)}
    for name, quantization in {**model_configs.MXFP8, **model_configs.OTHER}.items():
        paths[name] = model_configs.write(root / name, model_configs.MOE, quantization)
    paths["dense"] = model_configs.write(root / "dense", model_configs.DENSE, model_configs.MXFP8["modelopt"])
    return paths


@pytest.fixture(scope="module")
def without_our_flags(models):
    cases = {f"unnamed {name}": {"model": path} for name, path in models.items()}
    cases["unnamed bf16_triton"] = {"model": models["bf16"], "moe_backend": "triton", "linear_backend": "marlin"}
    cases["unnamed bf16_lora"] = {"model": models["bf16"], "enable_lora": True}
    cases["unnamed online"] = {"model": models["bf16"], "quantization": "mxfp8"}
    return cases


@pytest.fixture(scope="module")
def results(models, without_our_flags, version):
    def rose(value):
        return {"additional_config": {"rose": value}}

    modelopt = models["modelopt"]
    cases = {name: {"model": path, **BOTH} for name, path in models.items()}
    cases |= {
        "bf16_moe_only": {"model": models["bf16"], "moe_backend": "rose_cutedsl"},
        "bf16_linear_only": {"model": models["bf16"], "linear_backend": "rose_cutedsl"},
        "online": {"model": models["bf16"], "quantization": "mxfp8", **BOTH},
        "online_fp8": {"model": models["bf16"], "quantization": "fp8_per_tensor", **BOTH},
        "lora": {"model": modelopt, "enable_lora": True, **BOTH},
        "per_quant": {"model": modelopt, "kernel_config": {"linear_backend_per_quant": {"mxfp8": "rose_cutedsl"}}},
        "w8a16": {"model": modelopt, **BOTH, **rose({"activation": "bf16"})},
        "draft_named": {"model": modelopt, "speculative_config": {**DRAFT, "model": models["bf16"]}},
        "draft_named_mxfp8": {"model": modelopt, "speculative_config": {**DRAFT, "model": modelopt}},
        "moe_only": {"model": modelopt, "moe_backend": "rose_cutedsl"},
        "bad_value_unused": {"model": modelopt, **rose({"activation": "int8"})},
        "bad_value": {"model": modelopt, **BOTH, **rose({"activation": "int8"})},
        "qk_norm_alone": {"model": models["bf16"], **rose({"qk_norm": "auto"})},
        "qk_norm_off": {"model": models["bf16"], **rose({"qk_norm": "off"})},
        "qk_norm_lora": {"model": models["bf16"], "enable_lora": True, **rose({"qk_norm": "auto"})},
        "qk_norm_draft": {
            "model": modelopt,
            "speculative_config": {key: value for key, value in DRAFT.items() if key != "moe_backend"}
            | {"model": models["bf16"]},
            **rose({"qk_norm": "auto"}),
        },
        "bad_qk_norm": {"model": models["bf16"], **rose({"qk_norm": "on"})},
        "w8a8_without_qk_norm": {"model": modelopt, **BOTH, **rose({"qk_norm": "off"})},
        "all_reduce_alone": {"model": models["bf16"], "tensor_parallel_size": 2, **rose({"all_reduce": "auto"})},
        "all_reduce_too": {"model": modelopt, **BOTH, **rose({"all_reduce": "auto", "all_reduce_timeout": 9})},
        "all_reduce_off": {"model": models["bf16"], **rose({"all_reduce": "off"})},
        "all_reduce_p2p": {"model": models["bf16"], **rose({"all_reduce": "p2p"})},
        "bad_all_reduce": {"model": models["bf16"], **rose({"all_reduce": "nccl"})},
        "bad_timeout": {"model": models["bf16"], **rose({"all_reduce": "auto", "all_reduce_timeout": 0})},
        "plain": {"model": models["bf16"]},
        "bad_key": {"model": modelopt, **BOTH, **rose({"activations": "bf16"})},
        "not_an_object": {"model": modelopt, **BOTH, **rose("bf16")},
        "all2all_alone": {"model": modelopt, **BOTH, "all2all_backend": ALL2ALL},
        "all2all": {"model": modelopt, **BOTH, **DATA_PARALLEL, **rose({"all_to_all_timeout": 5})},
        "all2all_bf16": {"model": models["bf16"], **DATA_PARALLEL},
        "all2all_compiled": {"model": models["bf16"], **DATA_PARALLEL, "enforce_eager": False},
    }
    return run_probe(version, "configs", stdin=without_our_flags | cases)


@pytest.mark.parametrize("name", [*model_configs.MXFP8, "online", "dense"])
def test_mxfp8_models_are_accepted_and_settings_are_hashed(results, name):
    recorded = results[name].get("additional_config", {}).get("rose", {})
    assert {key: value for key, value in recorded.items() if key != "target"} == {
        "activation": "mxfp8",
        "rounding": "rceil",
        "qk_norm": "auto",
        "all_reduce": "off",
        "version": vllm_rose_plugin.__version__,
    }, results[name]
    assert "the kernels run on NVIDIA GPUs" in recorded["target"], "what decides which ops a compiled graph holds"


def test_on_a_cpu_the_moe_flag_alone_names_the_flag_that_is_missing(results):
    assert "no MXFP8 linear kernel for a CPU; add --linear-backend rose_cutedsl" in results["moe_only"]["error"]


def test_an_mxfp8_draft_may_name_us_alone(results):
    assert results["draft_named_mxfp8"]["draft_moe_backend"] == "rose_cutedsl"
    assert "rose" in results["draft_named_mxfp8"]["additional_config"]


def test_settings_change_the_compile_hash(results):
    assert results["w8a16"]["additional_config"]["rose"]["activation"] == "bf16"
    assert results["w8a16"]["hash"] != results["modelopt"]["hash"]


@pytest.mark.parametrize("case", ["qk_norm_alone", "qk_norm_lora", "qk_norm_draft"])
def test_the_qk_norm_setting_names_us_for_models_of_any_kind(results, case):
    assert results[case]["additional_config"]["rose"]["qk_norm"] == "auto", results[case]
    assert "version" in results[case]["additional_config"]["rose"]
    assert results[case]["moe_backend"] == "auto"


def test_qk_norm_changes_the_compile_hash_and_off_names_nobody(results):
    assert results["qk_norm_alone"]["hash"] != results["plain"]["hash"]
    assert results["w8a8_without_qk_norm"]["hash"] != results["modelopt"]["hash"]
    assert results["qk_norm_off"]["additional_config"] == {"rose": {"qk_norm": "off"}}


def test_the_all_reduce_setting_names_us_for_the_all_reduce_alone(results):
    alone = results["all_reduce_alone"]["additional_config"]["rose"]
    assert alone["all_reduce"] == "auto" and alone["qk_norm"] == "off" and "version" in alone
    assert results["all_reduce_off"]["additional_config"] == {"rose": {"all_reduce": "off"}}
    too = results["all_reduce_too"]["additional_config"]["rose"]
    assert too["qk_norm"] == "auto" and too["all_reduce_timeout"] == 9.0
    assert results["all_reduce_too"]["hash"] != results["modelopt"]["hash"]
    assert results["all_reduce_alone"]["hash"] != results["plain"]["hash"]


def test_per_quant_override_counts_as_naming_us(results):
    assert "rose" in results["per_quant"]["additional_config"]


@pytest.mark.parametrize(
    ("case", "flags", "what"),
    [
        ("bf16", "--moe-backend rose_cutedsl and --linear-backend rose_cutedsl", "not quantized"),
        ("bf16_moe_only", "--moe-backend rose_cutedsl", "not quantized"),
        ("bf16_linear_only", "--linear-backend rose_cutedsl", "not quantized"),
        ("nvfp4", "--moe-backend rose_cutedsl", "'modelopt_fp4' without MXFP8 layers"),
        ("fp8_block", "--moe-backend rose_cutedsl", "'fp8' without MXFP8 layers"),
        ("compressed_tensors_fp8", "--moe-backend rose_cutedsl", "'compressed-tensors' without MXFP8 layers"),
        ("online_fp8", "--moe-backend rose_cutedsl", "'online' without MXFP8 layers"),
        ("lora", "--moe-backend rose_cutedsl", "--enable-lora can't be combined"),
        ("draft_named", '--speculative-config {"moe_backend": "rose_cutedsl"} can\'t serve the draft', "not quantized"),
    ],
)
def test_other_models_are_refused_in_one_sentence(results, case, flags, what):
    error = results[case]["error"]
    assert flags in error and what in error, error
    assert "rose_cutedsl serves MXFP8 models" in error and "`rose quantize`" in error


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("bad_value_unused", "'int8' is not allowed: Input should be 'mxfp8' or 'bf16'"),
        ("bad_value", "'int8' is not allowed: Input should be 'mxfp8' or 'bf16'"),
        (
            "bad_key",
            "unknown rose setting 'activations'; legal ones: activation, rounding, qk_norm, all_reduce, "
            "all_reduce_timeout, all_reduce_norm, all_to_all_timeout, locality, locality_force_domains, "
            "locality_linear, tune",
        ),
        ("not_an_object", '"rose" must be an object'),
        ("bad_qk_norm", "'on' is not allowed: Input should be 'auto', 'reference' or 'off'"),
        ("bad_all_reduce", "'nccl' is not allowed: Input should be 'auto', 'p2p', 'nvls' or 'off'"),
        ("bad_timeout", "0 is not allowed: Input should be greater than 0"),
        ("all_reduce_p2p", "can't be served: it needs NVIDIA GPUs, and this is cpu"),
    ],
)
def test_bad_settings_name_value_and_legal_range(results, case, message):
    error = results[case]["error"]
    assert message in error and "--additional-config" in error


def test_the_all_to_all_needs_data_and_expert_parallelism(results):
    assert "--all2all-backend rose_nvlink is for data parallelism" in results["all2all_alone"]["error"]
    assert "add --enforce-eager" in results["all2all_compiled"]["error"]
    recorded = results["all2all"]["additional_config"]["rose"]
    assert recorded["all_to_all_timeout"] == 5 and recorded["qk_norm"] == "auto", "and it is hashed"
    alone = results["all2all_bf16"]["additional_config"]["rose"]
    assert alone["qk_norm"] == "off" and "all_to_all_timeout" not in alone, "named for the all-to-all alone"


def test_without_our_flags_the_resolved_configuration_is_stock(results, without_our_flags, version):
    """The whole configuration and vLLM's compile hash, with the plugin and with it switched off, in a new process."""
    stock = run_probe(version, "configs", stdin=without_our_flags, new=True, VLLM_ROSE_DISABLE="1")
    assert {name: results[name] for name in without_our_flags} == stock
    assert all("hash" in result for result in stock.values())
