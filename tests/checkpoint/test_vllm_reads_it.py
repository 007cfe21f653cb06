"""The written configs, read by vLLM itself."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from checkpoint_builders import TINY_MOE, load, moe_tensors, stack_experts, write_checkpoint
from mtp_builders import write_draft, write_target
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config
from vllm.model_executor.model_loader.weight_utils import get_quant_config
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from vllm_rose_plugin.checkpoint import rules
from vllm_rose_plugin.checkpoint.convert import convert
from vllm_rose_plugin.checkpoint.mtp import attach
from vllm_rose_plugin.checkpoint.plan import Options
from vllm_rose_plugin.checkpoint.rules import CheckpointFormat
from vllm_rose_plugin.layers.qwen3_moe_mtp import Qwen3MoeMTP

CLASSES = {CheckpointFormat.MODELOPT: ModelOptMxFp8Config, CheckpointFormat.COMPRESSED_TENSORS: CompressedTensorsConfig}
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def json_config(directory: Path) -> dict[str, Any]:
    written: dict[str, Any] = json.loads((directory / "config.json").read_text())["quantization_config"]
    return written


def is_excluded(config: Any, module: str) -> bool:
    """vLLM's answer for one of its modules."""
    if isinstance(config, ModelOptMxFp8Config):
        return config.is_layer_excluded(module)
    if module.endswith(".experts"):
        module += ".0.gate_proj"  # what its MoE method asks for
    return should_ignore_layer(module, ignore=config.ignore, fused_mapping=config.packed_modules_mapping)


def for_qwen3(config: Any) -> Any:
    """The config as vLLM adapts it to Qwen3-MoE: checkpoint names become module names."""
    config.packed_modules_mapping = dict(Qwen3MoeForCausalLM.packed_modules_mapping) | FUSED
    config.apply_vllm_mapper(Qwen3MoeForCausalLM.hf_to_vllm_mapper)
    return config


def class_attribute(module: str, class_name: str, attribute: str) -> Any:
    """A class attribute from vLLM's source: importing the vision models would need torchvision."""
    tree = ast.parse((Path(vllm.__file__).parent / "model_executor" / "models" / f"{module}.py").read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    value = next(
        node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == attribute
    )
    return eval(ast.unparse(value), {"WeightsMapper": WeightsMapper})


def for_qwen3_5(config: Any) -> Any:
    """The same for Qwen3.5, whose class takes the names of Qwen3-VL's and adds linear attention's."""
    config.packed_modules_mapping = class_attribute("qwen3_5", "Qwen3_5ForCausalLMBase", "packed_modules_mapping")
    mapper = class_attribute("qwen3_vl", "Qwen3VLForConditionalGeneration", "hf_to_vllm_mapper")
    config.apply_vllm_mapper(mapper | WeightsMapper(orig_to_new_prefix={"mtp.": None}))
    return config


def parse(directory: Path, checkpoint_format: CheckpointFormat) -> Any:
    return CLASSES[checkpoint_format].from_config(json_config(directory))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint_format", list(CheckpointFormat))
def test_the_tiny_model_s_config(tmp_path: Path, checkpoint_format: CheckpointFormat) -> None:
    destination = tmp_path / "dst"
    options = Options(checkpoint_format=checkpoint_format)
    convert(source=TINY_MOE, destination=destination, options=options, progress=False)
    model_config = ModelConfig(model=str(destination))
    assert model_config.quantization == {"modelopt": "modelopt_mxfp8"}.get(checkpoint_format, checkpoint_format)
    config = get_quant_config(model_config, LoadConfig())
    assert type(config) is CLASSES[checkpoint_format]
    assert model_config.dtype in config.get_supported_act_dtypes()
    if isinstance(config, CompressedTensorsConfig):
        scheme = config.target_scheme_map["Linear"]
        assert config._is_mxfp8(scheme["weights"]) and config._is_mxfp8(scheme["input_activations"])
        assert scheme["input_activations"].dynamic
    config = for_qwen3(config)
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        assert not is_excluded(config, f"{prefix}.self_attn.qkv_proj")
        assert not is_excluded(config, f"{prefix}.self_attn.o_proj")
        assert not is_excluded(config, f"{prefix}.mlp.experts")
        assert is_excluded(config, f"{prefix}.mlp.gate")
    assert is_excluded(config, "lm_head")


@pytest.mark.parametrize("checkpoint_format", list(CheckpointFormat))
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "ignore", [(), ("*.1.mlp.experts",), ("*.0.self_attn.[qkv]_proj",), ("*.0.mlp.[gu]*",), ("*o_proj", "*.2.mlp*")]
)
def test_excluded_is_what_was_left_unquantized(
    tmp_path: Path, checkpoint_format: CheckpointFormat, ignore: tuple[str, ...], stacked: bool
) -> None:
    tensors = moe_tensors(layers=12)  # layers.1 is a prefix of layers.10
    tensors = stack_experts(tensors, transposed=False) if stacked else tensors
    options = Options(checkpoint_format=checkpoint_format, ignore=ignore)
    convert(
        source=write_checkpoint(tmp_path / "src", tensors),
        destination=tmp_path / "dst",
        options=options,
        progress=False,
    )
    config = for_qwen3(parse(tmp_path / "dst", checkpoint_format))
    own = rules.IgnoreRules(json_config(tmp_path / "dst"))
    fused = {part: whole for whole, parts in FUSED.items() for part in parts}
    seen = set()
    for name, tensor in load(tmp_path / "dst").items():
        if name.endswith("_scale") or "norm" in name or "embed" in name:
            continue
        module = rules.module_of(name)
        unquantized = tensor.dtype != torch.float8_e4m3fn
        assert own.covers(module) == unquantized, name
        parent, _, leaf = module.rpartition(".")
        vllm_module = rules.experts_layer(module) or f"{parent}.{fused.get(leaf, leaf)}".removeprefix(".")
        seen.add(vllm_module)
        assert is_excluded(config, vllm_module) == unquantized, vllm_module
    assert {"lm_head", "model.layers.0.mlp.gate_up_proj", "model.layers.1.mlp.gate"} <= seen
    assert {f"model.layers.{layer}.mlp.experts" for layer in range(1, 12)} <= seen


