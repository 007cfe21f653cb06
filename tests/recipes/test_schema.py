"""The format: strict, with the line of every fault; overlays."""

import pytest
from recipe_files import AGGREGATED, SHIPPED, line_of, write_recipe

from vllm_rose_plugin.recipes.finding import RecipeError
from vllm_rose_plugin.recipes.schema import load_recipe


def findings(path, **options):
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, **options)
    return caught.value.findings


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_load_with_each_overlay(path):
    recipe = load_recipe(path)
    assert recipe.status == "not measured", "a measurement must name its file: change this test with it"
    for overlay in recipe.overlays:
        assert load_recipe(path, overlays=[overlay]).applied_overlays == (overlay,)


@pytest.mark.parametrize(
    "way, value, problem, legal, cure",
    [
        ("roles.prefill.gpu", 4, "is no key", "replicas, gpus, args, environment", "write gpus"),
        ("image", "x", "is no key", "recipe, name, description", "write one of these"),
        ("hardware.gpu", "GB20", "is not among the values", "H200, GB200, GB300, Rubin", "write GB200"),
        ("hardware.gpu", "B100", "is not among the values", "H200, GB200, GB300, Rubin", "write"),
        ("recipe", 2, "is not among the values", "1", "write one of these"),
        ("kv_transfer.layout", "LBNHC", "is not among the values", "LBHNC", "write LBHNC"),
        ("kv_transfer.transport", "ucx/tcp", "is not among the values", "ucx/ib, ucx/nvlink-fabric", "write ucx/ib"),
        ("roles.decode.environment.VLLM_LOG", 1, "is not text", "text", 'write "1"'),
        ("roles.decode.environment.VLLM LOG", "1", "isn't written", "no digit first", "write it so"),
        ("resources.memory", "400GB", "isn't written as it must be", "such as 64Gi", "write it so"),
        ("container.image", "registry.example:5000/vllm-rose", "isn't written", "without registry host", "write it so"),
        ("container.tag", "a:b", "isn't written as it must be", "such as 0.1.0-cu130", "write it so"),
        ("status", "measured yesterday", "isn't written", "YYYY-MM-DD: FILE", "write it so"),
        ("router.port", 80, "is out of range", "1024 to 65535", "write a number of this range"),
        ("hardware.nodes", 10**9, "is out of range", "1 to 4096", "write a number of this range"),
        ("hardware.first_node", -1, "is out of range", "0 or more", "write a number of this range"),
        ("roles.decode.replicas", 0, "is out of range", "1 to 4096", "write a number of this range"),
        ("roles.decode.gpus", "16", "is not a whole number", "a whole number", "write a whole number"),
        ("description", "two\nlines", "isn't written as it must be", "one line of text", "write it so"),
        ("model.checkpoint", "", "isn't written as it must be", "such as /models/NAME", "write it so"),
        # Its parent would be mounted at /.
        ("model.checkpoint", "/Qwen3", "isn't written as it must be", "a path of two parts or more", "write it so"),
        ("overlays", ["mtp"], "is not a mapping", "a mapping", "write a mapping"),
        ("benchmark.concurrency", [], "is empty", "one value or more", "write one"),
        ("benchmark.concurrency", 4, "is not a list", "a list", "write a list"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_line(tmp_path, way, value, problem, legal, cure):
    path = write_recipe(tmp_path, "wrong", {way: value})
    (finding,) = findings(path)
    assert problem in finding.problem and legal in finding.legal and finding.cure.startswith(cure)
    assert finding.keys == tuple(way.split("."))
    keys = way.split(".")
    assert f" {keys[-1]}:" in f" {path.read_text().splitlines()[finding.line - 1]}"
    assert str(finding).startswith(f"{path}:{finding.line}: {way}")


def test_a_number_in_a_list_has_its_range(tmp_path):
    (finding,) = findings(write_recipe(tmp_path, "wrong", {"benchmark.concurrency": [1, 0]}))
    assert finding.keys == ("benchmark", "concurrency", 1) and finding.legal == "1 or more"


def test_a_missing_key_is_named(tmp_path):
    (finding,) = findings(write_recipe(tmp_path, "wrong", {"hardware.nodes": None}))
    assert finding.keys == ("hardware", "nodes") and (finding.problem, finding.cure) == ("is not given", "add it")
    assert finding.value is None


@pytest.mark.parametrize("flag", ["enable_expert_parallel", "--enable-expert-parallel"])
def test_a_flag_as_python_or_a_shell_spells_it(tmp_path, flag):
    (finding,) = findings(write_recipe(tmp_path, "wrong", {f"roles.serve.args.{flag}": True}, AGGREGATED))
    assert finding.cure == "write enable-expert-parallel" and "without dashes in front" in finding.legal


def test_all_faults_are_told_at_once(tmp_path):
    path = write_recipe(tmp_path, "wrong", {"hardware.nodes": 0, "model.weights": "int8", "benchmark.concurrency": []})
    assert [finding.keys[:2] for finding in findings(path)] == [
        ("hardware", "nodes"),
        ("model", "weights"),
        ("benchmark", "concurrency"),
    ]


@pytest.mark.parametrize(
    "text, problem",
    [
        ("recipe: 1\nrecipe: 1\n", "is given twice"),
        ("recipe: 1\n1: 2\n", "has the key 1"),
        ("no: 1\n", "has the key False"),
        ("a: 2026-13-01\n", "is no value: month must be"),
        ("a: 2026-12-01\n", "is read as a date"),
        ("a: \x07\n", "is not YAML: unacceptable character"),
        ("a: &a [*a]\n", "holds itself"),
        ("a: &a {b: 1}\nc: {<<: *a}\n", "merges with <<"),
        ("recipe: [1\n", "is not YAML"),
        ("- 1\n", "is no mapping"),
    ],
)
def test_yaml_that_is_no_recipe(tmp_path, text, problem):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert problem in findings(path)[0].problem


def test_a_flag_without_a_value_is_refused(tmp_path):
    path = tmp_path / "x.yaml"
    text = (SHIPPED / f"{AGGREGATED}.yaml").read_text().replace(f"name: {AGGREGATED}", "name: x")
    path.write_text(text.replace("      port: 8000", "      port:"))
    (finding,) = findings(path)
    assert finding.problem == "has no value" and finding.line == line_of(path, "port:")


def test_json_in_quotes_is_refused(tmp_path):
    path = write_recipe(
        tmp_path, "quoted", {"roles.serve.args.eplb-config": '{"num_redundant_experts": 3}'}, AGGREGATED
    )
    (finding,) = findings(path)
    assert finding.keys[-1] == "eplb-config" and "write it as a mapping" in finding.cure
    assert finding.line == line_of(path, "eplb-config")
    template = {"roles.serve.args.chat-template": "{{ messages[0].content }}"}
    assert load_recipe(write_recipe(tmp_path, "template", template, AGGREGATED))


def test_overlays_that_are_no_changes(tmp_path):
    path = write_recipe(tmp_path, "odd", {"overlays": {"word": "mtp"}})
    assert "is no overlay" in findings(path, overlays=["word"])[0].problem


def test_null_in_an_overlay_removes_also_where_the_file_has_nothing(tmp_path):
    overlays = {"bare": {"roles": {"decode": {"environment": {"HF_TOKEN": None}}}}}
    path = write_recipe(tmp_path, "bare", {"roles.decode.environment": None, "overlays": overlays})
    assert load_recipe(path, overlays=["bare"]).roles["decode"].environment == {}


def test_no_such_file(tmp_path):
    assert findings(tmp_path / "none.yaml")[0].problem == "can't be read: No such file or directory"
    (folder,) = findings(tmp_path)
    assert folder.problem == "is a folder" and folder.cure == f"name its files, such as {tmp_path}/*.yaml"


def test_another_kind_of_file_is_one_finding():
    (finding,) = findings(SHIPPED / "models/qwen3-30b-a3b.json")
    assert finding.keys == ("recipe",) and "name a recipe" in finding.cure


def test_an_overlay_of_a_recipe_without_any(tmp_path):
    (finding,) = findings(write_recipe(tmp_path, "bare", {"overlays": None}), overlays=["mtp"])
    assert "has no overlays" in finding.legal and finding.cure == "leave out --overlay mtp"


@pytest.mark.parametrize(
    "changes, keys, problem",
    [
        ({"kv_transfer": None}, "kv_transfer", "is not given"),
        ({"roles.decode": None}, "roles", "has prefill"),
        ({"roles": {}}, "roles", "has none"),
        ({"router.kind": "none"}, "router.kind", "nothing would take a request from prefill to decode"),
        ({"name": "other"}, "name", "is not the file's name"),
    ],
)
def test_parts_that_don_t_belong_together(tmp_path, changes, keys, problem):
    path = write_recipe(tmp_path, "parts", changes)
    (finding,) = findings(path)
    assert problem in finding.problem and finding.keys == tuple(keys.split("."))


@pytest.mark.parametrize(
    "changes, keys, problem",
    [
        ({"kv_transfer": {"connector": "NixlConnector", "transport": "ucx/ib"}}, "kv_transfer", "only role is serve"),
        ({"roles.serve.replicas": 2}, "router.kind", "serve has 2 replicas"),
    ],
)
def test_parts_of_one_role_that_don_t_belong_together(tmp_path, changes, keys, problem):
    (finding,) = findings(write_recipe(tmp_path, "parts", changes, AGGREGATED))
    assert problem in finding.problem and finding.keys == tuple(keys.split("."))


def test_an_overlay_merges_and_null_removes_and_lines_are_its_own(tmp_path):
    change = {"roles": {"serve": {"args": {"moe-backend": None, "max-num-seqs": 7}}}}
    path = write_recipe(tmp_path, "merge", {"overlays": {"small": change}}, AGGREGATED)
    plain, small = load_recipe(path), load_recipe(path, overlays=["small"])
    assert (
        plain.roles["serve"].args["moe-backend"] == "rose_cutedsl" and plain.roles["serve"].args["max-num-seqs"] == 256
    )
    assert "moe-backend" not in small.roles["serve"].args and small.roles["serve"].args["max-num-seqs"] == 7
    assert plain.line_of("roles", "serve", "args", "max-num-seqs") == line_of(path, "max-num-seqs")
    assert small.line_of("roles", "serve", "args", "max-num-seqs") == line_of(path, "max-num-seqs", 2)
    assert small.line_of("roles", "serve", "args", "absent") == line_of(path, "args:")


def test_an_unknown_overlay_names_the_known_ones():
    (finding,) = findings(SHIPPED / f"{AGGREGATED}.yaml", overlays=["lora"])
    assert finding.value == "lora" and "mtp, eagle3, vllm-experts" in finding.legal
