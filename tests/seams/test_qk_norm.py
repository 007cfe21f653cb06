"""Qwen3 and Qwen3-MoE out of vLLM's registry, in both versions: whose attention they have, and what it computes."""

from types import SimpleNamespace

import model_configs
import pytest
import torch
from vllm_probe import run_probe

from vllm_rose_plugin.config import QkNorm, RoseConfig

pytestmark = pytest.mark.slow

REFERENCE = {"additional_config": {"rose": {"qk_norm": "reference"}}}
"""The torch form of our op, which runs on this machine."""
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
FUSED = ("dense", "moe", "yarn", "half_rotated", "embedding", "beside_mxfp8")
STOCK = ("plain", "auto", "off", "off_beside_mxfp8", "other_setting", "small_heads", "float32")


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    moe = model_configs.MOE
    without_theta = {key: value for key, value in moe.items() if key != "rope_theta"}
    paths = {
        name: model_configs.write(root / name, *config)
        for name, config in {
            "dense": (model_configs.DENSE,),
            "moe": (moe,),
            "yarn": (without_theta | {"rope_parameters": YARN},),
            "half": (without_theta | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},),
            "mrope": (without_theta | {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [8, 12, 12]}},),
            "small_heads": (moe | {"head_dim": 32},),
            "mxfp8": (moe, model_configs.MXFP8["modelopt"]),
        }.items()
    }
    flags = {"moe_backend": "rose_cutedsl", "linear_backend": "rose_cutedsl"}
    return {
        "dense": {"model": paths["dense"], **REFERENCE},
        "moe": {"model": paths["moe"], **REFERENCE},
        "yarn": {"model": paths["yarn"], **REFERENCE},
        "half_rotated": {"model": paths["half"], **REFERENCE},
        "mrope": {"model": paths["mrope"], **REFERENCE},
        "embedding": {"model": paths["dense"], "runner": "pooling", "convert": "embed", **REFERENCE},
        "beside_mxfp8": {"model": paths["mxfp8"], **flags, **REFERENCE},
        "plain": {"model": paths["moe"]},
        "auto": {"model": paths["moe"], "additional_config": {"rose": {"qk_norm": "auto"}}},
        "off": {"model": paths["moe"], "additional_config": {"rose": {"qk_norm": "off"}}},
        "off_beside_mxfp8": {"model": paths["mxfp8"], **flags, "additional_config": {"rose": {"qk_norm": "off"}}},
        "other_setting": {"model": paths["moe"], "additional_config": {"rose": {"rounding": "floor"}}},
        "small_heads": {"model": paths["small_heads"], **REFERENCE},
        "float32": {"model": paths["moe"], "dtype": "float32", **REFERENCE},
        "transformers": {"model": paths["moe"], "model_impl": "transformers", **REFERENCE},
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One new cache of vLLM's for both versions: what one has written of our classes must not mislead the other."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def built(cases, cache, version):
    return run_probe(version, "qk_norm", stdin=cases, VLLM_CACHE_ROOT=cache)


@pytest.fixture(scope="module")
def stock(cases, version):
    names = ("dense", "moe", "embedding", "plain", "transformers")
    return run_probe(version, "qk_norm", stdin={name: cases[name] for name in names}, VLLM_ROSE_DISABLE="1")


@pytest.mark.parametrize("case", [*FUSED, "mrope"])
def test_attention_is_ours_in_every_layer_and_agrees_with_vllms(built, case):
    result = built["cases"][case]
    dense = case in ("dense", "embedding")
    assert result["attention"] == ["RoseQwen3Attention" if dense else "RoseQwen3MoeAttention"]
    assert result["reported"] == result["layers"] == model_configs.LAYERS
    computed = result["computed"]
    assert computed["fuses_rope"] == (case in FUSED)
    # vLLM's plain torch rounds its rotation in bfloat16 products too; the norm alone gives the same bits.
    assert max(computed["steps"]) <= (2 if case in FUSED else 0)
    assert min(computed["steps_of_input"]) > 20
    assert computed["same_v"] and computed["shapes"] == [[7, 256], [7, 128], [7, 128]]


@pytest.mark.parametrize("case", STOCK)
def test_attention_is_vllms_where_we_are_not_asked_or_cannot_serve(built, case):
    result = built["cases"][case]
    assert result["attention"] == ["Qwen3MoeAttention"]
    assert result["reported"] == 0 and result["layers"] == model_configs.LAYERS


def test_settings_are_recorded_only_where_they_name_us(built):
    recorded = {name: result["additional_config"].get("rose", {}) for name, result in built["cases"].items()}
    assert {name for name, rose in recorded.items() if "version" in rose} == {
        *FUSED,
        *("mrope", "auto", "off_beside_mxfp8", "small_heads", "float32", "transformers"),
    }
    assert recorded["plain"] == {}
    assert recorded["moe"]["qk_norm"] == "reference" and recorded["off_beside_mxfp8"]["qk_norm"] == "off"


def test_vllm_knows_the_same_about_our_classes_as_about_its_own(built, stock):
    """Interfaces (PP, LoRA, pooling), names and parameters; what a conversion to embeddings makes of them."""
    for case, expected in stock["cases"].items():
        ours = built["cases"][case]
        assert ours["model_info"] == expected["model_info"], case
        for key in ("architecture", "parameters", "layers"):
            assert ours.get(key) == expected.get(key), (case, key)
        assert expected.get("attention") in (["Qwen3Attention"], ["Qwen3MoeAttention"], None)
    assert built["cases"]["plain"]["class"] == "vllm_rose_plugin.layers.qwen3_moe.Qwen3MoeForCausalLM"
    assert stock["cases"]["plain"]["class"] == "vllm.model_executor.models.qwen3_moe.Qwen3MoeForCausalLM"
    assert built["cases"]["embedding"]["model"] == stock["cases"]["embedding"]["model"]


def test_the_transformers_implementation_is_still_selected(built, stock):
    for result in (built, stock):
        assert result["cases"]["transformers"]["class"].endswith(".TransformersMoEForCausalLM")


def test_no_cuda_context(built):
    assert built["cuda_starts"] == 0


@pytest.mark.parametrize(
    ("config", "environ", "asks"),
    [
        ({}, {}, False),
        (None, {}, False),
        ({"rose": {"rounding": "floor"}}, {}, False),
        ({"rose": {"qk_norm": "auto"}}, {}, True),
        ({"rose": {"qk_norm": "reference"}}, {}, True),
        ({"rose": {"qk_norm": "off"}}, {}, False),
        ({}, {"ROSE_QK_NORM": "auto"}, True),
        ({}, {"ROSE_QK_NORM": "off"}, False),
        ({}, {"ROSE_QK_NORM": ""}, False),
        ({"rose": {"qk_norm": "off"}}, {"ROSE_QK_NORM": "auto"}, False),
    ],
)
def test_which_settings_name_us(config, environ, asks):
    assert RoseConfig.asks_for("qk_norm", config, environ) is asks


def test_the_variable_and_its_typos():
    assert RoseConfig.load(None, {}).qk_norm == "auto"
    assert RoseConfig.load(None, {"ROSE_QK_NORM": "off"}).qk_norm == "off"
    with pytest.raises(ValueError, match=r"ROSE_QK_NORM: 'on' is not allowed: .*'auto', 'reference' or 'off'"):
        RoseConfig.load(None, {"ROSE_QK_NORM": "on"})


def norm(**changes):
    from vllm.model_executor.layers.layernorm import RMSNorm

    made = RMSNorm.__new__(RMSNorm)
    torch.nn.Module.__init__(made)
    attributes = {"weight": torch.ones(128, dtype=torch.bfloat16), "variance_epsilon": 1e-6, "has_weight": True}
    for name, value in {**attributes, "variance_size_override": None, **changes}.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual-chunk"),
        ({"head_dim": 96}, "head_dim is 96"),
        ({"k_norm": {"variance_epsilon": 1e-5}}, "different eps, 1e-06 and 1e-05"),
        ({"q_norm": {"weight": torch.ones(128)}}, "torch.float32"),
        ({"q_norm": {"variance_size_override": 64}}, "its norm is a RMSNorm"),
    ],
)
def test_what_keeps_vllms_norms(changes, reason):
    from vllm_rose_plugin.layers.qk_norm import obstacle

    norms = {name: norm(**changes.get(name, {})) for name in ("q_norm", "k_norm")}
    attention = SimpleNamespace(**{"dual_chunk_attention_config": None, "head_dim": 128, **changes, **norms})
    text = obstacle(attention, QkNorm.REFERENCE)
    assert (reason in text) if reason else text == ""


