"""The plan and the simulation in words and numbers."""

from typing import Any

from vllm_rose_plugin.planner.plan import PERCENTILES, Plan
from vllm_rose_plugin.planner.simulate import Result


def source_line(plan: Plan) -> str:
    """Where the capacity figures come from, as one line (also of comments); stands in every output."""
    file = plan.capacity.file
    return f"capacity {file.source.upper()}: {' '.join(file.description.split())}"


def render_plan(plan: Plan) -> str:
    """The table that `rose plan` prints."""
    roles, targets = plan.capacity.file, plan.targets
    rows = [
        ("", "prefill", "decode"),
        ("replicas", str(plan.prefill_replicas), str(plan.decode_replicas)),
        ("GPUs of one", str(roles.prefill.gpus), str(roles.decode.gpus)),
        (
            "GPUs",
            str(plan.prefill_replicas * roles.prefill.gpus),
            f"{plan.decode_replicas * roles.decode.gpus}   (total {plan.gpus})",
        ),
        (
            "busiest window",
            f"{plan.prefill_utilization:.0%} busy",
            f"{plan.batch_mean:.1f} requests each, p{targets.percentile} {plan.batch_high}, threshold "
            f"{plan.batch_threshold}",
        ),
    ]
    lines = [source_line(plan), f"load {plan.load.description}"]
    if plan.load.rate == 0:
        lines.append("no load: one replica of each role keeps the service up; the claims are of a request alone")
    if plan.load.burst:
        lines.append(f"warning: {plan.load.burst}")
    if plan.tokens_per_step != 1:
        lines.append(f"drafting: {plan.tokens_per_step:.3f} tokens per step")
    lines.append("")
    lines += [f"{name:<16}{prefill:<16}{decode}".rstrip() for name, prefill, decode in rows]
    lines += ["", f"{'claim':<16}" + "".join(f"{f'p{share}':>10}" for share in PERCENTILES) + "    target"]
    for name, claims, target, scale, unit in (
        ("TTFT", plan.claims.ttft, targets.ttft, 1.0, "s"),
        ("TPOT", plan.claims.tpot, targets.tpot, 1e3, "ms"),
    ):
        values = "".join(f"{claims[share] * scale:>10.3f}" for share in PERCENTILES)
        lines.append(f"{f'{name}, {unit}':<16}{values}    p{targets.percentile} <= {target * scale:g}")
    return "\n".join(lines)


def render_simulation(plan: Plan, result: Result) -> str:
    """What the simulation found, beside the claims."""
    lines = [
        f"simulation of {len(result.outcomes):,} requests, {result.seconds:,.1f} s until the last token: prefill "
        f"{result.prefill_utilization:.0%} busy, {result.mean_batch:.1f} requests per decoder on average, at most "
        f"{result.max_batch}"
    ]
    if result.lost_decoders:
        lines.append(
            f"{result.lost_decoders} of {plan.decode_replicas} decoders lost; {result.resent:,} requests sent again"
        )
    if result.unserved:
        lines.append(f"{result.unserved:,} requests were never served: no decoder was left")
    lines.append(f"{'':<16}" + "".join(f"{f'p{share}':>10}{'claim':>10}" for share in PERCENTILES))
    for name, found, claims, scale in (
        ("TTFT, s", result.ttft(), plan.claims.ttft, 1.0),
        ("TPOT, ms", result.tpot(), plan.claims.tpot, 1e3),
    ):
        if found:
            lines.append(
                f"{name:<16}"
                + "".join(f"{found[share] * scale:>10.3f}{claims[share] * scale:>10.3f}" for share in PERCENTILES)
            )
    missed = missed_targets(plan, result)
    lines.append("targets held" if not missed else "targets missed: " + "; ".join(missed))
    return "\n".join(lines)


def missed_targets(plan: Plan, result: Result) -> list[str]:
    """The targets that the simulation didn't hold, with what it found at the target's percentile."""
    targets = plan.targets
    missed = [f"{result.unserved:,} requests unserved"] if result.unserved else []
    for name, values, target in (
        ("TTFT", [outcome.ttft for outcome in result.outcomes], targets.ttft),
        ("TPOT", [outcome.tpot for outcome in result.outcomes], targets.tpot),
    ):
        known = [value for value in values if value is not None]
        late = sum(value > target for value in known)
        if late > (1 - targets.percentile / 100) * len(known):
            missed.append(f"{name} over {target:g} s in {late / len(known):.1%} of the requests")
    return missed


def as_json(plan: Plan, result: Result | None) -> dict[str, Any]:
    """The same for programs. Times in seconds."""
    answer: dict[str, Any] = {
        "schema": 1,
        "capacity": {"source": plan.capacity.file.source, "description": plan.capacity.file.description},
        "load": plan.load.description,
        "warning": plan.load.burst,
        "targets": {"ttft": plan.targets.ttft, "tpot": plan.targets.tpot, "percentile": plan.targets.percentile},
        "replicas": {"prefill": plan.prefill_replicas, "decode": plan.decode_replicas},
        "gpus": plan.gpus,
        "tokens_per_step": plan.tokens_per_step,
        "busiest_window": {
            "prefill_utilization": plan.prefill_utilization,
            "batch_mean": plan.batch_mean,
            "batch_high": plan.batch_high,
            "batch_threshold": plan.batch_threshold,
        },
        "claims": {"ttft": plan.claims.ttft, "tpot": plan.claims.tpot},
    }
    if result is not None:
        answer["simulation"] = {
            "requests": len(result.outcomes),
            "unserved": result.unserved,
            "resent": result.resent,
            "lost_decoders": result.lost_decoders,
            "ttft": result.ttft(),
            "tpot": result.tpot(),
            "prefill_utilization": result.prefill_utilization,
            "batch_mean": result.mean_batch,
            "batch_most": result.max_batch,
            "missed": missed_targets(plan, result),
        }
    return answer
