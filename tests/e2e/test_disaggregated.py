"""Prefill and decode in two servers: the tokens of one server, and no prompt computed twice.

On a CPU: two `vllm serve` of the MXFP8 example with both our backends, and vLLM's router. With KV in files on any
machine; with NIXL and UCX marked four_cores, since on two cores NIXL's polling starves the servers for longer than a
request may wait (docs/disaggregated.md). With two NVIDIA GPUs:
`python -m pytest tests/e2e/test_disaggregated.py -m multi_gpu`.
"""

import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from disaggregated import COMPUTED, PROMPT_TOKENS, TRANSFERRED, Counts, Disaggregated, Role, through_files, through_nixl
from e2e_setup import EXAMPLE, FIRST, SERVERS, Served
from test_concurrency import complete, tokens_before_a_near_tie
from vllm_server import MODEL, ROSE_FLAGS, Server, gpu_environment, serve_environment

from vllm_rose_plugin.cli import main

SETTLE_SECONDS = 30.0
BLOCK = 128
"""vLLM's KV block on a CPU, in tokens."""
BLOCK_BYTES = 3 * 2 * 2 * BLOCK * 64 * 2
"""Of the example: layers, K and V, KV heads, tokens, head_dim, bytes of bf16."""
QUESTIONS = 5
QUESTION_TOKENS = 16
TEXT_LENGTHS = (2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 900)
TEXT_TOKENS = 4
SPECULATIVE_TOKENS = 2

Request = tuple[list[int], int]
Answer = dict[str, Any]


@pytest.fixture(scope="module")
def requests(question_tokens: list[list[int]], validation_tokens: list[int]) -> list[Request]:
    """(prompt, most tokens): questions whose answers are stable, then texts around the ends of a KV block."""
    texts = [validation_tokens[3000 * i + 100 :][:length] for i, length in enumerate(TEXT_LENGTHS)]
    return [(q, QUESTION_TOKENS) for q in question_tokens[:QUESTIONS]] + [(text, TEXT_TOKENS) for text in texts]


def check_answers(answers: list[Answer], expected: list[Answer]) -> None:
    """Equal tokens; where a text's tokens nearly tie, up to there, since batches change the order of sums."""
    for answer, alone in zip(answers[:QUESTIONS], expected[:QUESTIONS], strict=True):
        assert answer["tokens"] == alone["tokens"]
    for answer, alone in zip(answers[QUESTIONS:], expected[QUESTIONS:], strict=True):
        firm = tokens_before_a_near_tie(alone)
        assert answer["tokens"][: len(firm)] == firm


# ---- with no GPU ----


@pytest.fixture(scope="module")
def expected(servers: Any, requests: list[Request]) -> list[Answer]:
    """What the one server of the other tests answers."""
    aggregated = servers.get(SERVERS[FIRST])
    return [complete(aggregated, *request) for request in requests]


@pytest.fixture(scope="module")
def pair_with_files(
    checkpoint: Path, expected: list[Answer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Disaggregated, Path]]:
    """Two servers with a thread each, which wait for nothing in a loop; and where they leave KV."""
    directory = tmp_path_factory.mktemp("disaggregated_files")
    with Disaggregated(
        model=checkpoint,
        prefill=Role("kv_producer", ("--enforce-eager", "--max-logprobs", "-1"), {}),
        decode=Role("kv_consumer", ("--enforce-eager", "--max-logprobs", "-1"), {}),
        transfer=through_files(directory / "kv"),
        environment=serve_environment(directory / "cache")
        | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
        directory=directory,
    ) as running:
        yield running, directory / "kv"


def in_whole_blocks(length: int) -> int:
    """Tokens of a prompt that go through files; the connector leaves two tokens or more to decode."""
    return (length - 2) // BLOCK * BLOCK


