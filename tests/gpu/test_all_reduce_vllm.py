"""Our all-reduce in the real vLLM CUDA build, TP=2 under torch.compile and CUDA graphs; run with ``-m multi_gpu``.

Peer-to-peer only, with every use of multicast that is known switched off: a host's GPUs may be shared.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.multi_gpu

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tiny_moe"
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from vllm_server import gpu_environment, run_program  # noqa: E402

MODEL = EXAMPLE / "target"
"""Trained, in BF16: a random model's logits are nearly flat."""
PROMPTS = [line for line in (EXAMPLE / "prompts.txt").read_text().splitlines() if line]
TOKENS = 48
CAPTURED = [1, 2, 4, 8, 16, 24]
"""All that the batches below replay; vLLM captures 51 sizes otherwise."""
MEAN_KL = 1e-3
"""Nats; what the accuracy test allows a BF16 model from a plain forward pass."""

PROGRAM = """
import json, sys
import torch
from vllm import LLM, SamplingParams

def main():
    keywords, prompts, tokens, sleep = json.loads(sys.argv[1])
    llm = LLM(
        max_model_len=512, gpu_memory_utilization=0.2, kv_cache_memory_bytes=1 << 30, tensor_parallel_size=2,
        seed=0, enable_sleep_mode=sleep, max_logprobs=-1, **keywords
    )
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=-1)
    texts, gaps, distributions = [], [], []
    def generate():
        for size in (len(prompts), 1, 3):  # batches of several sizes, so that several graphs are replayed
            for output in llm.generate(prompts[:size], sampling, use_tqdm=False):
                completion = output.outputs[0]
                texts.append(list(completion.token_ids))
                steps = [{token: entry.logprob for token, entry in step.items()} for step in completion.logprobs]
                vocabulary = sorted(steps[0])
                distributions.append(torch.tensor([[step[token] for token in vocabulary] for step in steps]))
                first = [sorted(step.values(), reverse=True)[:2] for step in steps]
                gaps.append([step[0] - step[1] for step in first])
    generate()
    if sleep:
        llm.sleep(1)
        llm.wake_up()
        generate()
    stats = llm.collective_rpc("rose_stats")
    torch.save(distributions, sys.argv[2])
    print("\\nRESULT " + json.dumps({"tokens": texts, "gaps": gaps, "stats": stats}))

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def run(cache: Path, *, ours: bool, sleep: bool = False, norm: str = "off", **keywords):
    """Tokens, gaps between the two likeliest, log probabilities and statistics of the workers; and all output."""
    if ours:
        rose = {"all_reduce": "p2p", "all_reduce_timeout": 20, "all_reduce_norm": norm}
        keywords["additional_config"] = {"rose": rose}
    else:
        keywords["disable_custom_all_reduce"] = True  # NCCL
        keywords["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    if not keywords.get("enforce_eager"):
        keywords["cudagraph_capture_sizes"] = CAPTURED
    env = {
        "ROSE_CACHE_DIR": str(cache / "rose"),
        **gpu_environment(cache / "vllm"),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    argument, saved = json.dumps([{"model": str(MODEL), **keywords}, PROMPTS, TOKENS, sleep]), cache / "logprobs.pt"
    found, output = run_program(PROGRAM, argument, str(saved), environment=env, folder=cache)
    return {**found, "logprobs": torch.load(saved)}, output


def partings(one, other):
    """Where sequences part: the gap between the two likeliest tokens there."""
    gaps = []
    for mine, theirs, steps in zip(one["tokens"], other["tokens"], one["gaps"], strict=True):
        step = next((i for i, pair in enumerate(zip(mine, theirs, strict=True)) if len(set(pair)) > 1), None)
        gaps += [] if step is None else [steps[step]]
    return gaps


def divergences(expected, found):
    """KL(expected || found) of every step up to where sequences part, nats, over the whole vocabulary."""
    values = []
    for mine, theirs, p, q in zip(
        found["tokens"], expected["tokens"], expected["logprobs"], found["logprobs"], strict=True
    ):
        same = next((i for i, pair in enumerate(zip(mine, theirs, strict=True)) if len(set(pair)) > 1), len(mine) - 1)
        p, q = p[: same + 1].double(), q[: same + 1].double()
        values.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(values)


def check_same(expected, found, what):
    """Tokens alike but for near ties, and distributions within what the order of sums allows."""
    kl = divergences(expected, found)
    print(f"\n{what}: KL from NCCL's, {len(kl)} steps: mean {kl.mean():.2e}, most {kl.max():.2e}")
    assert len(kl) > TOKENS and kl.mean() < MEAN_KL and kl.min() > -1e-6
    assert all(gap < 0.25 for gap in partings(found, expected))


def check_ours(result, output):
    for rank, worker in enumerate(result["stats"]):
        assert worker["rank"] == rank and list(worker["all_reduce"]) == ["tp:0"]
        assert worker["all_reduce"]["tp:0"].startswith("p2p, since it is asked for")
        assert worker["calls"]["all_reduce"]["rose_p2p"] > 0
    assert "All-reduce of group tp:0: p2p" in output


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_tokens_are_nccls_up_to_ties(cache, eager):
    """A sum of two ranks has one order; what differs is where NCCL rounds."""
    ours, output = run(cache, ours=True, enforce_eager=eager)
    check_ours(ours, output)
    nccl, _ = run(cache, ours=False, enforce_eager=eager)
    assert all("all_reduce" not in worker["calls"] and worker["all_reduce"] == {} for worker in nccl["stats"])
    check_same(nccl, ours, "eager" if eager else "graphs")


def test_residual_and_norm_in_the_launch_give_nccls_tokens_up_to_ties(cache):
    """Whether it is one launch at a number of tokens is a matter of times; that the graphs have the op is not."""
    ours, output = run(cache, ours=True, norm="auto")
    check_ours(ours, output)
    for worker in ours["stats"]:
        calls = worker["calls"]["all_reduce_norm"]
        print(f"rank {worker['rank']}: {calls}, {worker['all_reduce']['tp:0']}")
        assert sum(calls.values()) > 0 and {*calls} <= {"rose_p2p", "unfused"}
        fused = "in one launch with residual and norm" in worker["all_reduce"]["tp:0"]
        assert fused == (calls.get("rose_p2p", 0) > 0) or "unfused" in calls
    nccl, _ = run(cache, ours=False)
    check_same(nccl, ours, "with norms")


def test_sleeping_gives_the_buffer_back_and_graphs_go_on(cache):
    result, output = run(cache, ours=True, sleep=True, enable_nccl_comm_suspend=True)
    check_ours(result, output)
    half = len(result["tokens"]) // 2
    assert result["tokens"][:half] == result["tokens"][half:]


PEER = """
import json, os, signal, sys, time
from vllm import LLM, SamplingParams

