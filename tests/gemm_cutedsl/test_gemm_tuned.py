"""The table of measured choices, what plans make of it, and how tuning fills it; all without a GPU."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from launch_emulation import emulated

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm import launch, plan, tune, tuned
from vllm_rose_plugin.kernels.gemm.call import Call, heuristic
from vllm_rose_plugin.kernels.gemm.candidates import candidates, free_fields
from vllm_rose_plugin.kernels.gemm.config import Epilogue
from vllm_rose_plugin.kernels.gemm.tune import Job
from vllm_rose_plugin.kernels.gemm.tuned import Choice, bucket
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.jit.targets import LIMITS

DEVICE = "NVIDIA Test 1"
device_name = tuned.device_name
DENSE = Call(
    target="sm_90a",
    sm_count=132,
    num_groups=1,
    n=4096,
    k=4096,
    token_format=TokenFormat.BF16_PERMUTED,
    early_counts=True,
)
EXPERTS = Call(
    target="sm_100a",
    sm_count=148,
    num_groups=16,
    n=3072,
    k=4096,
    token_format=TokenFormat.MXFP8_TCGEN05,
    epilogue=Epilogue.SWIGLU,
    out_format=TokenFormat.MXFP8_TCGEN05,
)


@pytest.fixture(autouse=True)
def on_a_device(tmp_path, monkeypatch):
    """A cache of the test's own, and a process that uses a GPU of that name."""
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "device_name", lambda: DEVICE)
    monkeypatch.setattr(tuned, "_recorded", {})
    tuned.forget()
    yield
    tuned.forget()


def new_process(monkeypatch):
    """As if the disk were all that is known."""
    monkeypatch.setattr(tuned, "_recorded", {})
    tuned.forget()


def other(call: Call, rows: int, index: int = 1) -> Choice:
    """A candidate that was twice as fast."""
    return Choice(free_fields(candidates(call, rows)[index]), 20.0, 10.0)


def chosen(call: Call, rows: int):
    return plan.plan(call, expected_rows=rows, num_rows=rows).config


def file_of(tmp_path):
    return tmp_path / "cache/tuned/NVIDIA_Test_1.json"


# ---- buckets ----


@pytest.mark.parametrize("groups", [1, 6, 16, 128])
def test_buckets_cover_every_number_of_rows_once(groups):
    rows = 1
    while rows < 3000 * groups:
        least, most = bucket(groups, rows)
        assert least == rows <= most
        assert bucket(groups, most) == bucket(groups, (least + most) // 2) == (least, most)
        rows = most + 1


def test_buckets_end_where_tiles_of_tokens_do():
    for tile in (8, 16, 32, 48, 64, 96, 128, 192, 256):
        assert bucket(16, tile * 16)[1] == tile * 16 and bucket(16, tile * 16 + 1)[0] == tile * 16 + 1
    assert [bucket(16, rows) for rows in (1, 2, 3, 5, 9, 16)] == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (9, 16)]


# ---- the table ----


@pytest.mark.parametrize("call", [DENSE, EXPERTS], ids=["sm_90a", "sm_100a"])
def test_a_choice_is_used_in_its_bucket_and_comes_back_from_disk(call, monkeypatch):
    rows = 100 * call.num_groups
    least, most = bucket(call.num_groups, rows)
    expected = candidates(call, most)[1]
    assert chosen(call, rows) == heuristic(call, rows) != expected
    tuned.record(call, rows, other(call, most))
    for _ in range(2):
        assert {chosen(call, each) for each in (least, rows, most)} == {expected}
        assert chosen(call, least - 1) == heuristic(call, least - 1)
        assert chosen(call, most + 1) == heuristic(call, most + 1)
        assert tuned.measured(call, least) == other(call, most) and tuned.measured(call, most + 1) is None
        new_process(monkeypatch)


