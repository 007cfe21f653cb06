"""MTP drafts in both vLLM versions: what they are resolved as, the model that is built, and what is refused by name."""

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from vllm_probe import ROOT, VERSIONS, run_probe

from vllm_rose_plugin.cli import main as rose

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples" / "tiny_moe"
ROSE = {"moe_backend": "rose_cutedsl", "linear_backend": "rose_cutedsl"}
BUILT = {
    "bf16": (None, "UnquantizedFusedMoEMethod", "UnquantizedLinearMethod"),
    "bf16_attached": (None, "UnquantizedFusedMoEMethod", "UnquantizedLinearMethod"),
    "bf16_in_mxfp8": ("modelopt_mxfp8", "UnquantizedFusedMoEMethod", "UnquantizedLinearMethod"),
    "bf16_attached_to_mxfp8": ("modelopt_mxfp8", "UnquantizedFusedMoEMethod", "UnquantizedLinearMethod"),
    "mxfp8_in_bf16": (None, "ModelOptMxFp8FusedMoE", "ModelOptLinearMethod"),
    "mxfp8_in_mxfp8": ("modelopt_mxfp8", "ModelOptMxFp8FusedMoE", "ModelOptLinearMethod"),
    "mxfp8_attached": ("modelopt_mxfp8", "ModelOptMxFp8FusedMoE", "ModelOptLinearMethod"),
    "qk_norm": (None, "UnquantizedFusedMoEMethod", "UnquantizedLinearMethod"),
}
"""Case: the target's quantization, and the methods of the draft's experts and linear layers."""
REFUSED = {
    "hidden_size": r"its hidden_size is 320, the target's .* is 256",
    "vocab_size": r"its vocab_size is 4000, the target's .* is 4096",
    "two_layers": r"num_nextn_predict_layers 2, and one MTP layer is served",
    "no_layers": r"num_nextn_predict_layers 0, and one MTP layer is served",
    "missing": r"mtp\.fc\.weight is missing",
    "missing_expert": r"mtp\.layers\.0\.mlp\.experts\.7\.up_proj\.weight is missing",
    "unknown": r"mtp\.embed_tokens\.weight is no tensor of Qwen3MoeMTP",
    "shape": r"mtp\.norm\.weight has shape \[255\]",
    "scale": r"mtp\.layers\.0\.self_attn\.q_proj\.weight_scale is missing",
    "attached_missing": r"mtp\.norm\.weight is missing",
    "nothing_attached": r"holds no MTP layer .*rose mtp attach",
    "pipeline": r"--pipeline-parallel-size is 2",
}


def draft(model: Path | None = None, k: int = 1) -> dict:
    found = {"method": "mtp", "num_speculative_tokens": k} | ({"model": str(model)} if model else {})
    return {"speculative_config": found}


def changed(source: Path, destination: Path, *, config: dict | None = None, drop: str = "", add: dict | None = None):
    """A copy of a draft directory or a checkpoint with another config.json or other tensors."""
    shutil.copytree(source, destination)
    path = destination / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    file = (
        next(destination.glob("m*.safetensors"))
        if not list(destination.glob("mtp-*"))
        else next(destination.glob("mtp-*"))
    )
    tensors = {name: tensor for name, tensor in load_file(file).items() if name != drop} | (add or {})
    save_file(tensors, file, metadata={"format": "pt"})
    index = destination / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text())
        weight_map["weight_map"].pop(drop, None)
        index.write_text(json.dumps(weight_map))
    return destination


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    root = tmp_path_factory.mktemp("mtp")
    bf16, mtp = EXAMPLE / "target", EXAMPLE / "mtp"
    for source, name in ((bf16, "mxfp8"), (mtp, "mtp_mxfp8")):
        assert rose(["quantize", str(source), str(root / name)]) == 0
    mxfp8, mtp_mxfp8 = root / "mxfp8", root / "mtp_mxfp8"
    for target, one, name in ((bf16, mtp, "b_b"), (mxfp8, mtp, "m_b"), (mxfp8, mtp_mxfp8, "m_m")):
        assert rose(["mtp", "attach", str(target), str(one), str(root / name)]) == 0
    norm = load_file(mtp / "model.safetensors")["mtp.norm.weight"]
    wrong = {
        "hidden_size": {"config": {"hidden_size": 320}},
        "vocab_size": {"config": {"vocab_size": 4000}},
        "two_layers": {"config": {"num_nextn_predict_layers": 2}},
        "no_layers": {"config": {"num_nextn_predict_layers": 0}},
        "missing": {"drop": "mtp.fc.weight"},
        "missing_expert": {"drop": "mtp.layers.0.mlp.experts.7.up_proj.weight"},
        "unknown": {"add": {"mtp.embed_tokens.weight": norm.expand(4096, 256).contiguous()}},
        "shape": {"add": {"mtp.norm.weight": norm[:255].clone()}},
    }
    scale = "mtp.layers.0.self_attn.q_proj.weight_scale"
    refused = {name: (bf16, changed(mtp, root / name, **change)) for name, change in wrong.items()}
    refused["scale"] = (bf16, changed(mtp_mxfp8, root / "scale", drop=scale))
    refused["attached_missing"] = (changed(root / "b_b", root / "attached_missing", drop="mtp.norm.weight"), None)
    refused["nothing_attached"] = (bf16, None)
    engines = {name: {"model": str(target), **draft(one)} for name, (target, one) in refused.items()}
    engines["pipeline"] = {"model": str(bf16), "pipeline_parallel_size": 2, **draft(mtp)}
    build = {
        "bf16": {"model": str(bf16), **draft(mtp)},
        "bf16_attached": {"model": str(root / "b_b"), **draft(k=4)},
        "bf16_in_mxfp8": {"model": str(mxfp8), **ROSE, **draft(mtp)},
        "bf16_attached_to_mxfp8": {"model": str(root / "m_b"), **ROSE, **draft(k=3)},
        "mxfp8_in_bf16": {"model": str(bf16), **draft(mtp_mxfp8)},
        "mxfp8_in_mxfp8": {"model": str(mxfp8), **ROSE, **draft(mtp_mxfp8)},
        "mxfp8_attached": {"model": str(root / "m_m"), **ROSE, **draft(k=2)},
        "qk_norm": {"model": str(bf16), "additional_config": {"rose": {"qk_norm": "reference"}}, **draft(mtp)},
    }
    return {name: {"build": True, **engine} for name, engine in build.items()} | engines


