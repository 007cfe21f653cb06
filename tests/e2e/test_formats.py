"""The other ways to an MXFP8 model, and damaged checkpoints, in engines inside one process (no server, eager)."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_setup import ANSWER_TOKENS, EXAMPLE, HERE
from offline_engine import MARK
from safetensors.torch import load_file, save_file
from vllm_server import run_to_end

pytestmark = pytest.mark.slow

COMPARED_TOKENS = 24
DAMAGES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "missing": ("model.layers.1.mlp.experts.3.down_proj.weight_scale", lambda scale: None, "missing"),
    "wrong_dtype": ("model.layers.0.self_attn.q_proj.weight_scale", lambda scale: scale.float(), "F32"),
    "transposed": ("model.layers.2.mlp.experts.0.gate_proj.weight_scale", lambda s: s.T.contiguous(), "transposed"),
}
"""The tensor, what is done to it, a word that the message must have."""
IGNORED = {"no_mxfp8_linear": "*self_attn*", "no_mxfp8_experts": "*.experts*"}


def damaged(source: Path, destination: Path, damage: str) -> Path:
    """A copy of a checkpoint, in a single file, with one scale tensor damaged."""
    name, change, _ = DAMAGES[damage]
    tensors: dict[str, torch.Tensor] = {}
    shutil.copytree(source, destination, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    return destination


@pytest.fixture(scope="module")
def results(
    checkpoint: Path,
    question_tokens: list[list[int]],
    offline_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What became of each case, all of them run by one process."""
    from vllm_rose_plugin.cli import main

    directory = tmp_path_factory.mktemp("formats")
    compressed = directory / "compressed_tensors"
    assert main(["quantize", str(EXAMPLE / "target"), str(compressed), "--format", "compressed-tensors"]) == 0
    models: dict[str, dict[str, Any]] = {"compressed_tensors": {"model": str(compressed)}}
    models["online"] = {"model": str(EXAMPLE / "target"), "quantization": "mxfp8"}
    parts = {"rose": {"locality": "default", "locality_force_domains": 2}}
    models["parts"] = {"model": str(compressed), "additional_config": parts}
    models["unquantized_draft"] = {
        "model": str(checkpoint),
        "speculative_config": {
            "method": "draft_model",
            "model": str(EXAMPLE / "target"),
            "num_speculative_tokens": 2,
            "max_model_len": 256,
        },
    }
    for name, pattern in IGNORED.items():
        assert main(["quantize", str(EXAMPLE / "target"), str(directory / name), "--ignore", pattern]) == 0
        models[name] = {"model": str(directory / name)}
    models["per_quant_names_another"] = {
        "model": str(checkpoint),
        "kernel_config": {"linear_backend_per_quant": {"mxfp8": "emulation"}},
    }
    models |= {damage: {"model": str(damaged(checkpoint, directory / damage, damage))} for damage in DAMAGES}
    common = {
        "moe_backend": "rose_cutedsl",
        "linear_backend": "rose_cutedsl",
        "enforce_eager": True,
        "max_model_len": 256,
    }
    cases = [
        {"engine": common | model, "prompts": question_tokens, "max_tokens": COMPARED_TOKENS}
        for model in models.values()
    ]
    (directory / "cases.json").write_text(json.dumps(cases))
    code, output = run_to_end(
        [sys.executable, str(HERE / "offline_engine.py"), str(directory / "cases.json")],
        environment=offline_environment,
        log=directory / "log",
        timeout=240,
    )
    lines = [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
    assert code == 0 and len(lines) == len(cases), output[-4000:]
    return {"log": output, **dict(zip(models, lines, strict=True))}


# Online quantization has no list of modules to ignore: vLLM quantizes the three routers too.
@pytest.mark.parametrize(
    ("name", "linear_layers"), [("compressed_tensors", 6), ("online", 9), ("unquantized_draft", 6)]
)
def test_other_formats_are_served(
    name: str, linear_layers: int, results: dict[str, Any], tokenizer: Any, bf16_answers: list[str]
) -> None:
    """A compressed-tensors checkpoint; the BF16 one, quantized by vLLM at load; an MXFP8 target with a BF16 draft."""
    result = results[name]
    assert "error" not in result, result["error"]
    assert result["layers"] == {
        "experts": {"RoseCuteDslExperts": 3},
        "linear": {"RoseCuteDslMxfp8LinearKernel": linear_layers},
        "qk_norm": {},
    }
    assert COMPARED_TOKENS < ANSWER_TOKENS
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in result["tokens"]]
    same = sum(expected.startswith(text) for text, expected in zip(texts, bf16_answers, strict=True))
    print(f"\n{name}: {same} of {len(texts)} greedy answers begin as the BF16 model's")
    assert all(texts) and same >= 18, texts


def test_experts_in_parts_answer_the_same(results: dict[str, Any]) -> None:
    """Forced, in torch's memory: a checkpoint is loaded expert by expert into two parts."""
    assert "error" not in results["parts"], results["parts"]["error"]
    assert results["parts"] == results["compressed_tensors"]
    assert "Locality domains: 2 forced parts, computed by the reference kernels." in results["log"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_mxfp8_linear", "--linear-backend rose_cutedsl serves no layer of"),
        ("no_mxfp8_experts", "--moe-backend rose_cutedsl serves no layer of"),
        ("per_quant_names_another", "rose_cutedsl"),
    ],
)
def test_a_flag_that_would_serve_nothing_ends_the_start(name: str, message: str, results: dict[str, Any]) -> None:
    assert message in results[name].get("error", "it was served"), results[name]


def test_unquantized_draft_says_once_that_it_uses_vllms_own_choice(results: dict[str, Any]) -> None:
    assert results["log"].count("an unquantized MoE layer (an unquantized draft, or one on") == 1


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_refused_by_the_name_of_the_tensor(damage: str, results: dict[str, Any]) -> None:
    name, _, word = DAMAGES[damage]
    assert "error" in results[damage], "it was loaded"
    faults = [line for line in results[damage]["error"].splitlines() if name in line]
    assert faults, results[damage]["error"]
    assert any(word in line for line in faults), faults
