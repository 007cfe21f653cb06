"""``rose mtp``: move an MTP draft between a directory of its own and its target's checkpoint."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_rose_plugin.cli import UserError

if TYPE_CHECKING:
    from vllm_rose_plugin.checkpoint.mtp import Summary

HELP = "attach an MTP draft to its target's checkpoint, or take it off"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Actions and their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    attach = actions.add_parser("attach", help="write a checkpoint that holds TARGET and DRAFT")
    attach.add_argument("target", metavar="TARGET", type=Path, help="Qwen3-MoE checkpoint directory")
    attach.add_argument("draft", metavar="DRAFT", type=Path, help="draft directory (Qwen3MoeMTP)")
    detach = actions.add_parser("detach", help="write OUT/target without the draft, and OUT/mtp, the draft alone")
    detach.add_argument("target", metavar="TARGET", type=Path, help="Qwen3-MoE checkpoint directory with mtp.* tensors")
    for action in (attach, detach):
        action.add_argument("out", metavar="OUT", type=Path, help="directory to make; work is kept in OUT.partial")
        action.add_argument("--copy", action="store_true", help="copy weight files instead of making hard links")


def run(args: argparse.Namespace) -> int:
    """Do it and say what came of it."""
    from vllm_rose_plugin.checkpoint import mtp
    from vllm_rose_plugin.checkpoint.headers import CheckpointError

    try:
        if args.action == "attach":
            summary = mtp.attach(target=args.target, draft=args.draft, destination=args.out, copy=args.copy)
            written = [args.out]
        else:
            summary = mtp.detach(target=args.target, destination=args.out, copy=args.copy)
            written = [args.out / mtp.TARGET_FOLDER, args.out / mtp.DRAFT_FOLDER]
    except CheckpointError as error:
        raise UserError(str(error)) from None
    print(render(summary))
    print(f"wrote {' and '.join(map(str, written))}")
    return 0


def render(summary: "Summary") -> str:
    """What was done, in a few lines."""
    kind = "MXFP8" if summary.quantized else "unquantized"
    lines = [
        f"draft: {summary.tensors} tensors, {kind}",
        f"weights: {summary.written.linked / 1e9:.3f} GB as hard links, {summary.written.copied / 1e9:.3f} GB copied",
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in summary.notes)])