@pytest.mark.slow
def test_whole_blocks_go_through_files_and_tokens_equal_the_aggregated_servers(
    served: Served, pair_with_files: tuple[Disaggregated, Path], requests: list[Request], expected: list[Answer]
) -> None:
    """On two cores too: prefill computes a prompt once, decode only what is left behind the last whole block."""
    pair, stored = pair_with_files
    counted = [(pair.prefill, COMPUTED), (pair.decode, COMPUTED), (pair.decode, TRANSFERRED)]
    before = [server.metric(PROMPT_TOKENS, source) for server, source in counted]
    answers = [complete(pair.router, *request) for request in requests]
    check_answers(answers, expected)
    lengths = [len(prompt) for prompt, _ in requests]
    moved = sum(map(in_whole_blocks, lengths))
    assert moved > 1000
    after = [server.metric(PROMPT_TOKENS, source) for server, source in counted]
    grown = [now - then for now, then in zip(after, before, strict=True)]
    assert grown == [sum(lengths), sum(lengths) - moved, moved]
    assert len([*stored.rglob("*.safetensors")]) >= 3 * sum(in_whole_blocks(length) > 0 for length in lengths)
    for server in (pair.prefill, pair.decode):
        (worker,) = server.get("/rose/stats")["workers"]
        assert worker["layers"]["experts"] == {"RoseCuteDslExperts": 3}
        assert worker["layers"]["linear"] == {"RoseCuteDslMxfp8LinearKernel": 6}
        assert worker["calls"]["grouped_gemm"]["reference"] > 0


@pytest.fixture(scope="module")
def pair(checkpoint: Path, expected: list[Answer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disaggregated]:
    """Two servers with a thread each; the one that has answered already goes on beside them."""
    directory = tmp_path_factory.mktemp("disaggregated")
    # Threads aren't bound: NIXL's polling thread starts in the worker, and would share its one core.
    environment = serve_environment(directory / "cache") | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    with Disaggregated(
        model=checkpoint,
        prefill=Role("kv_producer", ("--enforce-eager", "--max-logprobs", "-1"), {}),
        decode=Role("kv_consumer", ("--enforce-eager", "--max-logprobs", "-1"), {}),
        transfer=through_nixl("cpu"),
        environment=environment,
        directory=directory,
    ) as running:
        yield running


@pytest.mark.slow
@pytest.mark.four_cores
def test_tokens_equal_the_aggregated_servers_and_decode_computes_no_prompt(
    served: Served, pair: Disaggregated, requests: list[Request], expected: list[Answer]
) -> None:
    before = Counts.of(pair)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda request: complete(pair.router, *request), requests))
    check_answers(answers, expected)

    lengths = [len(prompt) for prompt, _ in requests]
    blocks = sum(math.ceil(length / BLOCK) for length in lengths)
    expected_counts = Counts(
        prefill_computed=sum(lengths),
        prefill_generated=len(lengths),
        decode_computed=0,
        decode_transferred=sum(lengths),
        kv_bytes=blocks * BLOCK_BYTES,
        failures=0,
    )
    deadline = time.monotonic() + SETTLE_SECONDS
    while (grown := Counts.of(pair).since(before)) != expected_counts and time.monotonic() < deadline:
        time.sleep(0.2)
    assert grown == expected_counts
    # The prefill server frees its blocks when it hears that they were read.
    while (held := pair.prefill.metric("vllm:kv_cache_usage_perc")) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert held == 0
    print(f"\n{sum(lengths)} prompt tokens, {blocks} blocks of KV moved")


@pytest.mark.slow
@pytest.mark.four_cores
def test_our_kernels_compute_both_phases(served: Served, pair: Disaggregated) -> None:
    for server in (pair.prefill, pair.decode):
        (worker,) = server.get("/rose/stats")["workers"]
        assert worker["layers"]["experts"] == {"RoseCuteDslExperts": 3}
        assert worker["layers"]["linear"] == {"RoseCuteDslMxfp8LinearKernel": 6}
        assert worker["calls"]["grouped_gemm"]["reference"] > 0


