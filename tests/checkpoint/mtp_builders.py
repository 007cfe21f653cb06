"""Small targets and drafts for the MTP tests."""

import json
from pathlib import Path
from typing import Any

import torch
from checkpoint_builders import moe_tensors, write_checkpoint

SIZES: dict[str, Any] = {
    "attention_bias": False,
    "dtype": "bfloat16",
    "head_dim": 32,
    "hidden_size": 64,
    "mlp_only_layers": [0],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 100,
}
TARGET_CONFIG = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} | SIZES
DRAFT_CONFIG = {"architectures": ["Qwen3MoeMTP"], "model_type": "qwen3_moe_mtp", "num_nextn_predict_layers": 1} | SIZES
Tensors = dict[str, torch.Tensor]


def draft_tensors(*, layers: int = 1, experts: int = 4, hidden: int = 64, width: int = 32) -> Tensors:
    """An MTP draft that fits `moe_tensors`."""
    generator = torch.Generator().manual_seed(11)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.05).bfloat16()

    tensors = {"mtp.fc.weight": weight(hidden, 2 * hidden)}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = weight(hidden)
    for number in range(layers):
        layer = f"mtp.layers.{number}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = weight(hidden)
        for name, rows in (("q_proj", 128), ("k_proj", 32), ("v_proj", 32)):
            tensors[f"{layer}.self_attn.{name}.weight"] = weight(rows, hidden)
        tensors[f"{layer}.self_attn.o_proj.weight"] = weight(hidden, 128)
        for name in ("q_norm", "k_norm"):
            tensors[f"{layer}.self_attn.{name}.weight"] = weight(32)
        tensors[f"{layer}.mlp.gate.weight"] = weight(experts, hidden)
        for expert in range(experts):
            module = f"{layer}.mlp.experts.{expert}"
            tensors[f"{module}.gate_proj.weight"] = weight(width, hidden)
            tensors[f"{module}.up_proj.weight"] = weight(width, hidden)
            tensors[f"{module}.down_proj.weight"] = weight(hidden, width)
    return tensors


def write_target(directory: Path, *, files: int = 1, **changes: Any) -> Path:
    """A BF16 target."""
    return write_checkpoint(directory, moe_tensors(), files=files, config=sorted_config(TARGET_CONFIG | changes))


def write_draft(directory: Path, *, tensors: Tensors | None = None, files: int = 1, **changes: Any) -> Path:
    """A BF16 draft directory: no tokenizer in it."""
    config = sorted_config(DRAFT_CONFIG | changes)
    write_checkpoint(directory, tensors or draft_tensors(), files=files, config=config)
    (directory / "tokenizer.json").unlink()
    return directory


def sorted_config(config: dict[str, Any]) -> dict[str, Any]:
    """As transformers writes it."""
    return dict(sorted(config.items()))


def stored(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of every tensor of a checkpoint, by its own headers and index."""
    from vllm_rose_plugin.checkpoint.headers import read_checkpoint

    tensors, faults, warnings = read_checkpoint(directory)
    assert faults == warnings == []
    return {n: (e.dtype, e.shape, e.path.read_bytes()[e.begin : e.end]) for n, e in tensors.items()}


def config_of(directory: Path) -> dict[str, Any]:
    """config.json."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config
