"""Small checkpoints for the tests, and what reads them back."""

import argparse
import importlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_rose_plugin.checkpoint.headers import INDEX_NAME

REPOSITORY = Path(__file__).resolve().parents[2]
CHANGING_CALLS = ("fsync", "replace", "rename", "pwrite", "mkdir", "rmdir")
"""Functions of os that change what is on disk."""
TINY_MOE = REPOSITORY / "examples" / "tiny_moe" / "target"


def moe_tensors(
    *, layers: int = 2, experts: int = 4, hidden: int = 64, intermediate: int = 32, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """A Qwen3-MoE in per-expert naming; layer 0 is dense."""
    generator = torch.Generator().manual_seed(7)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.05).to(dtype)

    tensors = {
        "model.embed_tokens.weight": weight(100, hidden),
        "model.norm.weight": weight(hidden),
        "lm_head.weight": weight(100, hidden),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = weight(hidden)
        for name, rows in (("q_proj", 128), ("k_proj", 32), ("v_proj", 32)):
            tensors[f"{prefix}.self_attn.{name}.weight"] = weight(rows, hidden)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = weight(hidden, 128)
        tensors[f"{prefix}.self_attn.q_norm.weight"] = weight(32)
        if layer == 0:
            modules = [f"{prefix}.mlp"]
        else:
            modules = [f"{prefix}.mlp.experts.{expert}" for expert in range(experts)]
            tensors[f"{prefix}.mlp.gate.weight"] = weight(experts, hidden)
        for module in modules:
            tensors[f"{module}.gate_proj.weight"] = weight(intermediate, hidden)
            tensors[f"{module}.up_proj.weight"] = weight(intermediate, hidden)
            tensors[f"{module}.down_proj.weight"] = weight(hidden, intermediate)
    return tensors


def stack_experts(tensors: dict[str, torch.Tensor], *, experts: int = 4, transposed: bool) -> dict[str, torch.Tensor]:
    """The same weights with each layer's experts in gate_up_proj and down_proj."""
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
        pick = {
            p: [tensors[f"{layer}.experts.{e}.{p}_proj.weight"] for e in range(experts)] for p in ("gate", "up", "down")
        }
        gate_up = torch.stack([torch.cat(pair) for pair in zip(pick["gate"], pick["up"], strict=True)])
        down = torch.stack(pick["down"])
        for name, tensor in (("gate_up_proj", gate_up), ("down_proj", down)):
            stacked[f"{layer}.experts.{name}"] = (tensor.transpose(1, 2) if transposed else tensor).contiguous()
    return stacked


def write_checkpoint(
    directory: Path, tensors: dict[str, torch.Tensor], *, files: int = 1, config: dict | None = None
) -> Path:
    """Write config, tokenizer and the tensors: model.safetensors, or several files with an index."""
    directory.mkdir(parents=True)
    config = config or {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text('{"a": "ü"}', encoding="utf-8")
    if files == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    names = list(tensors)
    weight_map = {
        name: f"model-{number % files + 1:05d}-of-{files:05d}.safetensors" for number, name in enumerate(names)
    }
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, directory / file)
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def load(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor, through the safetensors library and the index."""
    weight_map = json.loads((directory / INDEX_NAME).read_text())["weight_map"]
    tensors: dict[str, torch.Tensor] = {}
    for file in set(weight_map.values()):
        found = load_file(directory / file)
        assert set(found) == {name for name, where in weight_map.items() if where == file}
        tensors.update(found)
    return tensors


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a directory tree."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def rose(command: str, *arguments: object) -> int:
    """Run a command's module as the command line does."""
    module = importlib.import_module(f"vllm_rose_plugin.cli.{command}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args([str(argument) for argument in arguments]))