@pytest.mark.slow
@pytest.mark.four_cores
def test_a_streamed_chat_goes_through_the_router(served: Served, pair: Disaggregated, questions: list[str]) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": questions[0]}], "max_tokens": 8, "temperature": 0}
    whole = served.server.post("/v1/chat/completions", **chat)["choices"][0]["message"]["content"]
    computed = Counts.of(pair).decode_computed
    status, content = pair.router.request("POST", "/v1/chat/completions", chat | {"stream": True})
    assert status == 200, content
    events = [line.removeprefix("data: ") for line in content.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole
    assert len(deltas) > 3
    assert Counts.of(pair).decode_computed == computed


@pytest.fixture(scope="module")
def drafting_pair(
    checkpoint: Path, expected: list[Answer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Disaggregated]:
    """As pair, with the MTP draft in MXFP8 attached and drafting on both sides, which NIXL's handshake compares."""
    directory = tmp_path_factory.mktemp("disaggregated_drafting")
    assert main(["quantize", str(EXAMPLE / "mtp"), str(directory / "draft")]) == 0
    assert main(["mtp", "attach", str(checkpoint), str(directory / "draft"), str(directory / "both")]) == 0
    environment = serve_environment(directory / "cache") | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    config = {"method": "mtp", "num_speculative_tokens": SPECULATIVE_TOKENS}
    arguments = ("--enforce-eager", "--max-logprobs", "-1", "--speculative-config", json.dumps(config))
    with Disaggregated(
        model=directory / "both",
        prefill=Role("kv_producer", arguments, {}),
        decode=Role("kv_consumer", arguments, {}),
        transfer=through_nixl("cpu"),
        environment=environment,
        directory=directory,
    ) as running:
        yield running


@pytest.mark.slow
@pytest.mark.four_cores
def test_drafting_on_both_sides_gives_the_same_tokens(
    drafting_pair: Disaggregated, requests: list[Request], expected: list[Answer]
) -> None:
    """The draft's layer travels with the target's: what decode drafts from the prompt was computed by prefill."""
    before = Counts.of(drafting_pair)
    answers = [complete(drafting_pair.router, *request) for request in requests]
    check_answers(answers, expected)
    grown = Counts.of(drafting_pair).since(before)
    prompts = sum(len(prompt) for prompt, _ in requests)
    blocks = sum(math.ceil(len(prompt) / BLOCK) for prompt, _ in requests)
    assert (grown.decode_computed, grown.decode_transferred, grown.failures) == (0, prompts, 0)
    assert grown.kv_bytes >= blocks * BLOCK_BYTES * 4 // 3, "four layers: three of the target, one of the draft"
    drafts = drafting_pair.decode.metric("vllm:spec_decode_num_drafts_total")
    first = drafting_pair.decode.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", 'position="0"')
    print(f"\n{first:.0f} of {drafts:.0f} first draft tokens accepted")
    assert first > 0.6 * drafts > 0


# ---- with two GPUs ----

GPU_ARGUMENTS = ("--enforce-eager", "--max-logprobs", "-1", "--gpu-memory-utilization", "0.15", "--block-size", "128")


@pytest.fixture(scope="module")
def expected_on_gpu(
    checkpoint: Path, requests: list[Request], tmp_path_factory: pytest.TempPathFactory
) -> list[Answer]:
    """What one server on one GPU answers."""
    directory = tmp_path_factory.mktemp("aggregated_gpu")
    server = Server(
        model=checkpoint,
        arguments=(*ROSE_FLAGS, *GPU_ARGUMENTS),
        environment=gpu_environment(directory / "cache") | {"CUDA_VISIBLE_DEVICES": "0"},
        log=directory / "aggregated.log",
    )
    try:
        server.wait_ready()
        return [complete(server, *request) for request in requests]
    finally:
        server.stop()


@pytest.mark.multi_gpu
@pytest.mark.parametrize(("prefill_ranks", "prefill_gpus", "decode_gpu"), [(1, "0", "1"), (2, "0,1", "1")])
def test_two_gpus_answer_as_one(
    checkpoint: Path,
    requests: list[Request],
    expected_on_gpu: list[Answer],
    tmp_path: Path,
    prefill_ranks: int,
    prefill_gpus: str,
    decode_gpu: str,
) -> None:
    """TP1 to TP1, and TP2 to TP1, where the decode rank reads each KV head from the rank that has it."""
    with Disaggregated(
        model=checkpoint,
        prefill=Role(
            "kv_producer",
            (*GPU_ARGUMENTS, "--tensor-parallel-size", str(prefill_ranks)),
            {"CUDA_VISIBLE_DEVICES": prefill_gpus},
        ),
        decode=Role("kv_consumer", GPU_ARGUMENTS, {"CUDA_VISIBLE_DEVICES": decode_gpu}),
        transfer=through_nixl("cuda"),
        environment=gpu_environment(tmp_path / "cache"),
        directory=tmp_path,
    ) as running:
        before = Counts.of(running)
        answers = [complete(running.router, *request) for request in requests]
        check_answers(answers, expected_on_gpu)
        deadline = time.monotonic() + SETTLE_SECONDS
        prompts = sum(len(prompt) for prompt, _ in requests)
        while (grown := Counts.of(running).since(before)).decode_transferred < prompts and time.monotonic() < deadline:
            time.sleep(0.2)
        assert (grown.decode_computed, grown.decode_transferred, grown.failures) == (0, prompts, 0)
