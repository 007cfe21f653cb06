"""`rose quantize`, `rose mtp attach`, `vllm serve` and `rose bench mtp`, one after the other, on the example."""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from e2e_setup import ANSWER_TOKENS, EXAMPLE, README_AGREEMENT
from vllm_server import ROSE_FLAGS, Server, run_to_end, serve_environment

from vllm_rose_plugin.acceptance import server as acceptance_server
from vllm_rose_plugin.acceptance.measure import Answer, measure
from vllm_rose_plugin.acceptance.tally import Contexts
from vllm_rose_plugin.cli import main

pytestmark = pytest.mark.slow

SPECULATIVE_TOKENS = 2


@pytest.fixture(scope="module")
def drafting(checkpoint: Path, cache: Path, servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the example in MXFP8 with its draft in MXFP8 attached; it leaves a core to other tests."""
    directory = tmp_path_factory.mktemp("mtp")
    assert main(["quantize", str(EXAMPLE / "mtp"), str(directory / "draft")]) == 0
    assert main(["mtp", "attach", str(checkpoint), str(directory / "draft"), str(directory / "both")]) == 0
    assert main(["verify", str(directory / "both")]) == 0
    servers.stop()
    config = {"method": "mtp", "num_speculative_tokens": SPECULATIVE_TOKENS}
    server = Server(
        model=directory / "both",
        arguments=(
            *(*ROSE_FLAGS, "--enforce-eager", "--per-request-spec-decode-metrics", "detailed"),
            *("--speculative-config", json.dumps(config)),
        ),
        environment=serve_environment(cache) | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
        log=directory / "serve.log",
    )
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def counted(server: Server) -> acceptance_server.Counters:
    """What the server's own counters say."""
    counters = acceptance_server.read_counters(server.request("GET", "/metrics")[1].decode())
    assert counters is not None
    return counters


def bench(server: Server, output: Path, *arguments: object) -> dict[str, Any]:
    """Run the command; the JSON file's content."""
    url = f"http://127.0.0.1:{server.port}"
    assert main(["bench", "mtp", "--url", url, *map(str, arguments), "--output", str(output)]) == 0
    content: dict[str, Any] = json.loads(Path(f"{output}.json").read_text())
    return content


def test_the_readme_s_acceptance_and_vllm_s_counters(drafting: Server, tmp_path: Path) -> None:
    """Steps of the answers add up to what /metrics counted, and the first position's rate is the README's."""
    before = counted(drafting)
    questions = ("--questions", EXAMPLE / "prompts.txt", "--tokens", ANSWER_TOKENS, "--contexts", "0,32,64")
    content = bench(drafting, tmp_path / "questions", *questions)
    since = counted(drafting).drafts.minus(before.drafts)
    assert (content["drafts"], content["accepted_by_position"]) == (since.drafts, since.accepted)
    assert content["counted"] == "each draft at its own context" and len(content["by_context"]) == 3
    assert content["speculative_tokens"] == SPECULATIVE_TOKENS and content["drafts"] > 200
    first, second = content["acceptance_by_position"]
    # By context length too, on /metrics: our counters of requests that have ended add up to vLLM's.
    assert drafting.metric("rose:spec_decode_drafts_total") == counted(drafting).drafts.drafts
    assert drafting.metric("rose:spec_decode_accepted_tokens_total") == sum(counted(drafting).drafts.accepted)
    print(f"\nMXFP8 target and draft: {first:.1%} at the first position, {second:.1%} at the second")
    assert abs(first - README_AGREEMENT) <= 0.02
    assert 0.5 < second < first


def test_by_context_length(drafting: Server, tmp_path: Path) -> None:
    text = ("--text", EXAMPLE / "validation.txt", "--prompts", 4, "--tokens", 48, "--contexts", "0,256,1024,4096")
    content = bench(drafting, tmp_path / "text", *text)
    assert [part["from"] for part in content["by_context"]] == [0, 256, 1024]
    assert sum(part["drafts"] for part in content["by_context"]) == content["drafts"]
    for part in content["by_context"]:
        print(f"\ncontext from {part['from']}: {part['mean_accepted_length']:.2f} tokens a step")
        assert 1.3 < part["mean_accepted_length"] < 1 + SPECULATIVE_TOKENS


def test_an_engine_of_its_own(offline_environment: dict[str, str], tmp_path: Path) -> None:
    """BF16 target and draft, from two directories."""
    flags = ["--model", EXAMPLE / "target", "--draft", EXAMPLE / "mtp", "--speculative-tokens", "1"]
    flags += ["--engine", '{"enforce_eager": true, "max_model_len": 512}', "--tokens", ANSWER_TOKENS]
    flags += ["--questions", EXAMPLE / "prompts.txt", "--output", tmp_path / "out"]
    command = [sys.executable, "-m", "vllm_rose_plugin.cli", "bench", "mtp", *map(str, flags)]
    code, output = run_to_end(command, environment=offline_environment, log=tmp_path / "log", timeout=300)
    assert code == 0, output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["draft"] == str(EXAMPLE / "mtp") and content["source"] == "offline engine"
    print(f"\nBF16 target and draft: {content['acceptance_by_position'][0]:.1%}")
    assert abs(content["acceptance_by_position"][0] - README_AGREEMENT) <= 0.02


class _OnlyCounters(acceptance_server.Server):
    """As if the server had been started without the flag for per-request metrics."""

    def answer(self, prompts: Sequence[list[int]], *, max_tokens: int, temperature: float) -> list[Answer]:
        answers = super().answer(prompts, max_tokens=max_tokens, temperature=temperature)
        return [dataclasses.replace(answer, accepted=None) for answer in answers]


def test_counters_alone_tell_the_same(drafting: Server, question_tokens: list[list[int]]) -> None:
    found = []
    for kind in (acceptance_server.Server, _OnlyCounters):
        source = kind(f"http://127.0.0.1:{drafting.port}", concurrency=4)
        measurement = measure(
            source=source,
            prompts=question_tokens,
            contexts=Contexts((0,)),
            max_tokens=ANSWER_TOKENS,
            temperature=0.0,
            progress=print,
        )
        assert measurement.exact == (kind is acceptance_server.Server)
        found.append(measurement.total)
    one, other = found
    assert one.drafts == pytest.approx(other.drafts, rel=0.03)  # batches differ, and with them a few near ties
    assert one.mean_accepted_length == pytest.approx(other.mean_accepted_length, rel=0.03)
