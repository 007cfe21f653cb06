"""The kernel cache on disk, with the real compiler; forgetting the kernels in memory stands for a new process."""

import json
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import tiny_kernel

from vllm_rose_plugin.kernels.jit import compile as jit
from vllm_rose_plugin.kernels.jit import install, store

RUNTIME_SYMBOLS = ("TVMFFI", "CuteDSLRT_", "_cuda", "_cuKernel", "cuda_dialect_")


class Starts:
    """Processes that start one after the other with the same cache folder."""

    def __init__(self, folder, caplog):
        self.folder = folder
        self._caplog = caplog

    def start(self, *configs, family="tiny", target="sm_90a"):
        """(compiled, loaded, warnings) of a start that wants these kernels."""
        jit.clear_memory()
        jit.counts = jit.Counts()
        self._caplog.clear()
        for config in configs or (tiny_kernel.TinyConfig(),):
            kernel = jit.compile(family=family, config=config, build=tiny_kernel.build, target=target)
            assert kernel is jit.compile(family=family, config=config, build=tiny_kernel.build, target=target)
        return jit.counts.compiled, jit.counts.loaded, [record.getMessage() for record in self._caplog.records]

    def objects(self):
        return sorted(self.folder.glob("kernels/*/*.o"))


@pytest.fixture
def starts(tmp_path, monkeypatch, caplog):
    folder = tmp_path / "cache"
    monkeypatch.setenv("ROSE_CACHE_DIR", str(folder))
    monkeypatch.setattr(store, "_warned", set())
    monkeypatch.setattr(jit, "counts", jit.Counts())
    return Starts(folder, caplog)


def truncate(path):
    path.write_bytes(path.read_bytes()[:1000])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_by_another_kernel(path):
    other = next(candidate for candidate in path.parent.glob("*.o") if candidate != path)
    shutil.copy(other, path)
    shutil.copy(other.with_suffix(".json"), path.with_suffix(".json"))


def write_another_cpu(path):
    description = json.loads(path.with_suffix(".json").read_text())
    description["cpu"].append("avx9999")
    path.with_suffix(".json").write_text(json.dumps(description))


def empty_description(path):
    path.with_suffix(".json").write_text("{}")


def name_another_machine(path):
    description = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps({**description, "machine": "vax"}))


def write_text_over_it(path):
    path.write_text("no object file")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (truncate, "doesn't match its checksum"),
        (flip_a_bit, "doesn't match its checksum"),
        (write_text_over_it, "doesn't match its checksum"),
        (replace_by_another_kernel, "belongs to another key"),
        (write_another_cpu, "avx9999"),
        (name_another_machine, "built on vax"),
        (empty_description, "description is missing or damaged"),
    ],
)
def test_damaged_and_foreign_files_are_compiled_again(starts, damage, named):
    mine, other = tiny_kernel.TinyConfig(factor=3.0), tiny_kernel.TinyConfig(factor=4.0)
    assert starts.start(mine) == (1, 0, [])
    path = starts.objects()[0]
    assert starts.start(other) == (1, 0, [])
    damage(path)
    compiled, loaded, warnings = starts.start(mine)
    assert (compiled, loaded) == (1, 0)
    assert all(named in text for text in warnings) and warnings
    assert starts.start(mine, other) == (0, 2, [])


def test_object_that_passes_every_check_and_does_not_load(starts):
    """A checksum says that a file is what was written, not that it can be loaded."""
    starts.start()
    path = starts.objects()[0]
    path.write_bytes(b"not an ELF file")
    description = json.loads(path.with_suffix(".json").read_text())
    description["sha256"] = store.hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_suffix(".json").write_text(json.dumps(description))
    compiled, _, warnings = starts.start()
    assert compiled == 1 and "can't load" in warnings[0]
    assert starts.start() == (0, 1, [])


def test_unwritable_folder_costs_one_warning(starts):
    starts.folder.write_text("a file where the folder should be")
    compiled, loaded, warnings = starts.start(tiny_kernel.TinyConfig(factor=1.0), tiny_kernel.TinyConfig(factor=2.0))
    assert (compiled, loaded, len(warnings)) == (2, 0, 1)
    assert str(starts.folder) in warnings[0] and "ROSE_CACHE_DIR" in warnings[0]


