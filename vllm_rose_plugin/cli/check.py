"""``rose check``: what is wrong with recipes, with no GPU at hand."""

import argparse
import os
from pathlib import Path

from vllm_rose_plugin.cli import UserError

HELP = "check recipes: vLLM's own parser and configuration, shapes, memory, KV transfer, ports, names"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``rose check``."""
    parser.add_argument("recipes", nargs="+", type=Path, metavar="RECIPE", help="recipe files, such as recipes/*.yaml")
    parser.add_argument(
        "--overlay",
        action="append",
        default=[],
        metavar="NAME",
        help="check the files with this overlay; without the option, plain and with each of their overlays",
    )
    parser.add_argument(
        "--together", action="store_true", help="the recipes run on one rack at the same time: no node or port twice"
    )
    parser.add_argument(
        "--vllm-sources",
        action="append",
        type=Path,
        metavar="DIR",
        help="also ask the vLLM whose unpacked wheel lies here (default: ROSE_VLLM_033, where that is set)",
    )


def run(args: argparse.Namespace) -> int:
    """Print findings and the memory plan of each role; 1 where anything was found."""
    from vllm_rose_plugin.recipes.check.run import check
    from vllm_rose_plugin.recipes.check.vllm_parser import VllmMissingError

    given = args.vllm_sources
    if given is None:
        given = [Path(os.environ["ROSE_VLLM_033"])] if os.environ.get("ROSE_VLLM_033") else []
    for folder in given:
        if not (folder / "vllm" / "__init__.py").is_file():
            raise UserError(f"{folder} holds no unpacked vLLM wheel (no vllm/__init__.py); see --vllm-sources")
    try:
        reports, versions = check(args.recipes, overlays=args.overlay, together=args.together, sources=[None, *given])
    except VllmMissingError as error:
        raise UserError(str(error)) from error
    found = 0
    for report in reports:
        found += len(report.findings)
        print(f"{report.title}: {'ok' if not report.findings else f'{len(report.findings)} found'}")
        for finding in report.findings:
            print(f"  {finding}")
        if not report.findings:
            for plan in report.memory:
                print(f"  {plan}")
    asked = f" with vLLM {', '.join(versions)}" if versions else ", no vLLM was asked"
    print(f"{len(reports)} checked{asked}: {'nothing found' if not found else f'{found} found'}")
    return 1 if found else 0
