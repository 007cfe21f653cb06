"""``rose quantize``: a BF16, FP16 or FP32 checkpoint to MXFP8."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_rose_plugin.cli import UserError

if TYPE_CHECKING:
    from vllm_rose_plugin.checkpoint.convert import Report

HELP = "convert a checkpoint to MXFP8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("source", metavar="SRC", type=Path, help="local Hugging Face directory with safetensors")
    parser.add_argument("destination", metavar="DST", type=Path, help="directory to make; work is kept in DST.partial")
    parser.add_argument(
        "--format",
        choices=("modelopt", "compressed-tensors"),
        default="modelopt",
        help="quantization config to write (default: %(default)s)",
    )
    parser.add_argument(
        "--rounding",
        choices=("rceil", "floor"),
        default="rceil",
        help="how a block's scale is chosen: rceil never saturates, floor is the OCP MX rule (default: %(default)s)",
    )
    parser.add_argument(
        "--ignore",
        metavar="PATTERN",
        nargs="+",
        action="extend",
        default=[],
        help="modules to leave unquantized; shell wildcards, * crosses dots",
    )
    parser.add_argument("--workers", metavar="N", type=int, default=2, help="threads (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Convert and print the error summary."""
    from vllm_rose_plugin.checkpoint.convert import convert
    from vllm_rose_plugin.checkpoint.headers import CheckpointError
    from vllm_rose_plugin.checkpoint.plan import Options
    from vllm_rose_plugin.checkpoint.rules import CheckpointFormat
    from vllm_rose_plugin.kernels.contracts import Rounding

    options = Options(
        checkpoint_format=CheckpointFormat(args.format), rounding=Rounding(args.rounding), ignore=tuple(args.ignore)
    )
    try:
        report = convert(source=args.source, destination=args.destination, options=options, workers=args.workers)
    except CheckpointError as error:
        raise UserError(str(error)) from None
    print(render(report))
    print(f"wrote {args.destination}")
    return 0


def _natural(name: str) -> list[str | int]:
    """Sort key that puts layer 2 before layer 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def render(report: "Report") -> str:
    """The per-layer table and the total."""
    rows = sorted(report.layers.items(), key=lambda row: _natural(row[0]))
    rows.append(("total", report.total))
    width = max(len("layer"), *(len(name) for name, _ in rows))
    lines = [f"{'layer':<{width}}  {'weights':>15}  {'relative RMS':>12}  {'max error':>10}"]
    lines += [
        f"{name:<{width}}  {error.elements:>15,}  {error.relative_rms:>12.6f}  {error.max_error:>10.3e}"
        for name, error in rows
    ]
    lines += [f"note: {note}" for note in report.notes]
    if report.resumed_shards:
        lines.append(f"resumed: {report.resumed_shards} finished shards were kept")
    lines.append(f"{report.source_bytes / 1e9:.3f} GB became {report.output_bytes / 1e9:.3f} GB")
    return "\n".join(lines)
