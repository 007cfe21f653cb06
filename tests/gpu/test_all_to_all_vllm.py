"""Our all-to-all in the real vLLM CUDA build, two data-parallel ranks with expert parallelism: ``-m multi_gpu``.

Every use of multicast that is known is switched off: a host's GPUs may be shared.
"""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.multi_gpu

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tiny_moe"
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from vllm_server import ENGINE_SECONDS, first_errors, gpu_environment, kill_session, start_session  # noqa: E402

PROMPTS = [line for line in (EXAMPLE / "prompts.txt").read_text().splitlines() if line][:12]
TOKENS = 48
CAPTURED = [1, 2, 4, 8, 16]
"""All that these batches replay; vLLM captures 51 sizes otherwise."""
GRACE_SECONDS = 20.0
"""What a rank gets to end when the other has failed."""

PROGRAM = """
import json, os, sys, time
from pathlib import Path
from vllm import LLM, SamplingParams

def main():
    keywords, batches, tokens, directory = json.loads(sys.argv[1])
    rank, size = int(os.environ.get("VLLM_DP_RANK", 0)), int(os.environ.get("VLLM_DP_SIZE", 1))
    llm = LLM(max_model_len=512, gpu_memory_utilization=0.2, kv_cache_memory_bytes=1 << 30, seed=0, **keywords)
    found = []
    for prompts in batches:
        texts, gaps = [], []
        # Offline, a rank without a request does not run beside the others, which wait for it: it gets one of a token.
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts or ["?"]]
        sampling = SamplingParams(max_tokens=tokens if prompts else 1, temperature=0, ignore_eos=True, logprobs=2)
        for output in llm.chat(chats, sampling, use_tqdm=False)[:len(prompts)]:
            completion = output.outputs[0]
            texts.append(list(completion.token_ids))
            steps = [sorted((e.logprob for e in step.values()), reverse=True) for step in completion.logprobs]
            gaps.append([step[0] - step[1] for step in steps])
        found.append({"tokens": texts, "gaps": gaps})
    result = {"batches": found, "stats": llm.collective_rpc("rose_stats")}
    Path(directory, f"{rank}.json").write_text(json.dumps(result))
    deadline = time.monotonic() + 120  # the other rank may still need this one's experts
    while not all(Path(directory, f"{r}.json").exists() for r in range(size)) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(2)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    destination = tmp_path_factory.mktemp("converted") / "tiny"
    command = [sys.executable, "-m", "vllm_rose_plugin.cli", "quantize", str(EXAMPLE / "target"), str(destination)]
    subprocess.run(command, cwd=ROOT, check=True)
    return destination


def run(model: Path, cache: Path, directory: Path, batches: list[list[list[str]]], **keywords):
    """What each rank answered to its batches of prompts, and all output."""
    keywords |= {"model": str(model), "moe_backend": "rose_cutedsl", "linear_backend": "rose_cutedsl"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    logs, processes = [directory / f"{rank}.log" for rank in range(len(batches))], []
    for rank, mine in enumerate(batches):
        env = {
            "ROSE_CACHE_DIR": str(cache / "rose"),
            **gpu_environment(cache / f"vllm{rank}"),
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        }
        if len(batches) > 1:
            env |= {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank), "VLLM_DP_SIZE": str(len(batches))}
            env |= {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port)}
        argument = json.dumps([keywords, mine, TOKENS, str(directory)])
        processes.append(start_session([sys.executable, "-c", PROGRAM, argument], env, logs[rank]))
    until = time.monotonic() + ENGINE_SECONDS
    try:
        while None in (codes := [process.poll() for process in processes]) and time.monotonic() < until:
            if any(codes):  # the other rank would wait for it
                until = min(until, time.monotonic() + GRACE_SECONDS)
            time.sleep(0.2)
    finally:
        for process in processes:
            kill_session(process.pid)
            process.wait()
    outputs = [log.read_text(errors="replace") for log in logs]
    said = "\n".join(f"rank {rank}:\n{first_errors(output)}" for rank, output in enumerate(outputs))
    assert codes == [0] * len(batches), f"exit codes {codes}, None: was stopped\n{said}"
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(len(batches))], "".join(outputs)


@pytest.fixture(scope="module")
def alone(trained, cache, tmp_path_factory):
    """All prompts on one rank that has all experts, one batch."""
    ((result,), _) = run(trained, cache, tmp_path_factory.mktemp("alone"), [[PROMPTS]], enforce_eager=True)
    return result["batches"][0]


def partings(answers, alone, numbers):
    """Where sequences part from those of one rank: the gap between the two likeliest tokens there."""
    gaps = []
    for mine, number in zip(answers["tokens"], numbers, strict=True):
        pairs = zip(mine, alone["tokens"][number], strict=True)
        step = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        gaps += [] if step is None else [alone["gaps"][number][step]]
    return gaps


@pytest.mark.parametrize(
    "how",
    [
        {"enforce_eager": True},
        {},
        {"enable_eplb": True, "eplb_config": {"window_size": 8, "step_interval": 16, "num_redundant_experts": 0}},
        {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 16},
        {"additional_config": {"rose": {"activation": "bf16"}}},
    ],
    ids=["eager", "graphs", "graphs_eplb", "graphs_dbo", "w8a16"],
)
def test_two_ranks_answer_as_one_does(trained, cache, alone, tmp_path, how):
    """Ranks with batches of different sizes, and one with a single token while the other has many."""
    numbers = [[list(range(8)), [8], []], [[9], [], [10, 11]]]
    batches = [[[PROMPTS[number] for number in batch] for batch in rank] for rank in numbers]
    if not how.get("enforce_eager"):
        how = {"cudagraph_capture_sizes": CAPTURED, **how}
    results, output = run(
        trained, cache, tmp_path, batches, enable_expert_parallel=True, all2all_backend="rose_nvlink", **how
    )
    assert "All-to-all rose_nvlink over NVLink" in output and "MiB on each of 2 ranks" in output
    apart = []
    for result, mine in zip(results, numbers, strict=True):
        (worker,) = result["stats"]
        assert worker["layers"]["experts"] == {"RoseCuteDslExperts": 3}
        for op in ("dp_dispatch", "dp_combine", "moe_experts"):
            assert list(worker["calls"][op]) == ["rose"], worker["calls"]
        for answers, batch in zip(result["batches"], mine, strict=True):
            apart += partings(answers, alone, batch)
    print(f"{len(apart)} of {len(PROMPTS)} answers part, where log probabilities are apart by {apart}")
    assert all(gap < 0.5 for gap in apart) and len(apart) <= 4