def test_the_key_is_what_matters_to_speed():
    tuned.record(DENSE, 64, other(DENSE, 64))
    for changed in ({"sm_count": 114}, {"n": 4104}, {"bias": True}, {"early_counts": False}, {"out_dtype": "float16"}):
        assert tuned.measured(replace(DENSE, **changed), 64) is None
    tuned.record(EXPERTS, 1536, other(EXPERTS, 1536))
    same = replace(EXPERTS, rounding=Rounding.FLOOR, limit=7.0)
    config = chosen(same, 1536)
    assert free_fields(config) == other(EXPERTS, 1536).fields
    assert (config.rounding, config.limit) == (Rounding.FLOOR, 7.0), "what is computed is the call's own"


@pytest.mark.parametrize("us, counts", [(9.8, False), (9.72, False), (9.70, True), (10.1, False)])
def test_three_percent(us, counts):
    tuned.record(DENSE, 64, replace(other(DENSE, 64), heuristic_us=10.0, choice_us=us))
    assert (chosen(DENSE, 64) != heuristic(DENSE, 64)) == counts
    assert bool(tuned.digest()) == counts
    assert tuned.measured(DENSE, 64) is not None, "it need not be measured again"


def test_batch_invariant_calls_never_use_it():
    call = replace(DENSE, batch_invariant=True)
    tuned.record(DENSE, 64, other(DENSE, 64))
    assert chosen(call, 64) == heuristic(call, 64) != chosen(DENSE, 64)
    arguments = {"num_groups": 1, "n": 4096, "k": 4096, "max_rows": 64, "activation": Activation.MXFP8}
    (only,) = plan.warm_configs(target="sm_90a", sm_count=132, early_counts=True, batch_invariant=True, **arguments)
    assert only == heuristic(call, 64)


def test_a_layer_that_ran_before_takes_a_choice_from_then_on(monkeypatch):
    small = replace(DENSE, n=192, k=96)
    codes = torch.zeros(192, 96, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = pack_weight(Mxfp8Tensor(codes, torch.full((192, 3), 127, dtype=torch.uint8)), target="sm_90a")
    x, expected = torch.randn(64, 96).bfloat16(), candidates(small, 64)[1]
    with emulated(monkeypatch) as seen:
        launch.linear(x, weight)
        tuned.record(small, 64, other(small, 64))
        launch.linear(x, weight)
        launch.linear(x, weight, batch_invariant=True)
    assert seen.configs == [heuristic(small, 64), expected, heuristic(small, 64)] and expected != seen.configs[0]


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda text: text[:-20], "damaged"),
        (lambda text: text.replace("20.0", "90.0"), "damaged"),
        (lambda text: "[]", "damaged"),
        (lambda text: json.dumps(json.loads(text) | {"fingerprint": "0.0.1 of older kernels"}), "other kernels"),
    ],
    ids=["cut off", "edited", "no object", "stale"],
)
def test_a_file_that_cannot_be_used_is_named_and_ignored(tmp_path, monkeypatch, caplog, spoil, words):
    tuned.record(DENSE, 64, other(DENSE, 64))
    file = file_of(tmp_path)
    file.write_text(spoil(file.read_text()))
    new_process(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert all(chosen(DENSE, rows) == heuristic(DENSE, rows) for rows in (1, 60, 64))
    (record,) = caplog.records
    assert str(file) in record.getMessage() and words in record.getMessage()
    tuned.record(DENSE, 8, other(DENSE, 8))  # replaces it
    new_process(monkeypatch)
    assert chosen(DENSE, 8) != heuristic(DENSE, 8) and chosen(DENSE, 64) == heuristic(DENSE, 64)


def test_a_choice_of_fields_that_do_not_fit_is_ignored(caplog):
    tuned.record(DENSE, 64, Choice({"token_tile": 64}, 20.0, 10.0))
    assert chosen(DENSE, 64) == heuristic(DENSE, 64)
    assert "a tuned choice for Call(target='sm_90a'" in caplog.text


def test_a_disk_that_refuses_leaves_choices_in_memory(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "file"))
    tuned.record(DENSE, 64, other(DENSE, 64))
    assert chosen(DENSE, 64) != heuristic(DENSE, 64)


