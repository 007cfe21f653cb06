"""``rose cache``."""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from vllm_rose_plugin.cli import main
from vllm_rose_plugin.kernels.jit.store import Key, Store
from vllm_rose_plugin.kernels.jit.verdicts import Verdict, VerdictFile


def key(family="qk_norm", config="Config(width=4)"):
    return Key(family, "sm_90a", config, "module.build", "digest", "nvidia-cutlass-dsl=4.8.0", "")


def fill(folder, *keys):
    store = Store(folder / "kernels")
    for item in keys:
        with store.locked(item) as writable:
            assert writable
            assert store.put(item, lambda path, item=item: Path(path).write_text(item.config * 50))
    return store


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("ROSE_CACHE_DIR", str(folder))
    fill(folder, key(), key(config="Config(width=8)"), key(family="gemm"))
    VerdictFile(family="gemm", situation="here").write(Verdict("good", {}, {}))
    return folder


def test_list(cache, capsys):
    assert main(["cache", "list"]) == 0
    out = capsys.readouterr().out
    assert "Config(width=8)" in out and "sm_90a" in out
    assert out.splitlines()[-1].startswith("3 kernels, 0.0 MB, and 1 verdicts in ")
    assert main(["cache", "list", "--json"]) == 0
    facts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(fact["family"] for fact in facts) == ["gemm", "qk_norm", "qk_norm"]
    assert all(fact["target"] == "sm_90a" and fact["bytes"] > 0 and not fact["fault"] for fact in facts)


def test_list_shows_what_cannot_be_used(cache, capsys):
    Store(cache / "kernels").path(key()).write_bytes(b"")
    assert main(["cache", "list"]) == 1
    assert "can't be used: its content doesn't match its checksum" in capsys.readouterr().out


def test_list_of_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "none"))
    assert main(["cache", "list"]) == 0
    assert capsys.readouterr().out.startswith("0 kernels")
    assert not (tmp_path / "none").exists()


def test_reader_that_goes_away(cache):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "vllm_rose_plugin.cli", "cache", "list"]
    # unbuffered, so that the first line meets the closed pipe
    done = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_clear_of_a_family_that_is_not_there_names_those_that_are(cache, capsys):
    assert main(["cache", "clear", "--family", "qk_nrm"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no qk_nrm is there; kernels of gemm, qk_norm are"


def test_clear(cache, capsys):
    assert main(["cache", "clear", "--family", "qk_norm"]) == 0
    assert "removed 2 kernels and 0 verdicts" in capsys.readouterr().out
    assert [entry.path.parent.name for entry in Store(cache / "kernels").entries()] == ["gemm"]
    assert main(["cache", "clear"]) == 0
    assert "removed 1 kernels and 1 verdicts" in capsys.readouterr().out
    assert not [path for path in cache.rglob("*") if path.is_file()]
    assert main(["cache", "clear", "--family", "../x"]) == 2


def test_clear_leaves_a_lock_that_is_held(cache):
    store = Store(cache / "kernels")
    with store.locked(key()):
        store.clear()
        assert store.path(key()).with_suffix(".lock").exists()
    store.clear()
    assert not store.path(key()).with_suffix(".lock").exists()


def test_export_and_import(cache, tmp_path, monkeypatch, capsys):
    archive = tmp_path / "kernels.tar.gz"
    assert main(["cache", "export", str(archive)]) == 0
    assert "wrote 3 kernels and 1 verdicts" in capsys.readouterr().out
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "other"))
    assert main(["cache", "import", str(archive)]) == 0
    assert "took in 3 kernels and 1 verdicts" in capsys.readouterr().out
    other = Store(tmp_path / "other/kernels")
    for item in (key(), key(config="Config(width=8)"), key(family="gemm")):
        assert other.get(item).read_bytes() == Store(cache / "kernels").get(item).read_bytes()
    assert VerdictFile(family="gemm", situation="here").read() == Verdict("good", {}, {})
    assert not list((tmp_path / "other").glob(".import-*"))


def test_tuned_choices_travel_and_go_with_the_gemm(cache, tmp_path, monkeypatch, capsys):
    (cache / "tuned").mkdir()
    (cache / "tuned/NVIDIA_Test_1.json").write_text("{}")
    assert main(["cache", "list"]) == 0
    assert capsys.readouterr().out.endswith("choices tuned for 1 kinds of device\n")
    archive = tmp_path / "kernels.tar.gz"
    assert main(["cache", "export", str(archive)]) == 0
    assert "wrote 3 kernels and 1 verdicts, choices tuned for 1 kinds" in capsys.readouterr().out
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "other"))
    assert main(["cache", "import", str(archive)]) == 0
    assert (tmp_path / "other/tuned/NVIDIA_Test_1.json").read_text() == "{}"
    assert main(["cache", "clear", "--family", "qk_norm"]) == 0
    assert (tmp_path / "other/tuned/NVIDIA_Test_1.json").exists()
    assert main(["cache", "clear", "--family", "gemm"]) == 0
    assert not (tmp_path / "other/tuned/NVIDIA_Test_1.json").exists()


def test_export_leaves_damaged_kernels_out(cache, tmp_path, capsys):
    Store(cache / "kernels").path(key()).write_bytes(b"")
    assert main(["cache", "export", str(tmp_path / "kernels.tar")]) == 1
    out = capsys.readouterr().out
    assert "wrote 2 kernels" in out and f"left out {key().digest}.o: its content" in out


def test_import_checks_what_it_takes(cache, tmp_path, monkeypatch, capsys):
    archive = tmp_path / "kernels.tar"
    assert main(["cache", "export", str(archive)]) == 0
    rewritten = tmp_path / "rewritten.tar"
    with tarfile.open(archive) as old, tarfile.open(rewritten, "w") as new:
        for member in old:
            content = old.extractfile(member).read()
            if member.name.endswith(f"{key().digest}.o"):
                content = content[:-1] + b"!"
            new.addfile(member, io.BytesIO(content))
        for name in ("../escaped", "kernels/qk_norm/../../escaped.o", "/escaped"):
            new.addfile(tarfile.TarInfo(name), io.BytesIO())
        link = tarfile.TarInfo(f"kernels/qk_norm/{'0' * 32}.o")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        new.addfile(link)
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "a/b"))
    capsys.readouterr()
    assert main(["cache", "import", str(rewritten)]) == 1
    out = capsys.readouterr().out
    assert "took in 2 kernels" in out and out.count("not a file of a kernel cache") == 4
    assert Store(tmp_path / "a/b/kernels").get(key()) is None
    assert not list(tmp_path.rglob("escaped*"))


def test_truncated_archive_imports_nothing(cache, tmp_path, monkeypatch, capsys):
    archive = tmp_path / "kernels.tar.gz"
    main(["cache", "export", str(archive)])
    archive.write_bytes(archive.read_bytes()[:-200])
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "other"))
    assert main(["cache", "import", str(archive)]) == 2
    assert "nothing was imported" in capsys.readouterr().err
    assert not list((tmp_path / "other").rglob("*.o"))
    assert main(["cache", "import", str(tmp_path / "absent.tar")]) == 2
    assert "absent.tar: No such file" in capsys.readouterr().err
