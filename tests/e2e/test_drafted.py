"""MTP drafting in whole engines: the tokens of greedy decoding stay what they are, and how many drafts are accepted.

The longer list of combinations is in drafting_matrix.py.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting_cases import (
    ALONE,
    EXPERTS,
    TEXT_LENGTHS,
    TWO_RANKS,
    check_distribution,
    drafting_inputs,
    drafting_models,
    engines,
    partings,
    run_engines,
)
from drafting_engine import ABORT_AFTER, TEXT_TOKENS
from e2e_setup import EXAMPLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ANSWERS_ACCEPTED = 0.987
"""The example's README: the draft's first choice is the target's, on the answers to prompts.txt."""
MARGIN = 0.02
TIE = 0.07
"""Nats: one step of a bf16 logit from 8 to 16. On a CPU without AVX-512 two answers part where both tokens' logits are
equal; a step with drafts has more tokens, whose sums may be rounded otherwise."""


@pytest.fixture(scope="module")
def models(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of targets and drafts."""
    return drafting_models(tmp_path_factory.mktemp("mtp"), checkpoint)


@pytest.fixture(scope="module")
def inputs(validation_tokens: list[int], question_tokens: list[list[int]]) -> dict[str, list[list[int]]]:
    """What every engine is asked."""
    return drafting_inputs(validation_tokens, question_tokens)


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


def check_greedy(case: str, results: dict[str, Any]) -> None:
    """What a case answered is what its reference did, and its drafts were counted."""
    reference, _, _, k, _, parts = (ALONE | TWO_RANKS)[case]
    result, expected = results[case], results[reference]
    assert "error" not in result, result["error"]
    assert "error" not in expected, expected["error"]
    for part in set(parts) - {"sampled", "distribution"}:
        apart = partings(expected[part], result[part])
        print(f"\n{case}, {part}: {len(apart)} of {len(expected[part]['tokens'])} answers part, at {apart}")
        assert len(apart) <= 1 and all(gap < TIE for gap in apart.values()), (part, apart)
        for key in {"ends", "texts"} & set(expected[part]):
            pairs = enumerate(zip(result[part][key], expected[part][key], strict=True))
            assert all(ours == plain for i, (ours, plain) in pairs if i not in apart), (part, key)
        if k and part in ("texts", "questions"):
            counted = result[part]
            assert counted["drafted"] == k * counted["drafts"] and len(counted["accepted"]) == k
            assert counted["accepted"][0] > 0.6 * counted["drafts"], counted
            assert counted["accepted"] == sorted(counted["accepted"], reverse=True)
    served = result["layers"]["experts"]
    assert served == ({"RoseCuteDslExperts": EXPERTS[case]} if EXPERTS[case] else {})
    if "texts" in parts:
        assert [len(tokens) for tokens in result["texts"]["tokens"]] == [TEXT_TOKENS] * len(TEXT_LENGTHS)


@pytest.mark.parametrize("case", [name for name, (reference, *_) in ALONE.items() if reference is not None])
def test_greedy_tokens_are_those_without_drafting(case: str, alone: dict[str, Any]) -> None:
    """20 continuations of 200 tokens each, stop strings, the model's limit, an abort, a grammar, cached prefixes."""
    check_greedy(case, alone)


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
    check_distribution(case, alone[case]["sampled"]["samples"], alone["bf16"]["distribution"]["probabilities"])