@pytest.mark.parametrize(
    ("capability", "problems", "reason"),
    [
        ((9, 0), [], ""),
        ((10, 3), [], ""),
        ((8, 0), [], "compute capability 8.0 has no target"),
        ((9, 0), ["it is not installed"], "can't be compiled: it is not installed"),
        (None, [], "NVIDIA GPUs"),
    ],
)
def test_auto_needs_a_gpu_with_a_target_and_a_compiler(monkeypatch, capability, problems, reason):
    from vllm_rose_plugin.layers import gpu, qk_norm

    platform = SimpleNamespace(
        is_cuda=lambda: capability is not None,
        device_name="cpu",
        get_device_capability=lambda: SimpleNamespace(major=capability[0], minor=capability[1]),
    )
    monkeypatch.setattr(gpu, "current_platform", platform)
    monkeypatch.setattr(gpu, "install_problems", lambda: problems)
    monkeypatch.setattr(gpu.metadata, "version", lambda name: "4.8.0")
    monkeypatch.setattr(gpu, "_choice", gpu._choice.__wrapped__)
    attention = SimpleNamespace(dual_chunk_attention_config=None, head_dim=128, q_norm=norm(), k_norm=norm())
    text = qk_norm.obstacle(attention, QkNorm.AUTO)
    assert (reason in text) if reason else text == ""
    assert qk_norm.obstacle(attention, QkNorm.REFERENCE) == ""
    assert gpu.target_or_reason() == ((reason and text) or f"sm_{capability[0]}{capability[1]}a"), "hashed by vLLM"


