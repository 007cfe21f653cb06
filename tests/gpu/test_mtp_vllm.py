"""MTP drafting in the real vLLM CUDA build on one GPU, eager and with torch.compile and CUDA graphs; ``-m gpu``.

Every engine is a process of its own. They run at once, as far as there are two cores for each, and only those that the
chosen tests ask for.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tiny_moe"
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from drafting_cases import (  # noqa: E402
    EAGER,
    ROSE,
    TEXT_LENGTHS,
    check_distribution,
    drafting_inputs,
    drafting_models,
    engines,
    partings,
)
from drafting_engine import ABORT_AFTER, MARK, TEXT_TOKENS  # noqa: E402
from vllm_server import first_errors, gpu_environment, run_to_end  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
ENGINE_SECONDS = 480
"""Until an engine counts as one that hangs."""
SMALL = {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1 << 30, "max_num_seqs": 32}
"""The share of the memory is what must be free when an engine starts, beside those that run already."""
CAPTURED = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 120, 160]
"""Enough for 32 requests with four drafted tokens each; vLLM captures 51 sizes otherwise."""
GRAPHS = {"cudagraph_capture_sizes": CAPTURED}
CHUNKS = {"max_num_batched_tokens": 256}
CROWD = {"max_num_seqs": 64}
TRITON = {"attention_backend": "TRITON_ATTN"}
"""Under VLLM_BATCH_INVARIANT the same kernel for one token of a request and for several."""
PLAIN = ("texts", "questions", "limit")
ANSWERS_ACCEPTED, MARGIN = 0.987, 0.02
"""The example's README, for the answers to the questions."""
TIE = 0.5
"""In nats. Another batch shape orders sums otherwise, so that tokens closer than that may change places."""
PARTED = 2
"""Of 20 answers to the questions, which have few near ties."""

# name: (reference, target, draft directory or "" for an attached one, speculative tokens, other arguments, parts)
CASES: dict[str, tuple] = {
    "bf16": (None, "bf16", None, 0, GRAPHS, (*PLAIN, "distribution", "sampled")),
    "bf16_k1": ("bf16", "bf16", "mtp", 1, GRAPHS, (*PLAIN, "sampled")),
    "bf16_with_mxfp8_draft_k3": ("bf16", "bf16", "mtp_mxfp8", 3, GRAPHS, (*PLAIN, "sampled")),
    "mxfp8": (None, "mxfp8", None, 0, ROSE | GRAPHS | CROWD, (*PLAIN, "crowd")),
    "mxfp8_with_bf16_draft_attached_k2": (
        "mxfp8",
        "m_b",
        "",
        2,
        ROSE | GRAPHS | CHUNKS,
        ("texts", "questions", "structured", "abort"),
    ),
    "mxfp8_with_mxfp8_draft_attached_k4": ("mxfp8", "m_m", "", 4, ROSE | GRAPHS, PLAIN),
    "eager": (None, "mxfp8", None, 0, ROSE | EAGER, PLAIN),
    "eager_with_mxfp8_draft_k4": ("eager", "mxfp8", "mtp_mxfp8", 4, ROSE | EAGER, PLAIN),
    "invariant": (None, "mxfp8", None, 0, ROSE | GRAPHS | TRITON | CROWD, (*PLAIN, "crowd")),
    "invariant_with_bf16_draft_k1": ("invariant", "mxfp8", "mtp", 1, ROSE | GRAPHS | TRITON, PLAIN),
    "invariant_with_mxfp8_draft_attached_k4": ("invariant", "m_m", "", 4, ROSE | GRAPHS | TRITON, PLAIN),
}
INVARIANT = [name for name in CASES if name.startswith("invariant")]
"""Under VLLM_BATCH_INVARIANT=1."""
EXPERTS = {
    # How many layers' experts ours serve; a draft has one layer, its target three.
    **{"bf16_k1": 0, "bf16_with_mxfp8_draft_k3": 1, "mxfp8_with_bf16_draft_attached_k2": 3},
    **{"mxfp8_with_mxfp8_draft_attached_k4": 4, "eager_with_mxfp8_draft_k4": 4},
    **{"invariant_with_bf16_draft_k1": 3, "invariant_with_mxfp8_draft_attached_k4": 4},
}
DRAFTED = [name for name, (reference, *_) in CASES.items() if reference is not None]


