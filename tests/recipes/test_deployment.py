"""From roles to processes: placement, launch flags of several nodes, ports."""

import json

import pytest
from recipe_files import AGGREGATED, DISAGGREGATED, SHIPPED, write_recipe

from vllm_rose_plugin.recipes.check.network import check_ports
from vllm_rose_plugin.recipes.deployment import flag_words, processes
from vllm_rose_plugin.recipes.finding import RecipeError
from vllm_rose_plugin.recipes.schema import load_recipe


def test_prefill_takes_a_tray_and_decode_four():
    placed = processes(load_recipe(SHIPPED / f"{DISAGGREGATED}.yaml"), own_address=lambda node: f"10.0.0.{node}")
    assert [process.name for process in placed] == ["prefill-0-0", *(f"decode-0-{rank}" for rank in range(4))]
    assert [process.node for process in placed] == [0, 1, 2, 3, 4]
    assert all(process.gpus == (0, 1, 2, 3) for process in placed)
    head, follower = placed[1], placed[3]
    assert head.serves and head.ports == {"data_parallel_rpc": 13346, "api": 8200, "nixl": 5601}
    assert "headless" not in head.flags and "data-parallel-start-rank" not in head.flags
    assert not follower.serves and follower.ports == {"nixl": 5609}
    assert follower.flags["headless"] is True and "port" not in follower.flags
    assert follower.flags["data-parallel-start-rank"] == 8 and follower.data_parallel_ranks == range(8, 12)
    assert {process.flags["data-parallel-address"] for process in placed[1:]} == {"node-1"}
    assert {process.flags["data-parallel-size-local"] for process in placed[1:]} == {4}
    # vLLM adds the global rank to the port itself, so every process of a replica gets the same one.
    assert {process.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for process in placed[1:]} == {"5601"}
    assert follower.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.3"
    assert all(process.environment["VLLM_KV_CACHE_LAYOUT"] == "LBHNC" for process in placed)
    roles = {process.role: process.flags["kv-transfer-config"]["kv_role"] for process in placed}
    assert roles == {"prefill": "kv_producer", "decode": "kv_consumer"}


def test_the_command_line_is_what_a_shell_gets():
    (process,) = processes(load_recipe(SHIPPED / f"{AGGREGATED}.yaml"))
    words = process.argv
    assert words[:3] == ["vllm", "serve", "/models/Qwen3-235B-A22B-MXFP8"]
    assert words[words.index("--tensor-parallel-size") + 1] == "4" and "--enable-expert-parallel" in words
    assert flag_words({"a": False, "b": {"c": True}, "d": [1, "e"]}) == [
        "--no-a",
        "--b",
        '{"c": true}',
        "--d",
        "1",
        "e",
    ]
    assert json.loads(flag_words({"b": {"c": None}})[1]) == {"c": None}


def test_two_small_replicas_share_a_tray_with_ports_of_their_own():
    placed = processes(load_recipe(SHIPPED / f"{DISAGGREGATED}.yaml", overlays=["prefill-tp2"]))
    first, second = placed[:2]
    assert (first.node, first.gpus, second.node, second.gpus) == (0, (0, 1), 0, (2, 3))
    assert (first.ports["api"], second.ports["api"]) == (8100, 8101)
    assert (first.ports["nixl"], second.ports["nixl"], placed[2].ports["nixl"]) == (5600, 5601, 5602)


def wide(tmp_path, **changes):
    data = {"hardware.nodes": 18, "roles.serve.gpus": 72, "router.kind": "vllm-router", "roles.serve.args.port": 8200}
    args = {"tensor-parallel-size": None, "data-parallel-size": 72, "moe-backend": None}
    data |= {f"roles.serve.args.{flag}": value for flag, value in args.items()}
    return write_recipe(tmp_path, "wide", data | changes, AGGREGATED)


def test_72_ranks_fill_the_rack_and_no_port_is_taken_twice(tmp_path):
    recipe = load_recipe(wide(tmp_path))
    placed = processes(recipe)
    assert len(placed) == 18 and [process.node for process in placed] == list(range(18))
    ranks = [rank for process in placed for rank in process.data_parallel_ranks]
    assert ranks == list(range(72)) and sum(process.serves for process in placed) == 1
    assert not list(check_ports(recipe, placed))


def test_with_hybrid_load_balancing_every_node_serves_its_ranks(tmp_path):
    changes = {"roles.serve.args.data-parallel-hybrid-lb": True}
    placed = processes(load_recipe(wide(tmp_path, **changes)))
    assert all(process.serves and "headless" not in process.flags for process in placed)
    assert [process.flags["data-parallel-start-rank"] for process in placed] == list(range(0, 72, 4))


def test_a_rank_over_several_nodes(tmp_path):
    changes = {"hardware.nodes": 4, "roles.serve.gpus": 16, "roles.serve.args.tensor-parallel-size": 16}
    placed = processes(load_recipe(write_recipe(tmp_path, "tp16", changes, AGGREGATED)))
    assert [process.flags["node-rank"] for process in placed] == [0, 1, 2, 3]
    assert {process.flags["nnodes"] for process in placed} == {4}
    assert {process.flags["master-addr"] for process in placed} == {"node-0"}
    assert [bool(process.flags.get("headless")) for process in placed] == [False, True, True, True]
    assert placed[0].ports == {"master": 29501, "api": 8000} and placed[1].ports == {}


@pytest.mark.parametrize(
    "changes, keys, text",
    [
        ({"roles.decode.gpus": 8}, "roles.decode.gpus", "data 16 = 16"),
        ({"hardware.nodes": 4}, "hardware.nodes", "raise hardware.nodes to at least 5"),
        ({"roles.prefill.args.tensor-parallel-size": "4"}, "roles.prefill.args.tensor-parallel-size", "without quotes"),
        ({"roles.prefill.args.tensor-parallel-size": 0}, "roles.prefill.args.tensor-parallel-size", "from 1 up"),
        (
            {"roles.prefill.args.no-enforce-eager": True},
            "roles.prefill.args.no-enforce-eager",
            "write enforce-eager: false",
        ),
        ({"roles.decode.args.config": "x.yaml"}, "roles.decode.args.config", "follows from the placement"),
        ({"roles.decode.args.headless": True}, "roles.decode.args.headless", "follows from the placement"),
        (
            {"roles.decode.gpus": 6, "roles.decode.args.data-parallel-size": 6},
            "roles.decode.gpus",
            "doesn't fill whole nodes",
        ),
        (
            {"roles.decode.args.tensor-parallel-size": 8, "roles.decode.args.data-parallel-size": 2},
            "roles.decode.gpus",
            "has data parallel ranks of 8 GPUs",
        ),
        (
            {
                "roles.decode.args.tensor-parallel-size": 3,
                "roles.decode.args.data-parallel-size": 4,
                "roles.decode.gpus": 12,
            },
            "roles.decode.gpus",
            "cuts a rank of 3 GPUs at a node's end",
        ),
    ],
)
def test_what_can_t_be_placed(tmp_path, changes, keys, text):
    recipe = load_recipe(write_recipe(tmp_path, "unplaced", changes))
    with pytest.raises(RecipeError) as caught:
        processes(recipe)
    (finding,) = caught.value.findings
    assert finding.keys == tuple(keys.split(".")) and finding.line > 1 and text in str(finding)
