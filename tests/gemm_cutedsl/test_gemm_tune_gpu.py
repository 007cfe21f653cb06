"""Tuning on a GPU: two small calls, whose results stay near float64 with whichever config is then used."""

from dataclasses import replace

import gemm_calls as calls
import gemm_oracle as oracle
import pytest
import torch
from gemm_calls import POISON, poisoned
from gemm_oracle import Runs

from vllm_rose_plugin.kernels.gemm import plan, tune, tuned, workspace
from vllm_rose_plugin.kernels.gemm.call import Call, heuristic
from vllm_rose_plugin.kernels.gemm.candidates import candidates, free_fields
from vllm_rose_plugin.kernels.gemm.config import Epilogue
from vllm_rose_plugin.kernels.gemm.tune import Job
from vllm_rose_plugin.kernels.gemm.tune_bench import DeviceBench, compile_all
from vllm_rose_plugin.kernels.jit.compile import counts
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts

pytestmark = pytest.mark.gpu
GROUPS, N, K, TOKENS = 6, 384, 544, 16
"""Small, and multiples of few things."""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """No table yet; kernels come from the cache that others use."""
    monkeypatch.setattr(tuned, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(tuned, "_recorded", {})
    tuned.forget()
    yield
    tuned.forget()


def jobs() -> list[Job]:
    """w2 of a few experts, and w13 with SwiGLU."""
    target, sm_count = device_facts(torch.cuda.current_device())
    call = Call(
        target=target,
        sm_count=sm_count,
        num_groups=GROUPS,
        n=N,
        k=K,
        token_format=calls.token_format("w8a8"),
    )
    swiglu = replace(call, epilogue=Epilogue.SWIGLU, out_format=call.token_format)
    return [Job(call, GROUPS * TOKENS), Job(swiglu, GROUPS * TOKENS)]


def check_against_float64() -> None:
    runs = Runs.of([TOKENS, 3, 0, 40, 1, TOKENS], gaps=[1, 0], spare=20)
    weight = oracle.random_operand(GROUPS, N, K, seed=1, device="cuda")
    tokens = oracle.random_operand(runs.num_rows, K, seed=2, device="cuda")
    oracle.poison_rows(tokens, runs.outside("cuda"))
    out, fence = poisoned((runs.num_rows, N), torch.bfloat16)
    packed = calls.tokens(tokens, runs, "w8a8")
    calls.plain(calls.pack(weight), packed, runs, out=out, expected_rows=GROUPS * TOKENS)
    fence.check()
    assert not oracle.grouped_faults(out, tokens, weight, runs, fp8=calls.is_fp8("w8a8"), outside=POISON)


def test_two_calls_are_tuned_and_a_second_run_reads_the_table(caplog):
    check_against_float64()
    first = list(tune.tune(jobs()))
    assert len(first) == 2 and not any(result.from_table for result in first), caplog.text
    assert "leaves a candidate out" not in caplog.text, "every candidate must be right"
    for result in first:
        print(result.rows, result.choice)
        assert 0 < result.choice.choice_us <= result.choice.heuristic_us < 1e4
    check_against_float64()
    compiled = counts.compiled
    tuned._recorded.clear()
    second = list(tune.tune(jobs()))
    assert [result.choice for result in second] == [result.choice for result in first]
    assert all(result.from_table for result in second) and counts.compiled == compiled


def test_every_candidate_serves_if_the_table_says_so():
    """As if it had been the fastest: ragged runs against float64, through the same launch as ever."""
    job = jobs()[0]
    found = candidates(job.call, job.rows[1])
    assert len(found) > 1
    for config in found:
        tuned.record(job.call, job.expected_rows, tuned.Choice(free_fields(config), 2.0, 1.0))
        assert plan.plan(job.call, expected_rows=job.expected_rows, num_rows=200).config == config
        check_against_float64()


def test_a_config_is_timed_near_what_it_takes():
    """Twice the same config gives the same time, and more tokens take longer."""
    job = jobs()[0]
    call = replace(job.call, n=4096, k=4096, num_groups=1)
    rows = 1024
    config = heuristic(call, rows)
    compile_all([(call, config)])
    bench = DeviceBench(call, rows)
    one, same = bench.times([config, config], rows)
    assert abs(one - same) < 0.1 * one
    assert bench.times([config], 8)[0] < one


@pytest.mark.skipif(not (torch.cuda.is_available() and calls.on_hopper()), reason="stream-K is sm_90's")
@pytest.mark.parametrize("rows", [16, 48, 64, 512])
def test_stream_k_is_right_is_timed_in_graphs_and_leaves_its_flags_down(rows, caplog):
    """A lost flag hangs the GPU: with a time limit. The times are printed, of the heuristic's config first."""
    target, sm_count = device_facts(torch.cuda.current_device())
    token_format = calls.token_format("w8a16")
    call = Call(
        target=target, sm_count=sm_count, num_groups=1, n=9216, k=4096, token_format=token_format, early_counts=True
    )
    found = candidates(call, rows)
    shared = [config for config in found if config.stream_k]
    assert len(shared) >= 2
    compile_all([(call, config) for config in found])
    bench = DeviceBench(call, rows)
    assert {config: bench.fault(config) for config in found} == dict.fromkeys(found, "")
    for config, us in zip(found, bench.times(found, rows), strict=True):
        print(f"{rows} rows: {us:.2f} us, {free_fields(config)}")
    assert [bench.fault(config) for config in shared] == [""] * len(shared), "after graphs, on the same flags"
    assert tune.choose(call, rows, bench=bench).choice_us > 0 and "leaves a candidate out" not in caplog.text
    torch.cuda.synchronize()
    assert not any(bool(flags.rows.any()) for flags in workspace._flags.values()), "a flag is still raised"
