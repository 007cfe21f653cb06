"""`rose bench mtp` with an engine in its own process instead of a server."""

import json
import sys
from pathlib import Path

import pytest
from e2e_setup import ANSWER_TOKENS, EXAMPLE, README_AGREEMENT
from vllm_server import run_to_end

pytestmark = pytest.mark.slow


def test_an_engine_of_its_own(offline_environment: dict[str, str], tmp_path: Path) -> None:
    """BF16 target and draft, from two directories."""
    flags = ["--model", EXAMPLE / "target", "--draft", EXAMPLE / "mtp", "--speculative-tokens", "1"]
    flags += ["--engine", '{"enforce_eager": true, "max_model_len": 512}', "--tokens", ANSWER_TOKENS]
    flags += ["--questions", EXAMPLE / "prompts.txt", "--output", tmp_path / "out"]
    command = [sys.executable, "-m", "vllm_rose_plugin.cli", "bench", "mtp", *map(str, flags)]
    code, output = run_to_end(command, environment=offline_environment, log=tmp_path / "log", timeout=300)
    assert code == 0, output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["draft"] == str(EXAMPLE / "mtp") and content["source"] == "offline engine"
    print(f"\nBF16 target and draft: {content['acceptance_by_position'][0]:.1%}")
    assert abs(content["acceptance_by_position"][0] - README_AGREEMENT) <= 0.02
