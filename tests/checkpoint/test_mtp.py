"""`rose mtp attach` and `detach`: bytes, configs, refusals; `rose quantize` and `rose verify` of both forms."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_builders import TINY_MOE, contents, moe_tensors, rose, stack_experts, write_checkpoint
from mtp_builders import (
    DRAFT_CONFIG,
    TARGET_CONFIG,
    Tensors,
    config_of,
    draft_tensors,
    sorted_config,
    stored,
    write_draft,
    write_target,
)

from vllm_rose_plugin.checkpoint.headers import CHECKSUMS_NAME, INDEX_NAME, check_headers
from vllm_rose_plugin.checkpoint.verify import verify
from vllm_rose_plugin.cli import UserError

TINY_MTP = TINY_MOE.parent / "mtp"
FORMATS = ("modelopt", "compressed-tensors")


def quantized(source: Path, destination: Path, *flags: str) -> Path:
    assert rose("quantize", source, destination, *flags) == 0
    return destination


def refusal(*arguments: object, command: str = "mtp") -> str:
    with pytest.raises(UserError) as error:
        rose(command, *arguments)
    text = str(error.value)
    assert text.isprintable() and len(text) < 900
    return text


@pytest.mark.parametrize("kind", ["bf16+bf16", "mxfp8+bf16", "bf16+mxfp8", "mxfp8+mxfp8"])
@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_there_and_back(tmp_path: Path, kind: str, checkpoint_format: str) -> None:
    """Every tensor keeps its bytes, the config says what is where, and apart again both are what they were."""
    target, draft = write_target(tmp_path / "t", files=3), write_draft(tmp_path / "d", files=2)
    (target / "chat_template.jinja").write_text("x")
    of_target, of_draft = kind.split("+")
    if of_target == "mxfp8":
        target = quantized(target, tmp_path / "tq", "--format", checkpoint_format)
    if of_draft == "mxfp8":
        draft = quantized(draft, tmp_path / "dq", "--format", checkpoint_format)
    before = contents(target), contents(draft)
    assert rose("mtp", "attach", target, draft, tmp_path / "both") == 0
    assert stored(tmp_path / "both") == stored(target) | stored(draft)
    config = config_of(tmp_path / "both")
    assert config["architectures"] == ["Qwen3MoeForCausalLM"] and config["num_nextn_predict_layers"] == 1
    assert verify(tmp_path / "both").faults == [] == check_headers(tmp_path / "both")
    assert (tmp_path / "both" / "chat_template.jinja").read_text() == "x"
    assert not list(tmp_path.glob("*.partial"))

    assert rose("mtp", "detach", tmp_path / "both", tmp_path / "apart") == 0
    for found, whole in ((tmp_path / "apart" / "target", target), (tmp_path / "apart" / "mtp", draft)):
        assert stored(found) == stored(whole)
        assert config_of(found) == config_of(whole)
        checksums = [path / CHECKSUMS_NAME for path in (found, whole)]
        assert checksums[0].exists() == checksums[1].exists() == ("quantization_config" in config_of(whole))
        if checksums[0].exists():
            assert checksums[0].read_bytes() == checksums[1].read_bytes()
    assert contents(tmp_path / "apart" / "target").keys() == contents(target).keys()
    assert (contents(target), contents(draft)) == before


def test_the_example_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rose("mtp", "attach", TINY_MOE, TINY_MTP, tmp_path / "both") == 0
    assert rose("verify", tmp_path / "both") == 0
    assert rose("verify", TINY_MTP) == 0
    assert rose("mtp", "detach", tmp_path / "both", tmp_path / "apart") == 0
    assert contents(tmp_path / "apart" / "target") == contents(TINY_MOE)
    assert contents(tmp_path / "apart" / "mtp") == contents(TINY_MTP)
    assert "draft: 61 tensors, unquantized" in capsys.readouterr().out


def test_what_the_ignore_list_says(tmp_path: Path) -> None:
    target, draft = write_target(tmp_path / "t"), write_draft(tmp_path / "d")
    rose("mtp", "attach", quantized(target, tmp_path / "tq"), draft, tmp_path / "qb")
    ignore = config_of(tmp_path / "qb")["quantization_config"]["ignore"]
    projections = [f"mtp.layers.0.self_attn.{leaf}_proj" for leaf in "kqvo"]
    assert set(ignore) == {
        *("lm_head", "model.layers.1.mlp.gate", "mtp.fc", "mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.experts"),
        *projections,
    }
    rose("mtp", "attach", target, quantized(draft, tmp_path / "dq"), tmp_path / "bq")
    ignore = config_of(tmp_path / "bq")["quantization_config"]["ignore"]
    assert "mtp.fc" in ignore and not any(name.startswith("mtp.layers.0.self_attn") for name in ignore)
    assert {"model.layers.1.mlp.experts", "model.layers.0.self_attn.q_proj"} <= set(ignore)


def test_attached_and_quantized_is_quantized_and_attached(tmp_path: Path) -> None:
    """Both ways give the same tensors and the same answer on every module; --keep-mtp leaves the draft alone."""
    target, draft = write_target(tmp_path / "t"), write_draft(tmp_path / "d")
    rose("mtp", "attach", target, draft, tmp_path / "both")
    one = quantized(tmp_path / "both", tmp_path / "one")
    rose("mtp", "attach", quantized(target, tmp_path / "tq"), quantized(draft, tmp_path / "dq"), tmp_path / "two")
    assert stored(one) == stored(tmp_path / "two")
    lists = [set(config_of(path)["quantization_config"]["ignore"]) for path in (one, tmp_path / "two")]
    assert lists[0] == lists[1]
    assert stored(one)["mtp.layers.0.self_attn.q_proj.weight"][0] == "F8_E4M3"
    kept = {name for name, (dtype, *_) in stored(one).items() if name.startswith("mtp.") and dtype == "BF16"}
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.gate.weight"} <= kept
    assert not any("_proj" in name for name in kept)

    keeping = quantized(tmp_path / "both", tmp_path / "keeping", "--keep-mtp")
    rose("mtp", "attach", tmp_path / "tq", draft, tmp_path / "three")
    assert stored(keeping) == stored(tmp_path / "three")
    assert verify(keeping).faults == []
    assert "'mtp.*' matches no tensor" in refusal(target, tmp_path / "no", "--keep-mtp", command="quantize")
    assert "nothing to quantize" in refusal(draft, tmp_path / "no", "--keep-mtp", command="quantize")


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def extra(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=torch.bfloat16)})


LAYER = "mtp.layers.0"
BAD_DRAFTS: list[tuple[Callable[[Tensors], object], str]] = [
    (without("mtp.fc.weight"), "mtp.fc.weight is missing"),
    (without("mtp.norm.weight"), "mtp.norm.weight is missing"),
    (without(f"{LAYER}.self_attn.q_norm.weight"), f"{LAYER}.self_attn.q_norm.weight is missing"),
    (without(f"{LAYER}.mlp.experts.2.up_proj.weight"), f"{LAYER}.mlp.experts.2.up_proj.weight is missing"),
    (extra("mtp.embed_tokens.weight", 100, 64), "mtp.embed_tokens.weight is no tensor of Qwen3MoeMTP, which takes"),
    (extra("lm_head.weight", 100, 64), "lm_head.weight is no tensor of Qwen3MoeMTP, which takes"),
    (extra("mtp.shared.bias", 64), "mtp.shared.bias is no tensor of Qwen3MoeMTP: remove it"),
    (extra("mtp.layers.1.mlp.gate.weight", 4, 64), "mtp.layers.1.mlp.gate.weight is one layer too many"),
    (extra(f"{LAYER}.mlp.experts.4.up_proj.weight", 32, 64), f"{LAYER}.mlp.experts holds 5 experts, config.json says"),
    (
        extra("mtp.fc.weight", 64, 64),
        "mtp.fc.weight has shape [64, 64], config.json makes it [hidden_size=64, 2*hidden",
    ),
    (extra(f"{LAYER}.self_attn.k_proj.weight", 64, 64), "k_proj.weight has shape [64, 64], config.json makes it [num_"),
    (
        extra(f"{LAYER}.mlp.gate.weight", 8, 64),
        "mlp.gate.weight has shape [8, 64], config.json makes it [num_experts=4",
    ),
]


@pytest.mark.parametrize(("damage", "text"), BAD_DRAFTS, ids=[text for _, text in BAD_DRAFTS])
def test_a_bad_draft_is_named(tmp_path: Path, damage: Callable[[Tensors], object], text: str) -> None:
    """By attach and by quantize, before anything is written, and by verify."""
    tensors = draft_tensors()
    damage(tensors)
    target, draft = write_target(tmp_path / "t"), write_draft(tmp_path / "d", tensors=tensors)
    before = contents(tmp_path)
    assert text in refusal("attach", target, draft, tmp_path / "out")
    assert text in refusal(draft, tmp_path / "out", command="quantize")
    assert contents(tmp_path) == before
    assert [fault for fault in verify(draft).faults if text in fault]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": 128}, "DRAFT has hidden_size 128, TARGET 64"),
        ({"vocab_size": 200}, "DRAFT has vocab_size 200, TARGET 100"),
        ({"num_attention_heads": 8}, "DRAFT has num_attention_heads 8, TARGET 4"),
        ({"num_key_value_heads": 2}, "DRAFT has num_key_value_heads 2, TARGET 1"),
        ({"head_dim": 16}, "DRAFT has head_dim 16, TARGET 32"),
        ({"num_experts_per_tok": 1}, "DRAFT has num_experts_per_tok 1, TARGET 2"),
        ({"rope_theta": 1e6}, "DRAFT has rope_theta 1000000.0, TARGET 10000.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "DRAFT has rope scaling {'rope_type': 'yarn'"),
        ({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}, "is no draft directory"),
        ({"num_nextn_predict_layers": 0}, "config.json has num_nextn_predict_layers 0"),
    ],
)
def test_a_draft_of_another_model_is_named(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    target, draft = write_target(tmp_path / "t"), write_draft(tmp_path / "d", **changes)
    before = contents(tmp_path)
    assert text in refusal("attach", target, draft, tmp_path / "out")
    assert contents(tmp_path) == before


def test_rope_is_the_same_in_old_and_new_words(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "d", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    assert rose("mtp", "attach", write_target(tmp_path / "t"), draft, tmp_path / "out") == 0


def test_the_form_it_has_already(tmp_path: Path) -> None:
    target, draft = write_target(tmp_path / "t"), write_draft(tmp_path / "d")
    rose("mtp", "attach", target, draft, tmp_path / "both")
    assert "has a draft attached already" in refusal("attach", tmp_path / "both", draft, tmp_path / "out")
    assert "has nothing attached: it holds no mtp.* tensor" in refusal("detach", target, tmp_path / "out")
    assert f"OUT {tmp_path}/both exists" in refusal("attach", target, draft, tmp_path / "both")
    assert f"OUT {draft} exists" in refusal("detach", tmp_path / "both", draft)
    assert "DRAFT and OUT are the same directory" in refusal("attach", target, draft, draft)
    assert "lies inside TARGET" in refusal("detach", tmp_path / "both", tmp_path / "both" / "x")
    assert "expected 'qwen3_moe'" in refusal("detach", draft, tmp_path / "out")
    assert "is not a directory" in refusal("attach", target, tmp_path / "nowhere", tmp_path / "out")


def test_quantizations_that_do_not_go_together(tmp_path: Path) -> None:
    target, draft = write_target(tmp_path / "t"), write_draft(tmp_path / "d")
    one = quantized(target, tmp_path / "tq")
    other = quantized(draft, tmp_path / "dc", "--format", "compressed-tensors")
    assert "quant_method is 'modelopt' and DRAFT's 'compressed-tensors'" in refusal(
        "attach", one, other, tmp_path / "o"
    )
    floor = quantized(draft, tmp_path / "df", "--rounding", "floor")
    assert "TARGET was rounded with rceil and DRAFT with floor" in refusal("attach", one, floor, tmp_path / "o")
    config = config_of(one)
    config["quantization_config"]["ignore"].append("*self_attn*")
    (one / "config.json").write_text(json.dumps(config))
    good = quantized(draft, tmp_path / "dq")
    assert "the ignore lists of TARGET and DRAFT don't go together" in refusal("attach", one, good, tmp_path / "o")
    config["quantization_config"] = {"quant_method": "fp8"}
    (one / "config.json").write_text(json.dumps(config))
    assert "TARGET: quantization_config has quant_method 'fp8'" in refusal("attach", one, good, tmp_path / "o")
    assert not (tmp_path / "o").exists() and not (tmp_path / "o.partial").exists()


def test_a_trainer_s_single_file_is_parted(tmp_path: Path) -> None:
    """MTP tensors among the target's in one file, experts stacked: detach writes new files."""
    experts = stack_experts(draft_tensors(), transposed=False)
    config = sorted_config(TARGET_CONFIG | {"num_nextn_predict_layers": 1})
    source = write_checkpoint(tmp_path / "src", moe_tensors() | experts, config=config)
    assert verify(source).faults == []
    assert rose("mtp", "detach", source, tmp_path / "out") == 0
    apart = [stored(tmp_path / "out" / half) for half in ("target", "mtp")]
    assert apart[0] | apart[1] == stored(source)
    assert set(apart[1]) == set(experts)
    assert not (tmp_path / "out" / "target" / INDEX_NAME).exists()
    one = quantized(tmp_path / "out" / "mtp", tmp_path / "mq")
    assert f"{LAYER}.mlp.experts.3.gate_proj.weight_scale" in stored(one)


