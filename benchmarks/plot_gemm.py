"""Draws benchmarks/results/<area>.csv of products and layers: time over M, beside peers and the floor of each shape.

python benchmarks/plot_gemm.py [gemm_grouped gemm_dense moe_layer]
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
AREAS = ("gemm_grouped", "gemm_dense", "moe_layer")
NOT_DRAWN = ("limit", "launches", "bandwidth")
"""First words of cases."""
ACROSS = 6
"""Panels beside each other."""


def draw(area: str) -> Path:
    """One panel for each weight; returns the picture's path."""
    with (RESULTS / f"{area}.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["us"] and row["case"].split()[0] not in NOT_DRAWN]
    panels: dict[str, list[dict]] = defaultdict(list)
    for row in rows:
        panels[f"{row['case']} {row['shape'].split(';', 1)[1]}"].append(row)
    across = min(len(panels), ACROSS)
    down = -(-len(panels) // across)
    figure, axes = plt.subplots(down, across, figsize=(4.4 * across, 4.2 * down), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (title, found) in zip(axes.flat, panels.items(), strict=False):
        lines, floors = defaultdict(list), defaultdict(list)
        for row in found:
            tokens, us = int(row["shape"].split(";")[0].split("=")[1]), float(row["us"])
            lines[row["provider"]].append((tokens, us))
            if row["share_of_limit"]:
                floors[tokens].append(us * float(row["share_of_limit"]))
        for provider, points in lines.items():
            ours = provider == "rose"
            axis.plot(
                *zip(*sorted(points), strict=True), "o-", label=provider, linewidth=2.5 if ours else 1, markersize=3
            )
        floor = sorted((tokens, min(values)) for tokens, values in floors.items())
        if floor:
            axis.plot(*zip(*floor, strict=True), "--", color="gray", linewidth=1, label="limit")
        axis.set(title=title, xscale="log", yscale="log", xlabel="tokens", ylabel="µs")
        axis.legend(fontsize=6)
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    figure.suptitle(f"{area}, {rows[0]['device']}, {rows[0]['versions']}, commits {commits}", fontsize=9)
    path = RESULTS / f"{area}.png"
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path


if __name__ == "__main__":
    for name in sys.argv[1:] or AREAS:
        print(draw(name))
