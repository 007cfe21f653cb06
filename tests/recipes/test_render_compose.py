import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from render_cases import OPTIONS, RECIPES, aggregated, split

from vllm_rose_plugin.recipes.render.common import Options, RenderError
from vllm_rose_plugin.recipes.render.compose import render_compose
from vllm_rose_plugin.recipes.schema import load_recipe

SCHEMA = jsonschema.Draft7Validator(json.loads((Path(__file__).parent / "schemas" / "compose-spec.json").read_text()))


def _file(recipe):
    (text,) = render_compose(recipe, OPTIONS).values()
    file = yaml.safe_load(text)
    SCHEMA.validate(file)
    for service in file["services"].values():
        for other in [*service.get("depends_on", {}), *(config["source"] for config in service.get("configs", []))]:
            assert other in file["services"] or other in file["configs"]
    return file


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_of_one_node_render_and_others_are_refused_by_name(path):
    recipe = load_recipe(path)
    if recipe.hardware.nodes == 1:
        assert {p for p in _file(recipe)["services"] if p != "router"}
    else:
        message = f"runs on one node, {recipe.name} takes {recipe.hardware.nodes}; legal: hardware.nodes 1"
        with pytest.raises(RenderError, match=message):
            render_compose(recipe, OPTIONS)


def test_the_schema_refuses_a_wrong_file(tmp_path):
    file = _file(split(tmp_path))
    file["services"]["router"]["depend_on"] = {}
    with pytest.raises(jsonschema.ValidationError, match="depend_on"):
        SCHEMA.validate(file)


def test_prefill_and_decode_on_one_node(tmp_path):
    services = _file(split(tmp_path))["services"]
    assert list(services) == ["prefill-0-0", "prefill-1-0", "decode-0-0", "router"]
    gpus = [
        services[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for name in list(services)[:3]
    ]
    assert gpus == [["0", "1"], ["2", "3"], ["4", "5", "6", "7"]]
    assert "CUDA_VISIBLE_DEVICES" not in services["decode-0-0"]["environment"]  # the container sees its own alone
    first, last = services["prefill-0-0"], services["decode-0-0"]
    assert (first["ipc"], first["shm_size"]) == ("shareable", "65536m")
    assert (last["ipc"], last["pid"]) == ("service:prefill-0-0", "service:prefill-0-0")
    assert last["environment"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    router = services["router"]
    assert {name: how["condition"] for name, how in router["depends_on"].items()} == {
        name: "service_healthy" for name in list(services)[:3]
    }
    words = router["command"]
    assert [words[i + 1] for i, word in enumerate(words) if word in ("--prefill", "--decode")] == [
        "http://127.0.0.1:8100",
        "http://127.0.0.1:8101",
        "http://127.0.0.1:8200",
    ]


def test_one_server_has_its_own_shared_memory_and_no_router(tmp_path):
    services = _file(aggregated(tmp_path, {"gpus": 8, "args": {"tensor-parallel-size": 8}}))["services"]
    assert list(services) == ["serve-0-0"]
    assert services["serve-0-0"]["shm_size"] == "65536m"
    assert services["serve-0-0"]["healthcheck"]["start_period"] == "3600s"
    assert "http://127.0.0.1:8100/health" in services["serve-0-0"]["healthcheck"]["test"][-1]


def test_dollars_are_not_compose_variables(tmp_path):
    role = {"gpus": 1, "args": {"served-model-name": "a$b"}, "environment": {"MARK": "$HOME"}}
    file = _file(aggregated(tmp_path, role))
    assert file["services"]["serve-0-0"]["environment"]["MARK"] == "$$HOME"
    assert "served-model-name: a$$b" in file["configs"]["serve-0-0"]["content"]


def test_roles_alone_are_refused(tmp_path):
    with pytest.raises(RenderError, match="--role decode: a compose file holds all roles"):
        render_compose(split(tmp_path), Options(OPTIONS.image, OPTIONS.router_image, roles=("decode",)))
