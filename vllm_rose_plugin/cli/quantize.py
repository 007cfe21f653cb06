"""``rose quantize``: a BF16, FP16 or FP32 checkpoint to MXFP8."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_rose_plugin.cli import UserError

if TYPE_CHECKING:
    from vllm_rose_plugin.checkpoint.convert import Report

HELP = "convert a checkpoint to MXFP8"
_MTP = "mtp.*"


class _Ignore(argparse.Action):
    """Gathers patterns, a list for each ``--ignore``.

    argparse gives an option that takes several values all that follow it, SRC and DST too where they come last. So
    from the first such list on, argparse doesn't insist on them, and :func:`_sort_out` takes them from its end.
    """

    def __init__(self, *args: Any, places: tuple[argparse.Action, argparse.Action], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._places = places

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        given = sum(getattr(namespace, place.dest, None) is not None for place in self._places)
        groups = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*groups, (given, list(values))])
        for place in self._places:
            place.required = False


def _sort_out(args: argparse.Namespace) -> tuple[Path, Path, tuple[str, ...]]:
    """SRC, DST and the patterns.

    Raises:
        UserError: SRC and DST are not there, or may be any of several values.
    """
    groups: list[tuple[int, list[str]]] = args.ignore
    places = [place for place in (args.source, args.destination) if place is not None]
    missing = 2 - len(places)
    if missing:
        # Only the list right behind which they stood: all places given before it, and a pattern left over.
        takers = [values for given, values in groups if given == len(places) and len(values) > missing]
        if len(takers) != 1 or any(given != len(places) for given, _ in groups):
            raise UserError(
                "SRC and DST are missing: give them before --ignore (rose quantize SRC DST --ignore PATTERN …), or "
                "end the patterns with -- (--ignore PATTERN … -- SRC DST)"
            )
        (values,) = takers
        places += [Path(value) for value in values[-missing:]]
        del values[-missing:]
    return places[0], places[1], tuple(pattern for _, values in groups for pattern in values)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    source = parser.add_argument(
        "source", metavar="SRC", type=Path, help="local Hugging Face directory with safetensors"
    )
    destination = parser.add_argument(
        "destination", metavar="DST", type=Path, help="directory to make; work is kept in DST.partial"
    )
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
        action=_Ignore,
        places=(source, destination),
        default=[],
        help="modules to leave unquantized; shell wildcards, * crosses dots; may be given again",
    )
    parser.add_argument(
        "--keep-mtp",
        action="store_true",
        help=f"leave the MTP draft of SRC unquantized, the same as --ignore '{_MTP}'; without it, the draft's "
        "attention and experts are converted like the target's (mtp.fc, norms and router never are)",
    )
    parser.add_argument("--workers", metavar="N", type=int, default=2, help="threads (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Convert and print the error summary."""
    from vllm_rose_plugin.checkpoint.convert import convert
    from vllm_rose_plugin.checkpoint.headers import CheckpointError
    from vllm_rose_plugin.checkpoint.plan import Options
    from vllm_rose_plugin.checkpoint.rules import CheckpointFormat
    from vllm_rose_plugin.kernels.contracts import Rounding

    source, destination, ignore = _sort_out(args)
    ignore += (_MTP,) if args.keep_mtp else ()
    options = Options(checkpoint_format=CheckpointFormat(args.format), rounding=Rounding(args.rounding), ignore=ignore)
    try:
        report = convert(source=source, destination=destination, options=options, workers=args.workers)
    except CheckpointError as error:
        raise UserError(str(error)) from None
    print(render(report))
    print(f"wrote {destination}")
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
