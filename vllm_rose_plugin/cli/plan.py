"""``rose plan``: how many prefill and decode replicas a load needs."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_rose_plugin.planner.load import Load, Request
    from vllm_rose_plugin.planner.plan import Plan
    from vllm_rose_plugin.planner.simulate import Result

HELP = "size prefill and decode for a load, and check the plan by simulation"
_SIMULATED_SECONDS = 300.0
_MOST_SIMULATED = 300_000
_SHORTEST_WINDOW = 1e-3
_SAME = Path("-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    capacity = parser.add_argument_group("capacity of one replica of each role")
    capacity.add_argument("--capacity", metavar="FILE", type=Path, help="capacity file (docs/planner.md)")
    capacity.add_argument(
        "--capacity-from",
        metavar="BENCH.json",
        type=Path,
        nargs="+",
        help="print a capacity file made from results of `vllm bench serve`, and stop",
    )
    capacity.add_argument("--acceptance", metavar="FILE", type=Path, help="JSON with acceptance_by_position of a draft")
    load = parser.add_argument_group("load: --rate, --input and --output, or --trace")
    load.add_argument("--rate", metavar="R", type=float, help="requests per second")
    lengths = "N, uniform:LOW:HIGH or lognormal:MEDIAN:P95:MOST"
    load.add_argument("--input", metavar="TOKENS", help=f"prompt lengths: {lengths}")
    load.add_argument("--output", metavar="TOKENS", help=f"output lengths: {lengths}")
    load.add_argument("--trace", metavar="FILE", type=Path, help="JSONL trace of requests")
    load.add_argument(
        "--window",
        metavar="SECONDS",
        type=float,
        default=20.0,
        help="a trace is taken as steady over this long; shorter than its bursts (default: %(default)g)",
    )
    targets = parser.add_argument_group("targets")
    targets.add_argument(
        "--ttft", metavar="SECONDS", type=float, default=2.0, help="to the first token (default: %(default)g)"
    )
    targets.add_argument(
        "--tpot", metavar="MS", type=float, default=50.0, help="per token after it (default: %(default)g)"
    )
    targets.add_argument(
        "--percentile", metavar="P", type=int, default=95, help="of requests that hold them (default: %(default)s)"
    )
    targets.add_argument("--gpus", metavar="N", type=int, help="most GPUs there are")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print the plan as JSON")
    output.add_argument("--png", metavar="FILE", type=Path, help="draw the trade-off curve")
    output.add_argument("--html", metavar="FILE", type=Path, help="the curve and its table as a page without network")
    output.add_argument("--emit", choices=("metrics",), help="print autoscaling rules as YAML in place of the plan")
    output.add_argument(
        "--name", default="rose", help="--emit: workloads are NAME-prefill, NAME-decode (default: rose)"
    )
    output.add_argument("--namespace", default="default", help="--emit: theirs (default: %(default)s)")
    output.add_argument(
        "--kind", choices=("LeaderWorkerSet", "Deployment"), default="LeaderWorkerSet", help="--emit: theirs"
    )
    output.add_argument(
        "--prometheus",
        metavar="URL",
        default="http://prometheus.monitoring:9090",
        help="--emit: the server that KEDA asks (default: %(default)s)",
    )
    simulation = parser.add_argument_group("simulation")
    simulation.add_argument(
        "--simulate",
        metavar="TRACE",
        type=Path,
        nargs="?",
        const=_SAME,
        help="replay a trace against the plan; without TRACE the load's own, or 300 random seconds of it",
    )
    simulation.add_argument(
        "--lose-decoder-at",
        metavar="SECONDS",
        type=float,
        action="append",
        default=[],
        help="lose a decoder for good; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan; 0 where plan and simulation hold the targets, 1 where they don't."""
    from vllm_rose_plugin.cli import UserError
    from vllm_rose_plugin.planner.load import LoadError
    from vllm_rose_plugin.planner.plan import PlanError, Unreachable
    from vllm_rose_plugin.recipes.finding import RecipeError

    try:
        if args.capacity_from:
            return _print_capacity(args.capacity_from)
        return _plan(args)
    except (LoadError, PlanError, RecipeError) as error:
        raise UserError(str(error)) from None
    except ModuleNotFoundError as error:
        if error.name not in ("simpy", "matplotlib"):
            raise
        raise UserError(f"{error.name} isn't installed; pip install 'vllm_rose_plugin[plan]'") from None
    except Unreachable as error:
        print(f"rose plan: {error}", file=sys.stderr)
        return 1


