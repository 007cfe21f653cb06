"""What doesn't divide, and what doesn't fit."""

from dataclasses import replace

import pytest
from recipe_files import AGGREGATED, DISAGGREGATED, SHIPPED, write_recipe

from vllm_rose_plugin.recipes.check.memory import check_memory, memory_plan
from vllm_rose_plugin.recipes.check.rose_backends import check_rose_backends
from vllm_rose_plugin.recipes.check.shapes import check_shapes
from vllm_rose_plugin.recipes.check.vllm_parser import model_config
from vllm_rose_plugin.recipes.hardware import GPUS
from vllm_rose_plugin.recipes.schema import load_recipe

RESOLVED = {
    "cache_dtype": "auto",
    "gpu_memory_utilization": 0.9,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 256,
    "max_model_len": 40960,
    "enforce_eager": True,
    "mamba_ssm_cache_dtype": "auto",
    "block_size": 16,
    "kv_cache_memory_bytes": None,
    "num_gpu_blocks_override": None,
}


def shape_findings(tmp_path, changes, base=AGGREGATED):
    recipe = load_recipe(write_recipe(tmp_path, "shapes", changes, base))
    return list(check_shapes(recipe, model_config(recipe)))


def args(**flags):
    return {f"roles.serve.args.{flag.replace('_', '-')}": value for flag, value in flags.items()}


@pytest.mark.parametrize(
    "flags, texts",
    [
        ({"tensor_parallel_size": 3}, ["64 attention heads", "4 KV heads", "3 expert parallel ranks"]),
        ({"tensor_parallel_size": 12}, ["64 attention heads", "12 expert parallel ranks"]),
        ({"tensor_parallel_size": 1, "data_parallel_size": 72}, ["72 expert parallel ranks, among which 128 experts"]),
        # 1536 columns of an expert over 32 ranks leave 48 each, one block and a half.
        (
            {"tensor_parallel_size": 32, "enable_expert_parallel": None},
            ["48 outputs per shard", "48 inputs per shard"],
        ),
        (
            {"tensor_parallel_size": 1, "data_parallel_size": 64, "enable_expert_parallel": None},
            ["24 outputs", "24 inputs"],
        ),
    ],
)
def test_sizes_that_don_t_divide(tmp_path, flags, texts):
    found = shape_findings(tmp_path, args(**flags))
    assert len(found) >= len(texts)
    for text in texts:
        assert any(text in str(finding) for finding in found), (text, [str(finding) for finding in found])
    assert all(finding.line > 1 and finding.legal and finding.cure for finding in found)


def test_the_cure_for_72_ranks_is_16_redundant_experts(tmp_path):
    flags = args(tensor_parallel_size=1, data_parallel_size=72)
    (finding,) = shape_findings(tmp_path, flags)
    assert "num_redundant_experts: 16" in finding.cure
    eplb = args(enable_eplb=True, eplb_config={"num_redundant_experts": 16})
    assert not shape_findings(tmp_path, flags | eplb)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_sizes_that_divide(tmp_path, size):
    assert not shape_findings(tmp_path, args(tensor_parallel_size=size))


def test_a_block_is_cut_in_nvfp4_later_than_in_mxfp8(tmp_path):
    flags = args(tensor_parallel_size=32, enable_expert_parallel=None) | {"model.expert_weights": "nvfp4"}
    assert [finding for finding in shape_findings(tmp_path, flags) if "48 inputs" in str(finding)] == []


def test_hybrid_models_split_their_linear_heads(tmp_path):
    base = "qwen3.5-122b-a10b-mxfp8-h200"
    found = shape_findings(tmp_path, args(tensor_parallel_size=32), base)
    assert any("16 linear attention key heads" in finding.problem for finding in found)


def test_an_unknown_model_type_is_named(tmp_path):
    recipe = load_recipe(SHIPPED / f"{AGGREGATED}.yaml")
    (finding,) = check_shapes(recipe, {"model_type": "gpt9"})
    assert finding.keys == ("model", "config") and "gpt9" in finding.problem


def plan_with(monkeypatch, recipe, memory_bytes):
    monkeypatch.setitem(GPUS, "GB200", replace(GPUS["GB200"], memory_bytes=memory_bytes))
    return memory_plan(recipe, "serve", model_config(recipe), RESOLVED | {"gpu_memory_utilization": 1.0})


def test_a_model_too_large_by_1_gb_is_refused_and_one_that_fits_is_not(monkeypatch):
    recipe = load_recipe(SHIPPED / f"{AGGREGATED}.yaml")
    plan = plan_with(monkeypatch, recipe, 100 * 10**9)
    needed = plan.budget - plan.left  # without any KV
    (finding,) = check_memory(recipe, plan_with(monkeypatch, recipe, needed - 10**9))
    assert "0.9 GiB per GPU are missing" in finding.problem and finding.keys == ("roles", "serve", "gpus")
    request = int(plan.kv_per_token * 40960)
    (finding,) = check_memory(recipe, plan_with(monkeypatch, recipe, needed + request - 10**9))
    assert finding.keys[-1] == "max-model-len" and "is more than the KV cache holds" in finding.problem
    assert not list(check_memory(recipe, plan_with(monkeypatch, recipe, needed + request + 1)))


