"""The MoE backend in the real vLLM CUDA build, eager and with torch.compile and CUDA graphs; run with ``-m gpu``."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tiny_moe"
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from vllm_server import gpu_environment, run_program  # noqa: E402

PROMPTS = [line for line in (EXAMPLE / "prompts.txt").read_text().splitlines() if line]
TOKENS = 48
CAPTURED = [1, 2, 4, 8, 16, 24]
"""All that the batches below replay; vLLM captures 51 sizes otherwise."""

PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    keywords, prompts, tokens, chat = json.loads(sys.argv[1])
    llm = LLM(max_model_len=512, gpu_memory_utilization=0.1, kv_cache_memory_bytes=1 << 30, **keywords)
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=not chat, logprobs=2)
    texts, gaps = [], []
    for size in (len(prompts), 1, 3):  # batches of several sizes, so that several graphs are replayed
        some = prompts[:size]
        if chat:
            chats = [[{"role": "user", "content": prompt}] for prompt in some]
            outputs = llm.chat(chats, sampling, use_tqdm=False)
        else:
            outputs = llm.generate(some, sampling, use_tqdm=False)
        for output in outputs:
            completion = output.outputs[0]
            texts.append(list(completion.token_ids))
            steps = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in completion.logprobs]
            gaps.append([step[0] - step[1] for step in steps])
    stats = llm.collective_rpc("rose_stats") if "moe_backend" in keywords else None
    print("\\nRESULT " + json.dumps({"tokens": texts, "gaps": gaps, "stats": stats}))

if __name__ == "__main__":
    main()
"""


def run(model: Path, cache: Path, *, chat: bool, ours: bool = True, reference: bool = False, **keywords):
    """(tokens, gaps between the two likeliest, statistics of the workers), and all output."""
    if ours:
        keywords |= {"moe_backend": "rose_cutedsl", "linear_backend": "rose_cutedsl"}
    if not keywords.get("enforce_eager"):
        keywords["cudagraph_capture_sizes"] = CAPTURED
    env = {
        "ROSE_CACHE_DIR": str(cache / "rose"),
        **gpu_environment(cache / "vllm"),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the first step has all prompts then, in every run
    }
    if reference:
        env["ROSE_PROVIDER_MOE_EXPERTS"] = "reference"
    argument = json.dumps([{"model": str(model), **keywords}, PROMPTS, TOKENS, chat])
    return run_program(PROGRAM, argument, environment=env, folder=cache)


def at_once(*runs):
    """Results of engines that start beside each other: most of a start is spent on one core."""
    with ThreadPoolExecutor(len(runs)) as pool:
        return [result for result, _ in pool.map(lambda each: each(), runs)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    destination = tmp_path_factory.mktemp("converted") / "tiny"
    command = [sys.executable, "-m", "vllm_rose_plugin.cli", "quantize", str(EXAMPLE / "target"), str(destination)]
    subprocess.run(command, cwd=ROOT, check=True)
    return destination


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    """A random Qwen3-MoE in MXFP8."""
    directory = tmp_path_factory.mktemp("random")
    cli = [sys.executable, "-m", "vllm_rose_plugin.cli"]
    subprocess.run([*cli, "tiny-model", str(directory / "bf16"), "--layers", "3"], cwd=ROOT, check=True)
    subprocess.run([*cli, "quantize", str(directory / "bf16"), str(directory / "mxfp8")], cwd=ROOT, check=True)
    return directory / "mxfp8"


def check_ours(result: dict, *, ranks: int = 1) -> None:
    """Every MoE layer ran our kernels, and nothing else."""
    assert len(result["stats"]) == ranks
    for worker in result["stats"]:
        assert worker["providers"]["moe_experts"] == "rose"
        assert worker["layers"]["experts"] == {"RoseCuteDslExperts": 3}
        calls = worker["calls"]["moe_experts"]
        assert calls.get("rose", 0) >= 3 and "reference" not in calls, calls
        assert "grouped_gemm" not in worker["calls"]


def partings(a: dict, b: dict) -> list[float]:
    """Where two runs part, how far the likeliest tokens were apart."""
    found = []
    for ours, theirs, gaps in zip(a["tokens"], b["tokens"], a["gaps"], strict=True):
        first = next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), None)
        if first is not None:
            found.append(gaps[first])
    print(f"{len(found)} of {len(a['tokens'])} answers part, where log probabilities are apart by {found}")
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled_with_cuda_graphs"])
def test_the_trained_example_answers_as_with_the_reference(cache, trained, eager):
    ours, reference = at_once(
        partial(run, trained, cache, chat=True, enforce_eager=eager),
        partial(run, trained, cache, chat=True, reference=True, enforce_eager=True),
    )
    check_ours(ours)
    (worker,) = reference["stats"]
    assert worker["providers"]["moe_experts"] == "reference" and "rose" not in worker["calls"]["moe_experts"]
    apart = partings(ours, reference)
    assert len(apart) <= 0.2 * len(ours["tokens"]) and all(gap < 0.5 for gap in apart)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
