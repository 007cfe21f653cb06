"""The measured table: all ranks choose alike, from the slowest rank's time, once per machine."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "memory"))
from rank_threads import run_ranks

from vllm_rose_plugin.kernels.all_reduce.config import Algorithm, Tuning
from vllm_rose_plugin.kernels.all_reduce.layout import MAX_BLOCKS
from vllm_rose_plugin.kernels.all_reduce.table import KIND, SIZES, Table, candidates, sizes_up_to
from vllm_rose_plugin.kernels.timed_table import TableKind

ONE, TWO = Tuning(Algorithm.ONE_SHOT, 4), Tuning(Algorithm.TWO_SHOT, 8)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path))
    return tmp_path / KIND.folder


def measure(times, *, situation="here", sizes=(1024, 4096)):
    """A table of every rank, whose clock shows times[rank][tuning, size]; and what each rank timed."""
    asked = [[] for _ in times]

    def run(group):
        def time_us(tuning, size):
            asked[group.rank].append((tuning, size))
            return times[group.rank][tuning, size]

        return KIND.measured(
            group=group, name="x", situation=situation, sizes=sizes, tunings=(ONE, TWO), time_us=time_us
        )

    return run_ranks(len(times), run), asked


FAST = {(ONE, 1024): 1.0, (TWO, 1024): 2.0, (ONE, 4096): 5.0, (TWO, 4096): 4.0}
SLOW = {(ONE, 1024): 1.5, (TWO, 1024): 1.4, (ONE, 4096): 5.0, (TWO, 4096): 6.0}
CHOSEN = Table(((1024, ONE), (4096, ONE)))  # of the slower times: 1.5 and 2.0, 5.0 and 6.0


def test_the_slowest_rank_decides_for_all(folder):
    tables, asked = measure([FAST, SLOW])
    assert tables == [CHOSEN, CHOSEN]
    assert asked[0] == asked[1] == [(t, size) for size in (1024, 4096) for t in (ONE, TWO)]


def test_the_disk_serves_the_next_start_and_no_other_situation(folder):
    measure([FAST, SLOW])
    tables, asked = measure([SLOW, FAST])
    assert tables == [CHOSEN] * 2 and asked == [[], []]
    assert measure([SLOW, FAST], situation="elsewhere")[1] != [[], []]


DAMAGE = {
    "of another situation": {"situation": "other"},
    "of another algorithm": {"rows": [[1024, "three_shot", 1], [4096, "one_shot", 4]]},
    "of other sizes": {"rows": [[1024, "one_shot", 4]]},
    "of more blocks than have flags": {"rows": [[1024, "one_shot", 4], [4096, "one_shot", MAX_BLOCKS + 1]]},
    "of no block": {"rows": [[1024, "one_shot", 0], [4096, "one_shot", 4]]},
    "of half a block": {"rows": [[1024, "one_shot", 0.5], [4096, "one_shot", 4]]},
}


@pytest.mark.parametrize("damage", ["", "{}", *DAMAGE])
def test_a_damaged_file_is_measured_again(folder, damage):
    measure([FAST, SLOW])
    (path,) = folder.glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **DAMAGE[damage]}) if damage in DAMAGE else damage)
    tables, asked = measure([FAST, SLOW])
    assert tables == [CHOSEN] * 2 and asked[0]


def test_ranks_whose_disks_differ_measure(monkeypatch, folder):
    measure([FAST, SLOW])
    read = TableKind._read
    lost = iter([True, False])
    monkeypatch.setattr(TableKind, "_read", lambda *a: None if next(lost) else read(*a))
    tables, asked = measure([FAST, SLOW])
    assert tables == [CHOSEN] * 2 and asked[0] == asked[1] != []


def test_a_disk_that_refuses_costs_a_measurement_only(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "file"))
    assert measure([FAST, SLOW])[0] == [CHOSEN] * 2


def test_what_is_not_a_launch_of_the_kind_can_be_the_fastest(folder):
    times = [{(ONE, 1024): 3.0, (None, 1024): 2.0, (ONE, 4096): 3.0, (None, 4096): 4.0}] * 2

    def run(group):
        how = {"situation": "x", "sizes": (1024, 4096), "tunings": (None, ONE)}
        return KIND.measured(group=group, name="x", time_us=lambda *of: times[0][of], **how)

    for _ in range(2):  # measured, then read
        tables = run_ranks(2, run)
        assert tables == [Table(((1024, None), (4096, ONE)))] * 2
        times[0] = {}
    assert [tables[0].lookup(n) for n in (1, 1024, 1025, 4096, 4097)] == [None, None, ONE, ONE, None]


def test_sizes_between_and_above():
    table = Table(((1024, ONE), (4096, TWO)))
    assert [table.lookup(n) for n in (1, 1024, 1025, 4096, 4097)] == [ONE, ONE, TWO, TWO, None]


@pytest.mark.parametrize(
    ("max_bytes", "sizes"),
    [
        (0, []),
        (1, []),
        (512, [512]),
        (8192, [8192]),
        (20000, [8192, 16384, 20000]),
        (64 * 2**20, [*SIZES]),
        (96 * 2**20, [*SIZES]),
    ],
)
def test_the_largest_tensor_is_measured(max_bytes, sizes):
    """Else the steps of a prefill, which are as large as they may be, would be served by a guess."""
    assert sizes_up_to(max_bytes) == sizes


def test_candidates_leave_room():
    for sm_count in (2, 132, 212):
        tried = candidates(sm_count=sm_count)
        assert tried and all(1 <= t.blocks <= min(MAX_BLOCKS, sm_count // 2) for t in tried)
    assert SIZES[0] == 8192 and SIZES[-1] == 64 * 2**20
