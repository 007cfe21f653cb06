"""``rose cache``: what the kernel cache holds; empty it, pack it, take one in."""

import argparse
import json
from pathlib import Path

from vllm_rose_plugin.cli import UserError

HELP = "List, clear, export or import the compiled kernels of this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``rose cache``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="every kernel with its target and config, also those that can't be used")
    listing.add_argument("--json", action="store_true", help="one JSON object per kernel and line")
    clear = actions.add_parser("clear", help="remove the kernels and the verdicts of self-checks")
    clear.add_argument("--family", help="only this family, such as qk_norm")
    export = actions.add_parser("export", help="write the usable kernels and the verdicts into a tar file")
    export.add_argument("archive", type=Path, help="such as kernels.tar.gz")
    take = actions.add_parser("import", help="take the kernels and verdicts of such a tar file into the cache")
    take.add_argument("archive", type=Path)


def run(args: argparse.Namespace) -> int:
    """Run one action; 1 where something was left out."""
    from vllm_rose_plugin.kernels.jit.store import cache_folder

    folder = cache_folder()
    if folder is None:
        raise UserError("there is no home directory; ROSE_CACHE_DIR names the cache")
    actions = {"list": _list, "clear": _clear, "export": _export, "import": _import}
    try:
        return actions[args.action](args, folder)
    except BrokenPipeError:  # of whoever reads the output, and main's affair
        raise
    except OSError as error:
        where = error.filename or folder
        raise UserError(f"{where}: {error.strerror or error}") from error


def _list(args: argparse.Namespace, folder: Path) -> int:
    from vllm_rose_plugin.kernels.jit.store import Store
    from vllm_rose_plugin.kernels.jit.verdicts import VERDICTS

    entries = Store(folder / "kernels").entries()
    for entry in entries:
        family = entry.path.parent.name
        if args.json:
            facts = {"family": family, "digest": entry.path.stem, "bytes": entry.size, "fault": entry.fault}
            if entry.key:
                facts |= {"target": entry.key.target, "config": entry.key.config, "compiler": entry.key.compiler}
            print(json.dumps(facts))
        elif entry.fault or entry.key is None:
            print(f"{family:18} {entry.path.stem[:8]}  can't be used: {entry.fault}")
        else:
            print(f"{family:18} {entry.path.stem[:8]}  {entry.key.target:8} {entry.size:>8} B  {entry.key.config}")
    if not args.json:
        verdicts = len(list((folder / VERDICTS).glob("*.json")))
        total = sum(entry.size for entry in entries)
        print(f"{len(entries)} kernels, {total / 1e6:.1f} MB, and {verdicts} verdicts in {folder}")
    return 1 if any(entry.fault for entry in entries) else 0


def _clear(args: argparse.Namespace, folder: Path) -> int:
    from vllm_rose_plugin.kernels.jit.store import Store
    from vllm_rose_plugin.kernels.jit.verdicts import clear_verdicts

    family = args.family
    if family is not None and not family.isidentifier():
        raise UserError(f"--family {family} is no family's name")
    kernels = Store(folder / "kernels").clear(family)
    verdicts = clear_verdicts(folder=folder, family=family)
    print(f"removed {kernels} kernels and {verdicts} verdicts from {folder}")
    return 0


def _export(args: argparse.Namespace, folder: Path) -> int:
    from vllm_rose_plugin.kernels.jit.archive import export_cache

    report = export_cache(folder=folder, archive=args.archive)
    return _say(f"{args.archive}: wrote {report.kernels} kernels and {report.verdicts} verdicts", report.left_out)


def _import(args: argparse.Namespace, folder: Path) -> int:
    import tarfile

    from vllm_rose_plugin.kernels.jit.archive import import_cache

    try:
        report = import_cache(folder=folder, archive=args.archive)
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f"{args.archive} is not a whole tar file ({error}); nothing was imported") from error
    return _say(f"{folder}: took in {report.kernels} kernels and {report.verdicts} verdicts", report.left_out)


def _say(done: str, left_out: list[str]) -> int:
    print(done)
    for line in left_out:
        print(f"left out {line}")
    return 1 if left_out else 0
