"""What `rose bench mtp` writes: JSON for the planner, CSV for people, and a plot."""

import csv
import datetime
import json
from pathlib import Path
from typing import Any

import vllm_rose_plugin
from vllm_rose_plugin.acceptance.measure import Measurement
from vllm_rose_plugin.acceptance.tally import Tally

FORMAT = "rose-mtp-acceptance"
VERSION = 1
COLUMNS = (
    "model",
    "draft",
    "source",
    "speculative_tokens",
    "context",  # tokens before the drafted ones, such as 256-1023; `all` for all together
    "position",  # of the drafted token, from 0
    "drafts",
    "accepted",
    "acceptance",  # accepted / drafts
    "mean_accepted_length",  # tokens a step, the target's own included; the same in all rows of a context
    "versions",
    "date",
)


def as_dict(measurement: Measurement) -> dict[str, Any]:
    """The JSON file's content."""
    source = measurement.source
    by_context = []
    for index, tally in enumerate(measurement.tallies):
        if tally.drafts:
            low, above = measurement.contexts.bounds(index)
            by_context.append({"from": low, "to": above, **_figures(tally)})
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": source.model,
        "draft": source.draft,
        "source": source.name,
        "counted": "each draft at its own context" if measurement.exact else "each draft at its prompt's length",
        "prompts": measurement.prompts,
        "speculative_tokens": source.speculative_tokens,
        **_figures(measurement.total),
        "by_context": by_context,
        "versions": f"{source.versions}; vllm_rose_plugin {vllm_rose_plugin.__version__}",
        "date": datetime.date.today().isoformat(),
    }


def _figures(tally: Tally) -> dict[str, Any]:
    return {
        "drafts": tally.drafts,
        "accepted_by_position": tally.accepted,
        "acceptance_by_position": [round(rate, 5) for rate in tally.by_position],
        "mean_accepted_length": round(tally.mean_accepted_length, 5),
    }


def write(content: dict[str, Any], prefix: Path) -> list[Path]:
    """Write ``PREFIX.json``, ``PREFIX.csv`` and ``PREFIX.png``; returns their paths."""
    paths = [prefix.with_name(prefix.name + ending) for ending in (".json", ".csv", ".png")]
    paths[0].write_text(json.dumps(content, indent=2) + "\n")
    with paths[1].open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows(content))
    _draw(content, paths[2])
    return paths


def rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the CSV: one for each context and position."""
    same = {key: content[key] for key in ("model", "draft", "source", "speculative_tokens", "versions", "date")}
    found = []
    for context, figures in [("all", content), *((_name(part), part) for part in content["by_context"])]:
        for position, acceptance in enumerate(figures["acceptance_by_position"]):
            row = {"context": context, "position": position, "drafts": figures["drafts"], "acceptance": acceptance}
            row |= {"accepted": figures["accepted_by_position"][position]}
            found.append({**same, **row, "mean_accepted_length": figures["mean_accepted_length"]})
    return found


def _name(part: dict[str, Any]) -> str:
    return f"{part['from']}-{'' if part['to'] is None else part['to'] - 1}"


def _draw(content: dict[str, Any], path: Path) -> None:
    """Acceptance by position, a line for each context, and the mean accepted length by context."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    positions = range(1, content["speculative_tokens"] + 1)
    for part in content["by_context"]:
        left.plot(positions, part["acceptance_by_position"], "o-", linewidth=1, markersize=3, label=_name(part))
    left.plot(positions, content["acceptance_by_position"], "ko-", linewidth=2, markersize=4, label="all")
    left.set(title="accepted", xlabel="draft position", ylabel="share of drafts", ylim=(0, 1.02), xticks=positions)
    left.legend(title="context", fontsize=7)
    names = [_name(part) for part in content["by_context"]]
    right.bar(names, [part["mean_accepted_length"] for part in content["by_context"]], color="tab:blue")
    right.axhline(content["mean_accepted_length"], color="k", linestyle="--", linewidth=1, label="all")
    right.set(title="tokens a step", xlabel="context", ylim=(1, content["speculative_tokens"] + 1.05))
    right.legend(fontsize=7)
    figure.suptitle(f"{content['model']}, {content['drafts']} drafts, {content['versions']}", fontsize=9)
    figure.savefig(path, dpi=90)
    plt.close(figure)
