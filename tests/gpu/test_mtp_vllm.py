"""MTP drafting in the real vLLM CUDA build on one GPU, eager and with torch.compile and CUDA graphs; ``-m gpu``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tiny_moe"
PROMPTS = [line for line in (EXAMPLE / "prompts.txt").read_text().splitlines() if line]
TOKENS = 64
CAPTURED = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 120]
"""Enough for all prompts with four drafted tokens each; vLLM captures 51 sizes otherwise."""
ROSE = {"moe_backend": "rose_cutedsl", "linear_backend": "rose_cutedsl"}
ANSWERS_ACCEPTED, MARGIN = 0.987, 0.02
"""The example's README, for the answers to these prompts."""

PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    keywords, prompts, tokens = json.loads(sys.argv[1])
    llm = LLM(max_model_len=512, gpu_memory_utilization=0.1, kv_cache_memory_bytes=1 << 30, disable_log_stats=False,
              **keywords)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    outputs = llm.chat(chats, SamplingParams(max_tokens=tokens, temperature=0), use_tqdm=False)
    found = {m.name.partition("spec_decode_")[2]: getattr(m, "values", None) or m.value
             for m in llm.get_metrics() if "spec_decode" in m.name}
    result = {"tokens": [list(output.outputs[0].token_ids) for output in outputs], "drafting": found,
              "stats": llm.collective_rpc("rose_stats")[0]}
    print("RESULT " + json.dumps(result))

if __name__ == "__main__":
    main()
"""


def run(model: Path, cache: Path, **keywords) -> dict:
    """Greedy answers, vLLM's counters of drafting, the worker's statistics."""
    if not keywords.get("enforce_eager"):
        keywords["cudagraph_capture_sizes"] = CAPTURED
    env = {
        **{key: value for key, value in os.environ.items() if not key.startswith("ROSE_")},
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "ROSE_CACHE_DIR": os.environ.get("ROSE_CACHE_DIR", str(cache / "rose")),
    }
    argument = json.dumps([{"model": str(model), **keywords}, PROMPTS, TOKENS])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, argument], env=env, capture_output=True, text=True, timeout=500, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, (done.stdout + done.stderr)[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def rose(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "vllm_rose_plugin.cli", *arguments], cwd=ROOT, check=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("mtp")
    found = {"bf16": EXAMPLE / "target", "mxfp8": root / "mxfp8", "mtp": EXAMPLE / "mtp", "mtp_mxfp8": root / "draft"}
    rose("quantize", str(found["bf16"]), str(found["mxfp8"]))
    rose("quantize", str(found["mtp"]), str(found["mtp_mxfp8"]))
    rose("mtp", "attach", str(found["mxfp8"]), str(found["mtp"]), str(root / "attached"))
    return found | {"attached": root / "attached"}


@pytest.fixture(scope="module")
def plain(cache, models):
    """Without drafting, by target and mode."""
    found = {}

    def get(target: str, eager: bool) -> dict:
        if (target, eager) not in found:
            flags = ROSE if target == "mxfp8" else {}
            found[target, eager] = run(models[target], cache, enforce_eager=eager, **flags)
        return found[target, eager]

    return get


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled_with_cuda_graphs"])
@pytest.mark.parametrize(
    ("served", "target", "draft", "k"),
    [
        ("bf16", "bf16", "mtp", 1),
        ("attached", "mxfp8", None, 2),
        ("bf16", "bf16", "mtp_mxfp8", 3),
        ("mxfp8", "mxfp8", "mtp_mxfp8", 4),
    ],
)
def test_answers_are_those_without_drafting(cache, models, plain, served, target, draft, k, eager):
    """The answers' tokens lead by a margin, so that another batch shape can't change them."""
    speculative = {"method": "mtp", "num_speculative_tokens": k} | ({"model": str(models[draft])} if draft else {})
    flags = ROSE if target == "mxfp8" else {}
    result = run(models[served], cache, enforce_eager=eager, speculative_config=speculative, **flags)
    assert result["tokens"] == plain(target, eager)["tokens"]
    counted = result["drafting"]
    accepted = counted["num_accepted_tokens_per_pos"][0] / counted["num_drafts"]
    print(f"{served} with {draft or 'its own draft'}, k {k}, eager {eager}: {accepted:.1%} of first drafts accepted")
    assert abs(accepted - ANSWERS_ACCEPTED) < MARGIN
    experts = (3 if target == "mxfp8" else 0) + (draft == "mtp_mxfp8")
    assert result["stats"]["layers"]["experts"] == ({"RoseCuteDslExperts": experts} if experts else {})
