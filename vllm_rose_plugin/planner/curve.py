"""The trade-off between speed for one user and load per GPU, as PNG and as an HTML page that needs no network."""

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_rose_plugin.planner.plan import Plan, PlanError, Targets, Unreachable, make_plan
from vllm_rose_plugin.planner.report import source_line

_POINTS = 24
_SLOWEST = 1.5
"""Targets run from the fastest that can be held to this many times the plan's own."""


@dataclass(frozen=True)
class CurvePoint:
    """The plan for one TPOT target."""

    tpot_target: float
    prefill_replicas: int
    decode_replicas: int
    gpus: int
    tokens_per_second_per_user: float
    """What the plan claims for the median request."""
    output_tokens_per_second_per_gpu: float
    """Of the busiest window's load, over all GPUs of both roles."""


@dataclass(frozen=True)
class FullDecoder:
    """What the hardware gives when every decoder runs one batch size and prefill keeps up with it."""

    batch: int
    tokens_per_second_per_user: float
    output_tokens_per_second_per_gpu: float
    """With the prefill GPUs that the decoders' requests need, as busy as the plan has them."""


def trade_off(plan: Plan, *, acceptance: Sequence[float] = ()) -> list[CurvePoint]:
    """Plans of the same load and TTFT target for a row of TPOT targets; those out of reach are left out."""
    busiest = max(plan.load.windows, key=lambda window: window.rate)
    output_rate = busiest.rate * float(busiest.output_tokens.mean())
    fastest = plan.capacity.step_seconds(1, 1) / plan.tokens_per_step
    points = []
    for target in np.geomspace(fastest, max(_SLOWEST * plan.targets.tpot, 1.01 * fastest), _POINTS):
        targets = Targets(ttft=plan.targets.ttft, tpot=float(target), percentile=plan.targets.percentile)
        try:
            other = make_plan(load=plan.load, capacity=plan.capacity, targets=targets, acceptance=acceptance)
        except (Unreachable, PlanError):  # a fast target may take more replicas than are counted
            continue
        points.append(
            CurvePoint(
                tpot_target=float(target),
                prefill_replicas=other.prefill_replicas,
                decode_replicas=other.decode_replicas,
                gpus=other.gpus,
                tokens_per_second_per_user=1 / other.claims.tpot[50],
                output_tokens_per_second_per_gpu=output_rate / other.gpus,
            )
        )
    return points


def full_decoders(plan: Plan) -> list[FullDecoder]:
    """The trade-off of the hardware itself, for the lengths of the plan's busiest window and any load."""
    busiest = max(plan.load.windows, key=lambda window: window.rate)
    prompts, answers = busiest.input_tokens, busiest.output_tokens
    context = float((answers * (prompts + answers / 2)).sum() / answers.sum())
    roles = plan.capacity.file
    prefill_seconds = float(plan.capacity.prefill_seconds(prompts).mean()) / (plan.prefill_utilization or 1.0)
    points = []
    for batch in sorted({round(batch) for batch in np.geomspace(1, plan.capacity.max_batch, 40)}):
        speed = plan.tokens_per_step / plan.capacity.step_seconds(batch, context)
        prefill_gpus = batch * speed / float(answers.mean()) * prefill_seconds * roles.prefill.gpus
        points.append(FullDecoder(batch, speed, batch * speed / (roles.decode.gpus + prefill_gpus)))
    return points


def write_curve(plan: Plan, points: Sequence[CurvePoint], *, png: Path | None, page: Path | None) -> None:
    """Draw the points into the files that are asked for.

    Raises:
        ModuleNotFoundError: matplotlib isn't installed.
    """
    if png is not None:
        _draw(plan, points).savefig(png, format="png", dpi=120)
    if page is not None:
        buffer = io.StringIO()
        _draw(plan, points).savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        page.write_text(_page(plan, points, buffer.getvalue()), encoding="utf-8")


def _draw(plan: Plan, points: Sequence[CurvePoint]) -> Any:
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot, which would look for a display

    matplotlib.rcParams["svg.hashsalt"] = "rose"  # the same plan gives the same file
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    full = full_decoders(plan)
    speeds, loads = zip(
        *((one.tokens_per_second_per_user, one.output_tokens_per_second_per_gpu) for one in full), strict=True
    )
    left.plot(speeds, loads, label="every decoder at one batch")
    for one in (full[0], full[len(full) // 2], full[-1]):
        left.annotate(f" {one.batch}", (one.tokens_per_second_per_user, one.output_tokens_per_second_per_gpu))
    left.scatter(
        [point.tokens_per_second_per_user for point in points],
        [point.output_tokens_per_second_per_gpu for point in points],
        color="tab:red",
        label="plans for this load",
    )
    left.legend()
    left.set_xlabel("tokens/s of one user")
    left.set_ylabel("output tokens/s per GPU, both roles")
    targets = [point.tpot_target * 1e3 for point in points]
    roles = plan.capacity.file
    prefill = [point.prefill_replicas * roles.prefill.gpus for point in points]
    right.stackplot(
        targets, prefill, [point.gpus - own for point, own in zip(points, prefill, strict=True)], step="post"
    )
    right.legend(right.collections, ["prefill", "decode"])
    right.axvline(plan.targets.tpot * 1e3, color="black", linestyle="--")
    right.annotate(f" plan: {plan.gpus} GPUs", (plan.targets.tpot * 1e3, plan.gpus), va="bottom")
    right.set_xscale("log")
    right.xaxis.set_major_formatter("{x:g}")
    right.xaxis.set_minor_formatter("{x:g}")
    right.set_xlabel(f"TPOT target, ms (p{plan.targets.percentile})")
    right.set_ylabel("GPUs")
    figure.suptitle(f"{plan.load.description}\n{source_line(plan)}", fontsize=9)
    return figure


def _page(plan: Plan, points: Sequence[CurvePoint], svg: str) -> str:
    svg = svg[svg.index("<svg") :]  # without the XML head, whose DTD names a host
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    rows = "".join(
        f"<tr><td>{point.tpot_target * 1e3:.2f}<td>{point.tokens_per_second_per_user:.1f}"
        f"<td>{point.prefill_replicas}<td>{point.decode_replicas}<td>{point.gpus}"
        f"<td>{point.output_tokens_per_second_per_gpu:.1f}"
        for point in points
    )
    head = "".join(
        f"<th>{name}"
        for name in (
            f"TPOT target, ms (p{plan.targets.percentile})", "tokens/s per user", "prefill replicas",
            "decode replicas", "GPUs", "output tokens/s per GPU",
        )
    )  # fmt: skip
    return (
        '<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8"><title>rose plan</title>\n'
        "<style>body{font:15px sans-serif;max-width:70em;margin:2em auto}td,th{padding:.2em .8em;text-align:right}"
        "svg{max-width:100%;height:auto}</style>\n"
        f"<h1>Trade-off</h1>\n<p>{html.escape(plan.load.description)}</p>\n"
        f"<p><b>{html.escape(source_line(plan))}</b></p>\n"
        f"<p>Plan: {plan.prefill_replicas} prefill and {plan.decode_replicas} decode replicas, {plan.gpus} GPUs, for "
        f"TTFT &le; {plan.targets.ttft:g} s and TPOT &le; {plan.targets.tpot * 1e3:g} ms at "
        f"p{plan.targets.percentile}.</p>\n{svg}\n<table><tr>{head}{rows}</table>\n</html>\n"
    )
