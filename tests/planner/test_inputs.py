"""Capacity files, loads, traces, acceptance and benchmark results: what is read, and how faults are told."""

import json
from datetime import date

import numpy as np
import pytest
import yaml
from planner_cases import EXAMPLE, example, example_data

from vllm_rose_plugin.planner.bench_capacity import capacity_from_bench
from vllm_rose_plugin.planner.capacity import Capacity, CapacityFile, load_capacity
from vllm_rose_plugin.planner.load import (
    Lengths,
    LoadError,
    Request,
    distribution,
    from_trace,
    poisson_trace,
    read_trace,
)
from vllm_rose_plugin.planner.plan import PlanError, read_acceptance
from vllm_rose_plugin.recipes.finding import RecipeError


def test_interpolation():
    capacity = example()
    assert capacity.prefill_seconds(np.array([10.0, 256, 640, 1024, 131_072])) == pytest.approx(
        [0.0256, 0.0256, (256 / 10_000 + 1024 / 30_000) / 2, 1024 / 30_000, 131_072 / 26_000]
    )
    assert capacity.step_seconds(1, 1) == pytest.approx(9e-3) == capacity.step_seconds(0.5, 1024)
    assert capacity.step_seconds(160, 8704) == pytest.approx((11.0 + 12.5 + 13.5 + 19.5) / 4 / 1e3)
    assert capacity.step_seconds(1024, 131_584) == pytest.approx(0.22)
    assert capacity.transfer_seconds(np.array([1000.0])) == pytest.approx([0.01 + 1000 * 192_512 / 50e9])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data["prefill"]["points"][2].update(tokens_per_second=500_000),
            r"prefill\.points\.2 = 500000\.0: 4,096 tokens take 0\.008192 s, less than the 0\.03413 s of 1,024",
        ),
        (
            lambda data: data["decode"]["points"][6].update(step_ms=10.4),
            r"decode\.points\.6 = 10\.4: batch 256 at context 1024 takes 10\.4 ms, less than the 11 ms of batch 64",
        ),
        (
            lambda data: data["decode"]["points"][4].update(step_ms=10.4),
            r"batch 64 at context 16384 takes 10\.4 ms, less than the 11 ms of batch 64 at context 1024",
        ),
        (
            lambda data: data["decode"]["points"].pop(),
            r"decode\.points: has no point for batch 1024 at context 131584 \(1 missing in all\)",
        ),
        (
            lambda data: data["decode"]["points"].append(data["decode"]["points"][0]),
            r"decode\.points\.12 = batch 1, context 1024: is there twice",
        ),
        (
            lambda data: data["prefill"]["points"].append({"prompt_tokens": 256, "tokens_per_second": 9}),
            r"prefill\.points\.6 = 256: is there twice",
        ),
        (lambda data: data.update(source="guessed"), r"source = guessed: is not among .*Legal: measured, assumed"),
        (lambda data: data.pop("description"), r"description: is not given"),
        (
            lambda data: data["decode"].update(max_batch=8),
            r"decode\.max_batch = 8: is no key in this place. Legal: gpus, kv_cache",
        ),
        (lambda data: data["decode"].update(gpus=0), r"decode\.gpus = 0: is out of range. Legal: 1 to 1000"),
        (lambda data: data["prefill"].update(gpus=None), r"prefill\.gpus: has no value. Legal: a whole number"),
        (lambda data: data["prefill"].update(points=[]), r"prefill\.points = \[\]: is empty"),
        (lambda data: data.update(capacity=2), r"capacity = 2"),
        (
            lambda data: data["prefill"]["points"][0].update(tokens_per_second=float("inf")),
            r"prefill\.points\.0\.tokens_per_second = inf: is out of range. Legal: above 0",
        ),
        (
            lambda data: data["decode"].update(kv_cache_tokens=10**400),
            r"decode\.kv_cache_tokens = 1000.*: is out of range",
        ),
        (lambda data: data["decode"]["points"][9].update(batch=10**7), r"decode\.points\.9\.batch = 10000000"),
        (lambda data: data.update(description=date(2026, 11, 30)), r'description: is read as a date.*"2026-11-30"'),
    ],
)
def test_inconsistent_capacity_files(tmp_path, change, message):
    data = example_data()
    change(data)
    path = tmp_path / "capacity.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    with pytest.raises(RecipeError, match=message):
        load_capacity(path)


