"""`rose mtp` interrupted anywhere, on full disks, without hard links, and where somebody else works."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_builders import contents, moe_tensors, rose, write_checkpoint
from mtp_builders import TARGET_CONFIG, draft_tensors, sorted_config, stored, write_draft, write_target

from vllm_rose_plugin.checkpoint import mtp
from vllm_rose_plugin.checkpoint.assembly import Assembly
from vllm_rose_plugin.checkpoint.headers import CheckpointError

CALLS = ("link", "fsync", "replace", "rename", "mkdir", "unlink")
MARK = ".rose-assembly.json"


class Killed(BaseException):
    """Nothing catches it, as nothing catches a kill."""


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[Path], Any]:
    """One that links and copies, and one that cuts a file in two."""
    if request.param == "attach":
        target, draft = write_target(tmp_path / "t", files=3), write_draft(tmp_path / "d")
        return lambda out: mtp.attach(target=target, draft=draft, destination=out)
    tensors = moe_tensors() | draft_tensors()
    config = sorted_config(TARGET_CONFIG | {"num_nextn_predict_layers": 1})
    source = write_checkpoint(tmp_path / "s", tensors, config=config, files=2)
    return lambda out: mtp.detach(target=source, destination=out)


@pytest.mark.parametrize("job", ["attach", "detach"], indirect=True)
def test_killed_before_every_change_on_disk(
    tmp_path: Path, job: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job(tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    out, number, killed = tmp_path / "out", 0, True
    while killed:
        done = 0

        def guarded(call: Callable[..., Any], number: int = number) -> Callable[..., Any]:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                nonlocal done
                done += 1
                if done > number:
                    raise Killed
                return call(*args, **kwargs)

            return wrapper

        with monkeypatch.context() as patch:
            for name in CALLS:
                call = getattr(os, name) if name != "fsync" else lambda descriptor: None  # slow, and no power is cut
                patch.setattr(os, name, guarded(call))
            try:
                job(out)
                killed = False
            except Killed:
                pass
        if out.exists():
            assert {n: d for n, d in contents(out).items() if n != MARK} == expected, f"after call {number}"
        else:
            assert killed
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", lambda descriptor: None)
                job(out)
            assert contents(out) == expected, f"resumed after call {number}"
        assert not (tmp_path / "out.partial").exists()
        shutil.rmtree(out)
        number += 1
    assert number > 15


@pytest.mark.parametrize("job", ["attach"], indirect=True)
def test_finished_files_are_not_written_again(
    tmp_path: Path, job: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)  # links go first, then the tokenizer
        with pytest.raises(
            CheckpointError, match=r"no space left while writing .*run the same command again to resume"
        ):
            job(tmp_path / "out")
    done = {path.name: path.stat().st_ino for path in (tmp_path / "out.partial").glob("*.safetensors")}
    assert len(done) == 4 and not (tmp_path / "out.partial" / "config.json").exists()
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full)
        summary = job(tmp_path / "out")
    assert {path.name: path.stat().st_ino for path in (tmp_path / "out").glob("*.safetensors")} == done
    assert summary.written.linked > 0 and summary.written.copied == 0


def test_a_source_that_shrinks_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = sorted_config(TARGET_CONFIG | {"num_nextn_predict_layers": 1})
    source = write_checkpoint(tmp_path / "s", moe_tensors() | draft_tensors(), config=config)
    file = source / "model.safetensors"
    monkeypatch.setattr(Assembly, "_require_space", lambda self, size: os.truncate(file, file.stat().st_size - 9))
    with pytest.raises(CheckpointError, match=r"model\.safetensors ended at byte \d+: it was truncated meanwhile"):
        mtp.detach(target=source, destination=tmp_path / "out")
    made = sorted(str(path.relative_to(tmp_path / "out.partial")) for path in (tmp_path / "out.partial").rglob("*.*"))
    assert made == [MARK, "mtp/model.safetensors.rose-tmp", "target/model.safetensors"]


@pytest.mark.parametrize("why", ["--copy", "another file system"])
def test_copies_share_nothing(tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = write_target(tmp_path / "t"), write_draft(tmp_path / "d")
    if why != "--copy":

        def refuse(*args: Any) -> None:
            raise OSError(errno.EXDEV, "Invalid cross-device link")

        monkeypatch.setattr(os, "link", refuse)
    summary = mtp.attach(target=target, draft=draft, destination=tmp_path / "out", copy=why == "--copy")
    assert summary.written.linked == 0 and summary.written.copied > 0
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "out").iterdir())
    assert stored(tmp_path / "out") == stored(target) | stored(draft)


def test_links_of_symbolic_links_are_links_of_files(tmp_path: Path) -> None:
    """A Hugging Face cache holds symbolic links to blobs."""
    target, draft = write_target(tmp_path / "t"), write_draft(tmp_path / "d")
    blob = (target / "model.safetensors").rename(tmp_path / "blob")
    (target / "model.safetensors").symlink_to(blob)
    mtp.attach(target=target, draft=draft, destination=tmp_path / "out")
    made = tmp_path / "out" / "model.safetensors"
    assert not made.is_symlink() and made.stat().st_ino == blob.stat().st_ino
    assert not (tmp_path / "out" / "tokenizer.json").samefile(target / "tokenizer.json")


@pytest.mark.parametrize("job", ["attach"], indirect=True)
def test_a_place_of_somebody_else(tmp_path: Path, job: Callable[[Path], Any]) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "plan.json").write_text("precious")
    with pytest.raises(CheckpointError, match=r"out\.partial is in the way: it holds plan\.json"):
        job(tmp_path / "out")
    assert contents(partial) == {"plan.json": b"precious"}
    (partial / "plan.json").unlink()
    with (partial / MARK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another rose mtp is writing"):
            job(tmp_path / "out")
    job(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("job", ["attach"], indirect=True)
def test_a_stray_file_and_a_changed_source(
    tmp_path: Path, job: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(CheckpointError, match=r"Input/output error.*run the same command again"):
            job(tmp_path / "out")
    (tmp_path / "out.partial" / "mine.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"holds mine\.txt, which isn't part of OUT"):
        job(tmp_path / "out")
    (tmp_path / "out.partial" / "mine.txt").unlink()
    os.utime(tmp_path / "t" / "config.json", (1, 1))
    with pytest.raises(CheckpointError, match="unfinished OUT, but TARGET has changed since"):
        job(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = write_target(tmp_path / "t"), write_draft(tmp_path / "d")
    assert rose("mtp", "attach", target, draft, tmp_path / "out", "--copy") == 0
    assert rose("mtp", "detach", tmp_path / "out", tmp_path / "apart") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == f"wrote {tmp_path}/out" and lines[1].startswith("weights: 0.000 GB as hard links")
    assert lines[-1] == f"wrote {tmp_path}/apart/target and {tmp_path}/apart/mtp"