@pytest.mark.parametrize("checkpoint_format", list(CheckpointFormat))
def test_qwen3_5_modules(tmp_path: Path, checkpoint_format: CheckpointFormat) -> None:
    base = "model.language_model.layers.0"
    linear_attention = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]
    modules = [f"{base}.linear_attn.{leaf}" for leaf in linear_attention]
    modules += [f"{base}.mlp.shared_expert.{leaf}_proj" for leaf in ("gate", "up", "down")]
    modules += [f"{base}.mlp.gate", f"{base}.mlp.shared_expert_gate", "lm_head", "mtp.fc", "mtp.layers.0.mlp.gate"]
    modules += ["model.visual.blocks.0.attn.qkv", "model.visual.blocks.0.mlp.linear_fc1", "model.visual.merger.norm"]
    tensors = {f"{module}.weight": torch.ones(64, 64, dtype=torch.bfloat16) for module in modules}
    for owner in (base, "mtp.layers.0"):
        tensors[f"{owner}.mlp.experts.gate_up_proj"] = torch.ones(2, 64, 64, dtype=torch.bfloat16)
        tensors[f"{owner}.mlp.experts.down_proj"] = torch.ones(2, 64, 32, dtype=torch.bfloat16)
    convert(
        source=write_checkpoint(tmp_path / "src", tensors, config={"model_type": "qwen3_5_moe", "dtype": "bfloat16"}),
        destination=tmp_path / "dst",
        options=Options(checkpoint_format=checkpoint_format),
        progress=False,
    )
    config = for_qwen3_5(parse(tmp_path / "dst", checkpoint_format))
    layer = "language_model.model.layers.0"
    for module in ("linear_attn.in_proj_qkvz", "linear_attn.out_proj", "mlp.experts", "mlp.shared_expert.gate_up_proj"):
        assert not is_excluded(config, f"{layer}.{module}"), module
    for module in (f"{layer}.linear_attn.in_proj_ba", f"{layer}.mlp.gate", f"{layer}.mlp.shared_expert_gate"):
        assert is_excluded(config, module), module
    for module in ("visual.blocks.0.attn.qkv", "visual.blocks.0.mlp.linear_fc1"):
        assert is_excluded(config, module), module
    draft = parse(tmp_path / "dst", checkpoint_format)  # vLLM's MTP class maps no names
    assert is_excluded(draft, "mtp.fc")
    assert is_excluded(draft, "mtp.layers.0.mlp.gate")
    assert not is_excluded(draft, "mtp.layers.0.mlp.experts")


@pytest.mark.parametrize("checkpoint_format", list(CheckpointFormat))
@pytest.mark.parametrize("kind", ["mxfp8+bf16", "bf16+mxfp8", "mxfp8+mxfp8"])
def test_an_attached_draft_and_its_target(tmp_path: Path, checkpoint_format: CheckpointFormat, kind: str) -> None:
    """One config, read for the target and for the draft: each module is what its own checkpoint made it."""
    parts = {"target": write_target(tmp_path / "target"), "draft": write_draft(tmp_path / "draft")}
    quantized = dict(zip(parts, [part == "mxfp8" for part in kind.split("+")], strict=True))
    options = Options(checkpoint_format=checkpoint_format)
    for name, source in parts.items():
        if quantized[name]:
            parts[name] = tmp_path / f"{name}.mxfp8"
            convert(source=source, destination=parts[name], options=options, progress=False)
    attach(target=parts["target"], draft=parts["draft"], destination=tmp_path / "both")
    config = for_qwen3(parse(tmp_path / "both", checkpoint_format))
    draft = parse(tmp_path / "both", checkpoint_format)  # the draft's class maps no names
    draft.packed_modules_mapping = dict(Qwen3MoeMTP.packed_modules_mapping)
    for module in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts"):
        assert is_excluded(config, f"model.layers.1.{module}") == (not quantized["target"]), module
        assert is_excluded(draft, f"mtp.layers.0.{module}") == (not quantized["draft"]), module
    assert is_excluded(config, "model.layers.1.mlp.gate") and is_excluded(draft, "mtp.layers.0.mlp.gate")
    assert is_excluded(config, "lm_head")