def rotary(kind, **changes):
    from vllm.model_executor.layers import rotary_embedding

    made = getattr(rotary_embedding, kind).__new__(getattr(rotary_embedding, kind))
    torch.nn.Module.__init__(made)
    attributes = {"head_size": 128, "rotary_dim": 128, "is_neox_style": True}
    for name, value in {**attributes, "cos_sin_cache": torch.zeros(8, 128, dtype=torch.bfloat16), **changes}.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("kind", "changes", "fits"),
    [
        ("RotaryEmbedding", {}, True),
        ("RotaryEmbedding", {"is_neox_style": False}, True),
        ("YaRNScalingRotaryEmbedding", {}, True),
        ("LinearScalingRotaryEmbedding", {}, True),
        ("RotaryEmbedding", {"rotary_dim": 64, "cos_sin_cache": torch.zeros(8, 64, dtype=torch.bfloat16)}, True),
        ("RotaryEmbedding", {"rotary_dim": 6, "cos_sin_cache": torch.zeros(8, 6, dtype=torch.bfloat16)}, False),
        ("FourierRotaryEmbedding", {}, False),
        ("MRotaryEmbedding", {}, False),
        ("DeepseekScalingRotaryEmbedding", {}, False),
        ("DualChunkRotaryEmbedding", {}, False),
        ("RotaryEmbedding", {"head_size": 64}, False),
        ("RotaryEmbedding", {"rotary_dim": 64}, False),
        ("RotaryEmbedding", {"cos_sin_cache": torch.zeros(8, 128)}, False),
        ("RotaryEmbedding", {"cos_sin_cache": torch.zeros(8, 128, dtype=torch.bfloat16, device="meta")}, False),
        ("RotaryEmbedding", {"cos_sin_cache": torch.zeros(128, 8, dtype=torch.bfloat16).T}, False),
    ],
)
def test_which_rotary_embeddings_are_fused(kind, changes, fits):
    from vllm_rose_plugin.layers.qk_norm import fits_rope

    attention = SimpleNamespace(head_dim=128, q_norm=norm(), rotary_emb=rotary(kind, **changes))
    assert fits_rope(attention) is fits


@pytest.mark.parametrize(("recorded", "norms", "says"), [("auto", 0, True), ("auto", 3, False), ("off", 0, False)])
def test_a_setting_that_serves_no_layer_is_said_after_the_load(monkeypatch, recorded, norms, says):
    from vllm_rose_plugin.layers import log
    from vllm_rose_plugin.seams.model_load import _say_if_unused

    lines = []
    monkeypatch.setattr(log, "logger", SimpleNamespace(warning_once=lambda text, *args: lines.append(text % args)))
    config = SimpleNamespace(additional_config={"rose": {"qk_norm": recorded, "version": "0"}})
    model = SimpleNamespace(runner_type="generate", model="M", architectures=["LlamaForCausalLM"])
    _say_if_unused(config, model, norms)
    _say_if_unused(config, SimpleNamespace(**{**vars(model), "runner_type": "draft"}), 0)
    assert len(lines) == says and all("serves no layer of M (LlamaForCausalLM)" in line for line in lines)
