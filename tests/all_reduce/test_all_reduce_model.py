"""The model of all-reduce's time: its bytes, its fit, and that its table is what the measurements say."""

import csv
import sys
from pathlib import Path

import pytest

from vllm_rose_plugin.kernels.all_reduce.layout import part_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def model():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import model_all_reduce
    finally:
        sys.path.remove(str(BENCHMARKS))
    return model_all_reduce


@pytest.mark.parametrize("ranks", [2, 8, 72])
def test_bytes_are_those_that_the_algorithms_move(model, ranks):
    """Counted rank by rank over the parts that the kernels' layout gives, into and out of rank 0's GPU."""
    vectors = 72 * 8 * 100  # whole lines for every rank
    num_bytes = vectors * 16
    parts = [part_of(owner, vectors, ranks, 16)[1] * 16 for owner in range(ranks)]
    others = range(1, ranks)

    def counted(reads, serves, stores, receives):
        return reads + receives, serves + stores

    expected = {
        ("one_shot", "p2p"): counted(num_bytes * len(others), num_bytes * len(others), 0, 0),
        # A sum comes once; the switch reads this GPU's memory for every rank, this one included.
        ("one_shot", "nvls"): counted(num_bytes, num_bytes * ranks, 0, 0),
        ("two_shot", "p2p"): counted(
            parts[0] * len(others),
            sum(parts[r] for r in others),
            parts[0] * len(others),
            sum(parts[r] for r in others),
        ),
        ("two_shot", "nvls"): counted(parts[0], sum(parts), parts[0], sum(parts)),
    }
    for (algorithm, access), (into, out) in expected.items():
        found = model.bytes_through(algorithm, access, num_bytes=num_bytes, ranks=ranks)
        assert found == pytest.approx((into, out)), (algorithm, access)


def test_the_fit_finds_what_the_times_were_made_of(model):
    assert model.fit({n: 3.5 + n / 2e5 for n in (2**13, 2**17, 2**20)}) == pytest.approx((3.5, 1 / 2e5))


def test_the_model_is_near_the_measurements_that_it_was_fitted_to(model):
    measured, times = model.read_measured(BENCHMARKS / "results" / "all_reduce.csv")
    assert 2 < measured.fixed[1] < measured.fixed[2] < 8 and 0 < measured.share[1] < measured.share[2] < 1
    assert measured.copy_us_per_byte > 0
    errors = model.errors(measured, times)
    assert errors.keys() == {"rose", "rose_zero_copy"} and max(errors.values()) < 0.2


def test_rows_that_name_their_blocks_are_read_too(model, tmp_path):
    text = (BENCHMARKS / "results" / "all_reduce.csv").read_text()
    named = tmp_path / "named.csv"
    named.write_text(text.replace(";ranks=2,", ";ranks=2;blocks=9,"))
    assert ";blocks=9" in named.read_text()
    assert model.read_measured(named) == model.read_measured(BENCHMARKS / "results" / "all_reduce.csv")


def test_the_committed_table_is_the_models_and_says_so(model):
    measured, _ = model.read_measured(BENCHMARKS / "results" / "all_reduce.csv")
    expected = model.table(measured, model.MACHINES, list(model.RANKS), list(model.BYTES))
    with (BENCHMARKS / "results" / "all_reduce_model.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in (*rows, *expected):
        assert row["provider"].startswith("model_") and "not measured" in row["device"]
        row["date"] = ""
    assert rows == expected, "run benchmarks/model_all_reduce.py again"
    ranks = {row["shape"].split(";")[1] for row in rows if "GB200" in row["device"]}
    assert ranks == {f"ranks={n}" for n in (2, 4, 8, 16, 36, 72)}


def test_more_ranks_want_two_shot_earlier_and_faster_links_later(model):
    measured, _ = model.read_measured(BENCHMARKS / "results" / "all_reduce.csv")
    for access in model.ACCESSES:
        sizes = {
            name: [model.changeover(measured, machine, access, n) for n in (4, 8, 36, 72)]
            for name, machine in model.MACHINES.items()
        }
        assert all(size == sorted(size, reverse=True) for size in sizes.values())
        assert all(a <= b for a, b in zip(sizes["GB200"], sizes["Rubin"], strict=True))


def test_what_is_asked_for_wrongly_is_named(model, monkeypatch, capsys):
    for arguments, message in (
        (
            ["--link-gb-per-s", "B200=900"],
            "--link-gb-per-s B200=900: it must be MACHINE=GB/S, a machine of H200, GB200",
        ),
        (["--ranks", "1"], "--ranks must be 2 or more"),
    ):
        monkeypatch.setattr(sys, "argv", ["model_all_reduce.py", *arguments])
        with pytest.raises(SystemExit):
            model.main()
        assert message in capsys.readouterr().err
