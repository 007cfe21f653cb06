"""Object files run on any CPU of their architecture, whatever they were built on."""

import json
import platform

import pytest
import tiny_kernel

from vllm_rose_plugin.kernels.jit import compile as jit
from vllm_rose_plugin.kernels.jit.fingerprint import host_features
from vllm_rose_plugin.kernels.jit.portable import make_portable

VZEROUPPER = bytes.fromhex("c5f877")
"""Follows AVX code in every function that has any."""

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="looks for instructions of x86-64")


def exported(path, *, portable: bool) -> bytes:
    made = jit._run_compiler(tiny_kernel.TinyConfig(), tiny_kernel.build, "sm_90a")
    if portable:
        assert make_portable(made) == frozenset()
    made.export_to_c(object_file_path=str(path), function_name="tiny")
    return path.read_bytes()


def test_host_code_has_no_avx(tmp_path):
    assert "avx" in host_features()[1], "on a CPU without AVX this shows nothing"
    assert VZEROUPPER in exported(tmp_path / "native.o", portable=False)
    assert VZEROUPPER not in exported(tmp_path / "portable.o", portable=True)


def test_stored_objects_ask_nothing_of_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path))
    jit.clear_memory()
    jit.compile(family="tiny", config=tiny_kernel.TinyConfig(factor=7.0), build=tiny_kernel.build, target="sm_90a")
    (description,) = tmp_path.glob("kernels/tiny/*.json")
    assert json.loads(description.read_text())["cpu"] == []


def test_every_function_is_marked():
    made = jit._run_compiler(tiny_kernel.TinyConfig(), tiny_kernel.build, "sm_90a")
    make_portable(made)
    functions = [each.operation for each in made.ir_module.body.operations if each.operation.name == "llvm.func"]
    assert len(functions) > 10
    for function in functions:
        assert str(function.attributes["target_cpu"]) == '"x86-64"'
        assert "+sse2" in str(function.attributes["target_features"])


def test_what_cannot_be_marked_serves_this_cpu_only(caplog):
    made = jit._run_compiler(tiny_kernel.TinyConfig(), tiny_kernel.build, "sm_90a")
    for each in list(made.ir_module.body.operations):
        if each.operation.name == "llvm.func" and "__tvm_ffi_" in str(each.operation.attributes["sym_name"]):
            each.operation.erase()
    assert make_portable(made) is None
    assert make_portable(object()) is None
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "cached kernels will serve this kind of CPU only"
    ] * 2