def test_two_layers_and_a_bias(tmp_path: Path) -> None:
    tensors = draft_tensors(layers=2)
    changes = {"attention_bias": True, "num_nextn_predict_layers": 2}
    draft = write_draft(tmp_path / "d", tensors=tensors, **changes)
    assert "mtp.layers.0.self_attn.q_proj.bias is missing" in " ".join(verify(draft).faults)
    for number in range(2):
        for leaf, rows in (("q", 128), ("k", 32), ("v", 32), ("o", 64)):
            tensors[f"mtp.layers.{number}.self_attn.{leaf}_proj.bias"] = torch.zeros(rows, dtype=torch.bfloat16)
    draft = write_draft(tmp_path / "e", tensors=tensors, **changes)
    assert verify(draft).faults == []


def test_verify_of_what_config_and_files_tell_differently(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "a", moe_tensors() | draft_tensors(), config=sorted_config(TARGET_CONFIG))
    assert "config.json has num_nextn_predict_layers None" in " ".join(verify(source).faults)
    assert "`rose mtp attach` writes it" in refusal(source, tmp_path / "o", command="quantize")
    source = write_target(tmp_path / "b", num_nextn_predict_layers=1)
    assert "but no mtp.* tensor is there" in " ".join(verify(source).faults)
    draft = quantized(write_draft(tmp_path / "d"), tmp_path / "dq")
    assert verify(draft).faults == []
    config = config_of(draft)
    del config["quantization_config"]
    (draft / "config.json").write_text(json.dumps(config))
    assert "config.json has no quantization_config" in " ".join(verify(draft).faults)
    draft = write_draft(tmp_path / "e", quantization_config={"quant_method": "mxfp8"})
    assert "no tensor is quantized" in " ".join(verify(draft).faults)


