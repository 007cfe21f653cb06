"""What loading the plugin adds to vLLM's registries, in both versions: our names, once each, and nothing else."""

import pytest
from vllm_probe import run_probe

from vllm_rose_plugin.config import BACKEND
from vllm_rose_plugin.seams.qk_norm import MODELS
from vllm_rose_plugin.seams.table import seams

pytestmark = pytest.mark.slow
OURS = "RoseCuteDslMxfp8LinearKernel"


@pytest.fixture
def loaded(probe, version):
    return probe(version, "registries")


@pytest.fixture
def stock(probe, version):
    return probe(version, "registries", VLLM_ROSE_DISABLE="1")


def test_probe_sees_the_version_it_asks_for(loaded, version):
    assert loaded["version"].startswith(version + ".")


def test_every_seam_of_this_version_is_applied(loaded, version):
    assert loaded["states"] == {seam.name: "applied" for seam in seams(version)}
    assert ("mxfp8_moe_weights_quark" in loaded["states"]) == (version == "0.33")


def test_names_are_added_to_the_command_line_and_types(loaded, stock):
    for key in ("cli_moe", "cli_linear", "literal_moe", "literal_linear"):
        assert sorted(loaded[key]) == sorted([*stock[key], BACKEND]), key
    assert loaded["rose_accepted"] is loaded["per_quant_accepted"] is loaded["speculative_accepted"] is None


def test_unknown_names_are_rejected_with_vllms_message(loaded, stock):
    for key in ("unknown_moe", "unknown_linear", "unknown_speculative"):
        head, _, legal = stock[key].partition("Input should be ")
        assert "no_such_backend" in legal
        # The same sentence, with one more legal name at its end.
        last = legal[: legal.index(" [type=")].split(" or ")[-1]
        expected = legal.replace(f" or {last}", f", {last} or '{BACKEND}'", 1)
        assert loaded[key] == f"{head}Input should be {expected}"


def test_registries_differ_from_stock_by_our_entries_only(loaded, stock):
    assert loaded["moe_names"] == {**stock["moe_names"], BACKEND: "TRITON_MXFP8"}
    assert loaded["supported_order"] == stock["supported_order"]
    assert loaded["linear_backends"] == {**stock["linear_backends"], BACKEND: [OURS]}
    platforms = {**{platform: [] for platform in ("CUDA", "CPU")}, **stock["linear_kernels"]}
    assert loaded["linear_kernels"] == {
        platform: [*kernels, OURS] if platform in ("CUDA", "CPU") else kernels
        for platform, kernels in platforms.items()
    }


def test_two_models_of_the_registry_are_ours_and_one_is_new(loaded, stock):
    ours = {name: f"vllm_rose_plugin.layers.{module}:{name}" for name, module in MODELS.items()}
    ours["Qwen3MoeMTP"] = "vllm_rose_plugin.layers.qwen3_moe_mtp:Qwen3MoeMTP"
    assert loaded["models"] == {**stock["models"], **ours}
    assert {name: stock["models"][name] for name in MODELS} == {
        name: f"vllm.model_executor.models.{module}:{name}" for name, module in MODELS.items()
    }


def test_each_function_is_wrapped_once_and_worker_has_its_method(loaded, stock):
    assert set(loaded["wrappers"].values()) == {1}
    assert set(stock["wrappers"].values()) == {0}
    assert loaded["worker_stats"] and not stock["worker_stats"]


def test_disable_switches_everything_off(stock):
    assert stock["states"] == {}
    assert BACKEND not in str({key: value for key, value in stock.items() if "accepted" not in key})
    assert all(BACKEND in stock[key] for key in ("rose_accepted", "per_quant_accepted", "speculative_accepted"))


def test_no_cuda_context(loaded):
    assert (loaded["cuda_starts"], loaded["cuda_starts_are_seen"]) == (0, 1)


def test_registering_again_changes_nothing(probe, loaded, version):
    assert probe(version, "registries", "2") == loaded


def test_three_spawned_processes_agree(probe, version):
    answers = probe(version, "spawned")["answers"]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0]["version"].startswith(version)
    assert answers[0]["moe"].count(BACKEND) == answers[0]["linear"].count(BACKEND) == 1
    assert answers[0]["names"].count(BACKEND) == 1
    assert answers[0]["kernels"]["CUDA"].count(OURS) == answers[0]["kernels"]["CPU"].count(OURS) == 1


def test_a_changed_target_is_named(tmp_path):
    """A vLLM whose function has other parameters than the seam needs: an error that names plugin and seam."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.abc, sys\n"
        "name = 'vllm.model_executor.layers.fused_moe.oracle.mxfp8'\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, fullname, path, target=None):\n"
        "        if fullname != name: return None\n"
        "        from importlib.machinery import PathFinder\n"
        "        spec = PathFinder.find_spec(fullname, path, target)\n"
        "        run = spec.loader.exec_module\n"
        "        def exec_module(module):\n"
        "            run(module)\n"
        "            module._select_kernel_cls = lambda config, backend: None\n"
        "        spec.loader.exec_module = exec_module\n"
        "        return spec\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    with pytest.raises(AssertionError, match=r"vllm_rose_plugin can't attach .* seam 'mxfp8_moe_selection'.*_select_"):
        run_probe("0.32", "registries", pythonpath=tmp_path)