def test_full_disk_costs_one_warning(starts, monkeypatch):
    def no_space(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", no_space)
    compiled, _, warnings = starts.start(tiny_kernel.TinyConfig(factor=1.0), tiny_kernel.TinyConfig(factor=2.0))
    assert (compiled, len(warnings)) == (2, 1) and "No space left on device" in warnings[0]
    assert not starts.objects() and not list(starts.folder.glob("kernels/tiny/.new-*"))


def test_file_system_without_locks(starts, monkeypatch):
    def no_locks(handle, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(store.fcntl, "flock", no_locks)
    compiled, _, warnings = starts.start()
    assert compiled == 1 and len(warnings) == 1 and "No locks available" in warnings[0]
    assert starts.start() == (0, 1, [])


def test_leftovers_of_a_killed_writer_go(starts):
    starts.start()
    path = starts.objects()[0]
    leftover = path.parent / f".new-{path.stem}-abc"
    leftover.mkdir()
    truncate(path)
    starts.start()
    assert not leftover.exists()


def test_everything_in_the_key_counts(starts, monkeypatch):
    config = tiny_kernel.TinyConfig()
    assert starts.start(target="sm_100a")[0] == 1
    assert starts.start(target="sm_100f")[0] == 1
    assert starts.start(replace(config, factor=3.5), target="sm_100a")[0] == 1
    assert starts.start(replace(config, threads=64), target="sm_100a")[0] == 1
    assert starts.start(target="sm_100a", family="other")[0] == 1
    with monkeypatch.context() as patch:
        patch.setenv("CUTE_DSL_LINEINFO", "1")
        assert starts.start(target="sm_100a")[0] == 1
    with monkeypatch.context() as patch:
        patch.setattr(jit, "compiler_versions", lambda: "nvidia-cutlass-dsl=9.9.9")
        assert starts.start(target="sm_100a")[0] == 1
    assert len(starts.objects()) == 7
    assert starts.start(target="sm_100a") == (0, 1, [])


def test_sources_changed_since_the_process_started_stay_off_the_disk(starts, monkeypatch):
    monkeypatch.setattr(jit, "_STARTED", 0.0)
    assert starts.start()[0] == 1
    assert not starts.objects()


def test_object_needs_only_the_dsl_runtime_and_tvm_ffi(starts):
    starts.start()
    command = ["nm", "--undefined-only", *starts.objects()]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = {line.split()[-1] for line in lines if " U " in line} - {"_GLOBAL_OFFSET_TABLE_"}
    assert names and all(name.startswith(RUNTIME_SYMBOLS) for name in names)


def test_default_folder_is_under_vllms_cache_root(monkeypatch, tmp_path):
    monkeypatch.delenv("ROSE_CACHE_DIR", raising=False)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "root"))
    assert store.cache_folder() == tmp_path / "root/rose"
    monkeypatch.delenv("VLLM_CACHE_ROOT")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.cache_folder() == tmp_path / "xdg/vllm/rose"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.cache_folder() == tmp_path / ".cache/vllm/rose"


def test_no_home_at_all(monkeypatch, caplog):
    def no_home(path):
        raise RuntimeError("Could not determine home directory.")

    for name in ("ROSE_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(store, "_warned", set())
    monkeypatch.setattr(Path, "expanduser", no_home)
    assert store.cache_folder() is None and store.open_store() is None
    assert ["ROSE_CACHE_DIR" in record.getMessage() for record in caplog.records] == [True]


def test_description_is_readable(starts):
    starts.start()
    description = json.loads(starts.objects()[0].with_suffix(".json").read_text())
    assert description["key"]["config"] == "TinyConfig(factor=3.0, threads=128)"
    assert description["key"]["target"] == "sm_90a"
    assert "nvidia-cutlass-dsl=" in description["key"]["compiler"]


def build_with_default(config, extra=1):
    return tiny_kernel.build(config)


def test_builds_that_could_carry_values_past_the_key_are_refused():
    captured = 3

    def inner(config):
        return tiny_kernel.build(config), captured

    for build in (inner, lambda config: tiny_kernel.build(config), build_with_default):
        with pytest.raises(TypeError, match="put it into the config"):
            jit.compile(family="tiny", config=tiny_kernel.TinyConfig(), build=build, target="sm_90a")


def test_family_is_a_name():
    with pytest.raises(ValueError, match=r"\.\./evil"):
        jit.compile(family="../evil", config=tiny_kernel.TinyConfig(), build=tiny_kernel.build, target="sm_90a")


def build_on_explicit_stream(config):
    function, arguments = tiny_kernel.build(config)
    return function, (*arguments[:-1], tiny_kernel.make_fake_stream())


def test_stream_that_torch_does_not_follow_is_refused(starts):
    with pytest.raises(TypeError, match="use_tvm_ffi_env_stream=True"):
        jit.compile(family="tiny", config=tiny_kernel.TinyConfig(), build=build_on_explicit_stream, target="sm_90a")


@dataclass(frozen=True)
class FakeDistribution:
    name: str
    version: str


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({}, "is not installed"),
        ({"nvidia-cutlass-dsl": "4.8.0", "nvidia-cutlass-dsl-libs-cu13": "4.6.1"}, "libs-cu13 4.6.1"),
        ({"nvidia-cutlass-dsl": "4.2.1"}, "4.2.1 is too old"),
    ],
)
def test_wrong_installs_are_named(monkeypatch, parts, named):
    found = [FakeDistribution(name, version) for name, version in parts.items()]
    monkeypatch.setattr(install.metadata, "distributions", lambda: found)
    install.check_install.cache_clear()
    with pytest.raises(RuntimeError, match=named):
        install.check_install()
    install.check_install.cache_clear()


def test_installed_dsl_is_in_order():
    assert install.install_problems() == []


def test_rubin_target_needs_a_dsl_that_knows_it(monkeypatch):
    monkeypatch.setattr(install.metadata, "version", lambda name: "4.7.2")
    with pytest.raises(RuntimeError, match=r"sm_107a needs nvidia-cutlass-dsl 4\.8.*4\.7\.2"):
        install.require_target("sm_107a")
    install.require_target("sm_100f")
