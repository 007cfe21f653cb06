"""A model, not a measurement: time of our all-reduce over 2 to 72 ranks on H200, GB200 and Vera Rubin, NVLS included.

    python benchmarks/model_all_reduce.py [--ranks 2 4 8 36 72] [--bytes 8192 1048576] [--link-gb-per-s GB200=900]

Needs no GPU. Reads benchmarks/results/all_reduce.csv, which was measured on two H200s, and writes
benchmarks/results/all_reduce_model.csv, where every row says "model". What it assumes:

    us = fixed + bytes through the busier direction of a GPU's link / (share x published rate) + bytes copied x cost

- `fixed` is launch, flags and latency of one wait (one-shot) or two (two-shot), fitted to the measurements: the same
  for any number of ranks, since a block has a thread for each rank, and for any of these switches, which are one hop
  between any two GPUs. Nobody has measured that.
- `share` is how much of the published rate was reached, fitted likewise, for one-shot at the sizes that it serves and
  for two-shot; taken to be the same on the other machines, and for multimem.
- Two-shot that copies input and result pays for it by the byte, as measured, scaled by the published rate of HBM.
- The link: `bytes_through` counts what the algorithms move, both directions apart. A switch that adds up for a reader
  reads the memory of every rank for it, so one-shot over NVLS makes each GPU send the tensor once for every rank.

On the machine itself this measures the same (see docs/all_reduce.md), and replaces this table where it has run:

    torchrun --nnodes 18 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        benchmarks/bench_all_reduce.py --tune --access nvls
"""

import argparse
import csv
import datetime
import itertools
from dataclasses import dataclass
from pathlib import Path

from columns import COLUMNS

RESULTS = Path(__file__).parent / "results"
RANKS = (2, 4, 8, 16, 36, 72)
BYTES = tuple(2**i for i in (13, 15, 17, 19, 20, 22, 24, 26))
ALGORITHMS = ("one_shot", "two_shot", "two_shot_zero_copy")
ACCESSES = ("p2p", "nvls")
_LARGE = 2**24
"""From here on the difference between copying and zero copy is what copying costs."""
_ONE_SHOT_TO, _TWO_SHOT_FROM = 2**19, 2**17
"""Sizes of the fits: the first is what is served in one wait; zero copy takes two from the second on."""


@dataclass(frozen=True)
class Machine:
    """Published rates, and how many ranks one NVLink domain has."""

    link_gb_per_s: float
    """Of one GPU, one direction."""
    hbm_gb_per_s: float
    most_ranks: int
    source: str


MACHINES = {
    "H200": Machine(450, 4800, 8, "NVIDIA H200 data sheet: NVLink 900 GB/s both ways, 4.8 TB/s"),
    "GB200": Machine(900, 8000, 72, "NVIDIA GB200 NVL72 data sheet: NVLink 1.8 TB/s both ways of a GPU, 8 TB/s"),
    "Rubin": Machine(1800, 22000, 72, "NVIDIA Vera Rubin NVL72 announcement, January 2026: NVLink 6 3.6 TB/s, 22 TB/s"),
}


@dataclass(frozen=True)
class Measured:
    """What the measurements say; times in microseconds."""

    fixed: dict[int, float]
    """By the number of waits."""
    share: dict[int, float]
    """Of the published rate of the link, by the number of waits."""
    copy_us_per_byte: float
    commit: str


def bytes_through(algorithm: str, access: str, *, num_bytes: float, ranks: int) -> tuple[float, float]:
    """(into a GPU, out of a GPU) over its link."""
    if algorithm == "one_shot":
        if access == "nvls":
            return num_bytes, num_bytes * ranks
        return num_bytes * (ranks - 1), num_bytes * (ranks - 1)
    part = num_bytes / ranks
    if access == "nvls":  # reads its part's sum and gets all sums; its memory is read for all parts, it sends one
        return part + num_bytes, num_bytes + part
    return 2 * part * (ranks - 1), 2 * part * (ranks - 1)