def test_json_s_short_exponents_are_numbers(tmp_path):
    path = tmp_path / "capacity.json"
    path.write_text(json.dumps(example_data() | {"kv_transfer": {"seconds": 1e-05, "gb_per_s": 1e16}}))
    assert "1e-05" in path.read_text()
    assert load_capacity(path).file.kv_transfer.seconds == 1e-05


def test_noise_is_lifted():
    data = example_data()
    data["decode"]["points"][6]["step_ms"] = 10.9  # batch 256, below the 11.0 of batch 64
    data["prefill"]["points"][1]["tokens_per_second"] = 41_000  # 1,024 tokens in 0.02498 s, 256 take 0.0256 s
    capacity = Capacity(CapacityFile.model_validate(data))
    assert capacity.step_seconds(256, 1024) == pytest.approx(11.0e-3)
    assert capacity.prefill_seconds(np.array([1024.0])) == pytest.approx([0.0256])


def test_faults_name_the_line(tmp_path):
    path = tmp_path / "capacity.yaml"
    path.write_text(EXAMPLE.read_text().replace("tokens_per_second: 30000", "tokens_per_second: -1"))
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "-1}" in text)
    with pytest.raises(RecipeError, match=rf"capacity\.yaml:{line}: prefill\.points\.1\.tokens_per_second = -1"):
        load_capacity(path)
    path.write_text("capacity: [1")
    with pytest.raises(RecipeError, match=r"capacity\.yaml:1: .*is not YAML"):
        load_capacity(path)


def test_lengths():
    lognormal = Lengths.parse("lognormal:1000:4000:9000", flag="--input")
    assert lognormal.quantile(0.5) == 1000 and lognormal.quantile(0.95) == 4000 and lognormal.quantile(0.9999) == 9000
    uniform = Lengths.parse("uniform:10:20", flag="--input")
    assert uniform.quantile(0.5) == 15 and Lengths.parse("7", flag="--input").quantile(0.1) == 7
    for text in ("0", "x", "uniform:5", "uniform:9:5", "lognormal:10:20", "normal:1:2", "lognormal:10:5:20", "-3", ""):
        with pytest.raises(LoadError, match=r"--output '.*' is no length; give N, uniform"):
            Lengths.parse(text, flag="--output")


def test_trace_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival_s": 11.5, "input_tokens": 7, "output_tokens": 3, "user": "a"}\n\n'
        '{"timestamp": 10000, "input_length": 5, "output_length": 2, "hash_ids": [1]}\n'
    )
    requests = read_trace(path)
    assert [(one.arrival, one.input_tokens, one.output_tokens) for one in requests] == [(0, 5, 2), (1.5, 7, 3)]


