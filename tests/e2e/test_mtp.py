"""MTP drafting in whole engines: the tokens of greedy decoding stay what they are, and how many drafts are accepted.

The longer list of combinations is in drafting_matrix.py.
"""

import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting_engine import ABORT_AFTER, MARK, SAMPLES, TEXT_TOKENS
from e2e_setup import EXAMPLE, HERE
from vllm_server import run_to_end, serve_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROSE = {"moe_backend": "rose_cutedsl", "linear_backend": "rose_cutedsl"}
EAGER = {"enforce_eager": True}
CHUNKS = {"max_num_batched_tokens": 128, "max_num_seqs": 24}
TP2, EP = {"tensor_parallel_size": 2}, {"enable_expert_parallel": True}
TEXT_LENGTHS = (1, 2, 3, 5, 8, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 150, 200, 256, 257, 400)
EVERYTHING = ("texts", "questions", "stop", "limit", "abort", "structured", "again", "distribution", "sampled")

# name: (reference, target, draft directory or "" for an attached one, speculative tokens, other arguments, parts)
ALONE: dict[str, tuple] = {
    "bf16": (None, "bf16", None, 0, EAGER, EVERYTHING),
    "bf16_k1": ("bf16", "bf16", "mtp", 1, EAGER, ("texts", "questions", "again", "sampled")),
    "bf16_attached_k2": ("bf16", "b_b", "", 2, EAGER, ("texts", "stop", "limit", "abort", "structured", "sampled")),
    "bf16_with_mxfp8_draft_k3": ("bf16", "bf16", "mtp_mxfp8", 3, EAGER, ("texts",)),
    "bf16_with_mxfp8_draft_attached_k1": ("bf16", "b_m", "", 1, EAGER, ("questions",)),
    "mxfp8": (None, "mxfp8", None, 0, ROSE | EAGER, ("texts", "questions")),
    "mxfp8_with_bf16_draft_k1": ("mxfp8", "mxfp8", "mtp", 1, ROSE | EAGER, ("texts", "questions")),
    "mxfp8_with_bf16_draft_attached_k3": ("mxfp8", "m_b", "", 3, ROSE | EAGER | CHUNKS, ("texts",)),
    "mxfp8_with_mxfp8_draft_k4": ("mxfp8", "mxfp8", "mtp_mxfp8", 4, ROSE | EAGER, ("texts", "questions")),
    "attached_unused": ("mxfp8", "m_b", None, 0, ROSE | EAGER, ("questions",)),
    "qk_norm": (
        "mxfp8",
        "m_m",
        "",
        1,
        ROSE | EAGER | {"additional_config": {"rose": {"qk_norm": "reference"}}},
        ("questions",),
    ),
    "compiled": (None, "mxfp8", None, 0, ROSE, ("texts", "questions")),
    "compiled_k3": ("compiled", "m_m", "", 3, ROSE, ("texts", "questions")),
}
TWO_RANKS: dict[str, tuple] = {
    "two_ranks_ep": (None, "mxfp8", None, 0, ROSE | EAGER | TP2 | EP, ("texts",)),
    "two_ranks_ep_k4": ("two_ranks_ep", "m_m", "", 4, ROSE | EAGER | TP2 | EP, ("texts",)),
}
DRAFTING = [name for name, (reference, *_) in (ALONE | TWO_RANKS).items() if reference is not None]
EXPERTS = {
    # How many layers' experts ours serve; a draft has one layer, its target three.
    **{"bf16_k1": 0, "bf16_attached_k2": 0},
    **{"bf16_with_mxfp8_draft_k3": 1, "bf16_with_mxfp8_draft_attached_k1": 1},
    **{"mxfp8_with_bf16_draft_k1": 3, "mxfp8_with_bf16_draft_attached_k3": 3, "attached_unused": 3},
    **{"mxfp8_with_mxfp8_draft_k4": 4, "qk_norm": 4, "compiled_k3": 4, "two_ranks_ep_k4": 4},
}
ANSWERS_ACCEPTED = 0.987
"""The example's README: the draft's first choice is the target's, on the answers to prompts.txt."""
MARGIN = 0.02


