"""MTP drafting on two ranks, which take both cores of a small machine: the tokens of greedy decoding stay the same."""

from pathlib import Path
from typing import Any

import pytest
from drafting_cases import TWO_RANKS, drafting_inputs, drafting_models, engines, run_engines
from test_drafted import check_greedy
from vllm_server import serve_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def models(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of targets and drafts."""
    return drafting_models(tmp_path_factory.mktemp("mtp"), checkpoint)


@pytest.fixture(scope="module")
def inputs(validation_tokens: list[int], question_tokens: list[list[int]]) -> dict[str, list[list[int]]]:
    """What every engine is asked."""
    return drafting_inputs(validation_tokens, question_tokens)


@pytest.fixture(scope="module")
def two_ranks(
    models: dict[str, str], inputs: dict[str, list[list[int]]], cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Two ranks, which are processes of their own."""
    directory = tmp_path_factory.mktemp("two_ranks")
    plan = {"inputs": inputs, "cases": engines(TWO_RANKS, models)}
    return run_engines(plan, serve_environment(cache, ranks=2), directory)


@pytest.mark.parametrize("case", [name for name, (reference, *_) in TWO_RANKS.items() if reference is not None])
def test_greedy_tokens_are_those_without_drafting(case: str, two_ranks: dict[str, Any]) -> None:
    """20 continuations of 200 tokens each."""
    check_greedy(case, two_ranks)
