"""`vllm serve` of the CUDA build, two data-parallel engines with expert parallelism, asked over HTTP; ``-m multi_gpu``.

Our all-to-all beside vLLM's default one: the same checkpoint, the same load of mixed requests, the same excerpts before
and after it. Every use of multicast that is known is switched off: a host's GPUs may be shared.
"""

import math
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tiny_moe"
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from vllm_server import ROSE_FLAGS, Server, gpu_environment  # noqa: E402

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(1800)]
PARALLEL = ("--data-parallel-size", "2", "--enable-expert-parallel")
SMALL = ("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(1 << 30), "--max-model-len", "512")
CAPTURED = (
    "--max-logprobs",
    "-1",
    "--max-num-seqs",
    "64",
    "--cudagraph-capture-sizes",
    "1",
    "2",
    "4",
    "8",
    "16",
    "32",
    "64",
)
SERVERS = {
    "default": ("--all2all-backend", "allgather_reducescatter"),
    "rose": ("--all2all-backend", "rose_nvlink", *ROSE_FLAGS),
}
REQUESTS = int(os.environ.get("ROSE_TEST_REQUESTS", "600"))
"""Of the mixed load."""
EXCERPTS, EXCERPT_TOKENS, ANSWER_TOKENS, KL_LIMIT = 8, 64, 48, 2e-2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    destination = tmp_path_factory.mktemp("converted") / "tiny"
    command = [sys.executable, "-m", "vllm_rose_plugin.cli", "quantize", str(EXAMPLE / "target"), str(destination)]
    subprocess.run(command, cwd=ROOT, check=True)
    return destination


def excerpts() -> list[list[int]]:
    """Token ids of the validation text, from places that are far apart."""
    text = (EXAMPLE / "validation.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(EXAMPLE / "target")(text, add_special_tokens=False, verbose=False)["input_ids"]
    apart = (len(ids) - EXCERPT_TOKENS) // EXCERPTS
    return [ids[apart * i : apart * i + EXCERPT_TOKENS] for i in range(EXCERPTS)]


def logprobs_of(server: Server, ids: list[int]) -> torch.Tensor:
    """float64 ``[len(ids) - 1, vocabulary]``; row i predicts token i + 1."""
    answer = server.post("/v1/completions", prompt=ids, max_tokens=1, prompt_logprobs=-1)
    first, *rows = answer["choices"][0]["prompt_logprobs"]
    assert first is None and len(rows) == len(ids) - 1
    out = torch.full((len(rows), len(rows[0])), math.nan, dtype=torch.float64)
    for row, entries in zip(out, rows, strict=True):
        row[[int(token) for token in entries]] = torch.tensor([e["logprob"] for e in entries.values()]).double()
    assert not out.isnan().any(), "the server left tokens out"
    return out


def mixed_load(server: Server) -> int:
    """Tokens that came of REQUESTS requests: bursts and lulls, short and long ones, of both kinds of sampling."""
    draw, ids = random.Random(7), [token for excerpt in excerpts() for token in excerpt]

    def ask(request: tuple[int, int, int, float]) -> int:
        start, length, count, temperature = request
        answer = server.post(
            "/v1/completions", prompt=ids[start : start + length], max_tokens=count, temperature=temperature,
            ignore_eos=True,
        )  # fmt: skip
        return answer["usage"]["completion_tokens"]

    total = asked = 0
    while asked < REQUESTS:
        burst = min(draw.choice((1, 1, 2, 7, 30, 100)), REQUESTS - asked)
        starts = [draw.randrange(len(ids) - 300) for _ in range(burst)]
        requests = [
            (start, draw.choice((1, 5, 60, 300)), draw.choice((1, 8, 100, 200)), draw.choice((0, 1)))
            for start in starts
        ]
        with ThreadPoolExecutor(burst) as pool:
            total += sum(pool.map(ask, requests))
        asked += burst
    return total


def serve(model: Path, folder: Path, name: str) -> dict:
    """What one server gave: distributions before and after the load, greedy answers, steps."""
    server = Server(
        model=model,
        arguments=(*PARALLEL, *SMALL, *CAPTURED, *SERVERS[name]),
        environment=gpu_environment(folder / "cache"),
        log=folder / f"{name}.log",
    )
    try:
        print(f"{name}: ready after {server.wait_ready():.0f} s")
        before = torch.cat([logprobs_of(server, ids) for ids in excerpts()])
        tokens = mixed_load(server)
        after = torch.cat([logprobs_of(server, ids) for ids in excerpts()])
        questions = (EXAMPLE / "prompts.txt").read_text(encoding="utf-8").split("\n")[:20]
        chats = [[{"role": "user", "content": question}] for question in questions]
        answers = [
            server.post("/v1/chat/completions", messages=chat, max_tokens=ANSWER_TOKENS)["choices"][0]["message"]
            for chat in chats
        ]
        steps = [server.metric("vllm:iteration_tokens_total_count", f'engine="{engine}"') for engine in (0, 1)]
        texts = [answer["content"] for answer in answers]
        return {"before": before, "after": after, "tokens": tokens, "steps": steps, "answers": texts}
    finally:
        server.stop()


def divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Mean KL(expected || found), nats."""
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def test_tokens_agree_with_the_default_backend_through_a_mixed_load(model, tmp_path):
    default, rose = (serve(model, tmp_path, name) for name in SERVERS)
    same = sum(a == b for a, b in zip(default["answers"], rose["answers"], strict=True))
    found = {
        "the default all-to-all": divergence(default["before"], rose["before"]),
        "the same after the load": divergence(default["after"], rose["after"]),
        "its own before the load": divergence(rose["before"], rose["after"]),
    }
    print(
        f"{rose['tokens']} tokens in {rose['steps']} steps of the engines (default: {default['steps']}); mean KL from "
        + ", ".join(f"{what} {kl:.2e}" for what, kl in found.items())
        + f"; {same} of {len(rose['answers'])} greedy answers are the default's"
    )
    assert default["tokens"] == rose["tokens"] and min(rose["steps"]) > 100
    assert all(-1e-6 < kl < KL_LIMIT for kl in found.values())
    assert same >= 17