@pytest.fixture(scope="module", params=VERSIONS)
def probed(request, cases):
    return run_probe(request.param, "mtp", stdin=cases)


@pytest.mark.parametrize("case", BUILT)
def test_the_draft_is_resolved_and_built_with_its_own_quantization(probed, cases, case):
    result = probed["cases"][case]
    target, experts, linear = BUILT[case]
    assert (result["method"], result["architectures"], result["layers"]) == ("mtp", ["Qwen3MoeMTP"], 1)
    assert result["tokens"] == cases[case]["speculative_config"]["num_speculative_tokens"]
    assert (result["target_architectures"], result["target_layers"]) == (["Qwen3MoeForCausalLM"], 3)
    assert result["class"] == "vllm_rose_plugin.layers.qwen3_moe_mtp.Qwen3MoeMTP"
    assert result["target_quantization"] == target
    assert (result["experts"], result["linear"]) == (experts, linear)
    assert (result["experts_class"] == "RoseCuteDslExperts") == case.startswith("mxfp8")
    assert result["fc"] == "UnquantizedLinearMethod", "fc is never quantized"
    assert result["moe_layers"] == 1 and result["kv_cache_layers"] == ["mtp.layers.0.self_attn.attn"]


@pytest.mark.parametrize("case", BUILT)
def test_every_parameter_is_loaded_from_the_checkpoint(probed, case):
    result = probed["cases"][case]
    assert result["untouched"] == []
    assert result["same"] == [True, True] and result["same_expert"]
    assert result["own_model"] == [False, False], "embedding and head are the target's"
    assert any(name.endswith("w2_weight_scale") for name in result["parameters"]) == case.startswith("mxfp8")


def test_attention_of_the_draft_follows_the_setting(probed):
    assert probed["cases"]["qk_norm"]["attention"] == "RoseQwen3MoeAttention"
    assert probed["cases"]["qk_norm"]["norms"] == 1
    assert probed["cases"]["bf16"]["attention"] == "Qwen3MoeAttention"


def test_settings_are_hashed_when_only_the_draft_is_ours(probed):
    """They decide what the draft computes; the target's attention stays vLLM's."""
    recorded = {name: probed["cases"][name]["additional_config"].get("rose") for name in BUILT}
    assert recorded["bf16"] is recorded["bf16_attached"] is None
    assert recorded["mxfp8_in_bf16"]["qk_norm"] == "off" and "version" in recorded["mxfp8_in_bf16"]
    assert recorded["mxfp8_in_mxfp8"]["qk_norm"] == "auto"


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(probed, case):
    assert "error" in probed["cases"][case], probed["cases"][case]
    text = probed["cases"][case]["error"]
    assert re.search(REFUSED[case], text, re.DOTALL), text


def test_sampling_parameters_reach_every_draft_token_on_a_cpu(probed):
    """vLLM's own fills a copy and drops it."""
    assert probed["expanded"] == [[0.7, 1.0, 1.0, 1.0], [5, 1, 1, 1]]


def test_no_cuda_context(probed):
    assert probed["cuda_starts"] == 0