def test_graphs_give_what_eager_gives_up_to_ties(cache, trained, activation):
    """Compiled layers round bf16 in other places than eager ones; vLLM takes MXFP8 checkpoints in bf16 only.

    Of the trained example: a random model's router and head have near ties everywhere, and its answers part at once.
    """
    how = {"additional_config": {"rose": {"activation": activation}}}
    graphs, eager = at_once(
        partial(run, trained, cache, chat=True, **how),
        partial(run, trained, cache, chat=True, enforce_eager=True, **how),
    )
    check_ours(graphs)
    check_ours(eager)
    apart = partings(graphs, eager)
    assert len(apart) <= 0.2 * len(graphs["tokens"]) and all(gap < 0.5 for gap in apart)


@pytest.mark.gpu
def test_forced_locality_domains_answer_as_whole_weights(cache, trained):
    """Experts in parts have the bits of whole ones; linear layers add up in another order where whole ones share K."""
    forced = {"locality_force_domains": 2}
    whole, experts, everything = at_once(
        partial(run, trained, cache, chat=True),
        partial(run, trained, cache, chat=True, additional_config={"rose": {"locality": "default"} | forced}),
        partial(
            run,
            trained,
            cache,
            chat=True,
            additional_config={"rose": {"locality": "single_launch", "locality_linear": True} | forced},
        ),
    )
    for result, calls in ((experts, {"moe_experts_split"}), (everything, {"moe_experts_split", "mxfp8_linear_split"})):
        (worker,) = result["stats"]
        assert {name for name in worker["calls"] if name.endswith("_split")} == calls
        assert set(worker["calls"]["moe_experts_split"]) == {"rose"} and "moe_experts" not in worker["calls"]
    assert experts["tokens"] == whole["tokens"]
    (worker,) = everything["stats"]
    assert set(worker["calls"]["mxfp8_linear_split"]) == {"rose"} and "mxfp8_linear" not in worker["calls"]
    apart = partings(everything, whole)
    assert len(apart) <= 0.2 * len(whole["tokens"]) and all(gap < 0.5 for gap in apart)


@pytest.mark.gpu
def test_a_second_start_compiles_nothing(cache, random_model):
    first, _ = run(random_model, cache, chat=False)
    again, output = run(random_model, cache, chat=False)
    assert again["tokens"] == first["tokens"]
    assert "rose_cutedsl: 0 kernels compiled" in output


@pytest.mark.gpu
def test_a_pinned_reference_is_refused_under_cuda_graphs(cache, trained):
    with pytest.raises(AssertionError, match="moe_experts: no provider serves"):
        run(trained, cache, chat=True, reference=True)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("expert_parallel", [True, False])
def test_two_ranks_answer_as_one(cache, trained, expert_parallel):
    one, two = at_once(
        partial(run, trained, cache, chat=True),
        partial(run, trained, cache, chat=True, tensor_parallel_size=2, enable_expert_parallel=expert_parallel),
    )
    check_ours(two, ranks=2)
    apart = partings(two, one)
    assert len(apart) <= 0.2 * len(one["tokens"]) and all(gap < 0.5 for gap in apart)
