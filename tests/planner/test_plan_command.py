"""`rose plan` as a user types it, and the files it writes."""

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from planner_cases import EXAMPLE, example_data

from vllm_rose_plugin.cli import main

ROOT = Path(__file__).parents[2]
LOAD = ("--rate", "20", "--input", "lognormal:2000:8000:32000", "--output", "lognormal:300:1000:4000")
BASE = ("plan", "--capacity", str(EXAMPLE), "--ttft", "1", "--tpot", "25")


def test_table_names_source_and_simulation(capsys):
    assert main([*BASE, *LOAD, "--simulate"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("capacity ASSUMED: Qwen3-235B-A22B MXFP8 on GB200 NVL72, made-up")
    assert re.search(r"replicas +2 +1\n", text) and "targets held" in text


def test_json_and_measured_source(tmp_path, capsys):
    path = tmp_path / "capacity.json"  # JSON is YAML too
    path.write_text(json.dumps(example_data() | {"source": "measured", "description": "8x H200"}))
    trace = tmp_path / "trace.jsonl"
    lines = [{"arrival_s": second / 4, "input_tokens": 2000, "output_tokens": 50} for second in range(400)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    assert main(["plan", "--capacity", str(path), "--trace", str(trace), "--simulate", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["capacity"] == {"source": "measured", "description": "8x H200"}
    assert answer["replicas"] == {"prefill": 1, "decode": 1} and answer["gpus"] == 20
    assert answer["simulation"]["requests"] == 400 and answer["simulation"]["missed"] == []


def test_lost_decoder_fails_the_check(capsys):
    assert (
        main([*BASE, "--rate", "5", "--input", "2000", "--output", "300", "--simulate", "--lose-decoder-at", "9"]) == 1
    )
    assert "no decoder was left" in capsys.readouterr().out


def test_unreachable_target_is_answered_with_1(capsys):
    assert main([*BASE, *LOAD, "--tpot", "5"]) == 1
    assert capsys.readouterr().err.startswith("rose plan: TPOT target 5 ms (p95) can't be held: a request alone")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (LOAD, "--capacity FILE is needed"),
        (("--capacity", "nowhere.yaml", *LOAD), "--capacity nowhere.yaml: no such file"),
        (("--capacity", str(EXAMPLE)), "give the load as --rate, --input and --output, or as --trace FILE"),
        (("--capacity", str(EXAMPLE), "--rate", "3"), "give the load as"),
        (("--capacity", str(EXAMPLE), *LOAD, "--trace", "x"), "give the load as"),
        (("--capacity", str(EXAMPLE), *LOAD, "--rate", "-1"), "--rate -1 is out of range"),
        (("--capacity", str(EXAMPLE), *LOAD, "--rate", "nan"), "--rate nan is out of range"),
        (("--capacity", str(EXAMPLE), *LOAD, "--ttft", "0"), "--ttft 0 is out of range: give seconds above 0"),
        (("--capacity", str(EXAMPLE), *LOAD, "--percentile", "100"), "--percentile 100 is out of range: give 1 to 99"),
        (("--capacity", str(EXAMPLE), *LOAD, "--gpus", "0"), "--gpus 0 is out of range"),
        (("--capacity", str(EXAMPLE), *LOAD, "--lose-decoder-at", "3"), "add --simulate"),
        (("--capacity", str(EXAMPLE), *LOAD, "--emit", "metrics", "--json"), "leave out --json"),
        (("--capacity", str(EXAMPLE), *LOAD, "--rate", "0", "--simulate"), "at --rate 0 no request comes"),
        (("--capacity", str(EXAMPLE), *LOAD, "--window", "1e-320"), "--window 9.99989e-321 is out of range"),
        (("--capacity", str(EXAMPLE), *LOAD, "--simulate", "--lose-decoder-at", "nan"), "--lose-decoder-at nan is out"),
        (("--capacity", str(EXAMPLE), *LOAD, "--emit", "metrics", "--name", 'a"b'), "--name 'a\"b': give a-z"),
        (("--capacity", str(EXAMPLE), *LOAD, "--emit", "metrics", "--name", "30b"), "a letter first"),
        (("--capacity", str(EXAMPLE), *LOAD, "--emit", "metrics", "--namespace", ""), "--namespace '': give"),
        (("--capacity", str(EXAMPLE), *LOAD, "--emit", "metrics", "--prometheus", "p:9090"), "--prometheus 'p:9090'"),
        (("--capacity-from", "nowhere.json"), "--capacity-from nowhere.json: can't be read"),
        (("--capacity", str(EXAMPLE), *LOAD, "--acceptance", "nowhere"), "--acceptance nowhere: no such file"),
        (("--capacity", str(EXAMPLE), *LOAD, "--acceptance", str(EXAMPLE)), ": has no list"),
        (("--capacity", str(EXAMPLE), "--trace", "nowhere"), "--trace nowhere: no such file"),
        (("--capacity", str(EXAMPLE), *LOAD, "--simulate", "nowhere"), "--simulate nowhere: no such file"),
        (("--capacity", str(EXAMPLE), *LOAD, "--png", "nowhere/x.png"), "--png nowhere/x.png: give a file in a folder"),
        (("--capacity", str(EXAMPLE), *LOAD, "--html", "."), "--html .: give a file in a folder"),
        (("--capacity", str(EXAMPLE), *LOAD, "--rate", "1001", "--simulate"), "more than 300,000 requests; give a"),
    ],
)
def test_wrong_usage(arguments, message, capsys):
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_no_trace_is_made_for_a_plan_that_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("vllm_rose_plugin.planner.load.poisson_trace", None)
    for flags, text in ((("--tpot", "5"), "can't be held"), (("--gpus", "20"), "--gpus 20 is too few")):
        assert main([*BASE, *LOAD, "--rate", "900", *flags, "--simulate"]) == 1
        assert text in capsys.readouterr().err


def test_a_description_of_several_lines_stays_in_its_comment(tmp_path, capsys):
    path = tmp_path / "capacity.yaml"
    path.write_text(yaml.safe_dump(example_data() | {"description": "first\nsecond: line\n"}))
    assert main(["plan", "--capacity", str(path), *LOAD, "--emit", "metrics"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# capacity ASSUMED: first second: line\n#")
    assert "groups" in next(yaml.safe_load_all(text))


def test_a_curve_goes_without_plans_of_too_many_replicas(tmp_path, capsys):
    load = ("--rate", "400000", "--input", "2000", "--output", "300", "--tpot", "15")
    page = tmp_path / "curve.html"
    assert main([*BASE, *load, "--html", str(page)]) == 0
    assert 1 <= page.read_text().count("<tr><td>") < 24


def test_curve_files(tmp_path, capsys):
    png, page = tmp_path / "curve.png", tmp_path / "curve.html"
    assert main([*BASE, *LOAD, "--png", str(png), "--html", str(page)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    # Nothing is loaded from anywhere: addresses are XML's namespace names alone.
    assert set(re.findall(r'https?://[^"\s<]+', text)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"<(script|link|img|iframe)|@import|url\((?!#)", text)
    assert "capacity ASSUMED" in text and text.count("<tr><td>") >= 5
    first = text
    assert main([*BASE, *LOAD, "--html", str(page)]) == 0
    assert page.read_text() == first
    capsys.readouterr()


def emitted(capsys, *arguments):
    assert main([*BASE, *LOAD, "--emit", "metrics", *arguments]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# capacity ASSUMED")
    return list(yaml.safe_load_all(text))


def test_autoscaling_objects_are_valid(capsys):
    schema = json.loads((Path(__file__).parent / "keda_scaledobject.json").read_text())
    rules, adapter, *objects = emitted(capsys, "--name", "qwen3-235b", "--namespace", "serving")
    kinds = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert sorted(kinds) == [
        (kind, f"qwen3-235b-{role}")
        for kind in ("HorizontalPodAutoscaler", "ScaledObject")
        for role in ("decode", "prefill")
    ]
    recorded = {rule["record"] for rule in rules["groups"][0]["rules"]}
    for one in objects:
        if one["kind"] == "ScaledObject":
            jsonschema.validate(one, schema)
            assert {trigger["metadata"]["query"] for trigger in one["spec"]["triggers"]} <= recorded
        else:
            kubernetes_validate.validate(one, "1.31", strict=True)
            names = {metric["external"]["metric"]["name"] for metric in one["spec"]["metrics"]}
            assert names <= {rule["name"]["as"] for rule in adapter["externalRules"]}
    assert all('namespace="serving",pod=~"qwen3-235b-' in rule["expr"] for rule in rules["groups"][0]["rules"])


def test_thresholds_are_the_plan(capsys):
    assert main([*BASE, *LOAD, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    objects = emitted(capsys)[2:]
    by_name = {(one["kind"], one["metadata"]["name"]): one["spec"] for one in objects}
    decode = by_name["ScaledObject", "rose-decode"]["triggers"]
    assert float(decode[0]["metadata"]["threshold"]) == pytest.approx(plan["busiest_window"]["batch_mean"], rel=1e-4)
    prefill = by_name["ScaledObject", "rose-prefill"]["triggers"]
    tokens = 20 * 2817 / plan["replicas"]["prefill"]  # mean of the lognormal prompts, cut at 32,000
    assert float(prefill[0]["metadata"]["threshold"]) == pytest.approx(tokens, rel=0.02)
    assert by_name["ScaledObject", "rose-prefill"]["maxReplicaCount"] == 2 * plan["replicas"]["prefill"]


@pytest.mark.parametrize("version", ["installed", "0.33.0"])
def test_metric_names_are_vllms(version, capsys):
    sources = Path(os.environ.get("ROSE_VLLM_033", ROOT / "build/vllm-0.33.0"))
    root = sources if version == "0.33.0" else Path(find_spec("vllm").origin).parents[1]
    source = (root / "vllm/v1/metrics/loggers.py").read_text()
    exported = set(re.findall(r'name="(vllm:\w+)"', source))
    used = set()
    for rule in emitted(capsys)[0]["groups"][0]["rules"]:
        used |= set(re.findall(r"vllm:\w+", rule["expr"]))
    assert len(used) == 4
    for name in used:
        assert name.removesuffix("_total") in exported, name
    assert '"local_compute"' in (root / "vllm/v1/metrics/stats.py").read_text()
