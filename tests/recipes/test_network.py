"""Hardware, ports, transports, what must be equal on both roles, and two recipes on one rack."""

import pytest
from recipe_files import AGGREGATED, DISAGGREGATED, SHIPPED, line_of, write_recipe

from vllm_rose_plugin.recipes.check.environment import KNOWN, ROSE, check_environment
from vllm_rose_plugin.recipes.check.hardware import check_hardware
from vllm_rose_plugin.recipes.check.network import check_kv_transfer, check_ports, check_together
from vllm_rose_plugin.recipes.deployment import processes
from vllm_rose_plugin.recipes.schema import load_recipe

STOCK = {"image": "vllm/vllm-openai", "tag": "v0.33.0"}
SAME = {"block_size": 64, "cache_dtype": "auto", "nixl": "a", "max_model_len": 40960}


def kv_findings(path, *, overlays=(), prefill=SAME, decode=SAME, hybrid=False):
    recipe = load_recipe(path, overlays=overlays)
    configs = {"prefill": prefill, "decode": decode}
    return list(check_kv_transfer(recipe, processes(recipe), configs, hybrid=hybrid))


@pytest.mark.parametrize("overlays", [(), ("nvlink-kv",)])
def test_the_shipped_transports_are_whole(overlays):
    assert not kv_findings(SHIPPED / f"{DISAGGREGATED}.yaml", overlays=overlays)


@pytest.mark.parametrize(
    "overlays, changes, text",
    [
        ((), {"kv_transfer.environment.UCX_TLS": "rc,cuda_copy,cuda_ipc,self,sm"}, "takes KV onto NVLink"),
        ((), {"kv_transfer.environment.UCX_TLS": "rc,cuda_copy,tcp"}, "lets KV fall back to TCP"),
        ((), {"kv_transfer.environment.UCX_TLS": "cuda_copy,self"}, "has no InfiniBand transport"),
        ((), {"kv_transfer.environment.UCX_TLS": "^cuda_ipc"}, "lets UCX choose"),
        ((), {"kv_transfer.environment.UCX_TLS": None}, "lets UCX choose"),
        (
            ("nvlink-kv",),
            {"overlays.nvlink-kv.kv_transfer.environment.UCX_TLS": "cuda_copy,tcp"},
            "no NVLink transport",
        ),
        (
            ("nvlink-kv",),
            {"overlays.nvlink-kv.kv_transfer.environment.UCX_CUDA_IPC_ENABLE_MNNVL": None},
            "must be switched on in UCX",
        ),
        (
            ("nvlink-kv",),
            {"overlays.nvlink-kv.roles.decode.args": {}},
            "plain CUDA memory has no fabric handle",
        ),
    ],
)
def test_a_transport_that_isn_t_what_the_recipe_says(tmp_path, overlays, changes, text):
    found = kv_findings(write_recipe(tmp_path, "transport", changes), overlays=overlays)
    assert found and any(text in finding.problem for finding in found), found


def test_roles_must_agree_on_layout_block_size_cache_and_handshake(tmp_path):
    path = SHIPPED / f"{DISAGGREGATED}.yaml"
    (finding,) = kv_findings(path, decode=SAME | {"block_size": 128})
    assert finding.keys[-1] == "block-size" and finding.value == 128
    (finding,) = kv_findings(path, decode=SAME | {"cache_dtype": "fp8", "nixl": "b"})
    assert finding.keys[-1] == "kv-cache-dtype"
    (finding,) = kv_findings(path, decode=SAME | {"nixl": "b"})
    assert "handshake would refuse" in finding.problem
    path = write_recipe(tmp_path, "layout", {"roles.decode.environment.VLLM_KV_CACHE_LAYOUT": "NHD"})
    (finding,) = kv_findings(path)
    assert finding.value == "NHD" and finding.line == line_of(path, "VLLM_KV_CACHE_LAYOUT")