def _plan(args: argparse.Namespace) -> int:
    from vllm_rose_plugin.planner.capacity import load_capacity
    from vllm_rose_plugin.planner.curve import trade_off, write_curve
    from vllm_rose_plugin.planner.plan import Targets, make_plan, read_acceptance
    from vllm_rose_plugin.planner.report import as_json, missed_targets, render_plan, render_simulation

    _check(args)
    capacity = load_capacity(args.capacity)
    acceptance = read_acceptance(args.acceptance) if args.acceptance else []
    load, trace = _load(args)
    plan = make_plan(
        load=load,
        capacity=capacity,
        targets=Targets(ttft=args.ttft, tpot=args.tpot / 1e3, percentile=args.percentile),
        acceptance=acceptance,
        gpus=args.gpus,
    )
    if args.png or args.html:
        write_curve(plan, trade_off(plan, acceptance=acceptance), png=args.png, page=args.html)
    if args.emit:
        _print_metrics(plan, args)
        return 0
    result = _simulate(plan, trace, acceptance, args)
    if args.json:
        print(json.dumps(as_json(plan, result), indent=2))
    else:
        print(render_plan(plan))
        if result is not None:
            print(f"\n{render_simulation(plan, result)}")
    return 1 if result is not None and missed_targets(plan, result) else 0


def _check(args: argparse.Namespace) -> None:
    from vllm_rose_plugin.cli import UserError

    if args.capacity is None:
        raise UserError("--capacity FILE is needed: what one replica of each role can do (docs/planner.md)")
    given = [flag for flag in ("rate", "input", "output") if getattr(args, flag) is not None]
    if bool(args.trace) == bool(given) or (given and len(given) < 3):
        raise UserError("give the load as --rate, --input and --output, or as --trace FILE")
    for flag in ("capacity", "acceptance", "trace", "simulate"):
        file = getattr(args, flag)
        if file not in (None, _SAME) and not file.is_file():
            raise UserError(f"--{flag} {file}: no such file")
    for flag in ("png", "html"):
        file = getattr(args, flag)
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise UserError(f"--{flag} {file}: give a file in a folder that exists")
    for flag, unit in (("ttft", "seconds"), ("tpot", "ms"), ("window", "seconds")):
        if not 0 < getattr(args, flag) < float("inf"):
            raise UserError(f"--{flag} {getattr(args, flag):g} is out of range: give {unit} above 0")
    if args.window < _SHORTEST_WINDOW:
        raise UserError(f"--window {args.window:g} is out of range: give seconds from {_SHORTEST_WINDOW:g} up")
    if args.rate is not None and not 0 <= args.rate < float("inf"):
        raise UserError(f"--rate {args.rate:g} is out of range: give requests per second from 0 up")
    if not 1 <= args.percentile <= 99:
        raise UserError(f"--percentile {args.percentile} is out of range: give 1 to 99")
    if args.gpus is not None and args.gpus < 1:
        raise UserError(f"--gpus {args.gpus} is out of range: give 1 or more")
    if args.lose_decoder_at and not args.simulate:
        raise UserError("--lose-decoder-at is part of a simulation: add --simulate")
    for at in args.lose_decoder_at:
        if not 0 <= at < float("inf"):
            raise UserError(f"--lose-decoder-at {at:g} is out of range: give seconds from 0 up")
    if args.emit and (args.json or args.simulate):
        raise UserError("--emit prints rules in place of the plan: leave out --json and --simulate")
    # These become names of objects and parts of queries.
    for flag, pattern, legal in (
        ("name", r"[a-z]([a-z0-9-]{0,53}[a-z0-9])?", "a-z, 0-9 and -, a letter first, at most 55 characters"),
        ("namespace", r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "a-z, 0-9 and -, at most 63 characters"),
        ("prometheus", r"https?://[!-~]+", "an http:// or https:// address"),
    ):
        if not re.fullmatch(pattern, getattr(args, flag)):
            raise UserError(f"--{flag} {getattr(args, flag)!r}: give {legal}")


