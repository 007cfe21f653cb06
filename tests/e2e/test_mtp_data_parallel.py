"""MTP drafting with data and expert parallelism over our all-to-all, with processes in place of GPUs."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from e2e_setup import ALL_TO_ALL, EXAMPLE, README_AGREEMENT
from test_accuracy import SAME_ANSWERS
from test_all_to_all_served import ask
from vllm_server import ROSE_FLAGS, Server, serve_environment

from vllm_rose_plugin.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SPECULATIVE_TOKENS = 2
DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@pytest.fixture(scope="module")
def drafting(checkpoint: Path, cache: Path, servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two engines with half of the experts each, of the target in MXFP8 and of its attached draft in MXFP8."""
    directory = tmp_path_factory.mktemp("mtp")
    assert main(["quantize", str(EXAMPLE / "mtp"), str(directory / "draft")]) == 0
    assert main(["mtp", "attach", str(checkpoint), str(directory / "draft"), str(directory / "both")]) == 0
    servers.stop()
    config = {"method": "mtp", "num_speculative_tokens": SPECULATIVE_TOKENS}
    server = Server(
        model=directory / "both",
        arguments=(*ROSE_FLAGS, *ALL_TO_ALL.arguments, "--speculative-config", json.dumps(config)),
        environment=serve_environment(cache, ranks=ALL_TO_ALL.ranks),
        log=directory / "serve.log",
    )
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def test_both_engines_draft_and_answer_as_one_does(
    drafting: Server, questions: list[str], bf16_answers: list[str]
) -> None:
    """A few requests at a time, of different lengths; then alone, while the other engine has nothing to do."""
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda question: ask(drafting, question), questions))
    same = sum(answer == expected for answer, expected in zip(answers, bf16_answers, strict=True))
    drafts, first = drafting.metric(DRAFTS), drafting.metric(ACCEPTED, 'position="0"')
    print(f"\n{same} of {len(questions)} greedy answers are the BF16 model's; {first:.0f} of {drafts:.0f} first drafts")
    assert same >= SAME_ANSWERS, [pair for pair in zip(answers, bf16_answers, strict=True) if pair[0] != pair[1]]
    assert drafts > 100 and abs(first / drafts - README_AGREEMENT) <= 0.02
    for engine in ("0", "1"):
        assert drafting.metric(DRAFTS, f'engine="{engine}"') > 0
    right = [number for number, answer in enumerate(answers) if answer == bf16_answers[number]]
    assert [ask(drafting, questions[number]) for number in right[:2]] == [answers[n] for n in right[:2]]


def test_the_drafts_experts_are_ours_and_get_their_tokens_through_our_exchange(drafting: Server) -> None:
    ask(drafting, "What is the functools module?")
    worker = drafting.get("/rose/stats")["workers"][0]
    assert worker["layers"]["experts"] == {"RoseCuteDslExperts": 4}, "three of the target, one of the draft"
    assert worker["calls"]["dp_dispatch"] == worker["calls"]["dp_combine"] == worker["calls"]["moe_route"]
