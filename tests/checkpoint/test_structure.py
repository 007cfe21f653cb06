"""Weights that are missing or of the wrong size, found by headers alone: at load, by verify and in a source."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_builders import moe_tensors, rose, stack_experts, write_checkpoint

from vllm_rose_plugin.checkpoint.convert import convert
from vllm_rose_plugin.checkpoint.headers import check_headers
from vllm_rose_plugin.checkpoint.structure import structure_faults
from vllm_rose_plugin.checkpoint.verify import verify
from vllm_rose_plugin.cli import UserError

CONFIG = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 3}
CONFIG |= {"num_experts": 4, "hidden_size": 64, "moe_intermediate_size": 32, "dtype": "bfloat16"}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32}
Tensors = dict[str, torch.Tensor]
EXPERTS = "model.layers.2.mlp.experts"


def without(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if not any(part in n for part in parts)}


def with_rows(part: str, rows: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t[:rows].contiguous() if part in n else t for n, t in tensors.items()}


DAMAGES = [
    (without(f"{EXPERTS}.1."), f"{EXPERTS} holds 3 experts, config.json says 4: experts 1 are missing"),
    (without(".experts.3."), "model.layers.1.mlp.experts holds 3 experts, config.json says 4: experts 3 are missing"),
    (without(f"{EXPERTS}.1.down_proj"), f"{EXPERTS}.1 lacks down_proj.weight"),
    (without("experts.0.up", "experts.1.up", "experts.2.up", "experts.3.up"), "mlp.experts.* lacks up_proj"),
    (without(f"{EXPERTS}."), "model.layers.2.mlp lacks experts.*.down_proj.weight"),
    (without("layers.1.self_attn.k_proj"), "model.layers.1.self_attn lacks k_proj"),
    (without("self_attn.v_proj"), "model.layers.0.self_attn lacks v_proj"),
    (without("layers.2.self_attn.o_proj"), "model.layers.2.self_attn lacks o_proj"),
    (without("layers.2.self_attn."), "model.layers.2 lacks self_attn, which layer"),
    (without("layers.0.mlp.up_proj"), "model.layers.0.mlp lacks up_proj"),
    (without("layers.1.input_layernorm"), "model.layers.1 lacks input_layernorm"),
    (without("layers.1."), "model.layers lacks layers 1 (num_hidden_layers is 3)"),
    (without("layers.2."), "model.layers lacks layers 2 (num_hidden_layers is 3)"),
    (with_rows("layers.1.mlp.experts.0.gate_proj", 16), "model.layers.1.mlp.experts.0.gate_proj.weight has shape [16"),
    (with_rows("gate_proj", 16), "has shape [16, 64], which doesn't fit down_proj.weight [64, 32]"),
    (with_rows("layers.1.self_attn.q_proj", 64), "model.layers.1.self_attn.q_proj.weight has shape [64, 64] and"),
    (with_rows("k_proj", 16), "self_attn.k_proj.weight has shape [16, 64], config.json's sizes make it [32, 64]"),
]


@pytest.mark.parametrize(("damage", "fault"), DAMAGES, ids=[fault for _, fault in DAMAGES])
def test_missing_and_cut_weights(tmp_path: Path, damage: Callable[[Tensors], Tensors], fault: str) -> None:
    """The damaged source is refused; converted as another family would be, the checkpoint shows the same fault."""
    tensors = damage(moe_tensors(layers=3))
    source = write_checkpoint(tmp_path / "src", tensors, config=CONFIG)
    with pytest.raises(UserError) as error:
        rose("quantize", source, tmp_path / "dst")
    assert "is incomplete" in str(error.value)
    entries = {name: SimpleNamespace(shape=tuple(tensor.shape)) for name, tensor in tensors.items()}
    faults = structure_faults(entries, CONFIG)
    assert [text for text in faults if fault in text], faults
    whole = write_checkpoint(tmp_path / "whole", moe_tensors(layers=3), config=CONFIG)
    convert(source=whole, destination=tmp_path / "dst", progress=False)
    assert check_headers(tmp_path / "dst") == [] == verify(tmp_path / "dst").faults
    rewrite_like(tmp_path / "dst", damage)
    for found in (check_headers(tmp_path / "dst"), verify(tmp_path / "dst").faults):
        assert [text for text in found if fault in text], found


def rewrite_like(directory: Path, damage: Callable[[Tensors], Tensors]) -> None:
    from test_verify import rewrite

    def change(tensors: Tensors) -> None:
        damaged = damage(tensors)
        tensors.clear()
        tensors.update(damaged)

    rewrite(directory, change)


@pytest.mark.parametrize("stacked", [False, True])
def test_the_number_of_experts_in_a_text_config(tmp_path: Path, stacked: bool) -> None:
    tensors = stack_experts(moe_tensors(), transposed=False) if stacked else moe_tensors()
    config = {"model_type": "qwen3_5_moe", "text_config": {"num_experts": 4, "num_hidden_layers": 2}}
    source = write_checkpoint(tmp_path / "src", tensors, config=config)
    convert(source=source, destination=tmp_path / "dst", progress=False)
    config["text_config"] = {"n_routed_experts": 5, "num_hidden_layers": 2}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"holds 4 experts, config\.json says 5"):
        rose("quantize", source, tmp_path / "other")


def shapes(names: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    return {name: SimpleNamespace(shape=shape) for name, shape in names.items()}


def attention(prefix: str, **rows: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.{leaf}.weight": (size, 64) for leaf, size in rows.items()}


def mlp(prefix: str, width: int = 32) -> dict[str, tuple[int, ...]]:
    shapes = {"gate_proj": (width, 64), "up_proj": (width, 64), "down_proj": (64, width)}
    return {f"{prefix}.{leaf}.weight": shape for leaf, shape in shapes.items()}


def qwen3_next() -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    names: dict[str, tuple[int, ...]] = {}
    for layer in range(4):
        prefix = f"model.layers.{layer}"
        if layer == 3:
            names |= attention(f"{prefix}.self_attn", q_proj=256, k_proj=32, v_proj=32) | {
                f"{prefix}.self_attn.o_proj.weight": (64, 128)
            }
        else:
            names |= {
                f"{prefix}.linear_attn.{n}": (64, 64) for n in ("A_log", "in_proj_qkvz.weight", "out_proj.weight")
            }
        names |= mlp(f"{prefix}.mlp.shared_expert", 48) | {f"{prefix}.mlp.gate.weight": (2, 64)}
        names |= mlp(f"{prefix}.mlp.experts.0") | mlp(f"{prefix}.mlp.experts.1")
    names |= attention("mtp.layers.0.self_attn", q_proj=256, k_proj=32, v_proj=32, o_proj=64) | mlp("mtp.layers.0.mlp")
    names |= mlp("model.visual.blocks.0.mlp") | {"model.visual.layers.0.attn.k_proj.weight": (7, 7)}
    config = {"model_type": "qwen3_next", "num_experts": 2, "num_hidden_layers": 4, "num_attention_heads": 4}
    return names, config | {"head_dim": 32, "num_key_value_heads": 1, "hidden_size": 64, "moe_intermediate_size": 32}


def deepseek() -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Latent attention, a dense first layer, and an MTP layer behind the last that has more than the others."""
    names: dict[str, tuple[int, ...]] = {}
    for layer in range(4):
        prefix = f"model.layers.{layer}"
        names |= attention(f"{prefix}.self_attn", q_a_proj=16, q_b_proj=96, kv_a_proj_with_mqa=24, o_proj=64)
        names |= mlp(f"{prefix}.mlp", 96) if layer == 0 else mlp(f"{prefix}.mlp.shared_experts")
        for expert in range(2 if layer else 0):
            names |= mlp(f"{prefix}.mlp.experts.{expert}")
    names |= {f"model.layers.3.{name}.weight": (64,) for name in ("enorm", "hnorm", "shared_head.norm")}
    config = {"model_type": "deepseek_v3", "n_routed_experts": 2, "num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    return names, config | {"kv_lora_rank": 24, "num_attention_heads": 4, "head_dim": 8, "hidden_size": 64}


def shared_keys() -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """A layer that takes its keys from another, one without v_proj, sinks and an indexer in some layers only."""
    names = attention("model.layers.0.self_attn", q_proj=64, k_proj=32, o_proj=64, index_q_proj=8)
    names |= attention("model.layers.1.self_attn", q_proj=64, o_proj=64) | {"model.layers.1.self_attn.sinks": (4,)}
    names |= attention("model.layers.2.self_attn", q_proj=128, k_proj=64, o_proj=64) | mlp("model.layers.2.mlp")
    names |= {"model.layers.2.self_attn.gate_proj.weight": (4, 64)}
    return names, {"model_type": "gemma4", "text_config": {"attention_k_eq_v": True, "num_hidden_layers": 3}}


def ungated_and_fused() -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    names = {"model.layers.0.mlp.up_proj.weight": (96, 64), "model.layers.0.mlp.down_proj.weight": (64, 96)}
    names |= {"model.layers.1.mlp.gate_up_proj.weight": (192, 64), "model.layers.1.mlp.down_proj.weight": (64, 96)}
    for layer in range(2):
        names |= attention(f"model.layers.{layer}.self_attn", qkv_proj=192, o_proj=64)
    return names, {"model_type": "other", "num_hidden_layers": 2}


def minimax() -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    names: dict[str, tuple[int, ...]] = {}
    for expert in range(2):
        prefix = f"language_model.model.layers.0.block_sparse_moe.experts.{expert}"
        names |= {f"{prefix}.w1.weight": (32, 64), f"{prefix}.w2.weight": (64, 32), f"{prefix}.w3.weight": (32, 64)}
    return names, {"model_type": "minimax_m3", "text_config": {"num_local_experts": 2, "num_hidden_layers": 1}}


def mtp_alone() -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    return mlp("model.layers.61.mlp"), {"model_type": "deepseek_v3", "num_hidden_layers": 61}


@pytest.mark.parametrize("build", [qwen3_next, deepseek, shared_keys, ungated_and_fused, minimax, mtp_alone])
def test_no_false_alarm(build: Callable[[], tuple[dict[str, tuple[int, ...]], dict[str, Any]]]) -> None:
    names, config = build()
    assert structure_faults(shapes(names), config) == []


@pytest.mark.parametrize(
    ("build", "gone", "fault"),
    [
        (qwen3_next, "model.layers.1.linear_attn.A_log", "model.layers.1.linear_attn lacks A_log, which layer 0 has"),
        (qwen3_next, "mtp.layers.0.self_attn.k_proj.weight", "mtp.layers.0.self_attn lacks k_proj"),
        (deepseek, "model.layers.2.self_attn.q_b_proj.weight", "model.layers.2.self_attn lacks q_b_proj.weight"),
        (deepseek, "model.layers.3.mlp.experts.1.up_proj.weight", "model.layers.3.mlp.experts.1 lacks up_proj.weight"),
        (shared_keys, "model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn lacks o_proj"),
        (
            minimax,
            "language_model.model.layers.0.block_sparse_moe.experts.1.w2.weight",
            "language_model.model.layers.0.block_sparse_moe.experts.1 lacks w2.weight",
        ),
    ],
)
def test_the_same_architectures_with_a_tensor_gone(build: Callable[[], Any], gone: str, fault: str) -> None:
    names, config = build()
    del names[gone]
    faults = structure_faults(shapes(names), config)
    assert len(faults) == 1 and faults[0].startswith(fault), faults
