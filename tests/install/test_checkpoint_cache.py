"""scripts/checkpoint_cache.py beside a converter that only records and keeps to the contract of `rose quantize`."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import checkpoint_cache  # noqa: E402
from server import ServeError  # noqa: E402

# Makes $3.partial with a finished shard, waits while the file "hold" is there, then renames; keeps what it finds.
CONVERTER = """#!/usr/bin/env bash
echo "$2 $3" >> "$(dirname "$0")/calls"
mkdir -p "$3.partial/checkpoint"
if [[ -f $3.partial/checkpoint/shard ]]; then echo resumed >> "$(dirname "$0")/calls"; fi
touch "$3.partial/checkpoint/shard"
while [[ -f $(dirname "$0")/hold ]]; do sleep 0.05; done
if [[ -f $(dirname "$0")/fail ]]; then exit 3; fi
mv "$3.partial/checkpoint" "$3"
cp "$2/weights" "$3/weights"
rmdir "$3.partial"
"""
RUN = """
import sys
from pathlib import Path
sys.path.insert(0, {scripts!r})
import checkpoint_cache
sys.executable, checkpoint_cache.ROOT = {python!r}, Path({root!r})
print("made", checkpoint_cache.quantized(Path(sys.argv[1]), Path({root!r}, "build")).name, flush=True)
"""


class Tree:
    """A checkout with a build folder, the fake converter and models."""

    def __init__(self, root: Path) -> None:
        self.root, self.build, self.bin = root, root / "build", root / "bin"
        self.build.mkdir(parents=True)
        self.bin.mkdir()
        (self.bin / "rose").write_text(CONVERTER)
        (self.bin / "rose").chmod(0o755)
        self.python = str(self.bin / "python")

    def model(self, name: str, weights: str = "one") -> Path:
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        (folder / "weights").write_text(weights)
        return folder

    def quantized(self, model: Path) -> Path:
        return checkpoint_cache.quantized(model, self.build)

    def start(self, model: Path) -> subprocess.Popen[str]:
        code = RUN.format(scripts=str(ROOT / "scripts"), python=self.python, root=str(self.root))
        return subprocess.Popen(
            [sys.executable, "-c", code, str(model)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def calls(self) -> list[str]:
        file = self.bin / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def wait_for_partial(self) -> Path:
        deadline = time.monotonic() + 20
        while not (found := [shard.parents[1] for shard in self.build.glob("*.partial/checkpoint/shard")]):
            assert time.monotonic() < deadline, "no conversion began"
            time.sleep(0.02)
        return found[0]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    tree = Tree(tmp_path / "tree")
    monkeypatch.setattr(checkpoint_cache, "ROOT", tree.root)
    monkeypatch.setattr(sys, "executable", tree.python)
    return tree


def test_made_once_and_again_only_after_a_change(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    model = tree.model("models/tiny")
    made = tree.quantized(model)
    assert (made / "weights").read_text() == "one" and made.parent == tree.build
    assert tree.quantized(model) == made and len(tree.calls()) == 1
    assert "up to date" in capsys.readouterr().out
    tree.model("models/tiny", "two")
    assert tree.quantized(model) == made and len(tree.calls()) == 2
    assert (made / "weights").read_text() == "two"
    assert [path for path in tree.build.iterdir() if path.is_dir()] == [made]


def test_a_second_run_waits_says_so_and_reuses(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = tree.model("models/tiny")
    (tree.bin / "hold").touch()
    first = tree.start(model)
    tree.wait_for_partial()
    second = tree.start(model)
    assert second.stdout is not None
    assert second.stdout.readline() == f"serve: another make serve is converting {model}, waiting for it to end\n"
    (tree.bin / "hold").unlink()
    outputs = [process.communicate(timeout=20)[0] for process in (first, second)]
    assert outputs[0].startswith("made ") and outputs[1].endswith(f"is up to date\n{outputs[0]}")
    assert len(tree.calls()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_conversion_is_resumed(
    tree: Tree, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    model = tree.model("models/tiny")
    (tree.bin / "hold").touch()
    first = tree.start(model)
    partial = tree.wait_for_partial()
    os.killpg(first.pid, number)
    first.communicate(timeout=20)
    (tree.bin / "hold").unlink()
    assert partial.is_dir()
    output, errors = tree.start(model).communicate(timeout=20)
    assert output.startswith("made "), errors
    assert tree.calls()[2:] == ["resumed"] and not partial.exists()


def test_an_orphan_of_a_killed_run_is_waited_for_and_its_work_used(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = tree.model("models/tiny")
    (tree.bin / "hold").touch()
    first = tree.start(model)
    tree.wait_for_partial()
    first.kill()
    first.wait(timeout=20)
    second = tree.start(model)
    assert second.stdout is not None
    assert "waiting for it to end" in second.stdout.readline()
    (tree.bin / "hold").unlink()
    assert second.communicate(timeout=20)[0].startswith("made ")
    assert len(tree.calls()) == 1


def test_work_of_another_state_is_neither_removed_nor_resumed(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    model = tree.model("models/tiny")
    (tree.bin / "fail").touch()
    with pytest.raises(ServeError, match="rose quantize ended with exit code 3"):
        tree.quantized(model)
    partial = tree.wait_for_partial()
    (tree.bin / "fail").unlink()
    tree.model("models/tiny", "two")
    assert (tree.quantized(model) / "weights").read_text() == "two"
    assert "resumed" not in tree.calls() and (partial / "checkpoint/shard").exists()
    assert f"build/{partial.name} is left of an earlier state" in capsys.readouterr().out


def test_a_failed_conversion_leaves_the_last_good_one(tree: Tree) -> None:
    model = tree.model("models/tiny")
    made = tree.quantized(model)
    tree.model("models/tiny", "two")
    (tree.bin / "fail").touch()
    with pytest.raises(ServeError):
        tree.quantized(model)
    assert (made / "weights").read_text() == "one"


def test_killed_between_the_last_two_renames(tree: Tree) -> None:
    model = tree.model("models/tiny")
    made = tree.quantized(model)
    made.rename(f"{made}.{checkpoint_cache.fingerprint(model)[:12]}")
    (tree.build / f"{made.name}.replaced").mkdir()
    assert tree.quantized(model) == made and len(tree.calls()) == 1
    assert [path for path in tree.build.iterdir() if path.is_dir()] == [made]


def test_every_model_has_its_own_output_and_spares_all_others(tree: Tree) -> None:
    names = ["x/q[1]/t", "x/q1/t", "a/b", "a/b-mxfp8-v2", "y/a/b", "long" * 50 + "/m", "é n/…/t"]
    models = [tree.model(name) for name in names]
    made = [tree.quantized(model) for model in models]
    assert len(set(made)) == len(models)
    foreign = [tree.build / "a-b-mxfp8-mine", tree.build / f"{made[2].name}-mine"]
    for folder in foreign:
        folder.mkdir()
    for model in models:
        (model / "weights").write_text("two")
        tree.quantized(model)
    assert all((folder / "weights").read_text() == "two" for folder in made)
    assert all(folder.is_dir() for folder in foreign)
    assert all(len(folder.name) < 100 for folder in made)


def test_a_link_to_a_model_shares_its_output(tree: Tree) -> None:
    model = tree.model("models/tiny")
    (tree.root / "link").symlink_to(model)
    assert tree.quantized(tree.root / "link") == tree.quantized(model) and len(tree.calls()) == 1


def test_the_lock_is_free_afterwards(tree: Tree) -> None:
    made = tree.quantized(tree.model("models/tiny"))
    with Path(f"{made}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises BlockingIOError while it is held
