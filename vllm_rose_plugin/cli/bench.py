"""``rose bench``: measurements on a model that is served. ``mtp``: how many draft tokens the target accepts."""

import argparse
import importlib.util
import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_rose_plugin.cli import UserError

if TYPE_CHECKING:
    from vllm_rose_plugin.acceptance.measure import Source

HELP = "measure how many tokens of an MTP draft are accepted"
_EDGES = "0,128,512,2048,8192,32768"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be measured, and the arguments."""
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    mtp = subjects.add_parser("mtp", help="acceptance by draft position and by context length: JSON, CSV and a plot")
    where = mtp.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of a running vLLM server that drafts, such as http://127.0.0.1:8000")
    where.add_argument("--model", metavar="DIR", type=Path, help="start an engine in this process with this target")
    mtp.add_argument("--draft", metavar="DIR", type=Path, help="draft directory for --model; without it, the attached")
    mtp.add_argument(
        "--speculative-tokens", metavar="N", type=int, default=1, help="for --model: drafted a step (default: 1)"
    )
    mtp.add_argument(
        "--engine", metavar="JSON", default="{}", help="for --model: more arguments of vllm.LLM, as a JSON object"
    )
    what = mtp.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", metavar="FILE", type=Path, help="a long text, cut into prompts for every context")
    what.add_argument("--questions", metavar="FILE", type=Path, help="one question a line, asked in the chat template")
    mtp.add_argument(
        "--contexts",
        metavar="N,N,…",
        default=_EDGES,
        help="where ranges of context lengths begin, in tokens, ascending from 0 (default: %(default)s)",
    )
    mtp.add_argument(
        "--prompts", metavar="N", type=int, default=16, help="with --text: prompts for each context (default: 16)"
    )
    mtp.add_argument("--tokens", metavar="N", type=int, default=128, help="longest answer (default: 128)")
    mtp.add_argument("--temperature", metavar="T", type=float, default=0.0, help="0 is greedy (default: 0)")
    mtp.add_argument(
        "--concurrency", metavar="N", type=int, default=8, help="with --url: requests at once (default: 8)"
    )
    mtp.add_argument(
        "--output",
        metavar="PREFIX",
        type=Path,
        default=Path("mtp_acceptance"),
        help="writes PREFIX.json, PREFIX.csv and PREFIX.png (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, write and print a table."""
    from vllm_rose_plugin.acceptance.measure import AcceptanceError, cut_prompts, measure
    from vllm_rose_plugin.acceptance.report import as_dict, write
    from vllm_rose_plugin.acceptance.tally import Contexts

    contexts = Contexts(_edges(args.contexts))
    engine = _check(args)
    text = _read(args.text or args.questions)
    try:
        source = _source(args, engine)
        if args.text:
            prompts, notes = cut_prompts(
                source.tokenize(text),
                contexts=contexts,
                each=args.prompts,
                max_tokens=args.tokens,
                max_model_len=source.max_model_len,
            )
        else:
            notes = []
            prompts = [source.tokenize_question(line) for line in text.splitlines() if line.strip()]
            longest = max(map(len, prompts), default=0)
            if longest + args.tokens > source.max_model_len:
                raise AcceptanceError(
                    f"the longest question has {longest} tokens, and with --tokens {args.tokens} that is more than the "
                    f"model's {source.max_model_len}"
                )
        if not prompts:
            raise AcceptanceError("; ".join(notes) or f"{args.questions} holds no question")
        measurement = measure(
            source=source,
            prompts=prompts,
            contexts=contexts,
            max_tokens=args.tokens,
            temperature=args.temperature,
            progress=lambda line: print(line, file=sys.stderr),
        )
    except AcceptanceError as error:
        raise UserError(str(error)) from error
    content = as_dict(measurement)
    paths = write(content, args.output)
    print(render(content))
    for note in notes:
        print(f"note: {note}")
    print(f"wrote {', '.join(map(str, paths))}")
    return 0


def _edges(text: str) -> tuple[int, ...]:
    try:
        edges = tuple(int(part) for part in text.split(","))
    except ValueError:
        edges = ()
    if not edges or edges[0] != 0 or any(one >= two for one, two in itertools.pairwise(edges)):
        raise UserError(f"--contexts {text!r} is no ascending list of lengths from 0; write it like {_EDGES}")
    return edges


def _check(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that can be wrong before something slow begins; returns the engine's arguments."""
    for flag, least in (("speculative_tokens", 1), ("prompts", 1), ("tokens", 2), ("concurrency", 1)):
        value = getattr(args, flag)
        if value < least:
            raise UserError(f"--{flag.replace('_', '-')} {value} is out of range: give {least} or more")
    if args.temperature < 0:
        raise UserError(f"--temperature {args.temperature} is out of range: give 0 (greedy) or more")
    if args.url and args.draft:
        raise UserError("--draft goes with --model: a running server has its draft already")
    try:
        engine = json.loads(args.engine)
    except ValueError as error:
        raise UserError(f"--engine is not JSON: {error}") from None
    if not isinstance(engine, dict):
        raise UserError(f"--engine {args.engine} is no JSON object; write it like '{{\"max_model_len\": 2048}}'")
    if not args.output.parent.is_dir():
        raise UserError(f"--output {args.output}: {args.output.parent} is not a directory")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("the plot needs matplotlib: install vllm-rose-plugin[bench]")
    return engine


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read: {error}") from None


def _source(args: argparse.Namespace, engine: dict[str, Any]) -> "Source":
    if args.url:
        from vllm_rose_plugin.acceptance.server import Server

        return Server(args.url, concurrency=args.concurrency)
    from vllm_rose_plugin.acceptance.engine import Engine

    return Engine(model=args.model, draft=args.draft, speculative_tokens=args.speculative_tokens, arguments=engine)


def render(content: dict[str, Any]) -> str:
    """A table: one line for each context."""
    from vllm_rose_plugin.acceptance.report import rows

    positions = content["speculative_tokens"]
    lines = [f"{'context':>12} {'drafts':>8} " + "".join(f"{f'at {n + 1}':>8}" for n in range(positions)) + "  a step"]
    by_context: dict[str, list[dict[str, Any]]] = {}
    for row in rows(content):
        by_context.setdefault(row["context"], []).append(row)
    for context, found in by_context.items():
        rates = "".join(f"{row['acceptance']:>8.1%}" for row in found)
        lines.append(f"{context:>12} {found[0]['drafts']:>8} {rates}  {found[0]['mean_accepted_length']:.2f}")
    return "\n".join(lines)