def test_a_request_that_prefill_takes_is_one_that_decode_takes(tmp_path):
    path = SHIPPED / f"{DISAGGREGATED}.yaml"
    (finding,) = kv_findings(path, decode=SAME | {"max_model_len": 40959})
    assert finding.keys[-1] == "max-model-len" and finding.legal == "40960 or more"
    assert not kv_findings(path, decode=SAME | {"max_model_len": 131072})
    path = write_recipe(tmp_path, "names", {"roles.decode.args.served-model-name": "qwen"})
    (finding,) = kv_findings(path)
    assert finding.line == line_of(path, "served-model-name:", nth=2) and "qwen3-235b-a22b" in finding.problem


def test_hybrid_models_need_one_layout_of_their_convolution_state():
    found = kv_findings(SHIPPED / f"{DISAGGREGATED}.yaml", hybrid=True)
    assert [finding.keys[-1] for finding in found] == ["VLLM_SSM_CONV_STATE_LAYOUT"] * 2
    assert not kv_findings(SHIPPED / "qwen3.5-397b-a17b-mxfp8-gb200-nvl72.yaml", hybrid=True)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"router.port": 8100}, "prefill-0-0 (api) and the router listen on the same port of node 0"),
        # Prefill's rank takes 8199, decode's first four 8200 to 8203.
        ({"kv_transfer.side_channel_port": 8199}, "decode-0-0 (nixl) and decode-0-0 (api)"),
        ({"roles.prefill.args.port": 70000}, "is no port for prefill-0-0"),
        ({"roles.prefill.args.port": "8100"}, "is no port for prefill-0-0"),
        ({"roles.prefill.args.port": 29000}, "prefill-0-0 (api) and the router (metrics) listen on the same port"),
        ({"router.port": 29000}, "is where the router's metrics are"),
    ],
)
def test_ports(tmp_path, changes, text):
    recipe = load_recipe(write_recipe(tmp_path, "ports", changes))
    found = list(check_ports(recipe, processes(recipe)))
    assert found and any(text in str(finding) for finding in found), [str(finding) for finding in found]


def test_a_side_channel_without_room_is_one_finding(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path, "ports", {"kv_transfer.side_channel_port": 65530}))
    (finding,) = check_ports(recipe, processes(recipe))
    assert finding.keys == ("kv_transfer", "side_channel_port") and "for the 17 ports" in finding.problem
    assert finding.legal == "1024 to 65519"
    recipe = load_recipe(write_recipe(tmp_path, "ports", {"kv_transfer.side_channel_port": 65519}))
    assert list(check_ports(recipe, processes(recipe))) == []


def test_two_recipes_on_one_rack(tmp_path):
    def deployed(name, base, changes):
        recipe = load_recipe(write_recipe(tmp_path, name, changes, base))
        return recipe, processes(recipe)

    first = deployed("first", DISAGGREGATED, {})
    same = deployed("same", AGGREGATED, {})
    found = list(check_together([first, same]))
    # The same GPUs, and the second server on the port of the first one's router.
    assert [finding.keys for finding in found] == [("hardware", "first_node"), ("roles",)]
    assert "first.yaml" in found[0].problem and found[0].file == same[0].path and "first_node: 5" in found[0].cure
    apart = deployed("apart", AGGREGATED, {"hardware.first_node": 5})
    assert not list(check_together([first, apart]))
    rubin = deployed("rubin", DISAGGREGATED, {"hardware.gpu": "Rubin", "hardware.first_node": 5})
    (finding,) = check_together([first, rubin])
    assert finding.keys == ("hardware", "gpu") and "GB200" in finding.problem
    last = deployed("last", AGGREGATED, {"hardware.first_node": 17})
    assert not list(check_together([first, last]))
    late = deployed("late", AGGREGATED, {"hardware.first_node": 17})
    assert next(check_together([last, late])).cure == "take fewer nodes: the rack has 18"
    # Half a tray each, but one port.
    half = {"roles.serve.gpus": 2, "roles.serve.args.tensor-parallel-size": 2, "hardware.gpus_per_node": 4}
    left, right = deployed("left", AGGREGATED, half), deployed("right", AGGREGATED, half)
    assert any("listens on port 8000 of node 0" in finding.problem for finding in check_together([left, right]))