def test_other_devices_do_not_see_it(monkeypatch):
    tuned.record(DENSE, 64, other(DENSE, 64))
    monkeypatch.setattr(tuned, "device_name", lambda: "NVIDIA Test 2")
    tuned.forget()
    assert chosen(DENSE, 64) == heuristic(DENSE, 64) and tuned.digest() == ""


def test_the_device_is_known_once_this_process_uses_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: DEVICE)
    assert device_name() == "", "asking would create a CUDA context"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert device_name() == DEVICE


def test_what_another_process_wrote_meanwhile_stays(monkeypatch):
    tuned.record(DENSE, 64, other(DENSE, 64))
    ours = dict(tuned._recorded)
    new_process(monkeypatch)
    tuned.record(DENSE, 8, other(DENSE, 8))
    assert ours[DEVICE].keys().isdisjoint(tuned._recorded[DEVICE])
    new_process(monkeypatch)
    assert tuned.measured(DENSE, 64) == other(DENSE, 64) and tuned.measured(DENSE, 8) == other(DENSE, 8)


def test_verdicts_of_the_self_check_depend_on_it():
    from vllm_rose_plugin.kernels.gemm.family import FAMILY as MXFP8_LINEAR
    from vllm_rose_plugin.kernels.moe_experts.family import FAMILY as MOE_EXPERTS

    assert MXFP8_LINEAR.state() == MOE_EXPERTS.state() == ""
    tuned.record(DENSE, 64, other(DENSE, 64))
    assert MXFP8_LINEAR.state() == MOE_EXPERTS.state() == tuned.digest() != ""


def stream_k_choice(call: Call, rows: int) -> Choice:
    """A candidate with stream-K that isn't the heuristic's, twice as fast."""
    _, *others = candidates(call, rows)
    return Choice(free_fields(next(config for config in others if config.stream_k)), 20.0, 10.0)


def test_stream_k_is_kept_used_and_warmed_but_not_for_batch_invariant_calls(tmp_path, monkeypatch):
    choice = stream_k_choice(DENSE, 64)
    assert not heuristic(DENSE, 64).stream_k
    tuned.record(DENSE, 64, choice)
    stored = json.loads(file_of(tmp_path).read_text())["choices"]
    assert [each["fields"]["stream_k"] for each in stored.values()] == [True]
    new_process(monkeypatch)
    config = chosen(DENSE, 64)
    assert config.stream_k and free_fields(config) == choice.fields and tuned.digest()
    assert plan.plan(DENSE, expected_rows=64, num_rows=64).grid == 132
    invariant = replace(DENSE, batch_invariant=True)
    assert chosen(invariant, 64) == heuristic(invariant, 64) and tuned.configs(invariant, 64) == ()
    shape = {"target": "sm_90a", "sm_count": 132, "num_groups": 1, "n": 4096, "k": 4096, "early_counts": True}
    for device in (DEVICE, ""):
        monkeypatch.setattr(tuned, "device_name", lambda device=device: device)
        tuned.forget()
        warm = plan.warm_configs(**shape, max_rows=64, activation=Activation.BF16)
        assert config in warm and (heuristic(DENSE, 64) in warm) == (not device)
        warm = plan.warm_configs(**shape, max_rows=64, activation=Activation.BF16, batch_invariant=True)
        assert not any(each.stream_k for each in warm)


def test_stream_k_of_a_table_where_it_can_not_be_is_ignored(caplog):
    experts = replace(DENSE, num_groups=8)
    fields = stream_k_choice(DENSE, 64).fields
    tuned.record(experts, 512, Choice(fields, 20.0, 10.0))
    assert chosen(experts, 512) == heuristic(experts, 512) and "stream_k is for a single weight" in caplog.text
    tuned.record(DENSE, 64, Choice({k: v for k, v in fields.items() if k != "stream_k"}, 20.0, 10.0))
    assert chosen(DENSE, 64) == heuristic(DENSE, 64), "of a version that had none"