def main():
    keywords, prompt = json.loads(sys.argv[1])
    llm = LLM(max_model_len=512, gpu_memory_utilization=0.2, kv_cache_memory_bytes=1 << 30,
              tensor_parallel_size=2, **keywords)
    pids = [stats["pid"] for stats in llm.collective_rpc("rose_stats")]
    llm.generate([prompt], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
    os.kill(pids[1], signal.SIGSTOP)
    start = time.monotonic()
    try:
        llm.generate([prompt], SamplingParams(max_tokens=400, temperature=0, ignore_eos=True), use_tqdm=False)
    except BaseException as error:
        print("\\nRESULT " + json.dumps([type(error).__name__, time.monotonic() - start]), flush=True)
    os._exit(0)  # what is left of the engine is of no interest; the test ends it

if __name__ == "__main__":
    main()
"""


def test_a_rank_that_stops_is_an_error_in_the_other(cache):
    env = {"ROSE_CACHE_DIR": str(cache / "rose"), **gpu_environment(cache / "vllm")}
    rose = {"all_reduce": "p2p", "all_reduce_timeout": 5}
    argument = json.dumps([{"model": str(MODEL), "additional_config": {"rose": rose}}, PROMPTS[0]])
    (_, seconds), output = run_program(PEER, argument, environment=env, folder=cache)
    assert "rank 0 waited 5 s for rank 1" in output and seconds < 60
