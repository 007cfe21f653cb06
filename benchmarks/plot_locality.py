"""Draws benchmarks/results/locality.csv: what ways to launch cost, and the layout of the published figure.

    python benchmarks/plot_locality.py [CSV]

Beside the table: locality.png, time of each way over that of the plain kernels, where domains were forced; and
locality_fc1_fc2.html, microseconds of both products on one rank, with tabs for the strategy and for the way to launch,
a page that needs no network. What the table says was not measured, the page says too.
"""

import csv
import html
import io
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
PLAIN = "rose"
WAYS = {"rose_default": "default mode", "rose_backfill": "backfill mode", "rose_single_launch": "single launch"}
Rows = list[dict[str, str]]


def draw(table: Path) -> list[Path]:
    """The pictures' paths."""
    with table.open() as file:
        rows = list(csv.DictReader(file))
    forced = [row for row in rows if row["case"].startswith("moe ")]
    figure = [row for row in rows if row["case"].startswith("fc1_fc2 ")]
    paths = []
    if forced:
        paths.append(table.with_suffix(".png"))
        draw_costs(forced, paths[-1])
    if figure:
        paths.append(table.with_name(f"{table.stem}_fc1_fc2.html"))
        paths[-1].write_text(page(figure), encoding="utf-8")
    return paths


def tokens(row: dict[str, str]) -> int:
    """T of a shape."""
    return int(row["shape"].split(";")[0].removeprefix("T="))


def draw_costs(rows: Rows, path: Path) -> None:
    """A panel for each model, a line for each strategy and way."""
    panels: dict[str, dict[tuple[str, str], dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        _, model, strategy = row["case"].split(" ")
        panels[model][strategy, row["provider"]][tokens(row)] = float(row["us"])
    figure, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 4.4), squeeze=False, layout="constrained")
    for axis, (model, found) in zip(axes.flat, panels.items(), strict=True):
        for (strategy, way), times in found.items():
            plain = found[strategy, PLAIN]
            points = sorted((count, us / plain[count]) for count, us in times.items() if count in plain)
            if way != PLAIN and points:
                single = way == "rose_single_launch"
                axis.plot(
                    *zip(*points, strict=True), "o-" if single else "x--", label=f"{way} {strategy}", markersize=4
                )
        axis.axhline(1, color="gray", linewidth=1)
        axis.set(title=model, xscale="log", xlabel="tokens", ylabel="time, plain kernels = 1")
        axis.legend(fontsize=7)
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    figure.suptitle(f"experts in two parts, domains forced, {rows[0]['device']}, commits {commits}", fontsize=9)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def page(rows: Rows) -> str:
    """The page of the published figure's layout."""
    strategies = list(dict.fromkeys(row["case"].split(" ")[2] for row in rows))
    head, style, body = [], [], []
    for group, names in (("s", strategies), ("w", list(WAYS.values()))):
        for i, name in enumerate(names):
            checked = "" if i else " checked"
            head.append(
                f'<input type="radio" name="{group}" id="{group}{i}"{checked}><label for="{group}{i}">{name}</label>'
            )
        head.append("<br>")
    for i, strategy in enumerate(strategies):
        for j, way in enumerate(WAYS):
            style.append(f"#s{i}:checked~#w{j}:checked~.s{i}w{j}{{display:block}}")
            of = [row for row in rows if row["case"].endswith(f" {strategy}") and row["provider"] in (PLAIN, way)]
            body.append(f'<section class="s{i}w{j}">{panel(of, way)}</section>')
    return (
        '<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8"><title>FC1 + FC2 with locality domains</title>\n'
        "<style>body{font:15px sans-serif;max-width:70em;margin:2em auto}section{display:none}"
        f"svg{{max-width:100%;height:auto}}{''.join(style)}</style>\n"
        f"<h1>FC1 + FC2 of one rank, microseconds</h1>\n{''.join(head)}\n{''.join(body)}\n</html>\n"
    )


def panel(rows: Rows, way: str) -> str:
    """Bars of the plain kernels and of one way, as SVG; or why there are none."""
    measured = [row for row in rows if row["us"]]
    if not any(row["provider"] == way for row in measured):
        reasons = dict.fromkeys(row["device"] for row in rows if row["provider"] == way)
        return "".join(f"<p>{html.escape(reason)}</p>" for reason in reasons)
    models: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in measured:
        models[row["case"].split(" ")[1]][row["provider"]][tokens(row)] = float(row["us"])
    figure, axes = plt.subplots(1, len(models), figsize=(5.5 * len(models), 4), squeeze=False, layout="constrained")
    for axis, (model, found) in zip(axes.flat, models.items(), strict=True):
        counts = sorted(found[way])
        for offset, (provider, name) in enumerate({PLAIN: "plain", way: WAYS[way]}.items()):
            places = [i + 0.4 * offset for i in range(len(counts))]
            axis.bar(places, [found[provider].get(count, 0.0) for count in counts], width=0.4, label=name)
        axis.set_xticks([i + 0.2 for i in range(len(counts))], [str(count) for count in counts])
        axis.set(title=model, xlabel="tokens", ylabel="µs")
        axis.legend()
    devices = ", ".join(dict.fromkeys(row["device"] for row in measured))
    commits = ", ".join(sorted({row["commit"] for row in measured}))
    figure.suptitle(f"{devices}, commits {commits}", fontsize=9)
    text = io.StringIO()
    figure.savefig(text, format="svg")
    plt.close(figure)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


if __name__ == "__main__":
    for drawn in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "locality.csv"):
        print(drawn)
