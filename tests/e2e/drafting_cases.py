"""What test_drafted.py, test_mtp_ranks.py and tests/gpu/test_mtp_vllm.py draft with, and how the engines are run."""

import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from drafting_engine import MARK, SAMPLES
from e2e_setup import EXAMPLE, HERE
from vllm_server import run_to_end

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
EXPERTS = {
    # How many layers' experts ours serve; a draft has one layer, its target three.
    **{"bf16_k1": 0, "bf16_attached_k2": 0},
    **{"bf16_with_mxfp8_draft_k3": 1, "bf16_with_mxfp8_draft_attached_k1": 1},
    **{"mxfp8_with_bf16_draft_k1": 3, "mxfp8_with_bf16_draft_attached_k3": 3, "attached_unused": 3},
    **{"mxfp8_with_mxfp8_draft_k4": 4, "qk_norm": 4, "compiled_k3": 4, "two_ranks_ep_k4": 4},
}


def drafting_models(root: Path, checkpoint: Path) -> dict[str, str]:
    """Directories of targets and drafts, by the names used above."""
    from vllm_rose_plugin.cli import main as rose

    found = {"bf16": EXAMPLE / "target", "mxfp8": checkpoint, "mtp": EXAMPLE / "mtp", "mtp_mxfp8": root / "mtp_mxfp8"}
    assert rose(["quantize", str(found["mtp"]), str(found["mtp_mxfp8"])]) == 0
    for target in ("bf16", "mxfp8"):
        for draft in ("mtp", "mtp_mxfp8"):
            name = f"{target[0]}_{'m' if draft.endswith('mxfp8') else 'b'}"
            assert rose(["mtp", "attach", str(found[target]), str(found[draft]), str(root / name)]) == 0
            found[name] = root / name
    return {name: str(path) for name, path in found.items()}


def drafting_inputs(validation_tokens: list[int], question_tokens: list[list[int]]) -> dict[str, list[list[int]]]:
    """What every engine is asked."""
    texts = [validation_tokens[500 * i :][:length] for i, length in enumerate(TEXT_LENGTHS)]
    return {"texts": texts, "questions": question_tokens}


def engines(table: dict[str, tuple], models: dict[str, str]) -> list[dict[str, Any]]:
    """The cases of a table, for drafting_engine.py; those that others are compared with tell of ties."""
    cases = []
    for name, (reference, target, draft, tokens, arguments, parts) in table.items():
        speculative = {"method": "mtp", "num_speculative_tokens": tokens} | ({"model": models[draft]} if draft else {})
        engine = {"model": models[target], "seed": 7, **arguments}
        engine |= {"speculative_config": speculative} if tokens else {}
        cases.append({"name": name, "engine": engine, "parts": parts, "gaps": reference is None})
    return cases


def partings(plain: dict[str, Any], drafted: dict[str, Any]) -> dict[int, float]:
    """Where answers part from those without drafting, how far the two likeliest tokens were apart, by answer; nats."""
    found = {}
    for i, (expected, answer, gaps) in enumerate(zip(plain["tokens"], drafted["tokens"], plain["gaps"], strict=True)):
        first = next((j for j, (a, b) in enumerate(zip(expected, answer, strict=False)) if a != b), None)
        if first is not None:
            found[i] = gaps[first]
        else:
            assert len(expected) == len(answer), i
    return found


def run_engines(plan: dict[str, Any], environment: dict[str, str], directory: Path) -> dict[str, Any]:
    """Results by name, and the log under "log"."""
    (directory / "cases.json").write_text(json.dumps(plan))
    code, output = run_to_end(
        [sys.executable, str(HERE / "drafting_engine.py"), str(directory / "cases.json")],
        environment=environment,
        log=directory / "log",
        timeout=1400,
    )
    lines = [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
    assert code == 0 and len(lines) == len(plan["cases"]), output[-4000:]
    for line in lines:
        print(f"\n{line['name']}: {line.get('seconds')}")
    return {**{line["name"]: line for line in lines}, "log": output}


def check_distribution(case: str, samples: list[list[int]], rows: list[dict[str, float]]) -> None:
    """Pearson's chi-square of the next three tokens, each after the likeliest ones, over the likeliest and the rest.

    Args:
        case: for the messages.
        samples: three tokens each.
        rows: for each position, probabilities of the likeliest tokens after the likeliest ones before.
    """
    assert len(samples) == SAMPLES
    kept = samples
    for position, row in enumerate(rows):
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
