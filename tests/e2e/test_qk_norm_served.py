"""QK-norm attention in whole models, in engines inside one process: the torch form of its op, eager and compiled."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from e2e_setup import EXAMPLE, HERE
from offline_engine import MARK
from vllm_server import run_to_end

pytestmark = pytest.mark.slow

COMPARED_TOKENS = 24
ROSE = {"moe_backend": "rose_cutedsl", "linear_backend": "rose_cutedsl"}
REFERENCE = {"additional_config": {"rose": {"qk_norm": "reference"}}}
OURS = ("eager", "compiled", "beside_mxfp8")


@pytest.fixture(scope="module")
def results(
    checkpoint: Path,
    question_tokens: list[list[int]],
    offline_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What became of each case, all of them run by one process."""
    directory = tmp_path_factory.mktemp("qk_norm")
    bf16 = str(EXAMPLE / "target")
    engines: dict[str, dict[str, Any]] = {
        "stock": {"model": bf16, "enforce_eager": True},
        "eager": {"model": bf16, "enforce_eager": True, **REFERENCE},
        "compiled": {"model": bf16, **REFERENCE},
        "beside_mxfp8": {"model": str(checkpoint), "enforce_eager": True, **ROSE, **REFERENCE},
    }
    cases = [
        {"engine": {"max_model_len": 256, **engine}, "prompts": question_tokens, "max_tokens": COMPARED_TOKENS}
        for engine in engines.values()
    ]
    (directory / "cases.json").write_text(json.dumps(cases))
    code, output = run_to_end(
        [sys.executable, str(HERE / "offline_engine.py"), str(directory / "cases.json")],
        environment=offline_environment,
        log=directory / "log",
        timeout=400,
    )
    lines = [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
    assert code == 0 and len(lines) == len(cases), output[-4000:]
    return {"log": output, **dict(zip(engines, lines, strict=True))}


@pytest.mark.parametrize("name", OURS)
def test_every_attention_layer_is_ours_and_the_answers_are_vllms(name: str, results: dict[str, Any]) -> None:
    result = results[name]
    assert "error" not in result, result["error"]
    assert result["layers"]["qk_norm"] == {"RoseQwen3MoeAttention": 3}
    assert bool(result["layers"]["experts"]) == (name == "beside_mxfp8")
    stock = results["stock"]["tokens"]
    same = sum(ours == theirs for ours, theirs in zip(result["tokens"], stock, strict=True))
    print(f"\n{name}: {same} of {len(stock)} greedy answers are those of vLLM's own norms in BF16")
    assert same >= (18 if name == "beside_mxfp8" else 19)


def test_without_the_setting_attention_is_vllms(results: dict[str, Any]) -> None:
    assert results["stock"]["layers"] == {"experts": {}, "linear": {}, "qk_norm": {}}


def test_the_log_says_it(results: dict[str, Any]) -> None:
    assert "QK-norm: ours (reference), with the rotary embedding in the same launch." in results["log"]
