"""benchmarks/bench_mtp.py beside its engines: what it times, which lines it keeps, what a deadline leaves out."""

import argparse
import csv
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_mtp

ENGINE = """
import json, os, sys, time
plan = json.load(open(sys.argv[2]))
k = plan["engine"].get("speculative_config", {}).get("num_speculative_tokens", 0)
assert os.environ["VLLM_CACHE_ROOT"].endswith(f"_{k}.cache")
if k == 3:
    raise SystemExit("no memory")
if k == 2:
    time.sleep(60)
print("progress  50%\\n" + "READY 5", flush=True)
sys.stdin.readline()
for batch in plan["batches"]:
    print("RESULT " + json.dumps({"batch": batch, "us": 100.0 / (1 + k), "yield": 1.0 + k, "device": "none"}))
"""


class FakeEngine:
    """Hands out given steps: for each, tokens by request, and who ends with them."""

    def __init__(self, steps: list[dict[str, int]], ends: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps, self.ends, self.done, self.added = steps, ends, 0, {}
        monkeypatch.setattr(bench_mtp.time, "perf_counter", lambda: float(self.done))

    def add_request(self, request_id, prompt, sampling) -> None:
        assert sampling.max_tokens == 9 and sampling.ignore_eos and sampling.temperature == 0
        self.added[request_id] = prompt["prompt_token_ids"]

    def has_unfinished_requests(self) -> bool:
        return self.done < len(self.steps)

    def step(self) -> list[SimpleNamespace]:
        tokens, self.done = self.steps[self.done], self.done + 1
        return [
            SimpleNamespace(
                request_id=name,
                outputs=[SimpleNamespace(token_ids=[0] * count)],
                finished=name in self.ends.get(self.done, ""),
            )
            for name, count in tokens.items()
        ]


def test_the_time_is_that_in_which_the_whole_batch_decodes(monkeypatch):
    steps = [{"0": 1}, {"0": 2}, {"0": 2, "1": 1}, {"0": 3, "1": 2}, {"0": 0}, {"0": 1, "1": 3}, {"0": 1}, {"1": 2}]
    engine = FakeEngine(steps, {7: "0", 8: "1"}, monkeypatch)
    found = bench_mtp.decode(SimpleNamespace(llm_engine=engine), [[5], [6]], 9)
    assert engine.added == {"0": [5], "1": [6]}
    assert found == (3.0, 9, 4), "from the third step, which brings request 1 its first token, until the sixth"


def test_a_batch_that_never_decodes_at_once_is_refused(monkeypatch):
    engine = FakeEngine([{"0": 1}, {"0": 8}, {"1": 1}, {"1": 8}], {2: "0", 4: "1"}, monkeypatch)
    with pytest.raises(RuntimeError, match=r"2 requests of 9 tokens never decoded all at once: raise --tokens"):
        bench_mtp.decode(SimpleNamespace(llm_engine=engine), [[5], [6]], 9)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The comparison, with engines that only print."""
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    monkeypatch.setattr(bench_mtp, "__file__", str(script))
    monkeypatch.setattr(bench_mtp, "models", lambda *_: {"example": {"engine": {}, "speculative": {}}})
    monkeypatch.setattr(bench_mtp, "prompts", lambda *_: [])
    directories = iter(range(9))

    def compare(drafted: list[int], deadline: float = float("inf"), turn: float = 0.0) -> bool:
        directory = tmp_path / str(next(directories))
        directory.mkdir()
        args = argparse.Namespace(
            drafted=drafted, deadline=deadline, turn=turn, tokens=9, batches=[1, 8], repeats=1,
            output=tmp_path / "mtp.csv", versions="vllm 1",
        )  # fmt: skip
        return bench_mtp.compare(args, directory)

    return compare


def lines(directory: Path) -> list[tuple[str, str, str, str]]:
    with (directory / "mtp.csv").open() as file:
        return [(row["case"], row["provider"], row["shape"], row["us"]) for row in csv.DictReader(file)]


def test_lines_come_into_the_table_beside_earlier_ones(run, tmp_path):
    assert run([0, 1])
    expected = [
        ("example batch 1", "vllm", "batch=1;k=0;yield=1.00", "100.0"),
        ("example batch 8", "vllm", "batch=8;k=0;yield=1.00", "100.0"),
        ("example batch 1", "rose", "batch=1;k=1;yield=2.00", "50.0"),
        ("example batch 8", "rose", "batch=8;k=1;yield=2.00", "50.0"),
    ]
    assert lines(tmp_path) == expected
    assert run([1])
    assert lines(tmp_path) == expected
    bench_mtp.plot(bench_mtp.read(tmp_path / "mtp.csv"), tmp_path / "mtp.png")
    assert (tmp_path / "mtp.png").stat().st_size > 1000


def test_an_engine_that_fails_or_comes_too_late_is_left_out_by_name(run, tmp_path, capsys):
    start = time.monotonic()
    assert not run([3, 0, 2], deadline=6, turn=2)
    assert time.monotonic() - start < 20
    assert [shape for _, _, shape, _ in lines(tmp_path)] == ["batch=1;k=0;yield=1.00", "batch=8;k=0;yield=1.00"]
    errors = capsys.readouterr().err
    assert "left out: example k=3" in errors and "no memory" in errors and "left out: example k=2" in errors
