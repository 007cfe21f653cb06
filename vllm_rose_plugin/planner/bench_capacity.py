"""A capacity file out of results of ``vllm bench serve``.

Two kinds of runs are understood, with constant lengths (``--dataset-name random --random-range-ratio 0``) and
``--ignore-eos``:

* prefill: ``--random-output-len 1 --max-concurrency 1`` against a prefill replica, one run per prompt length. The
  median TTFT is the time of a prompt alone.
* decode: ``--max-concurrency B`` against a decoder that does nothing else, one run per batch and length. The median
  TPOT is the time of a step, the context is the prompt and half of the output.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_rose_plugin.planner.plan import PlanError


def capacity_from_bench(paths: Sequence[Path], *, description: str) -> dict[str, Any]:
    """The data of a capacity file; what a benchmark can't know is None, which the loader refuses by name.

    Raises:
        PlanError: a file that isn't such a result, or with failed requests; no run of one of the two kinds.
    """
    prefill, decode = [], []
    for path in paths:
        result = _read(path)
        prompts, answers = result["total_input_tokens"], result["total_output_tokens"]
        prompt, answer = prompts / result["completed"], answers / result["completed"]
        if round(answer) == 1:
            if result["max_concurrency"] != 1:
                raise PlanError(
                    f"{path}: max_concurrency = {result['max_concurrency']!r}; a prefill run (one output token) needs "
                    "--max-concurrency 1, so that each prompt is alone"
                )
            seconds = result["median_ttft_ms"] / 1e3
            prefill.append({"prompt_tokens": round(prompt), "tokens_per_second": float(f"{prompt / seconds:.6g}")})
        else:
            context = round(prompt + answer / 2)
            step = float(f"{result['median_tpot_ms']:.6g}")
            decode.append({"batch": result["max_concurrency"], "context": context, "step_ms": step})
    for kind, points in (("prefill (one output token)", prefill), ("decode (more output tokens)", decode)):
        if not points:
            raise PlanError(f"--capacity-from: none of {len(paths)} files is a {kind} run; give at least one")
    return {
        "capacity": 1,
        "source": "measured",
        "description": description,
        "prefill": {"gpus": None, "points": sorted(prefill, key=lambda point: point["prompt_tokens"])},
        "decode": {
            "gpus": None,
            "kv_cache_tokens": None,
            "points": sorted(decode, key=lambda point: (point["batch"], point["context"])),
        },
        "kv_transfer": {"seconds": None, "bytes_per_token": None, "gb_per_s": None},
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"--capacity-from {path}: can't be read as JSON: {error}") from None
    keys = ("total_input_tokens", "total_output_tokens", "completed", "median_ttft_ms", "median_tpot_ms")
    missing = [key for key in keys if not isinstance(result, dict) or not isinstance(result.get(key), int | float)]
    if missing:
        raise PlanError(f"--capacity-from {path}: is no result of `vllm bench serve`: has no number {missing[0]}")
    if result.get("failed") or not result["completed"]:
        raise PlanError(
            f"--capacity-from {path}: {result.get('failed')} requests failed, {result['completed']} completed; run it "
            "again until none fails"
        )
    for key in keys:
        low = 0 if key == "median_tpot_ms" else 1e-9  # that of a single token is 0
        if not low <= result[key] < 1e15:
            raise PlanError(f"--capacity-from {path}: {key} = {result[key]!r}; give a run with a number above 0")
    if type(result.get("max_concurrency")) is not int or result["max_concurrency"] < 1:
        raise PlanError(
            f"--capacity-from {path}: max_concurrency = {result.get('max_concurrency')!r}; run with --max-concurrency, "
            "which is the batch"
        )
    return result