@pytest.fixture(scope="module")
def models(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of targets and drafts, by the names used above."""
    from vllm_rose_plugin.cli import main as rose

    root = tmp_path_factory.mktemp("mtp")
    found = {"bf16": EXAMPLE / "target", "mxfp8": checkpoint, "mtp": EXAMPLE / "mtp", "mtp_mxfp8": root / "mtp_mxfp8"}
    assert rose(["quantize", str(found["mtp"]), str(found["mtp_mxfp8"])]) == 0
    for target in ("bf16", "mxfp8"):
        for draft in ("mtp", "mtp_mxfp8"):
            name = f"{target[0]}_{'m' if draft.endswith('mxfp8') else 'b'}"
            assert rose(["mtp", "attach", str(found[target]), str(found[draft]), str(root / name)]) == 0
            found[name] = root / name
    return {name: str(path) for name, path in found.items()}


@pytest.fixture(scope="module")
def inputs(validation_tokens: list[int], question_tokens: list[list[int]]) -> dict[str, list[list[int]]]:
    """What every engine is asked."""
    texts = [validation_tokens[500 * i :][:length] for i, length in enumerate(TEXT_LENGTHS)]
    return {"texts": texts, "questions": question_tokens}


def engines(table: dict[str, tuple], models: dict[str, str]) -> list[dict[str, Any]]:
    """The cases of a table, for drafting_engine.py."""
    cases = []
    for name, (_, target, draft, tokens, arguments, parts) in table.items():
        speculative = {"method": "mtp", "num_speculative_tokens": tokens} | ({"model": models[draft]} if draft else {})
        engine = {"model": models[target], "seed": 7, **arguments}
        cases.append(
            {"name": name, "engine": engine | ({"speculative_config": speculative} if tokens else {}), "parts": parts}
        )
    return cases


def run_engines(plan: dict[str, Any], environment: dict[str, str], directory: Path) -> dict[str, Any]:
    """Results by name, and the log under "log"."""
    (directory / "cases.json").write_text(json.dumps(plan))
    code, output = run_to_end(
        [sys.executable, str(HERE / "drafting_engine.py"), str(directory / "cases.json")],
        environment=environment,
        log=directory / "log",
        timeout=800,
    )
    lines = [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
    assert code == 0 and len(lines) == len(plan["cases"]), output[-4000:]
    for line in lines:
        print(f"\n{line['name']}: {line.get('seconds')}")
    return {**{line["name"]: line for line in lines}, "log": output}


@pytest.fixture(scope="module")
def alone(
    models: dict[str, str],
    inputs: dict[str, list[list[int]]],
    offline_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """One rank, all engines in one process."""
    plan = {"inputs": inputs, "cases": engines(ALONE, models)}
    return run_engines(plan, offline_environment, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def two_ranks(
    models: dict[str, str], inputs: dict[str, list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Two ranks, which are processes of their own."""
    directory = tmp_path_factory.mktemp("two_ranks")
    plan = {"inputs": inputs, "cases": engines(TWO_RANKS, models)}
    return run_engines(plan, serve_environment(directory / "cache", ranks=2), directory)


@pytest.fixture
def results(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Those of the process that ran the test's case."""
    case = request.node.callspec.params["case"]
    return request.getfixturevalue("two_ranks" if case in TWO_RANKS else "alone")


@pytest.mark.parametrize("case", DRAFTING)
def test_greedy_tokens_are_those_without_drafting(case: str, results: dict[str, Any]) -> None:
    """20 continuations of 200 tokens each, stop strings, the model's limit, an abort, a grammar, cached prefixes."""
    reference, _, _, k, _, parts = (ALONE | TWO_RANKS)[case]
    result, expected = results[case], results[reference]
    assert "error" not in result, result["error"]
    assert "error" not in expected, expected["error"]
    for part in set(parts) - {"sampled", "distribution"}:
        assert result[part]["tokens"] == expected[part]["tokens"], part
        for key in ("ends", "texts"):
            assert result[part].get(key) == expected[part].get(key), part
        if k and part in ("texts", "questions"):
            counted = result[part]
            assert counted["drafted"] == k * counted["drafts"] and len(counted["accepted"]) == k
            assert counted["accepted"][0] > 0.6 * counted["drafts"], counted
            assert counted["accepted"] == sorted(counted["accepted"], reverse=True)
    served = result["layers"]["experts"]
    assert served == ({"RoseCuteDslExperts": EXPERTS[case]} if EXPERTS[case] else {})
    if "texts" in parts:
        assert [len(tokens) for tokens in result["texts"]["tokens"]] == [TEXT_TOKENS] * len(TEXT_LENGTHS)


def test_hard_cases_were_met(alone: dict[str, Any]) -> None:
    """The inputs do what their names say."""
    result = alone["bf16_attached_k2"]
    assert {reason for _, _, reason in result["stop"]["ends"]} == {" the ", "is a", ". ", None}
    assert [len(tokens) for tokens in result["limit"]["tokens"]] == [1, 2, 3, 5, 40]
    assert ABORT_AFTER <= len(result["abort"]["cut"]) < 20, "aborted on its way"
    assert all(text.startswith(("The ", "A ", "An ")) for text in result["structured"]["texts"])
    assert min(alone["bf16_k1"]["again"]["cached"][1:]) > 0, "the prefix cache served nothing"


def test_drafting_adds_one_layer_of_our_attention_where_the_setting_says_so(alone: dict[str, Any]) -> None:
    assert alone["qk_norm"]["layers"]["qk_norm"] == {"RoseQwen3MoeAttention": 4}
    assert alone["mxfp8_with_mxfp8_draft_k4"]["layers"]["qk_norm"] == {}


def share(result: dict[str, Any], part: str) -> float:
    """Accepted first draft tokens."""
    return result[part]["accepted"][0] / result[part]["drafts"]


def test_acceptance_is_that_of_the_readme(alone: dict[str, Any]) -> None:
    for case in ("bf16_k1", "mxfp8_with_bf16_draft_k1", "bf16_with_mxfp8_draft_attached_k1"):
        accepted = share(alone[case], "questions")
        print(f"\n{case}: {accepted:.1%} of the first draft tokens accepted on the answers")
        assert abs(accepted - ANSWERS_ACCEPTED) < MARGIN, case


def test_acceptance_does_not_fall_with_an_mxfp8_target(alone: dict[str, Any]) -> None:
    bf16, mxfp8 = (share(alone[case], "texts") for case in ("bf16_k1", "mxfp8_with_bf16_draft_k1"))
    print(f"\nfirst draft tokens accepted on continued texts: BF16 {bf16:.1%}, MXFP8 {mxfp8:.1%}")
    assert mxfp8 > bf16 - MARGIN


def test_acceptance_is_what_plain_torch_says(alone: dict[str, Any], inputs: dict[str, list[list[int]]]) -> None:
    """The example's own evaluation, on the very texts: which drafts would be right, and of these, which were made."""
    sys.path.insert(0, str(EXAMPLE))
    from train import load

    target, mtp = (model.eval() for model in load(EXAMPLE, torch.bfloat16))
    drafts = accepted = 0
    for prompt, answer in zip(inputs["texts"], alone["bf16_k1"]["texts"]["tokens"], strict=True):
        tokens = torch.tensor([prompt + answer])
        with torch.no_grad():
            hidden = target.model(input_ids=tokens).last_hidden_state
            embeddings = target.model.embed_tokens(tokens)
            positions = target.model.rotary_emb(embeddings, torch.arange(tokens.shape[1] - 1)[None])
            guesses = target.lm_head(mtp(embeddings[:, 1:], hidden[:, :-1], positions)).argmax(-1)[0]
        right = (guesses[:-1] == tokens[0, 2:]).tolist()  # right[i]: the draft for token i + 2
        position = len(prompt) + 1  # the first answered token is no draft's
        while position < tokens.shape[1]:
            drafts += 1
            accepted += right[position - 2]
            position += 1 + right[position - 2]
    served = alone["bf16_k1"]["texts"]
    print(f"\n{served['accepted'][0]} of {served['drafts']} accepted, plain torch: {accepted} of {drafts}")
    assert abs(share(alone["bf16_k1"], "texts") - accepted / drafts) < MARGIN


@pytest.mark.parametrize("case", ["bf16", "bf16_k1", "bf16_attached_k2"])
def test_sampled_tokens_have_the_targets_distribution(case: str, alone: dict[str, Any]) -> None:
    """Pearson's chi-square of the next three tokens, each after the likeliest ones, over the likeliest and the rest."""
    kept = alone[case]["sampled"]["samples"]
    assert len(kept) == SAMPLES
    for position, row in enumerate(alone["bf16"]["distribution"]["probabilities"]):
        probabilities = {int(token): p for token, p in row.items() if p * len(kept) >= 8}
        counts = Counter(sample[position] for sample in kept)
        cells = [(counts[token], p) for token, p in probabilities.items()]
        cells.append((len(kept) - sum(n for n, _ in cells), 1 - sum(p for _, p in cells)))
        assert len(cells) > 2 and cells[-1][1] * len(kept) >= 8, "the text leaves too little to chance"
        statistic = sum((n - p * len(kept)) ** 2 / (p * len(kept)) for n, p in cells)
        freedom = len(cells) - 1
        # The 0.9999 quantile, by Wilson and Hilferty.
        limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
        print(f"\n{case}, token {position + 1}: chi-square {statistic:.1f} of {freedom}, limit {limit:.1f}")
        assert statistic < limit, (position, cells)
        likeliest = max(probabilities, key=probabilities.__getitem__)
        kept = [sample for sample in kept if sample[position] == likeliest]
