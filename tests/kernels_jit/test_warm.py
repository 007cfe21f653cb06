"""What `rose cache warm` compiles is what vLLM's layers ask for at start-up."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_rose_plugin.config import RoseConfig
from vllm_rose_plugin.kernels import warm
from vllm_rose_plugin.kernels.contracts import Activation
from vllm_rose_plugin.kernels.gemm.family import FAMILY as MXFP8_LINEAR
from vllm_rose_plugin.kernels.jit.providers import Family
from vllm_rose_plugin.kernels.jit.targets import limits_of
from vllm_rose_plugin.kernels.moe_experts.family import FAMILY as MOE_EXPERTS
from vllm_rose_plugin.kernels.mxfp8_quantize.family import FAMILY as MXFP8_QUANTIZE
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DeviceFacts
from vllm_rose_plugin.kernels.rank_shapes import RankShapes
from vllm_rose_plugin.layers import qk_norm, self_check
from vllm_rose_plugin.layers.experts import RoseCuteDslExperts
from vllm_rose_plugin.layers.linear import RoseCuteDslMxfp8LinearKernel

MODELS = Path(__file__).resolve().parents[2] / "recipes/models"
MODEL = MODELS / "qwen3-235b-a22b.json"
QWEN3_5 = ("qwen3.5-122b-a10b", "qwen3.5-397b-a17b")
LARGEST = 1024
Need = tuple[Family, Callable[[int], Any]]


def needs_of_layers(monkeypatch: pytest.MonkeyPatch, *, ranks: int, activation: str) -> list[Need]:
    """(family, token count to shape) as the layers of Qwen3-235B-A22B on one of ``ranks`` say it themselves."""
    config = json.loads(MODEL.read_text())
    q, kv, dim = config["num_attention_heads"] // ranks, max(1, config["num_key_value_heads"] // ranks), 128
    settings = RoseConfig(activation=activation)
    weights = (((q + 2 * kv) * dim, config["hidden_size"]), (config["hidden_size"], q * dim))
    needs = needs_of_quantized(config, weights, settings, ranks=ranks)
    attention = SimpleNamespace(
        num_heads=q,
        num_kv_heads=kv,
        head_dim=dim,
        fuses_rope=True,
        rotary_emb=SimpleNamespace(rotary_dim=dim, is_neox_style=True),
        q_norm=SimpleNamespace(weight=torch.ones(dim, dtype=torch.bfloat16), variance_epsilon=config["rms_norm_eps"]),
    )
    with monkeypatch.context() as patch:
        patch.setattr(self_check, "need", lambda *need: needs.append(need))
        qk_norm._need_kernels(attention)
    return needs


def needs_of_quantized(
    config: dict[str, Any], weights: Iterable[tuple[int, int]], settings: RoseConfig, *, ranks: int
) -> list[Need]:
    """Those of linear layers with such weights ``[N, K]``, and of experts that are dealt out to ``ranks``."""
    linear = RoseCuteDslMxfp8LinearKernel
    needs: list[Need] = []
    for weight in weights:
        layer: Any = SimpleNamespace(
            config=SimpleNamespace(weight_shape=weight),
            dtype=torch.bfloat16,
            settings=settings,
            batch_invariant=False,
        )
        needs.append((MXFP8_LINEAR, lambda tokens, layer=layer: linear._linear_shape(layer, tokens, bias=False)))
        if settings.activation == "mxfp8":
            needs.append((MXFP8_QUANTIZE, lambda tokens, layer=layer: linear._quantize_shape(layer, tokens)))
    experts: Any = SimpleNamespace(
        moe_config=SimpleNamespace(
            experts_per_token=config["num_experts_per_tok"],
            intermediate_size_per_partition=config["moe_intermediate_size"],
            hidden_dim=config["hidden_size"],
            num_experts=config["num_experts"],
            num_local_experts=config["num_experts"] // ranks,
            in_dtype=torch.bfloat16,
        ),
        settings=settings,
        captured=True,
        senders=1,
        gets_codes=False,
    )
    needs.append((MOE_EXPERTS, lambda tokens: RoseCuteDslExperts._shape(experts, tokens)))
    return needs


@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_107a"])
def test_every_config_that_layers_ask_for_is_warmed(
    monkeypatch: pytest.MonkeyPatch, target: str, ranks: int, activation: str
) -> None:
    if activation == "bf16" and target != "sm_90a":
        with pytest.raises(ValueError, match="activation='bf16' is served on sm_90 only"):
            kernels_of(target, ranks, activation)
        return
    needs = needs_of_layers(monkeypatch, ranks=ranks, activation=activation)
    assert asked_of(needs, target, kernels_of(target, ranks, activation)) > 20


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("model", QWEN3_5)
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_107a"])
def test_every_config_that_layers_of_qwen3_5_ask_for_is_warmed(target: str, model: str, ranks: int) -> None:
    """Sizes of the linear layers are compared with vLLM's in tests/seams/test_qwen3_5_layers.py."""
    config = json.loads((MODELS / f"{model}.json").read_text())
    shapes = RankShapes.of(config, tensor_parallel_size=ranks, enable_expert_parallel=True)
    weights = [(n, k) for n, k, _ in shapes.linears]
    needs = needs_of_quantized(config["text_config"], weights, RoseConfig(activation="mxfp8"), ranks=ranks)
    warmed = warm.kernels(shapes, target=target, max_tokens=LARGEST)
    assert asked_of(needs, target, warmed) > 20
    assert "qk_norm" not in {kernel.family for kernel in warmed}


def asked_of(needs: Iterable[Need], target: str, kernels: Iterable[warm.Kernel]) -> int:
    """How many configs were asked for; each must be among ``kernels``."""
    warmed = {kernel.config for kernel in kernels}
    facts = DeviceFacts(target, limits_of(target).sm_count)
    asked = 0
    for family, shape_of in needs:
        assert family.config_of is not None
        for tokens in self_check.token_counts(family, shape_of, largest=LARGEST, facts=facts):
            configs = family.config_of(shape_of(tokens), *facts)
            for config in configs if isinstance(configs, tuple) else (configs,):
                assert config in warmed, (family.name, tokens)
                asked += 1
    return asked


def kernels_of(target: str, ranks: int, activation: str) -> tuple[warm.Kernel, ...]:
    shapes = RankShapes.of(json.loads(MODEL.read_text()), tensor_parallel_size=ranks, enable_expert_parallel=True)
    return warm.kernels(shapes, target=target, max_tokens=LARGEST, activation=Activation(activation))