def test_weights_are_what_the_checkpoint_weighs():
    recipe = load_recipe(SHIPPED / f"{AGGREGATED}.yaml")
    plan = memory_plan(recipe, "serve", model_config(recipe), RESOLVED)
    # 235.1e9 parameters over 4 ranks: a byte and a 32nd each; embedding and head (1.24e9) have two bytes.
    assert plan.weights == pytest.approx((233.85e9 * 33 / 32 + 1.245e9 * 2) / 4, rel=0.01)
    assert plan.kv_per_token == 94 * 2 * 1 * 128 * 2  # one of four KV heads per rank


def test_data_parallel_ranks_hold_all_kv_heads_and_gathered_tokens():
    recipe = load_recipe(SHIPPED / f"{DISAGGREGATED}.yaml")
    plan = memory_plan(recipe, "decode", model_config(recipe), RESOLVED | {"max_num_batched_tokens": 1024})
    assert plan.kv_per_token == 94 * 2 * 4 * 128 * 2
    assert plan.all_to_all == 2 * 16 * 1024 * 4096 * 2 and plan.graphs == 0
    graphs = memory_plan(recipe, "decode", model_config(recipe), RESOLVED | {"enforce_eager": False})
    assert graphs.graphs > 0


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        # 128 experts x 1024 tokens x 8 KiB and 128 bytes, two buffers to send and two to receive; 1 GiB for NVLink.
        ("deepep_low_latency", 4 * 128 * 1024 * (8192 + 128) + (1 << 30)),
        ("nixl_ep", 4 * 128 * 1024 * (8192 + 128)),
        ("deepep_high_throughput", 2 * 16 * 1024 * 4096 * 2 + (2 << 30)),
    ],
)
def test_buffers_of_other_all_to_all_backends(tmp_path, backend, expected):
    recipe = load_recipe(write_recipe(tmp_path, "buffers", {"roles.decode.args.all2all-backend": backend}))
    plan = memory_plan(recipe, "decode", model_config(recipe), RESOLVED | {"max_num_batched_tokens": 1024})
    assert plan.all_to_all == expected


@pytest.mark.parametrize(("moe", "row"), [("rose_cutedsl", 4096 + 128), (None, 2 * 4096)])
def test_buffers_of_our_all_to_all(tmp_path, moe, row):
    changes = {"roles.decode.args.all2all-backend": "rose_nvlink"}
    if moe:
        changes["roles.decode.args.moe-backend"] = moe
    recipe = load_recipe(write_recipe(tmp_path, "ours", changes))
    assert not list(check_rose_backends(recipe))
    plan = memory_plan(recipe, "decode", model_config(recipe), RESOLVED | {"max_num_batched_tokens": 1024})
    # A row to send for each token of each rank, in two halves, and one as it came; a row of bf16 for each of a token's
    # eight destinations. Routing and flags come on top.
    least = 3 * 16 * 1024 * row + 8 * 1024 * 2 * 4096
    assert least < plan.all_to_all < 1.1 * least


def test_buffers_of_our_all_reduce(tmp_path):
    def planned(name, changes, base):
        recipe = load_recipe(write_recipe(tmp_path, name, changes, base))
        role = "decode" if "decode" in recipe.roles else "serve"
        return memory_plan(recipe, role, model_config(recipe), RESOLVED)

    auto = {"roles.serve.args.additional-config": {"rose": {"all_reduce": "auto"}}}
    plain, ours = planned("plain", {}, AGGREGATED), planned("auto", auto, AGGREGATED)
    assert plain.all_reduce == 0 and ours.all_reduce == 2 * 8192 * 4096 * 2 == plain.left - ours.left
    assert "all-reduce 0.1" in str(ours)
    variable = {"roles.serve.environment": {"ROSE_ALL_REDUCE": "p2p"}}
    assert planned("variable", variable, AGGREGATED).all_reduce == ours.all_reduce
    one_rank = {"roles.decode.args.additional-config": {"rose": {"all_reduce": "auto"}}}
    assert planned("one-rank", one_rank, DISAGGREGATED).all_reduce == 0


def test_an_fp8_cache_holds_twice_the_tokens():
    recipe = load_recipe(SHIPPED / f"{AGGREGATED}.yaml")
    plain = memory_plan(recipe, "serve", model_config(recipe), RESOLVED)
    small = memory_plan(recipe, "serve", model_config(recipe), RESOLVED | {"cache_dtype": "fp8"})
    assert small.kv_per_token * 2 == plain.kv_per_token