def fit(times: dict[int, float]) -> tuple[float, float]:
    """(a, b) of us = a + b x bytes, with the least squares of relative errors."""
    # Of 1 = a/t + b x n/t.
    rows = [(1 / us, num_bytes / us) for num_bytes, us in times.items()]
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(r[i] for r in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    return (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant


def read_measured(path: Path) -> tuple[Measured, dict[str, dict[int, float]]]:
    """What the CSV file of bench_all_reduce.py on two H200s says, and its times by provider and bytes."""
    times: dict[str, dict[int, float]] = {}
    commit = ""
    with path.open() as file:
        for row in csv.DictReader(file):
            if row["case"] != "limit" and "ranks=2" in row["shape"].split(";"):
                times.setdefault(row["provider"], {})[int(row["case"])] = float(row["us"])
                commit = row["commit"]
    copied, in_place = times["rose"], times["rose_zero_copy"]
    fixed_1, slope_1 = fit({n: us for n, us in copied.items() if n <= _ONE_SHOT_TO})
    fixed_2, slope_2 = fit({n: us for n, us in in_place.items() if n >= _TWO_SHOT_FROM})
    link = MACHINES["H200"].link_gb_per_s * 1e3  # bytes in a microsecond; two ranks send each byte once
    extra = [(copied[n] - in_place[n]) / n for n in copied if n >= _LARGE]
    return (
        Measured(
            fixed={1: fixed_1, 2: fixed_2},
            share={1: 1 / slope_1 / link, 2: 1 / slope_2 / link},
            copy_us_per_byte=sum(extra) / len(extra),
            commit=commit,
        ),
        times,
    )


def model_us(measured: Measured, machine: Machine, algorithm: str, access: str, *, num_bytes: int, ranks: int) -> float:
    """Microseconds of one all-reduce."""
    waits = 1 if algorithm == "one_shot" else 2
    through = max(bytes_through(algorithm, access, num_bytes=num_bytes, ranks=ranks))
    us = measured.fixed[waits] + through / (measured.share[waits] * machine.link_gb_per_s * 1e3)
    if algorithm == "two_shot":
        us += num_bytes * measured.copy_us_per_byte * MACHINES["H200"].hbm_gb_per_s / machine.hbm_gb_per_s
    return us


def table(measured: Measured, machines: dict[str, Machine], ranks: list[int], sizes: list[int]) -> list[dict]:
    """The rows, all marked as model."""
    cases = itertools.product(machines.items(), ranks, sizes, ACCESSES, ALGORITHMS)
    rows = []
    for (name, machine), size, num_bytes, access, algorithm in cases:
        if size > machine.most_ranks:
            continue
        us = model_us(measured, machine, algorithm, access, num_bytes=num_bytes, ranks=size)
        into, out = bytes_through(algorithm, access, num_bytes=num_bytes, ranks=size)
        rows.append(
            dict.fromkeys(COLUMNS, "")
            | {
                "area": "all_reduce_model",
                "case": str(num_bytes),
                "provider": f"model_{access}_{algorithm}",
                "shape": f"bytes={num_bytes};ranks={size};in={into:.0f};out={out:.0f}",
                "us": f"{us:.2f}",
                "gb_per_s": f"{num_bytes / us / 1e3:.1f}",
                "share_of_limit": f"{max(into, out) / us / 1e3 / machine.link_gb_per_s:.3f}",
                "device": f"model of {name}, not measured",
                "versions": f"model; link {machine.link_gb_per_s:g} GB/s, HBM {machine.hbm_gb_per_s:g} GB/s",
                "commit": f"fitted to all_reduce.csv of {measured.commit}",
                "date": datetime.date.today().isoformat(),
            }
        )
    return rows


def changeover(measured: Measured, machine: Machine, access: str, ranks: int) -> int | None:
    """Smallest power of two of bytes at which two-shot, with its copies, is faster than one-shot; None: at none."""
    for exponent in range(10, 28):
        one, two = (
            model_us(measured, machine, algorithm, access, num_bytes=2**exponent, ranks=ranks)
            for algorithm in ("one_shot", "two_shot")
        )
        if two < one:
            return 2**exponent
    return None


def errors(measured: Measured, times: dict[str, dict[int, float]]) -> dict[str, float]:
    """Largest relative error of the model at what it was fitted to, and at the rest, by provider."""
    machine = MACHINES["H200"]

    def error(us: float, algorithms: tuple[str, ...], num_bytes: int) -> float:
        modelled = min(model_us(measured, machine, a, "p2p", num_bytes=num_bytes, ranks=2) for a in algorithms)
        return abs(modelled / us - 1)

    return {
        "rose": max(error(us, ("one_shot", "two_shot"), n) for n, us in times["rose"].items()),
        "rose_zero_copy": max(
            error(us, ("two_shot_zero_copy",), n)
            for n, us in times["rose_zero_copy"].items()
            if n >= _TWO_SHOT_FROM  # smaller ones are copied, in one shot
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--bytes", type=int, nargs="+", default=list(BYTES))
    parser.add_argument(
        "--link-gb-per-s", nargs="*", default=[], metavar="MACHINE=GB/S", help="another rate of a GPU's link, one way"
    )
    arguments = parser.parse_args()
    machines = dict(MACHINES)
    for given in arguments.link_gb_per_s:
        name, _, rate = given.partition("=")
        if name not in machines or not rate.replace(".", "", 1).isdigit() or not float(rate):
            parser.error(f"--link-gb-per-s {given}: it must be MACHINE=GB/S, a machine of {', '.join(machines)}")
        old = machines[name]
        machines[name] = Machine(float(rate), old.hbm_gb_per_s, old.most_ranks, f"{old.source}; link as given")
    if min(arguments.ranks) < 2 or min(arguments.bytes) < 1:
        parser.error("--ranks must be 2 or more each, --bytes 1 or more")
    measured, times = read_measured(RESULTS / "all_reduce.csv")
    rows = table(measured, machines, sorted(arguments.ranks), sorted(arguments.bytes))
    with (RESULTS / "all_reduce_model.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    print(f"all_reduce_model.csv: {len(rows)} rows, a model, not measured")
    for waits in (1, 2):
        print(f"{waits} wait(s): {measured.fixed[waits]:.2f} us + {measured.share[waits]:.2f} of the link's rate")
    print(f"copies of two-shot on H200: {measured.copy_us_per_byte * 2**20:.3f} us for each MiB")
    for name, error in errors(measured, times).items():
        print(f"at two H200s, {name}: at most {100 * error:.0f} % off what was measured")
    for name, machine in machines.items():
        print(
            f"{name}: link {machine.link_gb_per_s:g} GB/s one way, HBM {machine.hbm_gb_per_s:g} GB/s ({machine.source})"
        )
        for access in ACCESSES:
            sizes = {n: changeover(measured, machine, access, n) for n in RANKS if n <= machine.most_ranks}
            print(f"{name}, {access}: two-shot from bytes, by ranks: {sizes}")


if __name__ == "__main__":
    main()