def test_a_launch_of_a_tuned_stream_k_brings_its_workspace(monkeypatch):
    small = replace(DENSE, n=192, k=96)
    codes = torch.zeros(192, 96, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = pack_weight(Mxfp8Tensor(codes, torch.full((192, 3), 127, dtype=torch.uint8)), target="sm_90a")
    tuned.record(small, 64, stream_k_choice(small, 64))
    with emulated(monkeypatch) as seen:
        for invariant in (False, True):
            launch.linear(torch.randn(64, 96).bfloat16(), weight, batch_invariant=invariant)
    assert [config.stream_k for config in seen.configs] == [True, False] and len(seen.flags) == 1


# ---- all configs that calls can need ----


@pytest.mark.parametrize("target, groups", [("sm_90a", 1), ("sm_90a", 16), ("sm_100a", 16)])
def test_warm_configs_are_all_that_calls_can_need(target, groups):
    shape = {"target": target, "sm_count": LIMITS[target].sm_count, "num_groups": groups, "n": 4096, "k": 1536}
    most = 1100 * groups
    rows = [*range(1, 3 * groups), *range(3 * groups, most + 1, max(1, groups // 3)), most]

    def calls():
        for each in rows:
            token_format = plan.token_format_of(
                target=target, activation=Activation.MXFP8, num_groups=groups, num_rows=each
            )
            yield Call(**shape, token_format=token_format), each

    for index, (call, each) in enumerate({(c, bucket(groups, r)[1]): None for c, r in calls()}):
        found = candidates(call, each)
        tuned._recorded.setdefault(DEVICE, {})[tuned._key(call, each)] = other(call, each, index % len(found))
    tuned.forget()
    warm = plan.warm_configs(**shape, max_rows=most, activation=Activation.MXFP8)
    needed = {chosen(call, each) for call, each in calls()}
    assert needed <= set(warm)
    assert len(needed) > len({heuristic(call, each) for call, each in calls()}), "tuned ones are among them"


def test_without_a_device_the_configs_of_every_table_are_warmed_beside_the_heuristics(monkeypatch):
    arguments = {"target": "sm_90a", "sm_count": 132, "num_groups": 1, "n": 4096, "k": 4096, "early_counts": True}
    untuned = plan.warm_configs(**arguments, max_rows=64, activation=Activation.BF16)
    first, second = candidates(DENSE, 64)[1:3]
    tuned.record(DENSE, 64, other(DENSE, 64, 1))
    monkeypatch.setattr(tuned, "device_name", lambda: "NVIDIA Test 2")
    tuned.record(DENSE, 64, other(DENSE, 64, 2))
    monkeypatch.setattr(tuned, "device_name", lambda: "")
    tuned.forget()
    assert chosen(DENSE, 64) == heuristic(DENSE, 64) and tuned.digest() == ""
    warm = plan.warm_configs(**arguments, max_rows=64, activation=Activation.BF16)
    assert set(warm) == {*untuned, first, second}


# ---- tuning ----


class FakeBench:
    """Times by config; those in `wrong` compute something else, those in `broken` raise."""

    def __init__(self, us, *, wrong=(), broken=(), least_us=None):
        self.us, self.least_us, self.wrong, self.broken = us, least_us or us, wrong, broken

    def fault(self, config):
        if config in self.broken:
            raise RuntimeError("no such instruction")
        return "3 rows are off" if config in self.wrong else ""

    def times(self, configs, rows):
        assert not set(configs) & {*self.wrong, *self.broken}, "only what is right is timed"
        us = self.us if rows == bucket(DENSE.num_groups, rows)[1] else self.least_us
        return [us.get(config, 50.0) for config in configs]


def test_the_fastest_wins():
    first, second, third, *_ = candidates(DENSE, 96)
    choice = tune.choose(DENSE, 96, bench=FakeBench({first: 20.0, second: 15.0, third: 12.0}))
    assert choice == Choice(free_fields(third), 20.0, 12.0) and choice.counts


def test_a_wrong_candidate_is_left_out_even_if_it_is_the_fastest(caplog):
    first, second, third, fourth, *_ = candidates(DENSE, 96)
    bench = FakeBench({first: 20.0, second: 1.0, third: 2.0, fourth: 15.0}, wrong=[second], broken=[third])
    assert tune.choose(DENSE, 96, bench=bench) == Choice(free_fields(fourth), 20.0, 15.0)
    assert "3 rows are off: GemmConfig(" in caplog.text and "RuntimeError: no such instruction" in caplog.text


def test_the_heuristic_stays_where_nothing_is_faster_by_three_percent():
    first, second, *_ = candidates(DENSE, 96)
    choice = tune.choose(DENSE, 96, bench=FakeBench({first: 20.0, second: 19.5}))
    assert choice == Choice(free_fields(first), 20.0, 20.0) and not choice.counts


def test_what_is_slower_with_the_least_rows_of_the_bucket_is_passed_over():
    first, second, third, *_ = candidates(DENSE, 96)
    least = {heuristic(DENSE, 65): 10.0, second: 11.0, third: 9.0}
    bench = FakeBench({first: 20.0, second: 12.0, third: 15.0}, least_us=least)
    assert tune.choose(DENSE, 96, bench=bench) == Choice(free_fields(third), 20.0, 15.0)


def test_a_heuristic_that_is_wrong_is_an_error():
    first, *_ = candidates(DENSE, 96)
    with pytest.raises(RuntimeError, match="the heuristic's config gives a wrong result: 3 rows are off"):
        tune.choose(DENSE, 96, bench=FakeBench({}, wrong=[first]))


def fast_second(call, rows):
    """Of every call the second candidate is the fastest."""
    return FakeBench({candidates(call, rows)[1]: 10.0})


def results(jobs, **how):
    compiled = []
    found = list(tune.tune(jobs, bench_of=how.pop("bench_of", fast_second), compile_all=compiled.extend, **how))
    return found, compiled


def test_tuning_fills_the_table_and_a_second_run_reads_it(monkeypatch, tmp_path):
    jobs = [Job(DENSE, rows) for rows in (1, 8, 7, 64)]  # 7 and 8 share a bucket
    found, compiled = results(jobs)
    assert [(result.rows, result.from_table) for result in found] == [(1, False), (8, False), (64, False)]
    assert {config for _, config in compiled} >= {c for rows in (1, 8, 64) for c in candidates(DENSE, rows)}
    assert chosen(DENSE, 60) == candidates(DENSE, 64)[1] and file_of(tmp_path).exists()
    new_process(monkeypatch)
    again, compiled = results([*jobs, Job(DENSE, 256)])
    assert [(r.rows, r.from_table) for r in again] == [(1, True), (8, True), (64, True), (256, False)]
    assert {call for call, _ in compiled} == {DENSE} and len({c for _, c in compiled}) < 2 * len(candidates(DENSE, 256))
    assert results(jobs)[1] == [], "nothing is compiled where nothing is measured"
    assert all(not result.from_table for result in results(jobs, again=True)[0])
    line = tune.summary(again, seconds=1.5)
    assert line.startswith("tuned 4 GEMM sizes in 1.5 s (3 from the table): 4 take another config")
    assert line.endswith("5.00 times as fast")


def test_what_cannot_be_measured_is_named_and_the_rest_goes_on(caplog):
    def bench_of(call, rows):
        if rows == 8:
            raise RuntimeError("CUDA out of memory")
        return fast_second(call, rows)

    found, _ = results([Job(DENSE, 8), Job(DENSE, 64)], bench_of=bench_of)
    assert [result.rows for result in found] == [64] and "8 rows can't be tuned: RuntimeError: CUDA out" in caplog.text
    assert tuned.measured(DENSE, 8) is None


def test_batch_invariant_calls_are_not_tuned():
    assert results([Job(replace(DENSE, batch_invariant=True), 64)]) == ([], [])
