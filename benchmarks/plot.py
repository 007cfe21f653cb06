"""Draws benchmarks/results/<area>.csv of the memory-bound kernels: GB/s by bytes moved, beside peers and the limit.

python benchmarks/plot.py [AREA …]
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
AREAS = ("qk_norm", "mxfp8_quantize", "swiglu_quantize", "all_reduce", "all_to_all")


def draw(area: str) -> Path:
    """One panel per case; returns the picture's path."""
    with (RESULTS / f"{area}.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["gb_per_s"]]
    for row in rows:
        row["case"] = "all sizes" if row["case"].isdigit() else row["case"]
    limit = next(float(row["gb_per_s"]) for row in rows if row["case"] == "limit")
    cases = [case for case in dict.fromkeys(row["case"] for row in rows) if case != "limit"]
    figure, panels = plt.subplots(1, len(cases), figsize=(4.2 * len(cases), 4), squeeze=False, layout="constrained")
    for panel, case in zip(panels[0], cases, strict=True):
        lines = defaultdict(list)
        for row in rows:
            if row["case"] == case:
                speed = float(row["gb_per_s"])
                lines[row["provider"]].append((speed * float(row["us"]) * 1e3, speed))
        for provider, points in lines.items():
            moved, speed = zip(*sorted(points), strict=True)
            ours = provider.startswith("rose")
            panel.plot(moved, speed, "o-", label=provider, linewidth=2 if ours else 1, markersize=4 if ours else 3)
        panel.axhline(limit, color="gray", linestyle="--", linewidth=1, label="fastest copy")
        panel.set(title=case, xscale="log", yscale="log", xlabel="bytes read and written", ylabel="GB/s")
        panel.legend(fontsize=7)
    figure.suptitle(f"{area}, {rows[0]['device']}, {rows[0]['versions']}, commit {rows[0]['commit']}", fontsize=9)
    path = RESULTS / f"{area}.png"
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path


if __name__ == "__main__":
    for name in sys.argv[1:] or [area for area in AREAS if (RESULTS / f"{area}.csv").exists()]:
        print(draw(name))