def _load(args: argparse.Namespace) -> "tuple[Load, Callable[[], list[Request]]]":
    """The load to plan for, and what makes the trace that goes with it, once there is a plan."""
    from vllm_rose_plugin.planner.load import Lengths, distribution, from_trace, poisson_trace, read_trace

    if args.trace:
        requests = read_trace(args.trace)
        return from_trace(requests, window_seconds=args.window, name=args.trace.name), lambda: requests
    lengths = {
        "inputs": Lengths.parse(args.input, flag="--input"),
        "outputs": Lengths.parse(args.output, flag="--output"),
    }
    load = distribution(rate=args.rate, **lengths)
    return load, lambda: poisson_trace(rate=args.rate, seconds=_SIMULATED_SECONDS, seed=0, **lengths)


def _simulate(
    plan: "Plan", made: "Callable[[], list[Request]]", acceptance: list[float], args: argparse.Namespace
) -> "Result | None":
    from vllm_rose_plugin.cli import UserError
    from vllm_rose_plugin.planner.load import read_trace
    from vllm_rose_plugin.planner.simulate import simulate

    if args.simulate is None:
        return None
    if args.simulate == _SAME and (args.rate or 0) * _SIMULATED_SECONDS > _MOST_SIMULATED:
        raise UserError(
            f"--simulate: {_SIMULATED_SECONDS:g} s of --rate {args.rate:g} are more than {_MOST_SIMULATED:,} requests; "
            "give a trace of fewer (--simulate TRACE), or plan a share of this rate"
        )
    trace = made() if args.simulate == _SAME else read_trace(args.simulate)
    if not trace:
        raise UserError(f"--simulate: at --rate {args.rate:g} no request comes in {_SIMULATED_SECONDS:g} s")
    return simulate(
        requests=trace,
        capacity=plan.capacity,
        prefill_replicas=plan.prefill_replicas,
        decode_replicas=plan.decode_replicas,
        acceptance=acceptance,
        lose_decoder_at=args.lose_decoder_at,
    )


def _print_metrics(plan: "Plan", args: argparse.Namespace) -> None:
    from vllm_rose_plugin.planner.autoscaling import metrics_documents
    from vllm_rose_plugin.planner.report import source_line

    print(f"# {source_line(plan)}\n# load {plan.load.description}")
    print(
        "# 1: rules for Prometheus. 2: for prometheus-adapter, where HPAs are used. Then for each role a ScaledObject"
    )
    print("# (KEDA) and a HorizontalPodAutoscaler: apply the one or the other, never both.")
    documents = metrics_documents(
        plan, name=args.name, namespace=args.namespace, kind=args.kind, prometheus=args.prometheus
    )
    _print_yaml(documents)


def _print_capacity(paths: list[Path]) -> int:
    from vllm_rose_plugin.planner.bench_capacity import capacity_from_bench

    data = capacity_from_bench(paths, description=f"vllm bench serve, {len(paths)} runs; say on what hardware")
    print(
        "# Replace each null: GPUs of a replica, the KV cache of a decoder over all ranks (vLLM logs it), the transfer."
    )
    _print_yaml([data])
    return 0


def _print_yaml(documents: list[dict[str, Any]]) -> None:
    import yaml

    print(yaml.safe_dump_all(documents, sort_keys=False, width=1000, default_flow_style=None), end="")