def test_a_kv_cache_of_a_given_size(tmp_path):
    def judged(flag, given, resolved):
        recipe = load_recipe(write_recipe(tmp_path, "fixed", args(**{flag: given}), AGGREGATED))
        plan = memory_plan(recipe, "serve", model_config(recipe), RESOLVED | resolved)
        return plan, list(check_memory(recipe, plan))

    blocks, found = judged("num_gpu_blocks_override", 2560, {"num_gpu_blocks_override": 2560})
    assert blocks.tokens == 40960 and not found
    blocks, (finding,) = judged("num_gpu_blocks_override", 2559, {"num_gpu_blocks_override": 2559})
    assert blocks.tokens == 40944 and finding.keys[-1] == "num-gpu-blocks-override"
    fits, found = judged("kv_cache_memory_bytes", "110G", {"kv_cache_memory_bytes": 110 * 10**9})
    assert fits.budget == GPUS["GB200"].memory_bytes and fits.tokens == 110 * 10**9 // 48128 and not found
    assert "of which KV gets 102.4" in str(fits)
    _, (finding,) = judged("kv_cache_memory_bytes", "150G", {"kv_cache_memory_bytes": 150 * 10**9})
    assert finding.keys[-1] == "kv-cache-memory-bytes" and finding.value == "150G"


def test_the_fullest_stage_of_a_pipeline_counts(tmp_path):
    sizes = args(tensor_parallel_size=1, pipeline_parallel_size=4)
    recipe = load_recipe(write_recipe(tmp_path, "stages", sizes, AGGREGATED))
    plan = memory_plan(recipe, "serve", model_config(recipe), RESOLVED)
    # 24 of 94 layers: a byte and a 32nd of each parameter, and the embedding or the head with two bytes.
    assert plan.kv_per_token == pytest.approx(24 * 2 * 4 * 128 * 2)
    assert plan.weights == pytest.approx(233.85e9 * 33 / 32 * 24 / 94 + 151936 * 4096 * 2, rel=0.01)


def test_what_our_experts_refuse_at_start_up_is_told_before(tmp_path):
    changes = {"roles.decode.args.moe-backend": "rose_cutedsl"}
    recipe = load_recipe(write_recipe(tmp_path, "rose", changes))
    found = [str(finding) for finding in check_rose_backends(recipe)]
    assert any("decode.args.moe-backend" in text and "data parallelism" in text for text in found)
    changes |= {"roles.decode.args.all2all-backend": "deepep_low_latency", "roles.decode.args.enable-eplb": True}
    found = [str(finding) for finding in check_rose_backends(load_recipe(write_recipe(tmp_path, "batched", changes)))]
    assert not any("data parallelism" in text or "eplb" in text for text in found)
    assert not list(check_rose_backends(load_recipe(SHIPPED / f"{DISAGGREGATED}.yaml")))


@pytest.mark.parametrize(
    ("environment", "cure"),
    [
        ({"VLLM_ROSE_DISABLE": "1"}, "remove it"),
        ({"VLLM_PLUGINS": "other"}, "write rose,other"),
        ({"VLLM_ROSE_DISABLE": "0", "VLLM_PLUGINS": "other,rose"}, None),
    ],
)
def test_an_environment_that_switches_us_off(tmp_path, environment, cure):
    changes = {"roles.serve.environment": environment}
    found = list(check_rose_backends(load_recipe(write_recipe(tmp_path, "off", changes, AGGREGATED))))
    assert [finding.cure for finding in found] == ([cure] if cure else [])
    changes |= args(moe_backend=None, linear_backend=None)
    assert not list(check_rose_backends(load_recipe(write_recipe(tmp_path, "unnamed", changes, AGGREGATED))))
    changes |= args(all2all_backend="rose_nvlink")
    found = list(check_rose_backends(load_recipe(write_recipe(tmp_path, "exchange", changes, AGGREGATED))))
    assert [finding.cure for finding in found] == ([cure] if cure else [])
    assert all("all2all-backend is rose_nvlink" in str(finding) for finding in found)
    changes.pop("roles.serve.args.all2all-backend")
    changes |= args(additional_config={"rose": {"all_reduce": "auto"}})
    found = list(check_rose_backends(load_recipe(write_recipe(tmp_path, "settings", changes, AGGREGATED))))
    assert [finding.cure for finding in found] == ([cure] if cure else [])


def test_the_rest_is_what_the_allowances_say():
    recipe = load_recipe(SHIPPED / f"{AGGREGATED}.yaml")
    plan = memory_plan(recipe, "serve", model_config(recipe), RESOLVED)
    activations = 8192 * 4096 * 2 * 8 + 256 * 151936 * 6 + 8192 * 8 * (4096 + 4096) * 2
    assert plan.budget - plan.left == plan.weights + (2 << 30) + activations
