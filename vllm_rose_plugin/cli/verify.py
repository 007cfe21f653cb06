"""``rose verify``: read an MXFP8 checkpoint back."""

import argparse
import json
from pathlib import Path

HELP = "check an MXFP8 checkpoint"
_SHOWN = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="checkpoint directory")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    parser.add_argument("--workers", metavar="N", type=int, default=2, help="threads that scan (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print the verdict; 0 for a sound checkpoint, 1 for one with faults."""
    from vllm_rose_plugin.checkpoint.verify import verify
    from vllm_rose_plugin.cli import UserError

    if args.workers < 1:
        raise UserError(f"--workers {args.workers} is out of range: give 1 or more")
    if not args.directory.is_dir():
        raise UserError(f"{args.directory} is not a directory: give a checkpoint directory")
    verdict = verify(args.directory, workers=args.workers)
    if args.json:
        print(json.dumps(verdict.as_dict(), indent=2))
        return 0 if verdict.ok else 1
    for kind, texts in (("fault", verdict.faults), ("warning", verdict.warnings)):
        for text in texts[:_SHOWN]:
            print(f"{kind}: {text}")
        if len(texts) > _SHOWN:
            print(f"{kind}: … and {len(texts) - _SHOWN} more (--json shows all)")
    print(
        f"{verdict.directory}: {verdict.tensors:,} tensors, {verdict.quantized:,} quantized "
        f"({verdict.format or 'no format'}, rounding {verdict.rounding or 'not recorded'}), "
        f"{verdict.total_bytes / 1e9:.3f} GB, {verdict.zero_scale_share:.2%} of the scale codes are 0"
    )
    count = len(verdict.faults)
    print("sound" if verdict.ok else "1 fault" if count == 1 else f"{count} faults")
    return 0 if verdict.ok else 1
