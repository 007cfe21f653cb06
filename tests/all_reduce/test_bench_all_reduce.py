"""The half of bench_all_reduce.py that needs no GPU: what it makes of the times."""

import csv
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import bench_all_reduce
    finally:
        sys.path.remove(str(BENCHMARKS))
    return bench_all_reduce


def row(size, provider, us, share="0.5"):
    return {"case": str(size), "provider": provider, "us": str(us), "share_of_limit": share}


def test_ours_stands_beside_the_best_peer_and_its_bar(bench):
    rows = [
        {"case": "limit", "provider": "peer_copy", "us": "7", "share_of_limit": "1"},
        *(row(8192, name, us) for name, us in (("rose", 4), ("nccl", 20), ("vllm_custom", 5), ("torch_one_shot", 3))),
        *(row(2**20, name, us) for name, us in (("rose", 8), ("nccl", 10))),
        *(row(2**24, name, us, share) for name, us, share in (("rose", 7, "0.7"), ("rose_zero_copy", 6, "0.81"))),
        *(row(2**24, name, us) for name, us in (("nccl", 10), ("torch_two_shot", 8))),
        row(2**25, "rose", 9, "0.79"),
        row(2**25, "nccl", 10),
        row(2**26, "rose", 9),
    ]
    assert [*bench.verdicts(rows)] == [
        "8192 bytes: rose 0.80 of vllm_custom, bar 1.0",
        "1048576 bytes: rose 0.80 of nccl, bar 0.75 MISSED",
        "16777216 bytes: rose 0.70 of nccl, bar 0.75; rose_zero_copy 0.75 of torch_two_shot, bar 0.75; "
        "0.81 of a copy's rate, bar 0.8",
        "33554432 bytes: rose 0.90 of nccl, bar 0.75 MISSED; 0.79 of a copy's rate, bar 0.8 MISSED",
    ]


def test_the_committed_times_are_read(bench):
    with (BENCHMARKS / "results" / "all_reduce.csv").open() as file:
        lines = [*bench.verdicts([*csv.DictReader(file)])]
    assert len(lines) == len(bench.BYTES) and lines[0].startswith("8192 bytes: rose 0.70 of vllm_custom, bar 1.0")


def test_rows_are_added_to_the_file_after_every_size(bench, monkeypatch, tmp_path, capsys):
    """A run that is cut off leaves what it has, and what others measured stays but for what is measured again."""
    monkeypatch.setattr(bench.torch.cuda, "get_device_name", lambda: "a GPU")
    path = tmp_path / "all_reduce.csv"

    def add(table, size, us, blocks):
        shape = f"bytes={size};ranks=2;blocks={blocks}"
        table.add(case=str(size), provider="rose", shape=shape, us=us, moved=size)
        table.write()

    def found():
        with path.open() as file:
            return {(row["case"], row["provider"]): row["us"] for row in csv.DictReader(file)}

    first = bench.Table("all_reduce", (100.0, 1000), path=path)
    add(first, 8192, 4.0, 8)
    assert found() == {("limit", "torch_copy"): "0.010", ("8192", "rose"): "4.000"}
    add(first, 65536, 5.0, 8)
    add(bench.Table("all_reduce", (50.0, 1000), path=path), 8192, 3.0, 16)
    assert found() == {("limit", "torch_copy"): "0.020", ("8192", "rose"): "3.000", ("65536", "rose"): "5.000"}
    assert capsys.readouterr().out.count("bytes=8192") == 2, "each row is said once"


def test_nothing_begins_behind_the_deadline_of_any_rank(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(sys, "argv", ["bench", "--deadline", "100"])
    parser = bench.argparse.ArgumentParser()
    bench.add_common(parser, "all_reduce")
    arguments = bench.parse(parser)
    asked = []
    monkeypatch.setattr(bench, "everywhere", lambda done, group: asked.append(done) or others)
    others = True
    assert not bench.late(arguments, None, "8192 bytes") and asked == [True]
    others = False
    assert bench.late(arguments, None, "8192 bytes")
    assert capsys.readouterr().out == "deadline: 8192 bytes and what follows was not measured\n"