@pytest.fixture(scope="module")
def inputs():
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "target")
    text = (EXAMPLE / "validation.txt").read_text(encoding="utf-8")
    questions = (EXAMPLE / "prompts.txt").read_text(encoding="utf-8").split("\n")[:20]
    chats = [[{"role": "user", "content": question}] for question in questions]
    return drafting_inputs(
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
        [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"] for c in chats],
    )


@pytest.fixture(scope="module")
def results(request, inputs, tmp_path_factory):
    """What the engines of the chosen tests gave, by name; or "error"."""
    root = tmp_path_factory.mktemp("mtp")
    checkpoint = root / "mxfp8"
    command = [sys.executable, "-m", "vllm_rose_plugin.cli", "quantize", str(EXAMPLE / "target"), str(checkpoint)]
    subprocess.run(command, cwd=ROOT, check=True)
    models = drafting_models(root, checkpoint)
    callspecs = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    asked = {name for callspec in callspecs for name in callspec.params.values() if name in CASES}
    asked |= {CASES[name][0] for name in asked} - {None}
    table = {name: CASES[name] for name in CASES if name in asked}

    def run(case: dict) -> dict:
        name = case["name"]
        case["engine"] = SMALL | case["engine"]
        plan, log = root / f"{name}.json", root / f"{name}.log"
        plan.write_text(json.dumps({"inputs": inputs, "cases": [case]}))
        environment = gpu_environment(root / f"{name}.cache")
        environment.setdefault("ROSE_CACHE_DIR", str(root / "rose"))
        if name in INVARIANT:
            environment["VLLM_BATCH_INVARIANT"] = "1"
        command = [sys.executable, str(ROOT / "tests" / "e2e" / "drafting_engine.py"), str(plan)]
        try:
            code, output = run_to_end(command, environment=environment, log=log, timeout=ENGINE_SECONDS)
            ended = f"ended with {code}:\n{first_errors(output)}"
        except AssertionError as error:  # the other engines' results are as good, and so are this one's, if it has any
            ended, output = str(error), log.read_text(errors="replace")
        lines = re.findall(rf"^{MARK}(.*)$", output, re.MULTILINE)
        result = json.loads(lines[0]) if lines else {"error": ended}
        if lines and "error" in result:
            result["error"] += f"\n{ended}"
        print(f"\n{name}: start and work took {[f'{s:.0f} s' for s in result.get('seconds', ())]}", flush=True)
        return result

    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:
        return dict(zip(table, pool.map(run, engines(table, models)), strict=True))


def good(results: dict, name: str) -> dict:
    assert "error" not in results[name], results[name]["error"]
    return results[name]


def accepted(result: dict, part: str) -> float:
    """The share of drafts of which the target took the first token."""
    return result[part]["accepted"][0] / result[part]["drafts"]


@pytest.mark.parametrize("case", DRAFTED)
def test_answers_are_those_without_drafting(results, case):
    """20 texts continued by 200 tokens in one batch, 20 questions, prompts near the model's limit."""
    reference, _, _, k, _, parts = CASES[case]
    result, plain = good(results, case), good(results, reference)
    assert [len(tokens) for tokens in result["texts"]["tokens"]] == [TEXT_TOKENS] * len(TEXT_LENGTHS)
    for part in set(parts) & set(PLAIN):
        apart = list(partings(plain[part], result[part]).values())
        print(f"{case}, {part}: {len(apart)} of {len(plain[part]['tokens'])} part, where tokens are apart by {apart}")
        assert all(gap < TIE for gap in apart), part
        if part == "questions":
            assert len(apart) <= PARTED
        if part == "limit":
            assert result[part]["ends"] == plain[part]["ends"]
    for part in ("texts", "questions"):
        counted = result[part]
        # Fewer than k are drafted where an answer ends.
        assert 0.95 * k * counted["drafts"] < counted["drafted"] <= k * counted["drafts"]
        assert len(counted["accepted"]) == k
        assert counted["accepted"] == sorted(counted["accepted"], reverse=True)


@pytest.mark.parametrize("case", [name for name in INVARIANT if name in DRAFTED])
def test_batch_invariant_kernels_give_the_very_tokens(results, case):
    """With MXFP8 too: what parts answers without them is the number of tokens of a step, not drafting."""
    plain, drafted = good(results, "invariant"), good(results, case)
    for part in PLAIN:
        assert drafted[part]["tokens"] == plain[part]["tokens"], part


@pytest.mark.parametrize("case", ["mxfp8", "invariant"])
def test_a_larger_batch_without_drafting(results, case):
    """Answers part at near ties as they do with drafting, and not at all with batch-invariant kernels."""
    result = good(results, case)
    texts, crowd = result["texts"], result["crowd"]
    count = len(texts["tokens"])
    turns = [{"tokens": crowd["tokens"][turn * count :][:count]} for turn in range(3)]
    apart = [gap for turn in turns for gap in partings(texts, turn).values()]
    print(f"{case}: {len(apart)} of {len(crowd['tokens'])} texts part in a batch of three times as many, at {apart}")
    assert all(gap < TIE for gap in apart)
    assert case != "invariant" or not apart


@pytest.mark.parametrize("case", DRAFTED)
def test_acceptance_is_that_of_the_readme(results, case):
    result = good(results, case)
    on_answers, on_texts = accepted(result, "questions"), accepted(result, "texts")
    print(f"{case}: first draft tokens accepted on answers {on_answers:.1%}, on continued texts {on_texts:.1%}")
    assert abs(on_answers - ANSWERS_ACCEPTED) < MARGIN


@pytest.mark.parametrize(("one", "other"), [("bf16_k1", "mxfp8_with_bf16_draft_attached_k2")])
def test_acceptance_does_not_fall_with_an_mxfp8_target(results, one, other):
    bf16, mxfp8 = (accepted(good(results, name), "texts") for name in (one, other))
    print(f"first draft tokens accepted on continued texts: BF16 {bf16:.1%}, MXFP8 {mxfp8:.1%}")
    assert mxfp8 > bf16 - MARGIN


@pytest.mark.parametrize("case", DRAFTED)
def test_our_kernels_serve_what_is_mxfp8(results, case):
    result = good(results, case)
    count = EXPERTS[case]
    assert result["layers"]["experts"] == ({"RoseCuteDslExperts": count} if count else {})
    if count:
        assert result["providers"]["moe_experts"] == "rose"
        calls = result["calls"]["moe_experts"]
        assert calls.get("rose", 0) >= count and "reference" not in calls, calls


@pytest.mark.parametrize("case", ["bf16", "bf16_k1", "bf16_with_mxfp8_draft_k3"])
def test_sampled_tokens_have_the_targets_distribution(results, case):
    probabilities = good(results, "bf16")["distribution"]["probabilities"]
    check_distribution(case, good(results, case)["sampled"]["samples"], probabilities)


@pytest.mark.parametrize("case", ["mxfp8_with_bf16_draft_attached_k2"])
def test_a_grammar_holds_and_an_aborted_request_leaves_the_others_alone(results, case):
    result = good(results, case)
    assert all(text.startswith(("The ", "A ", "An ")) for text in result["structured"]["texts"])
    assert ABORT_AFTER <= len(result["abort"]["cut"]) < 60
    assert [len(tokens) for tokens in result["abort"]["tokens"]] == [60, 60, 60]
