"""``rose doctor``: can this machine serve through the plugin, and if not, why."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from vllm_rose_plugin.cli import UserError

HELP = "say whether serving can work here, and what each missing thing costs"

JSON_SCHEMA = 1
"""Raised when a key of ``--json`` is renamed or removed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.add_argument(
        "--probe-multicast",
        action="store_true",
        help="also create and free a real multicast object over all GPUs of this host. Not done unasked: on a host "
        "whose GPUs are shared, a multicast set-up that fails half-way can disturb the other users",
    )
    parser.add_argument(
        "--group",
        type=int,
        metavar="N",
        help="also let N processes, on one GPU each, share memory and write to each other, as the ranks of a server do",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 where serving can work and the ranks of --group share memory, 1 otherwise."""
    from vllm_rose_plugin.doctor.collect import collect
    from vllm_rose_plugin.doctor.judge import judge, serving_can_work
    from vllm_rose_plugin.doctor.text import render

    if sys.stderr.isatty():
        print("looking at versions, seams and GPUs; this takes some seconds", file=sys.stderr)
    if args.group is not None and args.group < 2:
        raise UserError(f"--group {args.group}: a group has 2 ranks or more")
    facts = collect(try_multicast=args.probe_multicast, group_size=args.group)
    findings = judge(facts)
    serving = serving_can_work(findings)
    if args.json:
        answer: dict[str, Any] = {
            "schema": JSON_SCHEMA,
            "serving": serving,
            "findings": [asdict(finding) for finding in findings],
            **asdict(facts),
        }
        print(json.dumps(answer, indent=2))
    else:
        print(render(facts, findings))
    return 0 if serving and (facts.group is None or facts.group.works) else 1
