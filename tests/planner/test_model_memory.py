"""Weights, KV cache and state from config.json, against published counts, hand-made sums and a real checkpoint."""

import json
import math
from pathlib import Path

import planner_models as models
import pytest

from vllm_rose_plugin.checkpoint.headers import read_header
from vllm_rose_plugin.checkpoint.rules import is_quantizable
from vllm_rose_plugin.planner.model_memory import (
    Parallel,
    active_parameters,
    kv_bytes_per_token,
    moe_layers,
    parameters,
    state_bytes_per_sequence,
    weight_bytes,
)
from vllm_rose_plugin.planner.model_shapes import Kind, ModelConfigError, weights

TINY = Path(__file__).parents[2] / "examples/tiny_moe/target"


# The totals are those that Hugging Face shows for the safetensors files. DeepSeek's are without the MTP layer.
@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (models.QWEN3_235B, 235_093_634_560, 22.2e9),
        (models.QWEN3_30B, 30_532_122_624, 3.35e9),
        (models.QWEN3_32B, 32_762_123_264, 32.8e9),
        (models.DEEPSEEK_V3, 671_026_419_200, 37.55e9),
    ],
)
def test_published_parameter_counts(config, total, active):
    assert sum(parameters(config).values()) == total
    assert active_parameters(config) == pytest.approx(active, rel=5e-3)


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [(models.QWEN35_397B, 397e9, 17e9), (models.MINIMAX_M2, 229e9, 11e9), (models.MINIMAX_M3, 428e9, 26e9)],
)
def test_names_tell_the_size(config, total, active):
    assert sum(parameters(config).values()) == pytest.approx(total, rel=0.01)
    assert active_parameters(config) == pytest.approx(active, rel=0.03)


def test_hybrid_attention_by_hand():
    """Qwen3.5-397B: the output gate doubles q; linear layers have q, k, v, z, b and a."""
    full = 4096 * (32 * 256 * 2 + 2 * 2 * 256) + 32 * 256 * 4096
    linear = 4096 * (2 * 16 * 128 + 64 * 128 + 64 * 128 + 64 + 64) + 64 * 128 * 4096
    assert parameters(models.QWEN35_397B)[Kind.ATTENTION] == 15 * full + 45 * linear
    assert parameters(models.QWEN35_397B)[Kind.DENSE] == 60 * 3 * 4096 * 1024


def test_every_tensor_of_a_real_checkpoint():
    config = json.loads((TINY / "config.json").read_text())
    headers = {name: entry.shape for name, entry in _tensors(TINY).items()}
    expected = {}
    for weight in weights(config):
        for copy in range(weight.copies):
            name = weight.name.replace("experts.0.", f"experts.{copy}.") + ".weight"
            expected[name] = weight
    assert set(headers) == set(expected)
    for name, weight in expected.items():
        shape = weight.shape if len(headers[name]) == 2 else (weight.shape[1],)
        assert headers[name] == shape, name
        assert weight.quantizable == is_quantizable(name, headers[name]), name


def test_attached_mtp_layer_has_the_tensors_of_the_example():
    config = json.loads((TINY / "config.json").read_text())
    elements = sum(math.prod(entry.shape) for entry in _tensors(TINY.parent / "mtp").values())
    assert sum(parameters(config, draft_layers=1).values()) - sum(parameters(config).values()) == elements


def test_weight_bytes_by_hand():
    experts = 94 * 128 * 3 * 4096 * 1536
    attention = 94 * (2 * 4096 * 8192 + 2 * 4096 * 512)
    whole = weight_bytes(models.QWEN3_235B)
    assert whole[Kind.EXPERTS] == 2 * experts and whole[Kind.ATTENTION] == 2 * attention
    assert whole[Kind.EMBEDDING] == 2 * 2 * 151936 * 4096
    mxfp8 = weight_bytes(models.QWEN3_235B, weight_format="mxfp8")
    assert mxfp8[Kind.EXPERTS] == experts * 33 // 32 and mxfp8[Kind.ATTENTION] == attention * 33 // 32
    assert mxfp8[Kind.EMBEDDING] == whole[Kind.EMBEDDING] and mxfp8[Kind.OTHER] == whole[Kind.OTHER]
    assert weight_bytes(models.QWEN3_235B, weight_format="nvfp4")[Kind.EXPERTS] == experts * 9 // 16


def test_ignored_modules_stay_in_bf16():
    ignored = weight_bytes(models.QWEN3_235B, weight_format="mxfp8", ignore=["*.self_attn.*", "model.layers.3.mlp.*"])
    whole = weight_bytes(models.QWEN3_235B)
    assert ignored[Kind.ATTENTION] == whole[Kind.ATTENTION]
    layer = 128 * 3 * 4096 * 1536
    assert ignored[Kind.EXPERTS] == 2 * layer + 93 * layer * 33 // 32


