"""What `rose bench mtp` counts, refuses and writes, on a server that is made up."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from fake_server import MAX_MODEL_LEN, FakeServer

from vllm_rose_plugin.acceptance.measure import cut_prompts
from vllm_rose_plugin.acceptance.report import COLUMNS
from vllm_rose_plugin.acceptance.tally import Contexts, Tally, tally_steps
from vllm_rose_plugin.cli import UserError, build_parser, main
from vllm_rose_plugin.planner.plan import read_acceptance

STEPS_SHORT, STEPS_LONG = [3, 1, 0], [3, 1, 0, 2]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("word " * 2000)
    return path


def bench(server: FakeServer | str, *arguments: object) -> dict[str, Any]:
    url = server if isinstance(server, str) else server.url
    *flags, output = arguments
    args = build_parser().parse_args(["bench", "mtp", "--url", url, *map(str, flags), "--output", str(output)])
    assert args.run(args) == 0
    content: dict[str, Any] = json.loads(Path(f"{output}.json").read_text())
    return content


def refusal(server: FakeServer | str, *arguments: object) -> str:
    with pytest.raises(UserError) as error:
        bench(server, *arguments)
    return str(error.value)


def test_tally_follows_vllm_s_definitions() -> None:
    tally = Tally([0, 0, 0])
    for accepted in STEPS_LONG:
        tally.observe(accepted)
    assert (tally.drafts, tally.accepted) == (4, [3, 2, 1])
    assert tally.by_position == [0.75, 0.5, 0.25]
    assert tally.mean_accepted_length == 1 + 6 / 4
    assert Tally([0]).mean_accepted_length == 1.0 and Tally([0]).by_position == []


def test_steps_lie_where_their_context_does() -> None:
    """A prompt of 9: first token without a draft; drafts at contexts 10, 14, 16 and 17."""
    contexts = Contexts((0, 14, 17))
    tallies = [Tally([0] * 3) for _ in range(3)]
    tally_steps(prompt_tokens=9, accepted=STEPS_LONG, contexts=contexts, into=tallies)
    assert [tally.drafts for tally in tallies] == [1, 2, 1]
    assert [tally.accepted for tally in tallies] == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert [contexts.name(index) for index in range(3)] == ["0-13", "14-16", "17-"]


def test_prompts_are_spread_over_the_text() -> None:
    tokens = list(range(1000))
    contexts = Contexts((0, 100, 400, 2000))
    prompts, notes = cut_prompts(tokens, contexts=contexts, each=4, max_tokens=50, max_model_len=450)
    assert [len(prompt) for prompt in prompts] == [16] * 4 + [100] * 4 + [400] * 4
    assert [prompt[0] for prompt in prompts[-4:]] == [0, 200, 400, 600] and prompts[-1][-1] == 999
    assert len(notes) == 1 and notes[0].startswith("contexts 2000- are left out: 2000 + 50 tokens")
    _, notes = cut_prompts(tokens[:300], contexts=contexts, each=1, max_tokens=50, max_model_len=450)
    assert notes[0] == "contexts 400-1999 are left out: the text has 300 tokens"


@pytest.mark.parametrize("detailed", [False, True])
def test_a_server(tmp_path: Path, text: Path, detailed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """By counters each draft lies where its prompt does; by the answers' own steps, where its context does."""
    with FakeServer(detailed=detailed) as server:
        content = bench(server, "--text", text, "--contexts", "0,20,200,5000", "--prompts", 5, tmp_path / "out")
    assert len(server.bodies) == 15 and {len(body["prompt"]) for body in server.bodies} == {16, 20, 200}
    assert {body["temperature"] for body in server.bodies} == {0.0}
    assert content["prompts"] == 15 and content["speculative_tokens"] == 3 and content["model"] == "fake"
    assert content["drafts"] == 10 * 3 + 5 * 4
    assert content["accepted_by_position"] == [35, 20, 15]
    assert content["acceptance_by_position"] == [0.7, 0.4, 0.3] and content["mean_accepted_length"] == 2.4
    parts = {part["from"]: (part["drafts"], part["accepted_by_position"]) for part in content["by_context"]}
    if detailed:  # of the prompts of 16, only the step at 17 lies below 20
        expected = {0: (5, [5, 5, 5]), 20: (25, [15, 5, 5]), 200: (20, [15, 10, 5])}
        assert content["counted"] == "each draft at its own context"
    else:
        expected = {0: (15, [10, 5, 5]), 20: (15, [10, 5, 5]), 200: (20, [15, 10, 5])}
        assert content["counted"] == "each draft at its prompt's length"
    assert parts == expected
    out = capsys.readouterr().out
    assert f"contexts 5000- are left out: 5000 + 128 tokens are more than the model's {MAX_MODEL_LEN}" in out
    assert "         all       50    70.0%   40.0%   30.0%  2.40" in out


