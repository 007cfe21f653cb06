import errno
import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_builders import CHANGING_CALLS, REPOSITORY, contents, moe_tensors, rose, write_checkpoint

from vllm_rose_plugin.checkpoint.convert import convert
from vllm_rose_plugin.checkpoint.headers import CheckpointError
from vllm_rose_plugin.checkpoint.plan import Options
from vllm_rose_plugin.cli import UserError
from vllm_rose_plugin.kernels.contracts import Rounding

SHARD = 40_000
Attempt = Callable[..., str]


@pytest.fixture(scope="module")
def attempt() -> Iterator[Attempt]:
    """Convert in a process of its own, killed before a system call; "killed" or an exit code."""
    script = Path(__file__).with_name("interrupted_converter.py")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdin is not None and process.stdout is not None

    def run(source: Path, destination: Path, *, shard: int = SHARD, workers: int = 2, **kill: int) -> str:
        request = {"source": str(source), "destination": str(destination), "shard": shard, "workers": workers, **kill}
        process.stdin.write(json.dumps(request) + "\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        answer: str = process.stdout.readline().strip()  # type: ignore[union-attr]
        return answer

    yield run
    process.stdin.close()
    process.wait(timeout=30)


def assert_absent_or_complete(destination: Path, expected: dict[str, bytes]) -> None:
    """DST shows nothing until it is whole, and what is under construction never has a config."""
    if destination.exists():
        assert contents(destination) == expected
    assert not list(destination.parent.glob("*.partial/config.json"))


def test_killed_before_every_change_on_disk(tmp_path: Path, attempt: Attempt) -> None:
    tensors = {n: t for n, t in moe_tensors(experts=1).items() if "layers.1.mlp" in n or "layers.1.input" in n}
    tensors = {name.replace("layers.1", "layers.0"): tensor for name, tensor in tensors.items()}
    source = write_checkpoint(tmp_path / "src", tensors)
    options = Options(max_shard_bytes=5000)
    convert(source=source, destination=tmp_path / "whole", options=options, progress=False)
    expected = contents(tmp_path / "whole")
    assert len([name for name in expected if name.endswith(".safetensors")]) > 1
    destination = tmp_path / "dst"
    call = 0
    while (answer := attempt(source, destination, shard=5000, workers=1, call=call)) == "killed":
        assert_absent_or_complete(destination, expected)
        # Once the plan is removed there is nothing to resume: DST is whole, and DST.partial empty.
        over = destination.exists() and not (tmp_path / "dst.partial" / "plan.json").exists()
        assert attempt(source, destination, shard=5000) == ("3" if over else "0"), f"resumed after call {call}"
        assert contents(destination) == expected, f"resumed after call {call}"
        assert not (tmp_path / "dst.partial").exists()
        shutil.rmtree(destination)
        call += 1
    assert answer == "0"
    assert call > 30


def test_killed_again_and_again_at_random(tmp_path: Path, attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, several kills in a row, each before a system call drawn at random from a whole conversion's."""
    source = write_checkpoint(tmp_path / "src", moe_tensors(hidden=128, intermediate=128, experts=8), files=3)
    calls = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return call(*args, **kwargs)

        return wrapper

    for name in CHANGING_CALLS:
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    convert(source=source, destination=tmp_path / "whole", options=Options(max_shard_bytes=SHARD), progress=False)
    monkeypatch.undo()
    expected = contents(tmp_path / "whole")
    generator, kills, resumed = random.Random(0), 0, 0
    for trial in range(6):
        destination = tmp_path / f"dst{trial}"
        for _ in range(4):
            # What is finished isn't written again: a resumed conversion may end before the call that was drawn.
            if attempt(source, destination, call=generator.randrange(calls)) != "killed":
                break
            kills += 1
            assert_absent_or_complete(destination, expected)
            resumed += bool(list((tmp_path / f"{destination.name}.partial").glob("*.done.json")))
        if not destination.exists():
            assert attempt(source, destination) == "0"
        assert contents(destination) == expected
    assert kills >= 6 and resumed >= 3  # the first attempt of each trial can't end before its call


@pytest.fixture
def unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A conversion that broke after its first shards, by a disk that filled up."""
    source = write_checkpoint(tmp_path / "src", moe_tensors(), files=3)
    pwrite, count = os.pwrite, 0

    def full(*args: Any) -> int:
        nonlocal count
        count += 1
        if count > 25:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UserError, match=r"no space left while writing .*run the same command again"):
        rose("quantize", source, tmp_path / "dst")
    monkeypatch.setattr(os, "pwrite", pwrite)
    assert list((tmp_path / "dst.partial").glob("*.done.json"))
    assert not (tmp_path / "dst").exists()
    return source


def test_goes_on_after_a_full_disk(unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rose("quantize", unfinished, tmp_path / "dst") == 0
    resumed = capsys.readouterr().out
    assert rose("quantize", unfinished, tmp_path / "whole") == 0
    whole = capsys.readouterr().out
    assert contents(tmp_path / "dst") == contents(tmp_path / "whole")
    table = [line for line in resumed.splitlines() if "resumed" not in line and "wrote" not in line]
    assert table == [line for line in whole.splitlines() if "wrote" not in line]  # errors of earlier shards included
    assert "resumed: " in resumed


def test_finished_shards_are_not_written_again(unfinished: Path, tmp_path: Path) -> None:
    partial = tmp_path / "dst.partial"
    done = [partial / "checkpoint" / path.name.removesuffix(".done.json") for path in partial.glob("*.done.json")]
    inodes = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in done}
    assert rose("quantize", unfinished, tmp_path / "dst") == 0
    for name, seen in inodes.items():
        now = (tmp_path / "dst" / name).stat()
        assert (now.st_ino, now.st_mtime_ns) == seen


@pytest.mark.parametrize("damage", ["short", "header", "manifest", "gone"])
def test_damaged_shards_are_written_again(unfinished: Path, tmp_path: Path, damage: str) -> None:
    manifest = next((tmp_path / "dst.partial").glob("*.done.json"))
    shard = tmp_path / "dst.partial" / "checkpoint" / manifest.name.removesuffix(".done.json")
    data = shard.read_bytes()
    if damage == "short":
        shard.write_bytes(data[:-1])
    elif damage == "header":
        shard.write_bytes(data[:20] + b"?" + data[21:])
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        shard.unlink()
    assert rose("quantize", unfinished, tmp_path / "dst") == 0
    assert rose("quantize", unfinished, tmp_path / "whole") == 0
    assert contents(tmp_path / "dst") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--rounding", "floor"), "--rounding was 'rceil' and is now 'floor'"),
        (("--format", "compressed-tensors"), "--format was 'modelopt' and is now 'compressed-tensors'"),
        (("--ignore", "*self_attn*"), "--ignore was [] and is now ['*self_attn*']"),
    ],
)
def test_other_options_are_refused(unfinished: Path, tmp_path: Path, arguments: tuple[str, ...], named: str) -> None:
    before = contents(tmp_path)
    with pytest.raises(UserError) as error:
        rose("quantize", unfinished, tmp_path / "dst", *arguments)
    assert named in str(error.value)
    assert contents(tmp_path) == before


def test_another_source_is_refused(unfinished: Path, tmp_path: Path) -> None:
    path = unfinished / "model-00003-of-00003.safetensors"
    os.utime(path, ns=(1, 1))
    with pytest.raises(UserError, match=r"the source .* has changed since"):
        rose("quantize", unfinished, tmp_path / "dst")


def test_more_workers_may_finish_it(unfinished: Path, tmp_path: Path) -> None:
    assert rose("quantize", unfinished, tmp_path / "dst", "--workers", 3) == 0


def test_the_second_converter_is_refused(unfinished: Path, tmp_path: Path) -> None:
    with (tmp_path / "dst.partial" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = contents(tmp_path)
        with pytest.raises(UserError, match="another rose quantize is writing"):
            rose("quantize", unfinished, tmp_path / "dst")
        assert contents(tmp_path) == before
    assert rose("quantize", unfinished, tmp_path / "dst") == 0


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "src", moe_tensors(), files=3)
    fsync, count = os.fsync, 0

    def interrupted(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count == 12:
            raise KeyboardInterrupt
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(source=source, destination=tmp_path / "dst", progress=False)
    monkeypatch.setattr(os, "fsync", fsync)
    assert list((tmp_path / "dst.partial").glob("*.done.json"))
    assert convert(source=source, destination=tmp_path / "dst", progress=False).resumed_shards > 0


def test_a_source_that_shrinks_meanwhile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "src", {**moe_tensors(), "model.z.weight": torch.zeros(64)})
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 0 if offset > 90_000 else preadv(fd, buffers, offset))
    with pytest.raises(CheckpointError, match="truncated during the conversion"):
        convert(source=source, destination=tmp_path / "dst", options=Options(rounding=Rounding.FLOOR), progress=False)
