"""Checkpoint directories that hold nothing but a config.json: enough to resolve a vLLM configuration."""

import json
from pathlib import Path
from typing import Any

LAYERS, HIDDEN = 2, 256

MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "intermediate_size": 256,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "max_position_embeddings": 512,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
DENSE = {
    key: value
    for key, value in MOE.items()
    if not key.startswith(("num_experts", "moe_", "decoder_sparse", "norm_topk", "mlp_only"))
} | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}

IGNORE = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(LAYERS))]
_MX_ARGS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}

MXFP8 = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": IGNORE},
    "modelopt_nested": {
        "quant_method": "modelopt",
        "quantization": {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "exclude_modules": IGNORE},
    },
    "minimax": {"quant_method": "mxfp8", "ignored_layers": IGNORE},
    "compressed_tensors": {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized",
        "ignore": IGNORE,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**_MX_ARGS, "dynamic": False, "scale_dtype": "torch.uint8"},
                "input_activations": {**_MX_ARGS, "dynamic": True, "scale_dtype": "torch.uint8"},
            }
        },
    },
    "inc": {
        "quant_method": "auto-round",
        "bits": 8,
        "group_size": 32,
        "sym": True,
        "data_type": "mx_fp",
        "act_bits": 8,
        "act_data_type": "mx_fp",
        "act_group_size": 32,
        "packing_format": "auto_round:llm_compressor",
    },
}
"""``quantization_config`` of every kind of MXFP8 checkpoint that both vLLM versions load."""

OTHER = {
    "nvfp4": {
        "quant_method": "modelopt",
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": IGNORE,
        },
    },
    "fp8_block": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "compressed_tensors_fp8": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": IGNORE,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
                "input_activations": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "token",
                    "symmetric": True,
                    "dynamic": True,
                },
            }
        },
    },
}


def write(directory: Path, base: dict[str, Any], quantization: dict[str, Any] | None = None) -> str:
    """A checkpoint directory without weights; returns its path."""
    directory.mkdir(parents=True)
    config = dict(base) if quantization is None else {**base, "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)