def test_the_files(tmp_path: Path, text: Path) -> None:
    with FakeServer() as server:
        content = bench(server, "--text", text, "--contexts", "0,20", "--prompts", 1, tmp_path / "a.b")
    with (tmp_path / "a.b.csv").open() as file:
        found = list(csv.DictReader(file))
    assert tuple(found[0]) == COLUMNS
    assert [(row["context"], row["position"]) for row in found] == [
        (context, str(position)) for context in ("all", "0-19", "20-") for position in range(3)
    ]
    assert found[0]["accepted"] == "4" and float(found[0]["acceptance"]) == pytest.approx(4 / 6, abs=1e-5)
    assert found[0]["versions"].startswith("vllm 0.0.fake; vllm_rose_plugin ")
    assert (tmp_path / "a.b.png").read_bytes().startswith(b"\x89PNG")
    assert read_acceptance(tmp_path / "a.b.json") == content["acceptance_by_position"], "what `rose plan` reads"


def test_questions(tmp_path: Path) -> None:
    questions = tmp_path / "questions.txt"
    questions.write_text("one two\n\nthree " + "x " * 150 + "\n")
    with FakeServer() as server:
        content = bench(server, "--questions", questions, "--contexts", "0,100", "--tokens", 9, tmp_path / "out")
    assert sorted(len(body["prompt"]) for body in server.bodies) == [3, 152]
    assert [part["drafts"] for part in content["by_context"]] == [3, 4]
    with FakeServer() as server:
        text = refusal(server, "--questions", questions, "--tokens", 500, tmp_path / "out")
    assert "the longest question has 152 tokens, and with --tokens 500 that is more than the model's 600" in text


def test_a_server_that_drafts_nothing(tmp_path: Path, text: Path) -> None:
    with FakeServer(drafts=False) as server:
        assert "drafts nothing: its /metrics has no vllm:spec_decode_*" in refusal(
            server, "--text", text, tmp_path / "o"
        )
        assert server.bodies == []
    for detailed in (False, True):
        with FakeServer(idle=True, detailed=detailed) as server:
            assert "drafted nothing for 16 prompts" in refusal(
                server, "--text", text, "--contexts", "0", tmp_path / "o"
            )
    assert not list(tmp_path.glob("o.*"))


def test_other_requests_at_the_same_time(tmp_path: Path, text: Path) -> None:
    """Counters hold them too; answers that tell their own steps don't."""
    with FakeServer(foreign=2) as server:
        message = refusal(server, "--text", text, "--contexts", "0", "--prompts", 3, tmp_path / "o")
    assert "generated 30 tokens while the 24 of this measurement were answered: other requests run there" in message
    with FakeServer(foreign=2, detailed=True) as server:
        assert bench(server, "--text", text, "--contexts", "0", "--prompts", 3, tmp_path / "o")["drafts"] == 9


def test_no_server_and_no_vllm(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer() as server:
        url = server.url
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        bench(server, "--text", text, "--contexts", "0", "--prompts", 1, tmp_path / "o")
        assert server.keys == {"Bearer secret"}
        assert f"{url}/x/metrics answered 404: no such path" in refusal(f"{url}/x/", "--text", text, tmp_path / "o")
    assert f"{url} can't be reached" in refusal(url, "--text", text, tmp_path / "o")
    assert "nonsense can't be reached" in refusal("nonsense", "--text", text, tmp_path / "o")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--contexts", "5,10"], "--contexts '5,10' is no ascending list"),
        (["--contexts", "0,10,10"], "is no ascending list"),
        (["--contexts", "0,ten"], "is no ascending list"),
        (["--tokens", "1"], "--tokens 1 is out of range: give 2 or more"),
        (["--prompts", "0"], "--prompts 0 is out of range"),
        (["--temperature", "-1"], "--temperature -1.0 is out of range"),
        (["--draft", "x"], "--draft goes with --model"),
        (["--engine", "{"], "--engine is not JSON"),
        (["--engine", "[]"], "--engine [] is no JSON object"),
        (["--output", "/nowhere/x"], "/nowhere is not a directory"),
        (["--text", "/nowhere.txt"], "/nowhere.txt can't be read"),
    ],
)
def test_flags(text: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is asked of the server, which isn't there."""
    assert main(["bench", "mtp", "--url", "http://127.0.0.1:1", "--text", str(text), *flags]) == 2
    assert message in capsys.readouterr().err
