"""Runs vLLM engines with and without MTP drafting, one after the other; prints one JSON line for each.

    python drafting_engine.py CASES.json

CASES.json: ``{"inputs": {"texts": [[token ids]], "questions": [[token ids]]}, "cases": [{"name": …, "engine":
{arguments of vllm.LLM}, "parts": [names of functions below]}]}``. A line holds the ``name``, ``layers`` that rank 0
serves by class, its ``providers`` and ``calls``, seconds, and what each part returned; or ``error``, the texts of the
exception and of its causes. With ``"gaps": true`` in a case, greedy parts also return how far apart the two likeliest
tokens were at each step, in nats.
"""

import gc
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

MARK = "RESULT "
LENGTH = 640
"""max_model_len of every engine."""
TEXT_TOKENS, QUESTION_TOKENS = 200, 64
SAMPLES, SAMPLED_TEXT = 2000, 10
ABORT_AFTER = 7

Inputs = dict[str, list[list[int]]]

_wanted: dict[str, Any] = {}
"""Sampling parameters of every request of the case that runs."""


def _generate(llm: Any, prompts: list[list[int]], **sampling: Any) -> list[Any]:
    from vllm import SamplingParams

    sampling = {"temperature": 0.0, **_wanted, **sampling}
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(**sampling), use_tqdm=False)
    return [completion for output in outputs for completion in output.outputs]


def _tokens(completions: list[Any]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]


def _answers(completions: list[Any]) -> dict[str, Any]:
    """Tokens, and the gaps where they were asked for."""
    found: dict[str, Any] = {"tokens": _tokens(completions)}
    if _wanted:
        steps = [[sorted(e.logprob for e in step.values())[-2:] for step in c.logprobs] for c in completions]
        found["gaps"] = [[second - first for first, second in row] for row in steps]
    return found


def drafts(llm: Any) -> dict[str, Any]:
    """vLLM's own counters since the engine started; empty without drafting."""
    found = {m.name.partition("spec_decode_")[2]: m for m in llm.get_metrics() if "spec_decode" in m.name}
    return {name: getattr(m, "values", None) or m.value for name, m in found.items()}


def _counted(llm: Any, before: dict[str, Any]) -> dict[str, Any]:
    after = drafts(llm)
    if not after:
        return {}
    per_position = zip(after["num_accepted_tokens_per_pos"], before["num_accepted_tokens_per_pos"], strict=True)
    return {
        "drafts": after["num_drafts"] - before["num_drafts"],
        "drafted": after["num_draft_tokens"] - before["num_draft_tokens"],
        "accepted": [a - b for a, b in per_position],
    }


def texts(llm: Any, inputs: Inputs) -> dict[str, Any]:
    """Continuations of texts of mixed lengths, in one batch, past any end token."""
    before = drafts(llm)
    done = _generate(llm, inputs["texts"], max_tokens=TEXT_TOKENS, ignore_eos=True)
    return {**_answers(done), **_counted(llm, before)}


def crowd(llm: Any, inputs: Inputs) -> dict[str, Any]:
    """The same texts three times over in one batch, whose steps have as many tokens as with two drafted ones."""
    return _answers(_generate(llm, inputs["texts"] * 3, max_tokens=TEXT_TOKENS, ignore_eos=True))


def questions(llm: Any, inputs: Inputs) -> dict[str, Any]:
    """Answers that end by themselves or after 64 tokens."""
    before = drafts(llm)
    done = _generate(llm, inputs["questions"], max_tokens=QUESTION_TOKENS)
    return {**_answers(done), **_counted(llm, before)}


def stop(llm: Any, inputs: Inputs) -> dict[str, Any]:
    """Stop strings, some of which end within a draft."""
    done = _generate(llm, inputs["texts"], max_tokens=100, ignore_eos=True, stop=[" the ", "is a", ". "])
    return {**_answers(done), "ends": [[c.text, c.finish_reason, c.stop_reason] for c in done]}


def limit(llm: Any, inputs: Inputs) -> dict[str, Any]:
    """Prompts that leave 1, 2, 3, 5 and 40 tokens before the model's limit."""
    long = [token for text in inputs["texts"] for token in text]
    prompts = [long[: LENGTH - left] for left in (1, 2, 3, 5, 40)]
    done = _generate(llm, prompts, max_tokens=100, ignore_eos=True)
    return {**_answers(done), "ends": [c.finish_reason for c in done]}


