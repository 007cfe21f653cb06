"""`vllm serve` of the CUDA build with both backends, torch.compile and CUDA graphs, asked over HTTP; ``-m gpu``."""

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
from torch_forward import TorchModel  # noqa: E402
from vllm_server import ROSE_FLAGS, Server, gpu_environment  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
ANSWER_TOKENS = 48
SAME_ANSWERS = 18
SMALL = ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 30), "--max-model-len", "512")
CAPTURED = ("--cudagraph-capture-sizes", "1", "2", "4", "8", "16", "24")
"""All that these requests replay; vLLM captures 51 sizes otherwise."""


def test_answers_over_http_are_those_of_the_bf16_model(tmp_path):
    """One request at a time, then all at once: decode steps of one and of many tokens, each a graph of its own."""
    model, questions = tmp_path / "mxfp8", (EXAMPLE / "prompts.txt").read_text(encoding="utf-8").split("\n")[:20]
    command = [sys.executable, "-m", "vllm_rose_plugin.cli", "quantize", str(EXAMPLE / "target"), str(model)]
    subprocess.run(command, cwd=ROOT, check=True)
    chats = [[{"role": "user", "content": question}] for question in questions]
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "target")
    tokens = [
        tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"] for c in chats
    ]
    bf16 = TorchModel(EXAMPLE / "target", dtype=torch.bfloat16).greedy(tokens, max_tokens=ANSWER_TOKENS)
    expected = [tokenizer.decode(answer) for answer in bf16]
    server = Server(
        model=model,
        arguments=(*ROSE_FLAGS, *SMALL, *CAPTURED),
        environment=gpu_environment(tmp_path / "cache"),
        log=tmp_path / "serve.log",
    )
    try:
        print(f"ready after {server.wait_ready():.0f} s")

        def ask(chat: list[dict[str, str]]) -> str:
            answer = server.post("/v1/chat/completions", messages=chat, max_tokens=ANSWER_TOKENS)
            return answer["choices"][0]["message"]["content"]

        with ThreadPoolExecutor(len(chats)) as pool:
            found = {"one at a time": [ask(chat) for chat in chats], "at once": list(pool.map(ask, chats))}
        for how, answers in found.items():
            same = sum(a == b for a, b in zip(answers, expected, strict=True))
            print(f"{how}: {same} of {len(answers)} answers are the BF16 model's")
            assert same >= SAME_ANSWERS, how
        (worker,) = server.get("/rose/stats")["workers"]
    finally:
        server.stop()
    assert worker["providers"]["moe_experts"] == "rose"
    assert "reference" not in worker["calls"]["moe_experts"] and worker["calls"]["moe_experts"]["rose"] > 0