def test_decode_dp16_ep16_and_prefill_tp4_ep4():
    whole = weight_bytes(models.QWEN3_235B, weight_format="mxfp8")
    decode = weight_bytes(models.QWEN3_235B, weight_format="mxfp8", parallel=Parallel(data=16, expert=True))
    assert decode[Kind.EXPERTS] * 16 == whole[Kind.EXPERTS]
    assert decode[Kind.ATTENTION] == whole[Kind.ATTENTION]
    prefill = weight_bytes(models.QWEN3_235B, weight_format="mxfp8", parallel=Parallel(tensor=4, expert=True))
    assert prefill[Kind.EXPERTS] * 4 == whole[Kind.EXPERTS] and prefill[Kind.ATTENTION] * 4 == whole[Kind.ATTENTION]


def test_without_expert_parallel_experts_are_sliced_over_all_ranks():
    sliced = weight_bytes(models.QWEN3_235B, parallel=Parallel(tensor=2, data=4))
    assert sliced[Kind.EXPERTS] * 8 == weight_bytes(models.QWEN3_235B)[Kind.EXPERTS]


def test_experts_that_do_not_divide_fill_the_fullest_rank():
    whole = weight_bytes(models.QWEN3_235B)[Kind.EXPERTS]
    uneven = weight_bytes(models.QWEN3_235B, parallel=Parallel(data=72, expert=True, redundant_experts=16))
    assert uneven[Kind.EXPERTS] * 128 == whole * 2  # 144 experts on 72 ranks
    assert weight_bytes(models.QWEN3_235B, parallel=Parallel(data=72, expert=True))[Kind.EXPERTS] * 128 == whole * 2


def test_shared_experts_are_whole_under_sequence_parallel_moe():
    split = weight_bytes(models.QWEN35_397B, parallel=Parallel(tensor=2, data=2, expert=True))
    whole = weight_bytes(
        models.QWEN35_397B, parallel=Parallel(tensor=2, data=2, expert=True, sequence_parallel_moe=True)
    )
    assert whole[Kind.DENSE] == 2 * split[Kind.DENSE]


@pytest.mark.parametrize(("tensor_parallel", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1), (16, 1)])
def test_kv_heads_are_repeated(tensor_parallel, heads):
    assert kv_bytes_per_token(models.QWEN3_235B, tensor_parallel=tensor_parallel) == 94 * 2 * heads * 128 * 2
    k_and_v = weight_bytes(models.QWEN3_235B, parallel=Parallel(tensor=tensor_parallel))[Kind.ATTENTION]
    assert k_and_v == 94 * 2 * (2 * 4096 * 8192 // tensor_parallel + 2 * 4096 * heads * 128)


def test_kv_of_other_kinds_of_attention():
    assert kv_bytes_per_token(models.DEEPSEEK_V3, tensor_parallel=8) == 61 * 576 * 2
    assert kv_bytes_per_token(models.DEEPSEEK_V3, bytes_each=1, draft_layers=1) == 62 * 576
    assert kv_bytes_per_token(models.QWEN35_397B) == 15 * 2 * 2 * 256 * 2
    assert kv_bytes_per_token(models.MINIMAX_M3) == 60 * 2 * 4 * 128 * 2 + 57 * 128 * 2
    sparse = models.DEEPSEEK_V3 | {
        "model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128
    }  # fmt: skip
    assert kv_bytes_per_token(sparse) == 61 * (576 * 2 + 132)


def test_linear_attention_state():
    matrices, tail = 64 * 128 * 128 * 4, (2 * 16 * 128 + 64 * 128) * 3 * 2
    assert state_bytes_per_sequence(models.QWEN35_397B) == 45 * (matrices + tail)
    assert state_bytes_per_sequence(models.QWEN35_397B, tensor_parallel=4) * 4 == 45 * (matrices + tail)
    drafted = 45 * 2 * (matrices + tail * 4 // 3)
    assert state_bytes_per_sequence(models.QWEN35_397B, speculative_tokens=1) == drafted
    assert state_bytes_per_sequence(models.QWEN35_397B, state_bytes=2) == 45 * (matrices // 2 + tail)
    assert state_bytes_per_sequence(models.QWEN3_235B) == 0


def test_which_layers_have_experts():
    assert moe_layers(models.QWEN3_235B) == 94 and moe_layers(models.DEEPSEEK_V3) == 58
    assert moe_layers(models.MINIMAX_M3) == 57 and moe_layers(models.QWEN3_32B) == 0
    assert moe_layers(models.QWEN3_235B | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}) == 46


def test_refusals_name_key_and_value():
    with pytest.raises(ModelConfigError, match=r"model_type 'gpt_oss'.*known are.*qwen3_moe"):
        parameters({"model_type": "gpt_oss"})
    with pytest.raises(ModelConfigError, match=r"hidden_size = '4k'"):
        parameters(models.QWEN3_235B | {"hidden_size": "4k"})
    with pytest.raises(ModelConfigError, match=r"'int3' isn't known; known are bf16"):
        weight_bytes(models.QWEN3_235B, weight_format="int3")
    with pytest.raises(ValueError, match=r"tensor = 0"):
        Parallel(tensor=0)


def _tensors(directory):
    return read_header(directory / "model.safetensors")