def test_fc_and_norms_are_never_quantized(tmp_path: Path) -> None:
    tensors = draft_tensors()
    fc = tensors.pop("mtp.fc.weight")
    tensors["mtp.fc.weight"] = fc.to(torch.float8_e4m3fn)
    tensors["mtp.fc.weight_scale"] = torch.full((64, 4), 127, dtype=torch.uint8)
    draft = write_draft(tmp_path / "d", tensors=tensors, quantization_config={"quant_method": "mxfp8"})
    assert "mtp.fc.weight has dtype F8_E4M3: fc, norms and the router" in " ".join(verify(draft).faults)


def test_other_models_with_mtp_tensors_are_not_judged(tmp_path: Path) -> None:
    tensors = moe_tensors() | {"mtp.something.weight": torch.zeros(3, dtype=torch.bfloat16)}
    config = {"model_type": "qwen3_next", "num_experts": 4, "num_hidden_layers": 2}
    source = write_checkpoint(tmp_path / "src", tensors, config=config)
    assert verify(quantized(source, tmp_path / "q")).faults == []


def test_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = write_draft(tmp_path / "d")
    (draft / "tokenizer.json").write_text("{}")
    (draft / "README.md").write_text("mine")
    rose("mtp", "attach", write_target(tmp_path / "t"), draft, tmp_path / "out")
    text = capsys.readouterr().out
    assert "DRAFT's tokenizer.json differs from TARGET's" in text and "left out of DRAFT: README.md" in text
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (tmp_path / "t" / "tokenizer.json").read_text()
    assert DRAFT_CONFIG["model_type"] not in (tmp_path / "out" / "config.json").read_text()
