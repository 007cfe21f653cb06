"""Draws benchmarks/results/serving.csv: decode throughput by batch size and time of a prefill, one row for each model.

python benchmarks/plot_serving.py [FOLDER]
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"


def draw(folder: Path = RESULTS) -> Path:
    """Tokens a second over the batch, and milliseconds of a prefill; returns the picture's path."""
    with (folder / "serving.csv").open() as file:
        rows = list(csv.DictReader(file))
    models: dict[str, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        model, kind = row["case"].rsplit(" ", 1)
        models[model][kind].append(row)
    figure, axes = plt.subplots(len(models), 2, figsize=(9.5, 3.8 * len(models)), squeeze=False, layout="constrained")
    for (decode, prefill), (model, found) in zip(axes, models.items(), strict=True):
        lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for row in found["decode"]:
            batch = int(row["shape"].removeprefix("batch="))
            lines[row["provider"]].append((batch, batch / float(row["us"]) * 1e6))
        for provider, points in lines.items():
            ours = provider.startswith("rose")
            decode.plot(*zip(*sorted(points), strict=True), "o-", label=provider, linewidth=2.5 if ours else 1)
        decode.set(title=f"{model}, decode", xscale="log", yscale="log", xlabel="batch", ylabel="tokens/s")
        if lines:
            decode.legend(fontsize=7)
        bars = {row["provider"]: float(row["us"]) / 1e3 for row in found["prefill"]}
        shapes = ", ".join(dict.fromkeys(row["shape"] for row in found["prefill"]))
        prefill.bar(list(bars), list(bars.values()))
        prefill.set(title=f"{model}, prefill {shapes}", ylabel="ms")
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    versions = ", ".join(sorted({row["versions"] for row in rows}))
    figure.suptitle(f"serving, {rows[0]['device']}, {versions}, commits {commits}", fontsize=9)
    path = folder / "serving.png"
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path


if __name__ == "__main__":
    print(draw(*map(Path, sys.argv[1:2])))
