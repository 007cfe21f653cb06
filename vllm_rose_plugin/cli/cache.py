"""``rose cache``: what the kernel cache holds; fill it for a model, empty it, pack it, take one in."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm_rose_plugin.cli import UserError

HELP = "list, warm, clear, export or import the compiled kernels of this machine"

_SAY_SECONDS = 10.0
"""Between two lines of progress."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``rose cache``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="every kernel with its target and config, also those that can't be used")
    listing.add_argument("--json", action="store_true", help="one JSON object per kernel and line")
    warm = actions.add_parser("warm", help="compile what a server of a model needs at its start; needs no GPU")
    warm.add_argument("--model", type=Path, required=True, help="a checkpoint folder or its config.json")
    warm.add_argument(
        "--target", action="append", required=True, metavar="TARGET", help="such as sm_100a; may be given again"
    )
    warm.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="as vllm serve will have it")
    warm.add_argument("--enable-expert-parallel", action="store_true", help="as vllm serve will have it")
    warm.add_argument(
        "--max-tokens", type=int, default=8192, metavar="N", help="of a step, --max-num-batched-tokens (8192)"
    )
    warm.add_argument("--activation", choices=("mxfp8", "bf16"), default="mxfp8", help="the plugin's setting (mxfp8)")
    clear = actions.add_parser("clear", help="remove the kernels, the verdicts of self-checks and the tuned choices")
    clear.add_argument("--family", help="only this family, such as qk_norm")
    export = actions.add_parser(
        "export", help="write the usable kernels, the verdicts and the tuned choices into a tar file"
    )
    export.add_argument("archive", type=Path, help="such as kernels.tar.gz")
    take = actions.add_parser("import", help="take what such a tar file holds into the cache")
    take.add_argument("archive", type=Path)


def run(args: argparse.Namespace) -> int:
    """Run one action; 1 where something was left out."""
    from vllm_rose_plugin.kernels.jit.store import cache_folder

    folder = cache_folder()
    if folder is None:
        raise UserError("there is no home directory; ROSE_CACHE_DIR names the cache")
    actions = {"list": _list, "warm": _warm, "clear": _clear, "export": _export, "import": _import}
    try:
        return actions[args.action](args, folder)
    except BrokenPipeError:  # of whoever reads the output, and main's affair
        raise
    except OSError as error:
        where = error.filename or folder
        raise UserError(f"{where}: {error.strerror or error}") from error


def _list(args: argparse.Namespace, folder: Path) -> int:
    from vllm_rose_plugin.kernels.jit.store import TUNED, Store
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
        tables = list((folder / TUNED).glob("*.json"))
        total = sum(entry.size for entry in entries)
        print(
            f"{len(entries)} kernels, {total / 1e6:.1f} MB, and {verdicts} verdicts in {folder}{_tables(len(tables))}"
        )
    return 1 if any(entry.fault for entry in entries) else 0


def _warm(args: argparse.Namespace, folder: Path) -> int:
    from vllm_rose_plugin.kernels.contracts import Activation
    from vllm_rose_plugin.kernels.jit.compile import counts
    from vllm_rose_plugin.kernels.jit.targets import LIMITS
    from vllm_rose_plugin.kernels.rank_shapes import RankShapes
    from vllm_rose_plugin.kernels.warm import compile_kernel, kernels

    if unknown := [target for target in args.target if target not in LIMITS]:
        raise UserError(f"--target {unknown[0]} is unknown; known: {', '.join(LIMITS)}")
    if args.max_tokens < 1:
        raise UserError(f"--max-tokens is {args.max_tokens}; it must be 1 or more")
    path = args.model / "config.json" if args.model.is_dir() else args.model
    if not path.is_file():
        raise UserError(f"--model {args.model} is no checkpoint folder (with a config.json) and no such file")
    try:
        shapes = RankShapes.of(
            json.loads(path.read_text()),
            tensor_parallel_size=args.tensor_parallel_size,
            enable_expert_parallel=args.enable_expert_parallel,
        )
        needed = [
            (target, kernel)
            for target in dict.fromkeys(args.target)
            for kernel in kernels(
                shapes, target=target, max_tokens=args.max_tokens, activation=Activation(args.activation)
            )
        ]
    except ValueError as error:
        raise UserError(f"--model {path}: {error}") from error
    targets = ", ".join(dict.fromkeys(args.target))
    stored, said = [], time.monotonic()
    try:
        for target, kernel in needed:
            stored.append(compile_kernel(kernel, target=target))
            if not stored[-1]:  # the next ones would be compiled for nothing
                raise UserError(f"{folder} does not keep what is compiled; ROSE_CACHE_DIR names another place")
            if time.monotonic() - said >= _SAY_SECONDS:
                print(f"rose cache: {len(stored)} of {len(needed)} kernels", file=sys.stderr)
                said = time.monotonic()
    except RuntimeError as error:  # the compiler is missing, mixed or too old for the target
        raise UserError(str(error)) from error
    print(f"{folder}: {len(stored)} of {len(needed)} kernels for {targets}, {counts.compiled} compiled now")
    return 0


def _tables(count: int) -> str:
    return f", choices tuned for {count} kinds of device" if count else ""


def _clear(args: argparse.Namespace, folder: Path) -> int:
    from vllm_rose_plugin.kernels.gemm.tuned import clear_tuned
    from vllm_rose_plugin.kernels.jit.store import Store
    from vllm_rose_plugin.kernels.jit.verdicts import clear_verdicts

    family = args.family
    if family is not None and not family.isidentifier():
        raise UserError(f"--family {family} is no family's name")
    kernels = Store(folder / "kernels").clear(family)
    verdicts = clear_verdicts(folder=folder, family=family)
    tables = clear_tuned(folder) if family in (None, "gemm") else 0
    print(f"removed {kernels} kernels and {verdicts} verdicts from {folder}{_tables(tables)}")
    if family is not None and not kernels + verdicts + tables:
        held = sorted({entry.path.parent.name for entry in Store(folder / "kernels").entries()})
        print(f"no {family} is there; kernels of {', '.join(held)} are" if held else "the cache holds no kernels")
    return 0


def _export(args: argparse.Namespace, folder: Path) -> int:
    from vllm_rose_plugin.kernels.jit.archive import export_cache

    report = export_cache(folder=folder, archive=args.archive)
    return _say(f"{args.archive}: wrote {_what(report)}", report.left_out)


def _import(args: argparse.Namespace, folder: Path) -> int:
    import tarfile

    from vllm_rose_plugin.kernels.jit.archive import import_cache

    try:
        report = import_cache(folder=folder, archive=args.archive)
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f"{args.archive} is not a whole tar file ({error}); nothing was imported") from error
    return _say(f"{folder}: took in {_what(report)}", report.left_out)


def _what(report: Any) -> str:
    return f"{report.kernels} kernels and {report.verdicts} verdicts{_tables(report.tables)}"


def _say(done: str, left_out: list[str]) -> int:
    print(done)
    for line in left_out:
        print(f"left out {line}")
    return 1 if left_out else 0
