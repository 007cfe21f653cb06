"""The half of the all-to-all's benchmarks that needs no GPU."""

import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from exchange_cases import expected_out, expected_received, inputs_of, shape_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def serving():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import bench_all_to_all_serving
    finally:
        sys.path.remove(str(BENCHMARKS))
    return bench_all_to_all_serving


@pytest.fixture(scope="module")
def kernels():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import bench_all_to_all
    finally:
        sys.path.remove(str(BENCHMARKS))
    return bench_all_to_all


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", "0"], "--tokens [0] must be 1 to 131072"),
        (["--tokens", "131073"], "must be 1 to 131072"),
        (["--emulate", "4", "7"], "--emulate [4, 7] must be even numbers of ranks, 2 to 72"),
        (["--emulate", "74"], "2 to 72"),
        (["--payload", "fp8"], "--payload"),
        (["--peers", "nobody"], "--peers"),
    ],
)
def test_the_kernels_benchmark_refuses_what_it_cannot_run(kernels, monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(sys, "argv", ["bench_all_to_all.py", *arguments])
    with pytest.raises(SystemExit):
        kernels.parsed()
    assert said in capsys.readouterr().err


def test_its_defaults_have_all_sizes_and_peers(kernels, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_all_to_all.py"])
    arguments = kernels.parsed()
    assert arguments.tokens == [1, 2, 4, 8, 16, 32, 64, 128, 512, 2048]
    assert arguments.payload == ["mxfp8", "bfloat16"]
    assert arguments.peers == ["vllm_agrs", "flashinfer_one_sided", "deepep_v2"]


def test_bars_the_best_peer_and_the_slope_are_said(kernels):
    def row(case, provider, shape, us, share=0.5):
        return {"case": case, "provider": provider, "shape": shape, "us": str(us), "share_of_limit": f"{share:.3f}"}

    found = [row("limit", "peer_copy", "bytes=9", 1)]
    found += [row("pair mxfp8", name, "M=64;H=4096;E=128;ranks=2", us) for name, us in
              (("rose", 15.0), ("rose_split", 9.0), ("vllm_agrs", 30.0), ("deepep_v2", 20.0))]  # fmt: skip
    found += [row("pair bfloat16", "rose", "M=16;H=4096;E=128;ranks=2", 12.0)]
    found += [row("pair mxfp8", "rose", "M=2048;H=4096;E=128;ranks=2", 90.0, 0.74)]
    found += [row("dispatch mxfp8", "rose", "M=64;H=4096;E=128;ranks=2", 99.0)]
    found += [row("emulated pair", "rose", f"M=1;H=4096;E=128;ranks={n}", 10 + n / 4) for n in (72, 4, 16)]
    assert list(kernels.verdicts(found)) == [
        "pair mxfp8 M=64: rose 15.0 us, bar 14 MISSED, 0.75 times deepep_v2, bar 0.7 MISSED",
        "pair bfloat16 M=16: rose 12.0 us",
        "pair mxfp8 M=2048: rose 90.0 us, 0.74 of a copy, bar 0.75 MISSED",
        "emulated ranks, M=1: +0.250 us for each further rank, of [(4, 11.0), (16, 14.0), (72, 28.0)]",
    ]


@pytest.mark.parametrize("wrong", [None, "topk_ids", "tokens", "out"])
def test_every_part_of_a_chains_result_is_compared_with_the_oracle(kernels, wrong):
    shape, num_tokens = shape_of(2, max_tokens=3), 3
    sets = [[inputs_of(shape, num_tokens, 2 * i + rank) for rank in range(2)] for i in range(kernels.SETS)]
    right = [([expected_received(of, shape, rank) for rank in range(2)], expected_out(of, shape, 1)) for of in sets]
    mine = [(expected_received(of, shape, 1), expected_out(of, shape, 1)) for of in sets]
    case = SimpleNamespace(
        num_tokens=num_tokens,
        rank=1,
        received=[r for r, _ in mine],
        outs=[o for _, o in mine],
        expected=right.__getitem__,
    )
    last, out = mine[-1]
    if wrong is None:
        kernels.check_ours(case, "rose pair")
        return
    {"topk_ids": last.topk_ids, "tokens": last.tokens.scales, "out": out}[wrong][0] += 1
    with pytest.raises(AssertionError, match=r"rose pair: .* of set 7 differs from the oracle"):
        kernels.check_ours(case, "rose pair")
    if wrong == "out":
        kernels.check_ours(case, "rose dispatch")


@pytest.fixture
def run(serving, monkeypatch, tmp_path):
    """Runs main() with ranks that print these results, by engine and rank."""

    def call(*arguments, prints):
        def start(plan, directory, rank, port):
            name = directory.name
            assert serving.ENGINES[name].items() <= plan["engine"].items()
            lines = [f"RESULT {json.dumps({'batch': batch, 'us': us})}" for batch, us in prints[name][rank]]
            (directory / f"{rank}.out").write_text("\n".join(["loading", *lines, ""]))
            program = "import time; time.sleep(60)" if lines and name == "default_nvlink" else f"exit({not lines:d})"
            return subprocess.Popen([sys.executable, "-c", program], start_new_session=True)

        monkeypatch.setattr(serving, "start", start)
        monkeypatch.setattr(serving.signal, "signal", lambda *_: None)
        monkeypatch.setattr(sys, "argv", ["bench_all_to_all_serving.py", "--out", str(tmp_path), *arguments])
        serving.main()

    return call


def rows(folder):
    with (folder / "all_to_all_end_to_end.csv").open() as file:
        return {(row["provider"], row["shape"]): row for row in csv.DictReader(file)}


def test_the_slower_rank_counts_and_the_median_of_turns(run, tmp_path, capsys):
    default = [[(1, [100.0, 110.0, 300.0])], [(1, [90.0, 120.0, 100.0])]]
    ours = [[(1, [60.0, 60.0, 60.0])], [(1, [50.0, 70.0, 100.0])]]
    run("--engines", "default", "rose", "--batches", "1", prints={"default": default, "rose": ours})
    found = rows(tmp_path)
    assert {key: row["us"] for key, row in found.items()} == {
        ("default", "batch=1;ranks=2"): "120.0",
        ("rose", "batch=1;ranks=2"): "70.0",
    }
    assert {row["area"] for row in found.values()} == {"all_to_all_end_to_end"}
    assert "rose 1.71 times default, bar 1.1\n" in capsys.readouterr().out


def test_an_engine_that_fails_is_named_and_the_others_stay(run, tmp_path, capsys):
    one = [[(1, [100.0]), (8, [200.0])], [(1, [100.0])]]
    with pytest.raises(SystemExit, match="failed: rose"):
        run("--engines", "default", "rose", prints={"default": one, "rose": [[], [(1, [1.0])]]})
    assert list(rows(tmp_path)) == [("default", "batch=1;ranks=2")], "what one rank alone measured doesn't count"
    assert "loading" in capsys.readouterr().err


def test_a_rank_that_fails_ends_the_other(serving, run, monkeypatch, capsys):
    monkeypatch.setattr(serving, "GRACE_S", 0.2)
    with pytest.raises(SystemExit, match="failed: default_nvlink"):
        run("--engines", "default_nvlink", prints={"default_nvlink": [[(1, [1.0])], []]})
    said = capsys.readouterr().err
    assert "rank 0 was stopped" in said and "rank 1 ended with 1" in said


def test_the_first_error_is_said_and_rows_are_written_while_an_engine_runs(serving, monkeypatch, tmp_path, capsys):
    """Rank 0 waits for ever, rank 1 for a moment; then it fails, and much output follows its error."""
    written, write = [], serving.write
    monkeypatch.setattr(serving, "write", lambda *a: (write(*a), written.append(time.monotonic())))
    fails = "time.sleep(2); print('ValueError: the cause' + '\\n' * 999 + 'RuntimeError: what follows'); sys.exit(3)"

    def start(plan, directory, rank, port):
        program = """import sys, time; print('RESULT {"batch": 1, "us": [5.0]}', flush=True); """
        program += fails if rank else "time.sleep(300)"
        with (directory / f"{rank}.out").open("w") as out:
            return subprocess.Popen([sys.executable, "-c", program], stdout=out, start_new_session=True)

    monkeypatch.setattr(serving, "start", start)
    monkeypatch.setattr(serving, "GRACE_S", 0.2)
    monkeypatch.setattr(serving.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["bench_all_to_all_serving.py", "--out", str(tmp_path), "--engines", "rose"])
    begin = time.monotonic()
    with pytest.raises(SystemExit, match="failed: rose"):
        serving.main()
    assert begin < written[0] < begin + 2 < time.monotonic() < begin + 60 and len(rows(tmp_path)) == 1
    assert "ValueError: the cause" in capsys.readouterr().err


def test_the_deadline_ends_an_engine_and_starts_no_other(serving, run, monkeypatch, tmp_path, capsys):
    hangs = [[(1, [10.0])], [(1, [10.0])]]
    begin = time.monotonic()
    with pytest.raises(SystemExit, match="failed: default_nvlink"):
        run("--engines", "default_nvlink", "rose", "--deadline", "1", prints={"default_nvlink": hangs, "rose": hangs})
    assert time.monotonic() - begin < 60 and list(rows(tmp_path)) == [("default_nvlink", "batch=1;ranks=2")]
    assert "deadline: rose was not started" in capsys.readouterr().out


def test_a_missed_bar_is_said(run, capsys):
    same = [[(8, [100.0])]] * 2
    run("--engines", "default", "rose", prints={"default": same, "rose": same})
    assert "rose 1.00 times default, bar 1.1 MISSED" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--batches", "0"], ["--repeats", "0"], ["--engines", "nobody"]])
def test_wrong_arguments_are_refused(run, arguments, capsys):
    with pytest.raises(SystemExit):
        run(*arguments, prints={})
    assert arguments[0] in capsys.readouterr().err
