"""Loads models one after the other in vLLM engines inside this process; prints one JSON line for each.

    python offline_engine.py CASES.json

CASES.json: ``[{"engine": {arguments of vllm.LLM}, "prompts": [[token ids]], "max_tokens": n}]``. A line holds either
``tokens`` and the ``layers`` that serve, by class, or ``error``, the texts of the exception and of its causes.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

MARK = "RESULT "


def run(case: dict[str, Any]) -> dict[str, Any]:
    """What became of one case."""
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from vllm_rose_plugin.layers import report

    report._layers = {kind: type(counter)() for kind, counter in report._layers.items()}
    llm = None
    try:
        llm = LLM(**case["engine"])
        prompts = [{"prompt_token_ids": tokens} for tokens in case["prompts"]]
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=case["max_tokens"]), use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return {"tokens": tokens, "layers": report.snapshot(rank=0)["layers"]}
    except Exception as error:
        texts, cause = [], error
        while cause is not None:
            texts.append(f"{type(cause).__name__}: {cause}")
            cause = cause.__cause__ or cause.__context__
        return {"error": "\n".join(texts)}
    finally:
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


if __name__ == "__main__":
    for case in json.loads(Path(sys.argv[1]).read_text()):
        print(MARK + json.dumps(run(case)), flush=True)