def abort(llm: Any, inputs: Inputs) -> dict[str, Any]:
    """Four requests step by step; the second is aborted on its way."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    for number, prompt in enumerate(inputs["texts"][:4]):
        sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, **_wanted)
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    found: dict[str, Any] = {}
    aborted = False
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id.partition("-")[0]] = output.outputs[0]
        if not aborted and "1" in found and len(found["1"].token_ids) >= ABORT_AFTER:
            engine.abort_request(["1"])
            aborted = True
    return {**_answers([found[key] for key in ("0", "2", "3")]), "cut": list(found["1"].token_ids)}


def structured(llm: Any, inputs: Inputs) -> dict[str, Any]:
    """Answers that a grammar restricts."""
    from vllm.sampling_params import StructuredOutputsParams

    grammar = StructuredOutputsParams(regex=r"(The|A|An) [a-z]+( [a-z]+){3,12}\.")
    done = _generate(llm, inputs["questions"][:6], max_tokens=60, structured_outputs=grammar)
    return {**_answers(done), "texts": [c.text for c in done]}


def again(llm: Any, inputs: Inputs) -> dict[str, Any]:
    """A long prompt, then others that begin with it: they find it in the prefix cache."""
    from vllm import SamplingParams

    long = [token for text in inputs["texts"] for token in text][:400]
    sampling = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, **_wanted)
    done, cached = [], []
    for prompt in (long, [*long, *long[:60]], long):
        output = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        done.append(output.outputs[0])
        cached.append(output.num_cached_tokens)
    return {**_answers(done), "cached": cached}


def sampled(llm: Any, inputs: Inputs) -> dict[str, Any]:
    """Three tokens at temperature 1, many times over; the engine's seed makes them the same in every run."""
    prompts = [inputs["texts"][SAMPLED_TEXT]] * SAMPLES
    return {"samples": _tokens(_generate(llm, prompts, temperature=1.0, max_tokens=3, ignore_eos=True))}


def distribution(llm: Any, inputs: Inputs) -> dict[str, Any]:
    """Probabilities of the likeliest tokens after that text, then after it and its likeliest next token, and again."""
    prompt, found = inputs["texts"][SAMPLED_TEXT], []
    for _ in range(3):
        row = _generate(llm, [prompt], max_tokens=1, logprobs=16)[0].logprobs[0]
        found.append({token: math.exp(entry.logprob) for token, entry in row.items()})
        prompt = [*prompt, max(found[-1], key=found[-1].__getitem__)]
    return {"probabilities": found}


_PARTS = (texts, crowd, questions, stop, limit, abort, structured, again, sampled, distribution)
PARTS = {part.__name__: part for part in _PARTS}


def run(case: dict[str, Any], inputs: Inputs) -> dict[str, Any]:
    """What became of one case."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from vllm_rose_plugin.layers import report

    report._layers = {kind: type(counter)() for kind, counter in report._layers.items()}
    _wanted.clear()
    _wanted.update({"logprobs": 2} if case.get("gaps") else {})
    llm = None
    start = time.monotonic()
    try:
        llm = LLM(max_model_len=LENGTH, disable_log_stats=False, **case["engine"])
        ready = time.monotonic()
        results = {part: PARTS[part](llm, inputs) for part in case["parts"]}
        stats = llm.collective_rpc("rose_stats")[0]
        kept = {key: stats[key] for key in ("layers", "providers", "calls")}
        return {**results, **kept, "seconds": [ready - start, time.monotonic() - ready]}
    except Exception as error:
        messages, cause = [], error
        while cause is not None:
            messages.append(f"{type(cause).__name__}: {cause}")
            cause = cause.__cause__ or cause.__context__
        return {"error": "\n".join(messages)}
    finally:
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


if __name__ == "__main__":
    plan = json.loads(Path(sys.argv[1]).read_text())
    for one in plan["cases"]:
        result = {"name": one["name"], **run(one, plan["inputs"])}
        print("\n" + MARK + json.dumps(result), flush=True)  # vLLM's progress bars leave lines open