@pytest.mark.parametrize(
    "changes, base, text",
    [
        ({"hardware.nodes": 19}, DISAGGREGATED, "more than the 18 nodes of a rack"),
        ({"hardware.first_node": 14}, DISAGGREGATED, "more than the 18 nodes of a rack"),
        ({"hardware.gpus_per_node": 8}, DISAGGREGATED, "more than a node of GB200 has"),
        ({"container.tag": "latest"}, AGGREGATED, "names another image tomorrow"),
        ({"container.tag": "0.0.9-cu130"}, AGGREGATED, "is no tag of vllm-rose"),
        ({"hardware.gpu": "Rubin"}, AGGREGATED, "is no tag of vllm-rose 0.1.0 for Rubin"),
        (
            {"container": STOCK | {"tag": "v0.99.0"}},
            "deepseek-r1-nvfp4-rubin-nvl72",
            "vLLM whose flags aren't known here",
        ),
        ({"container": STOCK}, AGGREGATED, "has no plugin, and in serve moe-backend is rose_cutedsl"),
        (
            {"hardware.gpu": "H200", "kv_transfer.transport": "ucx/nvlink-fabric"},
            DISAGGREGATED,
            "share no NVLink fabric",
        ),
    ],
)
def test_hardware_and_image(tmp_path, changes, base, text):
    recipe = load_recipe(write_recipe(tmp_path, "hardware", changes, base))
    assert any(text in finding.problem for finding in check_hardware(recipe))


def test_an_image_of_vllm_itself_or_of_somebody_else(tmp_path):
    for name, container in (("stock", STOCK), ("other", {"image": "team/serving", "tag": "7"})):
        recipe = load_recipe(write_recipe(tmp_path, name, {"container": container}, "deepseek-r1-nvfp4-rubin-nvl72"))
        assert not list(check_hardware(recipe))


def test_a_measured_recipe_names_its_figures(tmp_path):
    (tmp_path / "recipes").mkdir()
    status = {"status": "measured on 4 GB200, 2026-10-01: benchmarks/results/end_to_end.csv"}
    recipe = load_recipe(write_recipe(tmp_path / "recipes", "measured", status))
    (finding,) = check_hardware(recipe)
    assert finding.keys == ("status",) and "benchmarks/results/end_to_end.csv" in finding.problem
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / "benchmarks/results/end_to_end.csv").touch()
    assert not list(check_hardware(recipe))


def test_environment_names_and_values(tmp_path):
    environment = {"VLLM_LOGING_LEVEL": "INFO", "NCCL_NVLS_ENABLE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    path = write_recipe(tmp_path, "environment", {"roles.serve.environment": environment}, AGGREGATED)
    recipe = load_recipe(path)
    (process,) = processes(recipe)
    variables = frozenset({"VLLM_LOGGING_LEVEL"})
    found = list(
        check_environment(
            recipe, process, vllm_version="0.33.0", vllm_variables=variables, wrong={"VLLM_LOGGING_LEVEL": "no level"}
        )
    )
    assert [finding.keys[-1] for finding in found] == ["VLLM_LOGING_LEVEL", "VLLM_LOGGING_LEVEL"]
    assert "VLLM_LOGGING_LEVEL" in found[0].cure and found[1].legal == "no level"
    assert found[0].line == line_of(path, "VLLM_LOGING_LEVEL")


def test_our_own_names_are_those_of_the_kernel_families():
    from vllm_rose_plugin.kernels.families import FAMILIES

    pins = {f"ROSE_PROVIDER_{family.name.upper()}" for family in FAMILIES}
    assert pins == {name for name in ROSE if name.startswith("ROSE_PROVIDER_")} and set(ROSE) <= KNOWN