def test_only_a_line_feed_ends_a_request(tmp_path):
    path = tmp_path / "trace.jsonl"
    line = '{"arrival_s": 1, "input_tokens": 7, "output_tokens": 3, "user": "a\u2028b\u0085c"}'
    path.write_bytes(f"{line}\r\n{line}\n".encode())
    assert len(read_trace(path)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"holds no request; for a plan without load give --rate 0"),
        ("[1]\n", r":1: is no JSON object: '\[1\]'"),
        ('{"arrival_s": 1, "input_tokens": 5}\n', r":1: output_tokens = None; give a number >= 0"),
        ('{"arrival_s": -1, "input_tokens": 5, "output_tokens": 1}\n', r":1: arrival_s = -1; give a number >= 0"),
        ('{"arrival_s": NaN, "input_tokens": 5, "output_tokens": 1}\n', r":1: arrival_s = nan"),
        ('{"arrival_s": 1, "input_tokens": 1%s, "output_tokens": 1}\n' % ("0" * 400), r":1: input_tokens = 1000"),
        ("[" * 100_000, r":1: is no JSON object"),
        ('{"arrival_s": 1, "input_tokens": 0, "output_tokens": 1}\n', r":1: input_tokens = 0; give a whole number"),
        ('{"arrival_s": 1, "input_tokens": 5, "output_tokens": 1.5}\n', r":1: output_tokens = 1\.5; give a whole"),
    ],
)
def test_trace_faults_name_the_line(tmp_path, text, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(LoadError, match=message):
        read_trace(path)


def test_a_long_pause_takes_no_memory():
    requests = [Request(0.0, 5, 5), Request(1.7e9, 5, 5)]  # one line without the epoch that the others have
    load = from_trace(requests, window_seconds=1e-3, name="trace")
    assert [window.weight for window in load.windows] == [0.5, 0.5]


def test_windows_hold_every_request_once():
    lengths = {"inputs": Lengths.parse("100", flag="--input"), "outputs": Lengths.parse("10", flag="--output")}
    requests = poisson_trace(rate=5, seconds=95, seed=1, **lengths)
    load = from_trace(requests, window_seconds=20, name="trace")
    assert sum(window.weight for window in load.windows) == pytest.approx(1)
    assert sum(len(window.input_tokens) for window in load.windows) == len(requests)
    assert len(load.windows) == 5 and all(3 < window.rate < 7 for window in load.windows)
    one = from_trace(requests[:1], window_seconds=20, name="one")
    assert one.rate == pytest.approx(1 / 10) and one.windows[0].weight == 1
    assert distribution(rate=5, **lengths).rate == 5


def test_acceptance_file(tmp_path):
    path = tmp_path / "acceptance.json"
    path.write_text(json.dumps({"format": "rose-mtp-acceptance", "acceptance_by_position": [0.8, 0.5]}))
    assert read_acceptance(path) == [0.8, 0.5]
    for shares in ([0.5, 0.8], [1.2], "0.8", [None], None):
        path.write_text(json.dumps({"acceptance_by_position": shares}))
        with pytest.raises(PlanError, match=r"acceptance_by_position = .*from 0 to 1 that don't rise"):
            read_acceptance(path)
    path.write_text("{}")
    with pytest.raises(PlanError, match=r"has no list acceptance_by_position"):
        read_acceptance(path)


def bench(tmp_path, name, **values):
    result = {"completed": 10, "failed": 0, "max_concurrency": 1, "median_ttft_ms": 50.0, "median_tpot_ms": 9.0}
    path = tmp_path / name
    path.write_text(json.dumps(result | values))
    return path


def test_capacity_from_benchmark_results(tmp_path):
    files = [
        bench(tmp_path, "p2", total_input_tokens=40_000, total_output_tokens=10, median_ttft_ms=100.0),
        bench(tmp_path, "p1", total_input_tokens=10_000, total_output_tokens=10),
        bench(tmp_path, "d1", total_input_tokens=10_000, total_output_tokens=2000, max_concurrency=8),
    ]
    data = capacity_from_bench(files, description="bench")
    assert data["prefill"]["points"] == [
        {"prompt_tokens": 1000, "tokens_per_second": 20_000.0},
        {"prompt_tokens": 4000, "tokens_per_second": 40_000.0},
    ]
    assert data["decode"]["points"] == [{"batch": 8, "context": 1100, "step_ms": 9.0}]
    assert data["source"] == "measured"
    path = tmp_path / "capacity.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(RecipeError, match=r"decode\.kv_cache_tokens: has no value"):
        load_capacity(path)  # what the benchmark can't know has to be filled in
    data["prefill"]["gpus"], data["decode"]["gpus"], data["decode"]["kv_cache_tokens"] = 1, 1, 100_000
    data["kv_transfer"] = {"seconds": 0.01}
    path.write_text(yaml.safe_dump(data))
    assert load_capacity(path).max_batch == 8


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"total_input_tokens": 10, "total_output_tokens": 10, "max_concurrency": 4}, r"needs --max-concurrency 1"),
        ({"total_input_tokens": 10, "total_output_tokens": 90, "max_concurrency": None}, r"max_concurrency = None"),
        ({"total_input_tokens": 10, "total_output_tokens": 90, "failed": 2}, r"2 requests failed"),
        ({"total_input_tokens": 10}, r"has no number total_output_tokens"),
        (
            {"total_input_tokens": 10, "total_output_tokens": 10, "median_ttft_ms": 0},
            r"median_ttft_ms = 0; give a run with a number above 0",
        ),
        ({"total_input_tokens": 10, "total_output_tokens": float("inf")}, r"total_output_tokens = inf"),
        ({"total_input_tokens": 10, "total_output_tokens": 90, "max_concurrency": 0}, r"max_concurrency = 0"),
        ({"total_input_tokens": 10, "total_output_tokens": 90}, r"none of 1 files is a prefill"),
    ],
)
def test_benchmark_faults(tmp_path, values, message):
    with pytest.raises(PlanError, match=message):
        capacity_from_bench([bench(tmp_path, "result.json", **values)], description="bench")
